"""What a probe costs: steps of char_lm with and without one, taken in turn on the same batches in one process.

    python benchmarks/probe_cost.py                          # O1 bf16, 40 steps, under a minute on 2 cores
    python benchmarks/probe_cost.py --level O2 --steps 100

Every row trains its own model from the same weights. A ratio is the median over steps of the time with a probe over the
time without one in the same turn; "every 50" is a step that is not observed and a fiftieth of one that is, over a step
without a probe. Reading the results on the host (`flush`) is timed apart. Writes JSON beside the other results with
--save.
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
from halfstep.observe.probe import Probe
from halfstep.plan.machine import read_machine
from halfstep.records import TENSOR_KINDS, UPDATE
from halfstep.workloads.char_lm import CharLM

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLE = 2**14
NEVER = 10**9  # attached, but no step after the first is observed
ROWS = {
    "not observed": {"every": NEVER},
    "every step": {"every": 1},
    f"every step, sample {SAMPLE:,}": {"every": 1, "sample": SAMPLE},
    "every step, and updates": {"every": 1, "tensors": (*TENSOR_KINDS, UPDATE)},
}
WARM_UP = 4


class Run:
    """A model in training, with a probe or without."""

    def __init__(self, workload: CharLM, level: str, low: str, options: dict[str, object] | None) -> None:
        self.workload = workload
        self.model = workload.build(0)
        self.optimizer = workload.optimizer(self.model, fused=True)
        self.session = halfstep.initialize(self.model, self.optimizer, level, low=low)
        self.probe: Probe | None = None if options is None else self.session.observe(**options)  # type: ignore[arg-type]
        self.times: list[float] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Trains one step and keeps its time in seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.session.backward(self.workload.loss(self.model(inputs), targets))
        self.session.step(max_norm=1.0)
        self.times.append(time.perf_counter() - start)


def turns(names: list[str], steps: int) -> Iterator[list[str]]:
    """Yields the order of the rows for each step; each is first equally often."""
    for step in range(steps):
        first = step % len(names)
        yield names[first:] + names[:first]


def main() -> None:
    """Measures, prints the table, and keeps it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O1")
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    workload = CharLM()
    batches = workload.batches(0)
    runs = {"no probe": Run(workload, options.level, options.low, None)}
    runs |= {name: Run(workload, options.level, options.low, row) for name, row in ROWS.items()}
    for order in turns(list(runs), WARM_UP + options.steps):
        inputs, targets = next(batches)
        for name in order:
            runs[name].step(inputs, targets)
    base = runs["no probe"].times[WARM_UP:]
    ratios = {
        name: median(mine / other for mine, other in zip(run.times[WARM_UP:], base, strict=True))
        for name, run in runs.items()
    }
    ratios["every 50"] = (49 * ratios["not observed"] + ratios["every step"]) / 50
    probe = runs["every step"].probe
    assert probe is not None
    start = time.perf_counter()
    tensors = len(probe.flush())
    flush = (time.perf_counter() - start) / (WARM_UP + options.steps)
    print(f"char_lm {options.level} {options.low}, {options.steps} steps, {median(base) * 1e3:.1f} ms without a probe")
    for name, ratio in ratios.items():
        print(f"  {name:28} {100 * (ratio - 1):+6.1f}%")
    print(f"  flush: {flush * 1e3:.1f} ms an observed step of {tensors // (WARM_UP + options.steps)} tensors")
    if options.save:
        machine = read_machine(torch.device("cpu"))
        target = RESULTS / f"probe-cost-{options.level}-{options.low}-{machine.cores}-cores.json"
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
