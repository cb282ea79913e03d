"""Compares the logs that the processes of one run wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from halfstep.errors import LogError
from halfstep.kinds import Kind
from halfstep.records import Verdict
from halfstep.report.run import Run, shown

HEADERS = ("process", "log", "steps", "skipped", "loss scale", "first not finite")


@dataclass(frozen=True)
class ProcessRow:
    """What one process logged; `overflow` is the first step and place with a value that is not finite, or None."""

    process: int
    run: Run
    steps: str
    skipped: int
    scale: float | None
    overflow: tuple[int, str] | None

    def cells(self) -> tuple[str, ...]:
        """Returns the row's cells, in the order of `HEADERS`."""
        scale = "" if self.scale is None else f"{self.scale:g}"
        seen = "" if self.overflow is None else f"step {self.overflow[0]:,}: {self.overflow[1]}"
        return str(self.process), shown(self.run.path), self.steps, f"{self.skipped:,}", scale, seen


def rows_of(runs: Sequence[Run]) -> tuple[ProcessRow, ...]:
    """Returns a row for each process, in the order of their numbers; `runs` has one log for each process."""
    longest = max(runs, key=lambda run: len(run.steps))
    for run in runs:
        if run is not longest and (why := _apart(longest, run)):
            raise LogError(
                f"{longest.path} and {run.path} are not of one run: {why}; pass one log of each process of the same run"
            )
    rows = [_row(run, index if run.process is None else run.process) for index, run in enumerate(runs)]
    numbers = [row.process for row in rows]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        names = " and ".join(str(row.run.path) for row in rows if row.process == twice)
        raise LogError(f"{names} are both of process {twice}; pass one log of each process of a run")
    return tuple(sorted(rows, key=lambda row: row.process))


def first_overflow(rows: Sequence[ProcessRow]) -> str | None:
    """Returns which process first logged a value that is not finite, and where; None if no process did."""
    seen = sorted((row.overflow[0], row.process, row.overflow[1]) for row in rows if row.overflow)
    if not seen:
        return None
    earliest = [each for each in seen if each[0] == seen[0][0]]
    said = "; ".join(f"process {process}: {place}" for _, process, place in earliest)
    return f"first not finite, at step {earliest[0][0]:,}: {said}"


def table_of(rows: Sequence[ProcessRow]) -> Table:
    """Returns the rows as a table for the terminal."""
    table = Table(*HEADERS, box=None, padding=(0, 1))
    for row in rows:
        table.add_row(*row.cells())
    return table


def _apart(first: Run, second: Run) -> str | None:
    """Returns why two logs cannot be of one run, None if they can."""
    if first.path.resolve() == second.path.resolve():
        return "they are the same file"
    if first.plan != second.plan:
        return "their plans differ"
    if first.modules != second.modules:
        return "their modules differ"
    begun = [min(each.start for each in run.processes) for run in (first, second)]
    ended = [max(each.end for each in run.processes) for run in (first, second)]
    if max(begun) > min(ended):
        return "one had ended before the other began"
    mine, theirs = ({each.step: each for each in run.steps} for run in (first, second))
    if mine and theirs and min(mine) != min(theirs):
        return f"one begins with step {min(mine):,}, the other with step {min(theirs):,}"
    for step in sorted(mine.keys() & theirs.keys()):
        if mine[step].skipped != theirs[step].skipped:
            return f"only one skipped step {step:,}"
        if mine[step].scale != theirs[step].scale:
            return f"step {step:,} had a loss scale of {mine[step].scale:g} in one, {theirs[step].scale:g} in the other"
    return None


def _row(run: Run, process: int) -> ProcessRow:
    steps = run.steps
    return ProcessRow(
        process,
        run,
        f"{steps[0].step:,} to {steps[-1].step:,}" if steps else "none",
        sum(values.skipped for values in steps),
        steps[-1].scale if steps else None,
        min(_overflows(run), key=lambda seen: seen[0], default=None),
    )


def _overflows(run: Run) -> Iterator[tuple[int, str]]:
    """Yields (step, place) of each value that is not finite."""
    for event in run.events:
        if isinstance(event.record, Verdict) and event.record.kind != Kind.ANOTHER_PROCESS:
            yield event.step, f"{event.record.operator} in {event.record.place} ({event.record.phase})"
    for seen in run.observations():
        if seen.absorbed is None and seen.stats.infinities + seen.stats.nans:
            yield seen.step, f"{seen.kind} of {'.'.join(filter(None, (seen.module, seen.name)))}"
    for values in run.steps:
        if values.loss is not None and not math.isfinite(values.loss):
            yield values.step, "its loss"
