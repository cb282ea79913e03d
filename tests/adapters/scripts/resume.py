"""Trains, saves a checkpoint, builds everything anew, loads it and goes on."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def build():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(epochs, resume=None):
    model, optimizer = build()
    start, losses = 0, []
    if resume:
        checkpoint = torch.load(resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start, losses = checkpoint["epoch"], checkpoint["losses"]
    for epoch in range(start, start + epochs):
        generator = torch.Generator().manual_seed(epoch)
        x = torch.randn(16, 6, generator=generator)
        loss = (model(x).squeeze(1) - x.sum(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {"epoch": start + epochs, "losses": losses, "model": model.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, args.checkpoint)


torch.manual_seed(0)
if not os.path.exists(args.checkpoint):
    train(args.epochs)
train(args.epochs, resume=args.checkpoint)
