"""What is not finite in a tensor, and whether the operation that made it is so in fp32 and fp64; each look waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.explain.tape.schemas import tensors_of
from halfstep.formats import CASTABLE
from halfstep.torch_internals import (
    NO_BACKWARD,
    backward_task,
    functorch_unwrapped,
    is_functorch_wrapped,
    is_zero_tensor,
    jagged_values,
    schema_of,
    sparse_values,
    tree_leaves,
    tree_map,
    without_modes,
)


@dataclass(frozen=True)
class NonFinite:
    """How many of `count` elements are NaN (`nan`), inf (`above`) or -inf (`below`), and the index of the first."""

    count: int
    nan: int
    above: int
    below: int
    first: tuple[int, ...] = ()

    def __add__(self, other: NonFinite) -> NonFinite:
        count, nan = self.count + other.count, self.nan + other.nan
        return NonFinite(count, nan, self.above + other.above, self.below + other.below, self.first)

    def __str__(self) -> str:
        parts = [(self.nan, "NaN"), (self.above, "inf"), (self.below, "-inf")]
        some, joint, last = ", ".join(f"{count:,} {word}" for count, word in parts if count).rpartition(", ")
        return f"{some}{joint and ' and '}{last} in {self.count:,} element{'s' * (self.count != 1)}"


def nonfinite(tensor: Tensor) -> NonFinite | None:
    """Counts the non-finite elements of a tensor; None if all are finite or it holds no floating-point numbers."""
    with without_modes():  # bypasses emulation and other modes
        values = _values(tensor)
        if values is None or _is_finite(values):
            return None
        values = values.clone()  # a collective may be writing to it
        wrong = ~torch.isfinite(values)
        if not bool(wrong.any()):
            return None
        first = tuple(int(i) for i in torch.nonzero(wrong)[0]) if values.dim() else ()
        nan, above = int(torch.isnan(values).sum()), int(torch.isposinf(values).sum())
        return NonFinite(values.numel(), nan, above, int(wrong.sum()) - nan - above, first)


def finite_range(tensor: Tensor) -> tuple[float, float] | None:
    """Returns the smallest and the largest finite element; None if no element is finite."""
    with without_modes():
        values = _values(tensor)
        if values is None:
            return None
        finite = values if _is_finite(values) else values[torch.isfinite(values)]
        return None if finite.numel() == 0 else (float(finite.min()), float(finite.max()))


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor inside the wrappers of torch.func's transforms; for a nested tensor, all its elements."""
    while is_functorch_wrapped(tensor):
        tensor = functorch_unwrapped(tensor)
    return elements(tensor) if tensor.is_nested else tensor


def elements(nested: Tensor) -> Tensor:
    """Returns the dense tensor that holds the elements of a nested tensor."""
    values: Tensor = jagged_values(nested) if nested.layout is torch.jagged else nested.values()
    return values


def _is_finite(values: Tensor) -> bool:
    # A sum of finite values may overflow, and takes half the time; `isfinite` takes twenty times as long.
    if math.isfinite(float(values.sum())):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _values(tensor: Tensor) -> Tensor | None:
    values = unwrapped(tensor).detach()
    if values.is_meta or is_zero_tensor(values) or not (values.is_floating_point() or values.is_complex()):
        return None
    if values.layout is not torch.strided:
        values = sparse_values(values) if values.is_sparse else values.values()
    if values.numel() == 0:
        return None
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.float() if values.dtype.itemsize == 1 else values  # fp8 and narrower


# ---- an operation computed again in fp32 and fp64, from the values that it read when it ran
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
