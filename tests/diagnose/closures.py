"""What the tests of diagnosis run: a session on a model, a batch that fits it, and a closure that computes a loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.explain.diagnose.counter import WINDOW
from tests.contracts.cases import backward_and_step
from tests.diagnose.faults.hosts import CLASSES, Cnn, Stacked, Transformer, images, rows, words

LABELS = torch.arange(8) % CLASSES


def features():
    return torch.randn(8, 8)


def cross_entropy(model, inputs):
    return F.cross_entropy(model(inputs), LABELS)


def opened(model, plan="O2", low="fp16", *, lr=1e-3, **options):
    """A session on a model and AdamW."""
    return halfstep.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), plan, low=low, **options)


def session_on(model, plan="O2", low="fp16", **options):
    session = opened(model, plan, low, **options)
    return session, session.optimizers[0]


def closure_of(model, loss=cross_entropy):
    """A closure that computes `loss(model, inputs)` on one batch."""
    batches = {Cnn: images, Stacked: rows, Transformer: words, nn.Module: features}
    inputs = next(batch for kind, batch in batches.items() if isinstance(model, kind))()
    return lambda: loss(model, inputs)


def verdict_on(model, plan="O2", low="fp16", *, loss=cross_entropy, **options):
    """What blame says of a session on a model and one batch of it."""
    return halfstep.blame(opened(model, plan, low, **options), closure_of(model, loss))


def assert_cured(model, session, verdict, closure, steps=1):
    """Asserts that steps under a verdict's cure are not skipped."""
    session.close()
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    for _ in range(steps):
        assert not backward_and_step(session, closure()).skipped


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x):
        return x + torch.relu(self.fc(x) * self.gain) / self.gain


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


def tower(plan="O1", low="fp16", **options):
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = halfstep.initialize(model, optimizer, plan, low=low, **options)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    return model, optimizer, session, lambda: nn.functional.mse_loss(model(inputs), targets)


def train_on(loss, session, optimizer, steps=4 * WINDOW):
    records = []
    for _ in range(steps):
        optimizer.zero_grad()
        records.append(backward_and_step(session, loss()))
    return records


def run(session, optimizer, model, steps, inputs=None):
    """Trains on one batch."""
    inputs = inputs if inputs is not None else images() if isinstance(model, Cnn) else words()
    return train_on(lambda: cross_entropy(model, inputs), session, optimizer, steps)


def alarm(training, *args):
    """The error with which the guardian ends a training."""
    with pytest.raises(halfstep.NumericsError) as caught:
        training(*args)
    return caught.value
