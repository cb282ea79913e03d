"""An image classifier on Fashion-MNIST, in halfstep's own lines: python examples/halfstep_images.py --data FOLDER"""

import argparse
from pathlib import Path

import torch
from data import fashion_mnist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with Fashion-MNIST's IDX files")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--level", default="O2")
args = parser.parse_args()


class SimpleCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * 7 * 7, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
loader = DataLoader(TensorDataset(*fashion_mnist(args.data)), batch_size=64, shuffle=True)
model = SimpleCNN().to(device)
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()
session = halfstep.initialize(model, optimizer, args.level)

for step, (inputs, labels) in zip(range(args.steps), loader, strict=False):
    inputs, labels = inputs.to(device), labels.to(device)
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    session.backward(loss)
    session.step()

right = (outputs.argmax(1) == labels).float().mean().item()
print(f"loss {loss.item():.4f}, {right:.0%} of the last batch right")
