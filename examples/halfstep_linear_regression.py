"""The linear regression of NVIDIA's slides on apex.amp, in halfstep's own lines."""

import argparse

import torch

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--level", default="O1")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
N, D_in, D_out = 64, 1024, 512
x = torch.randn(N, D_in, device=device)
y = torch.randn(N, D_out, device=device)

model = torch.nn.Linear(D_in, D_out).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session = halfstep.initialize(model, optimizer, args.level)

for t in range(args.steps):
    y_pred = model(x)
    loss = torch.nn.functional.mse_loss(y_pred, y)

    optimizer.zero_grad()
    session.backward(loss)
    session.step()

print(f"loss {loss.item():.4f}")
