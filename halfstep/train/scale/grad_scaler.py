"""A drop-in `torch.amp.GradScaler` whose scale has a floor, a ceiling and hysteresis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.edits import Scaling
from halfstep.errors import PlanError, StateError
from halfstep.torch_internals import OpenGradScaler, takes_found_inf
from halfstep.train.scale.scaling import adapt_
from halfstep.validate import check_device_type, check_entries, short, with_near_misses

_MIN, _MAX, _HYSTERESIS = 1.0, 2.0**24, 1
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@with_near_misses
class GradScaler(OpenGradScaler):
    """Behaves like `torch.amp.GradScaler` and has its state format, except for these differences.

    - `update` keeps the scale within [`min_scale`, `max_scale`]; torch lets it fall to subnormals, where gradients
      vanish. The defaults (None) are 1 and 2**24, or `init_scale` if it is below 1 or above 2**24. A scale that was set
      by hand or loaded stays as it is until the next `update`.
    - The scale backs off only at the `hysteresis`-th overflow since it last grew, and at every one after it, as in
      DeepSpeed.
    - A fused `torch.optim.SGD` whose first step overflows starts from zero momentum; torch's kernel leaves the
      momentum uninitialised (still so with `dampening`).
    - `step` refuses a closure, positional or as a keyword, but accepts `closure=None`. `update` accepts an int.
    - fp16 gradients are accepted, where torch raises: `unscale_` converts them to fp32, in which small ones do not
      underflow, and `step` converts them back to fp16 for the optimizer.
    - If the growth interval is lowered below the number of clean steps so far, the scale grows at the next clean step
      instead of never.

    The state dict has torch's five entries, plus `min_scale`, `max_scale`, `hysteresis` and `_overflows_left` if one of
    the first three is not the default. torch's GradScaler can load it. This class can load the state of torch's
    GradScaler; its own range and hysteresis then stay as they are.

    Raises:
        PlanError: `device` names no device, a scale is not a number, `init_scale` is outside the range, or
            `hysteresis` is not an integer of 1 or more.

    >>> scaler = GradScaler("cpu", init_scale=2.0)
    >>> scaler.scale(torch.tensor(3.0))
    tensor(6.)
    """

    def __init__(  # noqa: PLR0913  torch's six, in its order
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = _HYSTERESIS,
    ) -> None:
        if enabled:
            check_device_type("GradScaler's device", str(device) if isinstance(device, torch.device) else device)
            given = {"init_scale": init_scale, "growth_interval": growth_interval}
            for name, value in (given | {"min_scale": min_scale, "max_scale": max_scale}).items():
                if not isinstance(value, Real) and (value is not None or name in given):
                    came = f"{short(value)} of type {type(value).__name__}"
                    raise PlanError(f"GradScaler's {name} is {came}; expected a number")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale = min(_MIN, init_scale) if min_scale is None else float(min_scale)
        self._max_scale = max(_MAX, init_scale) if max_scale is None else float(max_scale)
        self._hysteresis = hysteresis
        if enabled and not 0 < self._min_scale <= init_scale <= self._max_scale < math.inf:
            raise PlanError(
                "expected 0 < min_scale <= init_scale <= max_scale < inf,"
                f" got min_scale {self._min_scale:g}, init_scale {init_scale:g}, max_scale {self._max_scale:g}"
            )
        if type(hysteresis) is not int or hysteresis < 1:
            raise PlanError(f"hysteresis must be an integer of 1 or more, got {hysteresis!r}")
        self._overflows_left = torch.full((), hysteresis, dtype=torch.int32, device="cpu")

    @with_near_misses
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of the optimizer by the scale; fp16 gradients become fp32.

        Raises:
            RuntimeError: `unscale_` or `step` was already called for this optimizer since the last `update`.
        """
        for param in _with_gradients(optimizer) if self.is_enabled() and self.is_ready(optimizer) else ():
            if param.grad.dtype is torch.float16:
                grad, param.grad = param.grad, None
                param.grad_dtype = torch.float32
                param.grad = grad.float()
        super().unscale_(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Converts the fp32 gradients of fp16 parameters back to fp16, for the optimizer's step."""
        for param in _with_gradients(optimizer):
            if param.dtype is torch.float16 and param.grad.dtype is torch.float32:
                grad, param.grad = param.grad, None
                param.grad_dtype = None
                param.grad = grad.half()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients unless `unscale_` has, and steps the optimizer unless a gradient is non-finite.

        Optimizers that take `grad_scale` and `found_inf` (fused ones) step without a host sync.

        Raises:
            RuntimeError: a closure was passed, or `step` was called twice without `update`.
        """
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        keyword = kwargs.pop("closure", None)
        closure = args[0] if args else keyword
        if closure is not None:
            raise RuntimeError(
                f"GradScaler.step got a closure ({type(closure).__name__}), whose gradients would stay scaled; call it "
                "yourself before step, or use an optimizer that needs none"
            )
        if self.is_unscaled(optimizer):
            self.before_step(optimizer)
        _start_momentum(optimizer)
        return super().step(optimizer, *args, **kwargs)

    @with_near_misses
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to the overflows of the steps since the last `update`, or sets it to `new_scale`."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
            return
        scale, growth_tracker = self.scale_and_tracker()
        found = self.found_by_all()
        if not found:
            raise AssertionError("No inf checks were recorded prior to update; call step or unscale_ before it.")
        overflowed = torch.stack([one.to(scale.device, non_blocking=True) for one in found]).any()
        schedule = Scaling(
            "dynamic",
            init=self._min_scale,
            growth=self.get_growth_factor(),
            backoff=self.get_backoff_factor(),
            growth_interval=int(self.get_growth_interval()),
            min=self._min_scale,
            max=self._max_scale,
            hysteresis=self._hysteresis,
        )
        adapt_(scale, growth_tracker, self._overflows_left, overflowed, schedule)
        self.forget_found()

    @with_near_misses
    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of clean steps in a row after which the scale grows."""
        super().set_growth_interval(new_interval)
        if self.growth_tracker is not None:
            self.growth_tracker.clamp_(max=max(new_interval - 1, 0))

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, plus halfstep's own if one is not the default; {} if the scaler is disabled."""
        state = super().state_dict()
        if self.is_enabled() and (self._min_scale, self._max_scale, self._hysteresis) != (_MIN, _MAX, _HYSTERESIS):
            state["min_scale"], state["max_scale"] = self._min_scale, self._max_scale
            state["hysteresis"], state["_overflows_left"] = self._hysteresis, int(self._overflows_left)
        return state

    @with_near_misses
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this class or of `torch.amp.GradScaler`; does nothing if this scaler is disabled.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler returns it.
            StateError: it is no state, or an entry is missing or no number; nothing was changed.
        """
        if self.is_enabled():
            _check_state(state_dict)
        super().load_state_dict(dict(state_dict))
        if not self.is_enabled():
            return
        self._min_scale = float(state_dict.get("min_scale", self._min_scale))
        self._max_scale = float(state_dict.get("max_scale", self._max_scale))
        self._hysteresis = int(state_dict.get("hysteresis", self._hysteresis))
        self._overflows_left.fill_(int(state_dict.get("_overflows_left", self._hysteresis)))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_overflows_left": self._overflows_left.to("cpu", copy=True)}

    def on_device(self, device: torch.device) -> None:
        """Called when the scale is created on `device`: moves the count of overflows left before it backs off."""
        self._overflows_left = self._overflows_left.to(device)


def _check_state(state: Any) -> None:
    """Refuses what a GradScaler cannot load; an empty state is left to torch, which refuses it."""
    instead = "pass what state_dict() of a GradScaler returned"
    check_entries("the state of the GradScaler", state, _TORCH_KEYS if state else (), also=None, instead=instead)
    for key, value in ((key, state[key]) for key in _TORCH_KEYS if key in state):
        if not isinstance(value, (int, float, Tensor)) or not value >= 0:
            raise StateError(
                f"the state of the GradScaler has {key} {short(value)}; expected a number, 0 or more: {instead}"
            )


def _with_gradients(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _start_momentum(optimizer: Optimizer) -> None:
    """Gives fused SGD without dampening a momentum buffer of zeros for each parameter that has no buffer yet."""
    # https://github.com/pytorch/pytorch/blob/main/torch/optim/sgd.py: `_fused_sgd` makes a missing buffer with
    # `empty_like`, and the kernel does not write to it if found_inf is set.
    if isinstance(optimizer, torch.optim.SGD) and takes_found_inf(optimizer):
        for group in optimizer.param_groups:
            for param in group["params"] if group["fused"] and group["momentum"] and not group["dampening"] else ():
                state = optimizer.state[param]
                if param.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
