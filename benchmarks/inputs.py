"""Time of a step with inputs as given against inputs cast to low at the model's door, at O2.

    python benchmarks/inputs.py [--rounds N] [--json FILE]

An image transformer, a small diffusion UNet with timesteps, and a time-series transformer that adds its raw input to
the stream, which stays fp32 then. Both sessions take a turn in each round on one batch; the ratio is that of a round.
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
from torch import Tensor, nn

import halfstep
from halfstep.machine import read_machine
from halfstep.timing import spread

WIDTH = 256
INPUTS = ("keep", "low")


def blocks() -> nn.Module:
    """Returns four layers of a transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class ImageTransformer(nn.Module):
    """Patches of pictures go through a projection: the stream is low either way."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks, self.head = nn.Conv2d(3, WIDTH, 8, 8), blocks(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits of pictures (batch, 3, 64, 64)."""
        out: Tensor = self.head(self.blocks(self.patch(x).flatten(2).mT).mean(1))
        return out


class Diffusion(nn.Module):
    """Convolutions, with a timestep embedded beside the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = nn.Conv2d(3, 64, 3, 1, 1), nn.Conv2d(64, 128, 3, 2, 1), nn.Conv2d(128, 64, 1)
        self.time, self.last = nn.Linear(64, 128), nn.Conv2d(64, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the noise in pictures (batch, 3, 64, 64)."""
        angles = torch.linspace(0, 999, len(x))[:, None] * torch.exp(-torch.arange(32) / 4)
        first = self.first(x).relu()
        deep = self.down(first) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        out: Tensor = self.last(first + nn.functional.interpolate(self.up(deep.relu()), scale_factor=2.0))
        return out


class TimeSeries(nn.Module):
    """Adds its raw input to its stream, which is fp32 then unless the input is low."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), blocks(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a forecast of series (batch, 96, WIDTH)."""
        out: Tensor = self.head(self.blocks(x + self.first(x)))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "image transformer": (ImageTransformer, (8, 3, 64, 64)),
    "diffusion UNet": (Diffusion, (8, 3, 64, 64)),
    "time-series transformer": (TimeSeries, (8, 96, WIDTH)),
}


def step_of(make: Callable[[], nn.Module], batch: Tensor, inputs: str) -> Callable[[], None]:
    """Returns a training step under a session with these inputs."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16", input=inputs)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.zero_grad()
        session.backward(model(batch).square().mean())
        session.step()

    return step


def main() -> None:
    """Measures, prints the ratios and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    rows = {}
    for name, (make, shape) in MODELS.items():
        batch = torch.randn(shape)
        steps = {inputs: step_of(make, batch, inputs) for inputs in INPUTS}
        times: dict[str, list[float]] = {inputs: [] for inputs in INPUTS}
        for round_ in range(options.rounds + 3):
            for inputs, step in steps.items():
                start = perf_counter()
                step()
                if round_ >= 3:
                    times[inputs].append((perf_counter() - start) * 1e3)
        ratio = median(a / b for a, b in zip(times["keep"], times["low"], strict=True))
        rows[name] = {"keep_x_low": ratio, "ms": {inputs: asdict(spread(times[inputs])) for inputs in INPUTS}}
        sys.stdout.write(f"{name}: as given takes {ratio:.3f} of the time of low inputs\n")
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
