"""`halfstep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.errors import LogError
from halfstep.report.page import shown
from halfstep.report.run import read_log

Log = Annotated[Path, typer.Argument(metavar="RUN", help="A run log, or the folder that it is in.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The page; RUN.html beside the log if not given.")]
Low = Annotated[
    str | None, typer.Option("--low", help="The format to judge by; the low format of the run if not given.")
]


def report(run: Log, output: Output = None, low: Low = None) -> None:
    """Make one HTML page of a run log: exponent histograms, lost and saturated shares, loss, scale, verdicts."""
    try:
        from halfstep.report.html import page_html  # the extra [report], which no other command needs
    except ModuleNotFoundError as error:
        raise LogError(f"halfstep report needs {error.name}; run: pip install 'halfstep[report]'") from None
    found = read_log(run)
    page = found.path.with_suffix(".html") if output is None else output
    if page.resolve() == found.path.resolve():
        raise LogError(f"the page would overwrite the log {page}; name another file with --output")
    text = page_html(found, low)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{page} cannot be written: {error.strerror}; name another file with --output") from None
    for note in found.notes:
        print(f"note: {note}")
    print(shown(page))
