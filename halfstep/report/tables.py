"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.markup import escape
from rich.table import Table

ABSENT = "-"
MIB = 2**20


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str] = ()) -> Table:
    """Returns a table without borders; columns are right-aligned, except those whose header is in `words`."""
    table = Table(box=None, padding=(0, 1))
    for name in header:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
