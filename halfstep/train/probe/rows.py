"""Measures a tensor, or one step for a probe: statistics in rows on the tensors' devices, later read on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.errors import ObserveError
from halfstep.formats import BY_DTYPE
from halfstep.later import Later, is_capturing
from halfstep.modes import run_uncompiled
from halfstep.records import BINS, COUNTS, DOUBLES, PRECISION, UPDATE, Observation, TensorStats
from halfstep.torch_internals import parameters_of, version_of
from halfstep.train.kernels.stats import Updates, add_stats, empty_rows, is_sampled
from halfstep.train.probe.hooks import StepHooks, readable, undo_all
from halfstep.validate import with_near_misses

_NAMES = {dtype: fmt.name for dtype, fmt in BY_DTYPE.items()} | {torch.float64: "fp64"}
_FIRST = 128  # rows to begin with


@dataclass(frozen=True)
class Subject:
    """What a row of statistics is about."""

    module: str
    kind: str
    name: str
    scale: int = 0  # the number, from 1, of the loss scale that multiplies the elements; 0 if there is none


_Row = tuple[Subject, str, bool]  # with the name of the format, and whether the tensor was sampled


class StepRows:
    """Collects the statistics of one step; tensors with the same subject and format share a row."""

    def __init__(self, sample: int | None) -> None:
        self._sample = sample
        self._buffers: dict[torch.device, Tensor] = {}
        self._places: dict[torch.device, dict[_Row, int]] = {}
        self._scales: list[Tensor] = []
        self._source: tuple[Tensor, int] | None = None  # tensor and version of the last scale
        self._lock = threading.Lock()  # backward runs in one thread per device

    def add_scale(self, scale: Tensor) -> int:
        """Records the current value of a loss scale, a tensor that changes in place; returns the value's index."""
        source = self._source
        if source is None or source[0] is not scale or source[1] != version_of(scale):
            self._scales.append(scale.detach().clone())
            self._source = scale, version_of(scale)
        return len(self._scales)

    def add(self, tensors: Sequence[Tensor], subjects: Sequence[Subject]) -> None:
        """Adds the statistics of each tensor to the row of its subject."""
        with self._lock:
            places: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
            for t, subject in zip(tensors, subjects, strict=True):
                group = places.setdefault(t.device, ([], []))
                group[0].append(t)
                group[1].append(self._place(t, subject))
            for device, (group_tensors, group_places) in places.items():
                add_stats(group_tensors, self._buffers[device], group_places, sample=self._sample)

    def add_updates(self, updates: Updates, subjects: Sequence[Subject | None]) -> None:
        """Adds the statistics of updates to the rows of their subjects; skips updates without a subject."""
        with self._lock:
            pairs = zip(updates.stored, subjects, strict=True)
            places = [None if subject is None else self._place(t, subject) for t, subject in pairs]
            if any(place is not None for place in places):
                updates.add_to(self._buffers[updates.stored[0].device], places, sample=self._sample)

    def pending(
        self, step: int, absorbed: Sequence[Observation] = (), operands: Callable[[], Sequence[Observation]] = tuple
    ) -> Pending:
        """Starts copying the rows to the host and returns them, with further observations; waits for nothing."""
        rows = [list(self._places[device]) for device in self._buffers]
        parts = [buffer[: len(self._places[device])] for device, buffer in self._buffers.items()]
        device = self._scales[0].device if self._scales else torch.device("cpu")
        one = torch.ones((), dtype=torch.float32, device=device)
        values = [one, *(scale.to(device, non_blocking=True) for scale in self._scales)]
        return Pending(step, rows, Later([torch.stack(values), *parts]), absorbed, operands)

    def _place(self, t: Tensor, subject: Subject) -> int:
        places = self._places.setdefault(t.device, {})
        row = subject, format_name(t.dtype), is_sampled(t, self._sample)
        place = places.setdefault(row, len(places))
        buffer = self._buffers.get(t.device)
        if buffer is None:
            self._buffers[t.device] = empty_rows(_FIRST, t.device)
        elif place >= len(buffer):
            self._buffers[t.device] = torch.cat([buffer, torch.zeros_like(buffer)])
        return place


@dataclass(frozen=True)
class Pending:
    """The statistics of one step while they are being copied to the host, and its absorbed overflows."""

    step: int
    rows: list[list[_Row]]
    numbers: Later
    absorbed: Sequence[Observation]
    operands: Callable[[], Sequence[Observation]]  # on their way since before the numbers

    def __len__(self) -> int:
        return sum(map(len, self.rows)) + len(self.absorbed)

    def read(self) -> list[Observation]:
        """Returns the observations; if the copy to the host is not complete, waits for it."""
        given, *parts = self.numbers.read()
        scales = given.tolist()
        found: dict[tuple[object, ...], Observation] = {}
        for rows, values in zip(self.rows, parts, strict=True):
            for (of, fmt, sampled), stats in zip(rows, read_rows(values), strict=True):
                key = of.module, of.kind, of.name, fmt, scales[of.scale]
                new = Observation(self.step, *key, stats=stats, sampled=sampled)
                old = found.get(key)
                if old is not None:
                    new = replace(new, stats=old.stats + new.stats, sampled=old.sampled or new.sampled)
                found[key] = new
        return [*found.values(), *self.absorbed, *self.operands()]


def format_name(dtype: torch.dtype) -> str:
    """Returns halfstep's name of a dtype, or torch's name if halfstep has none."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@with_near_misses
def measure(tensor: Tensor, *, sample: int | None = None) -> TensorStats:
    """Returns the statistics of one tensor, read on the host.

    `sample` limits how many elements are read, to a multiple of 64 and at least 64: runs of 64 neighbours in memory,
    spread evenly over the tensor. `stats.exponents[127]` counts the elements from 1 to 2 in magnitude, see TensorStats.

    >>> stats = measure(torch.tensor([1.0, -3.0, 0.0, float("inf")]))
    >>> stats.zeros, stats.negatives, stats.infinities, stats.exponents[127], stats.exponents[128], stats.amax
    (1, 1, 1, 1, 1, 3.0)

    Raises:
        ObserveError: `tensor` is not a tensor, or `sample` is not an integer of 1 or more.
    """
    if not isinstance(tensor, Tensor):
        raise ObserveError(f"measure() expected a tensor, got {type(tensor).__name__}; pass torch.as_tensor(values)")
    check_sample(sample)
    rows = empty_rows(1, tensor.device)
    add_stats([tensor], rows, [0], sample=sample)
    return read_rows(rows)[0]


def check_sample(sample: object) -> None:
    """Raises an ObserveError unless `sample` is an integer of 1 or more, or None."""
    if sample is not None and (not isinstance(sample, int) or isinstance(sample, bool) or sample < 1):
        raise ObserveError(f"sample is {sample!r}; pass how many elements of each tensor to read, or None for all")


def read_rows(rows: Tensor) -> list[TensorStats]:
    """Returns the statistics in rows, read on the host in one copy, which is the only wait for the device."""
    held = rows.detach().cpu()
    numbers = held[:, : BINS + len(COUNTS)].tolist()
    doubles = held[:, -len(DOUBLES) :].contiguous().view(torch.float64).tolist()
    return [
        TensorStats(
            **dict(zip(COUNTS, counts[BINS:], strict=True)),
            exponents=tuple(counts[:BINS]),
            **dict(zip(DOUBLES, sums, strict=True)),
        )
        for counts, sums in zip(numbers, doubles, strict=True)
    ]


Owners = dict[int, tuple[Parameter, str, str]]  # by id: a parameter, the first module that has it, and its name there


class OverflowWatch(Protocol):
    """Looks in the forwards of one step for overflows that a later operation absorbs, while `on` is true."""

    on: bool

    def end(self, losses: Sequence[Tensor]) -> None:
        """Notes the overflows that the losses of a backward pass depend on."""

    def observations(self, step: int) -> list[Observation]:
        """Returns what was found, as observations."""


# Begins a watch, or none: adds what ends it to the list, and returns it with what leaves the emulation's modes.
Overflows = Callable[[list[Callable[[], None]]], tuple[OverflowWatch, Callable[[], None]] | None]
# Begins to count what recipes of products lose in some modules; called at a step, the result returns what reads that.
Operands = Callable[[Container[str]], Callable[[int], Callable[[], Sequence[Observation]]]]
Errors = Callable[[str, str, Tensor], None]  # takes a module, a place in its output, and the errors there
# Begins to call one of some modules again in fp32, in the next forward: passes on the errors of its outputs, in their
# spread, and adds what ends this to the list. Returns what switches it off and on.
Shadows = Callable[[Mapping[str, nn.Module], Errors, list[Callable[[], None]]], Callable[[bool], None]]


More = tuple[Overflows | None, Shadows | None, Operands | None]
"""What a probe begins in a step beside statistics of tensors."""


class Window:
    """Measures tensors of some `kinds` in `modules`, a dict by name, from its creation until `close`."""

    # What is added to `undo` refers to neither modules nor window, so that a finalizer may hold it.

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        kinds: frozenset[str],
        sample: int | None,
        undo: list[Callable[[], None]],
        more: More,
    ) -> None:
        absorbed, shadows, operands = more
        self.kinds = kinds
        self.hooks: StepHooks | None = None
        self.watch: OverflowWatch | None = None
        self._modules = modules
        self.unread: set[str] = set()  # types of tensors that could not be read
        self.captured = False  # by a CUDA graph, whose replays would count again
        self._rows = StepRows(sample)
        self._scale = 0
        self._weights_read = False
        self._undo = undo
        if kinds & {"activation", "activation_grad"}:
            undo.append(run_uncompiled())
            self.hooks = StepHooks(
                partial(self._saw, "activation") if "activation" in kinds else None,
                partial(self._saw, "activation_grad") if "activation_grad" in kinds else None,
            )
            undo.append(self.hooks.take_off)
            self.hooks.put_on(modules)
        if absorbed is not None and (begun := absorbed(undo)) is not None:
            self.watch, self._off_emulation = begun
        self._operands = None if operands is None or is_capturing() else operands(modules)
        self._shadow: Callable[[bool], None] | None = None
        if shadows is not None:
            undo.append(run_uncompiled())
            self._shadow = shadows(modules, partial(self._saw, PRECISION), undo)

    @cached_property
    def owners(self) -> Owners:
        """The floating-point and complex parameters of the modules by id, collected at the first access."""
        return owned(self._modules)

    def pause(self, *, on: bool) -> None:
        """Stops (`on=False`) or resumes observing what the modules compute."""
        if self.hooks is not None:
            self.hooks.active = on
        if self.watch is not None:
            self.watch.on = on
        if self._shadow is not None:
            self._shadow(on)

    def close(self) -> None:
        """Detaches the window and leaves the modules as they were before."""
        if self.hooks is not None:
            self.hooks.remove()
        if self.watch is not None:
            self._off_emulation()
        undo_all(self._undo)

    def pending(self, step: int) -> Pending:
        """Returns the measurements, with their copy to the host started."""
        operands = tuple if self._operands is None or self._capturing() else self._operands(step)
        return self._rows.pending(step, () if self.watch is None else self.watch.observations(step), operands)

    def carry(self, scale: Tensor, losses: Sequence[Tensor]) -> None:
        if self.watch is not None:
            self.watch.end(losses)
        if self.hooks is not None:
            self.hooks.new_backward()
        if not self._capturing():
            self._scale = self._rows.add_scale(scale)

    def read(self, params: Sequence[Parameter], grads: Sequence[Tensor], scale: Tensor) -> None:
        """Measures gradients of a step, which are multiplied by `scale`; the first call also measures the weights."""
        if self._capturing():
            return
        owners = self.owners
        if "weight" in self.kinds and not self._weights_read:
            self._weights_read = True
            self._add([(p, Subject(module, "weight", name)) for p, module, name in owners.values()])
        if "weight_grad" in self.kinds:
            number = self._rows.add_scale(scale)
            pairs = [(owners[id(p)], grad) for p, grad in zip(params, grads, strict=True) if id(p) in owners]
            self._add([(grad, Subject(module, "weight_grad", name, number)) for (_, module, name), grad in pairs])

    def update(self, updates: Updates) -> None:
        if self._capturing():
            return
        owned = [self.owners.get(id(p)) for p in updates.params]
        self._rows.add_updates(updates, [owner and Subject(owner[1], UPDATE, owner[2]) for owner in owned])

    def _saw(self, kind: str, module: str, place: str, t: Tensor) -> None:
        self._add([(t, Subject(module, kind, place, self._scale if kind == "activation_grad" else 0))])

    def _add(self, pairs: Sequence[tuple[Tensor, Subject]]) -> None:
        if self._capturing():
            return
        read = [(readable(t.detach()), subject) for t, subject in pairs]
        self.unread.update(type(t).__name__ for (t, _), (found, _) in zip(pairs, read, strict=True) if found is None)
        self._rows.add([t for t, _ in read if t is not None], [subject for t, subject in read if t is not None])

    def _capturing(self) -> bool:
        capturing = is_capturing()
        self.captured = self.captured or capturing
        return capturing


def owned(modules: Mapping[str, nn.Module]) -> Owners:
    """Returns, by id, each floating-point or complex parameter with the first module that has it and its name there."""
    found: Owners = {}
    for module_name, module in modules.items():
        for name, p in parameters_of(module).items():
            if p is not None and (p.is_floating_point() or p.is_complex()):
                found.setdefault(id(p), (p, module_name, name))
    return found
