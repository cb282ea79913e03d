"""`halfstep check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.options import Data, Device, Name, Seed, Settings, check_writable, device_of, write_json
from halfstep.cli.screen import stdout
from halfstep.initialize import initialize
from halfstep.preflight.check import check as run_check
from halfstep.report.check import check_text
from halfstep.report.json import to_json
from halfstep.workloads.load import load_workload, parse_settings
from halfstep.workloads.workload import to_device_of

FAULTY = 1

PlanName = Annotated[str, typer.Option("--plan", help="The level, or plan file, to train under.")]
Low = Annotated[str | None, typer.Option("--low", help="The low format: bf16 or fp16.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write every finding to this file.")]


def check(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    plan: PlanName = "O1",
    low: Low = None,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Check a workload before it trains: one traced step; ends with 1 where an error was found."""
    job = load_workload(workload, parse_settings(settings), data=data)
    if json is not None:
        check_writable(json)
    model = job.build(seed).to(device_of(device))
    batches = iter(job.batches(seed))

    def closure() -> object:
        inputs, targets = to_device_of(model, *next(batches))
        return job.loss(model(inputs), targets)

    with initialize(model, job.optimizer(model, fused=False), plan, low=low) as session:
        found = run_check(session, closure)
        stdout().print(check_text(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
        if json is not None:
            checked = {"workload": job.name, "plan": session.plan.name, "low": session.plan.low.name}
            write_json(json, to_json(checked | {"findings": found}))
    if any(finding.severity == "error" for finding in found):
        raise typer.Exit(FAULTY)
