"""Adds the observations of a run up: histograms of exponents by module, and shares by module and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from halfstep.formats import Format
from halfstep.records import UPDATE, Observation

Array = npt.NDArray[np.float64]

NETWORK = "(the whole network)"
MODEL = "(the model itself)"
COLUMNS = 200  # of a heat map; more steps share columns
CHUNK = 512
BINS = 256
BIAS = 127  # entry e of a histogram has the values from 2^(e - BIAS) on
MARGIN = 126  # a loss scale moves the exponents of true values out of the histogram by at most this much
MEASURES = ("nonzero", "lost", "small", "count", "zeros", "saturated")


@dataclass(frozen=True)
class Limits:
    """Where magnitudes end: lost below `zero`, with fewer digits below `normal`, beyond reach above `top`."""

    zero: float
    normal: float
    top: float


def limits_of(kind: str, fmt: Format) -> Limits:
    """Returns what can be held: of a tensor in `fmt`; of an update, what a stored weight can follow."""
    if kind == UPDATE:  # in units of the last place of the weight
        return Limits(0.5, 0.5, math.inf)
    return Limits(fmt.smallest_subnormal / 2, fmt.smallest_normal, fmt.max)


@dataclass
class Sums:
    """What the tensors of one kind did, summed by module: row 0 is the whole network, the others have `modules`.

    `histogram` counts the true values (the loss scale taken out) by exponent, from `MARGIN` below the smallest of fp32
    on. `shares` holds, by row and column of steps, how many values were counted (`MEASURES`): nonzero ones, those that
    the low format rounds to zero, those below its smallest normal value (the lost ones too), all, zeros, and those
    beyond its largest (infinities and NaN too), all of them with the loss scale that they carried; of updates, those
    that are lost are those that the stored weight cannot follow. `largest` is the largest true magnitude.
    """

    modules: list[str] = field(default_factory=lambda: [NETWORK])
    formats: set[str] = field(default_factory=set)
    sampled: bool = False
    histogram: Array = field(default_factory=lambda: np.zeros((0, BINS + 2 * MARGIN)))
    shares: Array = field(default_factory=lambda: np.zeros((0, 0, len(MEASURES))))
    largest: Array = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Gathered:
    """Sums by kind of tensor, and the first and last step of each column."""

    low: Format
    columns: tuple[tuple[int, int], ...]
    kinds: dict[str, Sums]


def gather(
    observations: Iterable[Observation], steps: Sequence[int], low: Format, modules: Sequence[str] = ()
) -> Gathered:
    """Returns the sums of observations at the given steps (sorted), judged by what `low` can hold.

    Modules come in the order of `modules`, and those that are not in it as they were seen.
    """
    groups = np.array_split(np.asarray(steps, dtype=np.int64), min(len(steps), COLUMNS)) if steps else []
    column = {int(step): index for index, group in enumerate(groups) for step in group}
    kinds: dict[str, Sums] = {}
    rows: dict[tuple[str, str], int] = {}
    for chunk in _chunks(observations):
        for kind in dict.fromkeys(seen.kind for seen in chunk):
            sums = kinds.setdefault(kind, Sums())
            part = [seen for seen in chunk if seen.kind == kind]
            limits = limits_of(kind, low)
            for seen in part:
                if (kind, seen.module) not in rows:
                    rows[kind, seen.module] = len(sums.modules)
                    sums.modules.append(seen.module or MODEL)
                sums.formats.add(seen.format)
                sums.sampled |= seen.sampled
            _grow(sums, len(sums.modules), len(groups))
            _add(sums, limits, part, [rows[kind, seen.module] for seen in part], [column[seen.step] for seen in part])
    places = {name or MODEL: place for place, name in enumerate(modules)}
    places[NETWORK] = -1
    for sums in kinds.values():
        order = sorted(range(len(sums.modules)), key=lambda row: places.get(sums.modules[row], len(places)))
        sums.modules = [sums.modules[row] for row in order]
        sums.histogram, sums.shares, sums.largest = sums.histogram[order], sums.shares[order], sums.largest[order]
        sums.histogram[0] = sums.histogram.sum(0)
        sums.shares[0] = sums.shares.sum(0)
        sums.largest[0] = sums.largest.max()
    return Gathered(low, tuple((int(group[0]), int(group[-1])) for group in groups), kinds)


def _chunks(observations: Iterable[Observation]) -> Iterator[list[Observation]]:
    rest = iter(observations)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _add(sums: Sums, limits: Limits, part: Sequence[Observation], rows: list[int], columns: list[int]) -> None:
    bins: Array = np.array([seen.stats.exponents for seen in part], dtype=np.float64)
    amax = np.array([seen.stats.amax for seen in part])
    nonfinite = np.array([seen.stats.infinities + seen.stats.nans for seen in part])
    count = np.array([seen.stats.count for seen in part])
    nonzero = bins.sum(1)
    beyond = np.where(amax > limits.top, np.maximum(1, bins @ (1 - _below(limits.top))), 0)

    def below(limit: float, *, itself: bool = False) -> Array:
        all_are = amax <= limit if itself else amax < limit
        share: Array = np.where(all_are, nonzero, bins @ _below(limit))
        return share

    found = {
        "nonzero": nonzero,
        "lost": below(limits.zero, itself=part[0].kind != UPDATE),  # an update of just half a unit may go either way
        "small": below(limits.normal),
        "count": count,
        "zeros": np.array([seen.stats.zeros for seen in part]),
        "saturated": beyond + nonfinite,
    }
    np.add.at(sums.shares, (rows, columns), np.stack([found[name] for name in MEASURES], axis=1))
    scales = np.array([seen.scale if 0 < seen.scale < math.inf else 1.0 for seen in part])
    np.maximum.at(sums.largest, rows, amax / scales)
    shifts = np.clip(np.rint(np.log2(scales)).astype(int), -MARGIN, MARGIN)
    for shift in np.unique(shifts):
        chosen = np.flatnonzero(shifts == shift)
        first = MARGIN - shift
        np.add.at(sums.histogram[:, first : first + BINS], np.asarray(rows)[chosen], bins[chosen])


def _grow(sums: Sums, rows: int, columns: int) -> None:
    more = rows - len(sums.histogram)
    if more > 0:
        sums.histogram = np.pad(sums.histogram, ((0, more), (0, 0)))
        sums.shares = np.pad(sums.shares, ((0, more), (0, columns - sums.shares.shape[1]), (0, 0)))
        sums.largest = np.pad(sums.largest, (0, more))


def _below(limit: float) -> Array:
    """Returns which share of each entry of a histogram lies below `limit`, its values even in their logarithm."""
    entry = np.arange(BINS)
    low = np.where(entry == 0, -149, entry - BIAS)
    high = np.where(entry == 0, 1 - BIAS, entry - BIAS + 1)
    share: Array = np.clip((math.log2(limit) - low) / (high - low), 0, 1)
    return share
