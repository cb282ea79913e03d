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

# the numbers of a step, which a StepRecord has as tensors or None, and all sinks and the page show
COLUMNS = tuple(each.name for each in fields(StepValues) if each.name not in ("step", "time", "skipped"))


class AsyncReader:
    """Reads the tensors of StepRecords on the host, as StepValues; no step waits for the device.

    Steps that are captured into a CUDA graph are left out, since replays of the graph make no records.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[StepRecord, float, Later]] = deque()

    def add(self, record: StepRecord) -> None:
        """Starts copying a step's numbers to the host, without waiting."""
        place = record.scale.device
        if not is_capturing():
            given = (record.skipped, *(getattr(record, name) for name in COLUMNS))
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
    skipped, *found = numbers.read()[0].tolist()
    columns: dict[str, Any] = {name: None if getattr(record, name) is None else found.pop(0) for name in COLUMNS}
    return StepValues(record.step, now, bool(skipped), **columns)
