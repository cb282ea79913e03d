"""A Trainer class with a config, callbacks and evaluation, as in many course repositories."""

import sys
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    lr: float = 1e-2
    epochs: int = 2
    batch_size: int = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.config = config
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.history = []

    def train_step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, data):
        self.model.eval()
        correct = sum((self.model(x).argmax(1) == y).sum().item() for x, y in data)
        self.model.train()
        return correct

    def fit(self, data):
        self.history.append(self.evaluate(data))
        for _ in range(self.config.epochs):
            for batch in data:
                self.history.append(self.train_step(batch))
            self.history.append(self.evaluate(data))

    def save(self, path):
        torch.save(
            {"losses": self.history, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path
        )


torch.manual_seed(0)
data = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(3)]
trainer = Trainer(Net(), Config())
trainer.fit(data)
trainer.save(sys.argv[1])
