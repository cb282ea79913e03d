"""Walks back from a non-finite loss or gradients to the first operation, or tensor, that caused them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from halfstep.observe.nonfinite import nonfinite
from halfstep.observe.recorder import OTHERS, OWN, Leaf, Note, OpRecorder

NORMALISERS = ("softmax", "log_softmax", "scaled_dot_product_attention", "cross_entropy")


@dataclass(frozen=True, eq=False)
class Origin:
    """The source of the first non-finite value that reached the loss or a gradient."""

    note: Note | None  # that made the value; with a leaf, the first operation that computed with it
    leaf: Leaf | None = None  # the tensor from outside that the value came in
    masked: bool = False  # a mask had excluded all non-finite inputs of the operation


def find_origin(recorder: OpRecorder, sinks: Sequence[Tensor]) -> Origin | None:
    """Returns the origin of the non-finite values in `sinks`, such as the loss; None if all are finite."""
    bad = [sink for sink in sinks if nonfinite(sink) is not None]
    if not bad:
        return None
    writers = [note for sink in bad for note in recorder.writers(sink)]
    if writers:
        return _earliest(recorder, reached_from(writers))
    leaf = recorder.leaf(bad[0])
    assert leaf is not None
    return Origin(None, leaf if leaf.kind in ("gradient", OTHERS) else replace(leaf, kind="unseen"))


def last_origin(recorder: OpRecorder) -> Origin | None:
    """Returns the origin of the last non-finite result, ignoring masks; None if all were finite."""
    last = next((note for note in reversed(recorder.notes) if note.bad is not None and not note.masked), None)
    return None if last is None else _earliest(recorder, reached_from([last]))


def reached_from(notes: Iterable[Note]) -> list[Note]:
    """Returns these operations and all that their non-finite values came from, in the order in which they ran."""
    found: dict[int, Note] = {}
    waiting = list(notes)
    while waiting:
        note = waiting.pop()
        if note.index not in found:
            found[note.index] = note
            waiting += note.parents
    return [found[index] for index in sorted(found)]


def _earliest(recorder: OpRecorder, reached: list[Note]) -> Origin:
    for note in reached:
        harmful = [leaf for leaf in note.leaves if not leaf.masked]
        computed = note.of_gradient and note.line is not None  # by code that computes gradients itself
        if harmful and (harmful[0].kind == OWN or (computed and harmful[0].number is not None)):
            return Origin(note)
        if harmful:
            return Origin(_first_to_compute(recorder, note, reached), harmful[0])
        if note.masked or not all(parent.masked for parent in note.parents):
            continue
        if note.exact is not None or not (note.parents or note.leaves):
            return Origin(note)
        assert note.bad is not None
        above = any(each.bad is not None and each.bad.above for each in note.parents)
        above = above or any(each.bad.above for each in note.leaves)
        if note.bad.nan and not above and recorder.operator(note) in NORMALISERS and note.phase == "forward":
            return Origin(note, masked=True)
        rounded = [mask for mask in reached_from(note.parents) if mask.exact is not None and mask.exact.constant]
        return Origin(rounded[0] if rounded else note)
    return Origin(reached[0])


def _first_to_compute(recorder: OpRecorder, note: Note, reached: list[Note]) -> Note:
    """Returns the first operation that computes with a value that no recorded operation made."""
    while recorder.operator(note) in ("to", "clone", "copy", "detach") or note.aten == "_unsafe_view":
        following = [each for each in reached if note in each.parents]
        if not following:
            break
        note = following[0]
    return note
