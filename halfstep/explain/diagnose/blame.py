"""Finds the operation that made the first non-finite value in the loss or a gradient, the reason, and a cure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from halfstep.explain.diagnose.cures import lower_scales, scaling_cure, untried_cure
from halfstep.explain.diagnose.diagnosis import Diagnosis
from halfstep.explain.diagnose.rehearsal import Rehearsal, check_given, rehearsing
from halfstep.explain.diagnose.search import Run, Search, absorbed_findings, first_run, passes_at, tried
from halfstep.explain.diagnose.words import say
from halfstep.kinds import Kind
from halfstep.plan.levels import level
from halfstep.records import Finding, Verdict
from halfstep.train.session.parts import StepFacts
from halfstep.train.session.session import Session
from halfstep.validate import named, with_near_misses

_LOG = logging.getLogger("halfstep")
NOT_SEEN = (
    "the loss or its gradients are not finite, but the operation that caused this could not be recorded (it ran in "
    "another thread, or in compiled code): run the model in one thread, uncompiled, and call "
    "halfstep.blame(session, closure)"
)
LEAST = 2.0**-24  # the lowest loss scale that is tried: below it, little is left of a gradient in fp16


@with_near_misses
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
    """Returns why a closure fails at the loss scale of the last step; else None, and `tell` gets what was observed."""
    plan, scale = rehearsal.plan, last.scale
    run = first_run(rehearsal, scale)
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
        lower = next((at for at in lower_scales(scale, 1.0) if passes_at(rehearsal, at)), None)
    if lower is not None and rehearsal.inputs.same:
        found = replace(found, kind=Kind.SCALE_TOO_HIGH, lower_scale=lower)
        return say(found, plan, scaling_cure(plan.scale, lower), scale=scale)
    if _fails_again(rehearsal, run.scale, found):
        verdict = _try_cures(rehearsal, replace(run, found=found), scale)
        if verdict is not None and _fails_again(rehearsal, run.scale, found):  # else it may have run on another batch
            return verdict
    if found.kind is Kind.ERROR and found.raised is not None:
        raise found.raised
    why = "the closure does not repeat; use the same batch, and reset what the model keeps, in each run"
    found = replace(found, repeats=False, untried=why)
    return say(found, plan, untried_cure(plan, found, rehearsal.roots), scale=run.scale)


def _fails_again(rehearsal: Rehearsal, scale: float, found: Diagnosis) -> bool:
    """Runs the closure again and tells whether it fails in the same place and all runs got the same inputs."""
    rehearsal.rewind()
    try:
        again = first_run(rehearsal, scale, least=scale)
    except Exception:  # of an iterator over batches, or a list that they were taken from
        return False
    return again.found is not None and again.found.is_at(found) and rehearsal.inputs.same


def _nothing_found(rehearsal: Rehearsal, run: Run, last: StepFacts, tell: Callable[[Finding], None]) -> Verdict | None:
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


def _try_cures(rehearsal: Rehearsal, run: Run, scale: float) -> Verdict | None:
    """Runs the closure in fp32 and under edits that may cure it; the verdict has the first edits that did."""
    # Returns None if the closure repeats the failure only because it keeps non-finite tensors from the failed run.
    found, at = run.found, run.scale
    assert found is not None
    full = tried(rehearsal, level("O0", rehearsal.plan.low), scale)
    if isinstance(full, str):
        if found.raised is not None:  # the closure may raise even if all is finite
            raise found.raised
        likely = untried_cure(rehearsal.plan, found, rehearsal.roots)
        return say(replace(found, untried=full), rehearsal.plan, likely, scale=at)
    if full.met_data and not run.met_data:
        return None
    found = replace(found, full_loss=full.loss, full=full.found, tried=True)
    found = replace(found, grown=_beyond(rehearsal)) if found.loss_has_grown else found
    if full.found is not None or found.has_diverged or found.explodes:
        return say(found, rehearsal.plan, (), scale=at)
    search = Search(rehearsal, scale, full.loss)
    cure = search.narrow(found)
    if cure is None and found.may_be_scale and rehearsal.plan.ops != "none":
        rehearsal.rewind()
        lower = first_run(rehearsal, min(scale, 1.0), least=LEAST).lower
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
