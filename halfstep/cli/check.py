"""`halfstep check`."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.advise.check import check as run_check
from halfstep.cli.options import Data, Device, Name, Seed, Settings, device_of
from halfstep.cli.screen import stdout
from halfstep.report.check import check_text
from halfstep.session.initialize import initialize
from halfstep.workloads.load import load_workload, parse_settings
from halfstep.workloads.workload import to_device_of

FAULTY = 1

PlanName = Annotated[str, typer.Option("--plan", help="The level, or plan file, to train under.")]
Low = Annotated[str | None, typer.Option("--low", help="The low format: bf16 or fp16.")]


def check(  # each is an option of the command, described above
    workload: Name = "char_lm",
    plan: PlanName = "O1",
    low: Low = None,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Check a workload before it trains: one traced step; ends with 1 where an error was found."""
    job = load_workload(workload, parse_settings(settings), data=data)
    model = job.build(seed).to(device_of(device))
    batches = job.batches(seed)

    def closure() -> object:
        inputs, targets = to_device_of(model, *next(batches))
        return job.loss(model(inputs), targets)

    with initialize(model, job.optimizer(model, fused=False), plan, low=low) as session:
        found = run_check(session, closure)
        stdout().print(check_text(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
    if any(finding.severity == "error" for finding in found):
        raise typer.Exit(FAULTY)
