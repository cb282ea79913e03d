"""`halfstep inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from halfstep.bench.tally import first_batch, foreseen
from halfstep.cli.options import Data, Device, Name, Seed, Settings, check_writable, device_of, write_json
from halfstep.cli.screen import stdout
from halfstep.initialize import initialize
from halfstep.inspection.inspect import inspect as run_inspect
from halfstep.report.inspect import inspection_report
from halfstep.report.json import to_json
from halfstep.workloads.load import load_workload, parse_settings
from halfstep.workloads.workload import to_device_of

Level = Annotated[str, typer.Option("--level", help="The level, or plan file, to inspect the step under.")]
Low = Annotated[str | None, typer.Option("--low", help="The low format: bf16 or fp16.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write every row to this file.")]


def inspect(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    level: Level = "O1",
    low: Low = None,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Show where the time, FLOPs and casts of one training step go, and what would save time."""
    job = load_workload(workload, parse_settings(settings), data=data)
    if json is not None:
        check_writable(json)
    place = device_of(device)
    with foreseen(f"{job.name}: building the model"):
        model = job.build(seed).to(place)
    inputs, targets = to_device_of(model, *first_batch(job, seed))

    def closure() -> Tensor:
        with foreseen(f"{job.name}: the forward pass"):
            return job.loss(model(inputs), targets)

    with initialize(model, job.optimizer(model, fused=False), level, low=low) as session:
        found = run_inspect(session, closure)
        stdout().print(inspection_report(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
        if json is not None:
            write_json(json, to_json({"workload": job.name, **vars(found)}))
