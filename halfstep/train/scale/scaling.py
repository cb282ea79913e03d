"""The loss scales of a session, one for each loss: none, static or dynamic; their state is tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.edits import LARGEST_SCALE, SMALLEST_SCALE, Scaling
from halfstep.errors import SessionError, StateError
from halfstep.torch_internals import update_scale_
from halfstep.train.scale.accumulator import Collected
from halfstep.validate import check_entries


class FixedScale:
    """A scale that overflows do not change: 1 for a plan without a loss scale, or one that the user chose."""

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self.active = scaling.active  # whether the scale can differ from 1
        self._kind, self._scale = scaling.kind, float(scaling.first)
        self.value = torch.full((), self._scale, dtype=torch.float32, device=device)

    def update(self, found: Tensor, *, count: bool = True, void: Tensor | None = None) -> None:
        """Does nothing: the scale is fixed."""

    def limit(self, maximum: float) -> None:
        if self._scale > maximum:
            raise SessionError(
                f"the static loss scale {self._scale:g} is above {maximum:g}, the largest that the format of the loss"
                " allows: gradients would be infinite; pass loss.float() to backward or choose a smaller scale"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._kind} | ({"scale": self._scale} if self.active else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, self.state_dict())
        if self.active and (isinstance(state["scale"], bool) or state["scale"] != self._scale):
            raise StateError(
                f"the state has the static loss scale {state['scale']!r}, but this plan has {self._scale!r};"
                " set the plan's scale to that of the state, or do not load the scale"
            )


class DynamicScale:
    """A scale that backs off when gradients overflow and grows after an interval without an overflow."""

    # As torch.amp's, with a floor, a ceiling, and DeepSpeed's hysteresis: it backs off at the `hysteresis`-th overflow
    # and at every one after it; the next growth starts the count of overflows again.

    active = True

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self._schedule = scaling
        self.value = torch.full((), float(scaling.init), dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.int32, device=device)
        self._left = torch.full((), scaling.hysteresis, dtype=torch.int32, device=device)

    def update(self, found: Tensor, *, count: bool = True, void: Tensor | None = None) -> None:
        """Adapts the scale to one step, on the device; a step that is `void` is no clean one, but no overflow."""
        found = found.to(self.value.device, non_blocking=True)
        if void is not None and count:
            self._clean.add_(void.to(found.device, non_blocking=True), alpha=-1)  # `adapt_` adds 1
        adapt_(self.value, self._clean, self._left, found, self._schedule, count=count)

    def limit(self, maximum: float) -> None:
        """Lowers the ceiling of the scale to the largest power of two at or below `maximum`."""
        maximum = 2.0 ** math.floor(math.log2(maximum))
        if maximum >= self._schedule.max:
            return
        if self._schedule.min > maximum:
            raise SessionError(
                f"the floor of the loss scale, {self._schedule.min:g}, is above {maximum:g}, the largest that the"
                " format of the loss allows: gradients would be infinite; pass loss.float() to backward or lower min"
            )
        self._schedule = replace(self._schedule, init=min(self._schedule.init, maximum), max=maximum)
        self.value.clamp_(max=maximum)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, the clean steps since the last change, and the overflows left before backing off."""
        return {
            "kind": "dynamic",
            "scale": float(self.value),
            "clean_steps": int(self._clean),
            "overflows_left": int(self._left),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, self.state_dict())
        for key in ("clean_steps", "overflows_left"):
            if type(state[key]) is not int or not 0 <= state[key] < 2**63:
                raise StateError(
                    f"the state of the loss scale has {key}={state[key]!r}; expected an integer from 0 to 2**63 - 1"
                )
        scale = state["scale"]
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not number or not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            raise StateError(
                f"the state of the loss scale has scale={scale!r:.40}; expected a positive finite number, "
                "from 2**-126 to 2**126"
            )
        self.value.fill_(min(float(scale), self._schedule.max))
        self._clean.fill_(min(state["clean_steps"], self._schedule.growth_interval - 1))
        self._left.fill_(min(state["overflows_left"], self._schedule.hysteresis))


Scale = FixedScale | DynamicScale
"""A loss scale. A loss is multiplied by its `value`, a 0-dim fp32 tensor that is updated in place, before backward."""


# Devices with torch's own kernel for the rule without hysteresis: 3 launches a step instead of 20.
_ONE_KERNEL = ("cpu", "cuda")


def adapt_(value: Tensor, clean: Tensor, left: Tensor, found: Tensor, schedule: Scaling, *, count: bool = True) -> None:
    """Adapts a dynamic scale to one step in place, without a host sync; all tensors are 0-dim, on one device."""
    # `value` (fp32) is the scale, `clean` (int32) the number of clean steps in a row since it last grew, and `found`
    # (bool) whether this step overflowed.
    if schedule.hysteresis == 1 and count and value.device.type in _ONE_KERNEL:
        numbers = (schedule.growth, schedule.backoff, schedule.growth_interval)
        update_scale_(value, clean, found.to(torch.float32), *numbers)
    else:
        state = value, clean, left
        adapted = next_state(*state, found, schedule, select=torch.where, times=_times, count=count)
        for old, new in zip(state, adapted, strict=True):
            old.copy_(new)
    value.clamp_(min=schedule.min, max=schedule.max)


def next_state(  # noqa: PLR0913  # the state, what was found, the schedule, and two operations of a library
    value: Any,
    clean: Any,
    left: Any,
    found: Any,
    schedule: Scaling,
    *,
    select: Callable[[Any, Any, Any], Any],
    times: Callable[[Any, float], Any],
    count: bool = True,
) -> tuple[Any, Any, Any]:
    """Returns the `value`, `clean` and `left` that `adapt_` would set, but without clamping the scale."""
    steps = select(found, clean * 0, clean + int(count))
    grown = ~found & (steps >= schedule.growth_interval) if count else found & ~found
    grown_or_kept = select(grown, times(value, schedule.growth), value)
    adapted = select(found & (left <= 1), times(value, schedule.backoff), grown_or_kept)
    spent = select(found & (left > 1), left - 1, left)
    return adapted, select(grown, steps * 0, steps), select(grown, left * 0 + schedule.hysteresis, spent)


def _times(value: Tensor, factor: float) -> Tensor:
    """Returns a product that is rounded once from float64, as in torch."""
    if value.device.type == "mps":  # has no float64
        return value * factor
    return (value.double() * factor).float()


def make_scale(scaling: Scaling, device: torch.device) -> Scale:
    """Returns the scale that `scaling` describes, with its state on `device`."""
    return DynamicScale(scaling, device) if scaling.adapts else FixedScale(scaling, device)


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if isinstance(state, Mapping) and state.get("kind", own["kind"]) != own["kind"]:
        raise StateError(
            f"the state belongs to a {state['kind']!r} loss scale, but this plan has {own['kind']!r};"
            " load it into a session of the plan that it came from"
        )
    check_entries("the state of a loss scale", state, own, also=(), instead="load what session.state_dict() returned")


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
        _check_id(loss_id)
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
        _check_id(loss_id)
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


def _check_id(loss_id: int) -> None:
    if not isinstance(loss_id, int) or isinstance(loss_id, bool) or loss_id < 0:
        raise SessionError(f"loss_id is {loss_id!r}; it must be a non-negative int")
