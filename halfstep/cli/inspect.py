"""The command `halfstep inspect`, which shows where the time of a step goes."""

from __future__ import annotations

from typing import Annotated

import typer
from torch import Tensor

from halfstep.bench.tally import first_batch, foreseen
from halfstep.cli.options import (
    Data,
    Device,
    Json,
    Low,
    Name,
    Seed,
    Settings,
    check_writable,
    open_job,
    write_json,
)
from halfstep.cli.screen import stdout
from halfstep.initialize import initialize
from halfstep.inspection.inspect import inspect as run_inspect
from halfstep.report.inspect import inspection_report
from halfstep.report.json import to_json
from halfstep.workloads.workload import to_device_of

Level = Annotated[str, typer.Option("--level", help="The level, or plan file, to inspect the step under.")]


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
    check_writable(json)
    job, model = open_job(workload, settings, data=data, device=device, seed=seed)
    inputs, targets = to_device_of(model, *first_batch(job, seed))

    def closure() -> Tensor:
        with foreseen(f"{job.name}: the forward pass"):
            return job.loss(model(inputs), targets)

    with initialize(model, job.optimizer(model, fused=False), level, low=low) as session:
        found = run_inspect(session, closure)
        stdout().print(inspection_report(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
        if json is not None:
            write_json(json, to_json({"workload": job.name, **vars(found)}))
