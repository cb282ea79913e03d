"""Runs a closure under a recorder, and tries plans and edits on copies of the models until it runs as it should."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from torch import Tensor, nn

from halfstep.edits import Edit, OpChange, spell
from halfstep.errors import HalfstepError, OpError, SessionError
from halfstep.explain.diagnose.cures import (
    WHOLE,
    candidates,
    candidates_of_error,
    edited,
    is_op,
    is_whole,
    lower_scales,
    narrow_candidates,
    rules_around,
    with_edits,
)
from halfstep.explain.diagnose.diagnosis import Diagnosis, diagnose, find_origin, last_origin, of_error
from halfstep.explain.diagnose.rehearsal import Rehearsal, rehearsing
from halfstep.explain.diagnose.words import error_words, place_of, which_model
from halfstep.explain.tape.absorbed import Absorbed
from halfstep.explain.tape.nonfinite import finite_range, nonfinite
from halfstep.explain.tape.recorder import Note, OpRecorder
from halfstep.formats import Format, needs_scale
from halfstep.kinds import Kind
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.records import Finding
from halfstep.torch_internals import BEYOND
from halfstep.train.scale.loss import FP16_LOSS_CEILING
from halfstep.train.session.session import Session

_OF_NUMBERS = (ValueError, ArithmeticError, AssertionError, RuntimeError)  # what code raises when it checks its numbers
_NOT_REACHED = (
    "no gradient reached the copies of the session's models, so the closure does not call these models, or uses "
    "their weights directly"
)
_READS_ORIGINALS = (
    "edits are tried on copies of the models, but the code also reads weights of the original ones, for example in a "
    "lambda that refers to a module: read them in a method of the module instead, or as weight.float()"
)
_TRIES = 24  # plans that are tried on the closure, one run each
_FAULTS = 4  # places that are cured one after the other, if the closure fails in several
_CLOSE = 0.5  # of the loss in fp32: how far the loss under a cure may differ from it
_OF_RANGE = 4.0  # an output this many times as large as on this batch must still fit
_OF_FLOOR = 2.0  # times the lowest loss scale: at its floor a dynamic scale skips whenever it tries the next larger
_CASTS = ("_to_copy", "copy_")

Works = Callable[[Rehearsal], bool]
_UNTRIED = "so no edit could be tried"
_SAME_BATCH = "make the closure use the same batch on every call"


@dataclass
class Run:
    """One run of the closure: its loss, what was recorded, and the failure that was `found` (None: all is finite)."""

    loss: float
    recorder: OpRecorder
    found: Diagnosis | None
    scale: float  # the loss scale at which the run failed, or passed
    lower: float | None = None  # a lower scale at which all is finite, if the run failed and one was found
    has_room: bool = True  # False: values come so close to their formats' limits that the next batch may overflow
    edits: tuple[Edit, ...] = ()  # with which it ran, as a cure

    @property
    def met_data(self) -> bool:
        """Whether the run met bad data: a non-finite tensor that is not part of the models."""
        met = (leaf for note in self.recorder.notes for leaf in note.leaves if not leaf.masked)
        return any(leaf.kind in ("data", "unseen") for leaf in met)


def first_run(rehearsal: Rehearsal, scale: float, *, least: float = 1.0, recorder: OpRecorder | None = None) -> Run:
    """Runs the closure under a recorder; if its backward pass overflows, repeats that pass at lower loss scales."""
    # If the backward pass fails there too, the failure at `least` is reported, because failures that occur only at
    # higher scales would be cured by a dynamic scale.
    recorder = recorder or OpRecorder(rehearsal.roots)
    with rehearsal.recording(recorder):
        try:
            loss = rehearsal.loss()
            recorder.trail.end([loss])
        except HalfstepError:
            raise
        except _OF_NUMBERS as error:
            return Run(math.nan, recorder, _before(rehearsal, recorder, error), scale)
        finite = nonfinite(loss) is None
        found = _look(rehearsal, recorder, loss, scale) if finite else _of_sinks(rehearsal, recorder, [loss])
    run = Run(float(loss.detach()), recorder, found, scale)
    if found is None or not found.may_be_scale or not finite:
        return run
    for lower in lower_scales(scale, least):
        if is_finite_at(rehearsal, loss, lower):
            return replace(run, lower=lower)
    if scale <= least:
        return run
    with rehearsal.recording(recorder):
        below = _look(rehearsal, recorder, loss, least)
    return run if below is None else replace(run, found=below, scale=least)


def _before(rehearsal: Rehearsal, recorder: OpRecorder, error: Exception) -> Diagnosis:
    """Returns the diagnosis of the last non-finite value before the closure raised `error`, or of the error itself."""
    origin = last_origin(recorder)
    if origin is None:
        return of_error(recorder, error, rehearsal.plan.low)
    return replace(diagnose(recorder, origin, rehearsal.plan, rehearsal.full), raised=error)


def _look(rehearsal: Rehearsal, recorder: OpRecorder, loss: Tensor, scale: float) -> Diagnosis | None:
    """Runs the backward pass of a loss and returns the diagnosis of its gradients; None if all are finite."""
    with rehearsal.gradients(loss, scale) as gradients:
        return _of_sinks(rehearsal, recorder, gradients)


def _of_sinks(rehearsal: Rehearsal, recorder: OpRecorder, sinks: Sequence[Tensor]) -> Diagnosis | None:
    origin = find_origin(recorder, sinks)
    return None if origin is None else diagnose(recorder, origin, rehearsal.plan, rehearsal.full)


def is_finite_at(rehearsal: Rehearsal, loss: Tensor, scale: float) -> bool:
    """Tells whether all gradients of a loss are finite at a loss scale."""
    with rehearsal.gradients(loss, scale) as gradients:
        return all(nonfinite(gradient) is None for gradient in gradients)


def passes_at(rehearsal: Rehearsal, scale: float, *, gradients: bool = True) -> bool:
    """Tells whether the loss, and its gradients, are finite at a loss scale, on which it depends by `session.grad`."""
    rehearsal.rewind()
    with rehearsal.at_scale(scale):
        try:
            loss = rehearsal.loss()
        except Exception:  # there are no more batches, or it looks at its numbers itself
            return False
        return nonfinite(loss) is None and (not gradients or is_finite_at(rehearsal, loss, scale))


class CastRecorder(OpRecorder):
    """A recorder that also keeps, as `largest`, the largest magnitude cast to `low` in the forward pass."""

    def __init__(self, roots: Sequence[nn.Module], low: Format) -> None:
        super().__init__(roots)
        self._low = low
        self.largest = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the values that were cast could be several times as large and still fit."""
        return self.largest * _OF_RANGE <= self._low.max

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Looks at the result of a cast."""
        if note.aten in _CASTS and note.phase == "forward" and isinstance(result, Tensor):
            span = finite_range(result) if result.dtype is self._low.dtype else None
            if span is not None:
                below = 0.0 if span[0] == -self._low.max else -span[0]  # the value of a mask
                self.largest = max(self.largest, span[1], below)


@dataclass
class Search:
    """Searches for edits under which the closure's numbers are finite, the smallest changes first.

    Edits that leave room, below the limits of the formats and above the scale's floor, are preferred.
    """

    rehearsal: Rehearsal
    scale: float  # the session's loss scale
    full_loss: float  # in fp32, to which the loss under the edits must be close
    left: int = _TRIES  # how many more edits may be tried

    def narrow(self, found: Diagnosis) -> Run | None:
        """Returns edits that cure the failure and leave part of the model low, or None."""
        return self._within(found, (), _FAULTS)

    def whole(self, found: Diagnosis) -> Run | None:
        """Returns the edit that keeps the whole model full, if it cures the failure; otherwise None."""
        run = self._run(WHOLE) if WHOLE in candidates(self.rehearsal.plan, found, self.rehearsal.roots) else None
        return None if run is None or run.found is not None else self._cure(WHOLE, run)

    def _within(self, found: Diagnosis, kept: tuple[Edit, ...], faults: int) -> Run | None:
        moved: tuple[tuple[Edit, ...], Diagnosis] | None = None
        tight: Run | None = None
        for more in narrow_candidates(self.rehearsal.plan, found, self.rehearsal.roots):
            edits = with_edits(kept, more)
            run = None if is_whole(edits) else self._run(edits)
            if run is None:
                continue
            is_close = abs(run.loss - self.full_loss) <= _CLOSE * max(abs(self.full_loss), 1e-3)
            if run.found is None and is_close:
                cure = self._cure(edits, run)
                if cure.has_room:
                    return cure
                tight = tight or cure
            if moved is None and run.found is not None and run.found.module not in (found.module, None):
                moved = edits, run.found
        if tight is not None or moved is None or faults <= 1:
            return tight
        return self._within(moved[1], moved[0], faults - 1)

    def _cure(self, edits: tuple[Edit, ...], run: Run) -> Run:
        """Returns a run with the edits of which it shows that they cure."""
        scaled = edits if run.lower is None else (*edits, replace(self.rehearsal.plan.scale, init=run.lower))
        return replace(run, edits=scaled)

    def _run(self, edits: tuple[Edit, ...]) -> Run | None:
        self.left -= 1
        plans = edited(self.rehearsal.plan, [edits] if self.left >= 0 else [])
        runs = (tried(self.rehearsal, plan, self.scale) for _, plan in plans)
        return next((run for run in runs if isinstance(run, Run)), None)


def tried(rehearsal: Rehearsal, plan: Plan, scale: float) -> Run | str:
    """Runs the closure on copies of the models under a plan; returns the run, or the reason why it was not possible."""
    rehearsal.rewind()
    try:
        with rehearsal.under(plan) as trial:
            scaling, at, least, floor = plan.scale, plan.scale.first, plan.scale.first, 0.0
            if scaling.adapts:  # even if it has come down to its floor, it will grow again
                least, floor = scaling.min, min(_OF_FLOOR * scaling.min, scaling.max)
                at = min(max(scale, _OF_FLOOR * scaling.min), scaling.max)
            recorder = CastRecorder(trial.roots, plan.low)
            run = first_run(trial, at, least=least, recorder=recorder)
            if run.found is not None and run.found.kind is Kind.ERROR and run.found.raised is not None:
                raise run.found.raised
            if run.lower is not None:  # a scale that will come down cures it by itself
                run = replace(run, found=None)
            run = replace(run, has_room=recorder.has_room and (at if run.lower is None else run.lower) >= floor)
            if trial.reads_originals and run.found is not None and run.found.low is plan.low:
                return _READS_ORIGINALS
            return run if run.found is not None or any(p.grad is not None for p in trial.params) else _NOT_REACHED
    except Exception as error:  # whatever the code raises under another plan
        said = str(error).partition(". ")[0].partition("\n")[0]
        return f"a copy of the model cannot be made or run: {type(error).__name__}{said and ': '}{said}"


def first_cure(rehearsal: Rehearsal, cures: Iterable[tuple[Edit, ...]], works: Works) -> tuple[Edit, ...]:
    """Returns the first edits under which `works` is true for copies of the models; () if there is none."""
    for edits, plan in edited(rehearsal.plan, cures):  # no generator expression, which would hide a StopIteration
        if works_under(rehearsal, plan, works):
            return edits
    return ()


def works_under(rehearsal: Rehearsal, plan: Plan, works: Works) -> bool:
    """Tells whether `works` is true for copies of the models under a plan; False if the plan does not fit."""
    rehearsal.rewind()
    try:
        with rehearsal.under(plan) as trial:
            return works(trial)
    except HalfstepError:
        return False


_Place: TypeAlias = tuple[str | None, str | None]  # a module and a line


def absorbed_findings(rehearsal: Rehearsal, recorder: OpRecorder) -> list[Finding]:
    """Returns a finding for each place where a recorded forward pass overflowed and the overflow was absorbed."""
    places: dict[_Place, Absorbed[Note]] = {}
    for each in recorder.trail.found:
        places.setdefault(_place(recorder, each), each)
    return [_said(recorder, each, *_cure(rehearsal, recorder, each)) for each in places.values()]


def _place(recorder: OpRecorder, absorbed: Absorbed[Note]) -> _Place:
    return absorbed.origin.of.module, recorder.line(absorbed.origin.of)


def _cure(rehearsal: Rehearsal, recorder: OpRecorder, absorbed: Absorbed[Note]) -> tuple[tuple[Edit, ...], str]:
    """Returns (edits, reason): edits under which the overflow is no longer absorbed, and why there are none."""
    place, inputs = _place(recorder, absorbed), rehearsal.inputs
    operator, rules = recorder.operator(absorbed.origin.of), rules_around(place[0], rehearsal.plan, rehearsal.roots)
    candidates: list[tuple[Edit, ...]] = [*rules, *([(OpChange("deny", operator),)] if is_op(operator) else [])]

    def works(trial: Rehearsal) -> bool:
        again = OpRecorder(rehearsal.roots)
        with trial.recording(again):
            loss = trial.loss()
        again.trail.end([loss])
        cured = place not in {_place(again, each) for each in again.trail.found}
        return cured and bool(loss.isfinite()) and inputs.same

    try:
        edits = first_cure(rehearsal, takewhile(lambda _: inputs.same, candidates), works)
    except StopIteration:
        return (), f"the closure ran out of batches, {_UNTRIED}"
    except Exception as error:  # whatever copying the model raises
        return (), f"a copy of the model cannot be made or run ({type(error).__name__}), {_UNTRIED}"
    if not inputs.same:
        return (), f"the closure takes another batch each time, {_UNTRIED}"
    return edits, "" if edits else "no edit of the plan was found that cures it"


def _said(recorder: OpRecorder, absorbed: Absorbed[Note], edits: tuple[Edit, ...], reason: str) -> Finding:
    origin, by = absorbed.origin.of, absorbed.by
    line, line_by = recorder.line(origin), recorder.line(by)
    said = absorbed.said(recorder.operator(origin), line, recorder.operator(by), line_by)
    evidence = f"{said}{which_model(origin.module)}"
    advice = f"compute this in fp32, or scale the values down first; {reason}"
    advice = f"{spell(edits)}, under which this does not happen" if edits else advice
    return Finding("warning", "overflow absorbed", place_of(origin.module, line), evidence, advice, edits)


def error_of(session: Session, closure: Callable[[], Any]) -> Finding | None:
    """Returns a finding about the error that a step raises, with edits under which it runs; None if it raises none."""
    with rehearsing(session, closure) as rehearsal:
        recorder = OpRecorder(rehearsal.roots, examine=False)
        with rehearsal.recording(recorder):
            failure, _ = run_step(rehearsal, recorder, 1.0)
        return None if failure is None else explained(rehearsal, failure)


def run_step(
    rehearsal: Rehearsal, recorder: OpRecorder, scale: float, look: Callable[[], None] = lambda: None
) -> tuple[Diagnosis | None, Tensor | None]:
    """Runs a recorded step at a loss scale, and `look` before its gradients go; returns its error, or its loss."""
    try:
        loss = rehearsal.loss()
        recorder.trail.end([loss])
        if bool(loss.isfinite()):
            lower = min(scale, FP16_LOSS_CEILING) if needs_scale(loss.dtype) else scale
            with rehearsal.gradients(loss, lower):
                look()
    except SessionError:
        raise
    except Exception as error:  # whatever the model raises is what this is for
        return of_error(recorder, error, rehearsal.plan.low), None
    return None, loss


def explained(rehearsal: Rehearsal, failure: Diagnosis) -> Finding:
    """Returns a finding about a failure, with edits under which the step runs, or the reason why there are none."""
    edits: tuple[Edit, ...] = ()
    reason = "cast the inputs to one format before the operation is called; no edit of the plan was found that cures it"
    try:
        if works_under(rehearsal, rehearsal.plan, _runs):
            reason = f"a second call of the closure did not fail, {_UNTRIED}; {_SAME_BATCH}"
        else:
            edits = first_cure(rehearsal, candidates_of_error(rehearsal.plan, failure, rehearsal.roots), _runs)
            if not edits and not works_under(rehearsal, level("O0", rehearsal.plan.low), _runs):
                reason = "it fails in fp32 as well, so the format is not the cause: fix the step, then check again"
    except StopIteration:
        reason = f"the closure ran out of batches, {_UNTRIED}; {_SAME_BATCH}"
    except Exception as error:  # such as a tensor that the model keeps from its last forward
        reason = (
            "cast the inputs to one format before the operation is called; no edit could be tried, because a copy of "
            f"the model cannot be made or run: {type(error).__name__}: {error}"
        )
    place = place_of(failure.module, failure.line)
    of = f" of {', '.join(failure.formats)}" if failure.formats else ""
    what = f"{failure.operator or 'the step'} ({failure.phase}){of}"
    evidence = f"{what} raises {error_words(failure.raised)}{which_model(failure.module)}"
    code = "mixed formats" if len(set(failure.formats)) > 1 else "step fails"
    advice = f"{spell(edits)}, with which the step runs" if edits else reason
    if isinstance(failure.raised, OpError):
        code = "BCE on low inputs"
        advice = "use binary_cross_entropy_with_logits, or deny binary_cross_entropy so that it computes in fp32"
    elif BEYOND in str(failure.raised):
        code, least = "value beyond the format", "for a mask, use torch.finfo(scores.dtype).min"
        advice = f"{spell(edits)}; {least} instead" if edits else least
    return Finding("error", code, place, evidence, advice, edits)


def _runs(trial: Rehearsal) -> bool:
    try:
        with trial.gradients(trial.loss(), 1.0):
            return True
    except StopIteration:
        raise
    except Exception:  # the step fails under this plan as well
        return False
