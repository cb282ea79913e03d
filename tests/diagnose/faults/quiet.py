"""Modules that are wrong in a low format without any overflow, as people write them, and modules that look like them.

Each takes values of size 1, with features last, and returns as many. What it loses it loses itself: kept in fp32, it
gives the same as in a model of fp32, but for the rounding of what it got.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.diagnose.faults.hosts import CLASSES, WIDTH

MANY = 32  # rows of a batch


def module(function):
    """Returns a class of modules that do what a function does."""
    forward = {"forward": lambda self, x: function(x), "function": staticmethod(function)}
    return type(function.__name__.title().replace("_", ""), (nn.Module,), forward)


def steps_of(x, size=None):
    """Returns 0, 1, 2 ... in the format of the values, one for each feature, or `size` of them."""
    return torch.arange(x.shape[-1] if size is None else size, device=x.device).to(x.dtype)


# differences of near values


@module
def log_returns(x):
    """The logarithm of the ratio of neighbouring prices, in cents."""
    price = 400 + x
    return 100 * torch.log(price / price.roll(1, -1))


@module
def simple_returns(x):
    """The same, without a logarithm."""
    price = 2000 + x
    return (price - price.roll(1, -1)) / price * 1000


@module
def margins(x):
    """How far each logit is ahead of the next, after an offset that all share."""
    logits = x + 300
    return torch.tanh(logits - logits.roll(1, -1))


@module
def below_the_largest(x):
    """Scores less their running maximum, with a bonus in both."""
    scores = 500 + x
    return scores - torch.cummax(scores, -1).values


@module
def degrees(x):
    """Metres between neighbouring points in degrees of longitude, at latitude 52."""
    longitude = 13.4 + 1e-3 * x
    return (longitude - longitude.roll(1, -1)) * 111_320 * math.cos(math.radians(52)) / 100


@module
def boxes(x):
    """Widths and overlaps of boxes far from the corner of the picture."""
    left, right = 1500 + x, 1501 + x.roll(1, -1)
    return torch.minimum(right, right.roll(2, -1)) - torch.maximum(left, left.roll(2, -1))


@module
def kinetic(x):
    """The energy of slow particles: sqrt(1 + p^2) - 1."""
    p = x * 0.03
    return (torch.sqrt(1 + p * p) - 1) * 1000


@module
def angle_between(x):
    """One minus the cosine between near vectors."""
    a, b = torch.cat([x * 0.03, torch.ones_like(x)], -1), torch.cat([x.roll(1, -1) * 0.03, torch.ones_like(x)], -1)
    cosine = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return x * (1 - cosine.to(x.dtype)).unsqueeze(-1) * 1000


@module
def cosine_distance(x):
    """One minus the similarity of normalized vectors that share a large mean."""
    unit = nn.functional.normalize(x + 15, dim=-1)
    return x * (1 - (unit * unit.roll(1, 0)).sum(-1, keepdim=True)) * 200


@module
def spread(x):
    """A standard deviation as E[x^2] - E[x]^2."""
    y = x + 20
    variance = (y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2
    return x * variance.clamp_min(0.01).rsqrt()


@module
def distances(x):
    """Distances as |a|^2 + |b|^2 - 2ab, of points around (40, 40)."""
    points = x + 40
    squares = (points * points).sum(-1, keepdim=True)
    return torch.exp(-0.1 * (squares + squares.transpose(-1, -2) - 2 * points @ points.transpose(-1, -2))) @ x


@module
def slope(x):
    """A derivative by finite differences."""
    h = 1e-3
    return (torch.tanh(x + h) - torch.tanh(x - h)) / (2 * h)


@module
def acceleration(x):
    """A second difference: what is left of positions after a Verlet step."""
    now = 300 + x
    return now.roll(1, -1) - 2 * now + now.roll(-1, -1)


@module
def td_error(x):
    """What a reward adds to values of about 250, discounted."""
    value = 250 + x
    return torch.tanh(0.25 + 0.999 * value.roll(-1, -1) - value)


@module
def importance(x):
    """The ratio of new and old probabilities of long sequences, from their logarithms."""
    old, new = -180 + x, -180 + x + 0.3 * x.roll(1, -1)
    return torch.exp(new - old)


@module
def free_energy(x):
    """What a state adds to a free energy: a log-sum-exp less another one."""
    energies = 120 + x
    whole = torch.logsumexp(energies, -1, keepdim=True).to(x.dtype)
    return whole - torch.logsumexp(energies * 0.999, -1, keepdim=True).to(x.dtype) + x * 0.05


@module
def surprise(x):
    """How far a nearly even distribution is from an even one, by its entropy."""
    p = torch.softmax(x * 0.05, -1).to(x.dtype)
    return x * (math.log(x.shape[-1]) + (p * torch.log(p)).sum(-1, keepdim=True)) * 800


@module
def covariance(x):
    """A covariance as E[xy] - E[x]E[y], of values around 25, applied to them."""
    y = x + 25
    return x @ (y.transpose(-1, -2) @ y / y.shape[-2] - y.mean(-2).unsqueeze(-1) * y.mean(-2).unsqueeze(-2))


@module
def laplacian(x):
    """What a temperature of about 300 diffuses in one step."""
    heat = 300 + x
    return heat.roll(1, -1) + heat.roll(-1, -1) - 2 * heat + x


@module
def two_temperatures(x):
    """How much sharper a distribution is at a slightly lower temperature."""
    logits = (x * 3).to(x.dtype)
    return 100 * (torch.sigmoid(logits / 0.99).to(x.dtype) - torch.sigmoid(logits).to(x.dtype))


# small changes of something large


@module
def interest(x):
    """Capital after compound interest, factor by factor."""
    factor = 1 + 1e-3 * x
    capital = torch.ones_like(x)
    for _ in range(64):
        capital = capital * factor
    return 10 * (capital - 1)


@module
def hazards(x):
    """The hazard at each step, from products of what survives the ones before."""
    alive = torch.cumprod(1 - 2e-3 * torch.sigmoid(x), -1)
    return 500 * torch.log(alive[..., 1:2] / alive) + x


@module
def log_growth(x):
    """The logarithm of one plus a small rate."""
    return 500 * torch.log(1 + 2e-3 * x)


@module
def moving_average(x):
    """An exponential moving average with a long memory."""
    mean = torch.ones_like(x)
    for _ in range(200):
        mean = 0.998 * mean + 0.002 * x
    return 3 * mean


@module
def resonator(x):
    """A filter of two poles near the unit circle."""
    r, angle = 0.9995, 0.02
    one, two = x, torch.zeros_like(x)
    for _ in range(150):
        one, two = 2 * r * math.cos(angle) * one - r * r * two, one
    return one / 40


@module
def discounted(x):
    """Discounted returns of many steps, less their mean."""
    value = torch.full_like(x, 300.0)
    for shift in range(40):
        value = 0.2 * x.roll(shift, -1) + 0.999 * value
    return value - 291


@module
def weak_gate(x):
    """What a gate near one changes, in the units of the change."""
    return (x * (1 + 1e-3 * torch.tanh(x.roll(1, -1))) - x) * 1000


@module
def rotations(x):
    """A small rotation applied again and again."""
    one, two = x.chunk(2, -1)
    c, s = torch.tensor(0.1, dtype=x.dtype).cos(), torch.tensor(0.1, dtype=x.dtype).sin()
    for _ in range(300):
        one, two = c * one - s * two, s * one + c * two
    return torch.cat([one, two], -1)


@module
def newton(x):
    """Refines a root until only the last digits change, and returns those."""
    a = 3 + torch.tanh(x)
    root = a.sqrt()
    return 1000 * (root * root + 1e-3 * x - a)


@module
def polynomial(x):
    """(y - 1)^6, multiplied out."""
    y = 1.5 + 0.5 * torch.tanh(x)
    return 100 * (1 - y * (6 - y * (15 - y * (20 - y * (15 - y * (6 - y))))))


# positions, phases, indices


@module
def oscillator(x):
    """A sine whose phase adds up step by step."""
    pitch, phase, out = 0.05 + 0.001 * x, torch.zeros_like(x), x
    for _ in range(250):
        phase = phase + pitch
        out = torch.sin(2 * math.pi * phase)
    return out


@module
def chirp(x):
    """A tone at sample 3,000 and after, its phase from time and frequency."""
    time = 3000 + steps_of(x)
    return x + torch.sin(2 * math.pi * 0.013 * time)


@module
def fourier(x):
    """A row of a discrete Fourier transform of 1,024 points."""
    turns = steps_of(x, 1024)[-x.shape[-1] :] * 37 / 1024
    return x * torch.cos(2 * math.pi * turns)


@module
def resampled(x):
    """Linear interpolation at index times ratio, far into a signal."""
    at = (700 + steps_of(x)) * 0.73
    left = at.floor()
    share = at - left
    index = left.long() % x.shape[-1]
    return 3 * (x[..., index] * (1 - share) + x[..., (index + 1) % x.shape[-1]] * share)


@module
def pixels(x):
    """Bumps around points of a large picture."""
    column = 900 + steps_of(x)
    centre = 907 + x.mean(-1, keepdim=True)
    return torch.exp(-0.5 * (column - centre).square() / 4) * 3


@module
def alibi(x):
    """Attention biased by distance, far from the start."""
    far = 2000 + steps_of(x)
    scores = x.unsqueeze(-1) - 0.5 * (far[:, None] - far).abs()
    return torch.softmax(scores, -2).to(x.dtype).mean(-1) * 10


@module
def hour_of_day(x):
    """The hour of the day, from hours since 1970."""
    hours = 490_000 + steps_of(x)
    return x + torch.sin(hours % 24 * (2 * math.pi / 24))


@module
def one_hot(x):
    """A place as a one-hot row, found by equality."""
    at = 500 + steps_of(x)
    return x + 2 * (at[:, None] == 500 + torch.arange(x.shape[-1], device=x.device).flip(0)).to(x.dtype) @ x.mean(
        tuple(range(x.dim() - 1))
    )


@module
def hashed(x):
    """A sign for each feature, from a hash of its number."""
    number = (steps_of(x) * 73 + 911) % 8
    return torch.where(number < 4, x, -x)


@module
def buckets(x):
    """What a table holds at the bucket of each value, of 1,000 buckets."""
    bounds = torch.linspace(400, 402, 33, device=x.device).to(x.dtype)
    return torch.bucketize(401 + 0.5 * torch.tanh(x), bounds).to(x.dtype) / 8


@module
def steps_of_cents(x):
    """An amount of money rounded to cents, and what is left over."""
    amount = 120 + x * 0.002
    return 20 * (amount * 100 - torch.round(amount * 100)) + x


@module
def ranks(x):
    """The rank of each score; ties go by place."""
    return torch.argsort(torch.argsort(600 + x, dim=-1, stable=True), dim=-1).to(x.dtype) / 4


@module
def half_the_crowd(x):
    """A mask of what is above the median, by comparison."""
    score = 1000 + x
    return 2 * (score > score.median(-1, keepdim=True).values).to(x.dtype) * x


@module
def wrapped(x):
    """Positions in a periodic box: the offset from the nearest image."""
    position = 777.3 + x
    return position - 10 * torch.round(position / 10)


# small values


@module
def log_power(x):
    """Decibels of a quiet signal; its power is subnormal in fp16."""
    quiet = x * 5e-4
    return torch.log10(quiet * quiet + 1e-7)


@module
def likelihood(x):
    """The product of probabilities, in place of a sum of logarithms."""
    product = p = torch.sigmoid(x) * 0.15
    for shift in range(1, 7):
        product = product * p.roll(shift, -1)
    return product * 5.0**10


@module
def inverse_square(x):
    """A force that is 1/r^2 of a distance in large units."""
    r = 3e-4 * (x.abs() + 0.8)
    return torch.full_like(r, 2e-7) / (r * r + 1e-7)


class Schedule(nn.Module):
    """Noise of a diffusion model at early steps: sqrt(1 - alpha) with alpha near one."""

    def __init__(self):
        super().__init__()
        self.alpha = torch.cumprod(1 - torch.linspace(1e-4, 2e-3, WIDTH), 0)

    def forward(self, x):
        alpha = self.alpha.to(x.dtype)
        return 10 * x * (1 - alpha).sqrt() + alpha.sqrt()


class Splines(nn.Module):
    """Radial functions at centres around 300."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(300 + torch.randn(WIDTH))

    def forward(self, x):
        return 3 * torch.exp(-((x + 300 - self.centres) ** 2))


class Slope(nn.Module):
    """A gradient penalty by finite differences through a network of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return (self.net(x + 1e-3) - self.net(x)) * 1000


# where they stand


def sequential(plant):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), plant(), nn.Linear(WIDTH, CLASSES))


class Root(nn.Module):
    """The plant is the root's own code."""

    def __init__(self, plant):
        super().__init__()
        self.stem, self.head, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), plant.function

    def forward(self, x):
        return self.head(self.own(self.stem(x)))


class Layer(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.norm, self.linear, self.plant = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), plant()

    def forward(self, x):
        return x + self.plant(self.linear(self.norm(x)))


class Layers(nn.Module):
    """The same plant in each of six layers."""

    def __init__(self, plant, other=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer(plant if i % 2 or other is None else other) for i in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Often(nn.Module):
    """One plant, called after each of twelve steps."""

    def __init__(self, plant):
        super().__init__()
        self.cell, self.plant, self.head = nn.Linear(WIDTH, WIDTH), plant(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(12):
            state = torch.tanh(self.plant(self.cell(state + x)))
        return self.head(state)


class Returns(nn.Module):
    """A model that returns what `form` makes of its logits."""

    def __init__(self, plant, form):
        super().__init__()
        self.stem, self.plant, self.head = nn.Linear(WIDTH, WIDTH), plant(), nn.Linear(WIDTH, CLASSES)
        self.form = form

    def forward(self, x):
        return self.form(self.head(self.plant(self.stem(x))))


class Checkpointed(nn.Module):
    def __init__(self, plant, reentrant):
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer(nn.Identity), Layer(plant)])
        self.head, self.reentrant = nn.Linear(WIDTH, CLASSES), reentrant

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)
