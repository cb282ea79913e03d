"""Cases that several processes run together, each on a replica; `run` returns what each of them found."""

from __future__ import annotations

import copy
import datetime
import gc
import hashlib
import json
import logging
import pickle
import warnings
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock  # which torch needs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep
from halfstep import NumericsError, Scaling, machine
from halfstep.errors import HalfstepError, SessionError, SetupError
from tests import forks

DDP = nn.parallel.DistributedDataParallel
SETTINGS = {
    "O0": ("O0", {}),
    "O1 bf16": ("O1", {"low": "bf16"}),
    "O1 fp16": ("O1", {"low": "fp16"}),
    "O2 bf16 split": ("O2", {"low": "bf16", "master": "split"}),
    "O2 bf16 copy": ("O2", {"low": "bf16", "master": "copy"}),
    "O2 fp16": ("O2", {"low": "fp16"}),
    "O3 bf16": ("O3", {"low": "bf16"}),
    "O3 fp16": ("O3", {"low": "fp16"}),
}
MODES = ("seeds", "checkpoint", "infinite loss", "NaN gradient", "join", "full weights")
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "NAdam": torch.optim.NAdam,
}
DIFFERING = {
    "plan": ("O2 bf16 split", "O2 bf16 copy"),
    "level": ("O0", "O1 bf16"),
    "level of process 1": ("O1 bf16", "O0"),
}
WRAPPINGS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
}


class Sent(TorchDispatchMode):
    """Notes each collective operation and its bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append([func._schema.name, sum(t.nbytes for t in sent)])
        return func(*args, **(kwargs or {}))


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def batch(rank, step):
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return inputs, (inputs[:, :4] * 0.5).tanh()


def digest(tensors):
    """Returns what two lists of tensors have in common only if all their bits are the same."""
    data = b"".join(str((t.dtype, t.shape)).encode() + pickle.dumps(t.detach().float().numpy()) for t in tensors)
    return hashlib.sha256(data).hexdigest()


def weights(model):
    return digest(model.state_dict().values())


def opened(rank, setting, *, seed=None, optimizer=torch.optim.AdamW, **changes):
    model = network(rank if seed is None else seed)
    made = optimizer(model.parameters(), lr=1e-2)
    level, kwargs = SETTINGS[setting]
    return model, made, halfstep.initialize(model, made, level, **kwargs, **changes)


def agreeing(rank, setting, mode, steps):
    """Trains replicas that begin differently, and returns what has to be the same in all of them."""
    model, optimizer, session = opened(rank, setting)
    if mode == "checkpoint" and rank == 0:
        model.load_state_dict({key: value * 1.1 + 0.01 for key, value in model.state_dict().items()})
    before = weights(model)
    wrapped = DDP(model)
    found = {"wrapped": weights(model), "skips": [], "names": [], "norms": []}
    with ExitStack() as stack:
        if mode == "join":
            stack.enter_context(wrapped.join())
        for step in range(steps + (4 * rank if mode == "join" else 0)):
            if mode == "full weights" and step == 2:
                with session.full_weights():
                    pass
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            out = wrapped(inputs)
            bad = rank == 1 and step == 2
            if bad and mode == "NaN gradient" and setting != "O0":
                out.register_hook(lambda g: g * torch.nan)
            loss = (out - targets).square().mean()
            session.backward(loss + torch.inf if bad and mode in ("infinite loss", "join") else loss)
            record = session.step(max_norm=1.0)
            if mode != "join":
                found["skips"].append(bool(record.skipped))
                found["norms"].append(float(record.grad_norm))
            if step == 2:
                found["names"] = session.status().nonfinite_gradients
    status = session.status()
    found |= {"stored": digest(model.parameters()), "state": weights(model), "scales": status.scales}
    found |= {"bad losses": status.bad_losses} if mode != "join" else {}
    session.close()
    found["closed"] = digest(model.parameters())
    return found, before


def wrapping(rank, setting, kwargs):
    """Trains with accumulation and two losses a step through a wrapper; returns the weights."""
    model, optimizer, session = opened(rank, setting)
    wrapped = DDP(model, **WRAPPINGS[kwargs])
    for step in range(4):
        optimizer.zero_grad()
        passes = [False, True] if kwargs != "static" else [True]
        for reduced in passes:
            inputs, targets = batch(rank, 2 * step + reduced)
            with ExitStack() as stack:
                if not reduced:
                    stack.enter_context(wrapped.no_sync())
                loss = (wrapped(inputs) - targets).square().mean()
                spoiled = rank == 1 and step == 1 and reduced == passes[0]
                session.backward(loss + torch.inf if spoiled else loss, loss_id=int(reduced))
        session.step()
    found = weights(model), session.status().scales, session.status().skipped
    session.close()
    return found


def several(rank, setting):
    """Trains two wrapped models with an optimizer each, stepped apart."""
    models = [network(rank), network(rank + 5)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    level, kwargs = SETTINGS[setting]
    session = halfstep.initialize(models, optimizers, level, **kwargs)
    first, second = (DDP(model) for model in models)
    for step in range(4):
        inputs, targets = batch(rank, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        session.backward((first(inputs) - targets).square().mean() + (torch.inf if rank == step == 1 else 0.0))
        session.step(optimizers[0])
        loss = (second(inputs) - targets).square().mean()
        session.backward(loss * torch.nan if step == 2 and rank == 0 else loss, loss_id=1)
        session.step(optimizers[1], max_norm=0.5)
    found = [weights(model) for model in models], session.status().scales, session.status().skipped
    session.close()
    return found


def sparse(rank, low):
    """Returns the gradient of an embedding whose row 1 gets 1 of process 0 and 2**-10 of process 1, at O2."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with halfstep.initialize(table, optimizer, "O2", low=low, loss_scale=1.0) as session:
        wrapped = DDP(table)
        session.backward(wrapped(torch.tensor([1])).float().sum() * 2.0 ** (-10 * rank))
        return table.weight.grad.to_dense().tolist()


def in_parts(rank):
    """Returns losses of an optimizer that keeps each state in one process, its skipped steps, and what O2 says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = network(0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(
        SetupError, match=r"ZeroRedundancyOptimizer updates some of the weights .*O2.*; use O1, or shard"
    ):
        halfstep.initialize(model, optimizer, "O2", low="bf16")
    losses = []
    with halfstep.initialize(model, optimizer, "O1", low="bf16") as session:
        wrapped = DDP(model)
        for step in range(4):
            inputs, targets = batch(rank, 0)
            optimizer.zero_grad()
            loss = (wrapped(inputs) - targets).square().mean()
            session.backward(loss * torch.inf if rank == 1 and step == 2 else loss)
            session.step()
            losses.append(loss.item())
        skipped, found = session.status().skipped, weights(model)
    return found, skipped, losses[1] < losses[0] and losses[3] < losses[1]


def part_of_a_model(rank, setting):
    """Wraps all but the last layer, whose gradients differ between processes; returns the weights of both."""
    model, optimizer, session = opened(rank, setting)
    body = DDP(model[:3])
    norms = []
    for step in range(4):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        with session.autocast():
            out = model[3](body(inputs)).float()
        session.backward((out - targets).square().mean())
        norms.append(float(session.step(max_norm=0.1).grad_norm))
    found = weights(model[:3]), norms, weights(model[3])
    session.close()
    return found


def collectives(rank, setting):
    """Returns what steps send: without a wrapper, the first with one, and a later one; and how many parameters."""
    model, optimizer, session = opened(rank, setting)
    wrapped = None
    found = []
    for step in range(3):
        if step == 1:
            wrapped = DDP(model)
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        session.backward(((model if wrapped is None else wrapped)(inputs) - targets).square().mean())
        with Sent() as sent:
            session.step(max_norm=1.0)
        found.append(sent.seen)
    count = len(list(model.parameters()))
    session.close()
    return found[0], found[2], count


def spoiler(rank, size):
    """Returns which processes had an infinite loss in a step, after it and after the next."""
    model, optimizer, session = opened(rank, "O1 bf16")
    wrapped = DDP(model)
    found = []
    for step in range(2):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        bad = step == 0 and rank in (size - 1, 1)
        session.backward((wrapped(inputs) - targets).square().mean() + (torch.inf if bad else 0.0))
        session.step()
        found.append(session.status().spoiled_by)
    session.close()
    return found


def stopping(rank):
    """Trains on a loss that is infinite on rank 1 alone; returns the step that raised, and the verdict's kind."""
    model, optimizer, session = opened(rank, "O1 bf16")
    wrapped = DDP(model)
    inputs, targets = batch(rank, 0)
    try:
        for _ in range(40):
            optimizer.zero_grad()
            loss = (wrapped(inputs) - targets).square().mean()
            session.backward(loss + torch.log(torch.zeros(())) if rank == 1 else loss)
            session.step()
    except NumericsError as error:
        return session.status().steps, error.verdict.kind, error.verdict.evidence
    finally:
        session.close()
    return None


def differing(rank, what):
    """Wraps or steps what is not alike in the processes; returns the error."""
    session = halfstep.initialize(nn.Linear(1, 1), plan="O0")
    try:
        if what in DIFFERING:
            model, optimizer, session = opened(0, DIFFERING[what][rank])
            DDP(model)
        elif what == "level, wrapped before":
            model = network(0)
            wrapped, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
            session = halfstep.initialize(model, optimizer, f"O{rank}", low="bf16")
        else:
            model = network(0)
            trained = list(model.parameters())[rank:]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            session = halfstep.initialize(model, optimizer, "O1", low="bf16")
            wrapped = DDP(model)
            session.backward(wrapped(batch(rank, 0)[0]).square().mean())
            session.step()
    except HalfstepError as error:
        return str(error)
    finally:
        session.close()
    return None


class Said(logging.Handler):
    """Keeps the warnings that halfstep logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logger = logging.getLogger("halfstep")
        self.before = logger.level
        logger.setLevel(logging.WARNING)
        logger.addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("halfstep").setLevel(self.before)
        logging.getLogger("halfstep").removeHandler(self)


def one_step(wrapped, optimizer, session, rank, step, **kwargs):
    inputs, targets = batch(rank, step)
    optimizer.zero_grad()
    session.backward((wrapped(inputs) - targets).square().mean(), **kwargs)
    return session.step()


def rates(rank, setting):
    """Wraps optimizers with other options in each process; returns the options, and the weights after training."""
    model, optimizer, session = opened(rank, setting)
    rate = torch.tensor(1e-2 * (rank + 1))
    optimizer.param_groups[0].update(lr=rate, betas=(0.9 - 0.3 * rank, 0.99), weight_decay=0.1 * (rank + 1))
    wrapped = DDP(model)
    group = optimizer.param_groups[0]
    found = float(group["lr"]), list(group["betas"]), group["weight_decay"], group["lr"] is rate
    for step in range(2):
        one_step(wrapped, optimizer, session, rank, step)
    state = weights(model)
    session.close()
    return found, state


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


def recurrent(rank, setting):
    """Trains an LSTM under accumulation; returns its weights, the formats of its gradients, and skips."""
    torch.manual_seed(rank)
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    level, kwargs = SETTINGS[setting]
    session = halfstep.initialize(model, optimizer, level, **kwargs)
    wrapped = DDP(model)
    for step in range(4):
        optimizer.zero_grad()
        for turn in range(2):
            inputs, targets = batch(rank, 2 * step + turn)
            session.backward((wrapped(inputs) - targets).square().mean() / 2)
        session.step()
    found = weights(model), sorted({str(p.grad.dtype) for p in model.parameters()}), session.status().skipped
    session.close()
    return found


def agreed_on(rank):
    """Opens a session as on processors of two classes; returns whether it emulates."""
    row = (machine.AVX2, machine.AVX512_BF16)[rank % 2]
    with patch.object(machine, "read_processor", lambda: row):
        session = halfstep.initialize(nn.Linear(2, 2), None, "O1", low="bf16")
    found = session.state_dict()["emulate"]
    session.close()
    return found


def own_pass_in_join(rank):
    """Has an infinite loss in a backward pass that the loop makes, within join; returns weights, scales and skips."""
    model, optimizer, session = opened(rank, "O2 fp16", optimizer=torch.optim.SGD, loss_scale="dynamic")
    wrapped = DDP(model)
    with wrapped.join():
        for step in range(4 + rank):
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            loss = (wrapped(inputs) - targets).square().mean()
            loss = loss + torch.inf if rank == 1 and step == 2 else loss
            with session.scaling(loss) as scale:
                (loss * scale).backward()
            session.step()
    found = weights(model), session.status().scales
    session.close()
    return found


def loaded_alone(rank, setting, who):
    """Loads a checkpoint into some of the processes of a wrapped model; returns what is said in each later step."""
    model, optimizer, session = opened(rank, setting)
    wrapped = DDP(model)
    one_step(wrapped, optimizer, session, rank, 0)
    if rank in who:
        model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()})
    said = []
    for step in range(1, 10):
        with Said() as heard:
            one_step(wrapped, optimizer, session, rank, step)
        said.append(heard.lines)
    session.close()
    return said


def scaled_alone(rank):
    """Loads another loss scale into process 1 of a wrapped model; returns the error, and whether weights changed."""
    model, optimizer, session = opened(rank, "O2 fp16", loss_scale="dynamic")
    wrapped = DDP(model)
    one_step(wrapped, optimizer, session, rank, 0)
    state = session.state_dict()
    before = weights(model)
    if rank == 1:
        state["scales"]["0"]["scale"] /= 4
        session.load_state_dict(state)
    try:
        one_step(wrapped, optimizer, session, rank, 1)
    except SessionError as error:
        return str(error), weights(model) == before, session.status().skipped
    finally:
        session.close()
    return None


def reduced_by_hand(rank):
    """Reduces gradients in the loop itself, one loss in process 1 being NaN; returns the scales, and what is said."""
    model, optimizer, session = opened(0, "O1 fp16", loss_scale="dynamic")
    for step in range(3):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        session.backward(loss * torch.nan if rank == step == 1 else loss)
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
        session.step()
    found = weights(model), session.state_dict()["scales"]
    session.close()
    return found


def many_losses(rank):
    """Has losses 7, 8 and 62, process 1 an infinite penalty in the 8th; returns scales, and the error for a 63rd."""
    model, optimizer, session = opened(rank, "O1 fp16", loss_scale="dynamic")
    wrapped = DDP(model)
    optimizer.zero_grad()
    for loss_id in (7, 8, 62):
        inputs, targets = batch(rank, loss_id)
        loss = (wrapped(inputs) - targets).square().mean()
        if rank == 1 and loss_id == 8:
            zero = torch.zeros(1, requires_grad=True)
            (steep,) = session.grad(zero.sqrt().sum(), zero, loss_id=8)  # as at a scale that is too high
            loss = loss + steep.sum()
        session.backward(loss, loss_id=loss_id)
    session.step()
    scales = session.status().scales
    try:
        one_step(wrapped, optimizer, session, rank, 1, loss_id=63)
    except SessionError as error:
        return scales, str(error)
    finally:
        session.close()
    return None


def epochs(rank, setting, optimizer):
    """Steps in process 0 alone, wraps, joins twice with other numbers of steps, and trains on together."""
    model, made, session = opened(rank, setting, optimizer=OPTIMIZERS[optimizer])
    if rank == 0:
        one_step(model, made, session, rank, 0)
    wrapped = DDP(model)
    found = [[weights(model), moments(made)]]
    for epoch in range(2):
        with wrapped.join():
            for step in range(3 * rank + 2 * epoch):
                one_step(wrapped, made, session, rank, 10 * epoch + step)
        found.append([weights(model), moments(made)])
    for step in range(20, 25):
        one_step(wrapped, made, session, rank, step)
    found.append([weights(model), moments(made)])
    session.close()
    return found


def moments(optimizer):
    """Returns what two optimizer states have in common only if all their bits are the same."""
    states = optimizer.state_dict()["state"]
    values = [states[index][name] for index in sorted(states) for name in sorted(states[index])]
    return len(values), digest(torch.as_tensor(value) for value in values if value is not None)


def initialized_after(rank):
    """Initializes the plain model at O2 after it was wrapped; returns the error, and whether O1 takes it."""
    model = network(rank)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        halfstep.initialize(model, optimizer, "O2", low="bf16").close()
    except SetupError as error:
        with halfstep.initialize(model, optimizer, "O1", low="bf16") as session:
            one_step(wrapped, optimizer, session, rank, 0)
        return str(error), weights(model)
    return None


def scaled(rank):
    """Loads a session's state into rank 0 alone, before the model is wrapped; returns the scales."""
    model, _, session = opened(rank, "O2 fp16", loss_scale=Scaling("dynamic", init=2.0**10))
    state = session.state_dict()
    state["scales"] = {"0": {"kind": "dynamic", "scale": 64.0, "clean_steps": 3, "overflows_left": 1}}
    if rank == 0:
        session.load_state_dict(state)
    DDP(model)
    found = session.state_dict()["scales"]
    session.close()
    return found


def exact(rank, master):
    """Wraps weights at the ends of fp32's range; returns whether rank 0's bits are everywhere, and stay in a save."""
    values = torch.tensor([1e-42, -1e-42, 3.3999e38, -3.4e38, 0.0, -0.0, 1.0, 1.001, 2.0**-149])
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(values.view(3, 3) if rank == 0 else torch.ones(3, 3))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters()), "O2", low="bf16", master=master)
    DDP(model)
    found = model.state_dict()["weight"].view(torch.int32).flatten().tolist()
    with torch.no_grad():
        model.weight.mul_(0.5)  # is seen, after the write that was expected
    halved = model.state_dict()["weight"].flatten()[6].item()
    session.close()
    return found, values.view(torch.int32).tolist(), halved


def unsynchronised(rank):
    """Wraps with init_sync=False, which sends nothing; returns the weights."""
    model, _, session = opened(rank, "O2 bf16 split")
    with Sent() as sent:
        DDP(model, init_sync=False)
    found = weights(model), [name for name, _ in sent.seen]
    session.close()
    return found


def copied(rank):
    """Returns whether wrappers can be copied and saved in a session, and are left as they were."""
    model, _, session = opened(rank, "O1 bf16")
    wrapped = DDP(model)
    twin = copy.deepcopy(wrapped)
    again = pickle.loads(pickle.dumps(wrapped))
    hooks = [type(each.join_hook()).__name__ for each in (wrapped, twin, again)]
    session.close()
    return hooks, "join_hook" in vars(wrapped), type(wrapped.join_hook()).__name__


def after_join(rank):
    """Joins with other numbers of steps, one skipped for an infinite loss, and trains on; returns what sums."""
    model, optimizer, session = opened(rank, "O2 fp16", optimizer=torch.optim.SGD, loss_scale="dynamic")
    wrapped = DDP(model)

    def train(step, *, spoiled=False):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = (wrapped(inputs) - targets).square().mean()
        session.backward(loss + torch.inf if spoiled else loss)
        with Sent() as sent:
            session.step()
        return [name for name, _ in sent.seen]

    with wrapped.join():
        inside = [train(step, spoiled=rank == 1 and step == 3) for step in range(3 + 3 * rank)]
    scales = session.state_dict()["scales"]
    outside = [train(step) for step in range(10, 13)]
    with wrapped.join(enable=False):
        disabled = train(13)
    found = weights(model), scales, outside, disabled
    session.close()
    return found, inside


def wrapped_before(rank):
    """Wraps before the session opens, at O1; returns the weights and what a step sends."""
    model = network(rank)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    for step in range(3):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        session.backward((wrapped(inputs) - targets).square().mean() + (torch.inf if rank == step == 1 else 0.0))
        with Sent() as sent:
            session.step()
    found = weights(model), session.status().skipped, [name for name, _ in sent.seen]
    session.close()
    return found


def closed(rank, setting):
    """Closes the session of a wrapped model and goes on; returns what the old wrapper says, and weights at the end."""
    level, options = SETTINGS[setting]
    model = network(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = halfstep.initialize(model, optimizer, level, **options)
    wrapped = DDP(model)
    session.backward((wrapped(batch(rank, 0)[0])).square().mean())
    session.step()
    session.close()
    with torch.no_grad():
        wrapped(batch(rank, 1)[0])  # to look at a model is allowed
    try:
        wrapped(batch(rank, 1)[0])
        said = None
    except SessionError as error:
        said = str(error)
    twins = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]  # which torch makes for the weights of now
    wrapped = DDP(model) if said else wrapped
    found = []
    for each in (wrapped, *twins):
        own = optimizer if each is wrapped else torch.optim.AdamW(each.parameters(), lr=1e-2)
        for step in range(3):
            own.zero_grad()
            each(batch(rank, step)[0]).square().mean().backward()
            own.step()
        found.append(weights(each.module))
    return said, found


def work(rank, path, size, cases):
    logging.getLogger("halfstep").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # each session looks for wrappers among all objects: not among torch's modules each time
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}/rendezvous-of-{size}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=300),
    )
    found = {}
    try:
        for name, (function, arguments) in cases.items():
            found[name] = function(rank, *arguments)
    finally:
        gc.collect()  # as in the fixture `process_group`
        torch.distributed.destroy_process_group()
    (path / f"{rank}.json").write_text(json.dumps(found))


def run(path, size, cases):
    """Runs cases, functions of the rank and their further arguments by name, in so many processes."""
    forks.start(work, (path, size, cases), size)
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(size)]


def run_once(path, slow):
    """Runs the cases of test modules in two processes, once for all workers.

    `slow` says of each module whether its slow tests are run; its `pooled(path, slow)` returns the cases for them.
    Returns what each process found, by the name of the module.
    """
    path.mkdir(exist_ok=True)
    with FileLock(path / "lock"):
        if not (path / "0.json").exists():
            modules = sorted(slow, key=lambda module: module.__name__)
            pooled = {module.__name__: module.pooled(path, slow[module]) for module in modules}
            run(path, 2, {f"{module} {name}": case for module, cases in pooled.items() for name, case in cases.items()})
    found = [json.loads((path / f"{rank}.json").read_text()) for rank in range(2)]
    by_module = {module.__name__: [{}, {}] for module in slow}
    for rank, mine in enumerate(found):
        for key, one in mine.items():
            module, _, name = key.partition(" ")
            by_module[module][rank][name] = one
    return by_module
