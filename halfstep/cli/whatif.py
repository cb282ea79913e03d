"""The command `halfstep whatif`, which predicts what low formats do to a workload."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.options import (
    Data,
    Device,
    Json,
    Name,
    Seed,
    Settings,
    check_writable,
    names,
    open_job,
    write_json,
)
from halfstep.cli.screen import stdout
from halfstep.forecast.whatif import whatif as predict
from halfstep.report.json import to_json
from halfstep.report.whatif import whatif_table
from halfstep.workloads.workload import to_device_of

HORIZON = 100  # steps of a training whose first ones are made, for the schedule of the learning rate

Formats = Annotated[str, typer.Option("--formats", help="Formats, separated by commas.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps in fp32.")]
PlanName = Annotated[str, typer.Option("--plan", help="The level, or plan file, whose low tensors are predicted.")]
Modules = Annotated[
    bool, typer.Option("--modules", help="Show every module, not only totals and what should stay full.")
]
LossScale = Annotated[float | None, typer.Option("--loss-scale", help="Predict for this loss scale.")]


def whatif(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    formats: Formats = "fp16,bf16,e4m3,e5m2",
    steps: Steps = 3,
    plan: PlanName = "O2",
    loss_scale: LossScale = None,
    modules: Modules = False,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Train a workload for a few fp32 steps; predict what other formats would lose and which loss scales are safe."""
    check_writable(json)
    job, model = open_job(workload, settings, data=data, device=device, seed=seed)
    optimizer = job.optimizer(model, fused=False)
    base = [group["lr"] for group in optimizer.param_groups]
    batches = enumerate(job.batches(seed))

    def closure() -> object:
        number, (inputs, targets) = next(batches)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * job.lr_factor(number, HORIZON)
        inputs, targets = to_device_of(model, inputs, targets)
        return job.loss(model(inputs), targets)

    result = predict(
        closure,
        model,
        names(formats),
        steps=steps,
        optimizer=optimizer,
        plan=plan,
        loss_scale=loss_scale,
    )
    stdout().print(whatif_table(result, modules=modules), crop=False)  # a figure is better broken than cut
    if json is not None:
        write_json(json, to_json(result))
