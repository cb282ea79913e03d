"""Counts the non-finite elements of a tensor and finds the range of the others; each look waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.torch_internals import (
    functorch_unwrapped,
    is_functorch_wrapped,
    is_zero_tensor,
    jagged_values,
    sparse_values,
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
