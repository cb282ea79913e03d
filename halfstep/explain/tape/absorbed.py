"""Finds absorbed overflows: an operation turns an infinity into 0 or a bound, so the result is finite but wrong."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from halfstep.explain.tape.locator import Locator, Place, identity_of, memory_of, storage_of
from halfstep.explain.tape.nonfinite import nonfinite, widened
from halfstep.explain.tape.schemas import (
    aten_name,
    is_collective,
    is_uninitialised,
    is_unread,
    is_view,
    overwritten,
    public_name,
    tensors_of,
    written,
)
from halfstep.formats import as_format, is_low
from halfstep.later import is_capturing
from halfstep.modes import OpMode, put_on_top
from halfstep.records import ABSORBED, AbsorbedOverflow, Observation
from halfstep.torch_internals import StorageWeakRef, TorchDispatchMode, in_backward
from halfstep.train.probe.hooks import readable
from halfstep.train.probe.rows import measure

TOLERANCE = 0.05
"""Relative difference to fp32 above which an overflow has done harm; rounding alone causes about 0.001."""

T = TypeVar("T")
Compute = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]  # runs an operation
Under = Callable[[TorchDispatchMode], AbstractContextManager[None]]
"""Puts a mode above the one that emulates a format, so that it sees operations as the model called them."""
_Here = tuple[Place, str]  # from which an operation was called, and its public name
_LOG = logging.getLogger("halfstep")


@dataclass(frozen=True, eq=False)
class Overflow(Generic[T]):
    """An overflow in an operation."""

    of: T  # the caller's handle for the operation, such as its Note
    values: Tensor  # in fp32, of the elements that became infinite in the result
    dtype: torch.dtype  # of that result


@dataclass(frozen=True, eq=False)
class Absorbed(Generic[T]):
    """An overflow that the operation `by` absorbed: its result is finite but wrong."""

    origin: Overflow[T]
    by: T
    got: float  # an element of the result of `by`
    want: float  # its value in fp32
    off: float  # the relative error of that element's row, along the last dimension

    def said(self, operator: str, where: str | None, by: str, by_where: str | None) -> AbsorbedOverflow:
        values = self.origin.values
        exact = float(values[values.abs().argmax()])  # the largest of those that became infinite, with its sign
        fmt = as_format(self.origin.dtype).name
        return AbsorbedOverflow(operator, where, exact, fmt, by, by_where, self.got, self.want, self.off)


@dataclass(frozen=True, eq=False)
class _Shadow(Generic[T]):
    """The fp32 values of all elements of a storage."""

    reference: StorageWeakRef  # keeps the storage's identity from being reused
    values: Tensor
    dtype: torch.dtype  # of the tensors in that memory
    origin: Overflow[T]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the fp32 values of a tensor whose elements are in this storage."""
        return self.values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def reaches(self, tensor: Tensor) -> bool:
        """Tells whether the tensor has a non-finite element that is finite in fp32."""
        return bool((~tensor.isfinite() & self.of(tensor).isfinite()).any())


class OverflowTrail(Generic[T]):
    """Follows values that overflowed in a forward pass until an operation absorbs the overflow (makes it finite)."""

    # The trail of a low tensor is its fp32 values, kept where elements overflow that are finite in fp32. An operation
    # is computed again in fp32 if its low result is not finite or an argument has a trail, which ends at operations
    # that draw random numbers, have no fp32 kernel or return integers.

    def __init__(self) -> None:
        self.found: list[Absorbed[T]] = []  # that a loss depends on, one for each operation in which one began
        self._shadows: dict[int, _Shadow[T]] = {}  # keyed by the memory of a tensor, which its views share
        # likewise: what was computed from results in which overflows were absorbed, and these overflows
        self._results: dict[int, tuple[StorageWeakRef, list[Absorbed[T]]]] = {}

    def run(
        self, compute: Compute, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: Callable[[], T]
    ) -> Any:
        if in_backward():
            return compute(func, args, kwargs)
        given = tensors_of((args, kwargs))
        read = [t for t in given if self._results and not is_unread(func, (args, kwargs), t)]
        absorbed = [] if is_uninitialised(func) else self._behind(read)
        result = self._run(compute, func, args, kwargs, given, here)
        if self._results:
            for each in overwritten(func, args, kwargs):
                if is_plain(each) and each.nbytes == each.untyped_storage().nbytes():
                    self._results.pop(storage_of(each), None)
        if absorbed:
            self._depend(tensors_of((result, written(func, args, kwargs))), absorbed)
        return result

    def end(self, losses: Sequence[Tensor]) -> None:
        """Adds to `found` the absorbed overflows that the losses, from which a backward pass will start, depend on."""
        told = {id(each.origin.of) for each in self.found}
        for each in self._behind(losses):
            if id(each.origin.of) not in told:
                told.add(id(each.origin.of))
                self.found.append(each)

    def _run(
        self,
        compute: Compute,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        here: Callable[[], T],
    ) -> Any:
        if is_view(func) or is_uninitialised(func) or is_collective(func) or not all(map(is_plain, given)):
            return compute(func, args, kwargs)
        trails = [shadow for t in given if (shadow := self._shadow(t)) is not None and shadow.reaches(t)]
        changing = {identity_of(t) for t in written(func, args, kwargs)}
        before = {id(t): t.clone() for t in given if identity_of(t) in changing}
        exact = {id(t): shadow.of(t) for t in given if (shadow := self._shadow(t)) is not None}
        result = compute(func, args, kwargs)
        outputs = _floats(func, args, kwargs, result)
        if trails or any(is_low(out.dtype) and nonfinite(out) is not None for out in outputs):
            wide = self._again(func, args, kwargs, before | exact)
            if len(wide) == len(outputs):
                self._follow(outputs, wide, trails, here, lambda: self._again(func, args, kwargs, before))
                return result
        for out in outputs:
            self._overwrite(out)
        return result

    def _again(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Returns an operation's results, computed again in fp32; [] if that fails."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return []
        args, kwargs = widened(func, (tuple(args), dict(kwargs)), values, torch.float32)
        try:
            return _floats(func, args, kwargs, func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return []

    def _follow(
        self,
        outputs: list[Tensor],
        wide: list[Tensor],
        trails: list[_Shadow[T]],
        here: Callable[[], T],
        with_infinities: Callable[[], list[Tensor]],
    ) -> None:
        lost = [~out.isfinite() & exact.isfinite() for out, exact in zip(outputs, wide, strict=True)]
        ends = [not bool(each.any()) for each in lost]
        bare = with_infinities() if trails and any(ends) else []
        for i, (out, exact) in enumerate(zip(outputs, wide, strict=True)):
            if not ends[i]:
                origin = trails[0].origin if trails else Overflow(here(), exact[lost[i]], out.dtype)
                self._keep(out, torch.where(lost[i], exact, out.to(exact.dtype)), origin)
                continue
            worst = _worst_row(out, exact, bare[i] != exact) if bare else None
            if worst is not None:
                self._depend([out], [Absorbed(trails[0].origin, here(), *worst)])
            self._overwrite(out)

    def _behind(self, tensors: Iterable[Tensor]) -> list[Absorbed[T]]:
        """Returns the absorbed overflows that the values of some tensors depend on, each once."""
        held = [self._results.get(storage_of(t)) for t in tensors]
        return list(dict.fromkeys(each for result in held if result is not None for each in result[1]))

    def _depend(self, tensors: Iterable[Tensor], absorbed: Sequence[Absorbed[T]]) -> None:
        for tensor in tensors:
            memory, before = memory_of(tensor), self._behind([tensor])
            if memory is not None:
                reference = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
                self._results[identity_of(memory)] = reference, list(dict.fromkeys([*before, *absorbed]))

    def _shadow(self, tensor: Tensor) -> _Shadow[T] | None:
        if not self._shadows or not tensor.is_floating_point():
            return None
        shadow = self._shadows.get(identity_of(tensor))
        return shadow if shadow is not None and shadow.dtype is tensor.dtype else None

    def _keep(self, out: Tensor, values: Tensor, origin: Overflow[T]) -> None:
        shadow = self._shadow(out)
        if shadow is None:
            storage = out.untyped_storage()
            gone = [key for key, each in self._shadows.items() if each.reference.expired()]  # type: ignore[no-untyped-call]
            for key in gone:
                del self._shadows[key]
            whole = torch.empty(0, dtype=out.dtype, device=out.device).set_(storage).to(values.dtype, copy=True)
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            shadow = self._shadows[identity_of(out)] = _Shadow(reference, whole, out.dtype, origin)
        shadow.of(out).copy_(values)

    def _overwrite(self, out: Tensor) -> None:
        """Ends the trail of the elements of `out`, if any: from now on their fp32 values are those of `out`."""
        shadow = self._shadow(out)
        if shadow is not None:
            shadow.of(out).copy_(out)


def is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor is an ordinary strided one, whose elements are in its own storage."""
    return tensor.layout is torch.strided and not tensor.is_nested and readable(tensor) is tensor


def _floats(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    """Returns the plain floating-point tensors that an operation wrote to, then those that it created."""
    into = written(func, args, kwargs)
    made = [t for t in tensors_of(result) if all(t is not each for each in into)]
    return [t for t in (*into, *made) if t.is_floating_point() and is_plain(t)]


def _worst_row(out: Tensor, exact: Tensor, touched: Tensor) -> tuple[float, float, float] | None:
    """Returns (value, fp32 value, relative error of the row) for the worst element of `out`."""
    if not bool(touched.any()):
        return None
    rounded = exact.to(out.dtype).double()
    want, got = torch.where(rounded.isfinite(), rounded, exact.double()), out.double()
    both = got.isfinite() & want.isfinite()
    difference = torch.where(both & touched, (got - want).abs(), 0.0)
    tensors = (difference, torch.where(both, want, 0.0), got, exact)
    rows = [t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in tensors]
    norms = [torch.linalg.vector_norm(t, dim=-1) for t in rows[:2]]
    off = torch.where(norms[0] > 0, norms[0] / norms[1], 0.0)
    row = int(off.argmax())
    place = int(rows[0][row].argmax())
    return (float(rows[2][row, place]), float(rows[3][row, place]), float(off[row])) if off[row] > TOLERANCE else None


class AbsorbedWatch(OpMode):
    """Reports overflows that training forwards absorb, if a loss given to `end` depends on them; never raises."""

    # Gradients can be off in parts of a training forward: in a `no_grad` block, a custom function, a reentrant
    # checkpoint. While all models are in eval mode, operations without gradients are ignored.

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__()
        self._roots = [weakref.ref(root) for root in roots]  # weak: the stack of modes must keep no session alive
        self._trail: OverflowTrail[_Here] = OverflowTrail()

    def sees(self) -> bool:
        """Tells whether the running operation may be part of a training forward."""
        may_train = self.on and (torch.is_grad_enabled() or any(root.training for root in self._live_roots()))
        return may_train and not in_backward() and not is_capturing()

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._trail.run(self.compute, func, args, kwargs, lambda: self._here(func, args))

    def failed(self, error: Exception) -> bool:
        self.on = False
        said = "a probe stops looking for absorbed overflows in this step, because of an error: %s"
        _LOG.warning(said, error, exc_info=error)
        return True

    def end(self, losses: Sequence[Tensor]) -> None:
        """Notes the overflows that the losses, from which a backward pass will start, depend on."""
        self._trail.end(losses)

    def _live_roots(self) -> list[nn.Module]:
        return [root for each in self._roots if (root := each()) is not None]

    def _here(self, func: Any, args: Sequence[Any]) -> _Here:
        locator = Locator(self._live_roots())
        place, aten = locator.here(), aten_name(func, args)
        module = None if place.module is None else locator.module(place.module)
        return place, public_name(aten, call=[aten], function=place.function, module=module)

    def observations(self, step: int) -> list[Observation]:
        """Returns the absorbed overflows as observations, one for each line of each module where they began."""
        found: dict[tuple[str | None, str | None], Observation] = {}
        for each in self._trail.found:
            (origin, operator), (by, absorber) = each.origin.of, each.by
            place = origin.module, origin.line
            if place not in found:
                said = each.said(operator, origin.line, absorber, by.line)
                found[place] = Observation(
                    step=step,
                    module=(origin.module or "").replace(":", ".", 1).rstrip("."),  # of several models: as in others
                    kind=ABSORBED,
                    name=said.operator,
                    format=said.format,
                    scale=1.0,
                    stats=measure(each.origin.values),
                    absorbed=said,
                )
        return list(found.values())


def watch_absorbed(
    roots: Sequence[nn.Module], under: Under, undo: list[Callable[[], None]]
) -> tuple[AbsorbedWatch, Callable[[], None]]:
    """Returns a watch that sees all operations from now on, and a function that leaves the context `under(watch)`."""
    watch = AbsorbedWatch(roots)
    undo.append(put_on_top(watch))
    over = ExitStack()
    over.enter_context(under(watch))
    return watch, over.close
