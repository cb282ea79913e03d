"""What `halfstep.check` costs, in training steps of the same model: CPU time, the least of several runs.

    python benchmarks/check_cost.py                              # all models at O2 in bf16, some minutes
    python benchmarks/check_cost.py --level O1 --only mlp [--json FILE]

Each model is checked as it is, and with a layer behind one of its modules that returns the logarithm of the ratio of
neighbouring prices, which bf16 cannot hold; `precision=False` is the check without the comparison with fp32. All runs
on one thread; a step has zero_grad, forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep
from halfstep.kinds import Kind
from halfstep.lab.workloads.char_lm import GPT
from halfstep.lab.workloads.cifar_resnet import Basic, ResNet
from halfstep.lab.workloads.imdb_lstm import SentimentLSTM
from halfstep.machine import read_machine

CLASSES = 16
Made = tuple[nn.Module, str, Tensor]  # a model, the module that the layer is put behind, and the inputs


class Returns(nn.Module):
    """Returns of prices around 400; the differences of neighbours are below bf16's spacing there."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns values with features last."""
        price = 400 + x
        return 100 * torch.log(price / price.roll(1, -1))


class TwoLstm(SentimentLSTM):
    """Two layers, and a class for each sequence."""

    def __init__(self) -> None:
        super().__init__(64, embedding=256, hidden=256)
        self.rnn, self.fc = nn.LSTM(256, 256, 2, batch_first=True), nn.Linear(256, CLASSES)
        self.behind = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        """Takes ids of shape (batch, length)."""
        return self.fc(self.behind(self.rnn(self.embedding(ids))[0]))[:, -1]  # type: ignore[no-any-return]


def _ids(*shape: int) -> Tensor:
    return torch.randint(64, shape)


def _mlp(width: int) -> Made:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), "1", torch.randn(32, width)


def _gpt(d: int, layers: int, batch: int, length: int) -> Made:
    model = GPT(64, d=d, layers=layers, heads=4, length=length)
    return model, "blocks.1.mlp", _ids(batch, length)


def _resnet(counts: tuple[int, ...], width: int, batch: int) -> Made:
    return ResNet(Basic, counts, width=width, classes=CLASSES), "stages.1.body.1", torch.randn(batch, 3, 32, 32)


MODELS: dict[str, Callable[[], Made]] = {
    "mlp, 3 x 64, batch 32": lambda: _mlp(64),
    "gpt, 2 x 32, batch 2 x 16": lambda: _gpt(32, 2, 2, 16),
    "resnet-6, 8 wide, batch 4": lambda: _resnet((1, 1), 8, 4),
    "mlp, 3 x 1024, batch 32": lambda: _mlp(1024),
    "gpt, 6 x 256, batch 8 x 128": lambda: _gpt(256, 6, 8, 128),
    "resnet-18, 64 wide, batch 16": lambda: _resnet((2, 2, 2, 2), 64, 16),
    "lstm, 2 x 256, batch 16 x 64": lambda: (TwoLstm(), "behind", _ids(16, 64)),
}


@dataclass(frozen=True)
class Row:
    """What a check of one model took, in training steps of `step` seconds, and how often it called the closure."""

    model: str
    planted: bool
    step: float  # seconds
    without: float  # precision=False
    check: float
    calls: int
    named: str | None


def least(run: Callable[[], object], times: int) -> float:
    """Returns the least CPU time of some runs, in seconds."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return min(spent)


def measure(name: str, level: str, low: str, times: int, *, planted: bool) -> Row:
    """Times steps and checks of one model."""
    torch.manual_seed(0)
    model, behind, x = MODELS[name]()
    if planted:
        model.set_submodule(behind, nn.Sequential(model.get_submodule(behind), Returns()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    calls = []

    def closure() -> Tensor:
        calls.append(0)
        outputs = model(x).float().flatten(0, -2)
        return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[-1])

    with halfstep.initialize(model, optimizer, level, low=low) as session:

        def step() -> None:
            optimizer.zero_grad()
            session.backward(closure())
            session.step()

        once = least(step, max(5, 4 * times))
        without = least(lambda: halfstep.check(session, closure, precision=False), times)
        check = least(lambda: halfstep.check(session, closure), times)
        calls.clear()
        found = [each for each in halfstep.check(session, closure) if each.code == Kind.PRECISION_LOST.value]
    named = found[0].place if found else None
    return Row(name, planted, once, without / once, check / once, len(calls), named)


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--times", type=int, default=3, help="runs of a check, of which the least counts")
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | a step | check, precision=False | check | calls | named |" + "\n|" + " --- |" * 6)
    for name in MODELS:
        for planted in (False, True) if name.startswith(options.only) else ():
            row = measure(name, options.level, options.low, options.times, planted=planted)
            rows.append(row)
            figures = f"{row.step * 1e3:.1f} ms | {row.without:.1f} steps | {row.check:.1f} steps | {row.calls}"
            print(f"| {name}{', planted' * planted} | {figures} | {row.named or '-'} |", flush=True)
    if options.json is not None:
        machine, command = asdict(read_machine(torch.device("cpu"))), shlex.join(["python", *sys.argv])
        result = {"rows": [asdict(row) for row in rows], "machine": machine, "command": command}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
