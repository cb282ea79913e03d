"""Statistics of what an update adds to weights, before any rounding, in units in the last place of the weights."""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.kernels import native
from halfstep.kernels.batch import Batch, Options
from halfstep.kernels.library import load
from halfstep.kernels.native import address
from halfstep.kernels.stats import RUN

_FRACTION, _BIAS, _EXPONENT = 52, 1023, 0x7FF  # of float64
_P, _L = ctypes.c_void_p, ctypes.c_int64


class Updates(Protocol):
    """What one step adds to parameters on one device."""

    @property
    def params(self) -> list[Parameter]:
        """The parameters that the step updates."""

    @property
    def stored(self) -> list[Tensor]:
        """The parameters as they are stored before the step."""

    def add_to(self, rows: Tensor, places: Sequence[int | None], *, sample: int | None) -> None:
        """Adds the statistics of the update of `params[i]` to `rows[places[i]]`; skips it if `places[i]` is None."""


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


@functools.cache
def _loops() -> ctypes.CDLL | None:
    loops = load()
    if loops is not None:
        native.check_structures(loops)
        loops.halfstep_add_updates.argtypes = (ctypes.c_char_p, _P, _P, _P, _L, _P, _L, _L)
        loops.halfstep_add_updates.restype = ctypes.c_int32
    return loops


def fits(batch: Batch, options: Options, rows: Tensor) -> bool:
    """Returns whether `add_updates` takes this batch: the compiled step takes it, and `rows` are on the CPU."""
    return rows.is_cpu and native.fits(batch, options) and _loops() is not None


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
    loops, table = _loops(), native.table_of(batch)
    assert loops is not None
    assert table is not None
    limit = 0 if sample is None else max(RUN, sample // RUN * RUN)
    structures = table.point(batch, options, factor, found)
    native.call(loops.halfstep_add_updates, kernel, structures, options, address(rows), limit, RUN)


def addresses_of(rows: Tensor, places: Sequence[int | None]) -> array[int]:
    """Returns the memory addresses of the rows at `places`; 0 for None."""
    start, step = rows.data_ptr(), rows.stride(0) * rows.element_size()
    return array("q", [0 if place is None else start + place * step for place in places])


def _log2(power: float) -> int:
    return math.frexp(power)[1] - 1
