"""A benchmark as one table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import mean, stdev

from rich.console import Group
from rich.table import Table
from rich.text import Text

from halfstep.measurements import BenchResult, BenchRun
from halfstep.report.recommend import recommendation
from halfstep.report.tables import ABSENT, MIB, plain_table

Column = tuple[str, Callable[[BenchRun], str]]  # the header, and how a run fills it

BEFORE: tuple[Column, ...] = (
    ("step ms\n(quartiles)", lambda run: _step(run)),
    ("speed\nx O0", lambda run: _ratio(run.vs_o0)),
    ("speed x\ntorch.amp", lambda run: _ratio(run.vs_amp)),
    ("peak\nMiB", lambda run: ABSENT if run.peak_bytes is None else f"{run.peak_bytes / MIB:,.1f}"),
    ("bytes a\nparameter", lambda run: _bytes(run.bytes_per_parameter)),
    ("train\nloss", lambda run: over_seeds(run.train_loss)),
)
AFTER: tuple[Column, ...] = (
    ("skipped\nsteps", lambda run: _range(run.skipped)),
    ("final\nscale", lambda run: _range(run.scale)),
)


def bench_table(result: BenchResult, *, width: int) -> Group:
    """Returns a table with a row for each run, and notes below it."""
    runs = [run for run in result.runs if run.error is None]
    columns = (*BEFORE, *_validation(result), *AFTER)
    cells = {header: [header, *(fill(run) for run in runs)] for header, fill in columns}
    names = ["", *(run.name for run in runs)]
    tables = [_table(names, {header: cells[header] for header in group}) for group in _fitting(names, cells, width)]
    parts = [part for table in tables for part in (table, Text())]
    return Group(Text(_title(result)), *parts, *(Text(line) for line in _below(result)))


def _fitting(names: Sequence[str], cells: Mapping[str, Sequence[str]], width: int) -> Iterator[list[str]]:
    """Yields the column headers in groups, one for each table; the columns of a group fit into `width` characters."""
    group: list[str] = []
    taken = _width(names)
    for header, column in cells.items():
        if group and taken + _width(column) > width:
            yield group
            group, taken = [], _width(names)
        group.append(header)
        taken += _width(column)
    yield group


def _width(column: Sequence[str]) -> int:
    return 2 + max(len(line) for cell in column for line in cell.split("\n"))


def _table(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    return plain_table(["", *cells], list(zip(names, *cells.values(), strict=True))[1:], words=[""])


def over_seeds(values: Sequence[float], digits: int = 4) -> str:
    """Returns the mean over seeds as text, with the standard deviation if there are several seeds.

    If some values are not finite, returns how many of them instead, such as "1 of 3 diverged".

    >>> over_seeds([1.0, 3.0]), over_seeds([2.0]), over_seeds([])
    ('2.0000 ± 1.4142', '2.0000', '-')
    """
    if not values:
        return ABSENT
    lost = sum(not isfinite(value) for value in values)
    if lost:
        return f"{lost} of {len(values)} diverged"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def _validation(result: BenchResult) -> Iterator[Column]:
    for name in dict.fromkeys(name for run in result.runs for name in run.validation):
        yield f"validation\n{name}", lambda run, name=name: over_seeds(run.validation.get(name, ()))  # type: ignore[misc]


def _step(run: BenchRun) -> str:
    if run.step_ms is None:
        return ABSENT
    return f"{run.step_ms.median:.1f} ({run.step_ms.low:.1f}-{run.step_ms.high:.1f})"


def _bytes(parts: Mapping[str, float]) -> str:
    return f"{sum(parts.values()):.2f}" if parts else ABSENT


def _ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _title(result: BenchResult) -> str:
    seeds = f"seed {result.seeds[0]}" if len(result.seeds) == 1 else f"{len(result.seeds)} seeds"
    return (
        f"{result.workload}: {result.parameters:,} parameters, {result.steps} steps, {seeds}; "
        f"{result.machine.device}, {result.machine.processor}, {result.machine.threads} threads"
    )


def _below(result: BenchResult) -> Iterator[str]:
    if not result.complete:
        yield "Interrupted: the table shows what was measured so far, and losses after the steps made so far."
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
    yield from result.notes
    yield recommendation([result], losses=True)
