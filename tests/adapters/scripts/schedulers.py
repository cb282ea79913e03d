"""Warm-up, cosine and plateau schedules; parameter groups with rates of their own; one scheduler made very early."""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR


def get_optimizer(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "lr": 2e-3}], lr=1e-2)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 2))
optimizer = get_optimizer(model)
warmup = LinearLR(optimizer, start_factor=0.1, total_iters=3)
scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=5)], milestones=[3])
plateau = ReduceLROnPlateau(optimizer, patience=1)
losses = []
for epoch in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(12, 10)), torch.randint(0, 2, (12,)))
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    scheduler.step()
    plateau.step(loss.item())
    losses += [loss.item(), *scheduler.get_last_lr()]
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
