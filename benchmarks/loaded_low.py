"""A GPT that was loaded in bf16 and is fine-tuned at a small rate: in fp32, by halfstep, and in bf16 alone.

    python benchmarks/loaded_low.py [--steps 300] [--lr 7e-6] [--json FILE]

The model (10.7 million parameters) first learns Tiny Shakespeare in lower case, in fp32, and is rounded to bf16, as
hubs store models. From there it is fine-tuned on the text in capitals, on the same batches in every row. Adam moves a
weight by at most about `lr` per step; bf16 rounds a move away where it is less than half the distance between
neighbours, which is 2**(e - 8) for a weight of at least 2**e. At 7e-6 that holds for all weights beyond 2**-9.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import halfstep
from halfstep.lab.workloads.char_lm import CharLM, read_text
from halfstep.machine import read_machine

ROWS = {"fp32": None, "bf16": None, "halfstep O2": "O2", "halfstep O1": "O1"}
POINTS = 10  # of each curve, beside its start


def table_of(case: Callable[[str], str]) -> Tensor:
    """Returns for each character's number that of the character in lower or upper case."""
    characters = sorted(set(read_text(None)))
    return torch.tensor([characters.index(ord(case(chr(each)))) for each in characters])


LOWER, UPPER = table_of(str.lower), table_of(str.upper)


def train_source(job: CharLM, steps: int) -> nn.Module:
    """Returns a model that has learnt the text in lower case, in fp32, as a hub would have it in bf16."""
    model = job.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in islice(job.batches(1), steps):
        optimizer.zero_grad()
        job.loss(model(LOWER[inputs]), LOWER[targets]).backward()
        optimizer.step()
    return model.bfloat16()


@torch.no_grad()
def validate(job: CharLM, model: nn.Module) -> float:
    """Returns the mean loss in nats per character of the validation text."""
    model.eval()
    losses = [job.loss(model(UPPER[inputs]).float(), UPPER[targets]).item() for inputs, targets in job.validation()]
    model.train()
    return sum(losses) / len(losses)


def curve(job: CharLM, loaded: nn.Module, row: str, steps: int) -> Iterator[tuple[int, float]]:
    """Fine-tunes a copy of the loaded model; yields the validation loss at the start and after each of `POINTS`."""
    model = copy.deepcopy(loaded)
    if row == "fp32":
        model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    level = ROWS[row]
    session = None if level is None else halfstep.initialize(model, optimizer, level, low="bf16")
    yield 0, validate(job, model)
    for step, (inputs, targets) in enumerate(islice(job.batches(0), steps), 1):
        optimizer.zero_grad()
        loss = job.loss(model(UPPER[inputs]).float(), UPPER[targets])
        if session is None:
            loss.backward()
            optimizer.step()
        else:
            session.backward(loss)
            session.step()
        if step % max(1, steps // POINTS) == 0:
            yield step, validate(job, model)


def main() -> None:
    """Trains every row, prints its curve, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--before", type=int, default=100, help="steps in lower case, before the model is loaded")
    parser.add_argument("--lr", type=float, default=7e-6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    job = CharLM(d=options.width, layers=6, heads=6, batch=4, length=64, eval_windows=32, lr=options.lr)
    screen = Console()
    loaded = train_source(job, options.before)
    size = sum(p.numel() for p in loaded.parameters())
    screen.print(f"{size / 1e6:.1f} million parameters, loaded in bf16")
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in options.rows:
        curves[row] = []
        for step, loss in curve(job, loaded, row, options.steps):
            curves[row].append((step, loss))
            screen.print(f"{row:>12}, step {step:4}: {loss:.4f}")
    falls = {row: 1 - points[-1][1] / points[0][1] for row, points in curves.items()}
    for row, fall in falls.items():
        share = f", {fall / falls['fp32']:.1%} of fp32's fall" if falls.get("fp32") else ""
        screen.print(f"{row:>12}: the loss falls by {fall:.2%}{share}")
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "parameters": size,
            "falls": falls,
            "curves": curves,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
