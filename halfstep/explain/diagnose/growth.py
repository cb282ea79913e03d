"""How a result of the backward pass grows with the loss scale, and how far weights have grown in this session."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.explain.tape.recorder import Note, reached_from
from halfstep.train.processes.shards import local

_BILINEAR = (
    "mul", "mm", "bmm", "mv", "dot", "vdot", "outer", "ger",
    "addmm", "baddbmm", "addbmm", "addmv", "addr",  # these add a product to their first argument
)  # fmt: skip
_CONSTANT = (
    "sign", "sgn", "heaviside", "signbit", "angle", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "argsort",
    "isfinite", "isnan", "isinf", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "fill",
    "zero", "rand_like", "randn_like",
)  # fmt: skip
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_FACTOR = 30.0  # larger than training makes the weights of a layer
_LARGE = 1.0  # weights that begin near 0 may grow by any factor up to here


def degree(note: Note) -> float:
    """Returns k such that a result is proportional to loss_scale**k."""
    known: dict[int, float] = {}
    for each in reached_from([note], "sources"):
        known[each.index] = _degree(each, [0.0 if s is None else known.get(s.index, 0.0) for s in each.sources])
    return known[note.index]


def _degree(note: Note, of: Sequence[float]) -> float:
    if note.root or note.phase != "backward":
        return 1.0 if note.root else 0.0
    name = note.aten if note.aten.startswith("__") else note.aten.rstrip("_")
    first = of[0] if of else 0.0
    if name in _CONSTANT or not of:
        return 0.0
    if name == "square":
        return 2 * first
    if name in _BILINEAR:
        return max(first, sum(of[1:])) if name.startswith(("add", "badd")) else sum(of)
    if name in ("div", "true_divide"):
        return first - sum(of[1:])
    if name in ("pow", "float_power"):
        return first * (note.scalars[0] if note.scalars else 2.0)
    return first * _POWERS[name] if name in _POWERS else max(of)


@dataclass(frozen=True)
class Growth:
    """A parameter whose values have grown, and their root mean square at the start of the session and now."""

    name: str
    first: float
    now: float  # infinite if the sum of the squares exceeds fp32's range


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
