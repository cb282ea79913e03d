"""A probe that watches for absorbed overflows names them at the steps that it looks at, and nothing on healthy ones."""

from __future__ import annotations

import gc
import io
import logging
import weakref

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.explain.report.html import page_of
from halfstep.explain.report.live import LiveLine
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import read_log
from halfstep.records import ABSORBED
from tests.preflight.test_absorbed import PLANTED, WIDE, Does, Fixed, checked, classifier, inputs

PLANS = pytest.mark.parametrize("plan", ["O1", "O2"])


def observed(pattern, plan, gain, steps=1, low="fp16", **options):
    """Returns what a probe saw of absorbed overflows in some steps of a model that does a pattern."""
    model = Fixed(Does(pattern), gain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, plan, low=low, emulate=True, on_failure="warn") as session:
        probe = session.observe(absorbed=True, **{"every": 1, "tensors": (), **options})
        for _ in range(steps):
            session.backward(model(inputs()).float().mean())
            session.step()
        return [each for each in probe.flush() if each.kind == ABSORBED]


@PLANS
@pytest.mark.parametrize("name", PLANTED)
def test_planted_ones_are_seen_with_their_numbers(name, plan):
    pattern, origin, by, at_o1 = PLANTED[name]
    found = observed(pattern, plan, WIDE)
    if plan == "O1" and not at_o1:
        assert found == []
        return
    (seen,) = found
    assert (seen.step, seen.module, seen.name, seen.format) == (1, "pattern", origin, "fp16")
    assert seen.absorbed is not None
    assert (seen.absorbed.operator, seen.absorbed.by, seen.absorbed.format) == (origin, by, "fp16")
    assert seen.stats.amax == pytest.approx(abs(seen.absorbed.exact))
    assert seen.stats.count == seen.stats.finite > 0
    assert seen.absorbed.off > 0.05


def test_the_elements_are_those_that_fp16_has_no_room_for():
    # 3,000 * v squared, v = k/16 - 31/32: beyond 65,519 where |v| > 0.0853, which 0.03125 alone is not, of 32 values
    (seen,) = observed(PLANTED["1 / (1 + x^2)"][0], "O2", WIDE)
    values = (WIDE * inputs()).flatten() ** 2
    assert seen.stats.count == int((values > 65519).sum()) == 16 * 8 * 30 // 32
    assert seen.stats.amax == pytest.approx(float(values.max()), rel=1e-3)
    assert seen.stats.saturated("fp16") == 1.0


def watched(x):
    """Computes a diagnostic that nobody reads."""
    torch.rsqrt(x.detach().square().sum() + 1), torch.rsqrt((x * x).sum() + 1)
    with torch.no_grad():
        torch.rsqrt((x * x).sum() + 1)
    return x


@PLANS
def test_a_diagnostic_that_nobody_reads_is_reported_by_none(plan):
    assert observed(watched, plan, WIDE) == []
    assert checked(watched, plan, WIDE) == ([], [])
    model = Fixed(Does(watched), WIDE)
    predicted = halfstep.whatif(lambda: model(inputs()).float().mean(), model, ["fp16"], plan=plan)
    assert [each.code for each in predicted.stay_full["fp16"] if each.code == "overflow absorbed"] == []


def test_only_the_steps_that_are_observed_are_looked_at():
    found = observed(PLANTED["RMS norm"][0], "O2", WIDE, steps=7, every=3)
    assert [seen.step for seen in found] == [1, 3, 6]


def square_mean(x):
    return (x * x).mean(-1, keepdim=True)


def norm_of(x, mean):
    return x * torch.rsqrt(mean + 1e-5)


def in_no_grad(x):
    with torch.no_grad():
        mean = square_mean(x)
    return norm_of(x, mean)


def absorbed_in_no_grad(x):
    with torch.no_grad():
        scale = torch.rsqrt(square_mean(x) + 1e-5).clone()
    return x * scale


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return norm_of(x, square_mean(x))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def checkpointed(x, reentrant):
    return checkpoint(lambda t: norm_of(t, square_mean(t)), x, use_reentrant=reentrant)


WITHOUT_GRADIENTS = {
    "no_grad": in_no_grad,
    "absorbed in no_grad": absorbed_in_no_grad,
    "custom function": Norm.apply,
    "reentrant checkpoint": lambda x: checkpointed(x, True),
    "checkpoint": lambda x: checkpointed(x, False),
}


@PLANS
@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_where_gradients_are_off_in_a_training_forward_it_is_seen_once(name, plan):
    (seen,) = observed(WITHOUT_GRADIENTS[name], plan, WIDE)
    assert (seen.absorbed.operator, seen.absorbed.by) == ("mul", "rsqrt")


def test_an_evaluation_that_is_scored_with_gradients_on_is_not_seen():
    model = Fixed(Does(PLANTED["RMS norm"][0]), WIDE)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O2", low="fp16") as session:
        probe = session.observe(every=1, tensors=(), absorbed=True)
        with torch.no_grad():
            out = model(inputs())
        (out - inputs()).abs().mean()
        session.backward(sum(p.sum() for p in model.parameters()))
        session.step()
        assert probe.flush() == []


@PLANS
def test_the_loss_outside_of_the_model_is_seen_too(plan):
    model = nn.Linear(8, 8)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, low="fp16") as session:
        probe = session.observe(every=1, tensors=(), absorbed=True)
        out = model(inputs())
        square = (out.half() * 3e3) * (out.half() * 3e3)
        session.backward((1 / (1 + square.mean())).float() + out.mean())
        session.step()
        (seen,) = probe.flush()
    assert seen.module == ""
    assert seen.absorbed.where.startswith("test_overflows.py:")


def test_what_check_runs_is_not_seen():
    model, loss = classifier()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O2", low="fp16") as session:
        probe = session.observe(every=1, tensors=(), absorbed=True)
        assert [each for each in halfstep.check(session, loss) if each.code == "overflow absorbed"]
        session.backward(sum(p.float().sum() for p in model.parameters()))
        session.step()
        assert probe.flush() == []


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def trained(steps, emulate, **options):
    """Returns weights, operations of each step, and modes that are left, of the classifier whose norm overflows."""
    model, loss = classifier()
    counts = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Count() as count, halfstep.initialize(model, optimizer, "O2", low="fp16", emulate=emulate) as session:
        if options:
            session.observe(tensors=(), absorbed=True, **options)
        for _ in range(steps):
            before = count.count
            optimizer.zero_grad()
            session.backward(loss())
            session.step()
            counts.append(count.count - before)
    assert _get_current_dispatch_mode_stack() == []
    return [p.detach() for p in model.parameters()], counts


@pytest.mark.parametrize("emulate", [True, False])
def test_training_is_bit_identical_and_other_steps_cost_nothing(emulate):
    plain, expected = trained(6, emulate)
    watched, counts = trained(6, emulate, every=4)
    assert all(map(torch.equal, plain, watched))
    assert [counts[at] for at in (1, 4, 5)] == [expected[at] for at in (1, 4, 5)]
    # at every=50, five times the work of a step is 10%: (50 + 5) / 50
    assert expected[0] < counts[0] <= 6 * expected[0]
    assert expected[3] < counts[3] <= 6 * expected[3]


def test_a_guardian_that_records_the_same_step_and_a_second_probe_see_what_they_would_alone():
    model, loss = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(
        model, optimizer, "O2", low="fp16", emulate=True, loss_scale=2.0**100, on_failure="raise"
    ) as session:
        probes = [session.observe(every=every, tensors=(), absorbed=True) for every in (1, 2)]

        def train():
            for _ in range(60):
                session.backward(loss())
                session.step()

        with pytest.raises(halfstep.NumericsError, match="scale too high"):
            train()
        first, second = ([seen.step for seen in probe.flush()] for probe in probes)
    assert len(first) > 8
    assert first == list(range(1, len(first) + 1))
    assert second == [step for step in first if step == 1 or step % 2 == 0]
    assert _get_current_dispatch_mode_stack() == []


def test_a_session_that_is_dropped_leaves_no_mode_and_no_model():
    model = Fixed(Does(torch.square), 1.0)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O2", low="fp16")
    session.observe(tensors=(), absorbed=True)
    kept = weakref.ref(model)
    del session, model
    gc.collect()
    assert kept() is None
    assert _get_current_dispatch_mode_stack() == []


def test_what_goes_wrong_in_the_watch_ends_it_and_not_the_step(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("halfstep.explain.tape.absorbed.OverflowTrail._follow", broken)
    assert observed(PLANTED["RMS norm"][0], "O2", WIDE) == []
    assert "planted" in caplog.text


def test_an_error_of_the_model_is_its_own():
    model = Fixed(Does(lambda x: x @ torch.ones(3, 3)), 1.0)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O2", low="fp16") as session:
        session.observe(tensors=(), absorbed=True)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(inputs())


def test_at_o0_nothing_overflows():
    model = Fixed(Does(PLANTED["RMS norm"][0]), WIDE)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O0") as session:
        session.observe(tensors=("weight",), absorbed=True)
        assert _get_current_dispatch_mode_stack() == []


def test_log_page_live_line_and_headline_say_it(tmp_path):
    model, loss = classifier()
    optimizer, out = torch.optim.AdamW(model.parameters(), 1e-2), io.StringIO()
    live = LiveLine(console=Console(file=out, width=400))
    with (
        RunLog(tmp_path / "run.jsonl") as log,
        halfstep.initialize(model, optimizer, "O2", low="fp16", sinks=[log, live]) as session,
    ):
        probe = session.observe(every=3, absorbed=True)
        for _ in range(7):
            optimizer.zero_grad()
            session.backward(loss())
            session.step()
        seen = [each for each in probe.flush() if each.kind == ABSORBED]
    live.close()
    run = read_log(tmp_path / "run.jsonl")
    assert [each for each in run.observations() if each.kind == ABSORBED] == seen
    assert [each.step for each in seen] == [1, 3, 6]
    assert out.getvalue().count("overflow absorbed at norm, test_absorbed.py:") == 1
    assert "step 1: warning: overflow absorbed" in out.getvalue()
    page = page_of(run)
    assert page.headline.tone == "bad"
    assert page.headline.text.startswith(
        "Wrong values, all finite: mul in norm overflows in fp16, and rsqrt turns that into 0 instead of"
    )
    assert page.headline.text.endswith("seen in 3 steps, from step 1")
    (row,) = page.rows
    assert (row.step, row.severity, row.what) == (1, "warning", "overflow absorbed")
    assert row.place.startswith("norm, test_absorbed.py:")
    assert "seen in 3 of the steps that were looked at" in row.evidence
    assert ABSORBED not in page.charts["kinds"]


@pytest.mark.parametrize("probed", [False, True], ids=["alone", "beside a probe"])
def test_fp16_looks_for_them_unasked_at_the_10th_step_of_a_session_and_at_every_500th_and_says_so(
    tmp_path, caplog, probed
):
    model, loss = classifier()
    optimizer, steps = torch.optim.AdamW(model.parameters(), 1e-2), 12
    with caplog.at_level(logging.INFO, "halfstep"), RunLog(tmp_path / "run.jsonl") as log:
        session = halfstep.initialize(model, optimizer, "O2", low="fp16", sinks=[log])
        session.load_state_dict(session.state_dict() | {"steps": 495})  # of a run that is resumed
        probe = session.observe(every=500, tensors=(), absorbed=True) if probed else None
        for step in range(496, 496 + steps):
            watched = _get_current_dispatch_mode_stack() != []
            assert watched == (step in ((496, 500, 505) if probed else (500, 505)))
            optimizer.zero_grad()
            session.backward(loss())
            session.step()
        assert [each.step for each in probe.flush()] == [496, 500] if probed else True
        session.close()
    assert [each for each in caplog.messages if "at step 10 and at every 500th" in each]
    (said,) = [each.message for each in caplog.records if each.levelname == "WARNING" and "absorbed" in each.message]
    assert said.startswith("step 500: warning: overflow absorbed at norm, test_absorbed.py:")
    run = read_log(tmp_path / "run.jsonl")
    assert [each.step for each in run.observations()] == ([496, 500, 500, 505] if probed else [500, 505])
    page = page_of(run)
    assert page.headline.text.endswith(f"seen in {3 if probed else 2} steps, from step {496 if probed else 500}")
    assert ("absorbed overflows", "looked for at step 10 of a session and at every 500th") in page.facts


@pytest.mark.parametrize(("plan", "low"), [("O0", "fp16"), ("O2", "bf16")])
def test_other_formats_are_not_searched_unasked(plan, low, tmp_path):
    model, loss = classifier()
    with RunLog(tmp_path / "run.jsonl") as log:
        optimizer = torch.optim.AdamW(model.parameters())
        session = halfstep.initialize(model, optimizer, plan, low=low, sinks=[log])
        for _ in range(11):
            assert _get_current_dispatch_mode_stack() == []
            optimizer.zero_grad()
            session.backward(loss())
            session.step()
        session.close()
    page = page_of(read_log(tmp_path / "run.jsonl"))
    assert not any("absorbed" in fact for fact, _ in page.facts)
