"""How the loss is scaled, as data: not, by a constant, or by a scale that adapts to overflow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from halfstep.errors import PlanError
from halfstep.plan.checks import count, one_of, real

ScalingKind = Literal["none", "static", "dynamic"]

SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_USED_BY = {"none": ("kind",), "static": ("kind", "init")}


@dataclass(frozen=True)
class Scaling:
    """The kind of loss scale and, for a dynamic one, its schedule (Micikevicius et al. 2018, section 3.2).

    A dynamic scale starts at `init`, is multiplied by `growth` after `growth_interval` steps in a row without overflow
    and by `backoff` once `hysteresis` overflows were seen since it last grew, and stays within [`min`, `max`]. For a
    static one `init` is the scale. Scales and their inverses are fp32 normal numbers, so they lie in [2**-126, 2**126].

    Raises:
        PlanError: a value out of range, or one that this kind does not use.

    >>> Scaling("static", init=128).init
    128.0
    """

    kind: ScalingKind
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        one_of("scale kind", self.kind, get_args(ScalingKind))
        for name in ("init", "min", "max"):
            self._set(name, real(f"scale {name}", getattr(self, name), low=SMALLEST_SCALE, high=LARGEST_SCALE))
        self._set("growth", real("scale growth", self.growth, low=1.0, high=LARGEST_SCALE))
        self._set("backoff", real("scale backoff", self.backoff, low=SMALLEST_SCALE, high=1.0))
        self._set("growth_interval", count("scale growth_interval", self.growth_interval))
        self._set("hysteresis", count("scale hysteresis", self.hysteresis))
        if self.kind == "dynamic":
            self._check_schedule()
        else:
            self._check_unused()

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)

    def _check_schedule(self) -> None:
        if self.growth == 1.0:
            raise PlanError("scale growth is 1, so that the scale could never recover; give more than 1, such as 2")
        if self.backoff == 1.0:
            raise PlanError("scale backoff is 1, so that every overflow would repeat; give less than 1, such as 0.5")
        if self.min > self.max:
            raise PlanError(f"scale min {self.min:g} is above max {self.max:g}; swap them or widen the range")
        if not self.min <= self.init <= self.max:
            raise PlanError(
                f"scale init {self.init:g} is outside [min, max] = [{self.min:g}, {self.max:g}]; "
                "give an init within, or move min or max"
            )

    def _check_unused(self) -> None:
        used = _USED_BY[self.kind]
        for field in fields(self):
            if field.name not in used and getattr(self, field.name) != field.default:
                raise PlanError(
                    f"scale {field.name} is {getattr(self, field.name)!r}, but a scale of kind {self.kind!r} does not "
                    f"use it; leave it out, or give kind 'dynamic'"
                )
