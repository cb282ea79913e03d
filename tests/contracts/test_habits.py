"""What user code keeps in a model and changes in its loop: teachers, averages, prototypes, codebooks, queues, counters.

Each habit trains a small model at O1 and O2 and in plain fp32, and compares where its state went. Weights that an
optimizer updates are another matter (test_training.py); so is what a model returns (test_habits_outputs.py).
"""

import copy

import pytest
import torch
from torch import nn

import halfstep

STEPS = 30
MOMENTUM = 0.995  # what a step adds is below half a unit in the last place of bf16 for most elements


class Student(nn.Module):
    """A network with a state of some kind beside it; `state` returns the tensors that the habit changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def forward(self, x):
        return self.net(x)

    def after(self, x, y, step):
        """What the training loop does after each step."""

    def state(self):
        raise NotImplementedError


class Teacher(Student):
    """A momentum teacher inside the model, as in MoCo, BYOL, DINO and mean teachers."""

    frozen = True

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(not self.frozen)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.net(x) + 0 * target

    def state(self):
        return list(self.teacher.parameters())

    def pairs(self):
        return list(zip(self.teacher.parameters(), self.net.parameters(), strict=True))


class InPlace(Teacher):
    @torch.no_grad()
    def after(self, x, y, step):
        for t, s in self.pairs():
            t.mul_(MOMENTUM).add_(s, alpha=1 - MOMENTUM)


class Unfrozen(InPlace):
    frozen = False


class HeldByTheOptimizer(InPlace):
    """As MoCo does: the optimizer gets all parameters, the frozen ones too."""

    def optimizer(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class ThroughData(Teacher):
    def after(self, x, y, step):
        for t, s in self.pairs():
            t.data = t.data * MOMENTUM + s.data * (1 - MOMENTUM)


class CopiedIntoData(Teacher):
    """As target networks of reinforcement learning are."""

    def after(self, x, y, step):
        for t, s in self.pairs():
            t.data.copy_((1 - MOMENTUM) * s.data + MOMENTUM * t.data)


class Foreach(Teacher):
    @torch.no_grad()
    def after(self, x, y, step):
        teachers, students = zip(*self.pairs(), strict=True)
        torch._foreach_mul_(teachers, MOMENTUM)
        torch._foreach_add_(teachers, [s.float() for s in students], alpha=1 - MOMENTUM)


class ValuesOfTheState(Teacher):
    """As timm's ModelEma does."""

    def after(self, x, y, step):
        for t, s in zip(self.teacher.state_dict().values(), self.net.state_dict().values(), strict=True):
            t.lerp_(s, 1 - MOMENTUM)


class LoadedBack(Teacher):
    def after(self, x, y, step):
        mine, theirs = self.teacher.state_dict(), self.net.state_dict()
        self.teacher.load_state_dict({k: v * MOMENTUM + theirs[k] * (1 - MOMENTUM) for k, v in mine.items()})


class InsideForward(Teacher):
    """As MoCo's model does, in its own forward."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for t, s in self.pairs():
                    t.data = t.data * MOMENTUM + s.data * (1 - MOMENTUM)
        return super().forward(x)


class StochasticWeightAverage(Teacher):
    @torch.no_grad()
    def after(self, x, y, step):
        for t, s in self.pairs():
            t += (s - t) / (step + 2)


class ListOfShadows(Student):
    def __init__(self):
        super().__init__()
        self.shadows = nn.ParameterList(nn.Parameter(p.detach().clone(), False) for p in self.net.parameters())

    @torch.no_grad()
    def after(self, x, y, step):
        for shadow, p in zip(self.shadows, self.net.parameters(), strict=True):
            shadow.sub_((1 - MOMENTUM) * (shadow - p))

    def state(self):
        return list(self.shadows)


class ByAnOptimizerOfItsOwn(Student):
    """Proxies that an optimizer outside of the session updates."""

    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(4, 8))
        self.own = torch.optim.SGD([self.proxies], 1e-3)

    def forward(self, x):
        y = self.net(x)
        return y - 0.1 * (y @ self.proxies.T).softmax(1) @ self.proxies

    def after(self, x, y, step):
        self.own.step()
        self.own.zero_grad()

    def state(self):
        return [self.proxies]


class StepsByHand(ByAnOptimizerOfItsOwn):
    def after(self, x, y, step):
        self.proxies.data.sub_(1e-3 * self.proxies.grad)
        self.proxies.grad = None


class Prototypes(Student):
    """Class means, as a Parameter that the model's own forward updates."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, x):
        y = self.net(x)
        if self.training:
            self.update(y.detach())
        return y + 0.1 * (y @ self.prototypes.T) @ self.prototypes

    @torch.no_grad()
    def update(self, y):
        mean = y.view(4, -1, 8).mean(1)
        self.prototypes.copy_(MOMENTUM * self.prototypes + (1 - MOMENTUM) * mean)

    def state(self):
        return [self.prototypes]


class PrototypesLerped(Prototypes):
    @torch.no_grad()
    def update(self, y):
        self.prototypes.lerp_(y.float().view(4, -1, 8).mean(1), 1 - MOMENTUM)


class PrototypesWithGradientsOn(Prototypes):
    def update(self, y):
        self.prototypes.mul_(MOMENTUM).add_(y.view(4, -1, 8).mean(1), alpha=1 - MOMENTUM)


class PrototypesThroughData(Prototypes):
    def update(self, y):
        self.prototypes.data.mul_(MOMENTUM).add_(y.view(4, -1, 8).mean(1), alpha=1 - MOMENTUM)


class PrototypesReplaced(Prototypes):
    def update(self, y):
        mean = y.view(4, -1, 8).mean(1)
        self.prototypes = nn.Parameter(MOMENTUM * self.prototypes + (1 - MOMENTUM) * mean, requires_grad=False)


class PrototypesRowByRow(Prototypes):
    def update(self, y):
        for row, mean in enumerate(y.view(4, -1, 8).mean(1)):
            self.prototypes[row].mul_(MOMENTUM).add_(mean, alpha=1 - MOMENTUM)


class Queue(Prototypes):
    """A queue as a Parameter, written by index with gradients on."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(STEPS * 8, 8), requires_grad=False)
        self.at = 0

    def update(self, y):
        self.prototypes[self.at : self.at + 8] = y[:8].float() * 1.001
        self.at += 8


class Codebook(Student):
    """The codebook of a VQ-VAE as an embedding, whose weight is an average."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(4, 8)
        self.codes.weight.requires_grad_(False)

    def forward(self, x):
        y = self.net(x)
        nearest = torch.cdist(y, self.codes.weight).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in range(4):
                    mean = y[code::4].float().mean(0)
                    self.codes.weight.data[code] += (1 - MOMENTUM) * (mean - self.codes.weight.data[code])
        return y + 0 * self.codes(nearest)

    def state(self):
        return [self.codes.weight]


class Counter(Student):
    """A count and a sum, as Parameters that `+=` writes."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.seen += len(x)
        return self.net(x)

    def state(self):
        return [self.seen]


class Temperature(Student):
    """A temperature that the loop anneals and the model reads."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([1.0]), requires_grad=False)

    def forward(self, x):
        return self.net(x) / self.temperature

    @torch.no_grad()
    def after(self, x, y, step):
        self.temperature *= 0.999

    def state(self):
        return [self.temperature]


class Centre(Student):
    """DINO's centre and a running quantile, as buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.ones(8))
        self.register_buffer("quantile", torch.ones(8))

    def forward(self, x):
        y = self.net(x)
        with torch.no_grad():
            self.centre.mul_(MOMENTUM).add_(y.mean(0), alpha=1 - MOMENTUM)
            self.quantile += 1e-3 * torch.where(y.mean(0) > self.quantile, 0.9, -0.1)
        return y

    def state(self):
        return [self.centre, self.quantile]


HABITS = (
    *(InPlace, Unfrozen, HeldByTheOptimizer, ThroughData, CopiedIntoData, Foreach, ValuesOfTheState, LoadedBack),
    *(InsideForward, StochasticWeightAverage, ListOfShadows, ByAnOptimizerOfItsOwn, StepsByHand, Prototypes),
    *(PrototypesLerped, PrototypesWithGradientsOn, PrototypesThroughData, PrototypesReplaced, PrototypesRowByRow),
    *(Queue, Codebook, Counter, Temperature, Centre),
)


def train(habit, level, low="bf16"):
    model = habit()
    model.start = [t.detach().clone() for t in model.state()]
    optimizer = model.optimizer()
    generator = torch.Generator().manual_seed(1)
    with halfstep.initialize(model, optimizer, level, low=low) as session:
        for step in range(STEPS):
            x = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            y = model(x)
            session.backward(nn.functional.mse_loss(y, torch.roll(x, 1, 1)))
            session.step()
            model.after(x, y.detach(), step)
        read = [t.detach().clone() for t in model.state()]
    assert [t.dtype for t in read] == [torch.float32] * len(read)
    assert all(map(torch.equal, read, model.state()))  # what is read inside the session is what remains
    return model


def distance(these, others):
    return sum((a.detach() - b.detach()).square().sum() for a, b in zip(these, others, strict=True)).sqrt().item()


@pytest.fixture(scope="module")
def in_fp32():
    return {}


@pytest.mark.slow_but("Replaced-O2", "ThroughData-O2", "Counter-O2", "Temperature-O2", "Centre-O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_state_goes_where_it_goes_in_fp32(habit, level, in_fp32):
    if habit not in in_fp32:
        in_fp32[habit] = train(habit, "O0")
    plain = in_fp32[habit]
    way = distance(plain.start, plain.state())
    assert way > 0
    assert distance(train(habit, level).state(), plain.state()) < 0.1 * way
