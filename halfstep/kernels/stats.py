"""Statistics of tensors in one read each: exponent histogram, counts, sums, largest magnitude; all on the device."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import is_dense
from halfstep.kernels.library import load
from halfstep.kernels.native import check_layout
from halfstep.records import BINS, COUNTS, DOUBLES, MERGES
from halfstep.torch_internals import sparse_values

# A row is int64: the histogram, the counts, and the bits of the doubles, in the order of the fields of `TensorStats`.
WIDTH = BINS + len(COUNTS) + len(DOUBLES)

RUN = 64  # neighbours that a sample reads together
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_PIECE = 2**22  # elements that the torch operations take at a time: they need some 30 bytes per element
_MAGNITUDE = 0x7FFFFFFF
_GOLDEN = 0x9E3779B9
_MERGES: dict[Callable[..., Any], Callable[..., Tensor]] = {operator.add: torch.add, max: torch.maximum}


def empty_rows(count: int, device: torch.device) -> Tensor:
    """Returns `count` empty rows of statistics: an int64 tensor of zeros, `count` by `WIDTH`."""
    device = torch.device("cpu") if device.type == "mps" else device
    return torch.zeros(count, WIDTH, dtype=torch.int64, device=device)


@torch.no_grad()
def add_stats(tensors: Sequence[Tensor], rows: Tensor, places: Sequence[int], *, sample: int | None = None) -> None:
    """Adds the statistics of each `tensors[i]` to `rows[places[i]]`. Reads nothing on the host."""
    limit = 0 if sample is None else max(RUN, sample // RUN * RUN)
    flat = [_flat(t.to(rows.device)) for t in tensors]
    kept = [(t, place) for t, place in zip(flat, places, strict=True) if t.numel()]
    native = _loops() if rows.device.type == "cpu" and kept else None
    if native is None:
        for t, place in kept:
            _add_eager(t, rows[place], limit)
    else:
        _add_native(native, kept, rows, limit)


@functools.cache
def _loops() -> ctypes.CDLL | None:
    loops = load()
    if loops is not None:
        columns = [(name, BINS + column, 1) for column, name in enumerate((*COUNTS, *DOUBLES))]
        check_layout(loops, "halfstep_columns", [("row", 0, WIDTH), *columns])
    return loops


def is_sampled(t: Tensor, sample: int | None) -> bool:
    """Returns whether `add_stats` with this `sample` reads only some elements of `t`."""
    if sample is None:
        return False
    stored = t if t.layout is torch.strided else _stored(t)
    return stored.numel() * (2 if t.is_complex() else 1) > max(RUN, sample // RUN * RUN)


def _stored(t: Tensor) -> Tensor:
    return sparse_values(t) if t.layout is torch.sparse_coo else t.values()


def _flat(t: Tensor) -> Tensor:
    """Returns the elements of `t` in memory order, as a 1-dim tensor of a dtype that the loops can read."""
    t = t.detach()
    if t.layout is not torch.strided:
        t = _stored(t)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    if t.is_neg():
        t = t.resolve_neg()
    if t.dtype not in _KINDS:
        t = t.float() if t.is_floating_point() else t.double()
    if not is_dense(t):
        t = t.contiguous()
    return t.as_strided((t.numel(),), (1,))


def _add_native(native: ctypes.CDLL, kept: Sequence[tuple[Tensor, int]], rows: Tensor, limit: int) -> None:
    count, start, step = len(kept), rows.data_ptr(), rows.stride(0) * rows.element_size()
    pointers, integers = ctypes.c_void_p * count, ctypes.c_int64 * count
    native.halfstep_add_stats(
        ctypes.c_int64(count),
        pointers(*[t.data_ptr() for t, _ in kept]),
        integers(*[t.numel() for t, _ in kept]),
        (ctypes.c_int32 * count)(*[_KINDS[t.dtype] for t, _ in kept]),
        pointers(*[start + place * step for _, place in kept]),
        ctypes.c_int64(limit),
        ctypes.c_int64(RUN),
        ctypes.c_int32(torch.get_num_threads()),
    )


def _add_eager(t: Tensor, row: Tensor, limit: int) -> None:
    """Adds the statistics of `t` to `row` as the compiled loop does, but with torch operations, on any device."""
    if limit and t.numel() > limit:
        t = t[sampled_places(t.numel(), limit, t.device)]
    for piece in torch.split(t, _PIECE):
        _add_piece(piece, row)


def sampled_places(size: int, sample: int, device: torch.device) -> Tensor:
    """Returns the indices of the elements that `add_stats` reads of a tensor with more than `sample` elements."""
    runs = max(RUN, sample) // RUN
    stretch = size // runs
    run = torch.arange(runs, device=device)
    start = run * stretch + (((run * _GOLDEN) & 0xFFFFFFFF) * (stretch - RUN + 1) >> 32)
    return (start[:, None] + torch.arange(RUN, device=device)).flatten()


def _add_piece(t: Tensor, row: Tensor) -> None:
    zero, infinite, nan = t == 0, t.isinf(), t.isnan()
    finite = torch.where(infinite | nan, 0, t)
    row[:BINS].add_(_histogram(_exponents(finite), ~(zero | infinite | nan)))
    counts = {
        "count": torch.full_like(row[0], t.numel()),
        "zeros": zero.sum(),
        "negatives": (t < 0).sum(),
        "infinities": infinite.sum(),
        "nans": nan.sum(),
    }
    row[BINS : BINS + len(COUNTS)].add_(torch.stack([counts[name] for name in COUNTS]))
    wide = finite.double()
    doubles = {"total": wide.sum(), "squares": wide.square().sum(), "amax": wide.abs().max()}
    sums = row[-len(DOUBLES) :].view(torch.float64)
    for place, name in enumerate(DOUBLES):
        _MERGES[MERGES[name]](sums[place], doubles[name], out=sums[place])


def _exponents(t: Tensor) -> Tensor:
    """Returns the exponent field, 0 to 255, that each finite value has in fp32, as int64 or int32."""
    if t.dtype is torch.float64:
        return ((t.view(torch.int64) >> 52 & 0x7FF) - (1023 - 127)).clamp(0, BINS - 1)
    return t.float().view(torch.int32) >> 23 & 0xFF


def _histogram(exponents: Tensor, counted: Tensor) -> Tensor:
    if exponents.device.type == "cuda":  # scattered adds to few places are slow there, and bincount waits for the host
        entries = torch.where(counted, exponents, BINS)
        return torch.histc(entries, BINS + 1, 0, BINS)[:BINS].long()
    counts = torch.zeros(BINS, dtype=torch.int64, device=exponents.device)
    return counts.scatter_add_(0, exponents.long(), counted.long())
