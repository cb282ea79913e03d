"""How far weights have grown since the session began, as a learning rate that is too high makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.processes.shards import local

_FACTOR = 30.0  # larger than training makes the weights of a layer
_LARGE = 1.0  # weights that begin near 0 may grow by any factor up to here


@dataclass(frozen=True)
class Growth:
    """A parameter whose values have grown, and their root mean square at the start of the session and now.

    `now` is infinite if the sum of the squares exceeds fp32's range.
    """

    name: str
    first: float
    now: float


def sizes_of(roots: Sequence[nn.Module], full: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Returns the root mean square of each trainable matrix of weights, on its device, keyed by name."""
    sizes: dict[str, Tensor] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            value = local(full(parameter)).detach()
            if (
                parameter.requires_grad
                and value.dim() > 1
                and value.is_floating_point()
                and value.numel()
                and not value.is_meta
            ):
                norm = torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))
                sizes.setdefault(name, norm / value.numel() ** 0.5)
    return sizes


def outgrown(first: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Growth | None:
    """Returns the parameter that has grown by the largest factor, or is NaN; None if training makes all these sizes."""
    both = [Growth(name, float(first[name]), float(size)) for name, size in now.items() if name in first]
    sound = [each for each in both if math.isfinite(each.first)]
    grown = [each for each in sound if not each.now <= max(_FACTOR * each.first, _LARGE)]
    return max(grown, key=lambda each: (math.isnan(each.now), each.now / max(each.first, 1e-9)), default=None)
