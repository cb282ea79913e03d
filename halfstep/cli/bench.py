"""The command `halfstep bench`, which measures how fast a workload trains at several levels."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from halfstep.cli.options import (
    INTERRUPTED,
    Data,
    Device,
    Json,
    Quiet,
    Settings,
    activity,
    bytes_of,
    check_page,
    check_writable,
    device_of,
    end,
    names,
    progress_bar,
    sizes,
    stderr,
    stdout,
    write,
    write_page,
)
from halfstep.errors import WorkloadError
from halfstep.explain.report.bench import UNJUDGED, WITHIN, bench_table, cheapest
from halfstep.explain.report.lines import to_json
from halfstep.explain.report.sweep import largest_sheet, sheet_text, sweep_sheet
from halfstep.formats import LOW_FORMATS, as_format
from halfstep.lab.bench.bench import SLOW, STEPS, TIMED
from halfstep.lab.bench.bench import bench as run_bench
from halfstep.lab.bench.lane import Origin
from halfstep.lab.bench.sweep import Asked, check_same, largest_batches, read_sweep, sweep
from halfstep.lab.bench.variants import Entry, entries
from halfstep.lab.workloads.load import MODELS, WORKLOADS, load_workload, parse_settings
from halfstep.machine import read_facts, read_machine
from halfstep.measurements import BenchResult
from halfstep.plan.io import save_plan as write_plan

DEFAULT = "char_lm"
COMPILE = {"off": (False,), "on": (True,), "both": (False, True)}

Name = Annotated[str | None, typer.Argument(metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}, or path.py:function.")]
Levels = Annotated[str, typer.Option("--levels", "--level", help="Levels, separated by commas.")]
Lows = Annotated[str, typer.Option("--low", help="Low formats, separated by commas.")]
Kept = Annotated[
    str, typer.Option("--moments", help="How the optimizer's averages are kept, separated by commas: full, bf16, 8bit.")
]
Ways = Annotated[
    str, typer.Option("--products", help="How linear layers multiply, separated by commas: plan, fp8, fp8-row, ...")
]
Within = Annotated[
    float | None,
    typer.Option(
        "--gradient-error",
        min=0.0,
        help="Also name the cheapest run whose gradient differs from fp32's by less than this share of how far two "
        f"batches' gradients are apart; {WITHIN:g} if --products names several.",
    ),
]
SavePlan = Annotated[
    Path | None, typer.Option("--save-plan", help="Write the plan of that run to this file, .toml or .json.")
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help=f"Training steps of each run and seed ({STEPS}); with --seconds, at most so many."
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=1.0,
        help="End after about this time: a trial of each run decides how many steps all make; a run whose step takes "
        f"more than {SLOW:g} times that of O0 is timed over {TIMED} steps and not trained.",
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counting from 0.")]
Peer = Annotated[bool, typer.Option("--peer/--no-peer", help="Also train a plain torch.amp loop.")]
Models = Annotated[
    str,
    typer.Option(
        "--model",
        help=f"Sweep: models, separated by commas: {', '.join(MODELS)}, workloads; resnet50@8 sets its batch size.",
    ),
]
Batches = Annotated[str, typer.Option("--batch-size", help="Sweep: batch sizes, separated by commas.")]
Compile = Annotated[str, typer.Option("--compile", help="Sweep: torch.compile off, on or both.")]
PageFile = Annotated[Path | None, typer.Option("--page", help="Sweep: write one HTML page with charts to this file.")]
LargestBatch = Annotated[
    str | None,
    typer.Option(
        "--largest-batch",
        metavar="MEMORY",
        help="Find the largest batch that fits into this much memory, for example 2GiB.",
    ),
]


def _gone(option: typer.CallbackParam, value: str | None) -> None:
    if value is not None:
        raise WorkloadError(f"--{option.name} is gone: keep the results that --json writes, and compare them with asv")


Gone = Annotated[str | None, typer.Option(hidden=True, callback=_gone)]


def bench(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = None,
    levels: Levels = "O0,O1,O2,O3",
    low: Lows = "bf16,fp16",
    moments: Kept = "full",
    products: Ways = "plan",
    gradient_error: Within = None,
    save_plan: SavePlan = None,
    steps: Steps = None,
    seconds: Seconds = None,
    seeds: Seeds = 1,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    json: Json = None,
    peer: Peer = True,
    model: Models = "",
    batch_size: Batches = "",
    compile: Compile = "off",
    page: PageFile = None,
    largest_batch: LargestBatch = None,
    quiet: Quiet = False,
    against: Gone = None,
    processes: Gone = None,
) -> None:
    """Train a workload under several levels and under torch.amp, one step of each in turn, and print one table."""
    place = device_of(device)
    if workload in ("matmul", "memory"):
        raise WorkloadError(
            f"`halfstep bench {workload}` is gone: `halfstep doctor` prints products and memory by format"
        )
    name = DEFAULT if workload is None else workload
    formats = [as_format(name, LOW_FORMATS) for name in names(low)]
    rows = entries(
        names(levels), formats, read_facts(place), peer=peer, moments=names(moments), products=names(products)
    )
    check_writable(json)
    check_writable(save_plan, "--save-plan")
    if save_plan is not None and save_plan.suffix not in (".toml", ".json"):
        raise WorkloadError(f"--save-plan {save_plan}: a plan file ends in .toml or .json; pass one of these")
    several = gradient_error is None and save_plan is None and len(set(names(products))) < 2
    within = None if several else WITHIN if gradient_error is None else gradient_error
    count = STEPS if steps is None else steps
    if model or batch_size or compile != "off" or page is not None or largest_batch is not None:
        both = f"--model {model} and the workload {workload} both choose what is trained; pass only one of them"
        for wrong, why in (
            (seeds != 1, "a sweep runs each row with one seed; leave out --seeds"),
            (seconds, "a sweep makes the same steps at each point; leave out --seconds, and pass --steps"),
            (model and workload, both),
        ):
            if wrong:
                raise WorkloadError(why)
        asked = Asked(
            tuple(names(model)) or (name,), sizes(batch_size), _compiled(rows, compile), count, place,
            parse_settings(settings), data, command=_command(), within=within,
        )  # fmt: skip
        if largest_batch is not None:
            if gradient_error is not None or save_plan is not None:
                raise WorkloadError("--largest-batch measures no gradients; leave out --gradient-error and --save-plan")
            _largest(asked, bytes_of(largest_batch), json=json, page=page, quiet=quiet)
        else:
            _sweep(asked, json=json, page=page, quiet=quiet, plan=save_plan)
        return
    given = parse_settings(settings)
    job = load_workload(name, given, data=data)
    origin = Origin(name, given, data)
    with progress_bar(first=_first_line(name, rows, steps, seconds, place), quiet=quiet) as progress:
        result = run_bench(
            job, rows, steps=steps, seconds=seconds, seeds=range(seeds), device=place, origin=origin,
            command=_command(), within=within, progress=progress,
        )  # fmt: skip
    screen = stdout()
    screen.print(bench_table(result, width=screen.width))
    write(json, to_json(result))
    _save(save_plan, [result], rows)
    end(result.runs, complete=result.complete)


def _save(path: Path | None, results: Sequence[BenchResult], rows: Sequence[Entry]) -> None:
    if path is None:
        return
    within = next((result.within for result in results if result.within is not None), WITHIN)
    name = cheapest(results, within)
    if name is None:
        raise WorkloadError(f"no plan was written to {path}: {UNJUDGED.format(within=within)}")
    write_plan(next(row for row in rows if row.name == name).plan, path)
    stdout().print(f"{path} has the plan of {name}")


def _sweep(asked: Asked, *, json: Path | None, page: Path | None, quiet: bool, plan: Path | None) -> None:
    check_page(page, json)
    done = None if json is None else read_sweep(json)
    if done is not None:
        check_same(done.asked, asked.words())
        whole = sum(not asked.failed(point) for point in done.points)
        stderr().print(f"{json} already has {whole} of {done.total} points; these are not measured again")
    with progress_bar(unit="examples", quiet=quiet) as progress:
        found = sweep(asked, done=done, keep=lambda result: write(json, to_json(result)), progress=progress)
    sheet = sweep_sheet(found)
    stdout().print(sheet_text(sheet))
    write_page(page, sheet)
    _save(plan, [point.result for point in found.points], asked.rows)
    end((run for point in found.points for run in point.result.runs), complete=len(found.points) == found.total)


def _largest(asked: Asked, limit: int, *, json: Path | None, page: Path | None, quiet: bool) -> None:
    check_page(page, json)
    with activity("starting", quiet=quiet) as now:
        found = largest_batches(asked, limit, progress=now)
    if not found:
        raise typer.Exit(INTERRUPTED)
    sheet = largest_sheet(found, asked.words(), asked.command)
    stdout().print(sheet_text(sheet))
    write(json, to_json({"command": asked.command, "asked": asked.words(), "largest": found}))
    write_page(page, sheet)
    end(found, complete=len(found) == len(asked.points()) * len(asked.rows))


def _first_line(name: str, rows: list[Entry], steps: int | None, seconds: float | None, device: torch.device) -> str:
    facts, machine = read_facts(device), read_machine(device)
    what = ", ".join(row.name for row in rows if row.refused is None) or "nothing"
    units = " and ".join(each for each in machine.fast if each != "fp32") or "no bf16 or fp16"
    steps = STEPS if steps is None and seconds is None else steps
    long = [] if steps is None else [f"{'at most ' if seconds else ''}{steps} steps"]
    long += [] if seconds is None else [f"about {seconds:g} s"]
    chip = (
        f"{machine.processor}, {machine.threads} thread{'' if machine.threads == 1 else 's'}"
        if facts.kind == "cpu"
        else machine.device
    )
    return f"{facts} ({chip}), {units} units: {name} at {what}, for {', '.join(long)}"


def _compiled(rows: list[Entry], compile: str) -> tuple[Entry, ...]:
    if compile not in COMPILE:
        raise WorkloadError(f"--compile {compile!r} is unknown; choose one of {', '.join(COMPILE)}")
    return tuple(replace(row, compiled=on) for row in rows for on in COMPILE[compile])


def _command() -> str:
    """Returns the command as it was typed, but with "~" for the home folder, since results are published."""
    return shlex.join(["halfstep", *sys.argv[1:]]).replace(f"{Path.home()}/", "~/")
