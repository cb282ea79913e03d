"""A DataLoader with worker processes, and everything behind a guard."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.full((4,), index / 24)
        return x, x.square().sum()


def main():
    torch.manual_seed(0)
    loader = DataLoader(Squares(), batch_size=8, num_workers=2, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
