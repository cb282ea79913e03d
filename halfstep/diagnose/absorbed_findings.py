"""Findings about overflows that a forward pass absorbed: an infinity became a finite but wrong value.

Each finding has an edit that was tried on a copy of the model, if one helped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TypeAlias

from halfstep.diagnose.cures import is_op, rules_around
from halfstep.diagnose.rehearsal import Rehearsal
from halfstep.diagnose.search import first_cure
from halfstep.diagnose.words import place_of, which_model
from halfstep.edits import Edit, OpChange, spell
from halfstep.observe.absorbed import Absorbed
from halfstep.observe.recorder import Note, OpRecorder
from halfstep.records import Finding

_UNTRIED = "so no edit could be tried"
_Place: TypeAlias = tuple[str | None, str | None]  # a module and a line


def absorbed_findings(rehearsal: Rehearsal, recorder: OpRecorder) -> list[Finding]:
    """Returns a finding for each place where a recorded forward pass overflowed and the overflow was absorbed."""
    places: dict[_Place, Absorbed[Note]] = {}
    for each in recorder.trail.found:
        places.setdefault(_place(recorder, each), each)
    return [_said(recorder, each, *_cure(rehearsal, recorder, each)) for each in places.values()]


def _place(recorder: OpRecorder, absorbed: Absorbed[Note]) -> _Place:
    return absorbed.origin.module, recorder.line(absorbed.origin)


def _cure(rehearsal: Rehearsal, recorder: OpRecorder, absorbed: Absorbed[Note]) -> tuple[tuple[Edit, ...], str]:
    """Returns (edits, reason): edits under which the overflow is no longer absorbed, and why there are none."""
    place, inputs = _place(recorder, absorbed), rehearsal.inputs

    def works(trial: Rehearsal) -> bool:
        again = OpRecorder(rehearsal.roots)
        with trial.recording(again):
            loss = trial.loss()
        again.trail.end([loss])
        cured = place not in {_place(again, each) for each in again.trail.found}
        return cured and bool(loss.isfinite()) and inputs.same

    try:
        candidates = takewhile(lambda _: inputs.same, _candidates(rehearsal, recorder, absorbed))
        edits = first_cure(rehearsal, candidates, works)
    except StopIteration:
        return (), f"the closure ran out of batches, {_UNTRIED}"
    except Exception as error:  # whatever copying the model raises
        return (), f"a copy of the model cannot be made or run ({type(error).__name__}), {_UNTRIED}"
    if not inputs.same:
        return (), f"the closure takes another batch each time, {_UNTRIED}"
    return edits, "" if edits else "no edit of the plan was found that cures it"


def _candidates(rehearsal: Rehearsal, recorder: OpRecorder, absorbed: Absorbed[Note]) -> Iterator[tuple[Edit, ...]]:
    """Yields rules that keep the module that overflowed, or one around it, in fp32; then an edit that denies the op."""
    yield from rules_around(absorbed.origin.module, rehearsal.plan, rehearsal.roots)
    operator = recorder.operator(absorbed.origin)
    if is_op(operator):
        yield (OpChange("deny", operator),)


def _said(recorder: OpRecorder, absorbed: Absorbed[Note], edits: tuple[Edit, ...], reason: str) -> Finding:
    origin, by = absorbed.origin, absorbed.by
    line, line_by = recorder.line(origin), recorder.line(by)
    evidence = str(absorbed.said(recorder.operator(origin), line, recorder.operator(by), line_by)) + which_model(
        origin.module
    )
    if edits:
        advice = f"{spell(edits)}, under which this does not happen"
    else:
        advice = f"compute this in fp32, or scale the values down first; {reason}"
    return Finding("warning", "overflow absorbed", place_of(origin.module, line), evidence, advice, edits)
