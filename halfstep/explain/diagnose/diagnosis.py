"""Walks back from a non-finite loss or gradients to the origin, and says what is known of it: a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from traceback import walk_tb

import torch
from torch import Tensor, nn

from halfstep.explain.diagnose.counter import Growth
from halfstep.explain.tape.nonfinite import nonfinite
from halfstep.explain.tape.recorder import OTHERS, OWN, Leaf, Note, OpRecorder, reached_from
from halfstep.explain.tape.schemas import tensors_of
from halfstep.formats import FP32, LOW_FORMATS, Format
from halfstep.kinds import Kind
from halfstep.plan.plan import Plan
from halfstep.records import OpCall
from halfstep.torch_internals import sequence_number

NORMALISERS = ("softmax", "log_softmax", "scaled_dot_product_attention", "cross_entropy")
_GROWN = 1e3  # times the first loss: a loss above that has diverged
_RUNS = 4  # runs of one operation on its own results: from here on it is a recurrence
_DEPTH = 6  # how many operations back the addition of an eps is searched


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
        rounded = _masks(note)
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


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What is known about a failure: its place, what was recorded there, and what other runs of the closure showed."""

    kind: Kind | None  # None: the failing operation ran where the recorder could not see it
    module: str | None  # "" is the model itself; None: no module called the operation
    operator: str
    phase: str
    line: str | None = None
    call: OpCall | None = None
    note: Note | None = None
    leaf: Leaf | None = None
    low: Format | None = None  # of the operation's result, or in which the eps rounded to zero
    exact: float | None = None  # the largest true result in fp32, where it is known
    eps: float | None = None  # a constant that rounded to zero
    mask: float | None = None  # the constant of a mask that became infinite
    infinity: str = ""  # the source of the infinity that the operation received
    stored_overflow: bool = False  # a stored parameter is infinite, its fp32 value is not
    names: tuple[str, ...] = ()  # of gradients that are left over from an earlier step
    lower_scale: float | None = None
    repeats: bool = True  # a second run failed in the same place
    tried: bool = False  # the closure could be run on a copy; if not, `untried` says why
    untried: str = ""
    raised: Exception | None = None  # by the closure, which returned no loss
    formats: tuple[str, ...] = ()  # of what the operation that raised it was given
    behind: tuple[tuple[str, str | None, str | None], ...] = ()  # low results that led there: operators, modules, lines
    full: Diagnosis | None = None  # how the closure failed in fp32, if it did
    full_loss: float | None = None  # the loss in fp32
    cured_loss: float | None = None  # the loss under the cure; None: no edit that was tried cures it
    first_loss: float | None = None  # of the session's first step
    grown: tuple[str, float] | None = None  # a weight that has grown beyond the low format, and its size
    runs: int = 1  # of the same operation in one forward, if it runs on its own results
    unscaled: bool = False  # the backward pass that failed was not the session's, so no loss scale reached it
    outgrown: Growth | None = None  # the weights that have grown far beyond their size at the start of the session

    @property
    def explodes(self) -> bool:
        """Whether an operation that runs on its own results grows without limit, also in fp32."""
        if not self.is_forward_overflow or self.runs < _RUNS or self.low is None or self.full_loss is None:
            return False
        if self.full is None:
            return abs(self.full_loss) > _GROWN * self.low.max
        assert self.note is not None
        follows = self.full.note is not None and _runs_of(self.note, _sources(self.full.note)) > 0
        return follows and self.full.is_forward_overflow and self.full.low is FP32

    @property
    def loss_has_grown(self) -> bool:
        """Whether the forward pass overflowed, and the loss is far above the session's first loss even in fp32."""
        if not self.is_forward_overflow or self.full_loss is None or self.first_loss is None:
            return False
        if self.full is not None:
            return self.full.is_forward_overflow
        return abs(self.full_loss) > _GROWN * max(abs(self.first_loss), 1.0)

    @property
    def has_diverged(self) -> bool:
        """Whether training has diverged: a weight exceeds the low format's maximum, or the fp32 loss is extreme."""
        if self.grown is not None or not self.loss_has_grown:
            return self.grown is not None
        assert self.full_loss is not None
        assert self.first_loss is not None
        room = math.inf if self.low is None else self.low.max**2
        return abs(self.full_loss) > _GROWN * room * max(abs(self.first_loss), 1.0)

    @property
    def is_forward_overflow(self) -> bool:
        return self.phase == "forward" and self.kind == Kind.OVERFLOW

    @property
    def may_be_scale(self) -> bool:
        """Whether a lower loss scale alone may cure this: a result in the backward pass is too large or invalid."""
        of_scale = self.kind is not None and "scale" in self.kind.cured_by
        return of_scale and self.phase == "backward" and not self.unscaled

    @property
    def may_be_format(self) -> bool:
        return self.kind is not None and "format" in self.kind.cured_by

    def is_at(self, other: Diagnosis) -> bool:
        """Tells whether another run failed in the same place and way."""
        here, there = ((each.kind, each.module, each.operator, each.phase) for each in (self, other))
        return here == there

    @property
    def in_full(self) -> Diagnosis | None:
        """How the closure failed in fp32, if it failed in another place there; otherwise None."""
        if self.full is None or (self.kind is not None and self.kind.advice):  # no operation is at fault
            return None
        if _is_own(self.note) and _is_own(self.full.note):  # which of its operations differs by format
            return None
        same = (self.operator, self.line) == (self.full.operator, self.full.line)
        inner, outer = sorted((self.module or "", self.full.module or ""), key=len, reverse=True)
        around = outer in ("", inner) or inner.startswith(outer if outer.endswith(":") else f"{outer}.")
        return None if same and around else self.full

    @staticmethod
    def stale(names: Sequence[str]) -> Diagnosis:
        """Returns the diagnosis of gradients left over from an earlier step; `names` are those of the parameters."""
        module = names[0].rpartition(".")[0]
        return Diagnosis(Kind.STALE_GRADIENTS, module, "zero_grad", "backward", names=tuple(names))


def diagnose(recorder: OpRecorder, origin: Origin, plan: Plan, full: Callable[[nn.Parameter], Tensor]) -> Diagnosis:
    """Returns the diagnosis of an origin; `full` returns the fp32 value of a parameter."""
    note, leaf = origin.note, origin.leaf
    if leaf is not None:
        return _of_leaf(recorder, note, leaf, full)
    assert note is not None
    kind, mask = _kind(origin, note)
    eps = _vanished(note, plan.low) if kind == Kind.INVALID else None
    return Diagnosis(
        kind,
        note.module,
        recorder.operator(note),
        note.phase,
        recorder.line(note),
        note.call,
        note,
        low=plan.low if eps is not None else next((f for f in (FP32, *LOW_FORMATS) if f.dtype is note.dtype), None),
        exact=None if note.exact is None or not note.exact.finite else note.exact.largest,
        eps=eps,
        mask=mask,
        infinity=_infinity(recorder, note),
        runs=_runs_of(note, recorder.notes) if _runs_of(note, _sources(note)) else 1,
    )


def of_error(recorder: OpRecorder, error: Exception, low: Format) -> Diagnosis:
    """Returns the diagnosis of an error: the operation that raised it, or the line and module in its traceback."""
    notes = recorder.notes
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is OpRecorder.run.__code__]
    note = notes[-1] if notes else None
    phase = "backward" if notes and notes[-1].phase == "backward" else "forward"
    at = recorder.locator.of_error(error.__traceback__)
    found = Diagnosis(Kind.ERROR, at.module, "", phase, at.line, raised=error)
    if frames:  # an operation raised it
        run = frames[-1].f_locals
        note = run["note"]
        given = (str(t.dtype) for t in tensors_of((run["args"], run["kwargs"])) if t.is_floating_point())
        formats = tuple(each.removeprefix("torch.") for each in given)
        found = replace(found, module=note.module, operator=recorder.operator(note), formats=formats)
        found = replace(found, phase=note.phase, line=recorder.line(note))
    elif phase == "backward" and at.module is None:  # if no node raised it, the engine did after the last operation
        lacking = [each for each in notes if f"derivative for aten::{each.aten} is not" in str(error)]
        held = (frame.f_locals.get("ctx") for frame, _ in walk_tb(error.__traceback__))
        custom = [each for each in held if isinstance(each, torch.autograd.function.BackwardCFunction)]
        made = ((recorder.made_node(sequence_number(custom[-1])) if custom else []) or lacking or notes)[-1]
        found = replace(found, module=made.module, line=at.line or recorder.line(made))
    behind = () if note is None else (each for each in _sources(note) if each.dtype is low.dtype)
    led = ((recorder.operator(each), each.module, recorder.line(each)) for each in behind)
    return replace(found, behind=tuple(dict.fromkeys(led)))


def _of_leaf(recorder: OpRecorder, note: Note | None, leaf: Leaf, full: Callable[[nn.Parameter], Tensor]) -> Diagnosis:
    if leaf.kind == "gradient":
        return Diagnosis.stale([leaf.name])
    if leaf.kind == OTHERS:
        phase = "backward" if note is None else note.phase
        return Diagnosis(Kind.ANOTHER_PROCESS, "", leaf.name, phase, note=note, leaf=leaf)
    found = Diagnosis(Kind.INPUT_DATA, None, "backward", "forward", leaf=leaf)
    if note is not None:
        line, operator = recorder.line(note), recorder.operator(note)
        found = replace(found, module=note.module, operator=operator, phase=note.phase, line=line, note=note)
    if leaf.kind in ("data", "unseen"):
        return found if leaf.kind == "data" else replace(found, kind=None)
    stored = isinstance(leaf.known, nn.Parameter) and bool(torch.isfinite(full(leaf.known)).all())
    kind, owner = Kind.OVERFLOW if stored else Kind.WEIGHTS, leaf.name.rpartition(".")[0]
    return replace(found, kind=kind, module=owner, stored_overflow=stored)


def _kind(origin: Origin, note: Note) -> tuple[Kind, float | None]:
    """Returns the kind of failure, and the value of the mask that caused it (None: no mask caused it)."""
    if origin.masked:
        return Kind.MASKED_ROW, next((m.exact.value for m in _masks(note) if m.exact is not None), None)
    if note.exact is not None and note.exact.constant:
        return Kind.OVERFLOW, note.exact.value
    assert note.bad is not None
    if note.exact is not None and (note.exact.defined or note.exact.pole):
        return (Kind.INVALID if note.exact.pole else Kind.OVERFLOW), None
    met_mask = note.unseen or (note.exact is None and bool(note.parents or note.leaves))
    return (Kind.INVALID if note.bad.nan or met_mask else Kind.OVERFLOW), None


def _masks(note: Note) -> list[Note]:
    """Returns the operations behind the inputs of `note` in which the constant of a mask became infinite."""
    return [each for each in reached_from(note.parents) if each.exact is not None and each.exact.constant]


def _infinity(recorder: OpRecorder, note: Note) -> str:
    """Returns the tensor or operation from which an operation received an infinity; "" if it received none."""
    if note.exact is not None and (note.parents or note.leaves):
        return ""
    met = [each for each in reached_from(note.parents) if each.aten != "scalar_tensor"]  # of torch.where and a number
    for each in (*met, note):
        leaf = next((leaf for leaf in each.leaves if leaf.masked), None)
        if leaf is not None:
            return f"{leaf.kind} {leaf.name}".strip()
        if each is not note or any(math.isinf(s) for s in note.scalars):
            line = recorder.line(each)
            return recorder.operator(each) + (f" at {line}" if line else "")
    return ""


def _is_own(note: Note | None) -> bool:
    """Tells whether user code that computes gradients, such as a custom backward, made an input of the operation."""
    return note is not None and (note.unseen or any(leaf.kind == OWN for leaf in note.leaves))


def _runs_of(note: Note, among: Sequence[Note]) -> int:
    """Returns how many operations are the same one as `note`, in the same place."""
    place = note.aten, note.module, note.line, note.phase
    return sum((each.aten, each.module, each.line, each.phase) == place for each in among)


def _sources(note: Note) -> list[Note]:
    """Returns all operations that an operation's arguments came from, the latest first."""
    return [each for each in reversed(reached_from([note], "sources")) if each is not note]


def _vanished(note: Note, low: Format) -> float | None:
    """Returns a tiny number, such as an eps, that rounds to 0 in `low` and so may have caused the failure."""
    if low not in LOW_FORMATS:
        return None
    sources = note.sources
    for _ in range(_DEPTH + 1):
        for source in filter(None, sources):
            eps = source.vanished if source.dtype is low.dtype else None
            if eps is not None and low.rounds_to_zero(eps):
                return eps
        sources = tuple(each for source in filter(None, sources) for each in source.sources)
    return None
