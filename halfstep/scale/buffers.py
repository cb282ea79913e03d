"""Buffers of a skipped step: put back as they were, because one infinite batch poisons running statistics for good."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_SMALL = 2**16  # elements


class BufferGuard:
    """Remembers the buffers of `models` before a step's first training forward and puts them back if it is skipped.

    Every dense buffer of up to 65,536 elements is copied, whatever its dtype: version counters would miss
    `running_mean` and `running_var`, which `native_batch_norm` writes without counting, and all writes through `.data`.
    A larger one (a mask, a table of rotary frequencies) is copied in its first step and from then on only once its
    version counter has moved. Nothing syncs. Buffers that are registered or replaced later are found.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._modules = list(modules.values())
        self._groups: list[_Group] = []
        self._known: dict[int, _Known] = {}  # the buffers of the groups
        self._first_seen: dict[int, tuple[Tensor, int]] = {}
        self._current = False
        self.after_step()

    def refresh(self) -> None:
        """Takes the snapshot before the first training forward of a step; later calls before the step do nothing."""
        if not self._current:
            self.after_step()
            self._current = True

    def after_step(self) -> None:
        """Takes a snapshot now, and at the next `refresh` again; call it after each step and each load of a state.

        So a model whose forward cannot call `refresh` (a compiled one) is guarded too, and a later skip does not undo
        the load.
        """
        buffers: dict[int, Tensor] = {}
        same = True
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is None:
                    continue
                known = self._known.get(id(buffer))
                unchanged = known is not None and known == _known(buffer)
                if (unchanged or _restorable(buffer)) and self._changes(buffer):
                    buffers[id(buffer)] = buffer
                    same = same and unchanged
        if not same or len(buffers) != len(self._known):
            self._group(buffers)
        for group in self._groups:
            group.take()
        self._current = False

    def restore(self, found: Tensor) -> None:
        """Puts every buffer back to the snapshot where `found` (0-dim bool) is true, and leaves it where it is false.

        Ends the step: the next `refresh` takes a new snapshot. Until then the old one stays, so that a second
        optimizer that steps after the same forward can restore too; after the last of them call `after_step`.
        """
        for group in self._groups:
            group.restore(found)
        self._current = False

    def _group(self, buffers: dict[int, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in buffers.values():
            groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._groups = [_Group(members) for members in groups.values()]
        self._known = {key: _known(buffer) for key, buffer in buffers.items()}

    def _changes(self, buffer: Tensor) -> bool:
        """Returns whether training may change the buffer: it is small, new, or its version counter has moved."""
        if buffer.numel() <= _SMALL:
            return True
        seen = self._first_seen.setdefault(id(buffer), (buffer, -1))
        if seen[1] < 0:
            self._first_seen[id(buffer)] = (buffer, buffer._version)
            return True
        return seen[1] != buffer._version


# Of a buffer, what a group's memory is made for, and whether it can be restored.
_Known = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _known(buffer: Tensor) -> _Known:
    return buffer.shape, buffer.stride(), buffer.dtype, buffer.device


class _Group:
    """The buffers of one device and dtype, a copy of them, and room for them as they are after the step."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        total = sum(buffer.numel() for buffer in buffers)
        self._snapshot, self._after = (torch.empty(total, dtype=b.dtype, device=b.device) for b in (buffers[0],) * 2)
        self._kept = torch._C._nn.unflatten_dense_tensors(self._snapshot, buffers)
        self._chosen = torch._C._nn.unflatten_dense_tensors(self._after, buffers)

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self._kept, self._buffers)

    @torch.no_grad()
    def restore(self, found: Tensor) -> None:
        found = found.to(self._snapshot.device, non_blocking=True)
        # Through .data: BatchNorm saves its statistics for backward, and a counted write between one optimizer's step
        # and another loss's backward would be an error there, which the op itself avoids in the same way.
        buffers = [buffer.data for buffer in self._buffers]
        torch._foreach_copy_(self._chosen, buffers)
        torch.where(found, self._snapshot, self._after, out=self._after)
        torch._foreach_copy_(buffers, self._chosen)


def _restorable(buffer: Tensor) -> bool:
    """Returns whether a buffer can be copied and written in place: strided, materialised, no element stored twice."""
    if is_lazy(buffer) or buffer.is_meta or buffer.is_inference():
        return False
    if buffer.layout is not torch.strided or buffer.is_quantized:
        return False
    return not any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
