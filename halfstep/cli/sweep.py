"""`halfstep bench` over several models or batch sizes."""

from __future__ import annotations

from pathlib import Path

import typer

from halfstep.bench.largest import largest_batches
from halfstep.bench.results import read_sweep
from halfstep.bench.sweep import Asked, check_same, sweep
from halfstep.cli.options import check_page, write_json, write_page
from halfstep.cli.screen import FAILED, INTERRUPTED, end, progress_bar, stderr, stdout
from halfstep.measurements import Sweep
from halfstep.report.json import sweep_json, to_json
from halfstep.report.largest import HEADER, largest_charts, largest_headline, largest_rows, largest_table, largest_words
from halfstep.report.sweep import (
    sweep_charts,
    sweep_facts,
    sweep_headline,
    sweep_rows,
    sweep_table,
    title,
    words,
)


def run_sweep(asked: Asked, *, json: Path | None, page: Path | None) -> None:
    """Measures the points of a sweep that the file `json` does not have yet, and prints the whole sweep."""
    check_page(page, json)
    done = None if json is None else read_sweep(json)
    if done is not None:
        check_same(done.asked, asked.words())
        whole = sum(not asked.failed(point) for point in done.points)
        stderr().print(f"{json} already has {whole} of {done.total} points; these are not measured again")

    def keep(result: Sweep) -> None:
        if json is not None:
            write_json(json, sweep_json(result))

    with progress_bar(unit="examples") as progress:
        found = sweep(asked, done=done, keep=keep, progress=progress)
    stdout().print(sweep_table(found))
    if page is not None:
        write_sweep_page(page, found)
    runs = (run for point in found.points for run in point.result.runs)
    end(runs, complete=len(found.points) == found.total)


def write_sweep_page(page: Path, found: Sweep) -> None:
    """Writes the HTML page of a sweep."""
    write_page(page, title(found), sweep_headline(found), sweep_rows(found), sweep_charts(found),
               notes=list(words(found)), facts=sweep_facts(found))  # fmt: skip


def run_largest(asked: Asked, limit: int, *, json: Path | None, page: Path | None) -> None:
    """Finds and prints, for each model and row, the largest batch that fits into `limit` bytes."""
    check_page(page, json)
    with stderr().status("starting") as status:
        found = largest_batches(asked, limit, progress=status.update)
    if not found:
        raise typer.Exit(INTERRUPTED)
    stdout().print(largest_table(found))
    if json is not None:
        write_json(json, to_json({"command": asked.command, "asked": asked.words(), "largest": found}))
    if page is not None:
        write_page(page, asked.command, largest_headline(found), (HEADER, largest_rows(found)), largest_charts(found),
                   notes=largest_words(found), facts=list(asked.words().items()))  # fmt: skip
    if len(found) < len(asked.points()) * len(asked.rows):
        raise typer.Exit(INTERRUPTED)
    if all(each.error is not None for each in found):
        raise typer.Exit(FAILED)
