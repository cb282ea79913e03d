"""Statistics of tensors, and of what an update adds to weights, on the device: histogram, counts, sums, magnitude."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.records import BINS, COUNTS, DOUBLES, MERGES
from halfstep.torch_internals import sparse_values
from halfstep.train.kernels.batch import Batch, Options, is_dense
from halfstep.train.kernels.native import WIDTH, address, call, fits, loops, pointers

RUN = 64  # neighbours that a sample reads together
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_PIECE = 2**22  # elements that the torch operations take at a time: they need some 30 bytes per element
_FRACTION, _BIAS, _EXPONENT = 52, 1023, 0x7FF  # of float64
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
    compiled = loops() if rows.device.type == "cpu" and kept else None
    if compiled is None:
        for t, place in kept:
            read = t[sampled_places(t.numel(), limit, t.device)] if limit and t.numel() > limit else t
            for piece in torch.split(read, _PIECE):
                _add_piece(piece, rows[place])
        return
    starts, found = pointers([t for t, _ in kept]), addresses_of(rows, [place for _, place in kept])
    numels, kinds = array("q", [t.numel() for t, _ in kept]), array("i", [_KINDS[t.dtype] for t, _ in kept])
    tables = map(address, (starts, numels, kinds, found))
    compiled.halfstep_add_stats(len(kept), *tables, limit, RUN, torch.get_num_threads())


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


def sampled_places(size: int, sample: int, device: torch.device) -> Tensor:
    """Returns the indices of the elements that `add_stats` reads of a tensor with more than `sample` elements."""
    runs = max(RUN, sample) // RUN
    stretch = size // runs
    run = torch.arange(runs, device=device)
    start = run * stretch + (((run * _GOLDEN) & 0xFFFFFFFF) * (stretch - RUN + 1) >> 32)
    return (start[:, None] + torch.arange(RUN, device=device)).flatten()


def _add_piece(t: Tensor, row: Tensor) -> None:
    """Adds the statistics of `t` to `row` as the compiled loop does, but with torch operations, on any device."""
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


@dataclass(frozen=True)
class Updates(ABC):
    """What one step adds to parameters on one device."""

    params: list[Parameter]
    stored: list[Tensor]  # as they are before the step

    @abstractmethod
    def parts(self, index: int, sample: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (stored weight, update in float64) of one parameter, maybe in parts."""

    def add_to(self, rows: Tensor, places: Sequence[int | None], *, sample: int | None) -> None:
        """Adds the statistics of the update of `params[i]` to `rows[places[i]]`; skips it if `places[i]` is None."""
        for index, place in enumerate(places):
            if place is not None:
                for stored, update in self.parts(index, sample):
                    add_stats([in_last_places(update, stored)], rows, [place], sample=sample)


def in_last_places(update: Tensor, weight: Tensor) -> Tensor:
    """Returns a float64 update in units in the last place of the elements of `weight`.

    The unit of an element w, in the dtype of `weight`, is the distance from |w| to the next larger value: 2^(floor(log2
    |w|) - fraction bits). Below the smallest normal value, zero included, it is the smallest subnormal. The division is
    exact.

    >>> in_last_places(torch.tensor([0.25, 0.25]).double(), torch.tensor([1.0, 2.0]).half())
    tensor([256., 128.], dtype=torch.float64)
    """
    info = torch.finfo(weight.dtype)
    fraction, smallest = -_log2(info.eps), _log2(info.smallest_normal)
    exponent = weight.double().abs().view(torch.int64) >> _FRACTION & _EXPONENT
    unit = (exponent.clamp(min=max(smallest + _BIAS, fraction + 1)) - fraction) << _FRACTION
    return update / unit.view(torch.float64)


def takes_updates(batch: Batch, options: Options, rows: Tensor) -> bool:
    """Returns whether `add_updates` takes this batch: the compiled step takes it, and `rows` are on the CPU."""
    return rows.is_cpu and fits(batch, options)


def add_updates(
    kernel: str,
    batch: Batch,
    options: Options,
    factor: Tensor | None,
    found: Tensor,
    rows: array[int],
    *,
    sample: int | None,
) -> None:
    """Adds up statistics of what a batch's next update would add to each weight, in one pass over the tensors."""
    limit = 0 if sample is None else max(RUN, sample // RUN * RUN)
    call("halfstep_add_updates", kernel, batch, options, factor, found, address(rows), limit, RUN)


def addresses_of(rows: Tensor, places: Sequence[int | None]) -> array[int]:
    """Returns the memory addresses of the rows at `places`; 0 for None."""
    start, step = rows.data_ptr(), rows.stride(0) * rows.element_size()
    return array("q", [0 if place is None else start + place * step for place in places])


def _log2(power: float) -> int:
    return math.frexp(power)[1] - 1
