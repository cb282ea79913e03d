"""Limits the memory that a process may take from its device, and measures the device's energy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import WorkloadError


def limit_memory(size: int, device: torch.device) -> None:
    """Lets this process allocate `size` bytes more than it holds now; beyond that it gets an out-of-memory error.

    On a CPU the limit is on private writable memory (the data segment, `RLIMIT_DATA`), which includes about 60 MiB that
    libraries allocate at the first step; on CUDA it is on what the caching allocator reserves.

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
            "the memory of a CPU process can be limited on Linux only; use Linux, or choose --device cuda"
        )
    resource: Any = importlib.import_module("resource")  # not on Windows
    held = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class NoEnergy:
    """Measures nothing: for a device that does not report its energy."""

    joules: float | None = None

    def __enter__(self) -> NoEnergy:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing, as there is no counter to read."""


class DeviceEnergy:
    """A context manager that measures the energy that a GPU uses in the `with` block.

    On exit, `joules` is set to this energy, read from NVML's counter. The constructor raises an exception if NVML or
    the counter is not available.
    """

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
    """Returns a context manager that measures a device's energy.

    After the `with` block, the context manager's `joules` is the energy that the device used in the block, or None if
    the device does not report its energy.
    """
    if device.type != "cuda":
        return NoEnergy()
    try:
        return DeviceEnergy(device)
    except Exception:  # no pynvml, no driver, no counter: NVML's own exceptions have no base that is there without it
        return NoEnergy()
