"""A guard, type hints, a model with methods of its own, a reentrant checkpoint, a gradient penalty, frozen layers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class AutoEncoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, width))
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        return checkpoint(self.encoder, self.frozen(x).requires_grad_(), use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))


def penalty(model: AutoEncoder, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.decoder(x).sum(), x, create_graph=True)
    return gradient.square().mean()


def main(out: Path) -> None:
    torch.manual_seed(0)
    model = AutoEncoder()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        x = torch.randn(8, 8)
        loss = nn.functional.l1_loss(model(x), x) + 0.1 * penalty(model, torch.randn(8, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
