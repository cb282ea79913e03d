"""Trains a job whose gradients fp16 loses, without a loss scale and with the constant one that what-if recommends.

    python benchmarks/recommended_scale.py --data FOLDER --json FILE  # about 4 minutes on 2 cores

The job: a classifier of Fashion-MNIST with a decoder beside it that reconstructs the image from the features, a
regularizer whose loss counts 0.0005, as in Sabour et al. (2017), "Dynamic routing between capsules", section 4.1. Taken
as the mean over pixels and images, as `nn.MSELoss` does, it sends a gradient of at most 2 x 0.0005 / (128 x 784) = 1e-8
into each pixel, and fp16 rounds to zero what is at most 2**-25 = 3e-8. Adam makes the steps as large as if the gradient
were.

What-if predicts from fp32 steps what is lost and which scale is recommended. Then O0 and, in fp16 (emulated where the
device has no units for it), O1 and O2 with loss scale 1 and with the recommended one train on the same batches from the
same weights. The criterion, of the means over seeds: with the recommended scale, reconstruction error and cross entropy
of 2,000 test images are at most 2% above those of O0; with scale 1 the reconstruction error is at least 50% above.
Exits with 1 where a run misses it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep
from halfstep.lab.workloads.workload import seeded, shuffled
from halfstep.machine import read_machine

BATCH, LR, WEIGHT = 128, 1e-3, 0.0005
STEPS = 150
SEEDS = 2
LEVELS = ("O1", "O2")
SAME, WORSE = 1.02, 1.5
TESTED = 2000
HOW_TO_GET = (
    "give a folder with fashion_mnist/ and its four files of https://github.com/zalandoresearch/fashion-mnist in it "
    "(torchvision.datasets.FashionMNIST(FOLDER, download=True) puts them into FOLDER/FashionMNIST/raw)"
)


class Autoencoder(nn.Module):
    """Features of an image, ten logits from them, and the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 10)
        self.decoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Maps images (batch, 784) to logits (batch, 10) and images."""
        features = self.encoder(images)
        return self.classifier(features), self.decoder(features)


@dataclass(frozen=True)
class Images:
    """Pixels (N, 784) from 0 to 1 and labels (N,)."""

    pixels: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Images:
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Run:
    """A training: reconstruction error and cross entropy of the test images before and after, and accuracy."""

    plan: str
    scale: float
    seed: int
    steps: int
    error_before: float
    error: float
    entropy: float
    accuracy: float
    skipped: int


@dataclass(frozen=True)
class Predicted:
    """What what-if says at a level: the share of gradients lost at scale 1 in each module, and its scales."""

    plan: str
    lost: dict[str, float]
    smallest: float | None
    largest: float
    recommended: float


def read(folder: Path, split: str) -> Images:
    """Returns a split, train or t10k, of Fashion-MNIST's own files."""
    try:
        pixels, labels = (
            np.frombuffer(gzip.decompress((folder / f"{split}-{name}.gz").read_bytes()), np.uint8, offset=offset)
            for name, offset in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
        )
    except OSError as error:
        raise SystemExit(f"{error}; {HOW_TO_GET}") from error
    return Images(torch.tensor(pixels.reshape(-1, 784)).float() / 255, torch.tensor(labels).long())


def loss_of(model: nn.Module, batch: Images) -> Tensor:
    """Returns the loss of a batch."""
    logits, images = model(batch.pixels)
    return F.cross_entropy(logits, batch.labels) + WEIGHT * F.mse_loss(images, batch.pixels)


def batches(train: Images, seed: int) -> Iterator[Images]:
    """Yields shuffled batches without end."""
    return (train[chosen] for chosen in shuffled(len(train.labels), BATCH, seed))


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model and its optimizer."""
    model = seeded(seed, Autoencoder)
    return model, torch.optim.Adam(model.parameters(), lr=LR)


def predict(train: Images, plan: str) -> Predicted:
    """Returns what what-if recommends, and what it says of scale 1."""
    model, optimizer = build(0)
    lost: dict[str, float] = {}
    for loss_scale in (None, 1.0):
        some = batches(train, 0)
        found = halfstep.whatif(
            lambda some=some: loss_of(model, next(some)),  # type: ignore[misc]
            model,
            ("fp16",),
            optimizer=optimizer,
            plan=plan,
            loss_scale=loss_scale,
        )
        lost = {row.module: row.lost for row in found.rows if row.kind == "activation_grad" and row.low}
    scales = found.scale("fp16")
    return Predicted(plan, lost, scales.smallest, scales.largest, scales.recommended)


def measure(model: nn.Module, test: Images) -> tuple[float, float, float]:
    """Returns reconstruction error, cross entropy and accuracy."""
    model.eval()
    with torch.no_grad():
        logits, images = model(test.pixels)
    model.train()
    right = (logits.argmax(1) == test.labels).float().mean()
    return float(F.mse_loss(images, test.pixels)), float(F.cross_entropy(logits, test.labels)), float(right)


def train_under(plan: str, scale: float, data: tuple[Images, Images], *, seed: int, steps: int) -> Run:
    """Trains and measures one run; O0 is fp32."""
    train, test = data
    model, optimizer = build(seed)
    before, _, _ = measure(model, test)
    low = {} if plan == "O0" else {"low": "fp16", "loss_scale": scale}
    with halfstep.initialize(model, optimizer, plan, **low) as session:
        for _, batch in zip(range(steps), batches(train, seed), strict=False):
            optimizer.zero_grad()
            session.backward(loss_of(model, batch))
            session.step()
        error, entropy, accuracy = measure(model, test)
        skipped = session.status().skipped
    return Run(plan, scale, seed, steps, before, error, entropy, accuracy, skipped)


@dataclass(frozen=True)
class Row:
    """The runs of a level with a scale, of every seed, against those of O0: ratios of the means, and the verdict."""

    plan: str
    scale: float
    recommended: bool
    error: float
    error_to_baseline: float
    entropy_to_baseline: float
    accuracy: float
    skipped: int

    @property
    def holds(self) -> bool:
        """Whether it trains as O0 does, or with scale 1 does not."""
        if self.recommended:
            return max(self.error_to_baseline, self.entropy_to_baseline) <= SAME
        return self.error_to_baseline >= WORSE


def judge(runs: Sequence[Run], baseline: Sequence[Run], recommended: bool) -> Row:
    """Returns the row of the runs that differ in nothing but their seed."""
    return Row(
        plan=runs[0].plan,
        scale=runs[0].scale,
        recommended=recommended,
        error=mean(run.error for run in runs),
        error_to_baseline=mean(run.error for run in runs) / mean(run.error for run in baseline),
        entropy_to_baseline=mean(run.entropy for run in runs) / mean(run.entropy for run in baseline),
        accuracy=mean(run.accuracy for run in runs),
        skipped=sum(run.skipped for run in runs),
    )


def table(baseline: Sequence[Run], rows: Sequence[Row]) -> str:
    """Returns the runs as a Markdown table."""
    before, error, right = (
        mean(getattr(run, key) for run in baseline) for key in ("error_before", "error", "accuracy")
    )
    lines = [
        "| run | loss scale | reconstruction error | to O0 | cross entropy to O0 | accuracy | skipped | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| before | - | {before:.4f} | {before / error:.3f} | - | - | - | - |",
        f"| O0 | - | {error:.4f} | 1 | 1 | {right:.3f} | 0 | - |",
    ]
    for row in rows:
        ratios = f"{row.error_to_baseline:.3f} | {row.entropy_to_baseline:.3f} | {row.accuracy:.3f} | {row.skipped}"
        name = f"{row.scale:g}{' (recommended)' if row.recommended else ''}"
        verdict = ("trains as O0" if row.recommended else "does not train") if row.holds else "MISSED"
        lines.append(f"| {row.plan} fp16 | {name} | {row.error:.4f} | {ratios} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    """Runs all, prints the table, writes every figure, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with fashion_mnist/")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    train = read(options.data / "fashion_mnist", "train")
    data = (train, read(options.data / "fashion_mnist", "t10k")[:TESTED])
    predicted = [predict(train, plan) for plan in LEVELS]

    def several(plan: str, scale: float) -> list[Run]:
        print(f"{plan}, loss scale {scale:g}", file=sys.stderr, flush=True)
        return [train_under(plan, scale, data, seed=seed, steps=options.steps) for seed in range(options.seeds)]

    baseline = several("O0", 1.0)
    tried = [
        (several(each.plan, scale), scale == each.recommended)
        for each in predicted
        for scale in (1.0, each.recommended)
    ]
    rows = [judge(runs, baseline, recommended) for runs, recommended in tried]
    for each in predicted:
        lost = ", ".join(f"{module} {share:.0%}" for module, share in each.lost.items())
        print(f"{each.plan}: recommended {each.recommended:g}; gradients lost at 1: {lost}")
    print(table(baseline, rows))
    if options.json is not None:
        result = {
            "predicted": [asdict(each) for each in predicted],
            "rows": [{**asdict(row), "holds": row.holds} for row in rows],
            "runs": [asdict(run) for runs in (baseline, *(runs for runs, _ in tried)) for run in runs],
            "machine": asdict(read_machine(torch.device("cpu"))),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
