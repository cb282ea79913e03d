"""The sentence at the top of a page: each case from a small log, its numbers counted by hand."""

import contextlib
import math

import pytest
import torch

from halfstep.explain.report.gather import gather
from halfstep.explain.report.headline import headline, sentence
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import read_log
from halfstep.formats import BF16, FP16
from halfstep.kinds import Kind
from halfstep.plan.io import to_dict
from halfstep.plan.levels import level
from halfstep.records import PRECISION, Finding, Observation, OpCall, SessionStart, StepRecord, Verdict
from halfstep.train.probe.rows import measure
from tests.report.logs import seen, step

INF, NAN = math.inf, math.nan


def session(name="O2", low=FP16, **edits):
    return SessionStart(to_dict(level(name, low)) | edits, "cpu", emulated=True)


O2, O0, O3, NO_SCALE = session(), session("O0"), session("O3", BF16, rounding="nearest"), session("O2", BF16)


def said(path, *records, error=None, killed=False, after=3600.0):
    """The headline of a run with these records, `after` seconds after its last line."""
    with contextlib.suppress(BaseException), RunLog(path) as log:
        for record in records:
            log(record) if isinstance(record, StepRecord) else log.record(record)
        if error is not None:
            raise error
    if killed:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]))
    run = read_log(path)
    return headline(run, gather(run.observations(), run.observed, FP16), run.processes[-1].end + after)


@pytest.fixture
def say(tmp_path):
    return lambda *records, **how: said(tmp_path / "run.jsonl", *records, **how)


def verdict(kind="overflow", module="h.1.attn", phase="forward", operator="softmax", call=None):
    return Verdict(module, operator, phase, Kind(kind), None, (), "seen", "do", call)


def steps(first, last, *, skipped=(), scale=1024.0, loss=1.0):
    return [step(number, skipped=number in skipped, scale=scale, loss=loss) for number in range(first, last + 1)]


GOOD, WARNING, BAD = "good", "warning", "bad"
UNCOMPARED = "No step was skipped and nothing overflowed; precision was not compared"
FEW = "Few steps were skipped; precision was not compared"
NOTHING = "Nothing was logged: no step, no observation, no verdict"
FINDINGS = [Finding(each, "code", "place", "seen", "do") for each in ("note", "error", "warning", "warning")]
RUNS = {
    "nothing skipped and nothing observed": (
        (O2, *steps(1, 30)), GOOD, f"{UNCOMPARED}: 30 steps, none skipped; whether gradients were lost was not observed"
    ),
    "a little lost": (
        (O2, *steps(1, 30), seen(30, "a", {0: 97, -30: 3})), GOOD,
        f"{UNCOMPARED}: 30 steps, none skipped, 3% of the gradients lost",
    ),
    "what is stored low has what it lost among its zeros": (
        (O2, *steps(1, 30), seen(30, "a", {0: 98}, zeros=2, fmt="fp16")), GOOD,
        f"{UNCOMPARED}: 30 steps, none skipped, at most 2% of the gradients lost",
    ),
    "many zeros say nothing about what was lost": (
        (O2, *steps(1, 30), seen(30, "a", {0: 50}, zeros=50, fmt="fp16")), GOOD, f"{UNCOMPARED}: 30 steps, none skipped"
    ),
    "a plan that leaves everything full skips and loses nothing": (
        (O0, *steps(1, 30), seen(30, "a", {-40: 50})), GOOD, "Healthy: 30 steps in fp32"
    ),
    "stopped at the first bad step": (
        (NO_SCALE, *steps(1, 9, skipped={9}), verdict("invalid", phase="backward")), BAD,
        "Stopped at step 9: softmax in h.1.attn has no finite result in the backward pass",
    ),
    "a verdict on a last step that was made did not stop it": (
        (O2, *steps(1, 9), verdict("masked row")), BAD,
        "At step 9, the last one, softmax in h.1.attn gets a row that is masked throughout",
    ),
    "a verdict and then recovered": (
        (O2, *steps(1, 20, skipped={20}), verdict(), *steps(21, 60, skipped={30})), WARNING,
        "Went on after step 20, where softmax in h.1.attn overflows in fp16: 40 steps since, 1 skipped",
    ),
    "skipped at the floor to the end": (
        (O2, *steps(1, 48), step(49, skipped=True, scale=2), step(50, skipped=True, scale=1)), BAD,
        "Stuck: every step from 49 to 50 was skipped, the last 1 at the smallest loss scale, 1",
    ),
    "a scale that lives at its floor": (
        (O2, *(step(number, skipped=number % 50 == 0, scale=1) for number in range(1, 102))), BAD,
        "Skips even at the smallest loss scale, 1: 2 of 101 steps skipped, 2 of them at that scale",
    ),
    "warned of while it was stuck": (
        (O2, *steps(1, 40, skipped=range(20, 41)), verdict(), *steps(41, 60, skipped=range(41, 61), scale=1)), BAD,
        "Stuck: every step from 20 to 60 was skipped, the last 20 at the smallest loss scale, 1; after step 40: "
        "softmax in h.1.attn overflows in fp16",
    ),
    "the scale could not come down far enough": (
        (O2, *steps(1, 9, skipped={9}, scale=1), verdict("scale too high"), step(10, skipped=True, scale=1)), BAD,
        "Stuck: every step from 9 to 10 was skipped, the last 2 at the smallest loss scale, 1; after step 9: "
        "the loss scale is too high for softmax in h.1.attn",
    ),
    "bad data that brought the scale to its floor": (
        (O2, *steps(1, 20, skipped=range(5, 21), scale=1), verdict("input data"), *steps(21, 60, scale=1)), BAD,
        "Skips even at the smallest loss scale, 1: 16 of 60 steps skipped, 16 of them at that scale; after step 20: "
        "the input data of h.1.attn are not finite",
    ),
    "a verdict long before the scale came down is not its cause": (
        (O2, *steps(1, 20, skipped={20}), verdict("scale too high"), *steps(21, 60, skipped=range(41, 61))), BAD,
        "Stuck: every step from 41 to 60 was skipped",
    ),
    "activations beyond the format": (
        (O2, *steps(1, 9), seen(9, "a", {0: 3}, kind="activation", infinities=1)), WARNING,
        "25% of the activations are beyond fp16, or not finite; 9 steps, none skipped",
    ),
    "empty": ((), WARNING, NOTHING),
    "a session alone": ((O2,), WARNING, NOTHING),
    "observed alone": (
        (O2, seen(3, "a", {0: 1})), WARNING, "No step was logged: tensors were observed at 1 step"
    ),
    "blamed alone": ((O2, verdict("weights")), BAD, "No step was logged: weights of h.1.attn are not finite"),
    "checked alone": (
        (O2, *FINDINGS), BAD, "No step was logged: the check found 1 error, 2 warnings and 1 note"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "tone", "text"), RUNS.values(), ids=RUNS)
def test_a_run_in_one_sentence(say, records, tone, text):
    found = say(*records)
    assert (found.tone, found.text) == (tone, text)


def test_healthy(say):
    found = say(O2, *steps(1, 300, skipped={1, 200}), seen(300, "a", {0: 5}))
    assert (found.tone, found.text) == ("good", f"{FEW}: 2 of 300 steps skipped, nothing lost")
    assert found.details == ("loss 1 at first, 1 at last",)


def test_stopped_by_a_verdict(say):
    found = say(O2, *steps(1, 162, skipped=range(146, 163)), verdict())
    assert found.tone == "bad"
    assert found.text == "Stopped at step 162: softmax in h.1.attn overflows in fp16 from step 146"
    assert found.verdict.step == 162


def test_the_last_of_several_verdicts_is_in_the_headline_and_the_others_below(say):
    some = [*steps(1, 5, skipped={5}), verdict("input data", ""), *steps(6, 9, skipped={8, 9}), verdict()]
    found = say(NO_SCALE, *some)
    assert found.text.startswith("Stopped at step 9: softmax in h.1.attn overflows in bf16 from step 8")
    assert found.details[0] == "also, after step 5: the input data of the model itself are not finite"


def test_a_scale_that_came_down_as_it_should_is_healthy(say):
    found = say(O2, *steps(1, 1, skipped={1}), verdict("scale too high", phase="backward"), *steps(2, 40))
    assert found.tone == "good"
    assert found.text.startswith(f"{FEW}: 1 of 40 steps skipped")
    assert found.details[0] == "a skip after step 1 was explained: the loss scale came down, as it should"


def test_a_last_step_that_the_scale_skipped_did_not_stop_it(say):
    found = say(O2, *steps(1, 40, skipped={40}), verdict("scale too high", phase="backward"))
    assert found.text.startswith(f"{FEW}: 1 of 40 steps skipped")


@pytest.mark.parametrize(("streak", "tone"), [(7, "warning"), (8, "bad")])
def test_skipped_to_the_end(say, streak, tone):
    found = say(O2, *steps(1, 50, skipped=range(51 - streak, 51)))
    assert found.tone == tone
    if tone == "bad":
        assert found.text == "Stuck: every step from 43 to 50 was skipped"
    else:
        assert found.text == "Often skipped: 7 of 50 steps skipped, the last 7 in a row"


@pytest.mark.parametrize(("skipped", "tone"), [(5, "good"), (6, "warning")])
def test_often_skipped_is_beyond_5_percent_of_the_steps_after_the_first_that_was_made(say, skipped, tone):
    # two at the start, while the scale comes down, and then 100 steps
    found = say(O2, *steps(1, 102, skipped={1, 2, *range(10, 10 + 2 * skipped, 2)}))
    assert found.tone == tone
    assert f"{skipped + 2} of 102 steps skipped" in found.text


def test_skips_for_losses_that_were_not_finite_are_named_and_are_none_of_the_smallest_scale(say):
    spoiled = [step(number, skipped=True, loss=NAN, scale=1, bad=True) for number in (5, 15, 25)]
    made = [step(number, loss=1, scale=1, bad=False) for number in range(1, 41) if number not in (5, 15, 25)]
    found = say(O2, *sorted([*spoiled, *made], key=lambda record: record.step))
    assert found.text == "Often skipped: 3 of 40 steps skipped (3 for a loss that was not finite)"


@pytest.mark.parametrize("name", ["O0", "O1"])
def test_diverged(say, name):
    losses = [*steps(1, 39), *steps(40, 60, loss=NAN)]
    found = say(session(name), *losses)
    assert (found.tone, found.text) == ("bad", "Diverged: the loss is not finite from step 40 on")


def test_a_loss_of_a_skipped_step_may_be_infinite(say):
    assert say(O2, *steps(1, 39), step(40, skipped=True, loss=INF, scale=2)).tone == "good"


@pytest.mark.parametrize(("lost", "tone"), [(20, "good"), (21, "bad")])
def test_updates_that_are_lost_without_a_master(say, lost, tone):
    updates = [("a", {3: 100}), ("b", {-2: lost, 3: 100 - lost})]  # 200 in all, of which a tenth may be lost
    found = say(O3, *steps(1, 9), *(seen(9, name, powers, kind="update", fmt="bf16") for name, powers in updates))
    assert found.tone == tone
    if tone == "bad":
        assert found.text == "10% of the updates are lost: weights in bf16 have no master (21% in b)"
    at_random = session("O3", BF16)  # whose small updates come on average
    assert say(at_random, *steps(1, 9), seen(9, "b", {-2: 100}, kind="update", fmt="bf16")).tone == "good"


def test_updates_that_a_master_keeps_are_not_lost(say):
    found = say(O2, *steps(1, 9), seen(9, "a", {-2: 100}, kind="update", fmt="fp16"))
    assert found.tone == "good"


@pytest.mark.parametrize(("lost", "tone"), [(5, "good"), (6, "warning")])
def test_gradients_that_are_lost(say, lost, tone):
    found = say(O2, *steps(1, 9), seen(9, "a", {0: 50}), seen(9, "b", {0: 50 - lost, -26: lost}))
    assert found.tone == tone
    if lost == 6:
        assert (
            found.text == "6% of the nonzero weight gradients round to zero in fp16 (12% in b); 9 steps, none skipped"
        )


@pytest.mark.parametrize(("after", "text"), [(1.0, "Running, at step 9"), (61.0, "Cut off after step 9")])
def test_a_log_without_an_end(say, after, text):
    found = say(O2, *steps(1, 9), killed=True, after=after)
    assert found.text.startswith(text)
    assert found.tone == ("good" if after == 1 else "warning")


def test_a_stopped_run_whose_log_has_no_end_was_stopped(say):
    found = say(O2, *steps(1, 9, skipped={8, 9}), verdict(), killed=True)
    assert found.text == "Stopped at step 9: softmax in h.1.attn overflows in fp16 from step 8"


@pytest.mark.parametrize(
    ("error", "text", "tone"),
    [
        (KeyboardInterrupt(), "Interrupted at step 9: 9 steps, none skipped", "warning"),
        (ValueError("x"), "Ended by ValueError at step 9: 9 steps, none skipped", "bad"),
    ],
)
def test_what_ended_it(say, error, text, tone):
    found = say(O2, *steps(1, 9), error=error)
    assert found.text.startswith(text)
    assert found.tone == tone


def test_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "halfstep.explain.report.log._now", lambda: 1e9
    )  # processes that start within one tick of the clock
    said(tmp_path / "log", O2, *steps(1, 9), killed=True)
    found = said(tmp_path / "log", O2, *steps(8, 20))
    assert found.text.startswith(f"{UNCOMPARED}: 20 steps, none skipped")
    assert found.details[0] == "resumed at step 8"
    assert said(tmp_path / "log", O2).details[1] == "resumed, without a step since"


def test_a_log_without_a_plan_has_no_floor(say):
    assert say(*steps(1, 100, skipped={50}, scale=1)).text.startswith(f"{FEW}: 1 of 100 steps skipped")


def test_every_kind_of_verdict_has_a_sentence():
    for kind in Kind:
        assert "{" not in sentence(verdict(kind), "fp16")


def test_the_format_of_a_verdict_is_that_of_the_operation():
    cast = verdict("scale too high", "", "backward", "to")
    assert sentence(cast, "fp16") == "casting gradients to fp16 overflows: the loss scale is too high"
    call = OpCall("m", "mul", "forward", ("float32",), ("float32",), (None,), (None,), None)
    assert sentence(verdict(call=call), "fp16") == "softmax in h.1.attn overflows in fp32"


def imprecise(number, off):
    return Observation(number, "a", PRECISION, "0", "fp32", 1.0, measure(torch.full((16,), off)))


COMPARED_WELL = Finding("note", "precision compared", "(model)", "off by 0.3%", "nothing to do: 10% may be rounding")
COMPARED_BADLY = Finding("note", "precision compared", "(model)", "gradients are off by 45%", "no edit that was tried")
LOST = Finding(
    "warning", "precision lost", "core, own.py:7", "cos of 3056", "plan.edit(Rule('core', FULL)), with which"
)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([COMPARED_WELL], "Healthy: 30 steps, none skipped"),
        (
            [COMPARED_WELL, COMPARED_BADLY],
            "No step was skipped and nothing overflowed; gradients are off by 45%: 30 steps",
        ),
        ([LOST], "Precision is lost in core, own.py:7: plan.edit(Rule('core', FULL)); 30 steps, none skipped"),
        ([LOST, COMPARED_WELL], "Healthy: 30 steps"),  # it was cured, and checked again
        ([imprecise(10, 0.01), imprecise(20, 0.02)], "Healthy, where precision was compared (1 module): 30 steps"),
        (
            [imprecise(10, 0.2), imprecise(20, 0.2)],
            "No step was skipped and nothing overflowed; what a returns is off by",
        ),  # not for a fault that nothing made worse
        ([imprecise(10, 0.6), imprecise(20, 0.6)], "Precision is being lost: what a returns is off by 60%"),
        (
            [imprecise(10, 0.02), imprecise(20, 0.4)],
            "Precision is being lost: what a returns is off by 40%",
        ),
    ],
)
def test_it_is_healthy_only_if_precision_was_compared_and_kept(say, records, text):
    assert say(O2, *records, *steps(1, 30)).text.startswith(text)
