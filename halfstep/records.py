"""Frozen results: what a step, a session and a benchmark report; reports read these and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        scales = ", ".join(
            f"{value:g}" if len(self.scales) == 1 else f"loss {k}: {value:g}" for k, value in self.scales.items()
        )
        bad = ", ".join(self.nonfinite_parameters) or "none"
        memory = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in self.memory.items())
        return (
            f"{self.level} in {self.low}: {self.steps} steps, {self.skipped} skipped, scale {scales or 'unused'}\n"
            f"non-finite parameters: {bad}\nmemory: {memory}"
        )


@dataclass(frozen=True)
class Machine:
    """Where and with what a measurement was made.

    `fast` names the formats that the device has units for; `commit` is the commit of halfstep's source, with "-dirty"
    after it where files differ from it, and None where the source is not under git.
    """

    device: str
    processor: str
    cores: int
    threads: int
    fast: tuple[str, ...]
    system: str
    python: str
    torch: str
    halfstep: str
    commit: str | None


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of `count` measurements."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class BenchRun:
    """One workload under one plan, or under torch.amp (`peer`), over all seeds of a benchmark.

    `step_ms` is the spread of `times_ms`, the milliseconds of each step after the warm-up, seed after seed. `vs_o0` and
    `vs_amp` are speed-ups: the median over steps of the time of O0, or of torch.amp in the same format, over this run's
    time of the same step. `peak_bytes` is the most memory that one training step holds, weights included.
    `bytes_per_parameter` is what stays between two steps: weights, masters, gradients, optimizer. `train_loss` (the
    mean of the last tenth of the steps), `validation` (by figure: loss, accuracy), `skipped` and `scale` have an entry
    a seed. `error` says why the run does not exist, or what ended it; the figures are then those from before. None: not
    measured.
    """

    name: str
    level: str
    low: str
    peer: bool
    emulated: bool
    times_ms: tuple[float, ...] = ()
    step_ms: Spread | None = None
    vs_o0: float | None = None
    vs_amp: float | None = None
    peak_bytes: int | None = None
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)
    train_loss: tuple[float, ...] = ()
    validation: dict[str, tuple[float, ...]] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class BenchResult:
    """The same work under several plans, side by side: what was asked, where it ran, and what each run did.

    `complete` is false where it was interrupted; `peak_method` says how peak memory was counted; `notes` has what a
    reader of the figures should know.
    """

    workload: str
    settings: dict[str, str]
    parameters: int
    steps: int
    warmup: int
    seeds: tuple[int, ...]
    runs: tuple[BenchRun, ...]
    peak_method: str
    notes: tuple[str, ...]
    complete: bool
    machine: Machine
    command: str
    date: str
