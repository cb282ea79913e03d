"""The one sum of a step: what each process tells all others in it, and what is read of it late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

LAG = 8  # steps
LOSSES = 64  # flags for losses in the sum: one for each `loss_id` below this
SCALE_BITS, WEIGHT_BITS = 32, 19  # of what processes are compared by


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
        """Returns one float64 vector: the share of the squared norm, the flags, and a number of each process.

        Whole numbers below 2**53, also once they are summed. Flags count how many processes have them, in as many bits
        as that takes, so that several share a number; only one process adds to what is in its own place.
        """
        flags = torch.cat((self.gradients, self.losses))
        bits, room = _room(len(self.processes))
        rows = pad(flags.double(), (0, -len(flags) % room)).view(-1, room)
        places = torch.arange(0, bits * room, bits, dtype=torch.float64, device=flags.device).exp2()
        scales, weights = _folded(self.same[0], SCALE_BITS), _folded(self.same[1], WEIGHT_BITS)
        own = self.processes + 2 * self.stops.long() + 4 * weights + (4 << WEIGHT_BITS) * scales
        return torch.cat((self.square.double().view(1), (rows * places).sum(1), own.double()))

    def unpacked(self, total: Tensor) -> Findings:
        """Returns what a sum of `packed` vectors says."""
        size = len(self.processes)
        bits, room = _room(size)
        square, rows, own = torch.split(total, [1, len(total) - 1 - size, size])
        places = torch.arange(0, bits * room, bits, device=total.device)
        counts = (rows.long().view(-1, 1) >> places) & ((1 << bits) - 1)
        flags = (counts > 0).flatten()
        gradients, losses = flags[: len(self.gradients)], flags[len(self.gradients) :][: len(self.losses)]
        number = own.long()
        same = torch.stack((number >> (2 + WEIGHT_BITS), (number >> 2) & ((1 << WEIGHT_BITS) - 1)))
        return Findings(square.view(()), gradients, losses, (number & 1) > 0, (number & 2) > 0, same != same[:, :1])

    @property
    def norm(self) -> Tensor:
        """The root of `square` (0-dim fp32).

        Of n shares of one fp32 number it is that number: its square is exact in float64, and n shares and their sum are
        off by less than n units in 2**53.
        """
        return self.square.sqrt().float()


def _room(size: int) -> tuple[int, int]:
    """Returns how many bits count a flag of so many processes, and how many such counts share a float64 number."""
    bits = size.bit_length()
    return bits, 53 // bits


def _folded(t: Tensor, bits: int) -> Tensor:
    """Returns so many bits (int64) for float64 numbers: 0 for 0, others for other powers of two, and as good as random.

    The highest ones of a product with an odd number, that of the golden ratio (Knuth, TAOCP 3, 6.4).
    """
    return (t.view(torch.int64) * -0x61C8864680B583EB >> 64 - bits) & ((1 << bits) - 1)


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
            host = flags.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
