"""A training run that checkpoints as it goes and resumes from its last checkpoint; test_kill.py kills it."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from tests.contracts.cases import batch, snapshot, start

EVERY = 3


def run(name: str, low: str, folder: Path, steps: int, moments: str, waits: bool = False) -> None:
    """Trains to the end; the loss curve and the end state are left in the folder.

    One that `waits` prints each step number, and goes on when it is given a line.
    """
    # Smaller weights keep moments in bf16.
    model, opt, session = start(name, low, width=16 if moments == "full" else 64, moments=moments)

    path, curve, first = folder / "last.pt", [], 0
    if path.exists():
        states = torch.load(path, weights_only=True)
        model.load_state_dict(states["model"])
        opt.load_state_dict(states["optimizer"])
        session.load_state_dict(states["session"])
        curve, first = states["curve"], states["step"]
    for step in range(first, steps):
        inputs, targets = batch(step)
        if step % 17 == 5:
            inputs[0, 0] = torch.inf  # a skipped step now and then
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        session.backward(loss)
        session.step(max_norm=1.0)
        curve.append(loss.item())
        if step % EVERY == EVERY - 1:
            states = {"model": model.state_dict(), "optimizer": opt.state_dict(), "session": session.state_dict()}
            torch.save({**states, "curve": curve, "step": step + 1}, folder / "next.pt")
            os.replace(folder / "next.pt", path)
        if waits:
            print(step, flush=True)
            sys.stdin.readline()
    torch.save({"end": snapshot(model, opt, session), "curve": torch.tensor(curve)}, folder / "end.pt")


def main() -> None:
    name, low, folder, steps, moments, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))  # sums depend on it
    run(name, low, Path(folder), int(steps), moments, waits=True)
