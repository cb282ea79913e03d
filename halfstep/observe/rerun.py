"""One operation computed a second time in fp32, from the values that it read: what its result would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.observe.badness import badness

_LOW = (torch.float16, torch.bfloat16)
_MASK = 1e4  # a constant of this size or more in a sum, a choice or a product says "never"
_SPREAD = 0.01


@dataclass(frozen=True)
class Exact:
    """What an operation gives in fp32: the largest magnitude, and whether all of it is finite there.

    `constant` says that what does not fit the low format is a mask's constant, such as -1e9: below zero and the same
    wherever it is, whatever small was added to it. `value` is that constant.
    """

    largest: float
    finite: bool
    constant: bool = False
    value: float = 0.0


def recompute(
    func: Any, given: tuple[Sequence[Any], dict[str, Any]], tensors: list[Tensor], read: list[Tensor], out: list[Tensor]
) -> Exact | None:
    """Computes the operation again from what it `read`, widened to fp32; None where that cannot be done.

    `given` are its arguments, `tensors` the tensors among them, `out` its results as they came. Operations that draw
    random numbers are left alone.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    values = {id(tensor): before for tensor, before in zip(tensors, read, strict=True)}

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            before = values.get(id(value), value)
            wide = before.float() if before.dtype in _LOW else before
            return wide.clone() if wide is value and func._schema.is_mutable else wide
        return torch.float32 if value in _LOW else value

    args, kwargs = tree_map(widen, given)
    try:
        found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    found = [t.detach() for t in found]
    floats = [t for t in found if t.is_floating_point() and t.numel()]
    if len(found) != len(out) or not floats:
        return None
    finite = [t[torch.isfinite(t)] for t in floats]
    largest = max((float(t.abs().max()) for t in finite if t.numel()), default=0.0)
    whole = all(badness(t) is None for t in floats)
    constant = _constant(found[0], out[0]) if whole and len(floats) == 1 else None
    return Exact(largest, whole, constant is not None, constant or 0.0)


def _constant(exact: Tensor, out: Tensor) -> float | None:
    """Returns the constant that became infinite in `out`, None where it was no constant."""
    if exact.shape != out.shape:
        return None
    lost = exact[~torch.isfinite(out)]
    low, high = float(lost.min()), float(lost.max())
    same = high < -_MASK and (high - low) <= _SPREAD * -low
    return low if same and _is_choice(lost.numel(), exact.numel(), low) else None


def _is_choice(lost: int, of: int, value: float) -> bool:
    """Tells whether so many equal values look written, not computed: several, or a round number."""
    return lost > 1 or of == 1 or value == float(f"{value:.1g}")
