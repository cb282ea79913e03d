"""Ends `halfstep bench`: prints what changed since a saved result, and sets the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from halfstep.cli.screen import stdout
from halfstep.machine import Machine
from halfstep.measurements import BenchChange, BenchRun
from halfstep.report.against import against_table

FAILED = 1
WORSE = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def print_changes(changes: Sequence[BenchChange], file: Path, saved: Machine) -> None:
    """Prints what changed since the benchmark saved in `file`; `saved` is the machine that it ran on."""
    stdout().print(against_table(changes, file=str(file), saved=saved))


def end(runs: Iterable[BenchRun], changes: Sequence[BenchChange] | None, *, complete: bool) -> None:
    """Ends `halfstep bench` with its exit code; for code 0, returns instead."""
    # The first code that applies is used: 130 if the benchmark is not `complete`, 1 if all rows failed, 0 if `changes`
    # is None since there is no saved benchmark, 3 if a row is worse than the saved one, 1 if no row could be compared
    # with a saved one, otherwise 0.
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if all(run.error is not None for run in runs):
        raise typer.Exit(FAILED)
    if changes is None:
        return
    if any(change.is_worse for change in changes):
        raise typer.Exit(WORSE)
    if not any(change.is_judged for change in changes):
        raise typer.Exit(FAILED)
