"""Sums the observations of a run by module: exponent histograms, and counts of lost, small and saturated values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from halfstep.formats import Format
from halfstep.records import (
    CERTAIN,
    LIMITS,
    PRECISION,
    SUSPECT,
    Array,
    Limits,
    Observation,
    count_below,
    count_beyond,
    limits_of,
)

NETWORK = "(the whole network)"
MODEL = "(the model itself)"
COLUMNS = 200  # of a heat map; more steps share columns
CHUNK = 512
MOVED = 126  # a loss scale moves the exponents of true values out of a histogram by at most this much
FIRST = -149 - MOVED  # the exponent of the first entry of a histogram of true values, each of which is one octave
OCTAVES = 129 + MOVED - FIRST
# Of values as they were observed: lost ones are rounded to zero by the low format (or an update is too small for its
# weight), small ones lie below its smallest normal value, lost ones included, saturated ones beyond its largest value.
MEASURES = ("nonzero", "lost", "small", "count", "zeros", "saturated")
_SUBNORMAL = 23  # octaves that share entry 0 of a histogram


@dataclass
class Sums:
    """Statistics of all tensors of one kind: a row for each module, named in `modules`; row 0 is the whole network."""

    modules: list[str] = field(default_factory=lambda: [NETWORK])
    formats: set[str] = field(default_factory=set)  # in which the tensors were stored
    sampled: bool = False  # only some elements of a tensor were read
    # (row, exponent from FIRST on) without the loss scale; (row, group of steps, measure); (row) without it
    histogram: Array = field(default_factory=lambda: np.zeros((0, OCTAVES)))
    shares: Array = field(default_factory=lambda: np.zeros((0, 0, len(MEASURES))))
    largest: Array = field(default_factory=lambda: np.zeros(0))

    def judge(self, limits: Limits, scale: float) -> Array:
        """Returns (row, 3): shares of the nonzero values that are lost, subnormal and saturated at a loss scale."""
        low = np.arange(FIRST, FIRST + OCTAVES, dtype=np.float64)
        given = (self.histogram, self.largest)
        limits, edges = limits.times(1 / scale), (low, low + 1)
        lost = count_below(*given, limits.zero, edges)
        counts = (lost, count_below(*given, limits.normal, edges) - lost, count_beyond(*given, limits.top, edges))
        shares: Array = np.stack(counts, axis=1) / np.maximum(1, self.histogram.sum(1, keepdims=True))
        return shares


@dataclass(frozen=True)
class AbsorbedAt:
    """An absorbed overflow at one place, that is, an overflow that a later operation made finite."""

    first: Observation  # of its observations
    steps: tuple[int, ...]  # all in which it was observed


@dataclass(frozen=True)
class PrecisionOf:
    """How far what a module returns was from the same call in fp32, in its spread, at some steps."""

    module: str
    steps: tuple[int, ...]
    off_by: tuple[float, ...]

    @property
    def is_lost(self) -> bool:
        """Whether it was no suspect at first and is one at last, or is too far off for rounding alone."""
        return self.off_by[-1] > (SUSPECT if self.off_by[0] <= SUSPECT else CERTAIN)


@dataclass(frozen=True)
class Gathered:
    """The sums of a run's observations by kind of tensor, its absorbed overflows, and the precision of its modules."""

    low: Format
    columns: tuple[tuple[int, int], ...]  # the first and last step of each column of a heat map
    kinds: dict[str, Sums]
    absorbed: tuple[AbsorbedAt, ...] = ()
    precision: tuple[PrecisionOf, ...] = ()


def gather(
    observations: Iterable[Observation], steps: Sequence[int], low: Format, modules: Sequence[str] = ()
) -> Gathered:
    """Returns the sums of `observations` at the sorted `steps`, judged by `low`; rows are ordered as `modules`."""
    groups = np.array_split(np.asarray(steps, dtype=np.int64), min(len(steps), COLUMNS)) if steps else []
    column = {int(step): index for index, group in enumerate(groups) for step in group}
    kinds: dict[str, Sums] = {}
    rows: dict[tuple[str, str], int] = {}
    absorbed: dict[tuple[str, str | None], list[Observation]] = {}
    precision: dict[str, dict[int, float]] = {}
    rest = iter(observations)
    while chunk := list(islice(rest, CHUNK)):
        for seen in chunk:
            if seen.kind == PRECISION:
                off = precision.setdefault(seen.module or MODEL, {})
                off[seen.step] = max(seen.stats.rms, off.get(seen.step, 0.0))
            elif seen.absorbed is not None:
                absorbed.setdefault((seen.module, seen.absorbed.where or seen.absorbed.operator), []).append(seen)
        chunk = [seen for seen in chunk if seen.absorbed is None and seen.kind != PRECISION]
        for kind in dict.fromkeys(seen.kind for seen in chunk):
            sums = kinds.setdefault(kind, Sums())
            part = [seen for seen in chunk if seen.kind == kind]
            limits = LIMITS.get(kind) or limits_of(low)
            for seen in part:
                if (kind, seen.module) not in rows:
                    rows[kind, seen.module] = len(sums.modules)
                    sums.modules.append(seen.module or MODEL)
                sums.formats.add(seen.format)
                sums.sampled |= seen.sampled
            more = len(sums.modules) - len(sums.histogram)
            sums.histogram = np.pad(sums.histogram, ((0, more), (0, 0)))
            sums.shares = np.pad(sums.shares, ((0, more), (0, len(groups) - sums.shares.shape[1]), (0, 0)))
            sums.largest = np.pad(sums.largest, (0, more))
            _add(sums, limits, part, [rows[kind, seen.module] for seen in part], [column[seen.step] for seen in part])
    places = {name or MODEL: place for place, name in enumerate(modules)}
    places[NETWORK] = -1
    for sums in kinds.values():
        order = sorted(range(len(sums.modules)), key=lambda row: places.get(sums.modules[row], len(places)))
        sums.modules = [sums.modules[row] for row in order]
        sums.histogram, sums.shares, sums.largest = sums.histogram[order], sums.shares[order], sums.largest[order]
        sums.histogram[0] = sums.histogram.sum(0)
        sums.shares[0] = sums.shares.sum(0)
        sums.largest[0] = np.max(sums.largest)
    return Gathered(
        low,
        tuple((int(group[0]), int(group[-1])) for group in groups),
        kinds,
        tuple(AbsorbedAt(each[0], tuple(dict.fromkeys(seen.step for seen in each))) for each in absorbed.values()),
        tuple(PrecisionOf(module, tuple(off), tuple(off.values())) for module, off in precision.items()),
    )


def _add(sums: Sums, limits: Limits, part: Sequence[Observation], rows: list[int], columns: list[int]) -> None:
    bins: Array = np.array([seen.stats.exponents for seen in part], dtype=np.float64)
    amax = np.array([seen.stats.amax for seen in part])
    nonfinite = np.array([seen.stats.infinities + seen.stats.nans for seen in part])
    count = np.array([seen.stats.count for seen in part])
    found = {
        "nonzero": bins.sum(1),
        "lost": count_below(bins, amax, limits.zero),
        "small": count_below(bins, amax, limits.normal),
        "count": count,
        "zeros": np.array([seen.stats.zeros for seen in part]),
        "saturated": count_beyond(bins, amax, limits.top) + nonfinite,
    }
    np.add.at(sums.shares, (rows, columns), np.stack([found[name] for name in MEASURES], axis=1))
    scales = np.array([seen.scale if 0 < seen.scale < math.inf else 1.0 for seen in part])
    np.maximum.at(sums.largest, rows, amax / scales)
    octaves = np.concatenate([np.repeat(bins[:, :1] / _SUBNORMAL, _SUBNORMAL, axis=1), bins[:, 1:]], axis=1)
    shifts = np.clip(np.rint(np.log2(scales)).astype(int), -MOVED, MOVED)
    for shift in np.unique(shifts):
        chosen = np.flatnonzero(shifts == shift)
        first = MOVED - shift
        np.add.at(sums.histogram[:, first : first + octaves.shape[1]], np.asarray(rows)[chosen], octaves[chosen])
