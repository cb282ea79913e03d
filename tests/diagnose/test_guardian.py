"""The guardian: silent where skips are normal, and loud, with a verdict, where training has stopped."""

import itertools
import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import Kind, NumericsError, OpChange, Rule, Scaling, SetupError
from halfstep.explain.diagnose import guardian
from halfstep.explain.diagnose.counter import WINDOW, outgrown
from halfstep.explain.diagnose.cures import FULL_OUT, WHOLE, untried_cure
from halfstep.explain.diagnose.diagnosis import Diagnosis
from tests.contracts.cases import backward_and_step, start, train
from tests.diagnose.closures import alarm, cross_entropy, run, session_on, train_on
from tests.diagnose.faults.hosts import Cnn, Transformer, images, words
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
from tests.preflight.planted import product


@pytest.mark.slow_but("Cnn")
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
    error = alarm(run, session, optimizer, model, 4 * WINDOW)
    assert error.verdict.operator == operator
    assert error.verdict.module.endswith("plant")
    assert str(error.verdict) in str(error)
    assert session.status().steps == WINDOW + 2


def test_training_goes_on_after_the_error_is_caught():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    alarm(run, session, optimizer, model, 2 * WINDOW)
    model.plant = nn.Identity()
    assert not bool(run(session, optimizer, model, 1)[0].skipped)


def test_warn_says_it_once_and_goes_on(caplog):
    model = Cnn(Gain())
    assert all(bool(record.skipped) for record in run(*session_on(model, on_failure="warn"), model, 8 * WINDOW))
    assert caplog.text.count("was skipped like those before it") == 1


@pytest.mark.parametrize("value", ["ignore", None, 1])
def test_another_answer_to_failures_is_refused(value):
    with pytest.raises(SetupError, match="on_failure"):
        session_on(Cnn(nn.Identity()), on_failure=value)


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
@pytest.mark.slow_but("CustomBackward", "O1-Eps")
def test_a_named_cure_makes_the_run_train(host, plan, plant, change, kind, operator):
    model = host(plant())
    session, optimizer = session_on(model, plan)
    inputs = change(images() if host is Cnn else words())
    verdict = alarm(run, session, optimizer, model, 2 * WINDOW, inputs).verdict
    assert (verdict.kind, verdict.operator) == (kind, operator)
    cured = session.plan.edit(*verdict.cure)
    assert cured != session.plan
    session.close()
    session = halfstep.initialize(model, optimizer, cured, on_failure="warn")
    assert not any(bool(record.skipped) for record in run(session, optimizer, model, 2 * WINDOW, inputs)[-WINDOW:])


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_the_cure_of_a_layer_whose_results_do_not_fit_trains(plan):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model[1].weight.data.mul_(3e5)
    session, optimizer = session_on(model, plan)
    inputs = torch.randn(8, 16)
    verdict = alarm(run, session, optimizer, model, 3 * WINDOW, inputs).verdict
    assert verdict.module == "1"
    session.close()
    session = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    assert not bool(run(session, optimizer, model, 3 * WINDOW, inputs)[-1].skipped)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_weights_that_one_step_made_too_large_get_advice_and_no_edit(plan, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = make(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, plan, low="fp16")
    inputs, labels, steps = torch.randn(32, 16), torch.randint(0, 4, (32,)), itertools.count()

    def loss():
        optimizer.param_groups[0]["lr"] = 0.1 * (1e4 if next(steps) == WINDOW else 1)
        return F.cross_entropy(model(inputs), labels)

    verdict = alarm(train_on, loss, session, optimizer).verdict
    assert (verdict.kind, verdict.phase, verdict.cure) == ("overflow", "forward", ())
    assert "the weights have grown too far, and no edit cures that: load an earlier checkpoint" in verdict.advice
    assert " at the start of this session and is " in verdict.evidence


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_weights_whose_size_is_not_finite_have_grown_too_far(broken):
    first = {"a": torch.tensor(0.1), "b": torch.tensor(0.1), "c": torch.tensor(torch.nan)}
    now = {"a": torch.tensor(50.0), "b": torch.tensor(broken), "c": torch.tensor(torch.nan)}
    grown = outgrown(first, now)
    assert (grown.name, grown.first) == ("b", pytest.approx(0.1))


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_weights_beyond_fp32_squares_get_advice_and_no_edit(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0, weight_decay=1e30)
    session = halfstep.initialize(model, optimizer, plan, low="fp16")
    inputs = torch.randn(8, 16)
    verdict = alarm(train_on, lambda: model(inputs).float().square().mean(), session, optimizer).verdict
    assert verdict.cure == ()
    assert "the weights have grown too far" in verdict.advice
    assert "the sum of its squares is inf in fp32 now" in verdict.evidence


def test_data_is_not_laid_to_weights_that_have_grown():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    inputs = torch.full((4, 8), torch.nan)

    def loss():
        model.weight.data.fill_(100.0)
        return model(inputs).float().square().mean()

    verdict = alarm(train_on, loss, session, optimizer).verdict
    assert verdict.kind == "input data"
    assert "clean the batch" in verdict.advice


def test_a_number_that_the_code_passes_is_named():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    inputs = torch.randn(4, 8)
    verdict = alarm(train_on, lambda: model(inputs).float().square().mean() * torch.nan, session, optimizer).verdict
    assert verdict.advice == "the code passes NaN to mul: check where it comes from"


class Precise(nn.Module):
    """A squared error divided by a standard deviation so small that its inverse exceeds fp16."""

    def __init__(self):
        super().__init__()
        self.mean, self.deviation = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return ((1 - self.mean(x)) * (1 / (self.deviation(x).sigmoid() * 1e-5))).square().mean()


def test_an_inverse_that_is_too_large_gets_no_guess():
    torch.manual_seed(0)
    model, inputs = Precise(), torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, "O2", low="fp16")
    verdict = alarm(train_on, lambda: model(inputs).float(), session, optimizer).verdict
    assert (verdict.kind, verdict.operator, verdict.cure) == ("overflow", "reciprocal", ())
    assert ".py:" in verdict.where
    assert "halfstep.blame(session, closure) tries edits" in verdict.advice
    session.close()
    session = halfstep.initialize(model, optimizer, session.plan.edit(OpChange("deny", "reciprocal")))
    alarm(train_on, lambda: model(inputs).float(), session, optimizer)  # the guess would not have cured it


def test_a_cure_that_the_plan_has_is_none():
    found = Diagnosis(Kind.OVERFLOW, "0", "linear", "forward", exact=1e6)
    model, plan = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), halfstep.level("O2", "fp16")
    first = untried_cure(plan, found, [model])
    assert first == (Rule("0", FULL_OUT),)
    assert untried_cure(plan.edit(*first), found, [model]) == WHOLE
    assert untried_cure(plan.edit(*first, *WHOLE), found, [model]) == ()


@pytest.mark.slow_but("SqrtOfZero", "CustomDivide")
@pytest.mark.parametrize("plant", [LogOfZero, WhereTrap, SqrtOfZero, CustomDivide])
def test_where_it_is_not_known_that_fp32_has_a_value_no_cure_is_named(plant):
    model = Cnn(plant())
    verdict = alarm(run, *session_on(model), model, 2 * WINDOW).verdict
    assert (verdict.kind, verdict.module, verdict.cure) == ("invalid", "plant", ())
    assert "no edit was tried, so no cure is known: halfstep.blame(session, closure) tries edits" in verdict.advice


@pytest.mark.slow
def test_a_compiled_model_is_recorded_uncompiled():
    model = Cnn(LogOfZero())
    session, optimizer = session_on(model, "O2", "bf16")
    verdict = alarm(run, session, optimizer, torch.compile(model, backend="aot_eager"), 2 * WINDOW, images()).verdict
    assert (verdict.module, verdict.operator) == ("plant", "log")


def test_what_runs_in_autocast_alone_is_recorded():
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model, "O1", "bf16")

    def loss():
        with session.autocast():  # not in a forward
            return F.linear(torch.ones(4, 8), model.weight).log().sub(torch.inf).float().mean()

    assert alarm(train_on, loss, session, optimizer).verdict.operator in ("log", "sub")


def test_some_skips_among_good_steps_are_no_alarm():
    model, optimizer, session = start("O2", "bf16")
    records = train(session, model, optimizer, range(40), poison=set(range(0, 40, 3)))
    assert sum(bool(record.skipped) for record in records) == 14


def without_zero_grad(loss, session):
    """Trains on a loss times infinity, then on the loss."""
    for step in range(4 * WINDOW):
        backward_and_step(session, loss(torch.inf if step == 0 else 1.0))


def test_gradients_that_nobody_zeroes_are_named():
    model, inputs = Cnn(nn.Identity()), images()
    session, _ = session_on(model, "O1", "bf16")
    verdict = alarm(without_zero_grad, lambda factor: cross_entropy(model, inputs * factor), session).verdict
    assert verdict.kind == "stale gradients"


def test_of_two_sparse_gradients_the_one_that_nobody_zeroes_is_named():
    model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True), "other": nn.Embedding(6, 4, sparse=True)})
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    rows = torch.tensor([1, 2])

    def loss(factor):
        return model["table"](rows).sum() + factor * model["other"](rows).sum()

    verdict = alarm(without_zero_grad, loss, session).verdict
    assert (verdict.kind, verdict.module) == ("stale gradients", "other")
    assert "other.weight" in verdict.evidence


@pytest.mark.parametrize(("plan", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "fp16")])
@pytest.mark.parametrize("width", [16, 33, 64])
def test_a_batch_in_the_memory_of_freed_gradients_is_input_data(plan, low, width):
    model, steps = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 4)), itertools.count()

    def loss():
        inputs, wanted = torch.randn(8, width), torch.randn(8, 4)
        if next(steps) >= WINDOW // 2:
            inputs[0, 0] = torch.tensor(torch.nan)  # of a number torch 2.15 makes a fill, which is named as the fault
        return F.mse_loss(model(inputs), wanted)

    assert alarm(train_on, loss, *session_on(model, plan, low)).verdict.kind == "input data"


@pytest.mark.parametrize(("period", "raises"), [(2, True), (3, False), (WINDOW, False)])
@pytest.mark.parametrize(
    "options", [{"loss_scale": Scaling("dynamic", init=4.0)}, {"loss_scale": 4.0}, {"low": "bf16"}]
)
def test_a_fault_in_some_batches_is_told_once_and_ends_the_run_where_half_of_them_have_it(
    period, raises, options, caplog
):
    model, steps, inputs = nn.Sequential(nn.Linear(16, 4)), itertools.count(), torch.randn(8, 16)
    session, optimizer = session_on(model, **options)
    spoiled = inputs * torch.nan

    def loss():
        return cross_entropy(model, inputs if next(steps) % period else spoiled)

    if raises:
        error = alarm(train_on, loss, session, optimizer, 16 * WINDOW)
        assert error.verdict.kind == "input data"
        assert "was skipped like half of those before it, and a lower loss scale would not help" in str(error)
    else:
        train_on(loss, session, optimizer, 16 * WINDOW)
    said = [line for line in caplog.messages if "was skipped" in line]
    assert len(said) == 1
    assert (
        "like at least one in twenty of those before it, and a lower loss scale would not help\ninput data" in said[0]
    )
    assert set(session.status().scales.values()) <= {1.0, 4.0}  # as at first


class CountsOnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("right", torch.randn(16, 16))

    def forward(self, x):
        return product(self.linear(x), self.right)


def test_a_custom_operation_that_counts_on_autocast_can_be_recorded_blamed_and_checked():
    model, inputs = nn.Sequential(CountsOnAutocast(), nn.Linear(16, 4)), torch.randn(8, 16)
    session, optimizer = session_on(model, "O1", "bf16")
    assert halfstep.blame(session, lambda: cross_entropy(model, inputs)) is None
    found = halfstep.check(session, lambda: cross_entropy(model, inputs))
    assert [finding for finding in found if finding.severity == "error"] == []
    assert alarm(run, session, optimizer, model, 2 * WINDOW, inputs * torch.nan).verdict.kind == "input data"


def test_an_optimizer_of_many_losses_is_watched_whichever_of_them_a_step_has():
    generator = random.Random(0)
    model = nn.Linear(16, 8)
    session, optimizer = session_on(model, "O2", "bf16")
    good, bad = torch.randn(4, 16), torch.full((4, 16), torch.nan)

    def train():
        for step in range(20 + 8 * WINDOW):
            inputs = bad if step >= 20 else good
            optimizer.zero_grad()
            for task in [task for task in range(8) if generator.random() < 0.5] or [0]:
                session.backward(model(inputs)[:, task].square().mean(), loss_id=task)
            session.step()

    assert alarm(train).verdict.kind == "input data"


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

    assert alarm(train).verdict.kind == "invalid"


@pytest.mark.parametrize("passed", [False, True])
def test_data_that_a_model_may_have_made_without_gradients_is_said_to_be_so(passed):
    models, inputs = [nn.Sequential(nn.Linear(8, 8), LogOfZero()), nn.Linear(8, 4)], torch.randn(4, 8)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=1e-3)
    session = halfstep.initialize(models, optimizer, "O1", low="bf16")

    def loss():
        with torch.no_grad():
            made = models[0](inputs) if passed else inputs * torch.nan
        return models[1](made).mean()

    verdict = alarm(train_on, loss, session, optimizer).verdict
    assert verdict.kind == "input data"
    assert (guardian.PASSED in verdict.advice) == passed


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.randn(5, 16))
        self.down = nn.Parameter(torch.randn(5, 2) * 400)
        self.up = nn.Parameter(torch.randn(2, 16) * 400)

    def forward(self, x, change):
        return nn.functional.linear(x, self.base + change)


def combined_in_the_loop(model):
    return model(torch.randn(8, 16), model.down @ model.up).sum()


def combined_by_functional_call(model):
    weights = {"base": model.base + model.down @ model.up}
    return torch.func.functional_call(model, weights, (torch.randn(8, 16), torch.zeros(5, 16).half())).sum()


@pytest.mark.parametrize("loss", [combined_in_the_loop, combined_by_functional_call])
def test_weights_that_are_combined_before_the_forward_are_the_place(loss, caplog):
    model = Merged()
    session, optimizer = session_on(model)
    with caplog.at_level(logging.INFO, "halfstep"):
        verdict = alarm(train_on, lambda: loss(model), session, optimizer).verdict
    assert (verdict.kind, verdict.operator, verdict.phase) == ("overflow", "matmul", "forward")
    assert verdict.where.endswith(f"in {loss.__name__}")
    assert "thread" not in caplog.text


def test_a_long_loop_before_the_forward_is_not_kept_and_hides_nothing(monkeypatch):
    monkeypatch.setattr(guardian, "_BEFORE", 64)
    model = nn.Sequential(nn.Linear(8, 8), Gain())

    def loss():
        batch = torch.ones(4, 8)
        for _ in range(100):
            batch = batch + 0.0
        return model(batch).mean()

    verdict = alarm(train_on, loss, *session_on(model, "O1")).verdict
    assert (verdict.operator, verdict.module) == ("mul", "1")


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
    verdict = alarm(train_on, lambda: loss(model), *session_on(model, "O1", "bf16")).verdict
    assert verdict.operator == operator
    assert verdict.where.endswith(line)
    assert "nan_to_num" not in verdict.advice


@pytest.mark.parametrize(("value", "word"), [(-torch.inf, "mask"), (torch.inf, "class weights")])
def test_what_may_be_a_mask_is_not_advised_to_become_0(value, word):
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model, "O1", "bf16")
    given = torch.full((4, 8), 0.5)
    given[:, 3] = value
    with pytest.raises(NumericsError) as raised:
        train_on(lambda: (model(torch.ones(4, 8)) * given).mean(), session, optimizer)
    assert raised.value.verdict.kind == "input data"
    assert raised.value.verdict.advice.startswith(f"if the tensor {'is a' if value < 0 else 'holds'} {word}")
    assert "neginf=0" not in raised.value.verdict.advice
    session.close()
