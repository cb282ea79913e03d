"""What a probe costs: steps of char_lm with and without one, taken in turn on the same batches in one process.

    python benchmarks/probe_cost.py                          # O1 bf16, 30 steps, under a minute on 2 cores
    python benchmarks/probe_cost.py --level O2 --steps 100 [--device cuda]
    python benchmarks/probe_cost.py --cycles 5               # 5 times 50 steps at every=50
    python benchmarks/probe_cost.py --only "precision alone" # one row

Every row trains its own model from the same weights. A ratio is the median over steps of the time with a probe over the
time without one in the same turn; with --cycles it is the median over cycles of 50 steps, of which one is observed, of
the sum of their times over the sum of those without a probe. Reading the results on the host (`flush`) is timed apart.
Writes JSON beside the other results with --save.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import halfstep
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.machine import read_machine
from halfstep.records import TENSOR_KINDS, UPDATE
from halfstep.timing import synchronize
from halfstep.train.probe.probe import Probe

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLE = 2**14
NEVER = 10**9  # attached, but no step after the first is observed
CYCLE = 50
ALL = (*TENSOR_KINDS, UPDATE)
ROWS: dict[str, dict[str, object]] = {
    "not observed": {"every": NEVER, "tensors": ALL},
    "absorbed alone": {"every": 1, "tensors": (), "absorbed": True},
    "precision alone": {"every": 1, "tensors": (), "precision": True},
    "four kinds": {"every": 1},
    "all five kinds": {"every": 1, "tensors": ALL},
    f"four kinds, sample {SAMPLE:,}": {"every": 1, "sample": SAMPLE},
    f"all five kinds, sample {SAMPLE:,}": {"every": 1, "tensors": ALL, "sample": SAMPLE},
}
CYCLE_ROWS: dict[str, dict[str, object]] = {
    f"every {CYCLE}, absorbed alone": {"every": CYCLE, "tensors": (), "absorbed": True},
    f"every {CYCLE}": {"every": CYCLE},
    f"every {CYCLE}, all five kinds": {"every": CYCLE, "tensors": ALL},
}
WARM_UP = 4


class Run:
    """A model in training, with a probe or without."""

    def __init__(
        self, workload: CharLM, level: str, low: str, options: dict[str, object] | None, device: torch.device
    ) -> None:
        self.workload = workload
        self.model = workload.build(0).to(device)
        self.device = device
        self.optimizer = workload.optimizer(self.model, fused=True)
        self.session = halfstep.initialize(self.model, self.optimizer, level, low=low)
        self.probe: Probe | None = None if options is None else self.session.observe(**options)  # type: ignore[arg-type]
        self.times: list[float] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Trains one step and keeps its time in seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.session.backward(self.workload.loss(self.model(inputs), targets))
        self.session.step(max_norm=1.0)
        synchronize(self.device)
        self.times.append(time.perf_counter() - start)


def turns(names: list[str], steps: int) -> Iterator[list[str]]:
    """Yields the order of the rows for each step; each is first equally often."""
    for step in range(steps):
        first = step % len(names)
        yield names[first:] + names[:first]


def ratio(mine: list[float], base: list[float], span: int) -> float:
    """Returns the median, over spans of so many steps, of what they took against the same of another run."""
    spans = range(0, len(base), span)
    return median(sum(mine[at : at + span]) / sum(base[at : at + span]) for at in spans)


def main() -> None:
    """Measures, prints the table, and keeps it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O1")
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows, steps, span = (CYCLE_ROWS, CYCLE * options.cycles, CYCLE) if options.cycles else (ROWS, options.steps, 1)
    rows = {options.only: ROWS[options.only]} if options.only else rows
    workload = CharLM()
    batches = workload.batches(0)
    runs = {"no probe": Run(workload, options.level, options.low, None, options.device)}
    runs |= {name: Run(workload, options.level, options.low, row, options.device) for name, row in rows.items()}
    for order in turns(list(runs), WARM_UP + steps):
        inputs, targets = (each.to(options.device) for each in next(batches))
        for name in order:
            runs[name].step(inputs, targets)
    base = runs["no probe"].times[WARM_UP:]
    ratios = {name: ratio(run.times[WARM_UP:], base, span) for name, run in runs.items()}
    probe = list(runs.values())[-1].probe
    assert probe is not None
    start = time.perf_counter()
    seen = probe.flush()
    observed = len({observation.step for observation in seen})
    flush = (time.perf_counter() - start) / observed
    print(f"char_lm {options.level} {options.low}, {steps} steps, {median(base) * 1e3:.1f} ms without a probe")
    for name, value in ratios.items():
        print(f"  {name:30} {100 * (value - 1):+6.1f}%")
    print(f"  flush: {flush * 1e3:.1f} ms an observed step of {len(seen) // observed} tensors")
    if options.save:
        machine = read_machine(options.device)
        where = f"{machine.cores}-cores" if options.device.type == "cpu" else options.device.type
        what = "-every-50" if options.cycles else ""
        target = RESULTS / f"probe-cost-{options.level}-{options.low}{what}-{where}.json"
        result = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "machine": asdict(machine),
            "ratios": ratios,
            "flush_ms": flush * 1e3,
            "times_ms": {name: [round(1e3 * t, 3) for t in run.times[WARM_UP:]] for name, run in runs.items()},
        }
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
