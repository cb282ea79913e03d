"""What commands share: their options, the checks of these, and the consoles and progress bars on which they print."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Annotated

import torch
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
from torch import nn

from halfstep.errors import WorkloadError
from halfstep.explain.report.sweep import Sheet
from halfstep.lab.bench.tally import foreseen
from halfstep.lab.workloads.load import WORKLOADS, load_workload, parse_settings
from halfstep.lab.workloads.workload import Workload
from halfstep.measurements import BenchRun, Largest
from halfstep.saved import replace_file

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


# ---- options, and the checks of their values
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DEVICES = ("auto", "cpu", "cuda")

Name = Annotated[str, typer.Argument(metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}, or path.py:function.")]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting of the workload; repeatable.")
]
Data = Annotated[Path | None, typer.Option("--data", help="The folder or file that the workload reads.")]
Device = Annotated[str, typer.Option("--device", help="auto (cuda if available), cpu or cuda.")]
Low = Annotated[str | None, typer.Option("--low", help="The low format: bf16 or fp16.")]
Moments = Annotated[
    str | None, typer.Option("--moments", help="How the optimizer's averages are kept: full, bf16 or 8bit.")
]
Products = Annotated[
    str | None,
    typer.Option("--products", help="How linear layers multiply: plan, fp8, fp8-row, fp8-mx, fp8-block or nvfp4."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file, as JSON.")]


def _hush(quiet: bool) -> bool:
    logging.getLogger("halfstep.device").setLevel(logging.ERROR if quiet else logging.NOTSET)
    return quiet


Quiet = Annotated[
    bool, typer.Option("--quiet", callback=_hush, help="Print no progress, and not what is slow on this machine.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The seed of weights and batches.")]


def names(text: str) -> list[str]:
    """Returns the names in a comma-separated list, such as "O1, O2"."""
    return [name.strip() for name in text.split(",") if name.strip()]


def sizes(text: str) -> tuple[int, ...]:
    """Returns the sizes in a comma-separated list, such as "16, 32"."""
    found = names(text)
    for each in found or [text] * bool(text):
        if not each.isdecimal() or int(each) < 1:
            raise WorkloadError(
                f"{text!r} holds {each!r}, which is not a size; pass whole numbers above 0, for example 16,32"
            )
    return tuple(dict.fromkeys(map(int, found)))


def bytes_of(text: str) -> int:
    """Returns the bytes in an amount of memory with a unit, such as "1.5GiB" or "300 MiB"."""
    amount, unit = text[:-3].strip(), text[-3:]
    if unit not in UNITS or not amount.replace(".", "", 1).isdecimal():
        raise WorkloadError(f"{text!r} is not an amount of memory; pass for example 512MiB or 2GiB")
    return int(float(amount) * UNITS[unit])


def device_of(name: str) -> torch.device:
    """Returns the device that an option names."""
    if name not in DEVICES:
        raise WorkloadError(f"--device {name!r} is unknown; choose one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise WorkloadError("got --device cuda, but torch sees no CUDA device; choose cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def open_job(
    workload: str, settings: list[str], *, data: Path | None, device: str, seed: int, json: Path | None
) -> tuple[Workload, nn.Module]:
    """Returns a workload and its model, built from a seed on a device, if the result can be written to `json`."""
    check_writable(json)
    job = load_workload(workload, parse_settings(settings), data=data)
    place = device_of(device)
    with foreseen(f"{job.name}: building the model"):
        return job, job.build(seed).to(place)


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Raises an error if a file cannot be written, and leaves no new file behind; does nothing for None."""
    # Commands call this first, so that hours of training do not end with a result that cannot be saved.
    if path is None:
        return
    try:
        if not path.absolute().parent.is_dir():
            raise WorkloadError(f"{option} {path}: the folder {path.absolute().parent} does not exist; create it first")
        existed = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
        if not existed or path.is_file():
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise WorkloadError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error


def write(path: Path | None, text: str, option: str = "--json") -> None:
    """Writes a result, replacing the file's content; does nothing for None."""
    if path is None:
        return
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise WorkloadError(
            f"{option} {path} could not be written: {error.strerror}; it is unchanged; free some space and run again"
        ) from error


def html_pages(asked: str) -> ModuleType:
    """Returns the module that makes HTML pages; `asked` is the option that needs a page."""
    try:
        import halfstep.explain.report.html as pages
    except ModuleNotFoundError as error:
        raise WorkloadError(f"{asked} needs {error.name}; run: pip install 'halfstep[report]'") from None
    return pages


def check_page(path: Path | None, json: Path | None) -> None:
    """Raises an error if an HTML page cannot be made, or cannot be written to `path`; does nothing for None."""
    if path is not None:
        if json is not None and path.resolve() == json.resolve():
            raise WorkloadError(f"--page and --json are both {path}; pass two different files")
        check_writable(path, "--page")
        html_pages("--page")


def write_page(path: Path | None, sheet: Sheet) -> None:
    """Writes the HTML page of a measurement; does nothing for None."""
    if path is not None:
        write(path, html_pages("--page").sheet_html(sheet), "--page")
