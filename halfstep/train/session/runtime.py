"""Runs the models of a session forward and backward without a step, for blame, the guardian and check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.formats import needs_scale
from halfstep.plan.plan import Plan
from halfstep.stack import begin_pass
from halfstep.torch_internals import TorchDispatchMode
from halfstep.train.cast.casting import Casting
from halfstep.train.optim.masters import Fit
from halfstep.train.scale.loss import FP16_LOSS_CEILING, wide
from halfstep.train.scale.scaling import LossScales


@dataclass(frozen=True, eq=False)
class Runtime:
    """Runs the models `roots` under a plan, forward and backward, but makes no step."""

    plan: Plan
    roots: Sequence[nn.Module]
    device: torch.device
    casting: Casting
    scales: LossScales
    full: Callable[[nn.Parameter], Tensor]  # a stored parameter's fp32 value
    fit: Callable[[nn.Parameter], Fit]  # of a parameter in the low format
    summing: Callable[[], bool]  # whether processes decide together on each step

    def is_entered(self) -> bool:
        """Returns whether this thread runs code under the plan: a forward, or a backward pass of the session."""
        switch = self.casting.switch
        return switch is not None and torch.is_autocast_enabled(switch.marker)

    def backward(self, loss: Tensor, scale: float | None) -> float:
        """Runs a loss's backward pass times `scale`, keeping its graph; returns the scale: an fp16 loss limits it."""
        if scale is None:
            with self.casting.backward():
                begin_pass(lambda: loss.backward(retain_graph=True))  # type: ignore[no-untyped-call]
            return 1.0
        low_loss = needs_scale(loss.dtype) or self.scales.ceiling is not None  # one that a forward returned
        if low_loss and self.plan.scale.adapts:
            scale = min(scale, FP16_LOSS_CEILING)
        with self.casting.backward():
            begin_pass(lambda: (wide(loss) * scale).backward(retain_graph=True))  # type: ignore[no-untyped-call]
        return scale

    @contextmanager
    def recording(self, recorder: TorchDispatchMode) -> Iterator[None]:
        """Returns a context in which `recorder` sees each operation that the models call."""
        with self.under(recorder), recorder:
            yield

    def whole_products(self) -> AbstractContextManager[None]:
        """Returns a context in which each emulated product is one operation, forward and backward."""
        return self.casting.over_emulation()

    def under(self, mode: TorchDispatchMode) -> AbstractContextManager[None]:
        """Returns a context in which the dispatch mode `mode` sees operations before emulation changes them."""
        return self.casting.over_emulation(mode)
