"""Cases of sharded training that several processes run together; each returns what has to be alike, or true."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import NumericsError
from halfstep.errors import HalfstepError, SessionError
from halfstep.sharded import is_sharded
from halfstep.train.cast.casting import Casting
from halfstep.train.cast.recipes import RECIPES, round_operand
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.moments import Moments
from halfstep.train.optim.optimizers import TABLE
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.processes.shards import Part, local, reshard
from tests.replicas import Sent, digest

LEVELS = ("O1", "O2", "O3")
LOWS = ("bf16", "fp16")
VOCABULARY, WIDTH, LENGTH, BATCH = 37, 24, 6, 8


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, tied=False, hidden=65):  # 65 rows: uneven over 2 and 4
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 1)  # 1 row, 1 bias: empty parts
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x * torch.sigmoid(self.gate(x)))


class Rounded(nn.Module):
    """A model that reads low-rounded weights, unsharded: the reference for what is gathered low."""

    def __init__(self, net, low, *, exact=()):
        super().__init__()
        self.net, self.low, self.exact = net, low, exact

    def forward(self, ids):
        read = {name: p if name in self.exact else p.to(self.low).float() for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, read, (ids,), tie_weights=True)


def data(step):
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return ids, (ids * 7 + 3) % VOCABULARY


def made(*, tied=False, frozen=False, hidden=65):
    torch.manual_seed(0)
    net = Net(tied=tied, hidden=hidden)
    if frozen:
        net.blocks[0].up.weight.requires_grad_(False)
        net.embed.weight.requires_grad_(False)
    return net


def shard(net, level, low, *, exact=False, **options):
    policy = halfstep.fsdp_policy(level, low=low)
    if exact:
        norms = [module for module in net.modules() if isinstance(module, nn.LayerNorm)]
        fully_shard(norms, mp_policy=halfstep.fsdp_policy("O0"), **options)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(net, mp_policy=policy, **options)
    return net


def adamw(net):
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-3)


def loss_of(model, step, rank, size, share=0, shares=1):
    """Returns the loss of one of `shares` micro-batches of what one of `size` processes has of a batch."""
    ids, targets = (t.chunk(size * shares)[rank * shares + share] for t in data(step))
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def mean(value, size):
    total = value.detach().clone()
    if size > 1:
        dist.all_reduce(total)
    return (total / size).item()


def train(model, optimizer, session, steps, *, rank=0, size=1, shares=1, start=0, sync=None, alone=False):
    """Trains; returns the mean loss of all processes, or this one's `alone`, and the norm of each step."""
    losses, norms = [], []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for share in range(shares):
            if sync is not None:
                model.set_requires_gradient_sync(sync or share == shares - 1)
            loss = loss_of(model, step, rank, size, share, shares)
            session.backward(loss / shares)
            total = total + loss.detach() / shares
        record = session.step(max_norm=1.0)
        losses.append(mean(total, 1 if alone else size))
        norms.append(float(record.grad_norm))
    return losses, norms


AS_STORED = {  # unsharded levels with fp32 masters, which therefore read low-rounded weights
    "O2": {"plan": "O2", "master": "copy"},
    "O3": {"plan": "O2", "norms": "low", "master": "copy", "loss_scale": 1.0},
}


class Foreign(torch.optim.AdamW):
    """An optimizer that halfstep has no update for."""


def foreign(net):
    return Foreign([p for p in net.parameters() if p.requires_grad], lr=3e-3)


def plain(level, low, steps, *, optimizer=adamw, **options):
    """Trains the unsharded reference, which reads its weights low-rounded; at O2 but for the norms'."""
    net = made(**options)
    stepped = optimizer(net)
    model, plan = net, dict(AS_STORED.get(level, ()))
    if not plan:
        model, plan = Rounded(net, halfstep.level("O1", low).low.dtype), {"plan": level}
    elif low == "bf16":
        plan.pop("loss_scale", None)
    with halfstep.initialize(model, stepped, low=low, **plan) as session:
        found = train(model, stepped, session, steps)
    return *found, digest(whole(net))


def whole(net):
    """Returns the weights, whole in each process."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in net.state_dict().values()]


def checkpointed(net):
    for block in net.blocks:
        own = block.forward
        block.forward = functools.partial(checkpoint, own, use_reentrant=False)
    return net


def trained(
    rank,
    level,
    low,
    steps,
    *,
    shares=1,
    sync=None,
    made_with=None,
    optimizer=adamw,
    again=False,
    compiled=None,
    loss_scale=None,
    **options,
):
    """Trains a sharded model; returns losses, norms, and what the weights are in the end.

    `again` has its blocks computed again in the backward pass, `compiled` has them compiled so.
    """
    size = dist.get_world_size()
    net = made(**(made_with or {}))
    for block in net.blocks if compiled else ():
        block.compile(backend=compiled)
    net = shard(checkpointed(net) if again else net, level, low, **options)
    stepped = optimizer(net)
    session = halfstep.initialize(net, stepped, level, low=low, loss_scale=loss_scale)
    losses, norms = train(net, stepped, session, steps, rank=rank, size=size, shares=shares, sync=sync)
    scales, skipped = session.status().scales, session.status().skipped
    session.close()
    return losses, norms, digest(whole(net)), scales, skipped


def halved(rank, level, low, steps, **kwargs):
    """Trains where halves of losses have the halves of gradients: at O3 in fp16 most would be subnormal."""
    return trained(rank, level, low, steps, loss_scale=8192.0 if (level, low) == ("O3", "fp16") else None, **kwargs)


def variant(rank, level, low, kwargs):
    return trained(rank, level, low, 3, **kwargs)


def sent(rank, level, low):
    """Returns what a step sends, what a training step in all gathers and reduces, and how many parameters there are."""
    size = dist.get_world_size()
    net = shard(made(), level, low)
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, level, low=low)
    train(net, optimizer, session, 1, rank=rank, size=size)
    optimizer.zero_grad()
    with Sent() as around, Scalars() as read:
        session.backward(loss_of(net, 5, rank, size))
    with Sent() as in_step, Scalars() as read:
        session.step(max_norm=1.0)
    memory = session.status().memory
    here = sum(p.to_local().numel() for p in net.parameters())
    session.close()
    return in_step.seen, around.seen, len(list(net.parameters())), read.count, memory, here


class Scalars(TorchDispatchMode):
    """Counts reads of device values by the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar" in func._schema.name or "is_nonzero" in func._schema.name
        return func(*args, **(kwargs or {}))


def between(rank, level, low):
    """Evaluates before and between steps, closes, and trains on as torch would; returns what has to be alike."""
    size = dist.get_world_size()
    net = shard(made(), level, low)
    optimizer = adamw(net)
    evaluated = []

    def evaluate():
        net.eval()
        with torch.no_grad():
            evaluated.append(float(mean(loss_of(net, 77, rank, size), size)))
        net.train()

    evaluate()
    session = halfstep.initialize(net, optimizer, level, low=low)
    for step in range(3):
        evaluate()
        train(net, optimizer, session, 1, rank=rank, size=size, start=step)
    evaluate()
    names = session.status().nonfinite_parameters
    session.close()
    weights = digest(whole(net))
    before = {id(p) for p in optimizer.param_groups[0]["params"]}
    optimizer.zero_grad()
    loss_of(net, 50, rank, size).backward()
    optimizer.step()
    after = {p.dtype for p in net.parameters()}
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules() if isinstance(m, nn.LayerNorm)]
    fresh = shard(made(), level, low)
    twin = adamw(fresh)
    session = halfstep.initialize(fresh, twin, level, low=low)
    train(fresh, twin, session, 3, rank=rank, size=size)
    session.close()
    changed = digest(whole(net)) != weights
    alike = before == {id(p) for p in net.parameters()}
    return [digest(whole(fresh)) == weights, changed, alike, after == {torch.float32}, not any(hooks), names], evaluated


class Spoiled(torch.autograd.Function):
    """Passes a loss on, and NaN in place of its gradient."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


def faulty(rank, level, low, what):
    """Trains 4 steps, in the second of which something is wrong in process 1 alone; returns what all must agree on."""
    size = dist.get_world_size()
    net = shard(made(), level, low)
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, level, low=low)
    skips, bad = [], None
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(net, step, rank, size)
        wrong = step == 1 and rank == size - 1
        before = digest(whole(net)) if step == 1 else None
        if wrong and what == "loss":
            loss = loss + torch.inf  # whose gradients are finite
        elif wrong and what == "batch":
            loss = loss * torch.nan
        elif wrong and what == "gradient":
            loss = Spoiled.apply(loss)
        session.backward(loss)
        if wrong and what == "shard":
            net.blocks[1].up.weight.grad.to_local().view(-1)[-1] = torch.inf
        record = session.step(max_norm=1.0)
        skips.append(bool(record.skipped))
        if step == 1:
            status = session.status()
            bad = status.nonfinite_gradients, status.spoiled_by, digest(whole(net)) == before
    found = skips, bad, session.status().scales, digest(whole(net))
    session.close()
    return found


def said(run):
    """Returns what is raised; None where nothing is."""
    try:
        run()
    except HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return None


def hybrid(rank, level, low):
    """Trains on a mesh of replicas by shards; half of the processes hold the same."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return trained(rank, level, low, 3, mesh=mesh)


def parallel(rank, level, low, kind):
    """Trains with tensor parallelism in the blocks, alone or under FSDP2 over the other half of a mesh."""
    size = dist.get_world_size()
    net = made(hidden=64)
    copies, shape = (1, (size,)) if kind == "alone" else (2, (2, size // 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if copies > 1:
        shard(net, level, low, mesh=mesh["data"])
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, level, low=low)
    share = rank // (size // copies)
    losses, norms = train(net, optimizer, session, 4, rank=share, size=copies, alone=True)
    optimizer.zero_grad()
    loss = loss_of(net, 9, share, copies)
    session.backward(loss + torch.inf if rank == size - 1 else loss)
    skipped = bool(session.step().skipped), session.status().spoiled_by
    state = digest(whole(net))
    session.close()
    return losses, norms, state, skipped


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.norm(x).to_local().float().sum() + 0 * self.linear(x).float().sum()


def summed(rank, level):
    """Returns the gradient of a bias of SequenceParallel under FSDP2, to which two processes add 1 and 2**-10."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    net = Both()
    parallelize_module(net.norm, mesh["tensor"], SequenceParallel())
    fully_shard(net, mesh=mesh["data"], mp_policy=halfstep.fsdp_policy(level, low="bf16"))
    found = []
    with halfstep.initialize(net, adamw(net), level, low="bf16") as session:
        for last in (True, False, True):
            net.set_requires_gradient_sync(last)
            session.backward(net(torch.ones(1, 1, 4)) * 2.0 ** (-10 * rank))
            found.append(net.norm.bias.grad.full_tensor()[0].item())
    return found


def unfrozen(rank, level, group):
    """Trains with one block's weight or all of its group frozen, then unfreezes; returns whether all are trained."""
    net = made()
    frozen = list(net.blocks[0].parameters()) if group else [net.blocks[0].up.weight]
    for p in frozen:
        p.requires_grad_(False)
    shard(net, level, "bf16")
    optimizer, size = torch.optim.AdamW(net.parameters(), lr=3e-3), dist.get_world_size()
    with halfstep.initialize(net, optimizer, level, low="bf16") as session:
        train(net, optimizer, session, 2, rank=rank, size=size)
        before = whole(net)
        net.requires_grad_()
        train(net, optimizer, session, 2, rank=rank, size=size, start=2)
    return not any(map(torch.equal, before, whole(net)))


LARGE = {"full": 65, "8bit": 201}  # rows: for moments in codes as many as make weights of 4096 elements
MATRICES = (6, 1024), (7, 700), (7, 96), (5, 3, 640)  # rows: uneven over 2 and 3, fewer elements than codes are for


def coded(rank, kept, *dims):
    """Returns the bits of ten updates, coded or Muon's, of weights split along `dims` of a mesh (None: replicated)."""
    size = dist.get_world_size() if dims else 1
    shape = (size,) if len(dims) < 2 else (2, size // 2)
    mesh = init_device_mesh("cpu", shape) if dims else None
    g = torch.Generator().manual_seed(0)

    def spread(t):
        where = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return t if mesh is None else distribute_tensor(t, mesh, where)

    muon = kept == "muon"  # which takes matrices alone
    shapes, cls = (MATRICES[:3], torch.optim.Muon) if muon else (MATRICES, torch.optim.AdamW)
    params = [nn.Parameter(spread(torch.randn(shape, generator=g))) for shape in shapes]
    optimizer = cls(params, lr=1e-2, weight_decay=0.1)
    moments = Moments(optimizer, "bf16" if muon else kept, (), lambda p: str(tuple(p.shape)))
    stepper = OnePassStepper(optimizer, MasterStore("none", torch.bfloat16), TABLE[cls], moments=moments)
    for _ in range(10):
        grads = [local(spread(torch.randn(shape, generator=g) ** 5)) for shape in shapes]
        stepper.step(params, grads, None, torch.tensor(False))
    state = [t for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
    return [digest([t.full_tensor() if is_sharded(t) else t]) for t in [*params, *state]]


def states(net, optimizer):
    """Returns a number of the whole fp32 weights and optimizer states, which is that of no other bits."""
    model, optim = get_state_dict(net, optimizer)
    values = [t for _, t in sorted(model.items())]
    for _, state in sorted(optim["state"].items()):
        values += [torch.as_tensor(value).float() for _, value in sorted(state.items())]
    formats = {t.dtype for t in values}
    return len(values), formats == {torch.float32}, digest([t.full_tensor() if is_sharded(t) else t for t in values])


def saved(rank, level, low, folder, moments="full"):
    """Trains, saves in two formats, and trains on; returns what was saved, and what came of it."""
    size = dist.get_world_size()
    net = shard(made(hidden=LARGE[moments]), level, low)
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, level, low=low, moments=moments)
    train(net, optimizer, session, 3, rank=rank, size=size)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim, "session": session.state_dict()}, checkpoint_id=f"{folder}/dcp")
    full_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_state_dict(net, optimizer, options=full_state)
    if rank == 0:
        torch.save([*full, session.state_dict()], f"{folder}/full.pt")
    dist.barrier()
    before = states(net, optimizer)
    after = train(net, optimizer, session, 3, rank=rank, size=size, start=3)
    found = before, after, [states(net, optimizer), session.state_dict()]
    session.close()
    return found


def loaded(rank, level, low, folder, form, kind, moments="full"):
    """Loads into other weights, of a `kind` of training; returns what came, and what came of further training."""
    size = dist.get_world_size()
    net = made(hidden=LARGE[moments])
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    net = shard(net, level, low) if kind == "sharded" else net
    optimizer = adamw(net)
    session = None if kind == "torch" else halfstep.initialize(net, optimizer, level, low=low, moments=moments)
    if form == "full":
        model, optim, state = torch.load(f"{folder}/full.pt", weights_only=False)
        given = ({}, {}) if rank and kind == "sharded" else (model, optim)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=kind == "sharded")
        set_model_state_dict(net, given[0], options=options)
        set_optimizer_state_dict(net, optimizer, given[1], options=options)
    else:
        with torch.no_grad():
            loss_of(net, 70, rank, size)  # leaves the root whole
        model, optim = get_state_dict(net, optimizer)
        saved = {"model": model, "optim": optim} | ({} if session is None else {"session": session.state_dict()})
        dcp.load(saved, checkpoint_id=f"{folder}/dcp")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
        state = saved.get("session")
    before = states(net, optimizer)
    if session is None:
        return before, None, None
    session.load_state_dict(state)
    after = train(net, optimizer, session, 3, rank=rank, size=size, start=3)
    found = before, after, [states(net, optimizer), session.state_dict()]
    session.close()
    return found


def stopping(rank):
    """Trains on a loss that is infinite in process 1 alone; returns the step that raised, and the verdict's kind."""
    size = dist.get_world_size()
    net = shard(made(), "O1", "bf16")
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, "O1", low="bf16")
    try:
        for _ in range(40):
            optimizer.zero_grad()
            loss = loss_of(net, 0, rank, size)
            session.backward(loss + torch.log(torch.zeros(())) if rank == 1 else loss)
            session.step()
    except NumericsError as error:
        return session.status().steps, error.verdict.kind
    finally:
        session.close()
    return None


class Distance(nn.Module):
    """A model whose backward pass divides by zero: the derivative of sqrt at 0."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.up(x)
        apart = (h - h.detach()).square().sum(-1).sqrt()
        return self.down(h) + apart.unsqueeze(-1)


def undefined(rank, low, kind):
    """Trains with gradients that are NaN in all processes; returns what the verdict says."""
    torch.manual_seed(0)
    net = Distance()
    for module in (net.up, net.down, net) if kind == "layers" else (net,):
        fully_shard(module, mp_policy=halfstep.fsdp_policy("O2", low=low))
    session = halfstep.initialize(net, adamw(net), "O2", low=low, loss_scale="dynamic")
    try:
        for step in range(40):
            session.backward(net(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean())
            session.step()
            net.zero_grad()
    except NumericsError as error:
        return error.verdict.kind, error.verdict.operator, error.verdict.phase
    finally:
        session.close()
    return None


def differing(rank, what):
    """Opens sessions that are not alike in the processes; returns the error."""
    net = made()
    if what == "gathering" and rank:
        fully_shard(net.blocks[1], mp_policy=halfstep.fsdp_policy("O0"))
    elif what == "reducing" and rank:
        fully_shard(net.blocks[0], mp_policy=halfstep.fsdp_policy("O1", low="bf16", reduce="bf16"))
    for module in (*net.blocks, net):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mp_policy=halfstep.fsdp_policy("O1", low="bf16"))
    trained = made() if what == "raising" and rank else net
    optimizer = torch.optim.AdamW(list(trained.parameters())[rank if what == "optimizer" else 0 :], lr=1e-3)
    low, level = "bf16", {"plan": ("O1", "O2"), "O0": ("O0", "O1")}.get(what, ("O1", "O1"))[rank]
    opened = []

    def run():
        opened.append(halfstep.initialize(net, optimizer, level, low=low))
        opened[0].backward(loss_of(net, 0, rank, dist.get_world_size()))
        opened[0].step()

    found = said(run)
    for session in opened:
        session.close()
    return found


def loss_of_parts(rank, level, low):
    """Returns losses of a head whose logits and loss are DTensors, and the steps skipped; the third loss is inf."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    inputs, targets = torch.randn(4, 8), torch.randint(32, (4,))
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=3e-2), []
    with halfstep.initialize(net, optimizer, level, low=low) as session, loss_parallel():
        for factor in (1, 1, math.inf, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs).float(), targets) * factor
            assert isinstance(loss, DTensor)
            session.backward(loss)
            session.step()
            losses.append(loss.full_tensor().item())
        return [losses, session.status().skipped]


def hooked(rank, engine):
    """Trains with two optimizers, of one of which a pre-hook raises in process 1, which wants to step again.

    Returns what was raised, and how many steps were counted.
    """
    size = dist.get_world_size()
    net = shard(made(), "O2", "bf16") if engine == "FSDP2" else made()
    weights = list(net.parameters())
    optimizers = [torch.optim.AdamW(some, lr=3e-3) for some in (weights[:5], weights[5:])]
    session = halfstep.initialize(net, optimizers, "O2", low="bf16")
    model = net if engine == "FSDP2" else nn.parallel.DistributedDataParallel(net)
    found = []
    for step in range(4):

        def hook(*_, step=step):
            if rank == 1 and step in (1, 2):
                raise KeyError(step)

        handle = optimizers[step % 2].register_step_pre_hook(hook)
        net.zero_grad()
        session.backward(loss_of(model, step, rank, size))
        try:
            session.step(max_norm=1.0)
        except KeyError as error:
            found += [str(error), said(session.step)]
        handle.remove()
    count = session.state_dict()["steps"]
    session.close()
    return found, count


def refused(rank, what):
    """Asks a session for what needs a copy of its sharded model; returns the error."""
    net = shard(made(), "O1", "bf16")
    session = halfstep.initialize(net, adamw(net), "O1", low="bf16")
    ask = {"blame": halfstep.blame, "check": halfstep.check}[what]
    found = said(lambda: ask(session, lambda: loss_of(net, 0, rank, dist.get_world_size())))
    session.close()
    return found


def overflowing(**options):
    net = made(**options)
    with torch.no_grad():
        net.blocks[1].norm.weight.fill_(3e4)  # so that the product that follows is beyond fp16
    return net


def told(ask, whole, model):
    """Returns what blame or check says of a model, of a batch of process 1 in words that do not hang on bits."""
    found = ask(whole, lambda: loss_of(model, 0, 1, 2))
    each = found if isinstance(found, tuple) else [found]
    return [[one.kind if ask is halfstep.blame else one.code, one.place, str(one.cure)] for one in each]


ASKS = {"blame": halfstep.blame, "check": halfstep.check}


def gathered(rank, what, kind="sharded"):
    """Asks process 1 of a copy of a sharded model after a skipped step; returns what it says, and what has changed.

    `kind` is "sharded", "tensor" for tensor parallel blocks alone, or "both" for these under FSDP2 in four processes.
    """
    hidden, size = 65 if kind == "sharded" else 64, dist.get_world_size()
    net = overflowing(hidden=hidden)
    shape = (2, size // 2) if kind == "both" else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    for block in net.blocks if kind != "sharded" else ():
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "tensor":
        shard(net, "O1", "fp16", mesh=mesh["data"] if kind == "both" else mesh)
    share, shares = (rank // 2, 2) if kind == "both" else (rank, size) if kind == "sharded" else (0, 1)
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, "O1", low="fp16")
    train(net, optimizer, session, 1, rank=share, size=shares, alone=kind != "sharded")
    before = states(net, optimizer), session.state_dict()
    build = functools.partial(made, hidden=hidden)
    found = halfstep.on_gathered_copy(session, build, lambda *given: told(ASKS[what], *given), rank=1)
    unchanged = (states(net, optimizer), session.state_dict()) == before
    train(net, optimizer, session, 1, rank=share, size=shares, alone=kind != "sharded")
    goes_on = session.status().steps == 2
    session.close()
    return found, unchanged, goes_on


def not_gathered(rank):
    """Asks of copies that cannot be made, or raises there; returns the error of each."""
    net = shard(made(), "O1", "bf16")
    session = halfstep.initialize(net, adamw(net), "O1", low="bf16")

    def ask(build, ask=lambda whole, model: None, rank=0):
        try:
            return str(halfstep.on_gathered_copy(session, build, ask, rank=rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def fails(whole, model):
        raise KeyError("its own")

    with patch("halfstep.explain.diagnose.rehearsal.free_bytes", lambda device: 1000):
        small = ask(made)
    found = {
        "small": small,
        "other": ask(lambda: made(hidden=33)),
        "several": ask(lambda: [made(), made()]),
        "no model": ask(lambda: 1),
        "raises": ask(made, fails),
        "not sent": ask(made, lambda whole, model: lambda: 0),
        "rank": ask(made, rank=2),
        "fits": ask(made),
    }
    session.close()
    found["closed"] = ask(made)
    return found


def leaving(rank, folder, size, how):
    """Trains under a short timeout until the last process leaves in a step; the others write what they get."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=10)
    )
    level = "O2" if how.endswith("O2") else "O1"
    in_parts = how in ("sharded", "fewer", "sharded raises", "initialize")
    model = shard(made(), level, "bf16") if in_parts else made()
    optimizer = adamw(model)
    if how == "initialize":
        if rank == size - 1:
            os._exit(0)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(said(lambda: halfstep.initialize(model, optimizer))))
        os._exit(0)
    session = halfstep.initialize(model, optimizer, level, low="bf16")
    wrapped = model if in_parts else nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        leaves = step == 1 and rank == size - 1
        if leaves and how.startswith("backward"):
            model.blocks[0].up.weight.register_hook(lambda grad: os._exit(0))
        before = digest([p.to_local() if is_sharded(p) else p for p in model.parameters()])
        try:
            loss = loss_of(wrapped, step, rank, size)
            if leaves and how.endswith("raises"):
                return  # as a script whose own code has raised
            session.backward(loss)
            if leaves:
                if how == "fewer":
                    time.sleep(20)  # later than the timeout
                os._exit(0)
            session.step()
        except SessionError as error:
            reshard([model])  # what was gathered for the backward pass is still there
            after = digest([p.to_local() if is_sharded(p) else p for p in model.parameters()])
            (Path(folder) / f"{rank}.json").write_text(json.dumps([step, after == before, str(error)]))
            os._exit(0)
    os._exit(1)


def unopened(rank, folder):
    """Wraps a model that has a session in process 0 alone, which writes what it gets."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = made()
    if rank == 0:
        halfstep.initialize(model, adamw(model), "O2", low="bf16")
        answer = said(lambda: nn.parallel.DistributedDataParallel(model))
        (Path(folder) / "0.json").write_text(json.dumps(answer))
    else:
        with pytest.raises(RuntimeError, match="DDP expects same model"):
            nn.parallel.DistributedDataParallel(model)
    os._exit(0)


def cut_short(rank, folder, how):
    """Loads a checkpoint of which the part of process 1 is missing or cut, as docs/processes.md writes it.

    Returns the error, and whether weights, states, scales and further training are what they would be without it.
    """
    size = dist.get_world_size()
    nets = [shard(made(), "O2", "fp16") for _ in range(2)]
    optimizers = [adamw(net) for net in nets]
    sessions = [halfstep.initialize(net, opt, "O2", low="fp16") for net, opt in zip(nets, optimizers, strict=True)]
    for net, optimizer, session in zip(nets, optimizers, sessions, strict=True):
        train(net, optimizer, session, 2, rank=rank, size=size)
    net, optimizer, session = nets[0], optimizers[0], sessions[0]
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim, "session": session.state_dict()}, checkpoint_id=folder)
    for each in zip(nets, optimizers, sessions, strict=True):
        train(*each, 1, rank=rank, size=size, start=2)
    file = Path(folder) / "__1_0.distcp"
    if rank == 0:
        file.unlink() if how == "missing" else os.truncate(file, file.stat().st_size // 2)
    dist.barrier()
    model, optim = get_state_dict(net, optimizer)
    saved = copy.deepcopy({"model": model, "optim": optim, "session": session.state_dict()})
    try:
        dcp.load(saved, checkpoint_id=folder)
        found = None
    except CheckpointException as error:
        found = str(error)
    same = [states(net, opt) for net, opt in zip(nets, optimizers, strict=True)]
    after = [train(*each, 2, rank=rank, size=size, start=3) for each in zip(nets, optimizers, sessions, strict=True)]
    alike = same[0] == same[1] and after[0] == after[1] and sessions[0].state_dict() == sessions[1].state_dict()
    for each in sessions:
        each.close()
    return found, alike


def by_recipe(rank, products, kind):
    """Returns losses and weights of a model whose layers multiply by a recipe; each process has the same batches."""
    torch.manual_seed(0)
    hidden = 48 if kind == "odd" else 256
    net = nn.Sequential(nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32), nn.GELU(), nn.Linear(32, 16))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(torch.randn_like(p).mul(3).exp())  # so far apart that scales decide what becomes 0
    if kind in ("tp", "odd", "both", "own"):
        shape = (2, dist.get_world_size() // 2) if kind == "both" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
        net = parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind in ("fsdp", "both"):
        options = {"mesh": mesh["data"]} if kind == "both" else {}
        for each in (*net[::2], net):
            fully_shard(each, mp_policy=halfstep.fsdp_policy("O2", low="bf16"), **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    multiplies = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::_scaled_mm_v2", "CPU"
    )  # in torch 2.11 nothing does
    own = kind == "own" and multiplies
    units = patch.object(Casting, "_units", lambda self, emulate: "own") if own else nullcontext()
    with units, halfstep.initialize(net, optimizer, "O2", low="bf16", products=products) as session:
        model = torch.nn.parallel.DistributedDataParallel(net) if kind == "ddp" else net
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(step))
            try:
                loss = model(x).square().mean()
            except HalfstepError as error:
                return str(error)
            session.backward(loss)
            session.step()
            losses.append(loss.item())
        return [losses, digest(whole(net))]


def parts_cast(rank, products):
    """Returns whether parts of operands are cast as the whole is, along both dimensions, with a NaN in the last one."""
    size, seed, found = dist.get_world_size(), torch.tensor(7), []
    whole = torch.randn(128 * size, 128 * size, generator=torch.Generator().manual_seed(0)) ** 5
    spoiled = whole.clone()
    spoiled[-1, -1] = torch.nan
    for cast, x, dim in itertools.product(dict.fromkeys(RECIPES[products].casts.values()), (whole, spoiled), (0, 1)):
        part, expected = Part(dist.group.WORLD, dim), round_operand(x, cast, seed=seed)
        if not (cast.rotated and dim == 1):  # what that product sums over is never split
            given = round_operand(x.chunk(size, dim)[rank], cast, seed=seed, part=part)
            found.append(
                torch.equal(given.values.nan_to_num(1e9), expected.values.nan_to_num(1e9).chunk(size, dim)[rank])
            )
    return found
