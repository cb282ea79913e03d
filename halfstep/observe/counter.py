"""How many of an optimizer's last steps were skipped, and the loss scale, read late so that nothing waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 8  # steps, a power of two: as many skips in a row divide a dynamic scale by 256
_LONGEST_PAUSE = 64  # windows


class Counter:
    """Counts the skips in each eight steps of the same optimizers on one loss, without waiting for the device.

    It reads them and the scale after the eighth, and gives them at the step after it, or when they have come. `wait`
    is how many times it is then not asked, `pause` how many that is after a look that found nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        self._skipped: list[Tensor] = []
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._values: tuple[float, float] | None = None
        self._wait, self._pause = 0, 1

    def count(self, skipped: Tensor, scale: Tensor) -> tuple[int, float] | None:
        """Takes a step, whether it was skipped and its scale, 0-dim tensors; returns what of the last eight has come.

        That is how many were skipped, and the scale at the last of them. A step that a CUDA graph captures does
        not count: what would be read are the numbers of its replays.
        """
        if not self._on_host and torch.cuda.is_current_stream_capturing():
            self._skipped, self._pending = [], None
            return None
        found = self._read()
        self._skipped.append(skipped)
        if len(self._skipped) == WINDOW:
            self._begin_to_read(scale)
            self._skipped = []
        return found

    def rest(self) -> None:
        """Has the next looks left out, twice as many each time."""
        self._wait, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)

    def is_resting(self) -> bool:
        """Tells whether the look that is due now is to be left out."""
        self._wait -= 1
        return self._wait >= 0

    def _begin_to_read(self, scale: Tensor) -> None:
        if self._on_host:
            skipped = sum(float(each.cpu().numpy()) for each in self._skipped)
            self._values = skipped, float(scale.cpu().numpy())
            return
        both = torch.stack((torch.stack(self._skipped).sum().to(torch.float32), scale.to(torch.float32)))
        host = torch.empty(2, dtype=torch.float32, device="cpu", pin_memory=True).copy_(both, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending = (host, event)

    def _read(self) -> tuple[int, float] | None:
        if self._pending is not None:
            host, event = self._pending
            if not event.query():  # type: ignore[no-untyped-call]
                return None
            self._values, self._pending = (float(host[0]), float(host[1])), None
        values, self._values = self._values, None
        return None if values is None else (int(values[0]), values[1])
