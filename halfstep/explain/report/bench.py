"""A benchmark as one table for the terminal, and the level that it recommends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import exp, inf, isfinite, log
from statistics import fmean, stdev

from rich.console import RenderableType
from rich.text import Text

from halfstep.explain.report.tables import ABSENT, MIB, Columns, Shown, cells, numbered, table
from halfstep.measurements import BenchResult, BenchRun

BEFORE: Columns = {
    "step ms\n(quartiles)": lambda run: (ms := run.step_ms) and f"{ms.median:.1f} ({ms.low:.1f}-{ms.high:.1f})",
    "speed\nx O0": lambda run: _ratio(run.vs_o0),
    "speed x\ntorch.amp": lambda run: _ratio(run.vs_amp),
    "peak\nMiB": lambda run: None if run.peak_bytes is None else f"{run.peak_bytes / MIB:,.1f}",
    "bytes a\nparameter": lambda run: f"{sum(parts.values()):.2f}" if (parts := run.bytes_per_parameter) else None,
    "gradient\nerror": lambda run: None if run.gradient_error is None else f"{run.gradient_error:.1%}",
    "train\nloss": lambda run: over_seeds(run.train_loss),
}
AFTER: Columns = {"skipped\nsteps": lambda run: _span(run.skipped), "final\nscale": lambda run: _span(run.scale)}


def bench_table(result: BenchResult, *, width: int = 120) -> Shown:
    """Returns a table with a row for each run, and notes below it."""
    runs = [run for run in result.runs if run.error is None]
    figures = dict.fromkeys(name for run in result.runs for name in run.validation)
    judged = {
        f"validation\n{name}": lambda run, name=name: over_seeds(run.validation.get(name, ())) for name in figures
    }
    columns: Columns = {**BEFORE, **judged, **AFTER}
    if result.within is None:
        columns = {header: fill for header, fill in columns.items() if header != "gradient\nerror"}
    names = ["", *(run.name for run in runs)]
    filled = zip(*cells(runs, columns), strict=True) if runs else [()] * len(columns)
    parts: list[RenderableType] = []
    for group in _fitting(names, [(header, *column) for header, column in zip(columns, filled, strict=True)], width):
        header, *rows = zip(names, *group, strict=True)
        parts += [table(rows, numbered(header), words=[""]), Text()]
    return Shown(Text(_title(result)), *parts, *map(Text, _below(result)))


def _fitting(names: Sequence[str], columns: Iterable[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Yields the columns in groups, one for each table; with the names, a group fits into `width` characters."""
    group: list[Sequence[str]] = []
    for column in columns:
        if group and sum(map(_width, (names, *group, column))) > width:
            yield group
            group = []
        group.append(column)
    yield group


def _width(column: Sequence[str]) -> int:
    return 2 + max(len(line) for cell in column for line in cell.split("\n"))


def over_seeds(values: Sequence[float]) -> str:
    """Returns the mean over seeds as text, with the standard deviation if there are several, or how many diverged.

    >>> over_seeds([1.0, 3.0]), over_seeds([2.0]), over_seeds([])
    ('2.0000 ± 1.4142', '2.0000', '-')
    """
    if lost := sum(not isfinite(value) for value in values):
        return f"{lost} of {len(values)} diverged"
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "") if values else ABSENT


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _span(values: Sequence[float]) -> str | None:
    return "-".join(f"{each:g}" for each in dict.fromkeys((min(values), max(values)))) if values else None


def _title(result: BenchResult) -> str:
    seeds = f"seed {result.seeds[0]}" if len(result.seeds) == 1 else f"{len(result.seeds)} seeds"
    machine = result.machine
    return (
        f"{result.workload}: {result.parameters:,} parameters, {result.steps} steps, {seeds}; "
        f"{machine.device}, {machine.processor}, {machine.threads} thread{'s' * (machine.threads != 1)}"
    )


def _below(result: BenchResult) -> Iterator[str]:
    for run in result.runs:
        if run.error is not None:
            yield f"{run.name}: left out; {run.error}"
        elif run.slow is not None:
            count = f"{len(run.times_ms)} step{'' if len(run.times_ms) == 1 else 's'}"
            yield f"{run.name}: timed over {count} and not trained, as a step takes {run.slow:.1f} times that of O0."
    turn = "one step" if result.turn == 1 else f"{result.turn} steps"
    cold = "" if result.turn == 1 else ", nor is the first fifth of a turn"
    clock = (
        "; CPU time, as one thread does all" if result.machine.threads == 1 and result.machine.device == "cpu" else ""
    )
    yield (
        f"Speed: how many times as fast, as the median over rounds in which every run makes {turn} in turn"
        f" (the first {result.warmup} steps are not timed{cold}{clock})."
    )
    yield f"Peak memory: {result.peak_method}, weights included. Bytes per parameter: memory held between two steps."
    yield from result.remarks()
    yield from headlines([result], losses=True)


# ---- what to train at

ALIKE, SAME_LOSS = 0.05, 0.02  # differences that the sentence does not speak of
JUDGED = 50  # steps from which on a loss is no chance
WORSE_LOSS = 0.1  # of O0's loss after the same steps: what ends higher is not recommended
NOTHING = "Nothing to recommend: no other level could be compared with O0 throughout."

WITHIN = 0.25  # of the noise of batches: how far a gradient may be off where nothing else is asked for
UNJUDGED = "No run was measured to the end whose gradient error stays under {within:.0%} of the noise of batches."

LevelRun = tuple[BenchResult, BenchRun]


def headlines(results: Sequence[BenchResult], *, losses: bool = False) -> Iterator[str]:
    """Yields what to train with, and the cheapest run whose gradient is close to fp32's, if that was measured."""
    yield recommendation(results, losses=losses)
    within = results[0].within if results else None
    if within is not None:
        name = cheapest(results, within)
        seen = (run for result in results for run in result.runs if run.name == name)
        worst = max((run.gradient_error or 0.0 for run in seen), default=0.0)
        best = f"Cheapest with a gradient error under {within:.0%} of the noise of batches: {name}, {worst:.1%}."
        yield UNJUDGED.format(within=within) if name is None else best


def cheapest(results: Sequence[BenchResult], within: float) -> str | None:
    """Returns the name of the fastest run whose gradient error is below `within` at all points; None if none is."""
    runs = [run for result in results for run in result.runs if not run.peer]
    times: dict[str, float] = {}
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        if all(run.error is None and run.gradient_error is not None and run.gradient_error < within for run in own):
            times[name] = fmean(log(run.step_ms.median) if run.step_ms else inf for run in own)
    return min(times, key=lambda name: times[name], default=None)


def recommendation(results: Sequence[BenchResult], *, losses: bool = False) -> str:
    """Returns one sentence that recommends what to train with, and why; with `losses`, of one result, the final ones.

    Rows with the same name, such as "O1 bf16", are taken together over all results. The fastest O0 row is compared with
    the fastest other row, and recommended unless the other is clearly faster. Left out are rows with a loss that is not
    finite or, after `JUDGED` steps, clearly higher than O0's, and points where one ran out of memory. An O3 row with
    fewer steps, whose loss cannot be judged yet, is recommended only if there is no other choice.
    """
    rows = _compared(results)
    if not rows:
        return _without_o0(results)
    speeds = {name: exp(fmean(log(run.vs_o0 or 1.0) for _, run in seen)) for name, seen in rows.items()}
    early = {run.name for seen in rows.values() for at, run in seen if run.level == "O3" and _steps(at, run) < JUDGED}
    best = max(list(speeds)[1:], key=lambda name: (name not in early, speeds[name]))
    full = max((name for name in speeds if name.split()[0] == "O0" and name != best), key=lambda name: speeds[name])
    pairs = [(run, other) for (_, run), (_, other) in zip(rows[best], rows[full], strict=True)]
    fast = _range([(run.vs_o0 or 1.0) / (other.vs_o0 or 1.0) for run, other in pairs])
    shares = [share for pair in pairs if (share := memory_share(*pair)) is not None]
    costs = f", with {_range(shares)} of its peak memory" if shares else ""
    costs += (_end(*pairs[0]) if losses else "") + _ran_out(results, best, full)
    speed = speeds[best] / speeds[full]
    one = any(len(run.times_ms) == 1 for pair in pairs for run in pair)
    few = " One timed step says little: give it more --seconds." if one else ""
    if speed >= 1 + ALIKE:
        return f"Train at {best}: {fast} times as fast as {full}{costs}.{few}"
    slower = f"about as fast as {full}{costs}"
    if speed < 1 - ALIKE:
        (machine, low) = rows[best][0][0].machine, rows[best][0][1].low
        units = "" if low in machine.fast else f" (this {machine.device} has no fast {low} units)"
        slower = f"{fast} times as fast as {full}{units}{costs}"
    where = " if its memory is available" if min(shares, default=1.0) < 1 else ""
    return f"Train at {full}{where}: the fastest other, {best}, is {slower}.{few}"


def _compared(results: Sequence[BenchResult]) -> dict[str, list[LevelRun]]:
    """Returns the rows that can be compared, O0 first: a dict from a row's name to its (result, run) pairs."""
    failed = {run.name for result in results for run in result.runs if not (run.out_of_memory or _learns(result, run))}
    judged = [result for result in results if any(_beside(result, run) for run in result.runs)]
    rows: dict[str, list[LevelRun]] = {}
    for result in judged:
        full = baseline(result)
        for run in result.runs:
            if run == full or (_beside(result, run) and run.name not in failed):
                rows.setdefault(run.name, []).append((result, run))
    whole = {name: seen for name, seen in rows.items() if len(seen) == len(judged)}
    return whole if len(whole) > 1 else {}


def _beside(result: BenchResult, run: BenchRun) -> bool:
    full = baseline(result)
    if full is None or full.error is not None or run == full or run.peer or run.vs_o0 is None:
        return False
    return _learns(result, run)


def _without_o0(results: Sequence[BenchResult]) -> str:
    runs = [run for result in results for run in result.runs if not run.peer]
    fulls = [baseline(result) for result in results]
    speeds = {
        name: fmean(log(run.step_ms.median) for run in runs if run.name == name and run.step_ms)
        for name in dict.fromkeys(run.name for run in runs)
        if all(run.step_ms for run in runs if run.name == name)
        and all(_learns(result, run) for result in results for run in result.runs if run.name == name)
    }
    if speeds and all(full is not None and full.out_of_memory for full in fulls):
        return f"Train at {min(speeds, key=lambda name: speeds[name])}: the fastest that fits; O0 ran out of memory."
    return NOTHING


def _ran_out(results: Sequence[BenchResult], best: str, full: str) -> str:
    out = [{run.name for run in result.runs if run.out_of_memory} & {best, full} for result in results]
    whose = {"both": {best, full}, f"{full} alone": {full}, f"{best} alone": {best}}
    counts = {who: out.count(names) for who, names in whose.items()}
    return "".join(f"; at {n} of {len(out)} points {who} ran out of memory" for who, n in counts.items() if n)


def memory_share(run: BenchRun, full: BenchRun | None) -> float | None:
    """Returns a run's peak memory divided by that of O0; None if either is unknown."""
    return None if not full or not full.peak_bytes or run.peak_bytes is None else run.peak_bytes / full.peak_bytes


def baseline(result: BenchResult) -> BenchRun | None:
    """Returns the first O0 run of a result, with which its other runs are compared; None if there is no O0 run."""
    return next((run for run in result.runs if run.level == "O0"), None)


def _learns(result: BenchResult, run: BenchRun) -> bool:
    """Tells whether a run completed with finite losses that are not clearly higher than O0's."""
    full, ends = baseline(result), _ends(run)
    if run.error is not None or not all(map(isfinite, (*run.losses, *ends))):
        return False
    if full is None or not ends or not _ends(full) or _steps(result, run) < JUDGED:
        return True
    wanted = fmean(_ends(full))
    return fmean(ends) <= wanted + WORSE_LOSS * abs(wanted)


def _steps(result: BenchResult, run: BenchRun) -> int:
    return len(run.losses) or result.steps


def _ends(run: BenchRun) -> Sequence[float]:
    return run.validation.get("loss") or run.train_loss


def _end(run: BenchRun, full: BenchRun) -> str:
    """Returns text that compares a run's final loss with that of the O0 run `full`; "" if one of them is unknown."""
    if not _ends(run) or not _ends(full):
        return ""
    mine, theirs = fmean(_ends(run)), fmean(_ends(full))
    apart = mine - theirs
    word = "the same" if abs(apart) <= SAME_LOSS * abs(theirs) else "a higher" if apart > 0 else "a lower"
    return f"; it ended at {word} loss ({mine:.3f} against {theirs:.3f})"


def _range(values: Sequence[float]) -> str:
    """Returns the smallest and the largest value as text; only one if both are the same when rounded.

    >>> _range([1.5, 2.25]), _range([0.5, 0.501])
    ('1.50 to 2.25', '0.50')
    """
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
