"""Compares a benchmark with a saved one: which rows are slower or faster beyond chance, and which use more memory.

A row is a level or torch.amp in one format, see `Entry`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import NormalDist, mean, median, stdev

import msgspec

from halfstep.bench.results import read_bench, read_sweep
from halfstep.bench.tally import settings_of
from halfstep.errors import WorkloadError
from halfstep.measurements import BenchChange, BenchResult, BenchRun, Point, Sweep
from halfstep.workloads.workload import Workload

BLOCKS, FEWEST = 10, 12  # parts that a run is cut into, and steps without which there is no telling
_BLOCK = 3  # steps of a part at least
LEAST = 0.025  # of the time: what two processes of the same code may differ by, as memory lies elsewhere
_UNSEEN = 1.5  # times the error that blocks of one process show: what processes differ by comes on top
_FEW = 3  # processes, of which their own scatter tells more than that of the blocks in one
_MEMORY = 0.01


def load_saved(path: Path) -> BenchResult:
    """Reads a file that `halfstep bench --json FILE` wrote.

    Raises:
        WorkloadError: the file does not exist, or holds something else.
    """
    try:
        saved = read_bench(path)
    except OSError as error:
        raise WorkloadError(f"--against {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise _no_result(path, str(error)) from None
    _check_times(path, saved)
    return saved


def load_saved_sweep(path: Path) -> Sweep:
    """Reads a sweep (a benchmark of several models or batch sizes) from a file that an earlier run wrote with --json.

    Raises:
        WorkloadError: the file does not exist, does not hold a sweep, or holds one that has no measurements yet.
    """
    saved = read_sweep(path, "--against")
    if saved is None or not saved.points:
        raise WorkloadError(
            f"--against {path} holds no measured sweep point; pass a file that a sweep wrote with --json"
        )
    for point in saved.points:
        _check_times(path, point.result)
    return saved


def _check_times(path: Path, saved: BenchResult) -> None:
    for run in saved.runs:
        if not all(0 < each < math.inf for each in run.times_ms):
            raise _no_result(path, f"run {run.name!r} has a step time that is not positive and finite")


def _no_result(path: Path, why: str) -> WorkloadError:
    return WorkloadError(
        f"--against {path} is not a benchmark result of this halfstep version ({why}); pass a file that "
        "`halfstep bench --json FILE` wrote"
    )


def check_comparable(saved: BenchResult, workload: str, settings: Mapping[str, object]) -> None:
    """Raises an error, before anything is measured, if a saved benchmark measured something else.

    Raises:
        WorkloadError: the workload or its settings differ.
    """
    if saved.workload != workload:
        raise WorkloadError(
            f"the --against file has measured workload {saved.workload!r}, but this run measures {workload!r}; run the "
            "same workload"
        )
    before, now = ({key: str(value) for key, value in each.items()} for each in (saved.settings, settings))
    differs = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if differs:
        said = ", ".join(f"{key} is {before.get(key, '-')} in the file, {now.get(key, '-')} now" for key in differs)
        raise WorkloadError(f"the --against file was measured with other settings: {said}; use the same ones")


def check_comparable_sweep(saved: Sweep, points: Sequence[tuple[str, Workload]]) -> None:
    """Raises an error if a saved sweep cannot be compared with `points`, pairs of model name and workload.

    At least one point (model and batch size) must be in both, and each point that is in both must have the same
    settings.

    Raises:
        WorkloadError: says what differs.
    """
    before = _by_place(saved)
    both = [(before[model, work.batch], work) for model, work in points if (model, work.batch) in before]
    if not both:
        there, here = ", ".join(map(_place, before)), ", ".join(_place((model, work.batch)) for model, work in points)
        raise WorkloadError(
            f"the --against file has {there}, but this sweep has {here}; at least one model and batch size must be in "
            "both"
        )
    for point, workload in both:
        check_comparable(point.result, workload.name, settings_of(workload))


def compare_sweeps(saved: Sweep, now: Sweep) -> tuple[BenchChange, ...]:
    """Returns the changes of all rows between two sweeps; each change is named by model, batch size and row.

    The threshold for "slower" and "faster" grows with the number of rows. If nothing has changed, the probability is
    95% that no row of the whole sweep is reported as slower or faster. While `now` is incomplete, points that it has
    not measured yet are left out.
    """
    before, after = _by_place(saved), _by_place(now)
    whole = len(now.points) == now.total
    rows = sum(len(point.result.runs) for place, point in after.items() if place in before)
    found: list[BenchChange] = []
    for place in dict.fromkeys([*after, *(before if whole else ())]):
        old, new = ((points[place].result if place in points else None) for points in (before, after))
        some = old or new
        assert some is not None  # it is in one of them
        none = replace(some, runs=())
        changes = compare(old or none, new or none, rows=max(1, rows))
        found += [replace(change, name=f"{_place(place)}, {change.name}") for change in changes]
    return tuple(found)


_Place = tuple[str, int]


def _by_place(sweep: Sweep) -> dict[_Place, Point]:
    return {(point.model, point.batch): point for point in sweep.points}


def _place(place: _Place) -> str:
    return "{}, batch {}".format(*place)


def compare(saved: BenchResult, result: BenchResult, *, rows: int = 1) -> tuple[BenchChange, ...]:
    """Returns the changes from `saved` to `result`: one for each row that is in either of them.

    Rows that failed in `saved` and are not in `result` get no change.

    A row's step times are divided by those of a yardstick, so that the speed of the machine as a whole cancels out. The
    yardstick is another row whose steps alternate with the row's own in the same process: torch.amp, if possible in the
    same format, otherwise O0. If the results have no common yardstick, times are compared in milliseconds. `rows` is
    the number of rows in all comparisons of a run: if nothing has changed, the probability is 95% that none of these
    rows is reported as slower or faster.
    """
    before, now = ({run.name: run for run in each.runs} for each in (saved, result))
    if saved.peak_method != result.peak_method:  # what was counted another way is not more or less
        before = {name: replace(run, peak_bytes=None) for name, run in before.items()}
    names = [*now, *(name for name, run in before.items() if name not in now and run.error is None)]
    return tuple(_change(name, before, now, rows) for name in names)


Rows = Mapping[str, BenchRun]


def _change(name: str, before: Rows, now: Rows, rows: int) -> BenchChange:
    if name not in before:
        return BenchChange(name, "new", None)
    if name not in now:
        return BenchChange(name, "gone", None)
    old, new = before[name], now[name]
    if new.error is not None:
        return BenchChange(name, "failed" if old.error is None else "failed before too", None)
    if _finite(old) and not _finite(new):
        return BenchChange(name, "diverged", None)
    yardstick = _yardstick(name, before, now)
    pairs = [_ratios(runs, name, yardstick) for runs in (before, now)]
    grown = None
    if old.peak_bytes and new.peak_bytes:
        share = new.peak_bytes / old.peak_bytes
        grown = share if abs(share - 1) > _MEMORY else 1.0
    if min(map(len, pairs)) < FEWEST:
        return BenchChange(name, "too few steps", yardstick, memory=grown)
    first, second = (_centre(values, runs[name].processes) for values, runs in zip(pairs, (before, now), strict=True))
    difference = second.value - first.value
    freedom, unit = first.freedom + second.freedom, math.hypot(first.error, second.error)
    error = _quantile(freedom) * unit
    time, low, high = (math.exp(each) for each in (difference, difference - error, difference + error))
    changed = abs(difference) > max(LEAST, _quantile(freedom, rows) * unit)
    verdict = "alike" if not changed else "slower" if difference > 0 else "faster"
    return BenchChange(name, verdict, yardstick, time, low, high, grown)


def _finite(run: BenchRun) -> bool:
    return all(map(math.isfinite, (*run.train_loss, *run.validation.get("loss", ()))))


def _yardstick(name: str, before: Rows, now: Rows) -> str | None:
    """Returns the name of the row by which the times of row `name` are divided, or None if there is no suitable row.

    Such a row must be in both results. torch.amp in the same format is preferred, then torch.amp in another, then O0.
    """
    both = [key for key in now if key in before and key != name and len(now[key].times_ms) >= FEWEST]
    peers = [key for key in both if now[key].peer and not now[name].peer]
    alike = [key for key in peers if now[key].low == now[name].low]
    baseline = [key for key in both if now[key].level == "O0" and not now[key].peer]
    return next(iter([*alike, *peers, *baseline]), None)


def _ratios(rows: Rows, name: str, yardstick: str | None) -> list[float]:
    """Returns log(row's time / yardstick's time) for each step; without a yardstick the log of the milliseconds."""
    times = rows[name].times_ms
    if yardstick is None:
        return [math.log(each) for each in times]
    return [math.log(a / b) for a, b in zip(times, rows[yardstick].times_ms, strict=False)]


@dataclass(frozen=True)
class _Centre:
    """The mean of some measurements, its standard error, and the degrees of freedom of that error."""

    value: float
    error: float
    freedom: int


def _centre(values: Sequence[float], processes: Sequence[int]) -> _Centre:
    """Returns the mean of `values` and its standard error; `processes` says how many values each process measured.

    With enough processes, the error comes from the differences between their means. With few processes, it comes from
    the differences between blocks of steps.
    """
    parts = [values[a:b] for a, b in pairwise(accumulate(processes, initial=0))]
    centres = [mean(_blocks(part)) for part in parts if len(part) >= _BLOCK]
    if len(centres) >= _FEW:
        return _Centre(mean(centres), stdev(centres) / math.sqrt(len(centres)), len(centres) - 1)
    medians = _blocks(values)
    return _Centre(mean(medians), _UNSEEN * stdev(medians) / math.sqrt(len(medians)), len(medians) - 1)


def _blocks(values: Sequence[float]) -> list[float]:
    """Splits values of consecutive steps into at most `BLOCKS` blocks and returns the median of each.

    A disturbance that slows down the machine lasts for several steps. So the times of neighbouring steps are not
    independent of each other, but the medians of blocks are.
    """
    count = min(BLOCKS, len(values) // _BLOCK)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [median(values[a:b]) for a, b in pairwise(edges)]


def _quantile(freedom: int, rows: int = 1) -> float:
    """Returns how many standard errors a difference must exceed to count as a change and not as chance.

    If nothing has changed, the probability is 95% that none of `rows` differences exceeds this threshold. It is a
    quantile of Student's t with `freedom` degrees of freedom, from a series expansion (Abramowitz and Stegun, 26.7.5)
    that is accurate to 5% from 6 degrees on.

    >>> [round(_quantile(freedom), 2) for freedom in (4, 8, 18, 1000)]
    [2.77, 2.31, 2.1, 1.96]
    """
    z = NormalDist().inv_cdf(1 - 0.025 / rows)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))
