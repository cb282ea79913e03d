"""`apex.fp16_utils.loss_scaler`: loss scales for training loops that unscale gradients and skip steps on their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.edits import Scaling
from halfstep.scale.norm import read
from halfstep.scale.scaling import make_scale

__all__ = ["DynamicLossScaler", "LossScaler"]

CEILING = 2.0**24


class LossScaler:
    """A static loss scale. Its `has_overflow` checks the gradients; in apex it always returned False.

    Raises:
        PlanError: the scale is not a positive number.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._take(Scaling("static", init=scale))

    def _take(self, scaling: Scaling) -> None:
        self._scale = make_scale(scaling, torch.device("cpu"))

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return float(self._scale.value)

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale

    def has_overflow(self, params: Iterable[Parameter]) -> bool:
        """Returns whether a gradient of these parameters is not finite; waits for the device."""
        return bool(read([p.grad for p in params if p.grad is not None]).found)

    def update_scale(self, overflow: bool) -> None:
        """Adapts a dynamic scale after a step, given whether the step overflowed; leaves a static scale as it is."""
        self._scale.update(torch.tensor(bool(overflow)))

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Returns `grad_in`, the gradients of a module's inputs, times the scale; for use as a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale; the product is computed in fp32."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale, divided by `scale_factor` at an overflow and multiplied by it after `scale_window` clean steps.

    Clean steps are steps without overflow, counted in a row. The scale is at least 1, and at most 2**24 or
    `init_scale`, whichever is larger.

    Raises:
        PlanError: an argument is out of range.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self._take(dynamic_scaling(init_scale, scale_factor, scale_window))

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return bool(read([x]).found)


def dynamic_scaling(init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> Scaling:
    """Returns the Scaling for the arguments of `DynamicLossScaler`.

    Raises:
        PlanError: an argument is out of range.
    """
    return Scaling(
        "dynamic",
        init=init_scale,
        growth=scale_factor,
        backoff=1 / scale_factor,
        growth_interval=scale_window,
        max=max(init_scale, CEILING),
    )
