"""Finds the operation that made the first non-finite value that reached the loss or a gradient, the reason, and a cure.

Runs the closure under a recorder and traces the failure back to its origin. Then runs the closure again at lower loss
scales, in fp32, and under edits that might cure the failure. Reports only what these runs showed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from halfstep.diagnose.absorbed_findings import absorbed_findings
from halfstep.diagnose.cures import (
    WHOLE,
    candidates,
    edited,
    is_whole,
    narrow_candidates,
    scaling_cure,
    untried_cure,
    with_edits,
)
from halfstep.diagnose.diagnosis import Diagnosis, diagnose
from halfstep.diagnose.headroom import OF_FLOOR, CastRecorder, keeps_scale
from halfstep.diagnose.origin import find_origin, last_origin
from halfstep.diagnose.rehearsal import Rehearsal, check_given, rehearsing
from halfstep.diagnose.words import say
from halfstep.edits import Edit, Scaling
from halfstep.errors import HalfstepError
from halfstep.observe.nonfinite import nonfinite
from halfstep.observe.recorder import OpRecorder
from halfstep.plan.compatibility import named
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.records import Finding, Kind, Verdict
from halfstep.session.parts import StepFacts
from halfstep.session.session import Session

_LOG = logging.getLogger("halfstep")
NOT_SEEN = (
    "the loss or its gradients are not finite, but the operation that caused this could not be recorded (it ran in "
    "another thread, or in compiled code): run the model in one thread, uncompiled, and call "
    "halfstep.blame(session, closure)"
)
_OF_NUMBERS = (ValueError, ArithmeticError, AssertionError, RuntimeError)  # what code raises when it checks its numbers
_NOT_REACHED = (
    "no gradient reached the copies of the session's models, so the closure does not call these models, or uses "
    "their weights directly"
)
_NO_REPEAT = "the closure does not repeat; use the same batch, and reset what the model keeps, in each run"
_READS_ORIGINALS = (
    "edits are tried on copies of the models, but the code also reads weights of the original ones, for example in a "
    "lambda that refers to a module: read them in a method of the module instead, or as weight.float()"
)
_TRIES = 24  # plans that are tried on the closure, one run each
_FAULTS = 4  # places that are cured one after the other, if the closure fails in several
LEAST = 2.0**-24  # the lowest loss scale that is tried: below it, little is left of a gradient in fp16
_CLOSE = 0.5  # of the loss in fp32: how far the loss under a cure may differ from it


@dataclass
class _Run:
    """One run of the closure: its loss, what was recorded, and the failure that was `found` (None: all is finite).

    `scale` is the loss scale at which the run failed, or passed. If it failed, `lower` is a lower loss scale at which
    all is finite; None if no such scale was found. `has_room` is False if values come so close to the limits of their
    formats that the next batch may overflow.
    """

    loss: float
    recorder: OpRecorder
    found: Diagnosis | None
    scale: float
    lower: float | None = None
    has_room: bool = True

    @property
    def met_data(self) -> bool:
        """Whether the run met bad data: a non-finite tensor that is not part of the models."""
        met = (leaf for note in self.recorder.notes for leaf in note.leaves if not leaf.masked)
        return any(leaf.kind in ("data", "unseen") for leaf in met)


def blame(session: Session, closure: Callable[[], Tensor], *, loss_id: int = 0) -> Verdict | None:
    """Returns which operation made the first non-finite value in the loss or the gradients; None if all are finite.

    `closure` computes a loss and returns it. blame runs it, and the backward pass, several times with the same random
    numbers; it must use the same batch each time, so do not fetch one inside. The loss scale is the current one of the
    loss `loss_id`; if its last step was skipped, it is the scale of that step. Cures are tried on a copy of the model.
    Afterwards weights, buffers, attributes of modules, gradients, optimizer, scale and random state are as before. If
    the closure raises an error because a number is not finite, the verdict explains that number.

    Under DistributedDataParallel a single process may call blame between steps, because blame does not communicate. If
    the forward itself communicates (as with SyncBatchNorm), call it on all processes at once, with batches that all
    fail, or in a single-process run.

    Raises:
        SessionError: the session is closed, or the closure is not a function that computes and returns the loss.
        SetupError: the model is sharded.
    """
    check_given("blame", session, closure)
    last = session.last_step(loss_id)
    with rehearsing(session, closure) as rehearsal:
        verdict = _verdict(rehearsal, last, session.tell)
    if verdict is not None:
        session.tell(verdict)
    return verdict


def _verdict(rehearsal: Rehearsal, last: StepFacts, tell: Callable[[Finding], None]) -> Verdict | None:
    """Returns why a closure fails at the loss scale of the last step; None if it does not fail or the cause is unknown.

    In these two cases, calls `tell` with findings on what was observed.
    """
    plan, scale = rehearsal.plan, last.scale
    run = _first_run(rehearsal, scale)
    if run.found is None:
        return _nothing_found(rehearsal, run, last, tell)
    if run.found.kind is None:
        _LOG.warning(NOT_SEEN)
        evidence, _, advice = NOT_SEEN.partition(": ")
        tell(Finding("warning", "not seen", "the closure", evidence, advice))
        return None
    if run.found.kind == Kind.ANOTHER_PROCESS:
        return say(run.found, plan, (), scale=scale)
    found, lower = replace(run.found, first_loss=last.first_loss), run.lower
    if lower is None and found.may_be_scale and not math.isfinite(run.loss):
        lower = _passing_from_the_start(rehearsal, scale)
    if lower is not None and rehearsal.inputs.same:
        found = replace(found, kind=Kind.SCALE_TOO_HIGH, lower_scale=lower)
        return say(found, plan, scaling_cure(plan.scale, lower), scale=scale)
    if _fails_again(rehearsal, run.scale, found):
        verdict = _try_cures(rehearsal, replace(run, found=found), scale)
        if verdict is not None and _fails_again(rehearsal, run.scale, found):  # else it may have run on another batch
            return verdict
    found = replace(found, repeats=False, untried=_NO_REPEAT)
    return say(found, plan, untried_cure(plan, found, rehearsal.roots), scale=run.scale)


def _fails_again(rehearsal: Rehearsal, scale: float, found: Diagnosis) -> bool:
    """Runs the closure again and tells whether it fails in the same place and all runs got the same inputs."""
    rehearsal.rewind()
    try:
        again = _first_run(rehearsal, scale, least=scale)
    except Exception:  # of an iterator over batches, or a list that they were taken from
        return False
    return again.found is not None and again.found.is_at(found) and rehearsal.inputs.same


def _first_run(rehearsal: Rehearsal, scale: float, *, least: float = 1.0, recorder: OpRecorder | None = None) -> _Run:
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
            return _Run(math.nan, recorder, _before(rehearsal, recorder, error, scale), scale)
        finite = nonfinite(loss) is None
        found = _look(rehearsal, recorder, loss, scale) if finite else _of_sinks(rehearsal, recorder, [loss], scale)
    run = _Run(float(loss.detach()), recorder, found, scale)
    if found is None or not found.may_be_scale or not finite:
        return run
    lower = _passing_scale(rehearsal, loss, scale, least)
    if lower is not None or scale <= least:
        return replace(run, lower=lower)
    with rehearsal.recording(recorder):
        below = _look(rehearsal, recorder, loss, least)
    return run if below is None else replace(run, found=below, scale=least)


def _before(rehearsal: Rehearsal, recorder: OpRecorder, error: Exception, scale: float) -> Diagnosis:
    """Returns the diagnosis of the last non-finite value before the closure raised `error`."""
    origin = last_origin(recorder)
    if origin is None:
        raise error
    return replace(diagnose(recorder, origin, rehearsal.plan, rehearsal.full, scale), raised=error)


def _look(rehearsal: Rehearsal, recorder: OpRecorder, loss: Tensor, scale: float) -> Diagnosis | None:
    """Runs the backward pass of a loss and returns the diagnosis of its gradients; None if all are finite."""
    with rehearsal.gradients(loss, scale) as gradients:
        return _of_sinks(rehearsal, recorder, gradients, scale)


def _of_sinks(rehearsal: Rehearsal, recorder: OpRecorder, sinks: Sequence[Tensor], scale: float) -> Diagnosis | None:
    origin = find_origin(recorder, sinks)
    return None if origin is None else diagnose(recorder, origin, rehearsal.plan, rehearsal.full, scale)


def _passing_scale(rehearsal: Rehearsal, loss: Tensor, scale: float, least: float) -> float | None:
    """Halves the loss scale, down to `least`, until all gradients are finite; returns that scale, or None."""
    while scale > least:
        scale = max(scale / 2, least)
        if _is_finite_at(rehearsal, loss, scale):
            return scale
    return None


def _passing_from_the_start(rehearsal: Rehearsal, scale: float) -> float | None:
    """Halves the scale and reruns the closure until all is finite; returns that scale, or None."""
    # Rerunning only the backward pass is not enough if the closure calls `session.grad`: then the loss depends on the
    # scale.
    while scale > 1:
        scale = max(scale / 2, 1.0)
        rehearsal.rewind()
        with rehearsal.at_scale(scale):
            try:
                loss = rehearsal.loss()
            except Exception:  # there are no more batches, or it looks at its numbers itself
                continue
            if nonfinite(loss) is None and _is_finite_at(rehearsal, loss, scale):
                return scale
    return None


def _is_finite_at(rehearsal: Rehearsal, loss: Tensor, scale: float) -> bool:
    with rehearsal.gradients(loss, scale) as gradients:
        return all(nonfinite(gradient) is None for gradient in gradients)


def _nothing_found(rehearsal: Rehearsal, run: _Run, last: StepFacts, tell: Callable[[Finding], None]) -> Verdict | None:
    """Handles a closure whose numbers are all finite: passes what was observed to `tell` as findings."""
    # Returns a verdict if the last step failed because of gradients left over from an earlier step, otherwise None.
    if last.bad and last.left_over:
        return say(Diagnosis.stale(last.bad), None, (), scale=last.scale)
    _LOG.info(
        "blame: nothing non-finite reached the loss or its gradients when the closure ran (loss %g, %d operations, "
        "loss scale %g)",
        run.loss,
        len(run.recorder.notes),
        last.scale,
    )
    for finding in absorbed_findings(rehearsal, run.recorder):
        _LOG.warning("blame: %s", finding)
        tell(finding)
    if last.bad or last.skipped:
        what = f"the gradients of {named(last.bad)} are not finite" if last.bad else "the last step was skipped"
        evidence = f"{what}, but the closure does not reproduce this: its loss and its gradients are finite"
        advice = (
            "run the closure on the batch that failed (an iterator may have moved on), and on the model as it was then"
        )
        _LOG.warning("blame: %s; %s", evidence, advice)
        tell(Finding("warning", "not reproduced", "the closure", evidence, advice))
    return None


def _try_cures(rehearsal: Rehearsal, run: _Run, scale: float) -> Verdict | None:
    """Runs the closure in fp32 and under edits that may cure it; the verdict has the first edits that did."""
    # Returns None if the closure repeats the failure only because it keeps non-finite tensors from the failed run.
    found, at = run.found, run.scale
    assert found is not None
    full = _tried(rehearsal, level("O0", rehearsal.plan.low), scale)
    if isinstance(full, str):
        if found.raised is not None:  # the closure may raise even if all is finite
            raise found.raised
        likely = untried_cure(rehearsal.plan, found, rehearsal.roots)
        return say(replace(found, untried=full), rehearsal.plan, likely, scale=at)
    if full.met_data and not run.met_data:
        return None
    found = replace(found, full_loss=full.loss, full=full.found, tried=True)
    found = replace(found, grown=_beyond(rehearsal)) if found.loss_has_grown else found
    hopeless = full.found is not None or found.has_diverged or found.explodes
    if hopeless or found.kind in (Kind.INPUT_DATA, Kind.STALE_GRADIENTS):
        return say(found, rehearsal.plan, (), scale=at)
    search = _Search(rehearsal, scale, full.loss)
    cure = search.narrow(found)
    lower = None if cure is not None else _below_one(rehearsal, found, scale)
    if lower is not None:
        found = replace(found, kind=Kind.SCALE_TOO_HIGH, lower_scale=lower)
        return say(found, rehearsal.plan, scaling_cure(rehearsal.plan.scale, lower), scale=scale)
    if cure is None or not cure.has_room:
        whole = search.whole(found)
        cure = whole if cure is None or (whole is not None and whole.has_room) else cure
    if cure is None:
        return say(found, rehearsal.plan, (), scale=at)
    return say(replace(found, cured_loss=cure.loss), rehearsal.plan, cure.edits, scale=at)


def _beyond(rehearsal: Rehearsal) -> tuple[str, float] | None:
    """Returns the name and magnitude of the largest weight if it exceeds the low format's maximum, otherwise None."""
    named = [(name, rehearsal.full(p).detach()) for root in rehearsal.roots for name, p in root.named_parameters()]
    sizes = [(name, float(p.abs().max())) for name, p in named if p.is_floating_point() and p.numel()]
    largest = max(sizes, key=lambda each: each[1], default=("", 0.0))
    return largest if largest[1] > rehearsal.plan.low.max else None


def _below_one(rehearsal: Rehearsal, found: Diagnosis, scale: float) -> float | None:
    """Returns the largest loss scale below 1, found by halving, at which the closure's numbers are finite, or None."""
    if not found.may_be_scale or rehearsal.plan.ops == "none":
        return None
    rehearsal.rewind()
    return _first_run(rehearsal, min(scale, 1.0), least=LEAST).lower


@dataclass(frozen=True)
class _Cure:
    """Edits under which all numbers are finite, the loss under them, and whether the formats leave room to spare."""

    edits: tuple[Edit, ...]
    loss: float
    has_room: bool


@dataclass
class _Search:
    """Searches for edits under which the closure's numbers are finite, the smallest changes first.

    Edits that leave room (values stay well below the limits of their formats, and the loss scale well above its floor)
    are preferred to edits that only just work. `scale` is the session's loss scale. `full_loss` is the loss in fp32, to
    which the loss under the edits must be close. `left` is how many more edits may be tried.
    """

    rehearsal: Rehearsal
    scale: float
    full_loss: float
    left: int = _TRIES

    def narrow(self, found: Diagnosis) -> _Cure | None:
        """Returns edits that cure the failure and leave part of the model low, or None."""
        return self._within(found, self._narrow(found), (), _FAULTS)

    def whole(self, found: Diagnosis) -> _Cure | None:
        """Returns the edit that keeps the whole model full, if it cures the failure; otherwise None."""
        run = self._run(WHOLE) if WHOLE in candidates(self.rehearsal.plan, found, self.rehearsal.roots) else None
        return None if run is None or run.found is not None else self._cure(WHOLE, run)

    def _narrow(self, found: Diagnosis) -> list[tuple[Edit, ...]]:
        return narrow_candidates(self.rehearsal.plan, found, self.rehearsal.roots)

    def _within(
        self, found: Diagnosis, narrow: Sequence[tuple[Edit, ...]], kept: tuple[Edit, ...], faults: int
    ) -> _Cure | None:
        moved: tuple[tuple[Edit, ...], Diagnosis] | None = None
        tight: _Cure | None = None
        for more in narrow:
            edits = with_edits(kept, more)
            run = None if is_whole(edits) else self._run(edits)
            if run is None:
                continue
            if run.found is None and self._is_close(run.loss):
                cure = self._cure(edits, run)
                if cure.has_room:
                    return cure
                tight = tight or cure
            if moved is None and run.found is not None and run.found.module not in (found.module, None):
                moved = edits, run.found
        if tight is not None or moved is None or faults <= 1:
            return tight
        return self._within(moved[1], self._narrow(moved[1]), moved[0], faults - 1)

    def _cure(self, edits: tuple[Edit, ...], run: _Run) -> _Cure:
        """Returns a `_Cure` with these edits and what their `run` showed."""
        scaled = edits if run.lower is None else (*edits, replace(self.rehearsal.plan.scale, init=run.lower))
        return _Cure(scaled, run.loss, run.has_room)

    def _run(self, edits: tuple[Edit, ...]) -> _Run | None:
        self.left -= 1
        if self.left < 0:
            return None
        for _, plan in edited(self.rehearsal.plan, [edits]):
            run = _tried(self.rehearsal, plan, self.scale)
            return None if isinstance(run, str) else run
        return None

    def _is_close(self, loss: float) -> bool:
        return abs(loss - self.full_loss) <= _CLOSE * max(abs(self.full_loss), 1e-3)


def _tried(rehearsal: Rehearsal, plan: Plan, scale: float) -> _Run | str:
    """Runs the closure on copies of the models under a plan; returns the run, or the reason why it was not possible."""
    rehearsal.rewind()
    try:
        with rehearsal.under(plan) as trial:
            at = _scale_under(plan.scale, scale)
            least = plan.scale.min if plan.scale.adapts else at
            recorder = CastRecorder(trial.roots, plan.low)
            run = _first_run(trial, at, least=least, recorder=recorder)
            if run.lower is not None:  # a scale that will come down cures it by itself
                run = replace(run, found=None)
            passes = at if run.lower is None else run.lower
            run = replace(run, has_room=recorder.has_room and keeps_scale(plan.scale, passes))
            if trial.reads_originals and run.found is not None and run.found.low is plan.low:
                return _READS_ORIGINALS
            reached = any(p.grad is not None for p in trial.params)
            return run if reached or run.found is not None else _NOT_REACHED
    except Exception as error:  # whatever the code raises under another plan
        said = str(error).partition(". ")[0].partition("\n")[0]
        return f"a copy of the model cannot be made or run: {type(error).__name__}{said and ': '}{said}"


def _scale_under(scaling: Scaling, scale: float) -> float:
    """Returns the loss scale at which to try a plan, given the session's current loss scale `scale`."""
    # A dynamic scale that has come down to its floor is tried above it, because it will grow again.
    if scaling.adapts:
        return min(max(scale, OF_FLOOR * scaling.min), scaling.max)
    return scaling.first
