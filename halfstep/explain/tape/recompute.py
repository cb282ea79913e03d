"""Computes one operation again in fp32 and fp64, from the values that it read when it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.explain.tape.nonfinite import nonfinite, unwrapped
from halfstep.explain.tape.schemas import tensors_of
from halfstep.formats import CASTABLE
from halfstep.torch_internals import NO_BACKWARD, backward_task, schema_of, tree_leaves, tree_map

_NARROWER: Mapping[torch.dtype | None, tuple[torch.dtype, ...]] = {
    None: (),
    torch.float32: CASTABLE[1:],
    torch.float64: CASTABLE,
}
_WIDER = {torch.complex64: torch.complex128, torch.complex32: torch.complex64}
_GROWING = (  # the result may exceed fp64 too
    *("exp", "exp2", "expm1", "special_expm1", "sinh", "cosh", "prod", "cumprod", "i0", "special_i0", "special_i1"),
    *("matrix_exp", "linalg_matrix_exp", "linalg_matrix_power", "poisson_nll_loss", "kl_div"),
)
_POWERS = ("pow", "float_power")  # the result may exceed fp64 too, if there is no pole at zero
_MASK = 1e4  # a constant of this size or more in a sum, a choice or a product means "never"
_SPREAD = 0.01


@dataclass(frozen=True)
class Exact:
    """The result of an operation in fp32."""

    largest: float  # its largest finite magnitude
    finite: bool
    constant: bool = False  # all elements that do not fit the low format come from one mask value, such as -1e9
    value: float = 0.0  # that mask value, to which small numbers may have been added
    defined: bool = True  # it is finite in fp64
    pole: bool = False  # no wider format makes it finite, as with 1/0


def recompute(
    func: Any, given: tuple[Sequence[Any], dict[str, Any]], tensors: list[Tensor], read: list[Tensor], out: list[Tensor]
) -> Exact | None:
    """Computes the operation again from the values it `read`, widened to fp32; None if that is impossible."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    found = _computed(func, given, tensors, read, torch.float32)
    floats = [t for t in found if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if len(found) != len(out) or not floats:
        return None
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in floats]
    finite = [t[torch.isfinite(t)] for t in parts]
    largest = max((float(t.abs().max()) for t in finite if t.numel()), default=0.0)
    if any(nonfinite(t) is not None for t in floats):
        wider = _computed(func, given, tensors, read, torch.float64)
        defined = bool(wider) and all(nonfinite(t) is None for t in wider)
        return Exact(largest, False, defined=defined, pole=bool(wider) and not defined and _has_poles(func, read))
    first = unwrapped(out[0])
    constant = _constant(found[0], first) if len(floats) == 1 and not floats[0].is_complex() else None
    if constant is not None and not _is_written(constant, given, tensors, first):
        constant = None
    return Exact(largest, True, constant is not None, constant or 0.0)


def recompute_unmasked(
    func: Any, given: tuple[Sequence[Any], dict[str, Any]], tensors: list[Tensor], read: list[Tensor]
) -> Exact | None:
    """Computes an operation again in fp32, with 1 in place of the infinities among the values it `read`."""
    dense = all(t.layout is torch.strided and not t.is_nested for t in read)
    if not dense or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    finite = [torch.where(t.isinf(), 1, t).to(t.dtype) if nonfinite(t) is not None else t for t in read]
    out = _computed(func, given, tensors, finite, None)
    return recompute(func, given, tensors, finite, out) if any(nonfinite(t) is not None for t in out) else None


def _computed(
    func: Any,
    given: tuple[Sequence[Any], dict[str, Any]],
    tensors: list[Tensor],
    read: list[Tensor],
    wide: torch.dtype | None,
) -> list[Tensor]:
    """Returns the results of an operation with its arguments widened to at least `wide`; [] if it raises."""
    args, kwargs = widened(func, given, dict(zip(map(id, tensors), read, strict=True)), wide)
    try:
        return [unwrapped(t).detach() for t in tensors_of(func(*args, **kwargs))]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return []


def widened(
    func: Any, given: tuple[Sequence[Any], Mapping[str, Any]], values: Mapping[int, Tensor], wide: torch.dtype | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns an operation's arguments, with floating-point tensors and dtypes widened to at least `wide`."""
    narrow = _NARROWER[wide]

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            before = values.get(id(value), value)
            dtype = before.dtype if wide is None or before.dtype not in narrow else wide
            dtype = _WIDER.get(dtype, dtype) if wide is torch.float64 else dtype
            return before.to(dtype, copy=schema_of(func).is_mutable)
        return wide if value in narrow else value

    found: tuple[Sequence[Any], Mapping[str, Any]] = tree_map(widen, given)
    return found


def _has_poles(func: Any, read: list[Tensor]) -> bool:
    """Tells whether a result that is not finite in fp64 comes from a pole, like 1/x at 0, not from large values."""
    name = schema_of(func).name.rpartition("::")[2].rstrip("_")
    if name in _POWERS:
        return any(t.layout is torch.strided and bool((t == 0).any()) for t in read)
    return name not in _GROWING


def _is_written(value: float, given: tuple[Sequence[Any], dict[str, Any]], tensors: list[Tensor], out: Tensor) -> bool:
    """Returns whether the constant `value` is one that the user's forward wrote, not one computed from weights."""
    if backward_task() != NO_BACKWARD and not torch.is_grad_enabled():  # a gradient, not a checkpoint's forward
        return False
    numbers = (leaf for leaf in tree_leaves(given) if isinstance(leaf, (int, float)))
    if any(abs(number - value) <= _SPREAD * -value for number in numbers):
        return True
    if not any(t.requires_grad for t in tensors):
        return True
    lost = ~torch.isfinite(out)
    chosen = not bool(lost.all())
    return any(_holds(t, value, lost) for t in tensors if not t.requires_grad or (chosen and t.grad_fn is not None))


def _holds(tensor: Tensor, value: float, lost: Tensor) -> bool:
    """Tells whether a tensor holds `value` wherever the result computed from it is not finite (`lost`)."""
    try:
        held = tensor.detach().broadcast_to(lost.shape)[lost]
    except RuntimeError:
        return False
    return bool(((held.double() - value).abs() <= _SPREAD * -value).all())


def _constant(exact: Tensor, out: Tensor) -> float | None:
    """Returns the fp32 value of the elements that became infinite in `out`, if it may be the constant of a mask."""
    if exact.shape != out.shape:
        return None
    lost = exact[~torch.isfinite(out)]
    low, high = float(lost.min()), float(lost.max())
    same = high < -_MASK and (high - low) <= _SPREAD * -low
    written = lost.numel() > 1 or exact.numel() == 1 or low == float(f"{low:.1g}")  # one alone may be computed
    return low if same and written else None
