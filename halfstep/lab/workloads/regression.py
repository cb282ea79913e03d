"""The regression on synthetic data from NVIDIA's talk on automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.lab.workloads.workload import Batch, Workload, seeded


@dataclass(frozen=True, kw_only=True)
class Regression(Workload):
    """Linear layers with ReLUs between them, trained by SGD on fixed random data.

    Batch size, widths, data, loss and optimizer are those of NVIDIA's talk on automatic mixed precision. The talk's
    model is a single `nn.Linear(D_in, D_out)`, which is `layers=1`. Each further layer is a hidden layer of `d_in`
    units in front of that one.
    """

    name: ClassVar[str] = "regression"
    reads_data: ClassVar[bool] = False
    batch: int = 64
    lr: float = 1e-3
    d_in: int = 1024
    d_out: int = 512
    layers: int = 2

    def build(self, seed: int) -> nn.Module:
        hidden, out = (self.d_in, self.d_in), (self.d_in, self.d_out)

        def network() -> nn.Module:
            parts = [part for _ in range(self.layers - 1) for part in (nn.Linear(*hidden), nn.ReLU())]
            return nn.Sequential(*parts, nn.Linear(*out)) if parts else nn.Linear(*out)

        return seeded(seed, network)

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, fused=fused)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yields the same batch again and again, as in the talk: x and y are standard normal."""
        batch = self._draw(seed)
        while True:
            yield batch

    def validation(self) -> Iterable[Batch]:
        """Yields the batch of seed 0: the job fits noise, so there is nothing to generalise to."""
        return [self._draw(0)]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def _draw(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(self.batch, self.d_in, generator=generator),
            torch.randn(self.batch, self.d_out, generator=generator),
        )
