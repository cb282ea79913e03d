"""The command `halfstep check`, which checks one training step of a workload for what fails in low precision."""

from __future__ import annotations

from typing import Annotated

import typer

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
from halfstep.preflight.check import check as run_check
from halfstep.report.check import check_text
from halfstep.report.json import to_json
from halfstep.workloads.workload import to_device_of

FAULTY = 1

PlanName = Annotated[str, typer.Option("--plan", help="The level, or plan file, to train under.")]


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
    """Check a workload before it trains, by one traced step; exits with 1 if an error was found."""
    check_writable(json)
    job, model = open_job(workload, settings, data=data, device=device, seed=seed)
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
