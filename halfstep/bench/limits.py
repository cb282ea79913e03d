"""What a process may take of its device, and what it takes of its energy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import WorkloadError


def limit_memory(size: int, device: torch.device) -> None:
    """Lets this process take `size` bytes more than it holds now; beyond that it gets an out-of-memory error.

    On a CPU the limit is on the data segment, private memory that can be written (`RLIMIT_DATA`), which has also what
    libraries take at the first step, some 60 MiB; on CUDA on what the caching allocator reserves.

    Raises:
        WorkloadError: the system has no such limit.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (held + size) / total), device)
        return
    status = Path("/proc/self/status")
    if not status.exists():
        raise WorkloadError(
            "memory can be limited on Linux alone, and on CUDA; choose --device cuda, or another system"
        )
    resource: Any = importlib.import_module("resource")  # not on Windows
    held = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class NoEnergy:
    """Where the device does not report energy."""

    joules: float | None = None

    def __enter__(self) -> NoEnergy:
        return self

    def __exit__(self, *error: object) -> None:
        """Has nothing to read."""


class DeviceEnergy:
    """Reads a GPU's counter of energy (NVML, in millijoules) around what runs inside."""

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)  # raises where the device counts none

    def __enter__(self) -> DeviceEnergy:
        self._start = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self.joules = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._start) / 1e3


def energy_meter(device: torch.device) -> DeviceEnergy | NoEnergy:
    """Returns a context that measures the energy that a device takes inside; one that measures none where it cannot."""
    if device.type != "cuda":
        return NoEnergy()
    try:
        return DeviceEnergy(device)
    except Exception:  # no pynvml, no driver, no counter: NVML's own exceptions have no base that is there without it
        return NoEnergy()
