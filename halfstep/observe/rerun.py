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
    wherever it is, whatever small was added to it. `value` is that constant. `by_zero` says that an integer 0 is among
    the arguments.
    """

    largest: float
    finite: bool
    constant: bool = False
    value: float = 0.0
    by_zero: bool = False


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
    if constant is not None and not _is_written(constant, given, tensors, out[0]):
        constant = None
    return Exact(largest, whole, constant is not None, constant or 0.0, _has_zero(func, given))


def _has_zero(func: Any, given: tuple[Sequence[Any], dict[str, Any]]) -> bool:
    """Tells whether an integer 0 stands where a tensor or any number may (no dimension does)."""
    args, kwargs = given
    named = [*zip((each for each in func._schema.arguments if not each.kwarg_only), args, strict=False)]
    named += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
    return any(
        isinstance(value, int) and value == 0 and str(each.type) in ("Tensor", "number") for each, value in named
    )


def _is_written(value: float, given: tuple[Sequence[Any], dict[str, Any]], tensors: list[Tensor], out: Tensor) -> bool:
    """Tells whether a constant was written in the forward pass, not computed from what is learned.

    Then a number gave it, or a tensor that needs no gradient, or one that holds it in some places only, as a choice.
    """
    if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():  # a gradient, no checkpoint's forward
        return False
    if any(isinstance(leaf, (int, float)) and _is_near(leaf, value) for leaf in tree_leaves(given)):
        return True
    if not any(t.requires_grad for t in tensors):
        return True
    lost = ~torch.isfinite(out)
    chosen = not bool(lost.all())
    return any(_holds(t, value, lost) for t in tensors if not t.requires_grad or (chosen and t.grad_fn is not None))


def _is_near(given: float, value: float) -> bool:
    return abs(given - value) <= _SPREAD * -value


def _holds(tensor: Tensor, value: float, lost: Tensor) -> bool:
    """Tells whether a tensor holds a value wherever the result of what it went into was lost."""
    try:
        held = tensor.detach().broadcast_to(lost.shape)[lost]
    except RuntimeError:
        return False
    return bool(((held.double() - value).abs() <= _SPREAD * -value).all())


def _constant(exact: Tensor, out: Tensor) -> float | None:
    """Returns the value that became infinite in `out`, None where it was not one value."""
    if exact.shape != out.shape:
        return None
    lost = exact[~torch.isfinite(out)]
    low, high = float(lost.min()), float(lost.max())
    same = high < -_MASK and (high - low) <= _SPREAD * -low
    return low if same and _is_choice(lost.numel(), exact.numel(), low) else None


def _is_choice(lost: int, of: int, value: float) -> bool:
    """Tells whether so many equal values look written, not computed: several, or a round number."""
    return lost > 1 or of == 1 or value == float(f"{value:.1g}")
