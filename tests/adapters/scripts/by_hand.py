"""No optimizer: the weights are moved by hand, as in a first tutorial."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
learning_rate = 1e-2
losses = []
for t in range(6):
    x = torch.randn(10, 3)
    loss = torch.nn.functional.mse_loss(model(x).squeeze(1), x.sum(1))
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.data -= learning_rate * param.grad
    losses.append(loss.item())
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
