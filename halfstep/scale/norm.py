"""The global norm of gradients and the exact test for non-finite ones: at most two reading passes, no host sync."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A fp32 sum of squares over a whole large tensor is off by 1e-3 on a CPU (25M elements); over pieces this long by 2e-7.
_PIECE = 2**16

# Devices whose norm kernel sums low and fp32 elements in float64 at the speed of memory.
_WIDE_SUMS = ("cuda",)


@torch.no_grad()
def global_norm(grads: Sequence[Tensor], *, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Returns the L2 norm over all elements of `grads` and whether any element is infinite or NaN.

    Takes any mix of floating and complex dtypes, devices, dense and sparse (COO) gradients; the sparse ones count with
    their duplicate indices summed. Both results are 0-dim tensors on `device` (default: the device of the first
    gradient, the CPU where there is none): the norm in fp32, the test a bool. The test is exact: finite gradients pass
    whatever their squares do. On devices without a cheap float64 sum the norm of a piece of 65,536 elements whose
    squares overflow fp32 (elements above 1.8e19) is replaced by its upper bound, largest element times sqrt(length).

    >>> norm, found = global_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)])
    >>> norm, found
    (tensor(5.), tensor(False))
    """
    if device is None:
        device = grads[0].device if grads else torch.device("cpu")
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = elements(grad)
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append(values)
    if not groups:
        return torch.zeros((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    norms, founds = [], []
    for (where, dtype), tensors in groups.items():
        one_pass = dtype is torch.float16 or (where.type in _WIDE_SUMS and dtype is not torch.float64)
        pieces, finite = (_one_pass if one_pass else _two_passes)(tensors, dtype)
        norms.append(_norm_of_norms(pieces).to(device=device, dtype=torch.float32, non_blocking=True))
        founds.append((~finite).to(device, non_blocking=True))
    if len(norms) == 1:
        return norms[0], founds[0]
    return _norm_of_norms(torch.stack(norms)), torch.stack(founds).any()


def elements(grad: Tensor) -> Tensor:
    """Returns the elements of a gradient as a dense real tensor; low sparse gradients are summed in fp32.

    >>> elements(torch.tensor([[1.0, 0.0]]).to_sparse())
    tensor([1.])
    """
    if grad.layout is not torch.strided:
        wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        grad = wide.coalesce().values()
    grad = grad.detach()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _norm_of_norms(norms: Tensor) -> Tensor:
    """Returns the L2 norm of non-negative numbers without overflow of their squares."""
    largest = norms.amax()
    unit = torch.where(torch.isfinite(largest) & (largest > 0), largest, torch.ones_like(largest))
    scaled: Tensor = torch.linalg.vector_norm(norms / unit)
    return scaled * unit


def _one_pass(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns norms and whether all is finite from sums of squares so wide that no finite element overflows them."""
    wide = torch.float32 if dtype is torch.float16 else torch.float64
    norms = torch.stack(list(torch._foreach_norm([piece for t in tensors for piece in _pieces(t)], 2, dtype=wide)))
    return norms, torch.isfinite(norms).all()


def _two_passes(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns norms and whether all is finite from one pass over the squares and one over the extremes.

    An L2 norm alone cannot tell an infinite gradient from one whose squares overflow; the extremes can.
    """
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    wide = dtype if dtype is torch.float64 else torch.float32
    norms = torch.stack(list(torch._foreach_norm(pieces, 2, dtype=wide)))
    low, high = zip(*(torch.aminmax(piece) for piece in pieces), strict=True)
    largest = torch.maximum(torch.stack(high), -torch.stack(low)).to(wide)
    roots = torch.tensor([math.sqrt(piece.numel()) for piece in pieces], dtype=wide).to(norms.device, non_blocking=True)
    exact = torch.maximum(norms, largest)  # squares that underflow leave a norm below the largest element
    return torch.where(torch.isfinite(norms), exact, largest * roots), torch.isfinite(largest).all()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensor, or where it is long, contiguous and on a CPU its flat pieces."""
    if tensor.numel() <= _PIECE or not tensor.is_cpu or not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), _PIECE)
