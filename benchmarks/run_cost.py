"""What `halfstep run` adds to a step of char_lm, over the same script converted by hand.

    python benchmarks/run_cost.py [--level O1] [--low bf16] [--rounds 60] [--set d=64] [--json FILE]

Two processes train the same model on the same batches, one under `halfstep run`, one with a session that its author
opened (`session.backward`, `unscale_`, torch's own clip, `session.step`). They take turns, a step each, on one thread;
the ratio is the median over the rounds. Both must have the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from halfstep.machine import read_machine
from halfstep.timing import spread

WARM_UP = 5
SCRIPT = """
import sys
from time import perf_counter

import torch
{head}
from halfstep.lab.workloads.load import load_workload, parse_settings

torch.set_num_threads(1)
job = load_workload("char_lm", parse_settings(sys.argv[1:]))
model = job.build(0)
optimizer = job.optimizer(model, fused=False)
batches = iter(job.batches(0))
{opened}
for turn in sys.stdin:  # a line for each step
    inputs, targets = next(batches)
    start = perf_counter()
    optimizer.zero_grad()
    loss = job.loss(model(inputs), targets)
    {backward}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    {step}
    took = perf_counter() - start
    print(took, loss.item().hex(), flush=True)
"""
PLAIN = {"head": "", "opened": "", "backward": "loss.backward()", "step": "optimizer.step()"}
BY_HAND = {
    "head": "import halfstep",
    "opened": 'session = halfstep.initialize(model, optimizer, "{level}", low="{low}")',
    "backward": "session.backward(loss); session.unscale_()",
    "step": "session.step()",
}


def started(command: list[str]) -> subprocess.Popen[str]:
    """Returns a process that makes a step for each line that it is given."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def step(process: subprocess.Popen[str]) -> tuple[float, str]:
    """Has a process make a step; returns its seconds and its loss."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    took, loss = process.stdout.readline().split()
    return float(took), loss


def main() -> None:
    """Measures, prints the ratio and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O1")
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], help="a setting of the workload, such as d=64")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, by_hand = Path(folder) / "plain.py", Path(folder) / "by_hand.py"
        plain.write_text(SCRIPT.format(**PLAIN), encoding="utf-8")
        opened = BY_HAND["opened"].format(level=options.level, low=options.low)
        by_hand.write_text(SCRIPT.format(**{**BY_HAND, "opened": opened}), encoding="utf-8")
        chosen = ["--level", options.level, "--low", options.low]
        rows = {
            "halfstep run": started([sys.executable, "-m", "halfstep", "run", *chosen, str(plain), *options.set]),
            "by hand": started([sys.executable, str(by_hand), *options.set]),
        }
        times: dict[str, list[float]] = {name: [] for name in rows}
        for round_ in range(WARM_UP + options.rounds):
            turns = list(rows.items())[:: 1 if round_ % 2 else -1]  # each is the first one in turn
            taken = {name: step(process) for name, process in turns}
            if len({loss for _, loss in taken.values()}) > 1:
                sys.exit(f"the losses of step {round_ + 1} differ: {taken}")
            for name, (seconds, _) in taken.items():
                if round_ >= WARM_UP:
                    times[name].append(seconds * 1e3)
        for process in rows.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    ratio = median(a / b for a, b in zip(times["halfstep run"], times["by hand"], strict=True))
    screen = Console()
    for name, each in times.items():
        figures = spread(each)
        assert figures is not None
        screen.print(f"{name:>12}: {figures.median:.2f} ms ({figures.low:.2f} to {figures.high:.2f})")
    screen.print(f"time of a step under halfstep run / converted by hand: {ratio:.4f}")
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "ratio": ratio,
            "ms": {name: asdict(spread(each)) for name, each in times.items()},
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
