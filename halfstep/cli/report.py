"""The command `halfstep report`, which makes an HTML page of run logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.options import Quiet, html_pages
from halfstep.cli.screen import activity, stdout
from halfstep.errors import LogError
from halfstep.explain.report.run import PROCESSES, first_overflow, read_log, rows_of, shown
from halfstep.explain.report.tables import table

Logs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="A run log, or its folder; for a run of several processes all their logs."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The page to write; by default RUN.html beside the (first) log.")
]
Low = Annotated[
    str | None, typer.Option("--low", help="The format to judge values by; by default the run's low format.")
]


def report(logs: Logs, output: Output = None, low: Low = None, quiet: Quiet = False) -> None:
    """Make one HTML page of a run log: exponent histograms, lost and saturated shares, loss, scale, verdicts."""
    pages = html_pages("halfstep report")
    with activity("reading the log, and drawing the page", quiet=quiet):
        runs = [read_log(log) for log in logs]
        rows = rows_of(runs) if len(runs) > 1 else ()
        found = rows[0].run if rows else runs[0]
        page = found.path.with_suffix(".html") if output is None else output
        if page.resolve() in [run.path.resolve() for run in runs]:
            raise LogError(f"the page would overwrite the log {page}; name another file with --output")
        text = pages.page_html(found, low, processes=rows)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{page} cannot be written: {error.strerror}; name another file with --output") from None
    for run in runs:
        for note in run.notes:
            print(f"note: {shown(run.path)}: {note}" if rows else f"note: {note}")
    if rows:
        stdout().print(table(rows, PROCESSES, words=PROCESSES))
        if said := first_overflow(rows):
            print(said)
    print(shown(page))
