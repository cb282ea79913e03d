"""Frozen results: what a step, a session and a benchmark report; reports read these and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """What one `session.step()` did, as tensors on the device; reading one on the host is the only sync.

    `step` counts calls of `step()` from 1; `skipped` is a 0-dim bool tensor, true where a non-finite gradient or loss
    kept the update from happening; `scale` is the loss scale that the gradients of this step carried (fp32, 1.0 where
    scaling is off); `grad_norm` is the global L2 norm of the unscaled gradients before clipping (fp32), and None at O0
    without `max_norm`, where halfstep reads no gradient; `synced` says that the optimizer could not be predicated, so
    that this step waited for the device once.
    """

    step: int
    skipped: Tensor
    scale: Tensor
    grad_norm: Tensor | None
    synced: bool = False
