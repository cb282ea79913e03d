"""Restores the models' buffers after a skipped step, because one infinite batch poisons running statistics for good."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.torch_internals import buffers_of, foreach_copy_, unflatten, version_of

Buffers = dict[str, Tensor | None]
_SMALL = 2**16  # elements
_SHAPE = attrgetter("shape")


class BufferGuard:
    """Copies the buffers of `models` before a step's first training forward; puts them back if the step is skipped."""

    # Dense buffers of up to 65,536 elements are always copied: version counters miss writes through `.data` and those
    # of `native_batch_norm`. Larger ones (a mask, a table) are copied in their first step and after a change of the
    # counter. If forward replaces a buffer by one with the same shape, dtype and device, that gets the old value.

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._modules = list(modules.values())
        self._places: list[tuple[int, str]] = []  # of all buffers: the id of a module's, and a name there
        self._watched: list[_Slot] = []  # that may come to be guarded, or be guarded no more
        self._groups: list[_Group] = []
        self._first_seen: dict[int, tuple[Tensor, int]] = {}
        self._current = False
        self.after_step()

    def refresh(self) -> None:
        """Takes the snapshot before the first training forward of a step; later calls before the step do nothing."""
        if not self._current:
            self.after_step()
            self._current = True

    def after_step(self) -> None:
        """Takes a snapshot now, and another at the next `refresh`; call it after each step and each load of a state."""
        held = [(buffers, name) for buffers in map(buffers_of, self._modules) if buffers for name in buffers]
        same = [(id(buffers), name) for buffers, name in held] == self._places
        if not (same and all(map(_Group.holds, self._groups)) and all(map(self._is_as_it_was, self._watched))):
            self._arrange(held)
        for group in self._groups:
            group.take()
        self._current = False

    def restore(self, found: Tensor) -> None:
        """Restores every buffer from the snapshot if `found` (0-dim bool) is true; changes nothing if it is false."""
        # The snapshot is kept until the next `refresh`, so that a second optimizer can restore from it too.
        for group in self._groups:
            group.restore(found)
        self._current = False

    def _is_as_it_was(self, slot: _Slot) -> bool:
        buffer = slot.buffers[slot.name]
        return self._alias(buffer) is None if slot.alias is None else buffer is not None and self._changes(buffer)

    def _arrange(self, held: list[tuple[Buffers, str]]) -> None:
        """Assigns each guarded buffer a place in the snapshot of its device and dtype."""
        slots = [_Slot(buffers, name, self._alias(buffers[name])) for buffers, name in held]
        self._places = [(id(buffers), name) for buffers, name in held]
        self._watched = [slot for slot in slots if slot.alias is None or slot.alias.numel() > _SMALL]
        groups: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
        for slot in slots:
            if slot.alias is not None:
                groups.setdefault((slot.alias.device, slot.alias.dtype), []).append(slot)
        self._groups = [_Group(slots) for slots in groups.values()]

    def _alias(self, buffer: Tensor | None) -> Tensor | None:
        """Returns a second tensor on a buffer's memory; None if the buffer is not guarded."""
        return buffer.data if buffer is not None and _restorable(buffer) and self._changes(buffer) else None

    def _changes(self, buffer: Tensor) -> bool:
        """Returns whether training may change the buffer: it is small, new, or its version counter has moved."""
        if buffer.numel() <= _SMALL:
            return True
        seen = self._first_seen.setdefault(id(buffer), (buffer, -1))
        if seen[1] < 0:
            self._first_seen[id(buffer)] = (buffer, version_of(buffer))
            return True
        return seen[1] != version_of(buffer)


class _Slot(NamedTuple):
    """One buffer of one module, looked up by its name."""

    # `alias` is a second tensor on the memory of the buffer last seen here (None: not guarded), so that no other gets
    # it. Restoring writes through it, since a write would move the buffer's version counter: BatchNorm saves its
    # statistics, and a later backward pass of another loss would raise an error.

    buffers: Buffers
    name: str
    alias: Tensor | None


def _lies(buffers: list[Any]) -> tuple[list[Any], ...]:
    """Returns the address, shape and strides of each buffer."""
    return list(map(Tensor.data_ptr, buffers)), list(map(_SHAPE, buffers)), list(map(Tensor.stride, buffers))


class _Group:
    """The guarded buffers of one device and dtype, their snapshot, and memory for their values after the step."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self._held = [(slot.buffers, slot.name) for slot in slots]
        self._aliases = [slot.alias for slot in slots if slot.alias is not None]
        first = self._aliases[0]
        self.snapshot = torch.empty(sum(t.numel() for t in self._aliases), dtype=first.dtype, device=first.device)
        self._after = torch.empty_like(self.snapshot)
        self._lie = _lies(self._aliases)
        self._kept = unflatten(self.snapshot, self._aliases)
        self._chosen = unflatten(self._after, self._aliases)

    def holds(self) -> bool:
        """Returns whether each buffer has the address, shape and strides of the one last seen there."""
        now = [buffers.get(name) for buffers, name in self._held]
        return type(None) not in set(map(type, now)) and _lies(now) == self._lie

    @torch.no_grad()
    def take(self) -> None:
        foreach_copy_(self._kept, self._aliases)

    @torch.no_grad()
    def restore(self, found: Tensor) -> None:
        found = found.to(self.snapshot.device, non_blocking=True)
        buffers = self._aliases if self.holds() else list(map(self._now, self._slots, self._aliases))
        foreach_copy_(self._chosen, buffers)
        torch.where(found, self.snapshot, self._after, out=self._after)
        foreach_copy_(buffers, self._chosen)

    def _now(self, slot: _Slot, alias: Tensor) -> Tensor:
        """Returns the tensor to restore into: the guarded buffer, or the buffer that forward replaced it with."""
        buffer = slot.buffers.get(slot.name)
        if buffer is None or not _restorable(buffer) or _lies([buffer]) == _lies([alias]):
            return alias
        same = (buffer.shape, buffer.dtype, buffer.device) == (alias.shape, alias.dtype, alias.device)
        return buffer.data if same else alias


def _restorable(buffer: Tensor) -> bool:
    """Returns whether a buffer can be copied and written in place: a strided tensor with memory for each element."""
    if is_lazy(buffer) or buffer.is_meta or buffer.is_inference() or buffer.is_quantized:
        return False
    return buffer.layout is torch.strided and not any(
        stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
