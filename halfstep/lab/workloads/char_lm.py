"""A small GPT that learns Tiny Shakespeare, a public domain text, by character (after karpathy/nanoGPT)."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from math import cos, pi
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import DataError, WorkloadError
from halfstep.lab.workloads.workload import Batch, Workload, read_bytes, seeded


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention and an MLP with GELU."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.norm_2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, d))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and an untied output layer."""

    def __init__(self, vocabulary: int, *, d: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # as GPT-2: normal 0.02, the projections into the residual stream smaller with depth
                into_residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@dataclass(frozen=True, kw_only=True)
class CharLM(Workload):
    """Next-character prediction on the first 90% of the text, validated on the last 10%.

    `length` is the number of characters in a window, `eval_windows` the number of evenly spaced validation windows.
    """

    name: ClassVar[str] = "char_lm"
    batch: int = 16
    lr: float = 1e-3
    beta2: float = 0.99
    max_norm: float | None = 1.0
    d: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 128
    eval_windows: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d % self.heads:
            raise WorkloadError(f"char_lm: d={self.d} is not divisible by heads={self.heads}; set d to a multiple")

    def build(self, seed: int) -> nn.Module:
        return seeded(
            seed, lambda: GPT(len(self._characters), d=self.d, layers=self.layers, heads=self.heads, length=self.length)
        )

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns AdamW with nanoGPT's settings: weight decay on matrices only."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, self.beta2), fused=fused)

    def lr_factor(self, step: int, steps: int) -> float:
        """Returns the factor of `lr`: a warm-up over the first 5% (at most 100 steps), then a cosine from 1 to 0.1."""
        warm = max(1, min(100, steps // 20))
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + cos(pi * (step - warm) / max(1, steps - warm)))

    def batches(self, seed: int) -> Iterator[Batch]:
        train, _ = self._split
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self._windows(train, torch.randint(len(train) - self.length, (self.batch,), generator=generator))

    def validation(self) -> Iterable[Batch]:
        _, held_out = self._split
        starts = torch.linspace(0, len(held_out) - self.length - 1, self.eval_windows).long()
        return (self._windows(held_out, some) for some in torch.split(starts, self.batch))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross entropy in nats per character."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def _windows(self, ids: Tensor, starts: Tensor) -> Batch:
        windows = ids[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    @cached_property
    def _text(self) -> bytes:
        return read_text(self.data)

    @cached_property
    def _characters(self) -> list[int]:
        return sorted(set(self._text))

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        table = torch.zeros(256, dtype=torch.long)
        table[self._characters] = torch.arange(len(self._characters))
        ids = table[torch.frombuffer(bytearray(self._text), dtype=torch.uint8).long()]
        cut = len(ids) * 9 // 10
        if len(ids) - cut <= self.length:
            raise DataError(
                f"char_lm: the text has {len(ids)} characters, too few for windows of {self.length};"
                f" pass a text of more than {10 * (self.length + 1)} characters, or set a smaller length"
            )
        return ids[:cut], ids[cut:]


def read_text(path: Path | None) -> bytes:
    """Returns the text of a .txt or .txt.gz file; if `path` is None, the Tiny Shakespeare in the package."""
    if path is None:
        packed = resources.files("halfstep.lab.workloads").joinpath("data", "tinyshakespeare.txt.gz").read_bytes()
        return gzip.decompress(packed)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.endswith((".txt", ".txt.gz")))
        if len(found) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise DataError(
                f"char_lm: the folder {path} must hold exactly one .txt or .txt.gz file, but has {names}; pass the "
                "file itself, or a folder with one"
            )
        path = found[0]
    if not path.is_file():
        raise DataError(
            f"char_lm: no file {path}; pass a text file, or no data to use the Tiny Shakespeare in the package"
        )
    text = read_bytes(path, "char_lm")
    if not text:
        raise DataError(f"char_lm: {path} is empty; pass a text, or no data to use the Tiny Shakespeare in the package")
    return text
