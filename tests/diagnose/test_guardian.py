"""The guardian: silent where skips are normal, and loud, with a verdict, where training has stopped."""

from __future__ import annotations

import gc
import logging
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import halfstep
from halfstep import FP16, FULL, NumericsError, Rule, Scaling, SetupError
from halfstep.cast.emulate import Emulation
from halfstep.diagnose import guardian
from halfstep.diagnose.counter import WINDOW, Counter
from halfstep.diagnose.cures import FULL_OUT, WHOLE, untried_cure
from halfstep.diagnose.diagnosis import Diagnosis
from halfstep.observe.recorder import OpRecorder
from tests.contracts.cases import differing, mixed_plans, snapshot, start, train
from tests.diagnose.faults.hosts import Cnn, Transformer, images, targets, words
from tests.diagnose.faults.plants import (
    CustomBackward,
    CustomDivide,
    Eps,
    Gain,
    LogOfZero,
    SqrtOfZero,
    Squares,
    Total,
    WhereTrap,
)
from tests.observe.test_probe import Counted
from tests.scale.sync import NoSync


@torch.library.custom_op("halfstep_tests::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)  # of two formats, unless autocast is on


def _keep(ctx, inputs, output):
    ctx.right = inputs[1]


product.register_autograd(
    lambda ctx, grad: (torch.mm(grad.to(ctx.right.dtype), ctx.right.t()).to(grad.dtype), None), setup_context=_keep
)


class CountsOnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("right", torch.randn(16, 16))

    def forward(self, x):
        return product(self.linear(x), self.right)


def session_on(model, plan="O2", low="fp16", **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return halfstep.initialize(model, optimizer, plan, low=low, **options), optimizer


def run(session, optimizer, model, steps, inputs=None):
    inputs = inputs if inputs is not None else images() if isinstance(model, Cnn) else words()
    labels = targets()
    records = []
    for _ in range(steps):
        optimizer.zero_grad()
        session.backward(nn.functional.cross_entropy(model(inputs), labels))
        records.append(session.step())
    return records


@pytest.mark.parametrize(
    ("host", "plan", "low", "plant", "operator"),
    [
        (Cnn, "O1", "fp16", Gain, "mul"),
        (Transformer, "O2", "fp16", Gain, "mul"),
        (Cnn, "O3", "bf16", LogOfZero, "log"),
        (Transformer, "O3", "bf16", LogOfZero, "log"),
    ],
)
def test_a_run_of_skips_raises_with_a_verdict(host, plan, low, plant, operator):
    model = host(plant())
    session, optimizer = session_on(model, plan, low)
    with pytest.raises(NumericsError) as caught:
        run(session, optimizer, model, 4 * WINDOW)
    verdict = caught.value.verdict
    assert verdict.operator == operator
    assert verdict.module.endswith("plant")
    assert str(verdict) in str(caught.value)
    assert session.status().steps == WINDOW + 2
    assert _get_current_dispatch_mode_stack() == []
    session.close()


def test_training_goes_on_after_the_error_is_caught():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    with pytest.raises(NumericsError):
        run(session, optimizer, model, 2 * WINDOW)
    model.plant = nn.Identity()
    assert not bool(run(session, optimizer, model, 1)[0].skipped)
    session.close()


def test_warn_says_it_once_and_goes_on(caplog):
    model = Cnn(Gain())
    session, optimizer = session_on(model, on_failure="warn")
    with caplog.at_level(logging.WARNING, "halfstep"):
        records = run(session, optimizer, model, 8 * WINDOW)
    assert all(bool(record.skipped) for record in records)
    assert caplog.text.count("was skipped like those before it") == 1
    session.close()


def test_the_first_skips_of_a_dynamic_scale_are_normal(caplog):
    model = Cnn(nn.Identity())
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=2.0**40, max=2.0**40))
    with caplog.at_level(logging.WARNING, "halfstep"):
        records = run(session, optimizer, model, 5 * WINDOW)
    assert sum(bool(record.skipped) for record in records) > WINDOW + 2
    assert not bool(records[-1].skipped)
    assert caplog.text == ""
    session.close()


def test_a_floor_that_is_too_high_is_named():
    model = Cnn(nn.Identity())
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=2.0**30, min=2.0**29, max=2.0**40))
    with pytest.raises(NumericsError) as caught:
        run(session, optimizer, model, 3 * WINDOW)
    assert caught.value.verdict.kind == "scale too high"
    plan = session.plan.edit(*caught.value.verdict.cure)
    session.close()
    session = halfstep.initialize(model, optimizer, plan)
    assert not bool(run(session, optimizer, model, 2 * WINDOW)[-1].skipped)
    session.close()


def steep(plan, scaling, gradient=3e5):
    """Steps of a model whose gradient is 3e5 times the loss scale: fp16 holds that at 1/8, and not at 1/4."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, halfstep.level(plan, "fp16").edit(*scaling))
    inputs = torch.full((1, 8), 1e-3)

    def step():
        optimizer.zero_grad()
        session.backward(model(inputs).float().sum() * gradient)
        return session.step()

    return session, step


def dynamic(init, least):
    return Scaling("dynamic", init=init, min=least)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (Scaling("static", init=1.0), "it stays at 1"),
        (Scaling("static", init=64.0), "it stays at 64"),
        (dynamic(64.0, 1.0), "its floor is 1"),
        (dynamic(2.0**20, 1.0), "its floor is 1"),
        (dynamic(2.0**20, 0.25), "its floor is 0.25"),
        (Scaling("none"), "it stays at 1"),
    ],
)
def test_a_loss_scale_below_1_is_named_where_only_that_helps(scaling, limit):
    cure = dynamic(2.0**-3, 2.0**-15)
    session, step = steep("O2", [scaling])
    with pytest.raises(NumericsError) as caught:
        [step() for _ in range(2 * WINDOW)]
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.phase, verdict.cure) == ("scale too high", "backward", (cure,))
    assert f"like those before it: the loss scale is too high, and {limit}\n" in str(caught.value)
    assert "would not help" not in str(caught.value)
    assert "it needs at most 0.125, and what comes later in the backward pass may need less" in verdict.evidence
    assert "not tried" in verdict.advice
    session.close()
    session, step = steep("O2", verdict.cure)
    assert not bool(step().skipped)
    session.close()


@pytest.mark.parametrize(("gradient", "kind"), [(1.09e12, "scale too high"), (1.11e12, "overflow")])
def test_below_two_to_the_minus_24_no_scale_is_looked_for(gradient, kind):
    session, step = steep("O2", [Scaling("static", init=1.0)], gradient)  # 65504 * 2**24 is 1.099e12
    with pytest.raises(NumericsError) as caught:
        [step() for _ in range(2 * WINDOW)]
    assert caught.value.verdict.kind == kind
    assert ("would not help" in str(caught.value)) == (kind == "overflow")
    session.close()


@pytest.mark.parametrize("init", [8.0, 2.0**20])
def test_a_dynamic_scale_that_may_come_down_below_1_does(init, caplog):
    session, step = steep("O2", [dynamic(init, 2.0**-3)])
    with caplog.at_level(logging.WARNING, "halfstep"):
        records = [step() for _ in range(4 * WINDOW)]
    assert not bool(records[-1].skipped)
    assert caplog.text == ""
    session.close()


@pytest.mark.parametrize("scaling", [Scaling("static", init=1024.0), Scaling("static", init=1.0), Scaling("dynamic")])
def test_an_overflow_that_no_scale_changes_is_not_laid_to_the_scale(scaling):
    model = Cnn(CustomBackward())
    session, optimizer = session_on(model, loss_scale=scaling)
    with pytest.raises(NumericsError, match="and a lower loss scale would not help") as caught:
        run(session, optimizer, model, 2 * WINDOW)
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "plant", "mul", "backward")
    assert verdict.cure == (Rule("plant", FULL),)
    session.close()


class Growing(nn.Module):
    """Layers whose gradients grow eightfold from each to the one before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(8 * torch.eye(32))

    def forward(self, x):
        x = x * 1e-6
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_of_a_constant_scale_that_the_first_overflow_fits_nothing_more_is_claimed(plan):
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, plan, low="fp16", loss_scale=2.0**18)
    inputs = torch.randn(8, 32)

    def train(steps):
        skips = 0
        for _ in range(steps):
            optimizer.zero_grad()
            session.backward(model(inputs).float().sum())
            skips += bool(session.step().skipped)
        return skips

    with pytest.raises(NumericsError) as caught:
        train(2 * WINDOW)
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.cure) == ("scale too high", (Scaling("dynamic", init=2.0**15, min=1.0),))
    assert "it needs at most 32768, and what comes later in the backward pass may need less" in verdict.evidence
    assert "are finite" not in str(verdict)
    cured = session.plan.edit(*verdict.cure)
    session.close()
    session = halfstep.initialize(model, optimizer, cured)
    assert train(3 * WINDOW) > 0  # 2**15 is too much for the layers before
    assert train(3 * WINDOW) == 0
    session.close()


def loud(inputs):
    return inputs * 1e6  # beyond fp16


def as_it_is(inputs):
    return inputs


@pytest.mark.parametrize(
    ("host", "plan", "plant", "change", "kind", "operator"),
    [
        (Cnn, "O1", Gain, as_it_is, "overflow", "mul"),
        (Transformer, "O2", Squares, as_it_is, "overflow", "pow"),
        (Cnn, "O2", Total, as_it_is, "overflow", "sum"),
        (Cnn, "O2", CustomBackward, as_it_is, "overflow", "mul"),
        (Cnn, "O1", Eps, as_it_is, "invalid", "div"),
        (Transformer, "O2", Eps, as_it_is, "invalid", "div"),
        (Cnn, "O2", nn.Identity, loud, "overflow", "conv2d"),
        (Cnn, "O3", nn.Identity, loud, "overflow", "conv2d"),
    ],
)
def test_a_named_cure_makes_the_run_train(host, plan, plant, change, kind, operator):
    torch.manual_seed(0)
    model = host(plant())
    session, optimizer = session_on(model, plan)
    inputs = change(images() if host is Cnn else words())
    with pytest.raises(NumericsError) as caught:
        run(session, optimizer, model, 2 * WINDOW, inputs)
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.operator) == (kind, operator)
    cured = session.plan.edit(*verdict.cure)
    assert cured != session.plan
    session.close()
    session = halfstep.initialize(model, optimizer, cured, on_failure="warn")
    assert not any(bool(record.skipped) for record in run(session, optimizer, model, 2 * WINDOW, inputs)[-WINDOW:])
    session.close()


@pytest.mark.parametrize("plant", [LogOfZero, WhereTrap, SqrtOfZero, CustomDivide])
def test_where_it_is_not_known_that_fp32_has_a_value_no_cure_is_named(plant):
    model = Cnn(plant())
    session, optimizer = session_on(model)
    with pytest.raises(NumericsError) as caught:
        run(session, optimizer, model, 2 * WINDOW)
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.module, verdict.cure) == ("invalid", "plant", ())
    assert (
        "no edit is known to cure it, since none was tried (halfstep.blame(session, closure) would)" in verdict.advice
    )
    session.close()


class Encoder(nn.Module):
    """Used through another method than forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def encode(self, x):
        return self.linear(x).log().sub(torch.inf)


def test_what_runs_in_autocast_alone_is_recorded():
    model = Encoder()
    session, optimizer = session_on(model, "O1", "bf16")

    def training():
        for _ in range(2 * WINDOW):
            optimizer.zero_grad()
            with session.autocast():
                loss = model.encode(torch.ones(4, 8)).float().mean()
            session.backward(loss)
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.operator in ("log", "sub")
    session.close()


def test_some_skips_among_good_steps_are_no_alarm():
    model, optimizer, session = start("O2", "bf16")
    records = train(session, model, optimizer, range(40), poison=set(range(0, 40, 3)))
    assert sum(bool(record.skipped) for record in records) == 14
    session.close()


def test_gradients_that_nobody_zeroes_are_named():
    model = Cnn(nn.Identity())
    session, _ = session_on(model, "O1", "bf16")
    good, labels = images(), targets()
    session.backward(nn.functional.cross_entropy(model(good * torch.inf), labels))
    session.step()

    def train_without_zero_grad():
        for _ in range(3 * WINDOW):
            session.backward(nn.functional.cross_entropy(model(good), labels))
            session.step()

    with pytest.raises(NumericsError) as caught:
        train_without_zero_grad()
    assert caught.value.verdict.kind == "stale gradients"
    session.close()


def test_of_two_sparse_gradients_the_one_that_nobody_zeroes_is_named():
    model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True), "other": nn.Embedding(6, 4, sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    rows = torch.tensor([1, 2])

    def training():
        for step in range(4 * WINDOW):
            factor = torch.inf if step == 0 else 1.0
            session.backward(model["table"](rows).sum() + factor * model["other"](rows).sum())
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert (caught.value.verdict.kind, caught.value.verdict.module) == ("stale gradients", "other")
    assert "other.weight" in caught.value.verdict.evidence
    session.close()


@mixed_plans
def test_watching_reads_nothing_on_the_host(name, low):
    model, optimizer, session = start(name, low)
    with NoSync():
        train(session, model, optimizer, range(2 * WINDOW + 2))
    session.close()


@mixed_plans
def test_a_recorded_step_that_is_fine_trains_as_any_other(name, low):
    ends = []
    for poison in ((), range(WINDOW)):
        model, optimizer, session = start(name, low, torch.optim.SGD, loss_scale=1.0 if low == "fp16" else None)
        train(session, model, optimizer, range(WINDOW), poison=poison)
        if not poison:
            model, optimizer, session = start(name, low, torch.optim.SGD, loss_scale=1.0 if low == "fp16" else None)
        train(session, model, optimizer, range(20, 23))
        ends.append({k: v for k, v in snapshot(model, optimizer).items() if "seen" not in k})
        session.close()
    assert differing(*ends) == []


def test_a_forward_that_raises_does_not_end_the_recording():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    run(session, optimizer, model, WINDOW + 1)  # the next step is recorded
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 5, 6, 6))
    with pytest.raises(NumericsError):
        run(session, optimizer, model, 1)
    assert _get_current_dispatch_mode_stack() == []
    session.close()


def test_evaluation_before_the_recorded_step_is_not_recorded():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    run(session, optimizer, model, WINDOW + 1)
    with torch.inference_mode():
        model.eval()(images())
    model.train()
    with pytest.raises(NumericsError):
        run(session, optimizer, model, 1)
    session.close()


def test_a_mode_of_the_callers_around_each_step_keeps_its_place():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    for _ in range(3 * WINDOW):
        with Emulation(FP16):
            run(session, optimizer, model, 1)
    assert _get_current_dispatch_mode_stack() == []
    session.close()


def test_close_in_the_middle_of_a_recorded_step_takes_the_recorder_off():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    run(session, optimizer, model, WINDOW + 1)
    model(images())
    assert _get_current_dispatch_mode_stack() != []
    session.close()
    assert _get_current_dispatch_mode_stack() == []


def test_a_compiled_model_is_recorded_uncompiled():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(NumericsError) as caught:
        run(session, optimizer, compiled, 2 * WINDOW, images())
    assert (caught.value.verdict.module, caught.value.verdict.operator) == ("plant", "log")
    session.close()


@pytest.mark.parametrize("value", ["ignore", None, 1])
def test_another_answer_to_failures_is_refused(value):
    model = Cnn(nn.Identity())
    with pytest.raises(SetupError, match="on_failure"):
        session_on(model, on_failure=value)


def test_blame_in_place_of_a_recorded_step_ends_the_recording():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    inputs, labels = images(), targets()
    run(session, optimizer, model, WINDOW + 1, inputs)
    assert halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels)).module == "plant"
    assert _get_current_dispatch_mode_stack() == []
    run(session, optimizer, model, 1, inputs)
    session.close()


@pytest.mark.parametrize(("plan", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "fp16")])
@pytest.mark.parametrize("width", [16, 33, 64])
def test_a_batch_in_the_memory_of_freed_gradients_is_input_data(plan, low, width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 4))
    session, optimizer = session_on(model, plan, low)

    def training():
        for step in range(4 * WINDOW):
            optimizer.zero_grad()
            inputs, wanted = torch.randn(8, width), torch.randn(8, 4)
            if step >= WINDOW // 2:
                inputs[0, 0] = torch.nan
            session.backward(nn.functional.mse_loss(model(inputs), wanted))
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.kind == "input data"
    session.close()


@pytest.mark.parametrize("period", [2, 3, WINDOW])
def test_a_fault_in_some_steps_is_met_once_the_scale_is_at_its_floor(period):
    model = nn.Sequential(nn.Linear(16, 4))
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=1.0, min=1.0))
    inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
    spoiled = inputs * torch.nan

    def training():
        for step in range(8 * WINDOW):
            optimizer.zero_grad()
            batch = spoiled if step % period == 0 else inputs
            session.backward(nn.functional.cross_entropy(model(batch), labels))
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.kind == "input data"
    session.close()


def test_no_more_than_a_window_of_fine_steps_is_recorded():
    model = nn.Sequential(nn.Linear(16, 4))
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=1.0, min=1.0))
    inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
    recorded = []
    for step in range(4 * WINDOW):
        recorded.append(_get_current_dispatch_mode_stack() != [])
        optimizer.zero_grad()
        batch = inputs * torch.nan if step == 2 else inputs
        session.backward(nn.functional.cross_entropy(model(batch), labels))
        session.step()
    assert [step for step, on in enumerate(recorded) if on] == list(range(WINDOW + 1, 2 * WINDOW + 1))
    session.close()


def test_a_custom_operation_that_counts_on_autocast_runs_in_a_recorded_step():
    model = nn.Sequential(CountsOnAutocast(), nn.Linear(16, 4))
    session, optimizer = session_on(model, "O1", "bf16")
    inputs, labels = torch.randn(8, 16) * torch.nan, torch.randint(4, (8,))

    def training():
        for _ in range(2 * WINDOW):
            optimizer.zero_grad()
            session.backward(nn.functional.cross_entropy(model(inputs), labels))
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.kind == "input data"
    session.close()


def test_a_custom_operation_that_counts_on_autocast_can_be_blamed_and_checked():
    model = nn.Sequential(CountsOnAutocast(), nn.Linear(16, 4))
    session, _ = session_on(model, "O1", "bf16")
    inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
    assert halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels)) is None
    found = halfstep.check(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert [finding for finding in found if finding.severity == "error"] == []
    session.close()


def interrupted(session, optimizer, model, inputs):
    """Brings a session to a recorded step, and leaves that after its forward."""
    run(session, optimizer, model, WINDOW + 1, inputs)
    model(inputs)
    return _get_current_dispatch_mode_stack()[0]


def test_evaluation_after_an_interrupted_step_ends_the_recording():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16", emulate=False)
    recorder = interrupted(session, optimizer, model, images())
    a_forward = len(recorder.notes)
    with torch.no_grad():
        for _ in range(20):
            model(images())
    assert _get_current_dispatch_mode_stack() == []
    assert len(recorder.notes) < 6 * a_forward
    with pytest.raises(NumericsError):  # it is met later
        run(session, optimizer, model, 8 * WINDOW, images())
    session.close()


def test_forwards_that_no_backward_pass_follows_end_the_recording():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    interrupted(session, optimizer, model, images())
    for _ in range(64):
        model(images())
    assert _get_current_dispatch_mode_stack() == []
    session.close()


def test_many_backward_passes_of_one_step_are_recorded():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    run(session, optimizer, model, WINDOW + 1, images())
    for _ in range(70):
        session.backward(nn.functional.cross_entropy(model(images()), targets()))
    with pytest.raises(NumericsError):
        session.step()
    session.close()


def test_other_work_after_an_interrupted_step_is_not_recorded_for_ever(monkeypatch):
    monkeypatch.setattr(guardian, "_OPERATIONS", 1000)
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    recorder = interrupted(session, optimizer, model, images())
    number = torch.zeros(())
    for _ in range(2000):
        number = number + 1
    assert float(number) == 2000
    assert len(recorder.notes) == 0
    session.close()


def test_a_session_that_nobody_closes_takes_its_recorder_along():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    interrupted(session, optimizer, model, images())
    del session, optimizer, model
    gc.collect()
    assert _get_current_dispatch_mode_stack() == []


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_callers_over_the_recorder_stays_where_it_is():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    run(session, optimizer, model, WINDOW + 1, images())
    with Plain() as mode:
        session.close()
        assert _get_current_dispatch_mode_stack() == [mode]
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("broken", ["_begin", "_look"])
def test_a_recorder_that_fails_does_not_fail_the_step(broken, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("in the recorder")

    monkeypatch.setattr(OpRecorder, broken, fail)
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    records = run(session, optimizer, model, WINDOW + 2, images())
    assert all(bool(record.skipped) for record in records)
    assert "could not be recorded" in caplog.text
    session.close()


def test_an_explanation_that_fails_does_not_fail_the_step(monkeypatch, caplog):
    monkeypatch.setattr(guardian, "find_origin", lambda *args: 1 / 0)
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    run(session, optimizer, model, WINDOW + 2, images())
    assert "could not be recorded" in caplog.text
    session.close()


def rollouts(before, *, steps):
    """Steps whose loss is not finite, each after a rollout: what `before` does with the model and its inputs."""
    model = nn.Sequential(nn.Linear(4, 8), LogOfZero(), nn.Linear(8, 4))
    session, optimizer = session_on(model, "O2", "bf16")
    inputs, labels = 4 * torch.randn(8, 4), targets()
    try:
        for _ in range(steps):
            before(model, inputs)
            optimizer.zero_grad()
            session.backward(nn.functional.cross_entropy(model(inputs), labels))
            session.step()
    finally:
        session.close()
        assert _get_current_dispatch_mode_stack() == []


def with_gradients(count):
    return lambda model, inputs: [model(inputs) for _ in range(count)]


def without_gradients(count):
    def play(model, inputs):
        with torch.no_grad():
            return [model(inputs) for _ in range(count)]

    return play


def mixed(count):
    return lambda model, inputs: [model(inputs), without_gradients(count)(model, inputs)]


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        (with_gradients(40), 2 * WINDOW),
        (with_gradients(100), 4 * WINDOW),
        (without_gradients(300), 2 * WINDOW),
        (mixed(3), 2 * WINDOW),
        (mixed(10), 4 * WINDOW),
    ],
)
def test_a_step_after_a_rollout_is_explained_in_the_end(before, steps):
    with pytest.raises(NumericsError) as caught:
        rollouts(before, steps=steps)
    verdict = caught.value.verdict
    assert (verdict.module, verdict.operator) == ("1", "log")


@pytest.mark.parametrize("before", [with_gradients(5), mixed(1), without_gradients(70)])
def test_patience_grows_until_it_is_enough(before, monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 8)
    with pytest.raises(NumericsError):
        rollouts(before, steps=12 * WINDOW)


def test_a_step_of_many_forwards_that_its_loss_is_made_of_is_explained():
    model = nn.Linear(4, 4)
    session, optimizer = session_on(model, "O1", "bf16")
    inputs = torch.randn(2, 4)

    def training():
        for _ in range(4 * WINDOW):
            optimizer.zero_grad()
            session.backward(sum(model(inputs).sum() for _ in range(200)).sub(torch.inf))
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.operator == "sub"
    session.close()


def test_a_step_that_is_too_long_to_be_recorded_is_said_to_be_once(monkeypatch, caplog):
    monkeypatch.setattr(guardian, "_OPERATIONS", 100)
    with caplog.at_level(logging.WARNING, "halfstep"):
        rollouts(with_gradients(30), steps=10 * WINDOW)
    assert caplog.text.count("a step has too many operations") == 1
    assert "halfstep.blame(session, closure)" in caplog.text


def test_of_steps_that_are_too_long_few_are_recorded(monkeypatch):
    recorded = []
    monkeypatch.setattr(guardian, "_OPERATIONS", 100)

    def look(model, inputs):
        recorded.append(bool(_get_current_dispatch_mode_stack()))
        with_gradients(30)(model, inputs)

    rollouts(look, steps=16 * WINDOW)
    assert 1 <= sum(recorded) <= 4  # the pauses between them grow


def test_too_long_an_evaluation_ends_the_recording_before_it_began(monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 50)
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    run(session, optimizer, model, WINDOW + 1, images())
    without_gradients(50)(model, images())
    assert _get_current_dispatch_mode_stack() != []
    without_gradients(1)(model, images())
    assert _get_current_dispatch_mode_stack() == []
    session.close()


def test_what_ran_where_it_cannot_be_seen_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(guardian, "find_origin", lambda *args: None)
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    with caplog.at_level(logging.WARNING, "halfstep"):
        run(session, optimizer, model, 4 * WINDOW, images())
    assert caplog.text.count("could not be recorded") == 1
    session.close()


class Elsewhere(torch.Tensor):
    """A tensor of a device that is neither a CPU nor CUDA: its memory is not the host's."""

    @property
    def device(self):
        return torch.device("xpu")

    def data_ptr(self):
        raise RuntimeError("not on the host")


PARTS = (object(),)


def counted(counter, flags, scale, tensor=lambda t: t):
    """Gives a counter steps at one scale; returns the numbers of those after which it asks for a look."""
    steps = [counter.count(PARTS, tensor(torch.tensor(bool(flag))), {0: tensor(torch.tensor(scale))}) for flag in flags]
    return [number for number, found in enumerate(steps, 1) if found is not None]


@pytest.mark.parametrize(
    ("flags", "looks"),
    [
        ([0, *[1] * (WINDOW - 1), *[0] * 20], []),
        ([1] * WINDOW + [0] * 20, [WINDOW + 1]),
        ([0, *[1] * WINDOW, *[0] * 20], [2 * WINDOW + 1]),  # over two windows, with a step that is fine in each
        ([0, *[1] * (WINDOW - 1), 0, *[1] * (WINDOW - 1), *[0] * 20], []),
        ([1] * (WINDOW - 2) + [0] * 20, []),
    ],
)
def test_skips_are_counted_in_a_row(flags, looks):
    assert counted(Counter(torch.device("cpu"), 1.0), flags, 2.0) == looks


@pytest.mark.parametrize(("scale", "looks"), [(1.0, [WINDOW + 1]), (1.5, [])])
def test_one_skip_is_enough_where_the_scale_lies_at_its_floor(scale, looks):
    assert counted(Counter(torch.device("cpu"), 1.0), [0, 1] + [0] * 20, scale) == looks


def test_counters_of_other_devices_are_waited_for():
    found = counted(Counter(torch.device("xpu"), 1.0), [1] * 10, 2.0, lambda t: t.as_subclass(Elsewhere))
    assert found == [WINDOW + 1]


class Late:
    """An event on a device that comes when it is told to."""

    come = False

    def record(self):
        pass

    def query(self):
        return Late.come


def test_what_is_still_on_its_way_from_a_gpu_is_not_waited_for(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    monkeypatch.setattr(Late, "come", False)
    counter = Counter(torch.device("cuda"), 1.0)
    assert counted(counter, [0] + [1] * (3 * WINDOW), 2.0) == []
    monkeypatch.setattr(Late, "come", True)
    assert counted(counter, [0], 2.0) == []  # the first window, with one step that was fine
    assert counted(counter, [0], 2.0) == [1]  # all that came meanwhile, in one piece


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_the_cure_of_a_layer_whose_results_do_not_fit_trains(plan):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].weight.mul_(3e5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
    plan = halfstep.level(plan, "fp16")

    def train(plan):
        session = halfstep.initialize(model, optimizer, plan)
        for _ in range(3 * WINDOW):
            optimizer.zero_grad()
            session.backward(nn.functional.cross_entropy(model(inputs), targets))
            record = session.step()
        return record

    with pytest.raises(halfstep.NumericsError) as caught:
        train(plan)
    assert caught.value.verdict.module == "1"
    assert not bool(train(plan.edit(*caught.value.verdict.cure)).skipped)


def test_a_cure_that_the_plan_has_is_none():
    found = Diagnosis("overflow", "0", "linear", "forward", exact=1e6)
    model, plan = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), halfstep.level("O2", "fp16")
    first = untried_cure(plan, found, [model])
    assert first == (Rule("0", FULL_OUT),)
    assert untried_cure(plan.edit(*first), found, [model]) == WHOLE
    assert untried_cure(plan.edit(*first, *WHOLE), found, [model]) == ()


def test_an_optimizer_of_many_losses_is_watched_whichever_of_them_a_step_has():
    generator = random.Random(0)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16")

    good, bad = torch.randn(4, 16), torch.full((4, 16), torch.nan)

    def train():
        for step in range(20 + 8 * WINDOW):
            inputs = bad if step >= 20 else good
            optimizer.zero_grad()
            for task in [task for task in range(8) if generator.random() < 0.5] or [0]:
                session.backward(model(inputs)[:, task].square().mean(), loss_id=task)
            session.step()

    with pytest.raises(halfstep.NumericsError) as caught:
        train()
    assert caught.value.verdict.kind == "input data"
    session.close()


def test_an_optimizer_that_steps_rarely_is_seen():
    models = [nn.Linear(16, 4), nn.Linear(16, 4)]
    often, rarely = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in models)
    session = halfstep.initialize(models, [often, rarely], "O1", low="bf16")
    inputs = torch.randn(4, 16)

    def train():
        for _ in range(2 * WINDOW):
            for _ in range(40):
                often.zero_grad()
                session.backward(models[0](inputs).mean(), loss_id=0)
                session.step(often)
            rarely.zero_grad()
            session.backward(models[1](torch.full((4, 16), torch.nan)).mean(), loss_id=1)
            session.step(rarely)

    with pytest.raises(halfstep.NumericsError) as caught:
        train()
    assert caught.value.verdict.kind == "invalid"
    session.close()


def test_an_optimizer_that_steps_no_more_is_not_waited_for_for_ever():
    models = [nn.Linear(16, 4), nn.Linear(16, 4)]
    first, then = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in models)
    session = halfstep.initialize(models, [first, then], "O2", low="bf16")
    inputs = torch.randn(4, 16)

    def step(index, optimizer, inputs):
        optimizer.zero_grad()
        session.backward(models[index](inputs).mean(), loss_id=index)
        session.step(optimizer)
        return bool(_get_current_dispatch_mode_stack())

    assert [step(0, first, inputs * torch.nan) for _ in range(WINDOW + 1)][-1]  # its next step would be recorded
    recorded = sum(step(1, then, inputs) for _ in range(200))
    assert 40 < recorded < 80
    assert torch._dynamo.eval_frame._stance.stance == "default"
    session.close()


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_losses_with_scales_of_their_own_that_of_the_failing_one_counts(plan, order):
    model = nn.ModuleDict({"trunk": nn.Linear(16, 16), "0": nn.Linear(16, 4), "1": nn.Linear(16, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, plan, low="fp16")
    inputs = torch.randn(8, 16)

    def training():
        for _ in range(6 * WINDOW):
            optimizer.zero_grad()
            for loss_id in order:  # the gradient of the second fits fp16 at a scale of 1/8 and below
                with session.autocast():
                    loss = model[str(loss_id)](model["trunk"](inputs)).float().sum() * (3e5 if loss_id else 1.0)
                session.backward(loss, loss_id=loss_id)
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.module, verdict.cure) == ("scale too high", "1", (dynamic(2.0**-3, 2.0**-15),))
    assert session.status().scales[1] < session.status().scales[0]
    session.close()


def test_of_two_sessions_that_wait_at_a_time_each_sees_its_own_step():
    opened = []
    for _ in range(2):
        model = Cnn(LogOfZero())
        session, optimizer = session_on(model, "O2", "bf16")
        run(session, optimizer, model, WINDOW + 1, images())
        opened.append((session, optimizer, model))
    for session, optimizer, model in opened:
        with pytest.raises(NumericsError):
            run(session, optimizer, model, 1, images())
        session.close()
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("passed", [False, True])
def test_data_that_a_model_may_have_made_without_gradients_is_said_to_be_so(passed):
    models = [nn.Sequential(nn.Linear(8, 8), LogOfZero()), nn.Linear(8, 4)]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=1e-3)
    session = halfstep.initialize(models, optimizer, "O1", low="bf16")
    inputs = torch.randn(4, 8)

    def training():
        for _ in range(2 * WINDOW):
            with torch.no_grad():
                made = models[0](inputs) if passed else inputs * torch.nan
            optimizer.zero_grad()
            session.backward(models[1](made).mean())
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.kind == "input data"
    assert (guardian.PASSED in caught.value.verdict.advice) == passed
    session.close()


@mixed_plans
def test_watching_runs_no_operation(name, low):
    counts = []
    for watched in (False, True):
        model, optimizer, session = start(name, low)
        if not watched:
            session.watchers.clear()
        modes = [Counted() for _ in range(3 * WINDOW)]
        for number, mode in enumerate(modes):
            with mode:
                train(session, model, optimizer, [number], poison=[2])
        counts.append([mode.calls for mode in modes])
        session.close()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_evaluation_may_come_while_a_step_is_waited_for(low):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8, num_layers=2), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model, inputs = Reads(), torch.randn(3, 2, 8)
    session, optimizer = session_on(model, "O1", low, loss_scale=1.0)
    with torch.inference_mode():
        expected = model(inputs)
    for _ in range(WINDOW + 1):
        optimizer.zero_grad()
        session.backward(model(inputs * torch.nan).mean())
        session.step()
    (watching,) = session.watchers
    assert watching._armed is not None
    with torch.inference_mode():  # where an LSTM comes to the recorder whole, and its parts count on autocast
        assert torch.equal(model(inputs), expected)
    session.close()


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.randn(5, 16))
        self.down = nn.Parameter(torch.randn(5, 2) * 400)
        self.up = nn.Parameter(torch.randn(2, 16) * 400)

    def forward(self, x, change):
        return nn.functional.linear(x, self.base + change)


def train_on(loss, session, optimizer):
    for _ in range(4 * WINDOW):
        optimizer.zero_grad()
        session.backward(loss())
        session.step()


def combined_in_the_loop(model):
    return model(torch.randn(8, 16), model.down @ model.up).sum()


def combined_by_functional_call(model):
    weights = {"base": model.base + model.down @ model.up}
    return torch.func.functional_call(model, weights, (torch.randn(8, 16), torch.zeros(5, 16).half())).sum()


@pytest.mark.parametrize("loss", [combined_in_the_loop, combined_by_functional_call])
def test_weights_that_are_combined_before_the_forward_are_the_place(loss, caplog):
    torch.manual_seed(0)
    model = Merged()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = halfstep.initialize(model, optimizer, "O2", low="fp16")
    with caplog.at_level(logging.INFO, "halfstep"), pytest.raises(NumericsError) as raised:
        train_on(lambda: loss(model), session, optimizer)
    verdict = raised.value.verdict
    assert (verdict.kind, verdict.operator, verdict.phase) == ("overflow", "matmul", "forward")
    assert verdict.where.endswith(f"in {loss.__name__}")
    assert "thread" not in caplog.text
    session.close()


def test_a_long_loop_before_the_forward_is_not_kept_and_hides_nothing(monkeypatch):
    monkeypatch.setattr(guardian, "_BEFORE", 64)
    model = nn.Sequential(nn.Linear(8, 8), Gain())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = halfstep.initialize(model, optimizer, "O1", low="fp16")

    def loss():
        batch = torch.ones(4, 8)
        for _ in range(100):
            batch = batch + 0.0
        return model(batch).mean()

    with pytest.raises(NumericsError) as raised:
        train_on(loss, session, optimizer)
    assert (raised.value.verdict.operator, raised.value.verdict.module) == ("mul", "1")
    session.close()


def mask_of_two(model):
    padding, future = torch.zeros(4, 8), torch.full((4, 8), torch.finfo(torch.float32).min)
    padding[1] = torch.finfo(torch.float32).min
    mask = padding + future
    return (model(torch.ones(4, 8)) + mask).softmax(-1)[:, 0].mean()


def weights_of_classes(model):
    weights = 1 / torch.bincount(torch.zeros(4, dtype=torch.int64), minlength=8)
    return (model(torch.ones(4, 8)).softmax(-1) * weights).mean()


@pytest.mark.parametrize(
    ("loss", "operator", "line"),
    [(mask_of_two, "add", "in mask_of_two"), (weights_of_classes, "reciprocal", "in weights_of_classes")],
)
def test_what_the_loop_made_before_the_forward_is_no_input_data(loss, operator, line):
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model, "O1", "bf16")
    with pytest.raises(NumericsError) as raised:
        train_on(lambda: loss(model), session, optimizer)
    verdict = raised.value.verdict
    assert verdict.operator == operator
    assert verdict.where.endswith(line)
    assert "nan_to_num" not in verdict.advice
    session.close()


@pytest.mark.parametrize(("value", "word"), [(-torch.inf, "mask"), (torch.inf, "weights of classes")])
def test_what_may_be_a_mask_is_not_advised_to_become_0(value, word):
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model, "O1", "bf16")
    given = torch.full((4, 8), 0.5)
    given[:, 3] = value
    with pytest.raises(NumericsError) as raised:
        train_on(lambda: (model(torch.ones(4, 8)) * given).mean(), session, optimizer)
    assert raised.value.verdict.kind == "input data"
    assert raised.value.verdict.advice.startswith(f"where th{'is is a' if value < 0 else 'ese are'} {word}")
    assert "neginf=0" not in raised.value.verdict.advice
    session.close()
