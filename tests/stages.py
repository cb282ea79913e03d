"""Cases that two processes run together, each on a stage of one pipeline."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.errors import SessionError, SetupError
from tests.replicas import DDP, SETTINGS, digest, weights

BATCHES = 2  # small ones in a step


class Spoilt(torch.autograd.Function):
    """Makes the gradients below it infinite, while `on`."""

    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf if Spoilt.on else grad


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 12, bias=False)

    def forward(self, x):
        return self.b(Spoilt.apply(self.a(x)).relu())


def whole():
    torch.manual_seed(0)
    return nn.ModuleList([First(), nn.Linear(12, 4)])


def data(step):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].tanh()


def optimizers_of(model, *, apart):
    """One optimizer, or one for each parameter."""
    held = [[p] for p in model.parameters()] if apart else [list(model.parameters())]
    return [torch.optim.SGD(each, lr=0.1) for each in held]


def alone(setting, steps=4):
    """Trains the whole model in one process; returns the weights of its parts, and the norms of the gradients."""
    model = whole()
    level, options = SETTINGS[setting]
    (optimizer,) = optimizers_of(model, apart=False)
    session = halfstep.initialize(list(model), optimizer, level, **options)
    norms = []
    for step in range(steps):
        x, y = data(step)
        Spoilt.on = step == 1
        optimizer.zero_grad()
        for a, b in zip(x.chunk(BATCHES), y.chunk(BATCHES), strict=True):
            session.backward((model[1](model[0](a)) - b).square().mean() / BATCHES)
        norms.append(float(session.step(max_norm=0.2).grad_norm))
    found = [weights(each) for each in model], norms, session.status().scales
    session.close()
    return found


def scheduled(rank, setting, wrap=None):
    """Trains a stage by torch's schedule; an infinite gradient appears in the first stage alone, in the second step."""
    # Imported here: in a process that has loaded it each session looks for stages among all objects.
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    at = rank % 2
    stage, stages = whole()[at], None
    level, options = SETTINGS[setting]
    if wrap is not None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
        stages = mesh["stages"].get_group()
    if wrap == "FSDP2":
        fully_shard(stage, mesh=mesh["data"], mp_policy=halfstep.fsdp_policy(level, low=options["low"]))
    optimizers = optimizers_of(stage, apart=at == 0)
    session = halfstep.initialize(stage, optimizers, level, **options)

    def loss_fn(out, target):
        return (out - target).square().mean() * scale

    if wrap == "DDP":  # without the option torch's reducer fails at the second step of a schedule, in fp32 too
        wrapped = DDP(stage, process_group=mesh["data"].get_group(), find_unused_parameters=True)
    pipeline = PipelineStage(wrapped if wrap == "DDP" else stage, at, 2, torch.device("cpu"), group=stages)
    schedule = ScheduleGPipe(pipeline, n_microbatches=BATCHES, loss_fn=loss_fn)
    norms, said = [], []
    for step in range(4):
        x, y = data(step)
        Spoilt.on = step == 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        with session.scaling() as scale:
            schedule.step(x) if at == 0 else schedule.step(target=y)
        norms.append(float(session.step(max_norm=0.2).grad_norm))
        said.append((session.status().spoiled_by, session.status().nonfinite_gradients))
    state = get_model_state_dict(stage, options=StateDictOptions(full_state_dict=True))
    found = digest(state.values()), norms, session.status().scales, session.status().skipped, said
    session.close()
    return found


def replicated(rank, setting, wrap):
    """Trains stages that are each sharded over two processes, or replicated in them, all with the same batch."""
    return scheduled(rank, setting, wrap)


def given_by_hand(rank):
    """Sends activations and gradients by hand, in fp16, with the group passed; returns the scale, and the skip."""
    stage, session = by_hand(rank, process_group=dist.group.WORLD)
    x, y = data(0)
    Spoilt.on = True
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        dist.recv(grad := torch.empty_like(out), 1)
        with session.scaling():
            out.backward(grad)
    else:
        dist.recv(came := torch.empty(8, 12), 0)
        session.backward((stage(came.requires_grad_()) - y).square().mean())
        dist.send(came.grad, 0)
    skipped = bool(session.step().skipped)
    found = session.status().scales[0], skipped
    session.close()
    return found


def unknown_by_hand(rank):
    """Enters `scaling` without losses where no group was passed; returns the error."""
    stage, session = by_hand(rank)
    with session:
        out = stage(torch.ones(2, 8 if rank == 0 else 12))
        try:
            with session.scaling(*([] if rank == 0 else [out.sum()])):
                pass
        except SessionError as error:
            return str(error)
    return None


def by_hand(rank, **options):
    stage = whole()[rank]
    return stage, halfstep.initialize(stage, optimizers_of(stage, apart=False), "O1", low="fp16", **options)


def refused(rank):
    """Passes groups that are not one, that have no effect, or that lack a replica; returns the errors."""
    model = whole()[1]
    (optimizer,) = optimizers_of(model, apart=False)
    groups = [dist.new_group([each]) for each in range(2)]
    said = []
    for level, group in (("O1", groups[1 - rank]), ("O1", rank), ("O0", dist.group.WORLD)):
        try:
            halfstep.initialize(model, optimizer, level, low="fp16", process_group=group)
        except SetupError as error:
            said.append(str(error))
    with halfstep.initialize(model, optimizer, "O1", low="fp16", process_group=groups[rank]) as session:
        wrapped = DDP(model)
        try:
            session.backward(wrapped(torch.ones(2, 12)).sum())
        except SetupError as error:
            said.append(str(error))
    return said
