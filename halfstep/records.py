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


@dataclass(frozen=True)
class Status:
    """What a session is doing, read on the host: plan, scale, skips, non-finite parameters by name, bytes of memory.

    `scales` maps each loss id that was used to its loss scale. `memory` has the bytes of weights, masters (copies or
    remainders), gradients and optimizer state.
    """

    level: str
    low: str
    steps: int
    skipped: int
    scales: dict[int, float]
    nonfinite_parameters: tuple[str, ...]
    memory: dict[str, int]

    def __str__(self) -> str:
        scales = ", ".join(f"{value:g}" if len(self.scales) == 1 else f"loss {k}: {value:g}" for k, value in self.scales.items())
        bad = ", ".join(self.nonfinite_parameters) or "none"
        memory = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in self.memory.items())
        return (
            f"{self.level} in {self.low}: {self.steps} steps, {self.skipped} skipped, scale {scales or 'unused'}\n"
            f"non-finite parameters: {bad}\nmemory: {memory}"
        )
