"""Paired accuracy runs: O1 and O2 in bf16 and (emulated) fp16 against O0, same seeds, same batches.

    python benchmarks/accuracy.py --data FOLDER                       # all of it, about 25 minutes on 2 cores
    python benchmarks/accuracy.py --data FOLDER --workload imdb_lstm  # one workload, 5 to 11 minutes
    python benchmarks/accuracy.py --workload char_lm --low bf16 --moments full,bf16,8bit --results FOLDER
    python benchmarks/accuracy.py --workload char_lm --low bf16 --products plan,fp8 --set d=384 --results FOLDER

The criterion: the mean over seeds of (validation loss - validation loss of O0) is at most the larger of two standard
deviations of O0 over seeds and 2% of its loss. Each finished seed is a JSON file in the folder of results and is not
run again unless `--again` is given, so an interrupted run continues where it stopped. The table is printed, and written
beside them once all seeds of all workloads are there; git keeps the table alone. Exits with 1 if a run misses the
criterion.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import msgspec
import torch

from halfstep.errors import HalfstepError
from halfstep.explain.report.lines import to_json
from halfstep.formats import as_format
from halfstep.lab.bench.bench import bench
from halfstep.lab.bench.variants import entries
from halfstep.lab.workloads.load import load_workload, parse_settings
from halfstep.machine import read_facts
from halfstep.measurements import BenchResult, BenchRun

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy"
SEEDS = (0, 1, 2)
STEPS = {"char_lm": 120, "cifar_resnet": 150, "imdb_lstm": 312}
LEVELS = ("O0", "O1", "O2")
HEADER = (
    "workload",
    "run",
    "validation loss",
    "O0",
    "mean difference",
    "allowed",
    "accuracy",
    "O0",
    "skipped",
    "verdict",
)


@dataclass(frozen=True)
class Verdict:
    """One run against O0 over all seeds: signed mean difference of the validation loss, and what is allowed."""

    workload: str
    run: str
    losses: tuple[float, ...]
    baseline: tuple[float, ...]
    allowed: float
    accuracy: tuple[float, ...]
    baseline_accuracy: tuple[float, ...]
    skipped: tuple[int, ...]

    @property
    def difference(self) -> float:
        """The mean over seeds of this run's loss minus that of O0 with the same seed."""
        return mean(a - b for a, b in zip(self.losses, self.baseline, strict=True))

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; one that is not a number is not."""
        return self.difference <= self.allowed


def verdicts(results: Sequence[BenchResult]) -> Iterator[Verdict]:
    """Yields a verdict for each run but O0 of the results of one workload, one result a seed."""
    by_name = {run.name: [_run(result, run.name) for result in results] for run in results[0].runs}
    baseline = _figure(by_name["O0"], "loss")
    allowed = max(2 * stdev(baseline) if len(baseline) > 1 else 0.0, 0.02 * mean(baseline))
    for name, runs in by_name.items():
        if name != "O0":
            yield Verdict(
                workload=results[0].workload,
                run=name,
                losses=_figure(runs, "loss"),
                baseline=baseline,
                allowed=allowed,
                accuracy=_figure(runs, "accuracy"),
                baseline_accuracy=_figure(by_name["O0"], "accuracy"),
                skipped=tuple(skips for run in runs for skips in run.skipped),
            )


def _run(result: BenchResult, name: str) -> BenchRun:
    run = next(run for run in result.runs if run.name == name)
    if run.error is not None:
        raise SystemExit(f"{result.workload} {name} did not run: {run.error}")
    return run


def _figure(runs: Sequence[BenchRun], name: str) -> tuple[float, ...]:
    return tuple(value for run in runs for value in run.validation.get(name, ()))


def table(rows: Sequence[Verdict]) -> str:
    """Returns the verdicts as a Markdown table."""
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    for row in rows:
        lines.append(
            _line(
                [
                    row.workload,
                    row.run,
                    _mean(row.losses),
                    _mean(row.baseline),
                    f"{row.difference:+.4f}",
                    f"{row.allowed:.4f}",
                    _mean(row.accuracy),
                    _mean(row.baseline_accuracy),
                    "/".join(map(str, row.skipped)),
                    "holds" if row.holds else "MISSED",
                ]
            )
        )
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.4f}" if values else "-"


def run_seed(name: str, seed: int, steps: int, options: argparse.Namespace) -> BenchResult:
    """Returns the runs of one workload and seed, with what is going on printed to stderr."""
    data = None if name == "char_lm" else options.data
    workload = load_workload(name, data=data, settings=parse_settings(options.set))
    facts = read_facts(torch.device(options.device))
    lows = map(as_format, options.low.split(","))
    ways = {"moments": options.moments.split(","), "products": options.products.split(",")}
    shown = -1

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        if done * 20 // total > shown:
            shown = done * 20 // total
            print(f"{name}, {what}: {100 * done // total}%", file=sys.stderr, flush=True)

    return bench(
        workload,
        entries(options.levels.split(","), lows, facts, peer=False, **ways),
        steps=steps,
        seeds=(seed,),
        device=torch.device(options.device),
        command=shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]]),
        memory=False,
        progress=progress,
    )


def main() -> int:
    """Runs what is not there yet, prints the table of all that is, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds cifar10/ and imdb/; not needed for char_lm")
    parser.add_argument("--workload", choices=list(STEPS), action="append", help="only this one; repeatable")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="only this one; repeatable")
    parser.add_argument("--low", default="bf16,fp16", help="low formats")
    parser.add_argument("--moments", default="full", help="how the optimizer's averages are kept: full, bf16, 8bit")
    parser.add_argument("--products", default="plan", help="how linear layers multiply: plan, fp8, fp8-row, ...")
    parser.add_argument("--levels", default=",".join(LEVELS), help="O0 and those that are compared with it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the workload")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="a GPU computes fp16 as it is")
    parser.add_argument("--steps", type=int, help="training steps (default: 120 to 312, by workload)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--again", action="store_true", help="run also what is there already")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.workload or STEPS:
        for seed in options.seed or SEEDS:
            path = options.results / f"{name}-seed{seed}.json"
            if path.exists() and not options.again:
                print(f"{path.name} is there already", file=sys.stderr)
                continue
            steps = options.steps or STEPS[name]
            result = run_seed(name, seed, steps, options)
            if not result.complete:
                print("interrupted; run the same command again to go on", file=sys.stderr)
                return 130
            path.write_text(to_json(result), encoding="utf-8")
    return report(options.results)


def read_result(path: Path) -> BenchResult:
    """Returns the benchmark that a file holds; numbers that are not finite are texts in it."""
    return msgspec.convert(json.loads(path.read_bytes()), BenchResult, strict=False)


def report(folder: Path) -> int:
    """Prints the table of all results of a folder, and writes it if none is missing; returns 1 if one misses."""
    rows: list[Verdict] = []
    for name in STEPS:
        results = [read_result(path) for path in sorted(folder.glob(f"{name}-seed*.json"))]
        if len({(result.steps, tuple(result.settings.items())) for result in results}) > 1:
            raise SystemExit(f"the results of {name} in {folder} are of different steps or settings; run with --again")
        if results:
            rows += verdicts(results)
    text = table(rows)
    if all((folder / f"{name}-seed{seed}.json").exists() for name in STEPS for seed in SEEDS):
        (folder / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HalfstepError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        sys.exit(2)
