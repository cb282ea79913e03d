"""Planted faults: blame names module, operator, direction and kind of each, and what it advises makes the run train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from tests.observe.faults.hosts import targets
from tests.observe.faults.table import FAULTS, Fault

TRAINED = 8  # steps
FAST = ("gain in compiled cnn, O2 fp16", "log in compiled transformer, O2 bf16")  # of those that wait for a compiler


def opened(fault: Fault, *, edits=(), mended=False):
    torch.manual_seed(1)
    model = fault.model()
    inputs, labels = fault.inputs(), targets()
    if not mended:
        fault.breaks(model)
        inputs = inputs if fault.spoils is None else fault.spoils(inputs)
    elif fault.mends is not None:
        fault.mends(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = halfstep.level(fault.plan, fault.low)
    if "loss_scale" in fault.options:
        plan = plan.edit(halfstep.Scaling("static", init=fault.options["loss_scale"]))
    options = {key: value for key, value in fault.options.items() if key != "loss_scale"}
    session = halfstep.initialize(model, optimizer, plan.edit(*edits), **options)
    called = torch.compile(model, backend="aot_eager") if fault.compiled else model
    return session, optimizer, lambda: nn.functional.cross_entropy(called(inputs), labels)


def losses_of(session, optimizer, closure):
    losses = []
    for _ in range(TRAINED):
        optimizer.zero_grad()
        loss = closure()
        session.backward(loss)
        losses.append((float(loss.detach()), bool(session.step().skipped)))
    return losses


def assert_trains(losses):
    values = [loss for loss, _ in losses]
    assert all(torch.isfinite(torch.tensor(values))), values
    assert not any(skipped for _, skipped in losses[-3:]), losses
    assert values[-1] < values[0], values


ROWS = [
    pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] if fault.compiled and fault.name not in FAST else [])
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_is_named_and_its_cure_cures(fault):
    session, _, closure = opened(fault)
    for factor in (torch.inf, 1.0) if fault.stale else ():
        session.backward(closure() * factor)
        session.step()
    verdict = session.blame(closure)
    session.close()
    assert verdict is not None
    assert (verdict.module, verdict.operator, verdict.phase, verdict.kind) == fault.expect, str(verdict)
    assert bool(verdict.cure) is fault.edit, str(verdict)
    if fault.edit:
        session, optimizer, closure = opened(fault, edits=verdict.cure)
        assert_trains(losses_of(session, optimizer, closure))
        session.close()
    if fault.mends is not None:
        session, optimizer, closure = opened(fault, mended=True)
        assert_trains(losses_of(session, optimizer, closure))
        session.close()


def test_there_are_sixty_faults_of_every_kind():
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
