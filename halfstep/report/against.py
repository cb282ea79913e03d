"""What changed since a saved benchmark, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfstep.machine import Machine
from halfstep.measurements import BenchChange


def against_table(changes: Sequence[BenchChange], *, file: str, saved: Machine) -> Group:
    """Returns a row for each row of a benchmark: its time and memory over those in `file`, of the machine `saved`."""
    table = Table(box=None, padding=(0, 1))
    for header in ("", "time x saved", "19 of 20 within", "peak memory x saved", "verdict", "in steps of"):
        table.add_column(header, justify="left" if header in ("", "verdict", "in steps of") else "right", no_wrap=True)
    for change in changes:
        table.add_row(*map(escape, _cells(change)))
    head = Text(f"\nAgainst {file} (halfstep {saved.halfstep}, torch {saved.torch}, {saved.processor}):")
    return Group(head, table, Text(_sentence(changes)))


def _cells(change: BenchChange) -> tuple[str, ...]:
    time = "-" if change.time is None else f"{change.time:.3f}"
    within = "-" if change.low is None or change.high is None else f"{change.low:.3f} to {change.high:.3f}"
    memory = "-" if change.memory is None else f"{change.memory:.3f}"
    return change.name, time, within, memory, change.verdict, change.yardstick or "milliseconds"


def _sentence(changes: Sequence[BenchChange]) -> str:
    worse = [change.name for change in changes if change.is_worse]
    better = [change.name for change in changes if change.verdict == "faster"]
    said = [f"worse: {', '.join(worse)}"] if worse else []
    said += [f"faster: {', '.join(better)}"] if better else []
    return f"{'; '.join(said) or 'nothing differs beyond the noise'}."
