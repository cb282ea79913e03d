"""Gradient accumulation over four small batches, with the norm of the gradients logged."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
criterion = nn.CrossEntropyLoss()
accumulation_steps = 4

losses = []
optimizer.zero_grad()
for i in range(16):
    inputs, labels = torch.randint(0, 20, (4, 5)), torch.randint(0, 20, (4,))
    loss = criterion(model(inputs), labels) / accumulation_steps
    loss.backward()
    losses.append(loss.item())
    if (i + 1) % accumulation_steps == 0:
        losses.append(sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()

torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
