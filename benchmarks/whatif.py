"""What `halfstep.whatif` predicts from fp32 steps against what a real low run of the same steps does.

    python benchmarks/whatif.py --data FOLDER                       # all of it, about 15 minutes on 2 cores
    python benchmarks/whatif.py --data FOLDER --workload imdb_lstm  # one workload

Both start from the same weights and train on the same batches: whatif in fp32, the other in a session (fp16 emulated
where the device has no units for it) with the same constant loss scale, once 1 and once the recommended one. For each
module and kind of tensor the share of nonzero values that are zero in the low run (its zeros less those of the fp32
run) is compared with the predicted loss, and the share of non-finite values with the predicted saturation.

The criterion is one percentage point, for every kind of tensor over all modules and for every single module. Some
shares are not defined that well: behind a BatchNorm nearly all values of a channel are the same tiny number, and where
it lies by the smallest one of the format, the whole channel is lost or is not, by chance. So where a module is further
off, both are run again from weights that differ by less than half a unit in the last place of the format, which is
what rounding changes them by, and the module meets the criterion if the range of its predicted shares and that of its
real ones are at most one point apart.

Each comparison is a JSON file in the folder of results and is not run again unless `--again` is given, so an
interrupted run continues where it stopped. The table is printed, and written beside them once all workloads are there;
git keeps the table alone. Exits with 1 if a comparison misses the criterion.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep.errors import HalfstepError
from halfstep.explain.forecast.backward import TensorName, step
from halfstep.formats import as_format
from halfstep.lab.workloads.load import load_workload
from halfstep.lab.workloads.workload import Workload, to_device_of
from halfstep.machine import read_machine
from halfstep.records import TENSOR_KINDS

RESULTS = Path(__file__).resolve().parent / "results" / "whatif"
WORKLOADS = {"char_lm": None, "cifar_resnet": "cifar10", "imdb_lstm": "imdb", "regression": None}
ALLOWED = 0.01
STEPS = 3
DRAWS = 3  # further runs of both, where a module is further off than what is allowed
HORIZON = 100  # steps of the whole training that the learning rate is scheduled for


@dataclass(frozen=True)
class Difference:
    """One kind of tensor of one module: how many elements, and shares of them predicted and real."""

    module: str
    kind: str
    count: int
    nonzero: int
    lost: float
    really_lost: float
    saturated: float
    really_saturated: float

    @property
    def most(self) -> float:
        """The larger of the two differences."""
        return max(abs(self.lost - self.really_lost), abs(self.saturated - self.really_saturated))


@dataclass(frozen=True)
class Scatter:
    """The shares of a module and kind, first of the comparison, then of runs from weights that hardly differ."""

    module: str
    kind: str
    lost: tuple[float, ...]
    really_lost: tuple[float, ...]
    saturated: tuple[float, ...]
    really_saturated: tuple[float, ...]

    @property
    def apart(self) -> float:
        """How far the range of what was predicted is from that of what was seen; 0 where they overlap."""
        pairs = ((self.lost, self.really_lost), (self.saturated, self.really_saturated))
        return max(0.0, *(max(min(a) - max(b), min(b) - max(a)) for a, b in pairs))


@dataclass(frozen=True)
class Comparison:
    """A workload in a format at a level with a constant loss scale; `differences` has the largest first.

    `whole` is the largest difference of a kind over all modules, `most` that of a single module, and `scattered` has
    the modules that are further off than what is allowed.
    """

    workload: str
    low: str
    plan: str
    scale: float
    recommended: bool
    largest: float
    steps: int
    skipped: int
    compared: int
    whole: float
    most: float
    lost: float
    differences: tuple[Difference, ...]
    scattered: tuple[Scatter, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every kind over all modules, and every module, is as near as is allowed."""
        beyond = [row for row in self.differences if row.most > ALLOWED]
        return (
            self.whole <= ALLOWED
            and len(beyond) == len(self.scattered)
            and all(row.apart <= ALLOWED for row in self.scattered)
        )


def compare(
    job: Workload,
    low: str,
    plan: str,
    device: torch.device | str = "cpu",
    *,
    scale: float | None = None,
    steps: int = STEPS,
    draws: int = DRAWS,
) -> Comparison:
    """Returns how far prediction and low run are apart; without a `scale` at the recommended one."""
    first = _once(job, low, plan, device, scale=scale, steps=steps)
    beyond = [(row.module, row.kind) for row in first.differences if row.most > ALLOWED]
    if not beyond or not draws:
        return first
    several = [
        first,
        *(_once(job, low, plan, device, scale=first.scale, steps=steps, draw=n + 1) for n in range(draws)),
    ]
    by_place = [{(row.module, row.kind): row for row in one.differences} for one in several]
    return replace(first, scattered=tuple(_scatter([rows[place] for rows in by_place]) for place in beyond))


def _scatter(rows: Sequence[Difference]) -> Scatter:
    return Scatter(
        rows[0].module,
        rows[0].kind,
        lost=tuple(row.lost for row in rows),
        really_lost=tuple(row.really_lost for row in rows),
        saturated=tuple(row.saturated for row in rows),
        really_saturated=tuple(row.really_saturated for row in rows),
    )


def _once(
    job: Workload, low: str, plan: str, device: torch.device | str, *, scale: float | None, steps: int, draw: int = 0
) -> Comparison:
    model = _model(job, low, draw).to(device)
    optimizer = job.optimizer(model, fused=False)
    closure = _closure(job, model, optimizer)
    found = halfstep.whatif(closure, model, (low,), steps=steps, optimizer=optimizer, plan=plan, loss_scale=scale)
    carried = next(row.scale for row in found.rows if row.kind == "weight_grad")
    counted, skipped = _low_run(job, _model(job, low, draw).to(device), low, plan, scale=carried, steps=steps)
    rows = [(row, counted[row.module, row.kind]) for row in found.rows if (row.module, row.kind) in counted]
    differences = sorted(
        (
            Difference(
                row.module,
                row.kind,
                row.stats.count,
                row.stats.nonzero,
                row.lost,
                (zeros - row.stats.zeros) / max(row.stats.nonzero, 1),
                row.saturated,
                nonfinite / count,
            )
            for row, (count, zeros, nonfinite) in rows
        ),
        key=lambda difference: -difference.most,
    )
    return Comparison(
        workload=job.name,
        low=low,
        plan=plan,
        scale=carried,
        recommended=scale is None,
        largest=found.scale(low).largest,
        steps=steps,
        skipped=skipped,
        compared=len(differences),
        whole=max(_whole([d for d in differences if d.kind == kind]) for kind in TENSOR_KINDS),
        most=differences[0].most,
        lost=max(row.lost for row, _ in rows),
        differences=tuple(differences),
    )


def _model(job: Workload, low: str, draw: int) -> torch.nn.Module:
    """Returns the model; but for draw 0 each weight is changed by less than half a unit in its last place in `low`."""
    model = job.build(0)
    if draw:
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.mul_(1 + as_format(low).eps / 4 * spread)
    return model


def _whole(rows: Sequence[Difference]) -> float:
    """Returns the larger difference of the shares over all these modules together."""
    nonzero, count = max(sum(row.nonzero for row in rows), 1), max(sum(row.count for row in rows), 1)
    lost = sum((row.lost - row.really_lost) * row.nonzero for row in rows) / nonzero
    saturated = sum((row.saturated - row.really_saturated) * row.count for row in rows) / count
    return max(abs(lost), abs(saturated))


def _closure(
    job: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, skip: int = 0
) -> Callable[[], Tensor]:
    """Returns what computes the loss of one batch after the other, and sets the learning rate of its step before."""
    numbered = enumerate(job.batches(0))
    base = [group["lr"] for group in optimizer.param_groups]

    def closure() -> Tensor:
        number, (inputs, targets) = next(numbered)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * job.lr_factor(number, HORIZON)
        inputs, targets = to_device_of(model, inputs, targets)
        return job.loss(model(inputs), targets)

    for _ in range(skip):
        next(numbered)
    return closure


def _low_run(
    job: Workload, model: torch.nn.Module, low: str, plan: str, *, scale: float, steps: int
) -> tuple[dict[Any, list[int]], int]:
    """Trains the steps that were predicted, and returns (count, zeros, non-finite) of each module and kind."""
    optimizer = job.optimizer(model, fused=False)
    closure = _closure(job, model, optimizer, skip=1)  # whatif takes a batch to see what is low
    session = halfstep.initialize(model, optimizer, plan, low=low, loss_scale=scale)
    counted: dict[Any, list[int]] = {}

    def see(place: TensorName, tensor: Tensor) -> None:
        sums = counted.setdefault(place[:2], [0, 0, 0])
        for index, count in enumerate((tensor.numel(), (tensor == 0).sum(), (~tensor.isfinite()).sum())):
            sums[index] += int(count)

    for _ in range(steps):
        optimizer.zero_grad()
        step(model, closure, see, backward=session.backward)
        session.step()
    skipped = session.status().skipped
    session.close()
    return counted, skipped


def table(rows: Sequence[Comparison]) -> str:
    """Returns the comparisons as a Markdown table."""
    header = (
        "| workload | run | loss scale | most lost in a module | difference, all | one module | where "
        "| ranges apart | verdict |"
    )
    lines = [header, "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        worst = row.differences[0]
        lines.append(
            f"| {row.workload} | {row.plan} {row.low} | {row.scale:g}{' (recommended)' if row.recommended else ''} "
            f"| {row.lost:.2%} | {100 * row.whole:.3f} points | {100 * row.most:.3f} points "
            f"| {worst.module} {worst.kind} of {row.compared} | {_apart(row.scattered)} "
            f"| {'holds' if row.holds else 'MISSED'} |"
        )
    return "\n".join(lines)


def _apart(rows: Sequence[Scatter]) -> str:
    """Returns the largest distance of the ranges of the modules that one run left further off, and their number."""
    return f"{100 * max(row.apart for row in rows):.3f} points ({len(rows)} modules)" if rows else "-"


def main() -> int:
    """Runs the comparisons that are not there yet, writes their JSON and the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with cifar10/ and imdb/")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one; repeatable")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also run what is there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.workload or WORKLOADS:
            _run(name, options)
    except HalfstepError as error:
        raise SystemExit(str(error)) from error
    rows = [_read(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(options.out.glob("*.json"))]
    text = table(rows)
    print(text)
    if {row.workload for row in rows} == set(WORKLOADS):
        (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    return 0 if all(row.holds for row in rows) else 1


def _run(name: str, options: argparse.Namespace) -> None:
    folder = WORKLOADS[name]
    if folder is not None and options.data is None:
        raise SystemExit(f"{name} reads data: give --data FOLDER, with {folder}/ in it")
    job = load_workload(name, data=None if folder is None else options.data / folder)
    device: torch.device = options.device
    for low, plan in itertools.product(("fp16", "bf16"), ("O1", "O2")):
        for scale in (None, 1.0) if low == "fp16" else (None,):  # bf16 needs no scale
            path = options.out / f"{name}-{plan}-{low}-{'recommended' if scale is None else 'one'}.json"
            if path.exists() and not options.again:
                continue
            row = compare(job, low, plan, device, scale=scale, steps=options.steps)
            print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
            result = {
                **asdict(row),
                "machine": asdict(read_machine(device)),
                "command": shlex.join(["python", *sys.argv]),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _read(entry: dict[str, Any]) -> Comparison:
    known = {field.name: entry[field.name] for field in fields(Comparison)}
    return Comparison(
        **{
            **known,
            "differences": tuple(Difference(**row) for row in known["differences"]),
            "scattered": tuple(
                Scatter(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
                for row in known["scattered"]
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
