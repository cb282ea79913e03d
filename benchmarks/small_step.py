"""A whole step of a small network, where Python is all that costs: halfstep against torch.amp.

    python benchmarks/small_step.py [--steps 1000] [--device cuda] [--json FILE]

The network has three layers, 64 wide; a step is zero_grad, forward, loss, backward, clip, update of AdamW(fused=True),
on one thread, in CPU time. Each ratio is against the loop that does the same work: with `torch.amp.GradScaler` where
halfstep scales the loss, without where it does not. torch.amp has a process of its own, in which no session is open;
the processes take turns of 20 steps, of which the first 4 are not timed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from halfstep.formats import BF16
from halfstep.lab.bench.bench import bench
from halfstep.lab.bench.lane import Origin
from halfstep.lab.bench.variants import PEER, Entry
from halfstep.lab.workloads.load import Regression
from halfstep.measurements import BenchResult


@dataclass(frozen=True, kw_only=True)
class Small(Regression):
    """The network, its data and its optimizer."""

    name: ClassVar[str] = "small"
    batch: int = 32
    lr: float = 1e-4
    max_norm: float | None = 1.0
    d_in: int = 64
    d_out: int = 64
    layers: int = 3

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=fused)


def small() -> Small:
    """Returns the workload; the process of torch.amp loads it by this name."""
    return Small()


def measure(levels: tuple[str, ...], steps: int, device: torch.device, *, scaled: bool) -> BenchResult:
    """Returns the times of torch.amp and of some levels in bf16, with or without a loss scale."""
    names = [(PEER, True), *((level, False) for level in levels)]
    return bench(
        small(),
        [Entry(level, BF16, peer=peer, scaled=scaled) for level, peer in names],
        steps=steps,
        device=device,
        origin=Origin(f"{Path(__file__).resolve()}:small", {}),
        command=shlex.join(["python", "benchmarks/small_step.py", *sys.argv[1:]]),
    )


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measure(("O1", "O2", "O3"), options.steps, options.device, scaled=False),
        measure(("O1", "O2"), options.steps, options.device, scaled=True),
    ]
    table = Table("step", "us (quartiles)", "time x torch.amp", title=f"64 wide, {options.steps} steps")
    rows: dict[str, dict[str, Any]] = {}
    for run in (run for result in results for run in result.runs):
        if run.step_ms is None or run.vs_amp is None:
            sys.exit(f"{run.name} was not measured: {run.error or 'too few steps'}")
        low, middle, high = (1e3 * each for each in (run.step_ms.low, median(run.times_ms), run.step_ms.high))
        rows[run.name] = {"time_x_peer": 1 / run.vs_amp, "us": {"median": middle, "low": low, "high": high}}
        table.add_row(run.name, f"{middle:.0f} ({low:.0f}-{high:.0f})", f"{1 / run.vs_amp:.3f}")
    Console().print(table)
    if options.json is not None:
        result = {
            "command": results[0].command,
            "date": results[0].date,
            "machine": asdict(results[0].machine),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
