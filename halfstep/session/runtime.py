"""What the models of a session run with, for those who look at them from above: blame, the guardian, the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.cast.casting import Casting
from halfstep.observe.recorder import OpRecorder, Recorded
from halfstep.plan.plan import Plan
from halfstep.scale.loss import FP16_LOSS_CEILING, wide
from halfstep.scale.scales import LossScales
from halfstep.stack import begin_pass
from halfstep.torch_internals import TorchDispatchMode


@dataclass(frozen=True, eq=False)
class Runtime:
    """The models `roots` under a plan, with no step.

    `full` gives the fp32 value of a stored parameter, `summing` tells whether processes decide on each step together.
    """

    plan: Plan
    roots: Sequence[nn.Module]
    device: torch.device
    casting: Casting
    scales: LossScales
    full: Callable[[nn.Parameter], Tensor]
    summing: Callable[[], bool]

    def backward(self, loss: Tensor, scale: float | None) -> None:
        """Runs the backward pass of a loss times a scale (None: none), as training would, and keeps its graph."""
        if scale is None:
            with self.casting.backward():
                begin_pass(lambda: loss.backward(retain_graph=True))  # type: ignore[no-untyped-call]
            return
        low_loss = loss.dtype is torch.float16 or self.scales.ceiling is not None  # one that a forward returned
        if low_loss and self.plan.scale.adapts:
            scale = min(scale, FP16_LOSS_CEILING)
        with self.casting.backward():
            begin_pass(lambda: (wide(loss) * scale).backward(retain_graph=True))  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self, recorder: OpRecorder) -> Iterator[None]:
        """Has a recorder see the operations inside, as the models call them."""
        with self.under(recorder), recorder:
            yield

    def under(self, mode: TorchDispatchMode) -> AbstractContextManager[None]:
        """Puts a mode over emulation, which changes operations; it may be entered again inside itself."""
        return self.casting.over_emulation(lambda emulation: Recorded(emulation, mode))
