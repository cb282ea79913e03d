"""Makes records of statistics, from a tensor or from rows that were filled on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ObserveError
from halfstep.kernels.stats import add_stats, empty_rows
from halfstep.records import BINS, COUNTS, DOUBLES, TensorStats


def measure(tensor: Tensor, *, sample: int | None = None) -> TensorStats:
    """Returns the statistics of one tensor, read on the host.

    `sample` limits how many elements are read, to a multiple of 64 and at least 64: runs of 64 neighbours in memory,
    spread evenly over the tensor. `stats.exponents[127]` counts the elements from 1 to 2 in magnitude, see TensorStats.

    >>> stats = measure(torch.tensor([1.0, -3.0, 0.0, float("inf")]))
    >>> stats.zeros, stats.negatives, stats.infinities, stats.exponents[127], stats.exponents[128], stats.amax
    (1, 1, 1, 1, 1, 3.0)

    Raises:
        ObserveError: `tensor` is not a tensor, or `sample` is not an integer of 1 or more.
    """
    if not isinstance(tensor, Tensor):
        raise ObserveError(f"measure() expected a tensor, got {type(tensor).__name__}; pass torch.as_tensor(values)")
    check_sample(sample)
    rows = empty_rows(1, tensor.device)
    add_stats([tensor], rows, [0], sample=sample)
    return read_rows(rows)[0]


def check_sample(sample: object) -> None:
    """Raises an ObserveError unless `sample` is an integer of 1 or more, or None."""
    if sample is not None and (not isinstance(sample, int) or isinstance(sample, bool) or sample < 1):
        raise ObserveError(f"sample is {sample!r}; pass how many elements of each tensor to read, or None for all")


def read_rows(rows: Tensor) -> list[TensorStats]:
    """Returns the statistics in rows, read on the host in one copy, which is the only wait for the device."""
    held = rows.detach().cpu()
    numbers = held[:, : BINS + len(COUNTS)].tolist()
    doubles = held[:, -len(DOUBLES) :].contiguous().view(torch.float64).tolist()
    return [
        TensorStats(
            **dict(zip(COUNTS, counts[BINS:], strict=True)),
            exponents=tuple(counts[:BINS]),
            **dict(zip(DOUBLES, sums, strict=True)),
        )
        for counts, sums in zip(numbers, doubles, strict=True)
    ]
