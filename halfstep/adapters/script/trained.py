"""What a session has trained, to be told at the end of a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from halfstep.session.session import Session


@dataclass(frozen=True)
class Trained:
    """What was trained under a plan: counts of steps, bytes by kind, and the peak of a GPU's memory (None: a CPU)."""

    level: str
    low: str
    steps: int
    skipped: int
    memory: Mapping[str, int]
    peak: int | None


def trained_in(session: Session) -> Trained:
    """Returns what a session has trained so far; this waits for the device."""
    status = session.status()
    on_gpu = session.runtime.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(session.runtime.device) if on_gpu else None
    return Trained(status.level, status.low, status.steps, status.skipped, status.memory, peak)
