"""Sums up in one sentence how a run went, from its log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

import numpy as np
import torch

from halfstep.errors import FormatError
from halfstep.explain.report.gather import MEASURES, Gathered, PrecisionOf, Sums
from halfstep.explain.report.lines import Event
from halfstep.explain.report.run import Run
from halfstep.formats import as_format
from halfstep.kinds import Kind
from halfstep.records import COMPARED, SUSPECT, UPDATE, Array, Finding, StepValues, Verdict, called, skips_in_words

STREAK = 8  # skipped steps in a row that a loss scale which comes down does not explain
OFTEN = 0.05  # of the steps after the first that was not skipped; to find its ceiling a dynamic scale skips 1 in 2,000
LOST = 0.05  # of the nonzero gradients
LOST_UPDATES = 0.1  # of the updates of weights without a master
QUIET = 60.0  # seconds without a line after which a log without an end counts as cut off; slow steps have longer
GRADIENTS = ("activation_grad", "weight_grad")

CAST_TOO_HIGH = "casting gradients to {format} overflows: the loss scale is too high"


@dataclass(frozen=True)
class Headline:
    """How a run went, in one sentence."""

    tone: str  # "good", "warning" or "bad"
    text: str
    verdict: Event | None = None  # what `text` reports, if it is a verdict
    details: tuple[str, ...] = ()  # further lines, such as on other verdicts


@dataclass(frozen=True)
class _Course:
    """What the rules of `headline` know of a run: its log, the sums of its observations, its plan and its verdicts."""

    run: Run
    gathered: Gathered
    now: float  # seconds since 1970
    plan: dict[str, Any]
    floor: float | None  # the minimum of a dynamic loss scale, None for others
    skipped: int  # steps
    verdicts: tuple[Event, ...]

    @property
    def is_plain(self) -> bool:
        return self.plan.get("param") == "full" and self.plan.get("ops") == "none"

    @property
    def findings(self) -> list[Finding]:
        return [event.record for event in self.run.events if isinstance(event.record, Finding)]

    @property
    def last(self) -> int:
        return self.run.steps[-1].step

    @property
    def cause(self) -> Event | None:
        """The last verdict on a problem that lowering a dynamic loss scale does not fix."""
        return next((event for event in reversed(self.verdicts) if not _is_calibration(self, event)), None)


def headline(run: Run, gathered: Gathered, now: float) -> Headline:
    """Returns how a run went, by the first of `_RULES` that applies; `now` is the time in seconds since 1970."""
    plan = run.plan or {}
    scale = plan.get("scale")
    course = _Course(
        run,
        gathered,
        now,
        plan,
        floor=scale.get("min") if isinstance(scale, dict) and scale.get("kind") == "dynamic" else None,
        skipped=sum(values.skipped for values in run.steps),
        verdicts=tuple(event for event in run.events if isinstance(event.record, Verdict)),
    )
    found = next(found for rule in _RULES if (found := rule(course)) is not None)
    if found.verdict is None and (event := course.cause) is not None:
        text = f"{found.text}; after step {event.step:,}: {_sentence(course, event)}"
        found = replace(found, text=text, verdict=event)
    return replace(found, details=tuple(_details(course, found)))


def sentence(verdict: Verdict, low: str) -> str:
    """Returns a verdict as one sentence; `low` is the low format of the run."""
    cast = verdict.kind is Kind.SCALE_TOO_HIGH and verdict.operator == "to"
    return (CAST_TOO_HIGH if cast else verdict.kind.sentence).format(
        operator=called(verdict.operator),
        place=verdict.place,
        format=_format(verdict, low),
        backward=" in the backward pass" * (verdict.phase == "backward"),
    )


def _format(verdict: Verdict, low: str) -> str:
    stored = verdict.call.output_formats if verdict.call is not None else ()
    try:
        return as_format(getattr(torch, stored[0], stored[0])).name if stored else low
    except FormatError:
        return low


# ---- the rules, each of which returns a headline or None


def _without_steps(course: _Course) -> Headline | None:
    if course.run.steps:
        return None
    if course.verdicts:
        event = course.verdicts[-1]
        return Headline("bad", f"No step was logged: {_sentence(course, event)}", event)
    if course.findings:
        grave = [each.severity for each in course.findings]
        tone = "bad" if "error" in grave else "warning" if "warning" in grave else "good"
        counted = [_count(grave.count(name), name) for name in ("error", "warning", "note") if name in grave]
        listed = " and ".join(filter(None, [", ".join(counted[:-1]), counted[-1]]))
        return Headline(tone, f"No step was logged: the check found {listed}")
    if observed := len(course.run.observed):
        return Headline("warning", f"No step was logged: tensors were observed at {_count(observed, 'step')}")
    return Headline("warning", "Nothing was logged: no step, no observation, no verdict")


def _stopped(course: _Course) -> Headline | None:
    if not course.verdicts or course.verdicts[-1].step < course.last:
        return None
    event = course.verdicts[-1]
    first = _streak_before(course.run.steps, event.step)
    raised = course.run.processes[-1].error == "NumericsError"
    if _is_calibration(course, event) and not raised:
        return None
    since = f" from step {first:,}" if first is not None and first < course.last else ""
    if first is None and not raised:
        return Headline("bad", f"At step {course.last:,}, the last one, {_sentence(course, event)}", event)
    return Headline("bad", f"Stopped at step {course.last:,}: {_sentence(course, event)}{since}", event)


def _diverged(course: _Course) -> Headline | None:
    losses = [
        (each.step, each.loss) for each in reversed(course.run.steps) if each.loss is not None and not each.skipped
    ]
    broken = list(takewhile(lambda seen: not math.isfinite(seen[1]), losses))
    return Headline("bad", f"Diverged: the loss is not finite from step {broken[-1][0]:,} on") if broken else None


def _stuck(course: _Course) -> Headline | None:
    streak = _streak(course)
    if not streak:
        return None
    at_floor = _at_floor(course, streak)
    where = f", the last {at_floor:,} at the smallest loss scale, {course.floor:g}" if at_floor else ""
    return Headline("bad", f"Stuck: every step from {streak[0].step:,} to {course.last:,} was skipped{where}")


def _lives_at_floor(course: _Course) -> Headline | None:
    if not (count := _at_floor(course, course.run.steps)):
        return None
    skips = f"Skips even at the smallest loss scale, {course.floor:g}: {_skips(course)}"
    return Headline("bad", f"{skips}, {count:,} of them at that scale")


def _absorbed(course: _Course) -> Headline | None:
    if not course.gathered.absorbed:
        return None
    worst = max(course.gathered.absorbed, key=lambda each: len(each.steps))
    seen, said = worst.first, worst.first.absorbed
    assert said is not None
    others = len(course.gathered.absorbed) - 1
    return Headline(
        "bad",
        f"Wrong values, all finite: {said.operator} in {seen.module or 'the model itself'} overflows in {said.format}, "
        f"and {said.by} turns that into {said.got:g} instead of {said.want:g}, seen in "
        f"{_count(len(worst.steps), 'step')}, from step {seen.step:,}"
        + (f"; the same in {_count(others, 'other place')}" if others else ""),
    )


def _imprecise(course: _Course) -> Headline | None:
    judged = [each for each in course.findings if each.code in (Kind.PRECISION_LOST, COMPARED)]
    if judged and judged[-1].code == Kind.PRECISION_LOST and judged[-1].severity != "note":
        cure = judged[-1].advice.partition(", with which")[0]
        return Headline("warning", f"Precision is lost in {judged[-1].place}: {cure}; {_skips(course)}")
    lost = [each for each in course.gathered.precision if each.is_lost]
    worst = max(lost, key=lambda each: each.off_by[-1], default=None)
    return None if worst is None else Headline("warning", f"Precision is being lost: {_off(worst)}; {_skips(course)}")


def _off(each: PrecisionOf) -> str:
    first = f", {_percent(each.off_by[0])} at step {each.steps[0]:,}" if len(each.steps) > 1 else ""
    far = f"off by {_percent(each.off_by[-1])} of its spread at step {each.steps[-1]:,}{first}"
    return f"what {each.module} returns is {far}; halfstep.check tries what cures it"


def _often_skipped(course: _Course) -> Headline | None:
    steps = list(course.run.steps)
    while steps and steps[0].skipped:  # a dynamic scale finds its place
        steps.pop(0)
    if sum(values.skipped for values in steps) <= OFTEN * len(steps):
        return None
    first = _streak_before(steps, course.last)
    ending = f", the last {sum(values.step >= first for values in steps):,} in a row" if first is not None else ""
    return Headline("warning", f"Often skipped: {_skips(course)}{ending}")


def _lost_updates(course: _Course) -> Headline | None:
    sums = course.gathered.kinds.get(UPDATE)
    rounds = course.plan.get("rounding") == "stochastic"  # then they come on average
    if sums is None or course.plan.get("master") != "none" or rounds or course.is_plain:
        return None
    share = _share(sums, "lost", "nonzero")
    if share[0] <= LOST_UPDATES:
        return None
    lost = f"{_percent(share[0])} of the updates are lost: weights in {' and '.join(sorted(sums.formats))}"
    return Headline("bad", f"{lost} have no master{_mostly(sums, share)}")


def _lost_values(course: _Course) -> Headline | None:
    if course.is_plain:
        return None
    kinds, low = course.gathered.kinds, course.gathered.low.name
    lost = f"of the nonzero {{}} gradients round to zero in {low}"
    judged = [(kind, "lost", "nonzero", LOST, lost.format(kind.partition("_")[0])) for kind in GRADIENTS]
    judged += [("activation", "saturated", "count", 0.0, f"of the activations are beyond {low}, or not finite")]
    for kind, measure, of, limit, what in judged:
        share = _share(kinds[kind], measure, of) if kind in kinds else np.zeros(1)
        if share[0] > limit:
            said = f"{_percent(share[0])} {what}{_mostly(kinds[kind], share)}"
            return Headline("warning", f"{said}; {_skips(course)}")
    return None


def _explained(course: _Course) -> Headline | None:
    event = course.cause
    if event is None:
        return None
    since = [values.skipped for values in course.run.steps if values.step > event.step]
    after = f"{_count(len(since), 'step')} since, {sum(since) or 'none'} skipped"
    return Headline("warning", f"Went on after step {event.step:,}, where {_sentence(course, event)}: {after}", event)


def _ended(course: _Course) -> Headline:
    process, figures = course.run.processes[-1], f"{_skips(course)}{_lost(course)}"
    event = course.verdicts[-1] if course.verdicts else None
    if process.error == "KeyboardInterrupt":
        return Headline("warning", f"Interrupted at step {course.last:,}: {figures}", event)
    if process.error is not None:
        return Headline("bad", f"Ended by {process.error} at step {course.last:,}: {figures}", event)
    if process.closed:
        well = "Few steps were skipped" if course.skipped else "No step was skipped and nothing overflowed"
        compared = [each for each in course.findings if each.code == COMPARED][-1:]
        if compared and not compared[0].advice.startswith("nothing to do"):  # more than rounding explains
            well += f"; {compared[0].evidence}"
        elif course.is_plain or compared:
            well = "Healthy"
        elif parts := course.gathered.precision:
            worst = max(parts, key=lambda each: each.off_by[-1])
            where = f"where precision was compared ({_count(len(parts), 'module')})"
            well = f"Healthy, {where}" if worst.off_by[-1] <= SUSPECT else f"{well}; {_off(worst)}"
        else:
            well += "; precision was not compared"
        return Headline("good", f"{well}: {figures}", event)
    pace = median([b.time - a.time for a, b in pairwise(course.run.steps[-100:])] or [0.0])
    if course.now - process.end < max(QUIET, 20 * pace):
        return Headline("good", f"Running, at step {course.last:,}: {figures}", event)
    return Headline("warning", f"Cut off after step {course.last:,} (the log has no end): until then {figures}", event)


_RULES = (
    _without_steps, _stopped, _diverged, _stuck, _lives_at_floor, _absorbed, _often_skipped, _lost_updates,
    _lost_values, _imprecise, _explained, _ended,
)  # fmt: skip


# ---- parts of them


def _details(course: _Course, found: Headline) -> Iterator[str]:
    run = course.run
    for event in course.verdicts:
        if event is not found.verdict:
            yield f"also, after step {event.step:,}: {_sentence(course, event)}"
        elif _is_calibration(course, event):
            yield f"a skip after step {event.step:,} was explained: the loss scale came down, as it should"
    for each in course.gathered.precision:
        if each.off_by[-1] > SUSPECT:
            yield _off(each)
    for process in run.processes[1:]:
        first = process.first_step
        yield "resumed" + (f" at step {first:,}" if first is not None else ", without a step since")
    losses = [values.loss for values in run.steps if values.loss is not None]
    if losses:
        yield f"loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last"


def _sentence(course: _Course, event: Event) -> str:
    assert isinstance(event.record, Verdict)
    return sentence(event.record, str(course.plan.get("low") or course.gathered.low.name))


def _is_calibration(course: _Course, event: Event) -> bool:
    """Tells whether a verdict only explains why a dynamic loss scale was lowered."""
    assert isinstance(event.record, Verdict)
    streak = _streak(course)
    down = course.floor is not None and not (streak and event.step >= streak[0].step)
    return down and event.record.kind == Kind.SCALE_TOO_HIGH


def _streak(course: _Course) -> list[StepValues]:
    """Returns the consecutive skipped steps at the end of a run if they are not normal, or else an empty list."""
    steps = course.run.steps
    first = _streak_before(steps, steps[-1].step) if steps else None
    streak = [] if first is None else [values for values in steps if values.step >= first]
    return streak if len(streak) >= STREAK or _at_floor(course, streak) else []


def _streak_before(steps: Sequence[StepValues], end: int) -> int | None:
    """Returns the number of the first step in the unbroken series of skipped steps that ends with step `end`."""
    streak = list(takewhile(lambda each: each.skipped, (each for each in reversed(steps) if each.step <= end)))
    return streak[-1].step if streak else None


def _at_floor(course: _Course, steps: Sequence[StepValues]) -> int:
    floor = course.floor
    return 0 if floor is None else sum(it.skipped and not it.bad_loss and it.scale <= floor for it in steps)


def _skips(course: _Course) -> str:
    count = len(course.run.steps)
    if course.is_plain:
        return f"{_count(count, 'step')} in fp32"
    if not course.skipped:
        return f"{_count(count, 'step')}, none skipped"
    bad = sum(bool(values.bad_loss) for values in course.run.steps)
    return skips_in_words(f"{course.skipped:,} of {_count(count, 'step')} skipped", bad)


def _lost(course: _Course) -> str:
    """Returns which share of the gradients was lost, as the end of a sentence; "" if there is nothing to say."""
    kinds = course.gathered.kinds
    gradients = [kinds[kind] for kind in GRADIENTS if kind in kinds]
    if course.is_plain:
        return ""
    if not gradients:
        return "; whether gradients were lost was not observed"
    totals = dict(zip(MEASURES, sum(sums.shares[0].sum(0) for sums in gradients), strict=True))
    if all(sums.formats == {"fp32"} for sums in gradients):
        share, most = totals["lost"] / max(1, totals["nonzero"]), ""
    else:
        share, most = (totals["lost"] + totals["zeros"]) / max(1, totals["count"]), "at most "
    if not share:
        return ", nothing lost"
    lost = _percent(share).removeprefix("under ") if most else _percent(share)
    return f", {most}{lost} of the gradients lost" if not most or share <= LOST else ""


def _share(sums: Sums, measure: str, of: str) -> Array:
    totals = dict(zip(MEASURES, sums.shares.sum(1).T, strict=True))
    return np.asarray(totals[measure] / np.maximum(1, totals[of]))


def _mostly(sums: Sums, share: Array) -> str:
    if len(share) < 3:
        return ""
    worst = 1 + int(np.argmax(share[1:]))
    return f" ({_percent(share[worst])} in {sums.modules[worst]})"


def _percent(share: float) -> str:
    return "under 0.01%" if share < 0.0001 else f"{float(f'{100 * share:.2g}'):g}%"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)
