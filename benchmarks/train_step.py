"""A whole training step of GPT-2 (124 million parameters) and of ResNet-50, under every level and under torch.amp.

    python benchmarks/train_step.py                                  # both; sizes by device
    python benchmarks/train_step.py --workload gpt2 --layers 2 --context 128 --batch 2 --steps 10

Tokens and images are random, as speed does not depend on them: nothing here says anything about accuracy. On a GPU
images have 224 pixels, on a CPU 32, where GPT-2 also has one sequence a step. All rows start from the same weights and
take a turn in each round on the same batch; ratios are those of one round. O3 is the speed of light: low weights, no
masters, low norms. torch.amp is autocast around the model, the fused optimizer and, in fp16, a GradScaler; the compiled
row compiles the model. Each row of torch.amp has a process of its own, in which no session is ever open.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.explain.report.lines import to_json
from halfstep.formats import BF16, FP32, Format, as_format
from halfstep.lab.bench.bench import bench
from halfstep.lab.bench.lane import Origin
from halfstep.lab.bench.variants import Entry, SessionVariant, Variant, entries
from halfstep.lab.workloads.char_lm import Block
from halfstep.lab.workloads.cifar_resnet import Bottleneck, ResNet
from halfstep.lab.workloads.workload import Batch, Workload, seeded
from halfstep.machine import DeviceFacts, read_facts
from halfstep.measurements import BenchResult, BenchRun
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.timing import speedup

CLASSES = 1000
SHRINKABLE = ("layers", "context", "vocabulary")


class GPT2(nn.Module):
    """GPT-2 as Radford et al. 2019 have it: learned positions, pre-norm blocks, the output tied to the embedding."""

    def __init__(self, vocabulary: int, *, d: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(context, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps tokens (batch, time) to logits (batch, time, vocabulary)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@dataclass(frozen=True, kw_only=True)
class Gpt2(Workload):
    """Next-token prediction on random tokens under AdamW with clipping."""

    name: ClassVar[str] = "gpt2"
    reads_data: ClassVar[bool] = False
    lr: float = 6e-4
    max_norm: float | None = 1.0
    d: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257

    def build(self, seed: int) -> nn.Module:
        """Returns the GPT."""
        sizes = {"d": self.d, "layers": self.layers, "heads": self.heads, "context": self.context}
        return seeded(seed, lambda: GPT2(self.vocabulary, **sizes))

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns AdamW with weight decay on matrices alone."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=fused)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yields random tokens."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            tokens = torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def validation(self) -> Iterable[Batch]:
        """Yields one sequence, as its loss says nothing."""
        inputs, targets = next(self.batches(0))
        return [(inputs[:1], targets[:1])]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross entropy in nats a token."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class ResNet50(Workload):
    """Classification of random images in 1,000 classes under SGD with momentum, in channels_last on large images."""

    name: ClassVar[str] = "resnet50"
    reads_data: ClassVar[bool] = False
    lr: float = 0.1
    pixels: int = 224
    width: int = 64

    def build(self, seed: int) -> nn.Module:
        """Returns the ResNet, with the 7x7 stem and the pooling of the paper where the images are large."""
        return seeded(seed, self._build)

    def _build(self) -> nn.Module:
        model = ResNet(Bottleneck, (3, 4, 6, 3), width=self.width, classes=CLASSES)
        if self.pixels > 64:
            conv = nn.Conv2d(3, self.width, 7, 2, padding=3, bias=False)
            model.stem = nn.Sequential(conv, nn.BatchNorm2d(self.width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
            model = model.to(memory_format=torch.channels_last)
        return model

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns SGD with momentum 0.9 and weight decay 1e-4."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4, fused=fused)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yields one random batch again and again: large ones take longer to draw than to train on."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)
        if self.pixels > 64:
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (self.batch,), generator=generator)
        while True:
            yield images, labels

    def validation(self) -> Iterable[Batch]:
        """Yields one image, as its loss says nothing."""
        images, labels = next(self.batches(0))
        return [(images[:1], labels[:1])]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross entropy in nats an image."""
        return F.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class FullEntry(Entry):
    """O0 on a GPU with the TF32 units on or off, whatever torch's defaults are."""

    tf32: bool = False

    @property
    def plan(self) -> Plan:
        """O0, whatever the row is called."""
        return level("O0", BF16)

    def start(self, workload: Workload, seed: int, device: torch.device) -> Variant:
        """Builds the model and makes it ready to train."""
        return Full(workload, workload.build(seed).to(device), tf32=self.tf32)


class Full(SessionVariant):
    """O0 with TF32 on or off while it trains."""

    def __init__(self, workload: Workload, model: nn.Module, *, tf32: bool) -> None:
        super().__init__(workload, model, level("O0", BF16))
        self._tf32 = tf32

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Makes one training step."""
        flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
        before = [flag.allow_tf32 for flag in flags]
        for flag in flags:
            flag.allow_tf32 = self._tf32
        try:
            return super().train(inputs, targets)
        finally:
            for flag, value in zip(flags, before, strict=True):
                flag.allow_tf32 = value


def rows(lows: Sequence[Format], facts: DeviceFacts, *, compiled: Sequence[Format]) -> list[Entry]:
    """Returns what is compared: O0, with TF32 off and on where there is such a thing, and the rest in each format."""
    made: list[Entry] = []
    for entry in entries(("O0", "O1", "O2", "O3"), lows, facts, peer=True):
        if entry.level == "O0" and facts.kind == "cuda":
            made.append(FullEntry("O0", FP32, peer=False))
            made.append(FullEntry("O0 TF32", FP32, peer=False, tf32=True))
        else:
            made.append(entry)
        if entry.peer and entry.low in compiled:
            made.append(replace(entry, compiled=True))
    return made


def table(result: BenchResult) -> str:
    """Returns the figures of one workload as text in columns."""
    header = ("", "step ms (quartiles)", "x O0", "x torch.amp", "x O3", "peak MiB", "skipped")
    lines = [header]
    light = {run.low: run.times_ms for run in result.runs if run.level == "O3"}
    for run in result.runs:
        if run.error is not None or run.step_ms is None:
            lines.append(
                (run.name, f"not measured: {run.error or 'no step was timed'}"[:70], *("" for _ in header[2:]))
            )
            continue
        took = run.step_ms
        lines.append(
            (
                run.name,
                f"{took.median:.2f} ({took.low:.2f}-{took.high:.2f})",
                _ratio(run.vs_o0),
                _ratio(run.vs_amp),
                _ratio(of_light(run, light)),
                "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:,.0f}",
                "/".join(map(str, run.skipped)) or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(rows)


def of_light(run: BenchRun, light: dict[str, tuple[float, ...]]) -> float | None:
    """Returns how many times as fast as O3 in its format a run is: 0.98 is 2% slower."""
    return None if run.level == "O0 TF32" else speedup(light.get(run.low, ()), run.times_ms)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def gpt2(**sizes: str) -> Workload:
    """Returns the GPT in these sizes."""
    return Gpt2(**{name: int(size) for name, size in sizes.items()})


def resnet50(**sizes: str) -> Workload:
    """Returns the ResNet in these sizes."""
    return ResNet50(**{name: int(size) for name, size in sizes.items()})


def origins(options: argparse.Namespace, device: torch.device) -> dict[str, Origin]:
    """Returns where the workloads come from, in the sizes that were asked for, else those for the device."""
    cuda = device.type == "cuda"
    asked = {key: getattr(options, key) for key in SHRINKABLE if getattr(options, key)}
    tokens = {"batch": options.batch or (16 if cuda else 1)} | asked
    images = {"batch": options.batch or (128 if cuda else 16), "pixels": options.pixels or (224 if cuda else 32)}
    if options.width:
        tokens, images = tokens | {"d": options.width}, images | {"width": options.width}
    return {
        name: Origin(f"{__file__}:{name}", {key: str(size) for key, size in sizes.items()})
        for name, sizes in {"gpt2": tokens, "resnet50": images}.items()
    }


def main() -> int:
    """Measures, prints a table a workload, and returns the exit code: 1 where a level failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--workload", choices=("gpt2", "resnet50"), action="append", help="only this one; repeatable")
    parser.add_argument("--low", help="low formats, separated by commas (default: bf16,fp16 on a GPU, bf16 on a CPU)")
    parser.add_argument("--steps", type=int, help="steps a row (default: 30 on a GPU, 8 on a CPU)")
    parser.add_argument("--batch", type=int, help="sequences or images a step")
    parser.add_argument("--layers", type=int, help="blocks of the GPT (default: 12)")
    parser.add_argument("--context", type=int, help="tokens a sequence (default: 1024)")
    parser.add_argument("--vocabulary", type=int, help="tokens there are (default: 50257)")
    parser.add_argument("--width", type=int, help="channels of the GPT (768; 12 heads), or of the ResNet's stem (64)")
    parser.add_argument("--pixels", type=int, help="width and height of an image")
    parser.add_argument("--compiled", help="formats of the compiled peer, or none (default: those of --low)")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    low = options.low or ("bf16,fp16" if device.type == "cuda" else "bf16")
    lows = [as_format(name) for name in low.split(",")]
    compiled = [as_format(name) for name in (options.compiled or low).split(",") if name != "none"]
    command = shlex.join(["python", "benchmarks/train_step.py", *sys.argv[1:]])
    results: list[BenchResult] = []
    for name, origin in origins(options, device).items():
        if options.workload and name not in options.workload:
            continue
        result = bench(
            origin.load(),
            rows(lows, read_facts(device), compiled=compiled),
            steps=options.steps or (30 if device.type == "cuda" else 8),
            device=device,
            origin=origin,
            command=command,
        )
        results.append(result)
        settings = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        print(f"{name} ({result.parameters:,} parameters; {settings}) on {result.machine.device}")
        print(table(result), flush=True)
        if options.json is not None:  # after each, so that what is there stays when the time is up
            options.json.parent.mkdir(parents=True, exist_ok=True)
            text = {"benchmark": "train_step", "results": [json.loads(to_json(done)) for done in results]}
            options.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    runs = [run for result in results for run in result.runs]
    return int(any(run.error is not None and run.level.startswith("O") for run in runs))


if __name__ == "__main__":
    sys.exit(main())
