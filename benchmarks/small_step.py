"""A whole step of a small network, where Python is all that costs: halfstep against torch.amp loops written by hand.

    python benchmarks/small_step.py [--json FILE]

The network has three layers, 64 wide; a step is zero_grad, forward, loss, backward, clip, update of AdamW(fused=True),
on one thread. Every row takes a turn in each round; the ratios are those of one round, and each is against the loop
that does the same work: with `torch.amp.GradScaler` where halfstep scales the loss, without where it does not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import halfstep
from halfstep.machine import read_machine
from halfstep.timing import spread

WIDTH, BATCH, MAX_NORM, LR = 64, 32, 1.0, 1e-4
LOW = torch.bfloat16
AMP, AMP_SCALED = "torch.amp", "torch.amp with GradScaler"
Step = Callable[[], None]


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the network and its optimizer, the same at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def by_hand(inputs: torch.Tensor, targets: torch.Tensor, *, scaled: bool) -> Step:
    """Returns the step of a torch.amp loop as its documentation writes it."""
    model, optimizer = network()
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=LOW):
            out = model(inputs)
        loss = nn.functional.mse_loss(out.float(), targets)
        if scaled:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()

    return step


def by_halfstep(inputs: torch.Tensor, targets: torch.Tensor, level: str, *, scaled: bool) -> Step:
    """Returns the step under a session."""
    model, optimizer = network()
    scale = "dynamic" if scaled else None
    session = halfstep.initialize(model, optimizer, level, low=LOW, loss_scale=scale)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        session.backward(loss)
        session.step(max_norm=MAX_NORM)

    return step


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    rows: dict[str, tuple[Step, str]] = {
        AMP: (by_hand(inputs, targets, scaled=False), AMP),
        AMP_SCALED: (by_hand(inputs, targets, scaled=True), AMP_SCALED),
    }
    for level in ("O1", "O2", "O3"):
        rows[level] = (by_halfstep(inputs, targets, level, scaled=False), AMP)
        if level != "O3":
            rows[f"{level}, dynamic scale"] = (by_halfstep(inputs, targets, level, scaled=True), AMP_SCALED)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(options.rounds + 50):
        for name, (step, _) in rows.items():
            start = perf_counter()
            step()
            if round_ >= 50:
                times[name].append((perf_counter() - start) * 1e6)
    ratios = {
        name: median(a / b for a, b in zip(times[name], times[peer], strict=True)) for name, (_, peer) in rows.items()
    }
    table = Table("step", "us (quartiles)", "time x peer", "peer", title=f"{WIDTH} wide, {options.rounds} rounds")
    for name, (_, peer) in rows.items():
        s = spread(times[name])
        table.add_row(name, f"{s.median:.0f} ({s.low:.0f}-{s.high:.0f})", f"{ratios[name]:.3f}", peer)
    Console().print(table)
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": {
                name: {"peer": peer, "time_x_peer": ratios[name], "us": asdict(spread(times[name]))}
                for name, (_, peer) in rows.items()
            },
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
