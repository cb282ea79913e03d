"""Numbers on their way from a device to the host; they are read later, so that no step waits for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from halfstep.records import StepRecord, StepValues

FLAGS = ("skipped", "bad_loss")
# the numbers of a step, which a StepRecord has as tensors or None, and all sinks and the page show
COLUMNS = tuple(each.name for each in fields(StepValues) if each.name not in ("step", "time", *FLAGS))


class Later:
    """Copies of tensors on the host: there at once from a CPU, else once the device has done the work queued so far."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = list(tensors)
        self._done = []
        for device in {t.device for t in tensors if t.device.type != "cpu"}:
            # One copy for each device; formats of more bytes come first, as each must lie at a multiple of its size.
            places = [i for i, t in enumerate(tensors) if t.device == device]
            places.sort(key=lambda i: -tensors[i].itemsize)
            held = [tensors[i].reshape(-1).view(torch.uint8) for i in places]
            packed = (held[0] if len(held) == 1 else torch.cat(held)).to("cpu", non_blocking=True)
            for i, part in zip(places, torch.split(packed, [t.numel() for t in held]), strict=True):
                self._host[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
            self._done.append(torch.accelerator.current_stream(device).record_event())

    def arrived(self) -> bool:
        """Tells whether `read` would return without waiting."""
        return all(event.query() for event in self._done)

    def read(self) -> list[Tensor]:
        """Returns the tensors on the host; waits for the device if they have not arrived."""
        for event in self._done:
            event.synchronize()
        return self._host


def is_capturing() -> bool:
    """Tells whether what runs now is captured into a CUDA graph, whose replays would give a later read their values."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class AsyncReader:
    """Reads StepRecords on the host without waiting for the device; what a CUDA graph captures is left out."""

    def __init__(self) -> None:
        self._coming: deque[tuple[StepRecord, float, Later]] = deque()

    def add(self, record: StepRecord) -> None:
        """Starts copying a step's numbers to the host, without waiting."""
        if not is_capturing():
            given = [getattr(record, name).to(record.scale.device) for name in _given(record)]
            self._coming.append((record, time.time(), Later(given)))

    def ready(self) -> Iterator[StepValues]:
        """Yields the steps whose numbers have arrived on the host since the last call, in order."""
        while self._coming and self._coming[0][-1].arrived():
            yield _values(*self._coming.popleft())

    def rest(self) -> Iterator[StepValues]:
        """Yields all remaining steps, waiting for the device."""
        while self._coming:
            yield _values(*self._coming.popleft())


def _given(record: StepRecord) -> list[str]:
    return [name for name in (*FLAGS, *COLUMNS) if getattr(record, name) is not None]


def _values(record: StepRecord, now: float, numbers: Later) -> StepValues:
    read = torch.stack([each.reshape(()) for each in numbers.read()]).tolist()
    values: dict[str, Any] = dict.fromkeys(COLUMNS) | dict(zip(_given(record), read, strict=True))
    return StepValues(record.step, now, **values | {name: bool(values[name]) for name in FLAGS if name in values})
