"""The peak memory of a training step, as the allocator counts it, and a limit on it, on CUDA and on a CPU."""

from __future__ import annotations

import gc
import importlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from halfstep.errors import WorkloadError
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
