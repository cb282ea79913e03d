"""Faults that nobody planned the diagnosis for, and healthy models that look like faults; one row each."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.diagnose.faults.fault import BACKWARD, FORWARD, SCALE, Fault, set_at
from tests.diagnose.faults.hosts import WIDTH, Stacked, rows
from tests.diagnose.faults.plants import CustomBackward, SqrtOfZero, Steep

INVALID, OVERFLOW, MASKED = "invalid", "overflow", "masked row"
GRADIENT = "is not finite here"
NOWHERE = "with an eps or a clamp"


class Step(nn.Module):
    """Applies a function, or once `mended` the one that is advised in its place."""

    def __init__(self, function: Callable[[Tensor], Tensor], mended: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.mended = mended
        self.is_mended = False

    def forward(self, x):
        return self.mended(x) if self.is_mended else self.function(x)


def with_zeros(x: Tensor) -> Tensor:
    """Returns the same with a first row of zeros."""
    return x * (torch.arange(len(x)) > 0).to(x.dtype)[:, None]


def first_row(x: Tensor) -> Tensor:
    return (torch.arange(len(x)) == 0)[:, None].expand(x.shape)


def no_edit(name, function, mended, expect, advice, plan="O2", low="fp16") -> Fault:
    """Returns a row that words cure, and no edit."""
    found = ("blocks.0", *expect)
    return Fault(name, "mlp", lambda: Stacked(Step(function, mended), nn.Identity()), plan, low, found, False, advice,
                 set_at("blocks.0.is_mended", True), inputs=rows)  # fmt: skip


def by_edit(name, function, expect, plan="O2", low="fp16") -> Fault:
    """Returns a row that an edit cures."""
    return Fault(name, "mlp", lambda: Stacked(Step(function, function), nn.Identity()), plan, low,
                 ("blocks.0", *expect), inputs=rows)  # fmt: skip


def healthy(name, function, plan="O2", low="fp16") -> Fault:
    return Fault(name, "mlp", lambda: Stacked(Step(function, function), nn.Identity()), plan, low, None, False,
                 inputs=rows, options={"loss_scale": 16.0} if low == "fp16" else {})  # fmt: skip


def less_largest(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def square(x: Tensor) -> Tensor:
    return x * x


def hand_gelu(x: Tensor) -> Tensor:
    y = x * 90
    return 0.5 * y * (1 + torch.tanh(0.79788 * (y + 0.044715 * torch.pow(y, 3))))


class Reparameterised(nn.Module):
    """The sampling of a variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        spread = self.spread(x) * 40
        return self.mean(x) + torch.log1p(torch.exp(0.5 * spread)) * torch.randn_like(x)


class Twice(nn.Module):
    """A module that is used twice, and overflows the second time."""

    def __init__(self):
        super().__init__()
        self.grow = Step(lambda x: x * 1e3, lambda x: x * 1e3)

    def forward(self, x):
        return self.grow(self.grow(x)) / 1e6


class Normed(nn.Module):
    """A linear layer whose weight is its direction times its length, with a row of length zero."""

    def __init__(self):
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            linear.weight[0] = 0
        self.linear = nn.utils.parametrizations.weight_norm(linear)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.is_mended = False

    def forward(self, x):
        return self.plain(x) if self.is_mended else self.linear(x)


def of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stacked(block(), nn.Identity())


# what has no value in any format
POLES = (
    no_edit("atanh of one", lambda x: torch.atanh(torch.tanh(9 * x)), lambda x: torch.atanh(0.9 * torch.tanh(9 * x)),
            ("atanh", FORWARD, INVALID), NOWHERE, low="bf16"),
    no_edit("logit of one", lambda x: torch.logit(torch.sigmoid(40 * x)), lambda x: torch.logit(torch.sigmoid(x)),
            ("logit", FORWARD, INVALID), NOWHERE, low="bf16"),
    no_edit("log of an underflowed share", lambda x: torch.log(torch.softmax(400 * x, -1)) / 100,
            lambda x: torch.log(torch.softmax(400 * x, -1) + 1e-4) / 100, ("log", FORWARD, INVALID), NOWHERE, "O3"),
    no_edit("square root of a variance of zero", lambda x: x / (with_zeros(x).var(-1, keepdim=True).sqrt() + 1),
            lambda x: x / ((with_zeros(x).var(-1, keepdim=True) + 1e-2).sqrt() + 1), ("sqrt", BACKWARD, INVALID),
            GRADIENT, "O1"),
    no_edit("norm of zeros by hand", lambda x: x * with_zeros(x).pow(2).sum(-1, keepdim=True).sqrt(),
            lambda x: x * (with_zeros(x).pow(2).sum(-1, keepdim=True) + 1e-2).sqrt(), ("sqrt", BACKWARD, INVALID),
            GRADIENT),
    no_edit("power a half of zero", lambda x: with_zeros(x).abs() ** 0.5, lambda x: (with_zeros(x).abs() + 0.01) ** 0.5,
            ("pow", BACKWARD, INVALID), GRADIENT, "O2", "bf16"),
    no_edit("where behind a square root", lambda x: torch.where(x > 0, torch.sqrt(x), 0.0),
            lambda x: torch.where(x > 0, torch.sqrt(torch.where(x > 0, x + 0.1, 1.0)), 0.0),
            ("sqrt", FORWARD, INVALID), NOWHERE),
    no_edit("arc sine of one", lambda x: torch.asin(torch.tanh(20 * x)), lambda x: torch.asin(0.9 * torch.tanh(20 * x)),
            ("asin", BACKWARD, INVALID), GRADIENT, low="bf16"),
    no_edit("a temperature of zero", lambda x: torch.softmax(x / 0.0, -1), lambda x: torch.softmax(x / 0.01, -1),
            ("div", FORWARD, INVALID), NOWHERE),
    no_edit("zeros divided in place", lambda x: with_zeros(x).div_(with_zeros(x).sum(-1, keepdim=True)),
            lambda x: with_zeros(x).div_(with_zeros(x).abs().sum(-1, keepdim=True) + 0.1), ("div", FORWARD, INVALID),
            NOWHERE),
    no_edit("a mean of nothing", lambda x: x + x[x > 1e4].mean(), lambda x: x, ("mean", FORWARD, INVALID),
            "skip it if no element is selected"),
    no_edit("a variance of one row", lambda x: x / (1 + x[:1].var(0)), lambda x: x / (1 + x[:2].var(0)),
            ("var", FORWARD, INVALID), "pass correction=0"),
    no_edit("NaN that the code writes", lambda x: x.masked_fill(first_row(x), math.nan),
            lambda x: x.masked_fill(first_row(x), 0.0), ("masked_fill", FORWARD, INVALID),
            "the code passes NaN to"),
    no_edit("exp of what is left out", lambda x: torch.where(x > 0.1, x, torch.exp(-300 * x)),
            lambda x: torch.where(x > 0.1, x, torch.exp(-x)), ("exp", FORWARD, OVERFLOW), "scale its inputs down"),
    no_edit("two exponentials in a line", lambda x: torch.exp(torch.exp(6 * x)) * 0 + x, lambda x: torch.exp(x) * 0 + x,
            ("exp", FORWARD, OVERFLOW), "scale its inputs down"),
    no_edit("an exponential as a power", lambda x: torch.pow(2.0, 2e3 * x), lambda x: torch.pow(2.0, x),
            ("pow", FORWARD, OVERFLOW), "scale its inputs down", low="bf16"),
    Fault("a weight of length zero", "mlp", of(Normed), "O1", "bf16",
          ("blocks.0.linear.parametrizations.weight.0", "weight_norm", FORWARD, INVALID), False, NOWHERE,
          set_at("blocks.0.is_mended", True), inputs=rows),
)  # fmt: skip

# masks
MASKS = (
    no_edit("a row of log_softmax", lambda x: torch.log_softmax(x.masked_fill(first_row(x), -math.inf), -1),
            lambda x: torch.log_softmax(x, -1), ("log_softmax", FORWARD, MASKED), "at least one entry", "O1"),
    no_edit("a mask of plus infinity", lambda x: torch.softmax(x.masked_fill(x < 0, math.inf), -1),
            lambda x: torch.softmax(x.masked_fill(x < 0, -math.inf), -1), ("softmax", FORWARD, INVALID),
            "mask with -inf"),
    no_edit("an empty row minus its largest",
            lambda x: torch.softmax(less_largest(x.masked_fill(first_row(x), -math.inf)), -1),
            lambda x: torch.softmax(less_largest(x), -1), ("sub", FORWARD, INVALID),
            "leave a finite entry in each row"),
    no_edit("an infinity times zero", lambda x: x + torch.full_like(x, math.inf) * first_row(x).to(x.dtype) * 0,
            lambda x: x, ("mul", FORWARD, INVALID), "0 times inf is NaN"),
    healthy("the largest where not masked", lambda x: x - x.masked_fill(x < 0, -math.inf).amax(-1, keepdim=True)),
    healthy("top three by a mask",
            lambda x: torch.softmax(x.masked_fill(x < x.topk(3, -1).values[:, -1:], -math.inf), -1)),
    healthy("a mask of plus infinity under a minimum",
            lambda x: torch.minimum(x, torch.full_like(x, math.inf)), low="bf16"),
    healthy("an overflow that a clamp ends", lambda x: (x * 1e7).clamp(-10, 10) + x),
    healthy("an overflow that a sigmoid ends", lambda x: torch.sigmoid(x * 1e7) + x),
    healthy("sorted behind a mask",
            lambda x: torch.sort(x.masked_fill(x < 0, -math.inf), -1, descending=True)[0].clamp(min=-5)),
    healthy("empty rows that a torch.where before them fills", lambda x: x + torch.softmax(
            torch.where(first_row(x), 0.0, x.masked_fill(first_row(x), -math.inf)), -1)),
)  # fmt: skip

# what is too large, or rounds to zero, in the low format only
LOW = (
    by_edit("a small temperature behind ReLU", lambda x: torch.softmax(torch.relu(x) / 1e-5, -1),
            ("div", FORWARD, OVERFLOW)),
    by_edit("squares behind ReLU", lambda x: square(torch.relu(x) * 10) + (torch.relu(x) * 1e3).pow(2) / 1e6,
            ("pow", FORWARD, OVERFLOW)),
    by_edit("a sum over positions", lambda x: torch.cumsum(x.abs() * 2e4, -1) / 1e5, ("cumsum", FORWARD, OVERFLOW)),
    by_edit("a product over positions", lambda x: torch.log(torch.cumprod(x.abs() + 8, -1)) / 10,
            ("cumprod", FORWARD, OVERFLOW)),
    by_edit("a sum over many", lambda x: x * (x.abs() + 1).repeat(1, 9000).sum() / 1e6, ("sum", FORWARD, OVERFLOW)),
    by_edit("softmax by hand", lambda x: torch.exp(x * 20) / torch.exp(x * 20).sum(-1, keepdim=True),
            ("exp", FORWARD, OVERFLOW)),
    by_edit("softmax by hand behind a mask",
            lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp((x * 20).masked_fill(x < -1, -math.inf))),
            ("exp", FORWARD, OVERFLOW)),
    by_edit("an outer product", lambda x: torch.einsum("bi,bj->bij", x * 300, x * 300).mean(-1) / 1e5,
            ("einsum", FORWARD, OVERFLOW)),
    by_edit("rows added to one row", lambda x: torch.zeros_like(x).index_add(
            0, torch.zeros(len(x), dtype=torch.int64), x * 3e4) / 1e5, ("index_add", FORWARD, OVERFLOW)),
    by_edit("a slice in place", lambda x: (lambda y: (y[:, 0].mul_(1e7), y / 1e6)[1])(x.clone()),
            ("mul", FORWARD, OVERFLOW)),
    by_edit("a gelu by hand, backward", hand_gelu, ("pow", BACKWARD, OVERFLOW)),
    by_edit("cosine similarity of zeros",
            lambda x: x * functional.cosine_similarity(with_zeros(x), with_zeros(x), dim=-1)[:, None],
            ("cosine_similarity", FORWARD, INVALID)),
    by_edit("rows of length one", lambda x: functional.normalize(with_zeros(x), dim=-1), ("div", FORWARD, INVALID)),
    by_edit("a bound below the format", lambda x: with_zeros(x) / with_zeros(x).abs().sum(-1, keepdim=True).clamp(1e-8),
            ("div", FORWARD, INVALID)),
    by_edit("a factor below the format", lambda x: 1e-6 * x / (x.abs() * 1e-9 + x.abs() * 1e-9) / 1e3 + x,
            ("div", FORWARD, INVALID)),
    Fault("an exponential of a spread", "mlp", of(Reparameterised), "O2", "fp16",
          ("blocks.0", "exp", FORWARD, OVERFLOW), inputs=rows),
    Fault("an overflow that no scale cures before one that a scale does", "mlp",
          lambda: Stacked(CustomBackward(), Steep(1e3)), "O2", "fp16", ("blocks.0", "mul", BACKWARD, OVERFLOW),
          inputs=rows),
    Fault("a gradient that no format has before one that a scale cures", "mlp",
          lambda: Stacked(SqrtOfZero(), Steep(1e3)), "O2", "fp16", ("blocks.0", "sqrt", BACKWARD, INVALID), False,
          GRADIENT, set_at("blocks.0.eps", 1e-4), inputs=rows),
    Fault("a module used twice", "mlp", of(Twice), "O1", "fp16", ("blocks.0.grow", "mul", FORWARD, OVERFLOW),
          inputs=rows),
)  # fmt: skip


def with_loss(name: str, loss: Callable[[Tensor, Tensor], Tensor], expect: Any, **options: Any) -> Fault:
    model = partial(Stacked, nn.Identity(), nn.Identity())
    return Fault(name, "mlp", model, "O2", "fp16", expect, inputs=rows, loss=loss, **options)


# losses
LOSSES = (
    with_loss("a large factor of the loss", lambda out, labels: functional.cross_entropy(out, labels) * 1e3,
              ("", "to", BACKWARD, SCALE)),
    with_loss("large targets", lambda out, labels: functional.mse_loss(out, torch.full_like(out, 3e3)),
              ("", "to", BACKWARD, SCALE)),
)  # fmt: skip

UNPLANNED = (*POLES, *MASKS, *LOW, *LOSSES)
