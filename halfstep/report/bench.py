"""A benchmark as one table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from statistics import mean, stdev

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfstep.records import BenchResult, BenchRun

MIB = 2**20
ABSENT = "-"

# header, and how a run fills the column
COLUMNS: tuple[tuple[str, Callable[[BenchRun], str]], ...] = (
    ("step ms\n(quartiles)", lambda run: _step(run)),
    ("speed\nx O0", lambda run: _ratio(run.vs_o0)),
    ("speed x\ntorch.amp", lambda run: _ratio(run.vs_amp)),
    ("peak\nMiB", lambda run: ABSENT if run.peak_bytes is None else f"{run.peak_bytes / MIB:,.1f}"),
    (
        "bytes a\nparameter",
        lambda run: f"{sum(run.bytes_per_parameter.values()):.2f}" if run.bytes_per_parameter else ABSENT,
    ),
    ("train\nloss", lambda run: over_seeds(run.train_loss)),
)
LAST_COLUMNS: tuple[tuple[str, Callable[[BenchRun], str]], ...] = (
    ("skipped\nsteps", lambda run: _range(run.skipped)),
    ("final\nscale", lambda run: _range(run.scale)),
)


def bench_table(result: BenchResult) -> Group:
    """Returns what a benchmark measured: a row a run, and below it what the figures mean and why a run is missing."""
    columns = (*COLUMNS, *_validation_columns(result), *LAST_COLUMNS)
    table = Table(title=_title(result), title_justify="left", caption_justify="left", box=None, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for header, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for run in result.runs:
        if run.error is None:
            table.add_row(escape(run.name), *(fill(run) for _, fill in columns))
    return Group(table, *(Text(line) for line in _below(result)))


def over_seeds(values: Sequence[float], digits: int = 4) -> str:
    """Returns the mean over seeds, with the standard deviation where there are several, or how many seeds diverged.

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


def _validation_columns(result: BenchResult) -> Iterator[tuple[str, Callable[[BenchRun], str]]]:
    figures = list(dict.fromkeys(name for run in result.runs for name in run.validation))
    for name in figures:
        yield f"validation\n{name}", lambda run, name=name: over_seeds(run.validation.get(name, ()))  # type: ignore[misc]


def _step(run: BenchRun) -> str:
    if run.step_ms is None:
        return ABSENT
    return f"{run.step_ms.median:.1f} ({run.step_ms.low:.1f}-{run.step_ms.high:.1f})"


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
        f"{escape(result.workload)}: {result.parameters:,} parameters, {result.steps} steps, {seeds}; "
        f"{escape(result.machine.device)}, {escape(result.machine.processor)}, {result.machine.threads} threads"
    )


def _below(result: BenchResult) -> Iterator[str]:
    if not result.complete:
        yield "Interrupted: what was measured so far; losses are those of the steps that were made."
    for run in result.runs:
        if run.error is not None:
            yield f"{run.name}: not run; {run.error}"
    yield (
        "Speed: how many times as fast, the median over rounds in which every run makes a step in turn"
        f" (the first {result.warmup} rounds are not timed)."
    )
    yield f"Peak memory: {result.peak_method}, weights included. Bytes a parameter: what stays between two steps."
    yield from result.notes
