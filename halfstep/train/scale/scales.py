"""The loss scales of a session: one for each of its losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfstep.edits import Scaling
from halfstep.errors import SessionError
from halfstep.train.scale.accumulator import Collected
from halfstep.train.scale.scaling import Scale, make_scale


class LossScales:
    """The scale of each loss, made from `scaling` when its `loss_id` is first used; all share one if it is constant."""

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self._scaling, self._device = scaling, device
        self.active = scaling.active  # whether a scale can differ from 1
        self._scales: dict[int, Scale] = {}
        self._backed_off: dict[int, Tensor] = {}  # for losses with a step since their last backward: in one of these
        self.ceiling: float | None = None  # what `limit` keeps all scales at or below
        self.as_torch_amp = False  # whether a loss that is not finite lowers its scale, as in torch.amp and apex
        self.penalties: dict[int, Tensor] = {}  # whether gradients that the next loss may be made of overflowed

    def of(self, loss_id: int) -> Scale:
        known = self._scales.get(loss_id) if type(loss_id) is int else None
        if known is not None:
            return known
        _check(loss_id)
        if loss_id not in self._scales:
            self._scales[loss_id] = self._first()
        return self._scales[loss_id]

    def _first(self) -> Scale:
        shared = not self._scaling.adapts and self._scales
        scale = next(iter(self._scales.values())) if shared else make_scale(self._scaling, self._device)
        if self.ceiling is not None:
            scale.limit(self.ceiling)
        return scale

    def limit(self, maximum: float) -> None:
        """Keeps all scales at or below `maximum` from now on."""
        self.ceiling = maximum
        for scale in self._scales.values():
            scale.limit(maximum)

    def went_backward(self, loss_id: int) -> None:
        """Notes a backward pass of this loss: the next step will adapt the loss's scale."""
        self._backed_off.pop(loss_id, None)

    def update(self, collected: Sequence[Collected], found: Sequence[Tensor], void: Tensor | None = None) -> None:
        """Adapts the scales to one step, given each optimizer's gradients and whether they overflowed."""
        # A step that is `void` (0-dim bool), because a loss was not finite at any scale, changes nothing.
        overflowed: dict[int, Tensor] = {}
        for held, now in zip(collected, found, strict=True):
            for loss_id, flag in held.overflowed(now).items():
                overflowed[loss_id] = overflowed[loss_id] | flag if loss_id in overflowed else flag
        void = None if self.as_torch_amp else void
        for loss_id, flag in overflowed.items():
            before = self._backed_off.get(loss_id)
            if void is not None:
                flag = flag > void.to(flag.device, non_blocking=True)
            if before is None:
                self._scales[loss_id].update(flag, void=void)
                self._backed_off[loss_id] = flag
            else:
                before = before.to(flag.device, non_blocking=True)
                self._scales[loss_id].update(flag & ~before, count=False)
                self._backed_off[loss_id] = flag | before

    @contextmanager
    def held_at(self, scale: float) -> Iterator[None]:
        """Sets every scale to `scale` within a `with` block, without moving the version counters of the scales."""
        kept = [(own.value, own.value.clone()) for own in self._scales.values()]
        for value, _ in kept:
            value.data.fill_(scale)  # through .data: the accumulator takes a counted write for a change
        try:
            yield
        finally:
            for value, before in kept:
                value.data.copy_(before)

    def read(self, loss_id: int) -> float:
        """Returns the present scale of a loss, or the one that it would start with; waits for the device."""
        _check(loss_id)
        return float(self._scales[loss_id].value) if loss_id in self._scales else self._scaling.first

    def read_all(self) -> dict[int, float]:
        """Returns the scale of each loss seen so far, by `loss_id`; waits for the device."""
        return {loss_id: float(scale.value) for loss_id, scale in sorted(self._scales.items())}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each scale as plain numbers, under its `loss_id` as text; waits for the device."""
        # Loss 0 is included even before its first use, since torch.distributed.checkpoint loads only keys that the new
        # session's state has.
        scales = self._scales if 0 in self._scales else {0: self._first(), **self._scales}
        return {str(loss_id): scale.state_dict() for loss_id, scale in scales.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        scales = {int(key): make_scale(self._scaling, self._device) for key in state}
        for key, entry in state.items():
            scales[int(key)].load_state_dict(entry)
        self._scales = scales
        self._backed_off = {loss_id: torch.zeros((), dtype=torch.bool, device=self._device) for loss_id in scales}


def _check(loss_id: int) -> None:
    if not isinstance(loss_id, int) or isinstance(loss_id, bool) or loss_id < 0:
        raise SessionError(f"loss_id is {loss_id!r}; it must be a non-negative int")
