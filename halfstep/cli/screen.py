"""The consoles on which commands print, and their progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WIDE = 200  # a file or pipe has no width; a table keeps its lines there


def stdout() -> Console:
    """Returns the console that reports are printed on."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def stderr() -> Console:
    """Returns the console for progress."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress_bar(unit: str = "steps") -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows the current activity, the progress and the time left; silent without a terminal."""
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=1,  # rarely, as drawing takes time from what is measured
        speed_estimate_period=600,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
