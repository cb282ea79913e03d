"""The consoles on which commands print, their progress bar, and how a benchmark ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from halfstep.measurements import BenchRun, Largest

FAILED, INTERRUPTED = 1, 130  # exit codes; 128 + SIGINT, as shells have it
WIDE = 200  # a file or pipe has no width; a table keeps its lines there


def end(runs: Iterable[BenchRun | Largest], *, complete: bool) -> None:
    """Ends `halfstep bench` with 130 if it is not `complete`, with 1 if all rows failed; otherwise returns."""
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if all(run.error is not None for run in runs):
        raise typer.Exit(FAILED)


def stdout() -> Console:
    """Returns the console that reports are printed on."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def stderr() -> Console:
    """Returns the console for progress."""
    return Console(stderr=True, highlight=False)


PAUSE = 4.0  # seconds between two lines of progress, so that nobody waits for five without a word

Update = Callable[[str, int, int], None]


@contextmanager
def progress_bar(unit: str = "steps", *, first: str = "", quiet: bool = False) -> Iterator[Update]:
    """Yields a function that shows the current activity, the progress (unless the total is 0) and the time left."""
    if quiet:
        yield lambda what, done, total: None
        return
    console = stderr()
    lines = [first] if first else []
    with _bar(console, unit) if console.is_terminal else _lines(console, unit) as show:

        def update(what: str, done: int, total: int) -> None:
            if lines:
                console.print(lines.pop(), soft_wrap=not console.is_terminal)
            show(what, done, total)

        yield update


@contextmanager
def activity(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is done meanwhile; yields a function that says what is done now."""
    with progress_bar("", quiet=quiet) as progress:
        progress(what, 0, 0)
        yield lambda what: progress(what, 0, 0)


@contextmanager
def _lines(console: Console, unit: str) -> Iterator[Update]:
    start, now, ended = perf_counter(), ["starting"], threading.Event()

    def tell() -> None:
        while not ended.wait(PAUSE):
            console.print(f"{perf_counter() - start:4.0f} s  {now[0]}", soft_wrap=True)

    def show(what: str, done: int, total: int) -> None:
        now[0] = f"{what} ({done} of {total} {unit})" if total else what

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


@contextmanager
def _bar(console: Console, unit: str) -> Iterator[Update]:
    columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if unit:
        counted = MofNCompleteColumn(), TextColumn(unit)
        columns = (columns[1], BarColumn(), *counted, columns[2], TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=1,  # rarely, as drawing takes time from what is measured
        speed_estimate_period=600,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
