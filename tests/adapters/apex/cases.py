"""Small models, batches and steps for tests of the stand-in apex."""

import contextlib

import torch
from torch import nn

from halfstep.formats import as_format
from halfstep.machine import needs_emulation, read_facts
from halfstep.train.cast.products import Emulation

LEVELS = ("O0", "O1", "O2", "O3")


class Net(nn.Module):
    """Has a row of each kind: convolution, batch norm, gelu, products, layer norm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        h = nn.functional.gelu(self.bn(self.conv(x))).mean((2, 3))
        return self.last(self.norm(self.first(h)))


def network(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 5, 5, generator=generator), torch.randn(6, 2, generator=generator)


def vectors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def loss_of(model, pair):
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def sgd(*models, lr=0.1, momentum=0.9):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, momentum=momentum)


def step(amp, model, optimizer, pair, loss_id=0):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, pair), optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
    optimizer.step()


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def as_hardware(low):
    """Returns a context in which products of a format are computed as a session computes them on this CPU."""
    emulated = needs_emulation(as_format(low), read_facts(torch.device("cpu")))
    return Emulation(as_format(low)) if emulated else contextlib.nullcontext()
