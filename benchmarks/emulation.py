"""What emulation costs on a processor without low-precision units: a step's CPU time over fp32's and torch.amp's.

    python benchmarks/emulation.py [--rounds 5] [--network NAME ...] [--native] [--json FILE]

A step is zero_grad, forward, loss, backward, clip and an update of AdamW(fused=True), on one thread. Each loop has a
process of its own, so those without halfstep never see a session. The processes take turns; the table has the least
step of each. torch.amp, with torch's own bf16 kernels, takes up to 70 times fp32's time there: it makes one step in a
turn, and `--native` has sessions with these kernels (`emulate=False`) too.

`--compiled` trains through torch.compile. Where the processor has units, take them from torch with
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import torch
from host_cost import GPT, Step, blocks, perceptron, save
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import halfstep
from halfstep.lab.workloads.cifar_resnet import Basic, ResNet

F = nn.functional
FP32, AMP = "fp32", "torch.amp bf16"
SESSIONS = ("O1 bf16", "O2 bf16", "O1 fp16", "O2 fp16")


class Recurrent(nn.Module):
    """An LSTM of two layers, 256 wide, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 128), nn.Linear(256, 100)
        self.lstm = nn.LSTM(128, 256, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits."""
        return self.head(self.lstm(self.tokens(tokens))[0])


def perceptron_wide() -> nn.Module:
    """Returns four linear layers, 1,024 wide, with a ReLU after each."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def resnet() -> nn.Module:
    """Returns a ResNet-18 for images of 32x32."""
    return ResNet(Basic, (2, 2, 2, 2), width=64, classes=10)


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns random inputs and targets."""
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


# By name: how the network is made, a batch, and how many steps make a turn.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], int]] = {
    "GPT, 256 wide, 4 layers": (partial(GPT, 256, 4, 128, 128), partial(tokens, 8, 128, 128), 1),
    "ResNet-18, 32x32": (resnet, lambda: (torch.randn(4, 3, 32, 32), torch.randint(10, (4,))), 1),
    "LSTM, 2 layers, 256 wide": (Recurrent, partial(tokens, 8, 32, 100), 2),
    "MLP, 4 layers, 1024 wide": (perceptron_wide, lambda: (torch.randn(64, 1024), torch.randn(64, 1024)), 2),
    "MLP, 64 wide": (perceptron, lambda: (torch.randn(32, 64), torch.randn(32, 64)), 20),
    "24 blocks, 16 wide": (blocks, lambda: (torch.randn(8, 16), torch.randn(8, 16)), 10),
}


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of logits, or the mean squared error."""
    if targets.is_floating_point():
        return F.mse_loss(out.float(), targets)
    return F.cross_entropy(out.float().flatten(0, -2), targets.flatten())


def step_of(name: str, loop: str, compiled: bool) -> Step:
    """Returns the step of a network under a loop: fp32, torch.amp, or a session ("O1 bf16", "O1 bf16 native")."""
    torch.manual_seed(0)
    make, batch, _ = NETWORKS[name]
    model, (inputs, targets) = make(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = list(model.parameters())
    region: Callable[[], AbstractContextManager[object]] = nullcontext
    if loop not in (FP32, AMP):
        level, low, *native = loop.split()
        session = halfstep.initialize(model, optimizer, level, low=low, emulate=not native)
        run = torch.compile(model) if compiled else model

        def under_session() -> None:
            optimizer.zero_grad()
            session.backward(loss_of(run(inputs), targets))
            session.step(max_norm=1.0)

        return under_session
    if loop == AMP:
        region = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    plain = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with region():
            out = plain(inputs)
        loss_of(out, targets).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def work(loop: str, compiled: bool, pipe: Connection) -> None:
    """Times turns of the networks that the parent names; sends the least seconds of a step, or an error's text."""
    torch.set_num_threads(1)
    made: dict[str, Step] = {}
    while (name := pipe.recv()) is not None:
        try:
            if name not in made:
                made[name] = step_of(name, loop, compiled)
                made[name]()
            times = []
            for _ in range(1 if loop == AMP else NETWORKS[name][2]):
                start = process_time()
                made[name]()
                times.append(process_time() - start)
            pipe.send(min(times))
        except RuntimeError as error:  # torch.amp has no LSTM there
            pipe.send(str(error).splitlines()[0])


def measure(names: list[str], loops: list[str], rounds: int, compiled: bool) -> list[dict[str, object]]:
    """Returns a row for each network and loop: the least seconds of a step, over fp32's and torch.amp's."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for loop in loops:
        pipes[loop], theirs = context.Pipe()
        context.Process(target=work, args=(loop, compiled, theirs), daemon=True).start()
    rows: list[dict[str, object]] = []
    for name in names:
        best: dict[str, float | str] = {}
        for _ in range(rounds):
            for loop, pipe in pipes.items():
                if not isinstance(best.get(loop), str):
                    pipe.send(name)
                    found = pipe.recv()
                    best[loop] = found if isinstance(found, str) else min(best.get(loop, found), found)
        for loop, seconds in best.items():
            row = {"network": name, "loop": loop, "seconds": seconds}
            for key, peer in (("x_fp32", best[FP32]), ("x_amp", best.get(AMP))):
                row[key] = None if isinstance(seconds, str) or not isinstance(peer, float) else seconds / peer
            rows.append(row)
    for pipe in pipes.values():
        pipe.send(None)
    return rows


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="may be given several times")
    parser.add_argument("--native", action="store_true", help="sessions with torch's own kernels too")
    parser.add_argument("--compiled", action="store_true", help="through torch.compile")
    parser.add_argument("--no-amp", action="store_true", help="without torch.amp")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    native = [f"{level} bf16 native" for level in ("O1", "O2")] if options.native else []
    loops = [FP32, *SESSIONS, *native, *([] if options.no_amp else [AMP])]
    rows = measure(options.network or list(NETWORKS), loops, options.rounds, options.compiled)
    table = Table("network", "loop", "ms", "x fp32", "x torch.amp")
    for row in rows:
        seconds = row["seconds"]
        ratios = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("x_fp32", "x_amp")]
        table.add_row(
            row["network"], row["loop"], seconds if isinstance(seconds, str) else f"{seconds * 1e3:.2f}", *ratios
        )
    Console().print(table)
    save(options.json, rounds=options.rounds, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
