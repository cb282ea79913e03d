"""`halfstep bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfstep.bench.against import check_comparable, compare, load_saved
from halfstep.bench.bench import Progress as Report
from halfstep.bench.bench import bench as run_bench
from halfstep.bench.bench import settings_of
from halfstep.bench.variants import entries
from halfstep.cli.options import Data, Device, Name, Settings, check_writable, device_of, names, write_json
from halfstep.cli.screen import stderr, stdout
from halfstep.formats import as_format
from halfstep.machine import read_facts
from halfstep.report.against import against_table
from halfstep.report.bench import bench_table
from halfstep.report.json import bench_json
from halfstep.workloads.load import load_workload, parse_settings

FAILED = 1
WORSE = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

Levels = Annotated[str, typer.Option("--levels", help="Levels, separated by commas.")]
Lows = Annotated[str, typer.Option("--low", help="Low formats, separated by commas.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps of each run and seed.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, from 0 on.")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write every figure, with machine and versions, to this file.")
]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        help="Hold the result against this file of --json; ends with 3 where a row is worse. 100 steps tell 5%.",
    ),
]


def bench(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    levels: Levels = "O0,O1,O2,O3",
    low: Lows = "bf16,fp16",
    steps: Steps = 100,
    seeds: Seeds = 1,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    json: Json = None,
    against: Against = None,
) -> None:
    """Train a workload under several levels and under torch.amp, a step of each in turn, and print one table."""
    place = device_of(device)
    job = load_workload(workload, parse_settings(settings), data=data)
    saved = None if against is None else load_saved(against)
    if saved is not None:
        check_comparable(saved, job.name, settings_of(job))
    rows = entries(names(levels), [as_format(name) for name in names(low)], read_facts(place), peer=True)
    if json is not None:
        check_writable(json)
    with _progress_bar() as progress:
        result = run_bench(
            job,
            rows,
            steps=steps,
            seeds=range(seeds),
            device=place,
            command=shlex.join(["halfstep", *sys.argv[1:]]),
            progress=progress,
        )
    screen = stdout()
    screen.print(bench_table(result, width=screen.width))
    changes = () if saved is None else compare(saved, result)
    if saved is not None:
        screen.print(against_table(changes, file=str(against), saved=(saved.processor, saved.torch, saved.halfstep)))
    if json is not None:
        write_json(json, bench_json(result))
    if all(run.error is not None for run in result.runs):
        raise typer.Exit(FAILED)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)
    if any(change.is_worse for change in changes):
        raise typer.Exit(WORSE)


@contextmanager
def _progress_bar() -> Iterator[Report]:
    """Gives a function that shows what is going on and how far it is; silent where no one looks."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal
    ) as bar:  # rarely, as drawing takes time from what is measured
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
