"""Fine-tuning in two phases: an optimizer for the head, then another one for all; a weight of the loss is learned."""

import sys

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.relu(self.backbone(x)))


torch.manual_seed(0)
model = Classifier()
log_weight = torch.zeros((), requires_grad=True)
losses = []


def run(optimizer):
    for _ in range(3):
        x, y = torch.randn(9, 6), torch.randint(0, 3, (9,))
        loss = nn.functional.cross_entropy(model(x), y) * torch.exp(-log_weight) + log_weight
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)  # also of what this optimizer does not train
        optimizer.step()
        losses.extend([loss.item(), norm.item()])
        model.backbone.zero_grad()


run(torch.optim.Adam([*model.head.parameters(), log_weight], lr=1e-2))
optimizer = torch.optim.AdamW([*model.parameters(), log_weight], lr=1e-3)
run(optimizer)
torch.save({"losses": losses, "model": model.state_dict(), "log_weight": log_weight.detach()}, sys.argv[1])
