"""Runs `halfstep bench` again and again and says how often two runs of the same code are reported as different.

    python benchmarks/bench_noise.py [--pairs 20] [--steps 100] [--json FILE] [-- WORKLOAD --levels O0,O1 ...]

Consecutive runs make the pairs, and every level above O0 counts. `--slowdown 1.05` multiplies the step times of those
rows in the later run of each pair by 1.05, and counts how often that is reported as slower. Run it on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from halfstep.bench.against import compare, load_saved
from halfstep.machine import read_machine
from halfstep.measurements import BenchResult

DEFAULT = ["char_lm", "--set", "d=64", "--set", "layers=1", "--levels", "O0,O1,O2", "--low", "bf16"]


def read(path: Path) -> BenchResult:
    """Returns the result that `halfstep bench --json FILE` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=BenchResult, strict=False)


def slowed(result: BenchResult, factor: float) -> BenchResult:
    """Returns a result whose levels above O0 took `factor` times as long."""
    runs = [
        run if run.peer or run.level == "O0" else replace(run, times_ms=tuple(factor * each for each in run.times_ms))
        for run in result.runs
    ]
    return replace(result, runs=tuple(runs))


def main() -> None:
    """Measures, prints the counts and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slowdown", type=float, default=1.05)
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    parser.add_argument("bench", nargs="*", default=DEFAULT, help="what is measured, as for halfstep bench")
    options = parser.parse_args()
    same: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(options.pairs + 1)]
        for path in paths:
            command = [sys.executable, "-m", "halfstep", "bench", *options.bench, "--steps", str(options.steps)]
            subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        for before, after in pairwise(paths):
            saved, now = load_saved(before), read(after)
            for counts, result in ((same, now), (planted, slowed(now, options.slowdown))):
                levels = {run.name for run in now.runs if not run.peer and run.level != "O0" and run.error is None}
                counts.update(each.verdict for each in compare(saved, result) if each.name in levels)
    screen = Console()
    screen.print(f"same code: {dict(same)}")
    screen.print(f"{options.slowdown:g} times as long: {dict(planted)}")
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "same": dict(same),
            "planted": dict(planted),
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
