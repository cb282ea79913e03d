"""Where commands print."""

from __future__ import annotations

from rich.console import Console

WIDE = 200  # a file or pipe has no width; a table keeps its lines there


def stdout() -> Console:
    """Returns the console that reports are printed on."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def stderr() -> Console:
    """Returns the console for progress."""
    return Console(stderr=True, highlight=False)
