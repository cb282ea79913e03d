"""Limits the memory that a process may take from its device."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import WorkloadError


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
