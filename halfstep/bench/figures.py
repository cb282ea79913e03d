"""Medians, spreads and ratios of step times that were taken turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from halfstep.records import Spread


def spread(values: Sequence[float]) -> Spread | None:
    """Returns the median and quartiles; None of nothing.

    >>> spread([4.0, 1.0, 3.0, 2.0])
    Spread(median=2.5, low=1.75, high=3.25, count=4)
    """
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high, len(values))


def speedup(baseline: Sequence[float], times: Sequence[float]) -> float | None:
    """Returns the median of the ratios baseline to time of steps that were taken in turn; above 1 is faster.

    Each pair ran within one round, so that what slows the machine for a while slows both. Where one list is longer, its
    last entries have no partner and are left out.

    >>> speedup([2.0, 4.0, 30.0], [1.0, 2.0, 10.0])
    2.0
    """
    ratios = [a / b for a, b in zip(baseline, times, strict=False)]
    return median(ratios) if ratios else None


def mean_of_last(values: Sequence[float], share: float = 0.1) -> float | None:
    """Returns the mean of the last `share` of the values, of one at least; None of nothing.

    >>> mean_of_last([9.0] * 18 + [1.0, 3.0])
    2.0
    """
    count = max(1, int(len(values) * share))
    return sum(values[-count:]) / count if values else None
