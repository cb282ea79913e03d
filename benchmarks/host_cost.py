"""What Python costs in a whole step of four small networks: halfstep's time over that of torch.amp in another process.

    python benchmarks/host_cost.py [--rounds 30] [--steps 20] [--json FILE]

A step is zero_grad, forward, loss, backward, clip and an update of AdamW(fused=True), in bf16 with torch's own low
kernels, on one thread. The networks are so small that kernels hardly count, also where the processor has no bf16 units.

Each loop has a process of its own, so the one with torch.amp never sees an open session. The processes take turns; a
turn is `--steps` steps, timed as CPU time. The table has the least turn of each loop, and the quartiles of the ratios
of the turns of one round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import halfstep
from halfstep.machine import read_machine
from halfstep.timing import spread

F = nn.functional
LOW, MAX_NORM, LR = torch.bfloat16, 1.0, 1e-4
PEER, LEVELS = "torch.amp", ("O1", "O2")
Step = Callable[[], None]


class Attention(nn.Module):
    """Causal self-attention with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended values."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """A layer of GPT: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the values of the next layer."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """GPT of eight layers, 32 wide."""

    def __init__(self, width: int = 32, layers: int = 8, vocabulary: int = 16, length: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next tokens."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


def blocks(width: int = 16, depth: int = 24) -> nn.Module:
    """Returns blocks of LayerNorm, Linear, GELU and Linear."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    return nn.Sequential(*(block() for _ in range(depth)))


def convolutions(channels: int = 4, depth: int = 8) -> nn.Module:
    """Returns convolutions, each with a BatchNorm and a ReLU."""

    def layer() -> nn.Module:
        convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())

    return nn.Sequential(*(layer() for _ in range(depth)))


def perceptron(width: int = 64) -> nn.Module:
    """Returns an MLP of three layers."""
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )


def network(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    """Returns a network, a batch of inputs and targets for it, and its loss; the same in every process."""
    torch.manual_seed(0)
    if name == "GPT, 32 wide, 8 layers":
        return GPT(), (torch.randint(16, (1, 4)), torch.randint(16, (1, 4))), _cross_entropy
    made = {"24 blocks, 16 wide": blocks, "8 Conv-BatchNorm-ReLU": convolutions, "MLP, 64 wide": perceptron}[name]()
    shape = {"24 blocks, 16 wide": (4, 16), "8 Conv-BatchNorm-ReLU": (2, 4, 4, 4), "MLP, 64 wide": (2, 64)}[name]
    return made, (torch.randn(shape), torch.randn(shape)), F.mse_loss


NETWORKS = ("24 blocks, 16 wide", "8 Conv-BatchNorm-ReLU", "GPT, 32 wide, 8 layers", "MLP, 64 wide")


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(name: str, region: Callable[[], AbstractContextManager[object]] = nullcontext) -> Step:
    """Returns the step of a loop as the documentation of torch.amp writes it; forward runs inside `region()`."""
    model, (inputs, targets), loss_of = network(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    parameters = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with region():
            out = model(inputs)
        loss_of(out.float(), targets).backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return step


def by_halfstep(name: str, level: str) -> Step:
    """Returns the step under a session."""
    model, (inputs, targets), loss_of = network(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    session = halfstep.initialize(model, optimizer, level, low=LOW, emulate=False)

    def step() -> None:
        optimizer.zero_grad()
        session.backward(loss_of(model(inputs), targets))
        session.step(max_norm=MAX_NORM)

    return step


def amp_step(name: str) -> Step:
    """Returns the step of the loop with torch.amp."""
    return by_hand(name, partial(torch.autocast, "cpu", dtype=LOW))


def work(loop: str, steps: int, pipe: Connection) -> None:
    """Makes the loop's networks in this process; then times `steps` steps of each network that the parent names."""
    torch.set_num_threads(1)
    made: dict[str, Step] = {}
    while (name := pipe.recv()) is not None:
        if name not in made:
            made[name] = amp_step(name) if loop == PEER else by_halfstep(name, loop)
            for _ in range(10):
                made[name]()
        step = made[name]
        step()
        start = process_time()
        for _ in range(steps):
            step()
        pipe.send((process_time() - start) / steps)


def measure(names: tuple[str, ...], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of a step, by network and loop, in each round."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = {}, []
    for loop in (PEER, *LEVELS):
        pipes[loop], theirs = context.Pipe()
        workers.append(context.Process(target=work, args=(loop, steps, theirs), daemon=True))
        workers[-1].start()
    times: dict[str, dict[str, list[float]]] = {name: {loop: [] for loop in pipes} for name in names}
    for name in names:
        for _ in range(rounds):
            for loop, pipe in pipes.items():
                pipe.send(name)
                times[name][loop].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    for worker in workers:
        worker.join()
    return times


def rows_of(times: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    """Returns a row for each network and level: the least times, their ratio, and quartiles of the paired ratios."""
    rows: list[dict[str, object]] = []
    for name, loops in times.items():
        for level in LEVELS:
            paired = [a / b for a, b in zip(loops[level], loops[PEER], strict=True)]
            rows.append(
                {
                    "network": name,
                    "level": level,
                    "us": min(loops[level]) * 1e6,
                    "peer_us": min(loops[PEER]) * 1e6,
                    "time_x_peer": min(loops[level]) / min(loops[PEER]),
                    "paired": asdict(spread(paired)),
                }
            )
    return rows


def save(path: Path | None, **found: object) -> None:
    """Writes what was found as JSON, with the command, the time and the machine, if there is a path."""
    if path is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            **found,
        }
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn")
    parser.add_argument(
        "--network", action="append", choices=NETWORKS, help="only this one; may be given several times"
    )
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    rows = rows_of(measure(tuple(options.network or NETWORKS), options.rounds, options.steps))
    table = Table(Column("network", no_wrap=True), "level", "us", "torch.amp", "x torch.amp", "quartiles of pairs")
    for row in rows:
        paired = row["paired"]
        quartiles = f"{paired['low']:.3f}-{paired['high']:.3f}"
        table.add_row(
            row["network"],
            row["level"],
            f"{row['us']:.0f}",
            f"{row['peer_us']:.0f}",
            f"{row['time_x_peer']:.3f}",
            quartiles,
        )
    Console().print(table)
    save(options.json, rounds=options.rounds, steps=options.steps, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
