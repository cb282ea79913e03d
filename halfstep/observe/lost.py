"""Updates against the distance of neighbouring values in the format that a weight is stored in."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.records import UPDATE, Observation, TensorStats

_FRACTION, _BIAS, _EXPONENT = 52, 1023, 0x7FF  # of float64


def in_last_places(update: Tensor, weight: Tensor) -> Tensor:
    """Returns a float64 update in units in the last place of `weight`, in the format of its dtype.

    The unit of a weight w is the distance from |w| to the next larger value: 2^(floor(log2 |w|) - fraction bits), and
    below the smallest normal value, zero included, the smallest subnormal. The division is exact.

    >>> in_last_places(torch.tensor([0.25, 0.25]).double(), torch.tensor([1.0, 2.0]).half())
    tensor([256., 128.], dtype=torch.float64)
    """
    info = torch.finfo(weight.dtype)
    fraction, smallest = -_log2(info.eps), _log2(info.smallest_normal)
    exponent = weight.double().abs().view(torch.int64) >> _FRACTION & _EXPONENT
    unit = (exponent.clamp(min=max(smallest + _BIAS, fraction + 1)) - fraction) << _FRACTION
    return update / unit.view(torch.float64)


def lost_by_module(observations: Iterable[Observation]) -> dict[str, float]:
    """Returns for each module the share of lost updates among those of all its parameters and steps that are given.

    Observations of other kinds are passed over; `Observation.lost_updates` says what is lost.
    """
    merged: dict[str, TensorStats] = {}
    for seen in observations:
        if seen.kind == UPDATE:
            old = merged.get(seen.module)
            merged[seen.module] = seen.stats if old is None else old + seen.stats
    return {module: stats.below(0.5) / stats.nonzero if stats.nonzero else 0.0 for module, stats in merged.items()}


def _log2(power: float) -> int:
    return math.frexp(power)[1] - 1
