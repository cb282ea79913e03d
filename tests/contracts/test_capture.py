"""A training step is the same operations on the same memory whatever the values: what a CUDA graph needs to replay it.

A tape stands in for the graph, so that a CPU can check it: it notes every operation of one step and runs them again, on
the tensors and into the tensors of the first time, and none of Python in between.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.train.optim.implementations import IMPLEMENTATIONS
from halfstep.train.scale.norm import READERS
from tests.contracts.cases import batch, differing, mixed_plans, snapshot, start

POISONED = (3, 5)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def storages(values):
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}


class Tape(TorchDispatchMode):
    """Runs and notes the operations inside; `replay` runs them again."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func not in READS, f"{func} reads on the host"
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, held in self.operations:
            given = storages([args, kwargs])
            for old, new in zip(tree_leaves(held), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and not storages([old]) & given:
                    old.detach().copy_(new)


@pytest.fixture(autouse=True)
def torch_operations():
    """Leaves the updates and reads that are operations of torch, which a tape sees; puts the tables back in order."""
    before = [(table, dict(table)) for table in (IMPLEMENTATIONS, READERS)]
    for (table, rows), kept in zip(before, ("eager", "torch"), strict=True):
        table.clear()
        table[kept] = rows[kept]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


def inputs_of(number):
    inputs, targets = batch(number)
    if number in POISONED:
        inputs[0, 0] = torch.inf
    return inputs, targets


def step(model, optimizer, session, inputs, targets):
    optimizer.zero_grad()
    session.backward(nn.functional.mse_loss(model(inputs), targets))
    return session.step(max_norm=1.0)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
}


@pytest.mark.slow_but("AdamW-O1-bf16", "SGD-O1-fp16")
@mixed_plans
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replayed_operations_do_what_the_steps_would(name, low, optimizer):
    eager, taped = (start(name, low, OPTIMIZERS[optimizer], emulate=False) for _ in range(2))
    held = [t.clone() for t in inputs_of(0)]
    for _ in range(2):
        step(*taped, *held)
    taped[1].zero_grad()
    with Tape() as tape:
        record = step(*taped, *held)
    for _ in range(3):
        step(*eager, *inputs_of(0))
    for number in range(1, 7):
        for place, value in zip(held, inputs_of(number), strict=True):
            place.copy_(value)
        tape.replay()
        expected = step(*eager, *inputs_of(number))
        assert bool(record.skipped) == bool(expected.skipped) == (number in POISONED)
        assert torch.equal(record.scale, expected.scale)
        torch.testing.assert_close(record.grad_norm, expected.grad_norm, rtol=0, atol=0, equal_nan=True)
        assert differing(snapshot(*eager[:2]), snapshot(*taped[:2])) == []
    assert taped[2].status().skipped == eager[2].status().skipped == len(POISONED)
    assert taped[2].status().scales == eager[2].status().scales
    for _, _, session in (eager, taped):
        session.close()
