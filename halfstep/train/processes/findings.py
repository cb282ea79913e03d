"""What processes tell each other in the all-reduce of a step, as one vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

LOSSES = 64  # flags for losses in the sum: one for each `loss_id` below 63, and the last
NOT_FINITE = -1  # the place of the last: whether a loss was not finite itself, whichever it was
SCALE_BITS, WEIGHT_BITS = 32, 19  # of what processes are compared by


@dataclass(frozen=True)
class Findings:
    """What one process found in a step's gradients and losses, or, once summed, what all processes found together."""

    square: Tensor  # its share of the squared norm of the unscaled gradients (0-dim float64)
    gradients: Tensor  # (bool) of each parameter: is its gradient not finite
    losses: Tensor  # (bool, `LOSSES`) of each: did its gradients overflow; at `NOT_FINITE`: was any loss not finite
    processes: Tensor  # (bool) of each process: did one of its losses set a flag
    stops: Tensor  # (bool) of each process: does it ask all to stop
    # (2, processes): of the scales that gradients carry, and of the weights, a number of each process (float64); once
    # summed, whether it differs from that of process 0 (bool)
    same: Tensor

    def packed(self) -> Tensor:
        """Returns one float64 vector to sum over the processes: the share of the squared norm, the flags, `same`."""
        # All entries but the first are whole numbers below 2**53, also after the sum, so they stay exact. A flag of
        # `gradients` or `losses` becomes a count of processes, of which several share an entry; each process sets one
        # entry at the end.
        flags = torch.cat((self.gradients, self.losses))
        bits, room = _room(len(self.processes))
        rows = pad(flags.double(), (0, -len(flags) % room)).view(-1, room)
        places = torch.arange(0, bits * room, bits, dtype=torch.float64, device=flags.device).exp2()
        scales, weights = _folded(self.same[0], SCALE_BITS), _folded(self.same[1], WEIGHT_BITS)
        own = self.processes + 2 * self.stops.long() + 4 * weights + (4 << WEIGHT_BITS) * scales
        return torch.cat((self.square.double().view(1), (rows * places).sum(1), own.double()))

    def unpacked(self, total: Tensor) -> Findings:
        """Returns the findings of all processes from the sum of their `packed` vectors."""
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
        """The L2 norm of the gradients (0-dim fp32), which is the square root of `square`."""
        return self.square.sqrt().float()


def _room(size: int) -> tuple[int, int]:
    """Returns how many bits a count of up to `size` processes takes, and how many such counts fit into a float64."""
    bits = size.bit_length()
    return bits, 53 // bits


def _folded(t: Tensor, bits: int) -> Tensor:
    """Returns a hash of `bits` bits (int64) of float64 numbers: 0 for 0, and different for different powers of two."""
    return (t.view(torch.int64) * -0x61C8864680B583EB >> 64 - bits) & ((1 << bits) - 1)
