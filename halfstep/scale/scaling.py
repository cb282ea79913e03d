"""The loss scale: none, static or dynamic, with the same methods; all state is tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.edits import LARGEST_SCALE, SMALLEST_SCALE, Scaling
from halfstep.errors import SessionError, StateError
from halfstep.torch_internals import update_scale_


@dataclass(frozen=True)
class Schedule:
    """How a dynamic scale follows the overflows; the words are those of the plan's `Scaling`."""

    growth: float
    backoff: float
    growth_interval: int
    min: float
    max: float
    hysteresis: int


def schedule_of(scaling: Scaling) -> Schedule:
    """Returns the schedule of a dynamic scale."""
    return Schedule(**{each.name: getattr(scaling, each.name) for each in fields(Schedule)})


class NoScale:
    """The null object: a scale of 1 that never changes."""

    active = False  # whether the scale can differ from 1

    def __init__(self, device: torch.device) -> None:
        self.value = torch.ones((), dtype=torch.float32, device=device)

    def update(self, found: Tensor, *, count: bool = True) -> None:
        """Does nothing."""

    def limit(self, maximum: float) -> None:
        """Does nothing: 1 is below the maximum of every format."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the kind alone."""
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state is of a plan without a scale."""
        _check_state(state, self.state_dict())


class StaticScale:
    """A scale of the user's that overflows do not change."""

    active = True

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self._scale = float(scaling.init)
        self.value = torch.full((), self._scale, dtype=torch.float32, device=device)

    def update(self, found: Tensor, *, count: bool = True) -> None:
        """Does nothing."""

    def limit(self, maximum: float) -> None:
        """Refuses a scale above `maximum`.

        Raises:
            SessionError: the plan fixes the scale above it.
        """
        if self._scale > maximum:
            raise SessionError(
                f"the static loss scale {self._scale:g} is above {maximum:g}, the most that the loss format takes:"
                " its gradients would be infinite; pass loss.float() to backward or choose a smaller scale"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns kind and scale."""
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state has the scale of the plan.

        Raises:
            StateError: it has another one, or is of another kind.
        """
        _check_state(state, self.state_dict())
        if isinstance(state["scale"], bool) or state["scale"] != self._scale:
            raise StateError(
                f"the state has the static loss scale {state['scale']!r}, this plan has {self._scale!r};"
                " give the plan the scale of the state, or do not load the scale"
            )


class DynamicScale:
    """A scale that backs off when gradients overflow and grows after an interval without an overflow.

    The rule is torch.amp's (grow after `growth_interval` clean steps in a row, count anew after growth and overflow),
    with a floor and a ceiling, and DeepSpeed's hysteresis: the scale backs off at the `hysteresis`-th overflow and at
    every one after it, until the next growth restores the credit.
    """

    active = True

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self._schedule = schedule_of(scaling)
        self.value = torch.full((), float(scaling.init), dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.int32, device=device)
        self._left = torch.full((), scaling.hysteresis, dtype=torch.int32, device=device)

    def update(self, found: Tensor, *, count: bool = True) -> None:
        """Adapts the scale to one step, on the device.

        `found` is a 0-dim bool tensor: whether the gradients of this loss overflowed. With `count=False` an overflow
        backs off but a clean step does not count towards growth: for a second optimizer's step after one backward.
        """
        found = found.to(self.value.device, non_blocking=True)
        adapt_(self.value, self._clean, self._left, found, self._schedule, count=count)

    def limit(self, maximum: float) -> None:
        """Lowers the ceiling to the largest power of two at or below `maximum`, for a loss whose format ends there.

        Raises:
            SessionError: the floor of the plan is above it.
        """
        maximum = 2.0 ** math.floor(math.log2(maximum))
        if maximum >= self._schedule.max:
            return
        if self._schedule.min > maximum:
            raise SessionError(
                f"the floor of the loss scale, {self._schedule.min:g}, is above {maximum:g}, the most that the"
                " format of the loss takes: its gradients would be infinite; pass loss.float() to backward or lower min"
            )
        self._schedule = replace(self._schedule, max=maximum)
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
        """Loads what `state_dict` returned, into the same tensors.

        Raises:
            StateError: the state is of another kind or misses a key or has an unknown one; nothing was changed.
        """
        _check_state(state, self.state_dict())
        for key in ("clean_steps", "overflows_left"):
            if type(state[key]) is not int or not 0 <= state[key] < 2**63:
                raise StateError(f"the state of the loss scale has {key}={state[key]!r}; a count is needed")
        scale = state["scale"]
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not number or not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            raise StateError(
                f"the state of the loss scale has scale={scale!r:.40}; a positive finite number is needed, "
                "from 2**-126 to 2**126"
            )
        self.value.fill_(min(float(scale), self._schedule.max))
        self._clean.fill_(min(state["clean_steps"], self._schedule.growth_interval - 1))
        self._left.fill_(min(state["overflows_left"], self._schedule.hysteresis))


Scale = NoScale | StaticScale | DynamicScale
"""What a loss is multiplied by before backward: its `value`, a 0-dim fp32 tensor, is updated in place."""


# Devices with torch's own kernel for the rule without hysteresis: 3 launches a step instead of 20.
_ONE_KERNEL = ("cpu", "cuda")


def adapt_(
    value: Tensor, clean: Tensor, left: Tensor, found: Tensor, schedule: Schedule, *, count: bool = True
) -> None:
    """Adapts a dynamic scale to one step in place, without a host sync; all tensors are 0-dim, on one device.

    `value` (fp32) is the scale, `clean` (int32) the clean steps in a row since it last grew, `left` (int32) the
    overflows left until it backs off, counting the one that does; `found` (bool) says that this step overflowed.
    The scale ends within its range.
    """
    if schedule.hysteresis == 1 and count and value.device.type in _ONE_KERNEL:
        numbers = (schedule.growth, schedule.backoff, schedule.growth_interval)
        update_scale_(value, clean, found.to(torch.float32), *numbers)
        value.clamp_(min=schedule.min, max=schedule.max)
    else:
        _adapt_any_(value, clean, left, found, schedule, count)


def _adapt_any_(value: Tensor, clean: Tensor, left: Tensor, found: Tensor, schedule: Schedule, count: bool) -> None:
    """Does what `adapt_` says with any hysteresis, on any device; products are rounded once from float64 as torch's."""
    adapted, steps, overflows = next_state(
        value, clean, left, found, schedule, select=torch.where, times=_times, count=count
    )
    value.copy_(adapted.clamp_(min=schedule.min, max=schedule.max))
    clean.copy_(steps)
    left.copy_(overflows)


def next_state(  # noqa: PLR0913  # the state, what was found, the schedule, and two operations of a library
    value: Any,
    clean: Any,
    left: Any,
    found: Any,
    schedule: Schedule,
    *,
    select: Callable[[Any, Any, Any], Any],
    times: Callable[[Any, float], Any],
    count: bool = True,
) -> tuple[Any, Any, Any]:
    """Returns what `adapt_` makes of `value`, `clean` and `left`, except that the scale is not kept within its range.

    They and `found` are scalars of any library of arrays, of which `select(condition, a, b)` is the `where` and `times`
    gives the product of a scale and a number.
    """
    steps = select(found, clean * 0, clean + int(count))
    grown = ~found & (steps >= schedule.growth_interval) if count else found & ~found
    grown_or_kept = select(grown, times(value, schedule.growth), value)
    adapted = select(found & (left <= 1), times(value, schedule.backoff), grown_or_kept)
    spent = select(found & (left > 1), left - 1, left)
    return adapted, select(grown, steps * 0, steps), select(grown, left * 0 + schedule.hysteresis, spent)


def _times(value: Tensor, factor: float) -> Tensor:
    if value.device.type == "mps":  # has no float64
        return value * factor
    return (value.double() * factor).float()


def make_scale(scaling: Scaling, device: torch.device) -> Scale:
    """Returns the scale that `scaling` describes, with its state on `device`.

    >>> from halfstep.edits import Scaling
    >>> scale = make_scale(Scaling("dynamic", init=8.0), torch.device("cpu"))
    >>> scale.update(torch.tensor(True))
    >>> scale.value
    tensor(4.)
    """
    if scaling.kind == "none":
        return NoScale(device)
    return StaticScale(scaling, device) if scaling.kind == "static" else DynamicScale(scaling, device)


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises StateError where `state` is not of the kind and keys of `own`."""
    if "kind" in state and state["kind"] != own["kind"]:
        raise StateError(
            f"the state belongs to a {state['kind']!r} loss scale, this plan has {own['kind']!r};"
            " load it into a session of the plan that it came from"
        )
    if state.keys() != own.keys():
        raise StateError(
            f"the state of the loss scale has the keys {sorted(map(str, state))}; needed are {sorted(own)}"
        )
