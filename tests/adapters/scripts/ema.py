"""An exponential moving average of the weights by deepcopy, and torch's AveragedModel beside it."""

import copy
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.mul_(decay).add_(param.data, alpha=1 - decay)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 5))
ema = copy.deepcopy(model).eval().requires_grad_(False)
averaged = AveragedModel(model)
opt = torch.optim.Adam(model.parameters(), 1e-2)

losses = []
for _ in range(6):
    x = torch.randn(8, 5)
    loss = (model(x + torch.randn_like(x)) - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model)
    averaged.update_parameters(model)
    losses += [loss.item(), (ema(x) - x).square().mean().item()]
torch.save(
    {"losses": losses, "model": model.state_dict(), "ema": ema.state_dict(), "swa": averaged.module.state_dict()},
    sys.argv[1],
)
