"""The one sum of a step: what each process tells all others in it, and what is read of it late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

LAG = 8  # steps
LOSSES = 64  # flags for losses in the sum: one for each `loss_id` below this


@dataclass(frozen=True)
class Findings:
    """What one process knows of a step's gradients and losses, or, once it is summed, all of them together.

    `square` is this process's share of the squared L2 norm of the true gradients (0-dim float64): the shares of all add
    up to it. The others are bool: `gradients` has a flag for each
    parameter of the step whose gradient is not finite, `losses` (`LOSSES` long) one for each loss that overflowed,
    `processes` one for each process in which a loss did, and `stops` one for each process that wants all to stop.
    `same` (2 x processes) has in the place of each process what all must have alike: a number of the loss scales that
    its gradients carry, and one of its weights (float64, 0 in the place of others); once summed, whether the process
    has another one than the first (bool).
    """

    square: Tensor
    gradients: Tensor
    losses: Tensor
    processes: Tensor
    stops: Tensor
    same: Tensor

    def packed(self) -> Tensor:
        """Returns one float64 vector: the share of the squared norm, the flags, then `same`."""
        square = self.square.double().view(1)
        return torch.cat((square, self.gradients, self.losses, self.processes, self.stops, self.same.flatten()))

    def unpacked(self, total: Tensor) -> Findings:
        """Returns what a sum of `packed` vectors says."""
        flags = (self.gradients, self.losses, self.processes, self.stops)
        square, *sums, same = torch.split(total, [1, *map(len, flags), self.same.numel()])
        same = same.view_as(self.same)
        gradients, losses, processes, stops = (each > 0 for each in sums)
        return Findings(square.view(()), gradients, losses, processes, stops, same != same[:, :1])

    @property
    def norm(self) -> Tensor:
        """The root of `square` (0-dim fp32).

        Of n shares of one fp32 number it is that number: its square is exact in float64, and n shares and their sum are
        off by less than n units in 2**53.
        """
        return self.square.sqrt().float()


class LateNumbers:
    """Which flags are set, read on the host in the same step in every process, and without waiting for that step.

    On a CPU that is at once; elsewhere `LAG` steps later, which is further than a host runs ahead of its device.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read(self, flags: Tensor) -> list[int]:
        """Takes the flags of a step and returns the numbers of those set in the step that has come."""
        if flags.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return []
            host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            host.copy_(flags, non_blocking=True)
            event.record()
            self._coming.append((host, event))
            if len(self._coming) <= LAG:
                return []
            flags, event = self._coming.popleft()
            event.synchronize()
        found = [number for number, flag in enumerate(flags.tolist()) if flag]
        if found:
            self._coming.clear()  # who wanted it has been heard
        return found
