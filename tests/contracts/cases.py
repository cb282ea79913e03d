"""What the contract tests share: every level in every format, a small network with all kinds of state."""

import copy

import pytest
import torch
from torch import nn

import halfstep

PLANS = [("O0", "bf16"), *((name, low) for name in ("O1", "O2", "O3") for low in ("bf16", "fp16"))]
MIXED = PLANS[1:]

every_plan = pytest.mark.parametrize(("name", "low"), PLANS, ids=["-".join(p) for p in PLANS])
mixed_plans = pytest.mark.parametrize(("name", "low"), MIXED, ids=["-".join(p) for p in MIXED])


class Same(torch.autograd.Function):
    """Returns a copy of its input; what its gradient becomes is for subclasses to say."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Refuses(Same):
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no")


class Net(nn.Module):
    """Linear, BatchNorm, LayerNorm, a tied pair, a frozen layer and a buffer that training changes."""

    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.layer_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        x = torch.relu(self.norm(self.first(x)))
        x = x + self.tied(torch.relu(self.second(x)))
        return self.head(self.layer_norm(x + self.frozen(x)))


class Kept:
    """A sink that keeps steps and everything else."""

    def __init__(self):
        self.steps, self.others = [], []

    def __call__(self, record):
        self.steps.append(record)

    def record(self, record):
        self.others.append(record)


def make(seed=0, optimizer=torch.optim.AdamW, width=16, **options):
    torch.manual_seed(seed)
    model = Net(width)
    options.setdefault("lr", 1e-2)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], **options)


def batch(step, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def overflowing(loss):
    """A loss of the same value whose gradients are NaN, as where they overflow by the loss scale."""
    return loss + (0 * loss).abs().sqrt()


def backward_and_step(session, loss, **options):
    session.backward(loss)
    return session.step(**options)


def train(session, model, optimizer, steps, *, poison=()):
    """Runs the given step numbers; those in `poison` get an infinite input, and so must be skipped."""
    records = []
    for step in steps:
        inputs, targets = batch(step)
        if step in poison:
            inputs[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        records.append(backward_and_step(session, loss, max_norm=1.0))
    return records


def bits(tensor):
    """A tensor's bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).clone() if tensor.numel() else tensor.clone()


def snapshot(model, optimizer, session=None):
    """All that training changes, by name: checkpointed and stored weights, buffers, optimizer state, session state."""
    found = {f"model.{k}": bits(v) for k, v in model.state_dict().items()}
    found |= {f"stored.{k}": bits(v) for k, v in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"optimizer.{index}.{key}"] = bits(value) if isinstance(value, torch.Tensor) else value
    if session is not None:
        found["session"] = {k: v for k, v in session.state_dict().items() if k != "plan"}
    return found


def differing(one, other):
    """The names whose values differ between two snapshots, or that only one has."""
    names = sorted(one.keys() ^ other.keys())
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        if not same:
            names.append(name)
    return names


def assert_trains_skips_and_resumes(name, low, optimizer, **options):
    """Five steps, one of them skipped, are bit for bit three, their saved states in new objects, and two more."""

    def begun():
        model, opt = make(0, optimizer, **options)
        return model, opt, halfstep.initialize(model, opt, name, low=low)

    whole, first, again = begun(), begun(), begun()
    skips = [] if name == "O0" else [1]
    for run, steps in ((whole, range(5)), (first, range(3))):
        train(run[2], run[0], run[1], steps, poison=skips)
    for part, state in zip(again, [copy.deepcopy(part.state_dict()) for part in first], strict=True):
        part.load_state_dict(state)
    train(again[2], again[0], again[1], range(3, 5))
    assert differing(snapshot(*again[:2]), snapshot(*whole[:2])) == []


def start(name, low, optimizer=torch.optim.AdamW, seed=0, width=16, **options):
    """Returns a model, its optimizer and a session over them."""
    model, opt = make(seed, optimizer, width)
    return model, opt, halfstep.initialize(model, opt, name, low=low, **options)
