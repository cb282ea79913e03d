"""What a benchmark recommends: one sentence with the figures that say so."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log
from statistics import fmean

from halfstep.measurements import BenchResult, BenchRun

ALIKE, SAME_LOSS = 0.05, 0.02  # differences that the sentence does not speak of
JUDGED = 50  # steps from which on a loss is no chance
WORSE_LOSS = 0.1  # of O0's loss after the same steps: what ends higher is not recommended
NOTHING = "Nothing to recommend: no other level trained beside O0 throughout."

Row = tuple[BenchResult, BenchRun]


def recommendation(results: Sequence[BenchResult], *, losses: bool = False) -> str:
    """Returns one sentence: what to train with here, and the figures that say so, over all results.

    It is the fastest level whose loss stayed finite and, where it was trained long enough to tell, near that of O0.
    `losses` adds at which loss it ended; of one result.
    """
    rows: dict[str, list[Row]] = {}
    for result in results:
        for run in result.runs:
            if run.vs_o0 is not None and run.level != "O0" and not run.peer and _learns(result, run):
                rows.setdefault(run.name, []).append((result, run))
    whole = {name: seen for name, seen in rows.items() if len(seen) == len(results)}
    if not whole:
        return NOTHING
    speeds = {name: exp(fmean(log(run.vs_o0 or 1.0) for _, run in seen)) for name, seen in whole.items()}
    best = max(speeds, key=lambda name: speeds[name])
    fast = _range([run.vs_o0 or 1.0 for _, run in whole[best]])
    shares = [share for row in whole[best] if (share := memory_share(*row)) is not None]
    costs = f", with {_range(shares)} of its peak memory" if shares else ""
    costs += _end(*whole[best][0]) if losses else ""
    if speeds[best] >= 1 + ALIKE:
        return f"Train at {best}: {fast} times as fast as O0{costs}."
    slower = f"about as fast as O0{costs}"
    if speeds[best] < 1 - ALIKE:
        slower = f"{fast} times as fast as O0{_units(*whole[best][0])}{costs}"
    where = " where its memory is there" if min(shares, default=1.0) < 1 else ""
    return f"Train at O0{where}: the fastest other, {best}, is {slower}."


def memory_share(result: BenchResult, run: BenchRun) -> float | None:
    """Returns a run's peak memory over that of O0."""
    full = _baseline(result)
    if full is None or not full.peak_bytes or run.peak_bytes is None:
        return None
    return run.peak_bytes / full.peak_bytes


def _baseline(result: BenchResult) -> BenchRun | None:
    return next((run for run in result.runs if run.level == "O0" and not run.compiled), None)


def _learns(result: BenchResult, run: BenchRun) -> bool:
    """Tells whether a run went through, to a finite loss, and if it is long enough to say so one like that of O0."""
    full, ends = _baseline(result), _ends(run)
    if full is None or run.error is not None or not all(map(isfinite, (*run.losses, *ends))):
        return False
    if not ends or not _ends(full) or (len(run.losses) or result.steps) < JUDGED:
        return True
    wanted = fmean(_ends(full))
    return fmean(ends) <= wanted + WORSE_LOSS * abs(wanted)


def _ends(run: BenchRun) -> Sequence[float]:
    """Returns the loss at which each seed ended: in validation, or else in training."""
    return run.validation.get("loss") or run.train_loss


def _end(result: BenchResult, run: BenchRun) -> str:
    """Returns at which loss a run ended beside O0; a difference of less than 2% is none."""
    full = _baseline(result)
    if full is None or not _ends(run) or not _ends(full):
        return ""
    mine, theirs = fmean(_ends(run)), fmean(_ends(full))
    apart = mine - theirs
    word = "the same" if abs(apart) <= SAME_LOSS * abs(theirs) else "a higher" if apart > 0 else "a lower"
    return f"; it ended at {word} loss ({mine:.3f} against {theirs:.3f})"


def _units(result: BenchResult, run: BenchRun) -> str:
    return "" if run.low in result.machine.fast else f" (this {result.machine.device} has no fast {run.low} units)"


def _range(values: Sequence[float]) -> str:
    """Returns the smallest and the largest value, once where they read alike.

    >>> _range([1.5, 2.25]), _range([0.5, 0.501])
    ('1.50 to 2.25', '0.50')
    """
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
