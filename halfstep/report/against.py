"""The table of what changed since a saved benchmark, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from halfstep.machine import Machine
from halfstep.measurements import BenchChange
from halfstep.report.tables import plain_table


def against_table(changes: Sequence[BenchChange], *, file: str, saved: Machine) -> Group:
    """Returns a table with the time and memory of each benchmark row, divided by those of a saved benchmark."""
    header = ("", "time x saved", "19 of 20 within", "peak memory x saved", "verdict", "in steps of")
    table = plain_table(header, map(_cells, changes), words=("", "verdict", "in steps of"))
    head = Text(f"\nAgainst {file} (halfstep {saved.halfstep}, torch {saved.torch}, {saved.processor}):")
    return Group(head, table, Text(_sentence(changes)))


def _cells(change: BenchChange) -> tuple[str, ...]:
    time = "-" if change.time is None else f"{change.time:.3f}"
    within = "-" if change.low is None or change.high is None else f"{change.low:.3f} to {change.high:.3f}"
    memory = "-" if change.memory is None else f"{change.memory:.3f}"
    return change.name, time, within, memory, change.verdict, change.yardstick or "milliseconds"


def _sentence(changes: Sequence[BenchChange]) -> str:
    groups = {
        "worse": [change for change in changes if change.is_worse],
        "faster": [change for change in changes if change.verdict == "faster"],
        "not judged": [change for change in changes if not (change.is_judged or change.is_worse)],
    }
    said = [f"{word}: {', '.join(map(_named, found))}" for word, found in groups.items() if found]
    if any(change.is_judged for change in changes) and not groups["worse"] and not groups["faster"]:
        said.insert(0, "nothing differs beyond the noise")
    return f"{'; '.join(said)}."


def _named(change: BenchChange) -> str:
    return change.name if change.time is not None else f"{change.name} ({change.verdict})"
