"""Cases of DistributedDataParallel with low weights, whose gradients are summed in fp32; each gives them by hand."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import halfstep
from tests.replicas import DDP, Sent

BY_PRESENT = {"divide_by_initial_world_size": False}


class Given(nn.Module):
    """Two weights whose gradients are what a batch has for each; one that has None for a weight does not use it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(5)) for _ in range(2))  # cut unevenly
        self.norm = nn.LayerNorm(5)  # fp32 at O2

    def forward(self, first, second):
        loss = (self.first * torch.full((5,), first)).sum() + self.norm(torch.ones(5)).sum()
        return loss if second is None else loss + (self.second * torch.full((5,), second)).sum()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken")


class Opened:
    """A session at O2 of a wrapped model; `pass_` goes backward, `gradients` are what lies in `p.grad`."""

    def __init__(self, rank, low="bf16", *, level="O2", hook=None, compiled=None, **wrapping):
        self.rank = rank
        self.model = Given()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.session = halfstep.initialize(
            self.model, self.optimizer, level, low=low, loss_scale=4.0 if low == "fp16" else None
        )
        self.scale = 4.0 if low == "fp16" else 1.0
        self.wrapped = DDP(self.model, **wrapping)
        if hook is not None:
            self.wrapped.register_comm_hook(None, hook)
        self.called = torch.compile(self.wrapped, backend=compiled) if compiled else self.wrapped

    def pass_(self, first, second=None, *, reduced=True, breaks=False):
        """`first` and `second` have a gradient for each process."""
        with nullcontext() if reduced else self.wrapped.no_sync():
            loss = self.called(first[self.rank], None if second is None else second[self.rank])
            self.session.backward(Breaks.apply(loss) if breaks else loss)

    def gradients(self):
        both = [self.model.first.grad, self.model.second.grad]
        return [None if grad is None else (grad / self.scale).unique().tolist() for grad in both]

    def close(self):
        self.session.close()


def summed(rank, kwargs, passes):
    """Makes passes without a step between them; returns the gradients then."""
    opened = Opened(rank, **kwargs)
    for arguments, options in passes:
        opened.pass_(*arguments, **options)
    found = opened.gradients()
    opened.session.step()
    opened.close()
    return found


def many(rank, kwargs, reduced, turns=8):
    """Makes a pass of large gradients and then small ones; returns the gradients then, and after one more step."""
    opened = Opened(rank, **kwargs)
    opened.pass_((256.0, 512.0), (512.0, 1024.0), reduced=reduced)
    for turn in range(turns):
        opened.pass_((1.0, 2.0), (2.0, 4.0), reduced=reduced or turn == turns - 1)
    found = [opened.gradients()]
    opened.session.step()
    opened.optimizer.zero_grad()
    opened.pass_((1.0, 2.0), (2.0, 4.0))
    found.append(opened.gradients())
    opened.session.step()
    opened.close()
    return found


def joined(rank, kwargs, options):
    """Has a batch in process 0 and two in process 1, after a join with one in 1 alone; returns the gradients."""
    opened = Opened(rank, **kwargs)
    with opened.wrapped.join():
        for _ in range(rank):
            opened.pass_((1.0, 3.0), (1.0, 3.0))
            opened.session.step()
    found = []
    with opened.wrapped.join(**options):
        for _ in range(1 + rank):
            opened.optimizer.zero_grad()
            opened.pass_((1.0, 3.0), (1.0, 3.0))
            found.append(opened.gradients())
            opened.session.step()
    opened.close()
    return found


def broken(rank):
    """Raises in the second of three passes, in all processes; returns the gradients after it and in the end."""
    opened = Opened(rank)
    opened.pass_((256.0, 256.0), (256.0, 256.0), reduced=False)
    opened.pass_((1.0, 1.0), (1.0, 1.0), reduced=False)
    try:
        opened.pass_((1.0, 1.0), (1.0, 1.0), reduced=False, breaks=True)
    except ValueError:
        found = [opened.gradients()]
    opened.pass_((1.0, 1.0), (1.0, 1.0))
    found.append(opened.gradients())
    opened.close()
    return found


def wire(rank):
    """Returns what a reduced pass sends, but for the first, in which buckets are made anew."""
    opened = Opened(rank)
    for _ in range(3):
        opened.optimizer.zero_grad()
        with Sent() as sent:
            opened.pass_((1.0, 2.0), (1.0, 2.0))
        opened.session.step()
    opened.close()
    return sent.seen


def copied(rank):
    """Copies and pickles a wrapper that has the hook; returns the gradient of the first weight of each copy."""
    opened = Opened(rank)
    opened.pass_((1.0, 2.0), (1.0, 2.0))
    opened.session.step()
    twins = copy.deepcopy(opened.wrapped), pickle.loads(pickle.dumps(opened.wrapped))
    opened.close()
    found = []
    for twin in twins:
        twin.zero_grad()
        twin(float(1 + rank), 1.0).backward()
        found.append(twin.module.first.grad.unique().tolist())
    return found


STATIC = {"static": {"static_graph": True}}
LATE = {"reduced": False}
TWO = ((1.0, 2.0), (2.0, 4.0))
WAYS = {
    "O2 bf16": {},
    "O2 fp16": {"low": "fp16"},
    "O3 bf16": {"level": "O3"},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "own hook": {"hook": allreduce_hook},
}
CASES = {
    **{f"{name}, once": (many, (kwargs, False)) for name, kwargs in WAYS.items()},
    **{f"{name}, each time": (many, (kwargs, True)) for name, kwargs in (WAYS | STATIC).items()},
    "600": (many, ({}, False, 344)),
    "unused late": (summed, ({"find_unused_parameters": True}, [(TWO, LATE), (TWO[:1], {})])),
    "unused after": (summed, ({"find_unused_parameters": True}, [(TWO, {}), (TWO[:1], {})])),
    "by turns": (summed, ({}, [(TWO, LATE), (TWO, {}), (TWO, LATE), (TWO, {})])),
    "never": (summed, ({}, [(((256.0, 512.0), (1.0, 1.0)), LATE), (((1.0, 1.0), (1.0, 1.0)), LATE)])),
    "large": (summed, ({"low": "fp16"}, [(((16000.0, 12000.0), (1.0, 3.0)), {})])),
    "join": (joined, ({}, {})),
    "join by present": (joined, ({}, BY_PRESENT)),
    "broken": (broken, ()),
    "wire": (wire, ()),
    "copied": (copied, ()),
    "compiled": (summed, ({"compiled": "aot_eager"}, [(TWO, LATE), (TWO, {})])),
}
