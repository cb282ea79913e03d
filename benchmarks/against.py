"""The same training steps by this checkout of halfstep and by another one, in turn: what a change costs.

    python benchmarks/against.py CHECKOUT [--data FOLDER] [--rows small char_lm ...] [--rounds N] [--json FILE]

`CHECKOUT` is a folder with another commit (`git worktree add ../before COMMIT`). Each of the two runs in its own
process, since one process can hold one halfstep; they take turns, a block of steps at a time, and while one works the
other waits for its pipe. A ratio is the time of this checkout over that of the other one in the same round: below 1 is
faster. Both see the same weights and batches.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

HERE = Path(__file__).resolve().parent.parent
LEVELS = ("O1", "O2")
SMALL = "small"  # three layers, 64 wide: Python is all that it costs
STEP = "step"  # 13 million weights and one input: reading gradients and the update are nearly all that it costs
PROBE = "probe"  # char_lm, with every tensor looked at in every step
CHAR_LM = {"d": "128", "layers": "2"}
# Settings that make a step a tenth of a second or so, and how many steps are a block.
ROWS: dict[str, tuple[dict[str, str], int]] = {
    SMALL: ({}, 100),
    STEP: ({}, 2),
    "char_lm": (CHAR_LM, 2),
    PROBE: (CHAR_LM, 2),
    "cifar_resnet": ({"batch": "8"}, 1),
    "imdb_lstm": ({"batch": "8"}, 1),
}


def work() -> None:
    """Makes blocks of steps of one row and level, and prints the seconds of each: what the two processes run."""
    root, row, level, low, threads, data, steps = json.loads(sys.stdin.readline())
    sys.path.insert(0, root)
    import torch

    import halfstep

    assert Path(halfstep.__file__).is_relative_to(root), halfstep.__file__
    torch.set_num_threads(threads)
    if row in (SMALL, STEP):
        width, batch = (64, 32) if row == SMALL else (2048, 1)
        step = _layers(level, low, width, batch)
    else:
        step = _workload(row, level, low, data)
    for _ in range(2 * steps):
        step()
    print("ready", flush=True)
    clock = process_time if threads == 1 else perf_counter  # of one thread: what others on the machine take is no part
    for _ in sys.stdin:
        start = clock()
        for _ in range(steps):
            step()
        print(clock() - start, flush=True)


def _layers(level: str, low: str, width: int, batch: int) -> Callable[[], None]:
    import torch

    import halfstep

    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (torch.nn.Linear(width, width), torch.nn.ReLU())][:-1]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = halfstep.initialize(model, optimizer, level, low=low)
    inputs, targets = torch.randn(batch, width), torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        session.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        session.step(max_norm=1.0)

    return step


def _workload(row: str, level: str, low: str, data: str | None) -> Callable[[], None]:
    import halfstep
    from halfstep.lab.workloads.load import load_workload

    settings, _ = ROWS[row]
    name = "char_lm" if row == PROBE else row
    own_text = name == "char_lm" or data is None  # it comes with halfstep
    workload = load_workload(name, settings, data=None if own_text else Path(data))
    model = workload.build(0)
    optimizer = workload.optimizer(model, fused=False)
    session = halfstep.initialize(model, optimizer, level, low=low)
    if row == PROBE:
        session.observe(every=1)
    batches = list(islice(workload.batches(0), 8))
    turns = iter(range(10**9))

    def step() -> None:
        inputs, targets = batches[next(turns) % len(batches)]
        optimizer.zero_grad()
        session.backward(workload.loss(model(inputs), targets))
        session.step(max_norm=1.0)

    return step


def turns(roots: list[Path], row: str, level: str, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Yields the seconds of a block by this checkout and by the other one, round by round."""
    steps = ROWS[row][1]
    start = [row, level, options.low, 1 if row == SMALL else options.threads, options.data, steps]
    command = [sys.executable, "-W", "ignore", __file__, "--work"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ours,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as theirs,
    ):
        for process, root in zip((ours, theirs), roots, strict=True):
            _ask(process, json.dumps([str(root), *start]))
        for round_ in range(options.rounds):
            order = (ours, theirs) if round_ % 2 else (theirs, ours)
            taken = {process: float(_ask(process, "go")) for process in order}
            yield taken[ours], taken[theirs]
        for process in (ours, theirs):
            assert process.stdin is not None
            process.stdin.close()


def _ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"a process ended with {process.wait()} instead of an answer")
    return answer


def main() -> None:
    """Measures, prints a row for each ratio and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a folder with another commit of halfstep")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS))
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", help="the folder with CIFAR-10 and IMDB")
    parser.add_argument("--json", type=Path, help="write every ratio, with machine and versions, to this file")
    options = parser.parse_args()
    roots = [HERE, options.other.resolve()]
    found: dict[str, dict[str, float]] = {}
    for row in options.rows:
        for level in options.levels:
            pairs = list(turns(roots, row, level, options))
            ratios = [ours / theirs for ours, theirs in pairs]
            low, middle, high = quantiles(ratios, n=4)
            found[f"{row} {level}"] = {"time_ratio": median(ratios), "low": low, "high": high}
            print(
                f"{row:14} {level} {options.low}: {middle:.3f} of the other's time (quartiles {low:.3f} to {high:.3f})",
                flush=True,
            )
    if options.json is not None:
        sys.path.insert(0, str(HERE))
        from dataclasses import asdict

        import torch

        from halfstep.machine import read_machine

        result = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rounds": options.rounds,
            "rows": found,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
