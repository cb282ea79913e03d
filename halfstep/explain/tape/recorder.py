"""The recorder: a dispatch mode that records each operation of a forward and backward pass, and waits for results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.explain.tape.absorbed import OverflowTrail
from halfstep.explain.tape.locator import Locator, identity_of, memory_of, storage_of
from halfstep.explain.tape.nonfinite import (
    Exact,
    NonFinite,
    finite_range,
    nonfinite,
    recompute,
    recompute_unmasked,
    unwrapped,
)
from halfstep.explain.tape.schemas import (
    aten_name,
    by_recipe,
    is_backward_of,
    is_collective,
    is_uninitialised,
    is_unread,
    is_view,
    leaves_of,
    of_node,
    public_name,
    tensors_of,
    written,
)
from halfstep.modes import OpMode
from halfstep.records import AFTER_BACKWARD, OpCall
from halfstep.torch_internals import (
    NO_BACKWARD,
    StorageWeakRef,
    backward_task,
    is_users_function,
    leaf_of,
    next_sequence_number,
    running_node,
    saved_by,
    schema_of,
    sequence_number,
    without_modes,
)

OTHERS, OWN = "another process", "own"  # kinds of a Leaf
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_BOUNDING = ("add", "sub", "clamp", "maximum", "minimum")
_SMALL = 1e-4  # every eps is smaller
_DIVISORS = {"div": 1, "true_divide": 1, "reciprocal": 0}  # which argument of an operation divides
_KEPT = 2**24  # elements up to which a tensor is kept for a second look when an operation overwrites it


@dataclass(eq=False)
class Note:
    """One operation as it ran."""

    index: int
    aten: str
    module: str | None
    phase: str
    line: str | None
    names: list[str]  # of all operations of the same call of a C++ function
    function: str  # of torch, written in Python, that called the operation; "" if none did
    node: str | None = None
    root: bool = False  # it made the gradient with which a backward pass begins, or belongs to that pass's first node
    of_gradient: bool = False  # its result depends on that gradient
    received: bool = False  # values from other processes
    unseen: bool = False  # it stands for a whole custom backward, whose operations were not recorded
    forward: Note | None = None
    dtype: torch.dtype | None = None
    scalars: tuple[float, ...] = ()
    sources: tuple[Note | None, ...] = ()  # what wrote its tensor arguments; None: the argument came from outside
    bad: NonFinite | None = None  # the non-finite elements of its result; None: all are finite
    parents: tuple[Note, ...] = ()  # the operations that its non-finite arguments came from
    leaves: tuple[Leaf, ...] = ()  # and the tensors from outside
    masked: bool = False  # its result is, or passes on, the infinity of a mask
    recipe: str = ""  # which product of a layer with a recipe is not finite, and which operand
    # Only where the operation itself made its result non-finite, from arguments that were finite or infinite in masks:
    call: OpCall | None = None  # its formats and ranges
    exact: Exact | None = None  # its result in fp32; None: unknown, or the masks explain the failure
    vanished: float | None = None  # a tiny number, such as an eps, that it added, although elements of the result are 0
    divided_by: tuple[int, int] | None = None  # zeros in its divisor, and all elements there


def reached_from(notes: Iterable[Note], before: str = "parents") -> list[Note]:
    """Returns these operations and all that their non-finite values came from, in the order in which they ran."""
    found: dict[int, Note] = {}
    waiting = list(notes)
    while waiting:
        note = waiting.pop()
        if note.index not in found:
            found[note.index] = note
            waiting += filter(None, getattr(note, before))
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that no recorded operation computed, and that was not finite when an operation read it."""

    # Of the models: "parameter", "buffer" or "gradient". `OTHERS`: the collective `name` received it. `OWN`: code that
    # computes gradients brought it into the backward pass. "unseen": computed from parameters where the recorder could
    # not see it, as in another thread. "data": any other.
    kind: str
    name: str
    known: Tensor  # of the models, which may hold more than what was read
    bad: NonFinite
    shape: tuple[int, ...]
    dtype: torch.dtype
    masked: bool

    @property
    def number(self) -> float | None:
        """The leaf's value if it is one number, such as `torch.tensor(inf)`, and not from a model; otherwise None."""
        if self.kind not in ("data", OWN) or self.bad.count != 1:
            return None
        return math.nan if self.bad.nan else math.inf if self.bad.above else -math.inf


@dataclass(eq=False)
class _Writes:
    """The last operation that wrote to a storage, and all that wrote non-finite values to it."""

    reference: StorageWeakRef  # keeps the storage's identity from being reused
    last: Note
    bad: list[Note] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Read:
    """A tensor argument of an operation."""

    tensor: Tensor
    values: Tensor  # the argument as it was before the operation
    memory: Tensor  # a tensor whose storage held the elements then

    @staticmethod
    def before(tensor: Tensor, writes: bool) -> _Read:
        """Captures an argument, with its memory, before the operation runs; `writes`: it writes to any argument."""
        if not writes:
            return _Read(tensor, tensor, tensor)
        keep = 0 < tensor.numel() <= _KEPT and (_is_dense(tensor) or tensor.is_sparse)
        memory = None if _is_dense(tensor) else memory_of(tensor)
        return _Read(tensor, tensor.clone() if keep else tensor, tensor if memory is None else memory)


class OpRecorder(OpMode):
    """Records the operations of one forward and backward pass of the models `roots`, while `on`."""

    def __init__(self, roots: Sequence[nn.Module], *, examine: bool = True) -> None:
        super().__init__()
        self.locator = Locator(roots)
        self._examine = examine  # values, too, not only where operations ran and what wrote their arguments
        self.communicated = False  # with other processes
        self._call: tuple[tuple[int, int], list[str]] = ((0, 0), [])
        self.forget()
        self.on = True

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Looks at an operation that has been recorded; for subclasses."""

    def writers(self, tensor: Tensor) -> list[Note]:
        """Returns the operations that wrote non-finite values to a tensor's memory, in order."""
        written = self._writes.get(storage_of(tensor))
        return [] if written is None else list(written.bad)

    def last_writer(self, tensor: Tensor) -> Note | None:
        """Returns the operation that last wrote to a tensor's memory; None if it came from outside."""
        written = self._writes.get(storage_of(tensor))
        return None if written is None else written.last

    def leaf(self, tensor: Tensor, named: tuple[str, str, Tensor] | None = None) -> Leaf | None:
        """Returns a `Leaf` for a tensor from outside that is not finite; None if it is finite."""
        bad = nonfinite(tensor)
        if bad is None:
            return None
        computed = "unseen" if tensor.grad_fn is not None else "data"
        kind, name, known = named or self._named(tensor) or (computed, "", tensor)
        masked = kind not in ("parameter", OTHERS) and _is_mask(tensor, bad)
        return Leaf(kind, name, known, _placed(bad, kind, known), tuple(tensor.shape), tensor.dtype, masked)

    def _named(self, tensor: Tensor) -> tuple[str, str, Tensor] | None:
        """Returns (kind, name, tensor) of what a collective has written, or of a tensor of the models."""
        last = self.last_writer(tensor)
        if last is not None and last.received:
            return OTHERS, last.aten.rstrip("_"), tensor
        return self.locator.tensor(tensor)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        note = self._begin(func, args)
        result = self._record(note, func, args, kwargs)
        self.after(note, func, args, kwargs, result)
        return result

    def _record(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        note.received = is_collective(func)
        self.communicated = self.communicated or note.received
        tensors = tensors_of((args, kwargs))
        note.sources = tuple(self.last_writer(t) for t in tensors)
        if note.root:
            for source in note.sources:
                if source is not None and source.aten == "ones_like":
                    source.root = True
        known = [source for source in note.sources if source is not None]
        if note.phase == "forward" and note.module is None and not any(t.requires_grad for t in tensors):
            note.phase = AFTER_BACKWARD if any(each.phase != "forward" for each in known) else "forward"
        note.of_gradient = note.phase != "forward" and (note.root or any(each.of_gradient for each in known))
        note.scalars = tuple(leaves_of((args, kwargs), float))
        if is_view(func):
            return self._follow(func, args, kwargs)
        writes = schema_of(func).is_mutable
        read = [_Read.before(t, writes) for t in tensors] if self._examine else []
        result = self._follow(func, args, kwargs)
        outputs = tensors_of(result) or written(func, args, kwargs)
        if note.received and not outputs:
            outputs = tensors[:1]  # schemas of collectives do not say that they write
        note.dtype = next((t.dtype for t in outputs if t.is_floating_point()), None)
        if self._examine:
            note.vanished = _vanished(note, outputs)
            self._look(note, func, (args, kwargs), read, outputs)
        else:
            for out in outputs:
                self._wrote(note, out, bad=False, fresh=not writes)
        return result

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._examine:
            return self.compute(func, args, kwargs)
        return self.trail.run(self.compute, func, args, kwargs, lambda: self.notes[-1])

    def _look(self, note: Note, func: Any, given: Any, read: list[_Read], outputs: list[Tensor]) -> None:
        """Records what the operation wrote and, if that is not finite, where the non-finite values came from."""
        found = [(out, nonfinite(out)) for out in outputs]
        if note.received:  # a collective may write its result later: bad inputs count too
            given_bad = next((bad for bad in (nonfinite(each.values) for each in read) if bad is not None), None)
            found = [(out, bad or given_bad) for out, bad in found]
        bad = [each for _, each in found if each is not None]
        if bad and not is_uninitialised(func):
            note.bad = sum(bad[1:], bad[0])
            self._trace(note, func, given, read, outputs)
        for out, each in found:
            made_bad = each is not None and not is_uninitialised(func)
            self._wrote(note, out, bad=made_bad, fresh=not schema_of(func).is_mutable)

    def _wrote(self, note: Note, out: Tensor, *, bad: bool, fresh: bool) -> None:
        memory = memory_of(out)
        if memory is None:
            return
        key = identity_of(memory)
        entry = self._writes.get(key)
        if entry is None or (fresh and entry.last is not note):
            reference = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
            entry = self._writes[key] = _Writes(reference, note)
        entry.last = note
        if bad:
            entry.bad.append(note)
        elif not fresh and entry.bad and nonfinite(_whole(out)) is None:
            entry.bad.clear()

    def _trace(self, note: Note, func: Any, given: Any, read: list[_Read], outputs: list[Tensor]) -> None:
        parents: list[Note] = []
        leaves: list[Leaf] = []
        for each in read:
            bad = None if is_unread(func, given, each.tensor) else nonfinite(each.values)
            if bad is None:
                continue
            writers = [w for w in self.writers(each.memory) if w is not note]
            last = self.last_writer(each.memory)
            if not (writers or note.received or last is None) and last.aten.removeprefix("new_").startswith("empty"):
                last.bad = bad  # nothing has written to what it allocated
                writers = [last]
            parents += writers
            if not writers:
                found = self._from_outside(note, each)
                parents += [found] if isinstance(found, Note) else []
                leaves += [found] if isinstance(found, Leaf) else []
        note.recipe = by_recipe(func, given[0], outputs, nonfinite)
        leaves.sort(key=lambda leaf: leaf.kind == OTHERS)
        note.parents, note.leaves = tuple(parents), tuple(leaves)
        assert note.bad is not None
        harmless = all(p.masked for p in parents) and all(leaf.masked for leaf in leaves)
        infinite = any(abs(s) == float("inf") for s in note.scalars)
        upward = float("inf") in note.scalars or any(p.bad is not None and p.bad.above for p in parents)
        excluded = not note.bad.nan and (upward or not note.bad.above)
        mask = infinite or bool(parents or leaves)
        note.masked = harmless and excluded and mask and not note.of_gradient  # a gradient does not go into a softmax
        if note.masked or not harmless:
            return
        tensors, values = [each.tensor for each in read], [each.values for each in read]
        note.call = OpCall(
            module=note.module or "",
            operator=note.aten,
            phase=note.phase,
            input_formats=tuple(str(t.dtype).removeprefix("torch.") for t in values),
            output_formats=tuple(str(t.dtype).removeprefix("torch.") for t in outputs),
            input_ranges=tuple(finite_range(t) for t in values),
            output_ranges=tuple(finite_range(t) for t in outputs),
            line=note.line,
        )
        note.divided_by = _zeros(note.aten, given[0], read)
        if note.received:
            return
        if parents or leaves:
            note.exact = recompute_unmasked(func, given, tensors, values)
        else:
            note.exact = recompute(func, given, tensors, values, outputs)
            note.masked = note.exact is not None and note.exact.constant and not note.bad.nan and not note.bad.above

    def _from_outside(self, note: Note, read: _Read) -> Leaf | Note | None:
        """Returns a `Leaf` for an argument that no operation wrote, or a note for the custom backward that made it."""
        named = self._named(read.memory)
        if note.received and self.last_writer(read.memory) is not None:  # and what that wrote was finite
            named = (OTHERS, note.aten.rstrip("_"), read.memory)
        leaf = self.leaf(read.values, named)
        if leaf is None:
            return None
        if leaf.kind == "data" and note.phase == "backward" and is_brought_in(read.memory):
            custom = self._custom(leaf.bad) if note.line is None else None
            if custom is not None:
                return custom
            leaf = leaf if note.line is None else replace(leaf, kind=OWN)
        return replace(leaf, masked=leaf.masked and not note.of_gradient)

    def _custom(self, bad: NonFinite) -> Note | None:
        """Returns a note for the custom backward that the running node got its gradient from; None if there is none."""
        custom = self._customs.get(_key(running_node()))
        if custom is None:
            return None
        name, number = custom
        module, line = next(((each.module, each.line) for each in self.made_node(number)), (None, None))
        return Note(-1 - len(self.notes), name, module, "backward", line, [], "", unseen=True, bad=bad)

    def _begin(self, func: Any, args: Sequence[Any]) -> Note:
        aten = aten_name(func, args)
        place = self.locator.here()
        in_backward = backward_task() != NO_BACKWARD
        phase = "backward" if in_backward and not place.again else "forward"
        if self._call[0] != place.call or place.call == (0, 0):
            self._call = (place.call, [])
        names = self._call[1]
        names.append(aten)
        note = Note(len(self.notes), aten, place.module, phase, place.line, names, place.function)
        if phase == "forward":
            now = next_sequence_number()
            for number in range(getattr(self._local, "seen", now), now):  # nodes made since the operation before
                self._nodes.setdefault(number, []).append(note)
            self._local.seen = now
        else:
            self._find_forward(note)
        self.notes.append(note)
        return note

    def _find_forward(self, note: Note) -> None:
        """Finds the forward operation of a backward operation, and copies the module's name from it."""
        node: Any = running_node()
        if node is None:
            return
        note.node = node.name()
        number = sequence_number(node)
        if backward_task() not in self._roots:
            self._customs.update(_customs_below(node))
        note.root = self._roots.setdefault(backward_task(), number) == number
        if note.node == _ACCUMULATE:
            known = self.locator.tensor(node.variable)
            note.module = known[1].rpartition(".")[0] if known else note.module
            return
        made = self.made_node(number)
        fitting = [each for each in made if is_backward_of(note.node, each.aten)]
        note.forward = fitting[-1] if fitting else made[-1] if made else None
        if note.forward is not None and note.forward.line is None:  # the session's own operation on the loss
            note.forward = next((each for each in note.forward.sources if each is not None), note.forward)
        if note.forward is not None and note.module is None:
            note.module = note.forward.module

    def made_node(self, number: int) -> list[Note]:
        """Returns the forward operations that made the autograd node with this sequence number."""
        return self._nodes.get(number, [])

    def operator(self, note: Note) -> str:
        """Returns the public torch name of an operation; a backward operation has the name of its forward operation."""
        if note.phase == "backward" and note.line is None and note.node not in (None, _ACCUMULATE):
            assert note.node is not None
            if note.forward is not None and is_backward_of(note.node, note.forward.aten):
                return self.operator(note.forward)
            if hasattr(torch.ops.aten, of_node(note.node)):
                return public_name(of_node(note.node))
        module = None if note.module is None else self.locator.module(note.module)
        return public_name(note.aten, call=note.names, function=note.function, module=module)

    def line(self, note: Note) -> str | None:
        if note.line is None and note.forward is not None:
            return note.forward.line
        return note.line

    def forget(self) -> None:
        """Drops what was recorded, and records nothing until the recorder is switched on again."""
        self.on = False
        self.trail: OverflowTrail[Note] = OverflowTrail()
        self.notes: list[Note] = []
        self._writes: dict[int, _Writes] = {}
        self._nodes: dict[int, list[Note]] = {}  # keyed by the sequence number of an operation's autograd node
        self._customs: dict[tuple[int, int], tuple[str, int]] = {}  # see `_customs_below`
        self._roots: dict[int, int] = {}  # sequence number of the first node, by backward pass

    def __enter__(self) -> OpRecorder:
        if not hasattr(self._local, "seen"):
            self._local.seen = next_sequence_number()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


def _placed(bad: NonFinite, kind: str, known: Tensor) -> NonFinite:
    """Returns the counts `bad` of a tensor that was read, with the index of the first non-finite element in `known`."""
    if kind in ("parameter", "buffer"):
        return nonfinite(known) or replace(bad, first=())
    return bad if _is_dense(known) and known.is_contiguous() else replace(bad, first=())


def _vanished(note: Note, outputs: list[Tensor]) -> float | None:
    """Returns a tiny number, such as an eps, that an operation added or used as a bound."""
    if not note.aten.startswith(_BOUNDING):
        return None
    made = [source.scalars for source in note.sources if source is not None and source.aten == "scalar_tensor"]
    small = [s for scalars in (note.scalars, *made) for s in scalars if 0 < abs(s) < _SMALL]
    zero = bool(small) and any(bool((t == 0).any()) for t in outputs if _is_dense(t))
    return small[0] if zero else None


def _zeros(aten: str, args: Sequence[Any], read: list[_Read]) -> tuple[int, int] | None:
    """Returns how many elements of a divisor are 0 and how many it has; None if no element is 0."""
    place = _DIVISORS.get(aten.rstrip("_"))
    divisor = None if place is None or len(args) <= place else args[place]
    values = next((each.values for each in read if each.tensor is divisor), None)
    if values is None or not _is_dense(values):
        return None
    with without_modes():
        zeros = int((unwrapped(values) == 0).sum())
    return (zeros, values.numel()) if zeros else None


def _whole(tensor: Tensor) -> Tensor:
    """Returns a flat tensor of the whole memory that a tensor is part of."""
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_mask(tensor: Tensor, bad: NonFinite) -> bool:
    """Tells whether a tensor is an additive mask: minus infinity in places and zero everywhere else."""
    if bad.nan or bad.above:
        return False
    dense = unwrapped(tensor).detach()
    return bool((dense.isinf() | (dense == 0)).all())


def _customs_below(root: Any) -> dict[tuple[int, int], tuple[str, int]]:
    """Returns (name, sequence number) of custom autograd nodes below `root`, by the nodes that get their gradients."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    seen, waiting = {_key(root)}, [root]
    while waiting:
        node: Any = waiting.pop()
        following = [each for each, _ in node.next_functions if each is not None]
        if is_users_function(node):
            name = str(node.name()).removesuffix("Backward")
            found.update((_key(each), (name, sequence_number(node))) for each in following)
        waiting += [each for each in following if _key(each) not in seen]
        seen.update(map(_key, following))
    return found


def is_brought_in(tensor: Tensor) -> bool:
    """Tells whether the running node of a backward pass reads a tensor that it did not save in the forward pass."""
    node = running_node()
    with without_modes():
        saved = None if node is None else saved_by(node)
        return saved is not None and storage_of(tensor) not in {storage_of(each) for each in saved}


def _key(node: Any) -> tuple[int, int]:
    leaf = leaf_of(node)
    return (sequence_number(node), 0) if leaf is None else (0, id(leaf))
