"""What code under a torch.autocast of its own pays for a session of another model that is open in the same process.

    python benchmarks/open_session.py [--rounds 15] [--emulate] [--json FILE]

Three processes take turns: one has opened no session, one has a session at O1 open, and one at O2. Each times single
operations, attention with its backward pass, and steps of GPT, a small ResNet and 24 small blocks, all in bf16 under
torch.autocast, on one thread, as CPU time. The table has the least time of each, over that without a session. With
`--emulate` the sessions emulate bf16, as they do by default on a processor without bf16 units.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import torch
from host_cost import GPT, LOW, Step, blocks, save
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import halfstep

F = nn.functional
ALONE, LEVELS = "no session", ("O1", "O2")
TURN = 2e-3  # seconds, about


class Residual(nn.Module):
    """Two convolutions with norms, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the values of the next block."""
        return F.relu(x + self.norm_2(self.second(F.relu(self.norm_1(self.first(x))))))


def resnet(channels: int = 4) -> nn.Module:
    """Returns a ResNet of four blocks."""
    body = [Residual(channels) for _ in range(4)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


def operations() -> dict[str, Step]:
    """Returns calls of single operations, by name."""
    x, low, weight = torch.randn(4, 16), torch.randn(4, 16, dtype=LOW), torch.ones(16)
    images, tokens = torch.randn(2, 4, 4, 4, dtype=LOW), torch.tensor([[0, 1, 2]])
    square, kernel, one = torch.randn(16, 16, dtype=LOW), torch.randn(4, 4, 3, 3, dtype=LOW), torch.ones(4)
    mean, variance, index = torch.zeros(4), torch.ones(4), torch.tensor([0, 1])
    heads = [torch.randn(1, 2, 8, 8, dtype=LOW, requires_grad=True) for _ in range(3)]

    def attention() -> None:
        F.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()

    return {
        "add": lambda: low + low,
        "linear": lambda: F.linear(low, square),
        "matmul": lambda: low @ square,
        "conv2d": lambda: F.conv2d(images, kernel),
        "layer_norm": lambda: F.layer_norm(low, (16,), weight, weight),
        "group_norm": lambda: F.group_norm(images, 2, one, one),
        "batch_norm": lambda: F.batch_norm(images, mean, variance, one, one, training=True),
        "softmax": lambda: low.softmax(-1),
        "exp": low.exp,
        "pow": lambda: low.pow(2),
        "sum": low.sum,
        "cat": lambda: torch.cat([low, low]),
        "stack": lambda: torch.stack([low, low]),
        "embedding": lambda: F.embedding(tokens, low),
        "index_add": lambda: low.index_add(0, index, low[:2]),
        "mse_loss": lambda: F.mse_loss(low, x),
        "cross_entropy": lambda: F.cross_entropy(low, torch.tensor([0, 1, 2, 3])),
        "attention and its backward": attention,
    }


def step_of(model: nn.Module, inputs: Tensor) -> Step:
    """Returns a training step of a model under torch.autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=LOW):
            out = model(inputs)
        out.float().square().mean().backward()
        optimizer.step()

    return step


def networks() -> dict[str, Step]:
    """Returns training steps under torch.autocast, by the name of the network."""
    torch.manual_seed(0)
    return {
        "GPT, 32 wide, 8 layers": step_of(GPT(), torch.randint(16, (1, 4))),
        "ResNet, 8 convolutions": step_of(resnet(), torch.randn(2, 4, 4, 4)),
        "24 blocks, 16 wide": step_of(blocks(), torch.randn(4, 16)),
    }


def work(level: str | None, emulate: bool, pipe: Connection) -> None:
    """Opens a session of a model that is not timed; then times the calls that the parent names."""
    torch.set_num_threads(1)
    if level is not None:
        other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        session = halfstep.initialize(
            other, torch.optim.AdamW(other.parameters()), level, low=LOW, emulate=None if emulate else False
        )
        session.backward(other(torch.randn(2, 4)).square().mean())
        session.step()
    under = partial(torch.autocast, "cpu", dtype=LOW)
    calls = {**{name: (call, True) for name, call in operations().items()}}
    calls.update({name: (call, False) for name, call in networks().items()})
    repeats: dict[str, int] = {}
    while (name := pipe.recv()) is not None:
        call, inside = calls[name]
        with under(enabled=inside):
            if name not in repeats:
                call()
                repeats[name] = max(1, round(TURN / _time(call, 3)))
            pipe.send(_time(call, repeats[name]))


def _time(call: Callable[[], object], repeats: int) -> float:
    start = process_time()
    for _ in range(repeats):
        call()
    return (process_time() - start) / repeats


def measure(names: list[str], rounds: int, *, emulate: bool) -> dict[str, dict[str, float]]:
    """Returns the least seconds of a call, by its name and process."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = {}, []
    for level in (None, *LEVELS):
        pipes[level or ALONE], theirs = context.Pipe()
        workers.append(context.Process(target=work, args=(level, emulate, theirs), daemon=True))
        workers[-1].start()
    least = {name: dict.fromkeys(pipes, float("inf")) for name in names}
    for _ in range(rounds):
        for name in names:
            for which, pipe in pipes.items():
                pipe.send(name)
                least[name][which] = min(least[name][which], pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    for worker in workers:
        worker.join()
    return least


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", help="only this operation or network; may be given several times")
    parser.add_argument("--emulate", action="store_true", help="sessions emulate where that is their default")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    names = options.only or [*operations(), *networks()]
    least = measure(names, options.rounds, emulate=options.emulate)
    table = Table(Column("under torch.autocast", no_wrap=True), "us", *(f"beside {level}" for level in LEVELS))
    rows = []
    for name, found in least.items():
        ratios = {level: found[level] / found[ALONE] for level in LEVELS}
        rows.append({"name": name, "us": found[ALONE] * 1e6, "time_x_alone": ratios})
        table.add_row(name, f"{found[ALONE] * 1e6:.1f}", *(f"{ratio:.2f}" for ratio in ratios.values()))
    Console().print(table)
    save(options.json, rounds=options.rounds, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
