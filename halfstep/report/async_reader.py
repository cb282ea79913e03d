"""Copies the numbers of each step from the device to the host asynchronously, so that no step waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.records import StepRecord, StepValues


@dataclass(frozen=True)
class _Copy:
    """The copy of a step's numbers on the host, complete once the event `done` fires, or at once if `done` is None.

    `host` has the numbers in one tensor: skipped and scale, then the gradient norm if `has_norm`, and the loss if
    `has_loss`.
    """

    step: int
    time: float
    host: Tensor
    done: torch.Event | None
    has_norm: bool
    has_loss: bool

    def values(self) -> StepValues:
        skipped, scale, *others = self.host.tolist()
        norm = others.pop(0) if self.has_norm else None
        loss = others.pop(0) if self.has_loss else None
        return StepValues(self.step, self.time, bool(skipped), scale, norm, loss)


class AsyncReader:
    """Reads the tensors of StepRecords on the host, as StepValues; no step waits for the device.

    A step on a CPU is available at once, a step on a GPU as soon as the GPU has finished it. Steps that are captured
    into a CUDA graph are left out, since replays of the graph make no records.
    """

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque()

    def add(self, record: StepRecord) -> None:
        """Starts copying a step's numbers to the host, without waiting."""
        given = (record.skipped, record.scale, record.grad_norm, record.loss)
        place = record.scale.device
        if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        row = torch.stack([v.reshape(()).to(place) for v in given if v is not None])
        host = row.to("cpu", non_blocking=True)
        done = None if place.type == "cpu" else _behind_all(place)
        has_norm, has_loss = record.grad_norm is not None, record.loss is not None
        self._copies.append(_Copy(record.step, time.time(), host, done, has_norm, has_loss))

    def ready(self) -> Iterator[StepValues]:
        """Yields the steps whose numbers have arrived on the host since the last call, in order."""
        while self._copies and (self._copies[0].done is None or self._copies[0].done.query()):
            yield self._copies.popleft().values()

    def rest(self) -> Iterator[StepValues]:
        """Yields all remaining steps, waiting for the device."""
        while self._copies:
            copy = self._copies.popleft()
            if copy.done is not None:
                copy.done.synchronize()
            yield copy.values()


def _behind_all(place: torch.device) -> torch.Event:
    """Returns an event that fires when a device has finished all work queued so far."""
    event = torch.Event(place)
    event.record(torch.accelerator.current_stream(place))
    return event
