"""Reads the gradients once, for their global norm and an exact test for non-finite values, without a host sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import is_low, needs_scale
from halfstep.torch_internals import foreach_norm
from halfstep.train.kernels import devices, native
from halfstep.train.kernels.batch import NOTHING, Judged, Scratch, Wanted

# A fp32 sum of squares over a whole large tensor is off by 1e-3 on a CPU (25M elements); over pieces this long by 2e-7.
_PIECE = 2**16

# Devices whose norm kernel sums low and fp32 elements in float64 at the speed of memory.
_WIDE_SUMS = ("cuda",)


@dataclass(frozen=True)
class Reading:
    """The result of reading gradients once."""

    norm: Tensor  # L2, of all elements (0-dim fp32)
    found: Tensor  # is any element not finite (0-dim bool)
    flags: Tensor  # the same of each gradient (bool)
    judged: Judged | None = None  # what was wanted, if the reader does it


class Clip:
    """Clips by the global norm, bit for bit as `torch.nn.utils.clip_grad_norm_` does, without a host sync."""

    # Its constants are tensors on the device: an operation on a Python number takes three times as long on a CPU.

    def __init__(self, device: torch.device) -> None:
        self._epsilon = torch.tensor(1e-6, dtype=torch.float32, device=device)
        self._last: tuple[float, Tensor] | None = None

    def factor(self, norm: Tensor, max_norm: float) -> Tensor:
        """Returns the factor (0-dim fp32, at most 1) that clips gradients of this `norm` to `max_norm`."""
        if self._last is None or self._last[0] != max_norm:
            most = torch.full((), float(max_norm), dtype=torch.float64, device=norm.device)
            self._last = max_norm, most.to(norm.dtype)
        return (norm + self._epsilon).reciprocal_().mul_(self._last[1]).clamp_max_(1.0)


@dataclass(frozen=True)
class Reader:
    """One implementation of `read`, which never waits and may keep in the Scratch what speeds up the next read."""

    fits: Callable[[list[Tensor]], bool]  # whether it supports these gradients
    read: Callable[[list[Tensor], Scratch, Wanted], tuple[Any, ...]]  # the tensors of a Reading


def read(
    grads: list[Tensor],
    *,
    device: torch.device | None = None,
    scratch: Scratch | None = None,
    wanted: Wanted = NOTHING,
) -> Reading:
    """Reads `grads` once with the first of `READERS` that supports them; the results are on `device`."""
    for reader in READERS.values():
        if reader.fits(grads):
            there = device is None or not grads or grads[0].device == device
            found = Reading(
                *reader.read(grads, Scratch() if scratch is None else scratch, wanted if there else NOTHING)
            )
            break
    if device is None or found.norm.device == device:
        return found
    norm, found_any, flags = (t.to(device, non_blocking=True) for t in (found.norm, found.found, found.flags))
    return Reading(norm, found_any, flags)


@torch.no_grad()
def read_with_torch(grads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm, the non-finite test and the flags of a `Reading`, for any gradients, with torch operations."""
    device = grads[0].device if grads else torch.device("cpu")
    flags = [torch.zeros((), dtype=torch.bool, device=device)] * len(grads)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for i, grad in enumerate(grads):
        values = elements(grad)
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append((i, values))
    norms = []
    for (where, dtype), members in groups.items():
        one_pass = needs_scale(dtype) or (where.type in _WIDE_SUMS and dtype is not torch.float64)
        pieces = [(i, piece) for i, values in members for piece in _pieces(values)]
        sizes, finite = (_one_pass if one_pass else _two_passes)([piece for _, piece in pieces], dtype)
        norms.append(_norm_of_norms(sizes).to(device=device, dtype=torch.float32, non_blocking=True))
        bad = (~finite).to(device, non_blocking=True)
        start = 0
        for i, count in Counter(i for i, _ in pieces).items():
            flags[i] = bad[start : start + count].any()
            start += count
    stacked = torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)
    if not norms:
        norms = [torch.zeros((), dtype=torch.float32, device=device)]
    return norms[0] if len(norms) == 1 else _norm_of_norms(torch.stack(norms)), stacked.any(), stacked


def elements(grad: Tensor) -> Tensor:
    """Returns a gradient's elements as a dense real tensor; sparse ones of one index are summed first, low in fp32."""
    if grad.layout is not torch.strided:
        wide = grad.float() if is_low(grad.dtype) else grad
        grad = wide.coalesce().values()
    grad = grad.detach()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _norm_of_norms(norms: Tensor) -> Tensor:
    """Returns the L2 norm of non-negative numbers, scaled so that no square overflows."""
    unit = _units(norms.amax())
    scaled: Tensor = torch.linalg.vector_norm(norms / unit)
    return scaled * unit


def _units(largest: Tensor) -> Tensor:
    """Returns what to divide numbers by so that their squares do not overflow: their `largest`, if finite and not 0."""
    return torch.where(torch.isfinite(largest) & (largest > 0), largest, torch.ones_like(largest))


def _one_pass(pieces: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if needs_scale(dtype) else torch.float64
    norms = torch.stack(list(foreach_norm(pieces, 2, dtype=wide)))
    return norms, torch.isfinite(norms)


def _two_passes(pieces: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the L2 norm of each piece, and whether the piece is finite."""
    # The first pass finds the largest magnitude of a piece. The second divides the elements by it, squares and sums
    # them, so that no square overflows and no square that matters underflows.
    wide = dtype if dtype is torch.float64 else torch.float32
    low, high = zip(*(torch.aminmax(piece) for piece in pieces), strict=True)
    largest = torch.maximum(torch.stack(high), -torch.stack(low)).to(wide)
    units = _units(largest)
    norms = [
        torch.linalg.vector_norm(piece.to(wide) / unit) for piece, unit in zip(pieces, units.unbind(), strict=True)
    ]
    return torch.stack(norms) * units, torch.isfinite(largest)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensor whole, or in flat pieces if it is long, contiguous and on a CPU."""
    if tensor.numel() <= _PIECE or not tensor.is_cpu or not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), _PIECE)


# In order of preference. The last one takes everything; it is the reference that the others are tested against.
READERS = {
    "native": Reader(native.can_read, lambda grads, *_: native.read(grads)),
    "triton": Reader(devices.triton_can_read, devices.triton_read),
    "torch": Reader(lambda grads: True, lambda grads, *_: read_with_torch(grads)),
}
