"""Copies the numbers of each step from the device to the host asynchronously, so that no step waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from halfstep.later import Later, is_capturing
from halfstep.records import StepRecord, StepValues

FLAGS = ("skipped", "bad_loss")
# the numbers of a step, which a StepRecord has as tensors or None, and all sinks and the page show
COLUMNS = tuple(each.name for each in fields(StepValues) if each.name not in ("step", "time", *FLAGS))


class AsyncReader:
    """Reads StepRecords on the host without waiting for the device; what a CUDA graph captures is left out."""

    def __init__(self) -> None:
        self._coming: deque[tuple[StepRecord, float, Later]] = deque()

    def add(self, record: StepRecord) -> None:
        """Starts copying a step's numbers to the host, without waiting."""
        place = record.scale.device
        if not is_capturing():
            given = [getattr(record, name) for name in (*FLAGS, *COLUMNS)]
            row = torch.stack([v.reshape(()).to(place) for v in given if v is not None])
            self._coming.append((record, time.time(), Later([row])))

    def ready(self) -> Iterator[StepValues]:
        """Yields the steps whose numbers have arrived on the host since the last call, in order."""
        while self._coming and self._coming[0][-1].arrived():
            yield _values(*self._coming.popleft())

    def rest(self) -> Iterator[StepValues]:
        """Yields all remaining steps, waiting for the device."""
        while self._coming:
            yield _values(*self._coming.popleft())


def _values(record: StepRecord, now: float, numbers: Later) -> StepValues:
    found = iter(numbers.read()[0].tolist())
    given = [name for name in (*FLAGS, *COLUMNS) if getattr(record, name) is not None]
    values: dict[str, Any] = dict.fromkeys(COLUMNS) | dict(zip(given, found, strict=True))
    flags = {name: bool(values[name]) for name in FLAGS if name in values}
    return StepValues(record.step, now, **values | flags)
