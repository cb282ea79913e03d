"""Numbers on their way from a device to the host; they are read later, so that no step waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Later:
    """Copies of tensors on the host: there at once from a CPU, else once the device has done the work queued so far."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = [t.to("cpu", non_blocking=True) for t in tensors]
        self._done = [_behind_all(device) for device in {t.device for t in tensors} if device.type != "cpu"]

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


def _behind_all(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
