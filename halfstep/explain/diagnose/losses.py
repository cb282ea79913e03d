"""Finds the operation with which a module loses precision: compares a call in a low format with one in fp32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfstep.explain.diagnose.shadow import Shadow, is_comparable, ratio, worst_element
from halfstep.explain.tape.recorder import Note, OpRecorder
from halfstep.explain.tape.schemas import is_uninitialised, is_view, tensors_of, written
from halfstep.formats import Format, as_format, is_low
from halfstep.plan.matching import first_device
from halfstep.records import SUSPECT
from halfstep.torch_internals import without_modes

_KEPT = 2**26  # elements of results that are kept to be compared
_SUMS = ("cumsum", "logcumsumexp", "index_add", "index_put", "scatter_add")
_ADDS = ("add", "sub", "rsub")
_AGAIN = 16  # times that one line adds, from which it is a sum
_CANCELS = 8.0  # times as large as its result are the values whose difference an operation takes
_WIDER = 8.0  # times as far off as values of its inputs are apart is what rounding alone does not explain
_NONE = 1e-6  # a ratio below it is none

_Key = tuple[str | None, str, int]  # the line, the operation, and which of its calls there


@dataclass(frozen=True)
class Loss:
    """The first operation of a module whose result was wrong: its name in torch, its place, and what it did."""

    operator: str
    module: str | None  # whose code called it, which may be inside of the one that was looked at
    line: str | None
    said: str
    ratio: float  # how far its result was off
    rounds_terms: bool  # it adds terms whose spread is below the distance of values in its result


@dataclass(frozen=True, eq=False)
class _Seen:
    outputs: list[Tensor]
    largest: float  # magnitude among its inputs; 0.0 if it had none
    terms: float  # the least spread of what it adds, but for constants; inf if it adds nothing
    fmt: Format | None  # the low format among its inputs and results, if any
    module: str | None


class _Keyed(OpRecorder):
    """Numbers the calls of each operation in each line."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__(roots, examine=False)
        self._counts: Counter[tuple[str | None, str]] = Counter()

    def key(self, note: Note) -> _Key:
        place = self.line(note), self.operator(note)
        self._counts[place] += 1
        return (*place, self._counts[place])


class _Low(_Keyed):
    """Keeps the results of the operations of a call in a low format."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__(roots)
        self.begin()
        self.on = False

    def begin(self) -> None:
        self.seen: dict[_Key, _Seen] = {}
        self._counts.clear()
        self._left = _KEPT

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        outputs = _results(note, func, args, kwargs, result)
        self._left -= sum(t.numel() for t in outputs)
        if not outputs or self._left < 0:
            return
        given = [t for t in tensors_of((args, kwargs)) if t.is_floating_point() and t.numel()]
        low = next((t.dtype for t in (*outputs, *given) if is_low(t.dtype)), None)
        with without_modes():
            spreads = (float(t.detach().float().std()) for t in given if self.operator(note) in _ADDS and t.numel() > 1)
            self.seen[self.key(note)] = _Seen(
                [t.detach().clone() for t in outputs],
                max((float(t.detach().abs().max()) for t in given), default=0.0),
                min((each for each in spreads if each), default=math.inf),
                None if low is None else as_format(low),
                note.module,
            )


class _Exact(_Keyed):
    """Compares the operations of the same call in fp32 with those that were kept."""

    def __init__(self, roots: Sequence[nn.Module], kept: dict[_Key, _Seen]) -> None:
        super().__init__(roots)
        self.found: dict[str, Loss] = {}  # the worst call of each operation
        self._worst = 0.0
        self._kept = kept

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        outputs = _results(note, func, args, kwargs, result)
        if not outputs or self._worst > SUSPECT:
            return
        key = self.key(note)
        seen = self._kept.pop(key, None)
        with without_modes():
            for low, exact in zip([] if seen is None else seen.outputs, outputs, strict=False):
                off = ratio(low, exact.detach()) if is_comparable(low, exact) else None
                before = self.found[key[1]].ratio if key[1] in self.found else _NONE
                if seen and off is not None and off > before:
                    said, largest = _said(key, seen, low, exact.detach()), float(low.detach().abs().max())
                    rounds = seen.fmt is not None and seen.terms < _spacing(largest, seen.fmt)
                    self.found[key[1]] = Loss(key[1], seen.module, key[0], said, off, rounds)
                    self._worst = max(self._worst, off)


class LossFinder(Shadow):
    """Compares one call of each of some modules, by operation: `calls` says which call of which module."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        calls: Mapping[str, int],
        modules: Mapping[str, nn.Module],
        fail: Callable[[str, Exception], None],
    ) -> None:
        super().__init__(modules, lambda again: None, fail, device_type=first_device(roots).type)
        self._roots, self._looked_at = roots, calls
        self.low = _Low(roots)  # has to see the operations of the closure
        self.found: dict[str, list[Loss]] = {}  # by module, the worst operation first
        self._now: str | None = None

    def begin(self, name: str, number: int) -> None:
        """Begins to keep what the operations of a call give, if it is one that is looked at."""
        if self._looked_at[name] == number and self._now is None:
            self._now, self.low.on = name, True
            self.low.begin()

    def end(self, name: str) -> None:
        self.low.on = self.low.on and self._now != name

    @contextmanager
    def again(self, name: str, number: int) -> Iterator[None]:
        if (self._now, self._looked_at[name]) != (name, number):
            yield
            return
        with (exact := _Exact(self._roots, self.low.seen)):
            yield
        self._now = None
        if exact.found:
            self.found[name] = sorted(exact.found.values(), key=lambda loss: -loss.ratio)


def _results(note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    """Returns what an operation made; nothing for a cast between formats, which a call in fp32 may not have."""
    cast = note.aten == "_to_copy" and args[0].is_floating_point()
    if cast or note.aten == "_unsafe_view" or is_view(func) or is_uninitialised(func):
        return []
    return [t for t in tensors_of(result) or written(func, args, kwargs) if t.numel()]


def _said(key: _Key, seen: _Seen, low: Tensor, exact: Tensor) -> str:
    """Returns how an operation loses precision, as the second half of a sentence that begins with its name."""
    _, operator, number = key
    got, want = worst_element(low, exact)
    pair = f"{got:.6g} in place of {want:.6g}"
    if not low.is_floating_point():
        changed = f"{int((low != exact).sum()):,} of {low.numel():,} places"
        return f"chooses otherwise than in fp32 in {changed}: {pair}, for one"
    if seen.fmt is None:
        return f"gets values that were rounded before, and gives {pair}"
    made, name = float(low.detach().abs().max()), seen.fmt.name
    if max(abs(got), abs(want)) < seen.fmt.smallest_normal:
        return f"makes values that {name} has only every {seen.fmt.smallest_subnormal:.3g}, and gives {pair}"
    if operator.rstrip("_") in _SUMS or (operator in _ADDS and number >= _AGAIN):
        apart = f"{made:.4g}, where {name} has values {_spacing(made, seen.fmt):.3g} apart"
        return f"adds terms that are too small for a sum of {apart}, and gives {pair}"
    largest = max(seen.largest, made)
    if abs(got - want) > _WIDER * (spacing := _spacing(largest, seen.fmt)):
        return f"makes large errors of small ones in its inputs, and gives {pair}"
    apart = f"which {name} has only every {spacing:.3g}"
    if operator in _ADDS and largest > _CANCELS * made:
        return f"takes differences of values up to {largest:.6g}, {apart}, and gives {pair}"
    made_apart = _spacing(made, seen.fmt)
    if abs(got - want) <= made_apart < spacing:  # what it makes, not what it gets, is rounded so
        return f"makes values up to {made:.6g}, which {name} has only every {made_apart:.3g}, and gives {pair}"
    verb = "computes with" if seen.largest else "makes"
    return f"{verb} values up to {largest:.6g}, {apart}, and gives {pair}"


def _spacing(value: float, fmt: Format) -> float:
    """Returns the distance from a value to the next larger one in a format."""
    return math.ldexp(fmt.eps, math.frexp(value)[1] - 1) if value else fmt.smallest_subnormal
