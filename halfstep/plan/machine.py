"""Facts of the machine and of the software that a measurement was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from halfstep.formats import BF16, FP16, FP32
from halfstep.plan.hardware import computes_fast
from halfstep.records import Machine
from halfstep.version import __version__


def read_machine(device: torch.device) -> Machine:
    """Returns the facts of this machine and of `device` on it."""
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        fast=tuple(fmt.name for fmt in (FP32, BF16, FP16) if computes_fast(fmt, device)),
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),  # TorchVersion is a kind of str that no JSON writer knows
        halfstep=__version__,
        commit=source_commit(Path(__file__).resolve().parent),
    )


def source_commit(folder: Path) -> str | None:
    """Returns the commit that the files of a folder are at, "-dirty" after it where they differ; None without git."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    if names.is_file():
        for line in names.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
