"""Explains an error that a step raises in low precision: tries edits of the plan until the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from halfstep.edits import Edit, spell
from halfstep.errors import OpError, SessionError
from halfstep.explain.diagnose.cures import candidates_of_error
from halfstep.explain.diagnose.diagnosis import Diagnosis, of_error
from halfstep.explain.diagnose.rehearsal import Rehearsal, rehearsing
from halfstep.explain.diagnose.search import first_cure, works_under
from halfstep.explain.diagnose.words import error_words, place_of, which_model
from halfstep.explain.tape.recorder import OpRecorder
from halfstep.formats import needs_scale
from halfstep.plan.levels import level
from halfstep.records import Finding
from halfstep.torch_internals import BEYOND
from halfstep.train.scale.loss import FP16_LOSS_CEILING
from halfstep.train.session.session import Session

UNTRIED = "so no edit could be tried; make the closure use the same batch on every call"


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
            reason = f"a second call of the closure did not fail, {UNTRIED}"
        else:
            edits = first_cure(rehearsal, candidates_of_error(rehearsal.plan, failure, rehearsal.roots), _runs)
            if not edits and not works_under(rehearsal, level("O0", rehearsal.plan.low), _runs):
                reason = "it fails in fp32 as well, so the format is not the cause: fix the step, then check again"
    except StopIteration:
        reason = f"the closure ran out of batches, {UNTRIED}"
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
