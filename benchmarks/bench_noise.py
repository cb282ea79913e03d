"""How often `halfstep bench --against FILE` calls runs of the same code different, and a planted slowdown alike.

    python benchmarks/bench_noise.py FOLDER [--runs 21] [--draws 200] [--json FILE] [-- WORKLOAD --levels O0,O1 ...]

Runs the benchmark in so many processes, whose results stay in FOLDER (those that are there are not made again). Then it
draws from them, again and again, two results of `--processes` processes that share none, and counts the verdicts on
every level above O0: as they are, and with the step times of these rows multiplied by `--slowdown` in the later one.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from halfstep.bench.against import compare
from halfstep.bench.repeat import together
from halfstep.bench.results import read_bench
from halfstep.machine import read_machine
from halfstep.measurements import BenchResult

DEFAULT = [
    *("char_lm", "--set", "d=64", "--set", "layers=1", "--set", "batch=4", "--set", "eval_windows=8"),
    *("--levels", "O0,O1,O2", "--low", "bf16", "--steps", "100"),
]


def slowed(result: BenchResult, factor: float) -> BenchResult:
    """Returns a result whose levels above O0 took `factor` times as long."""
    runs = [
        run if run.peer or run.level == "O0" else replace(run, times_ms=tuple(factor * each for each in run.times_ms))
        for run in result.runs
    ]
    return replace(result, runs=tuple(runs))


def joined(results: Sequence[BenchResult]) -> BenchResult:
    """Returns results of several processes as `halfstep bench --processes N` does, and that of one as it is."""
    return together(results) if len(results) > 1 else results[0]


def main() -> None:
    """Measures, draws, prints the counts and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--slowdown", type=float, default=1.05)
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    parser.add_argument("bench", nargs="*", default=DEFAULT, help="what is measured, as for halfstep bench")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    paths = [options.folder / f"{number}.json" for number in range(options.runs)]
    for path in paths:
        if not path.exists():
            command = [sys.executable, "-m", "halfstep", "bench", *options.bench, "--json", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results, chance, rows = [read_bench(path) for path in paths], random.Random(0), []
    for count in options.processes:
        same: Counter[str] = Counter()
        planted: Counter[str] = Counter()
        for _ in range(options.draws):
            drawn = chance.sample(results, 2 * count)
            saved, now = joined(drawn[:count]), joined(drawn[count:])
            for counts, result in ((same, now), (planted, slowed(now, options.slowdown))):
                levels = {run.name for run in now.runs if not run.peer and run.level != "O0" and run.error is None}
                counts.update(each.verdict for each in compare(saved, result) if each.name in levels)
        rows.append({"processes": count, "same": dict(same), "slowed": dict(planted)})
        Console().print(
            f"{count} processes each: same code: {dict(same)}; {options.slowdown:g} times as long: {dict(planted)}"
        )
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "bench": shlex.join(["halfstep", "bench", *options.bench]),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "runs": options.runs,
            "slowdown": options.slowdown,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
