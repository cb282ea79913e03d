"""Planted faults: blame names module, operator, direction and kind of each, and what it advises makes the run train."""

import collections
import copy
import dataclasses
import itertools

import pytest
import torch

import halfstep
from tests.conftest import more_than_each_value
from tests.contracts.cases import backward_and_step
from tests.diagnose.faults.fault import HARMLESS
from tests.diagnose.faults.hosts import targets
from tests.diagnose.faults.table import FAULTS as PLANNED
from tests.diagnose.faults.table import PLANTED
from tests.diagnose.faults.unplanned import UNPLANNED

FAULTS = (*PLANNED, *UNPLANNED)
TRAINED = 8  # steps
SETTLED = 24  # by which a dynamic scale has come down
KINDS = (
    "scale too high", "overflow", "invalid", HARMLESS, "masked row", "input data", "weights", "stale gradients",
)  # fmt: skip
HOSTS = ("cnn", "lstm", "transformer", "attention", "custom", "checkpoint", "compiled")


def opened(fault, *, edits=(), mended=False):
    """Returns a session, its optimizer and a closure; `mended` is the code, the batch or the weights as advised."""
    torch.manual_seed(1)
    if fault.compiled:
        torch._dynamo.reset()
    model = fault.model()
    inputs, labels = fault.inputs(), targets()
    checkpoint = copy.deepcopy(model.state_dict())
    fault.breaks(model)
    inputs = inputs if fault.spoils is None else fault.spoils(inputs)
    if mended and fault.kind == "input data":
        inputs = torch.nan_to_num(inputs, posinf=0.0, neginf=0.0)
    elif mended and fault.kind == "weights":
        model.load_state_dict(checkpoint)
    elif mended:
        fault.mends(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = halfstep.level(fault.plan, fault.low)
    if "loss_scale" in fault.options:
        plan = plan.edit(halfstep.Scaling("static", init=fault.options["loss_scale"]))
    options = {key: value for key, value in fault.options.items() if key != "loss_scale"}
    session = halfstep.initialize(model, optimizer, plan.edit(*edits), **options)
    called = torch.compile(model, backend=fault.compiled) if fault.compiled else model
    return session, optimizer, lambda: fault.loss(called(inputs), labels)


def assert_trains(session, optimizer, closure, *, most=TRAINED):
    steps = []
    while len(steps) < TRAINED or (any(skipped for _, skipped in steps[-3:]) and len(steps) < most):
        optimizer.zero_grad()
        loss = closure()
        steps.append((float(loss.detach()), bool(backward_and_step(session, loss).skipped)))
    session.close()
    values = [loss for loss, _ in steps]
    assert all(torch.isfinite(torch.tensor(values))), values
    assert not any(skipped for _, skipped in steps[-3:]), steps
    assert values[-1] < values[0], values


def with_backend(fault, backend, *marks):
    name = f"{fault.name}, {backend}"
    return pytest.param(dataclasses.replace(fault, name=name, compiled=backend), id=name, marks=marks)


def repeated():
    """The names of faults whose plant, host, verdict and plan others have too."""
    rows = itertools.zip_longest(PLANTED, FAULTS)
    shown = [
        (fault, {*(row or [fault.host])[:2], fault.expect and fault.expect[1:], (fault.plan, fault.low)})
        for row, fault in rows
    ]
    return {fault.name for fault in more_than_each_value(shown)} | {fault.name for fault in COMPILED}


COMPILED = [fault for fault in FAULTS if fault.compiled]
SLOW = repeated()
ROWS = [
    *(pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] * (fault.name in SLOW)) for fault in FAULTS),
    with_backend(COMPILED[0], "aot_eager"),
    with_backend(COMPILED[1], "aot_eager", pytest.mark.slow),
    *(with_backend(fault, "inductor", pytest.mark.slow) for fault in COMPILED),
]


@pytest.mark.slow_but(
    "1e9", "steep", "encoder", "LSTM", "torch's", "no zero_grad", "power a", "of one row", "that", "row"
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # torch knows one of the faults itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the default backend imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of an LSTM
@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_is_named_and_its_cure_cures(fault):
    session, optimizer, closure = opened(fault)
    for factor in (torch.inf, 1.0) if fault.stale else ():
        backward_and_step(session, closure() * factor)
    if fault.compiled and not fault.stale:
        closure()
    verdict = halfstep.blame(session, closure)
    if fault.expect is None:
        assert verdict is None, str(verdict)
        assert_trains(session, optimizer, closure)
        return
    assert verdict is not None
    assert (verdict.module, verdict.operator, verdict.phase, verdict.kind) == fault.expect, str(verdict)
    assert bool(verdict.cure) is fault.edit, str(verdict)
    assert fault.advice in verdict.advice
    if fault.stale:
        assert_trains(session, optimizer, closure)
        return
    session.close()
    if fault.edit:
        assert_trains(*opened(fault, edits=verdict.cure))
    if fault.advice:
        assert_trains(*opened(fault, mended=True), most=SETTLED)


def test_every_kind_is_planted_in_every_host():
    planted = collections.Counter((fault.kind, fault.host) for fault in FAULTS)
    assert [cell for cell in itertools.product(KINDS, HOSTS) if not planted[cell]] == []


def test_there_are_sixty_faults_and_each_has_a_cure_that_is_tried():
    faults = [fault for fault in FAULTS if fault.expect is not None]
    assert len(faults) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.edit or fault.advice for fault in faults)
