"""The commands about one training step of a workload: `halfstep check`, `halfstep inspect` and `halfstep whatif`."""

from __future__ import annotations

from itertools import count
from typing import Annotated, Any

import typer
from torch import Tensor

from halfstep.cli.options import (
    FAILED,
    Data,
    Device,
    Json,
    Low,
    Moments,
    Name,
    Products,
    Quiet,
    Seed,
    Settings,
    activity,
    names,
    open_job,
    progress_bar,
    stdout,
    write,
)
from halfstep.explain.forecast.whatif import whatif as predict
from halfstep.explain.preflight.check import check as run_check
from halfstep.explain.report.lines import to_json
from halfstep.explain.report.step import check_text, inspection_report, whatif_report
from halfstep.initialize import initialize
from halfstep.lab.bench.tally import first_batch, foreseen
from halfstep.lab.inspection.inspect import inspected
from halfstep.lab.workloads.workload import to_device_of

HORIZON = 100  # steps of a training whose first ones are made, for the schedule of the learning rate

PlanName = Annotated[str, typer.Option("--plan", "--level", help="The level, or plan file, to train under.")]
Precision = Annotated[
    bool, typer.Option("--precision/--no-precision", help="Compare the step with one in fp32, and try what cures it.")
]
Level = Annotated[str, typer.Option("--level", "--plan", help="The level, or plan file, to inspect the step under.")]
Formats = Annotated[str, typer.Option("--formats", help="Formats, separated by commas.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps in fp32.")]
LowOf = Annotated[str, typer.Option("--plan", "--level", help="The level, or plan file, to predict low tensors of.")]
Modules = Annotated[
    bool, typer.Option("--modules", help="Show every module, not only totals and what should stay full.")
]
Ways = Annotated[
    str, typer.Option("--products", help="Recipes of linear layers' products, separated by commas: fp8, fp8-row, ...")
]
LossScale = Annotated[float | None, typer.Option("--loss-scale", help="Predict for this loss scale.")]


def check(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    plan: PlanName = "O1",
    low: Low = None,
    products: Products = None,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
    precision: Precision = True,
    quiet: Quiet = False,
) -> None:
    """Check a workload before it trains, by one step, also in fp32; exits with 1 if an error was found."""
    job, model = open_job(workload, settings, data=data, device=device, seed=seed, json=json)
    inputs, targets = to_device_of(model, *first_batch(job, seed))
    what, passes = "checking one step" + ", and comparing it with fp32" * precision, count(1)

    recipe: Any = products  # the session checks it
    with initialize(model, job.optimizer(model, fused=False), plan, low=low, products=recipe) as session:
        with activity(what, quiet=quiet) as now:

            def closure() -> Tensor:
                now(f"{what}: forward pass {next(passes)}")
                return job.loss(model(inputs), targets)

            found = run_check(session, closure, precision=precision)
        stdout().print(check_text(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
        checked = {"workload": job.name, "plan": session.plan.name, "low": session.plan.low.name}
        write(json, to_json(checked | {"findings": found}))
    if any(finding.severity == "error" for finding in found):
        raise typer.Exit(FAILED)


def inspect(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    level: Level = "O1",
    low: Low = None,
    moments: Moments = None,
    products: Products = None,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show where the time, FLOPs and casts of one training step go, and what would save time."""
    job, model = open_job(workload, settings, data=data, device=device, seed=seed, json=json)
    inputs, targets = to_device_of(model, *first_batch(job, seed))

    def closure() -> Tensor:
        with foreseen(f"{job.name}: the forward pass"):
            return job.loss(model(inputs), targets)

    given: dict[str, Any] = {"low": low, "moments": moments, "products": products}  # the session checks them
    with initialize(model, job.optimizer(model, fused=False), level, **given) as session:
        with progress_bar("parts", quiet=quiet) as told:
            found = inspected(session, closure, told=told)
        stdout().print(inspection_report(found, what=f"{job.name} under {session.plan.name} in {session.plan.low}"))
        write(json, to_json({"workload": job.name, **vars(found)}))


def whatif(  # noqa: PLR0913  # each is an option of the command, described above
    workload: Name = "char_lm",
    formats: Formats = "fp16,bf16,e4m3,e5m2",
    steps: Steps = 3,
    plan: LowOf = "O2",
    loss_scale: LossScale = None,
    products: Ways = "",
    modules: Modules = False,
    settings: Settings = [],  # noqa: B006  # read only; typer's way
    data: Data = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Train a workload for a few fp32 steps; predict what other formats would lose and which loss scales are safe."""
    job, model = open_job(workload, settings, data=data, device=device, seed=seed, json=json)
    optimizer = job.optimizer(model, fused=False)
    base = [group["lr"] for group in optimizer.param_groups]
    batches = enumerate(job.batches(seed))

    def closure() -> object:
        number, (inputs, targets) = next(batches)
        progress("training in fp32, and measuring what formats would lose", min(number, steps), steps + 1)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * job.lr_factor(number, HORIZON)
        inputs, targets = to_device_of(model, inputs, targets)
        return job.loss(model(inputs), targets)

    with progress_bar("passes", quiet=quiet) as progress:
        result = predict(
            closure, model, names(formats), steps=steps, optimizer=optimizer, plan=plan, loss_scale=loss_scale,
            products=names(products),
        )  # fmt: skip
    stdout().print(whatif_report(result, modules=modules), crop=False)  # a figure is better broken than cut
    write(json, to_json(result))
