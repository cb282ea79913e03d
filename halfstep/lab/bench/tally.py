"""Collects the measurements of a benchmark's rows, counts peak memory, as the allocator does, and makes records."""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from halfstep.errors import HalfstepError, WorkloadError
from halfstep.lab.bench.variants import End, Entry
from halfstep.lab.workloads.workload import Batch, Workload
from halfstep.machine import read_machine
from halfstep.measurements import BenchResult, BenchRun
from halfstep.timing import speedup, spread
from halfstep.torch_internals import begin_allocations, end_allocations

PEAK_METHOD = "the allocator's peak"
_RESTART = "halfstep: the peak begins anew"


class CpuBytes:
    """A context manager that counts the bytes that torch allocates on the CPU in the `with` block.

    On exit, `peak` is set to the most bytes held at one time, since the start of the block or the last `restart`. Each
    storage counts once. Temporary memory of operations counts too: on a CPU without bf16 units, for example, a product
    of bf16 matrices also allocates its result in fp32.

    >>> with CpuBytes() as count:
    ...     kept = torch.zeros(100) + torch.ones(100)
    >>> count.peak
    1200
    """

    def __init__(self) -> None:
        self.peak = 0

    def __enter__(self) -> CpuBytes:
        gc.collect()  # what an earlier count saw made, and is freed within this one, would be taken off
        begin_allocations()
        return self

    def restart(self) -> None:
        """Starts to measure the peak anew; bytes that are still held count towards it."""
        with record_function(_RESTART):
            pass

    def __exit__(self, *error: object) -> None:
        noted = end_allocations()
        held = list(accumulate(size for _, size in noted))
        last = max((at for at, (name, _) in enumerate(noted) if name == _RESTART), default=0)
        self.peak = max(held[last:], default=0)


class CudaBytes:
    """A context manager that counts the bytes that torch allocates on a CUDA device in the `with` block.

    On exit, `peak` is set to the most bytes held at one time, since the start of the block or the last `restart`. Bytes
    that were held before the block do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0

    def __enter__(self) -> CudaBytes:
        torch.cuda.synchronize(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        self.restart()
        return self

    def restart(self) -> None:
        """Starts to measure the peak anew; bytes that are still held count towards it."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *error: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


def counting(device: torch.device) -> CpuBytes | CudaBytes:
    """Returns a context manager that counts the bytes held on a device, except those held before it was entered."""
    return CudaBytes(device) if device.type == "cuda" else CpuBytes()


def limit_memory(size: int, device: torch.device) -> None:
    """Lets this process allocate `size` bytes more than it holds now; beyond that it gets an out-of-memory error."""
    # On a CPU the limit is on private writable memory (the data segment, `RLIMIT_DATA`), which includes about 60 MiB
    # that libraries allocate at the first step; on CUDA it is on what the caching allocator reserves.
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (held + size) / total), device)
        return
    status = Path("/proc/self/status")
    if not status.exists():
        raise WorkloadError(
            "the memory of a CPU process can be limited on Linux only; use Linux, or choose --device cuda"
        )
    resource: Any = importlib.import_module("resource")  # not on Windows
    held = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


# ---- rows
NOTES: tuple[tuple[Callable[[Entry], bool], str], ...] = (
    (
        lambda entry: entry.emulated,
        "emulated: the device has no units for the format; products are computed in fp32 and rounded exactly, so losses"
        " are those of a device that has such units, but times are not",
    ),
    (
        lambda entry: entry.peer,
        "torch.amp: autocast around the model, the same optimizer with fused=True and, in fp16, a GradScaler; it has a"
        " process of its own, as an open session slows torch.autocast beside it",
    ),
)


@dataclass
class Tally:
    """The measurements of one row so far; lists have an entry for each seed."""

    entry: Entry
    times_ms: list[float] = field(default_factory=list)  # of each timed step
    train_loss: list[float] = field(default_factory=list)
    validation: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    peak: int | None = None
    losses: list[float] = field(default_factory=list)  # of each step
    error: str | None = None  # why the row failed
    slow: float | None = None  # how many times O0's step its own takes, if it was timed and not trained
    gradient_error: float | None = None

    @contextmanager
    def failing(self, where: str = "") -> Iterator[None]:
        """Returns a context manager that turns an exception into this row's error, so that the other rows go on."""
        try:
            yield
        except Exception as error:  # whatever a user's workload raises is the row's own
            self.error = ": ".join(filter(None, [where, reason(error)]))

    def add_end(self, end: End) -> None:
        """Adds what the run with one seed has come to; memory counts as that of the first run for which it is known."""
        for name, value in end.validation.items():
            self.validation.setdefault(name, []).append(value)
        self.skipped.append(end.skipped)
        self.scale.append(end.scale)
        self.memory = self.memory or end.memory
        self.peak = end.peak if self.peak is None else self.peak

    def record(self, parameters: int) -> BenchRun:
        return BenchRun(
            name=self.entry.name,
            level=self.entry.level,
            low=self.entry.low.name,
            peer=self.entry.peer,
            emulated=self.entry.emulated,
            times_ms=tuple(round(each, 3) for each in self.times_ms),  # no clock here is better than a microsecond
            step_ms=spread(self.times_ms),
            peak_bytes=self.peak,
            bytes_per_parameter={key: size / parameters for key, size in self.memory.items()},
            train_loss=tuple(self.train_loss),
            validation={key: tuple(values) for key, values in self.validation.items()},
            skipped=tuple(self.skipped),
            scale=tuple(self.scale),
            error=self.error,
            compiled=self.entry.compiled,
            losses=tuple(self.losses),
            slow=self.slow,
            gradient_error=self.gradient_error,
        )


def settings_of(workload: Workload) -> dict[str, str]:
    """Returns the settings of a workload by name, in the form in which a result stores them."""
    return {each.name: str(getattr(workload, each.name)) for each in fields(workload) if each.name != "data"}


def mean_of_last(values: Sequence[float]) -> float:
    """Returns the mean of the last tenth of the values, of at least one.

    >>> mean_of_last([9.0] * 18 + [1.0, 3.0])
    2.0
    """
    count = max(1, len(values) // 10)
    return sum(values[-count:]) / count


def reason(error: Exception) -> str:
    """Returns an exception's message; for one that is not halfstep's own, also its type and location.

    >>> reason(HalfstepError("does not fit"))
    'does not fit'
    """
    if isinstance(error, HalfstepError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@contextmanager
def foreseen(what: str) -> Iterator[None]:
    """Within the context, exceptions of a user's workload (not halfstep's own) become WorkloadErrors about `what`."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as error:
        raise WorkloadError(f"{what} failed: {reason(error)}") from error


def first_batch(workload: Workload, seed: int) -> Batch:
    """Returns the first batch of a workload with the given seed."""
    # Benchmarks call this before they measure anything, so that a workload without data fails at once.
    with foreseen(f"{workload.name}: the first batch"):
        return next_batch(workload.batches(seed))


def next_batch(batches: Iterator[Batch]) -> Batch:
    """Returns the next batch."""
    for batch in batches:
        return batch
    raise WorkloadError("the workload's batches() ended; it must yield batches without end")


def result_of(
    workload: Workload, tallies: Sequence[Tally], *, parameters: int, device: torch.device, **rest: Any
) -> BenchResult:
    """Returns what a benchmark came to; `rest` are fields of BenchResult that only the benchmark knows."""
    runs = [tally.record(parameters) for tally in tallies]
    baseline = next((run.times_ms for run in runs if run.level == "O0"), ())
    peers = {run.low: run.times_ms for run in runs if run.peer and not run.compiled}
    return BenchResult(
        workload=workload.name,
        settings=settings_of(workload),
        parameters=parameters,
        runs=tuple(
            replace(run, vs_o0=speedup(baseline, run.times_ms), vs_amp=speedup(peers.get(run.low, ()), run.times_ms))
            for run in runs
        ),
        peak_method=PEAK_METHOD,
        notes=tuple(text for applies, text in NOTES if any(applies(tally.entry) for tally in tallies)),
        machine=read_machine(device),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **rest,
    )
