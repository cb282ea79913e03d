"""Verdicts on faults that are easily taken for another: kind, place and cure, and what is said of them and what not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep import FULL, OpChange, Rule, Scaling
from tests.diagnose.closures import LABELS, cross_entropy, verdict_on
from tests.diagnose.faults.hosts import Attention, Behind, Cnn, Stacked, Transformer
from tests.diagnose.faults.plants import Gain


@dataclass(frozen=True)
class Row:
    """A model, its loss and its plan, and the verdict on them: `says` and `never` are parts of its words.

    `fields` are the verdict's; None: there must be no verdict.
    """

    name: str
    model: Callable[[], nn.Module]
    fields: dict[str, Any] | None
    plan: str = "O2"
    low: str = "fp16"
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = cross_entropy
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    marks: tuple[pytest.MarkDecorator, ...] = ()


def check(row):
    verdict = verdict_on(row.model(), row.plan, row.low, loss=row.loss, **row.options)
    if row.fields is None:
        assert verdict is None
        return
    assert {name: getattr(verdict, name) for name in row.fields} == row.fields
    said = f"{verdict.where}\n{verdict.evidence}\n{verdict.advice}"
    assert [words for words in row.says if words not in said] == []
    assert [words for words in row.never if words in said] == []


def parametrize(rows):
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=row.marks) for row in rows])


def linear():
    return nn.Linear(8, 4)


def plain_cnn():
    return Cnn(nn.Identity())


def plain_stack():
    return Stacked(nn.Identity(), nn.Identity())


def between(*functions):
    """Builds a network: a linear layer, a layer with each of the functions behind it, and a linear layer."""
    return lambda: nn.Sequential(nn.Linear(8, 8), *(Behind(function) for function in functions), nn.Linear(8, 4))


# What is no number is not always the format's fault.


NO_NUMBERS = torch.full((8, 4), torch.nan)


def to_nothing(model, inputs):
    return F.mse_loss(model(inputs), NO_NUMBERS)


def over_zero(model, inputs):
    return F.cross_entropy(model(inputs) / 0.0, LABELS)


def cast_by_itself(model, inputs):
    return F.cross_entropy(model(inputs).half() * 1e7, LABELS)


def excluded_target(model, inputs):
    excluded = torch.tensor([True, False, False, False])
    return F.cross_entropy(model(inputs).masked_fill(excluded, -torch.inf), LABELS)


def left_out_again(model, inputs):
    out = model(inputs)
    return torch.minimum(torch.full_like(out, torch.inf), out).square().mean()


def stored_weights(model, inputs):
    return (model.weight * 1e6).square().mean() + model(inputs).mean()


def stored_weights_widened(model, inputs):
    return (model.weight.float() * 10).square().mean() + model(inputs).mean()


def half_loss(model, inputs):
    return model(inputs).square().mean().half()


def falling(model, inputs):
    return -model(inputs).mean()


def zero_by_zero(model, inputs):
    nothing = torch.zeros(4, 4)
    return (nothing / nothing + model(inputs)[:4]).mean()


KINDS = [
    Row("target that is not finite", plain_stack,
        {"kind": "input data", "operator": "mse_loss", "cure": (), "outside": True}, "O1", "bf16", to_nothing),
    Row("without low numbers nothing to edit", plain_cnn, {"kind": "invalid", "operator": "div", "cure": ()},
        "O0", "bf16", over_zero),
    Row("code that casts is out of reach", plain_cnn, {"kind": "overflow", "cure": ()},
        "O1", loss=cast_by_itself, says=("the code itself casts",)),
    Row("target that a mask excludes", plain_stack, {"kind": "invalid", "operator": "cross_entropy", "cure": ()},
        "O1", "bf16", excluded_target, says=("the loss of a target that is masked is infinite",)),
    Row("infinity that is left out again", plain_stack, None, "O1", "bf16", left_out_again),
    Row("weights as they are stored", linear, {"kind": "overflow", "operator": "mul", "cure": ()}, loss=stored_weights,
        says=("the code also reads weights of the original ones", "weight.float()"), never=("fp32 the same closure",)),
    Row("stored weights that the loss widens", linear, None, loss=stored_weights_widened,
        options={"loss_scale": 16.0}),
    Row("fp16 loss at the scale that training begins with", linear, None, loss=half_loss),
    Row("fp16 loss at a higher scale", linear, {"kind": "scale too high", "operator": "to"}, loss=half_loss,
        options={"loss_scale": 2.0**17}, says=(" in half_loss",)),
    Row("uniform gradients below zero", lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        {"kind": "scale too high", "phase": "backward"}, loss=falling,
        options={"loss_scale": Scaling("static", init=2.0**30)}, never=("mask",)),
    Row("zero by zero", linear, {"operator": "div"}, "O1", "bf16", zero_by_zero,
        says=("div gave 16 NaN in 16 elements, from 0/0",)),
]  # fmt: skip


@parametrize(KINDS)
def test_the_kind(row):
    check(row)


# A mask is written, not computed from what is learned; and what lies behind one is told from what the mask does.


def first_row(like):
    return (torch.arange(len(like)) == 0)[:, None].expand(like.shape)


class Shifted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.shift = shift
        self.bias = nn.Parameter(torch.full((8,), -300.0))

    def forward(self, x):
        return self.head(torch.softmax(self.shift(self.bias, self.fc(x)), -1))


def shifted(name, shift, kind, operator, *, says=(), never=()):
    fields = {"kind": kind, "operator": operator}
    return Row(name, lambda: Shifted(shift), fields, "O3", says=says, never=never)


def own_softmax(steep, mask=-torch.inf, add=False):
    """Attention's softmax by hand, behind a mask; `steep` makes its exponentials large."""

    def softmax(x):
        scores, hidden = x * steep, torch.arange(8) > 5
        scores = scores + hidden.to(scores.dtype) * mask if add else scores.masked_fill(hidden, mask)
        shares = torch.exp(scores)
        return shares / shares.sum(-1, keepdim=True)

    return between(softmax)


BEHIND_A_MASK = {
    "fields": {"kind": "overflow", "module": "1", "operator": "exp", "cure": (OpChange("deny", "exp"),)},
    "says": ("exceeds fp16's maximum",),
    "never": ("mask",),
}
MASKS = [
    Row("harmless mask before a fault", lambda: Transformer(Gain(), Attention()),
        {"module": "blocks.1.plant", "operator": "mul"}),
    shifted("learned bias", lambda bias, z: bias * 300 + z, "overflow", "mul", never=("mask",)),
    shifted("constant in the place of a bias", lambda bias, z: (bias * 0 + 1) * -9e4 + z, "masked row", "softmax",
            says=("mask",)),
    shifted("full of -300 times 300", lambda bias, z: z + torch.full_like(z, -300.0) * 300, "masked row", "softmax",
            says=("mask",)),
    shifted("where in fp32", lambda bias, z: torch.where(first_row(z), -9e4, z.float()).to(z.dtype),
            "masked row", "softmax", says=("mask",)),
    Row("behind a fill", own_softmax(30.0), **BEHIND_A_MASK),
    Row("behind a sum", own_softmax(30.0, -1e9, True), **BEHIND_A_MASK),
    Row("too large for every format behind a mask", own_softmax(1e3),
        {"kind": "overflow", "operator": "exp", "cure": ()}, low="bf16", says=("too large even for fp32",)),
]  # fmt: skip


@pytest.mark.slow_but("full of ", "too large for every format behind a mask")
@parametrize(MASKS)
def test_masks(row):
    check(row)


@pytest.mark.parametrize("style", ["fill", "where", "add"])
@pytest.mark.parametrize("mask", [-torch.inf, -1e9])
@pytest.mark.parametrize(("plan", "low"), [("O1", "fp16"), ("O2", "fp16"), ("O3", "bf16")])
def test_a_mask_that_leaves_each_row_an_entry_is_harmless(plan, low, mask, style):
    if style == "add" and mask == -torch.inf:
        pytest.skip("zero times -inf is NaN: that is no mask")
    if style == "fill" and mask == -1e9 and low == "fp16":
        mask = torch.finfo(torch.float16).min  # torch refuses to fill with what the format does not hold
    assert verdict_on(Transformer(nn.Identity(), Attention(mask=mask, style=style)), plan, low) is None


# Divisions, two faults at once, and places that are not plainly a module's forward.


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, zero):
        ctx.zero = zero
        return z / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.zero, None


def divided(function, zero, phase):
    def loss(model, inputs):
        return F.cross_entropy(function(model(inputs), zero), LABELS)

    fields = {"kind": "invalid", "operator": "div", "phase": phase}
    return Row(f"{phase} by {zero}", linear, fields, low="bf16", loss=loss, never=("scale its inputs down",))


def logarithm_of_eps(z):
    """The logarithm of a product of numbers that are an eps: 0 in fp16, and as a product in fp32 too."""
    return torch.log(torch.cumprod(z * 0 + 1e-10, -1))


def loud(z):
    return z * 3e5 / 3e5


def emptied(z):
    return torch.softmax(z.masked_fill(first_row(z), -torch.inf), -1)


def under(transform):
    """A row with a function of torch.func that runs the model."""

    def loss(model, inputs):
        return transform(model, inputs, lambda out: F.cross_entropy(out, LABELS))

    fields = {"kind": "overflow", "module": "blocks.0", "operator": "mul", "cure": (Rule("blocks.0", FULL),)}
    ignored = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of what jvp imports
    return Row(transform.__name__, lambda: Stacked(Gain(), nn.Identity()), fields, loss=loss, marks=(ignored,))


def vmap(model, inputs, loss):
    return loss(torch.vmap(model)(inputs))


def jvp(model, inputs, loss):
    return torch.func.jvp(lambda x: loss(model(x)), (inputs,), (torch.ones_like(inputs),))[1]


def functional_call(model, inputs, loss):
    return loss(torch.func.functional_call(model, dict(model.named_parameters()), (inputs,)))


class Inner(nn.Module):
    """A checkpoint of a function inside of a forward, whose gradients are large on their way."""

    def __init__(self, reentrant):
        super().__init__()
        self.fc, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x):
        def inner(x):
            return torch.tanh(self.fc(x) / 3e3) * 3e3

        return checkpoint(inner, x, use_reentrant=self.reentrant)


def checkpointed(reentrant):
    fields = {"module": "1", "operator": "mul", "kind": "scale too high"}
    return Row(f"checkpoint, reentrant {reentrant}",
               lambda: nn.Sequential(nn.Linear(8, 8), Inner(reentrant), nn.Linear(8, 4)), fields,
               options={"loss_scale": 4096.0}, says=(" in inner",))  # fmt: skip


class Nested(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.fc, self.layout = nn.Linear(8, 8), layout

    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=self.layout)
        return torch.cat(list((self.fc(nested) / 0.0).unbind()))


def nested(low, layout):
    fields = {"kind": "invalid", "module": "0", "operator": "div"}
    ignored = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    return Row(f"nested {low} {layout}", lambda: nn.Sequential(Nested(layout), nn.Linear(8, 4)), fields, "O1", low,
               marks=(ignored,))  # fmt: skip


PLACES = [
    divided(torch.div, 0, "forward"),
    divided(torch.div, 0.0, "forward"),
    divided(Halved.apply, 0, "backward"),
    divided(Halved.apply, 0.0, "backward"),
    Row("eps that cures no more in fp32", lambda: nn.Sequential(Behind(logarithm_of_eps), nn.Linear(8, 4)),
        {"kind": "invalid", "operator": "log", "cure": ()}, says=("because 1e-10 is 0 in fp16",),
        never=("use 1e-06 or more",)),
    Row("two faults, of which one is in fp32 too", between(loud, emptied),
        {"kind": "overflow", "module": "1", "operator": "mul", "cure": ()},
        says=("two faults", "masked row of softmax in module 2"), never=("cast",)),
    under(vmap),
    under(jvp),
    under(functional_call),
    checkpointed(True),
    checkpointed(False),
    nested("bf16", torch.strided),
    nested("bf16", torch.jagged),
    nested("fp16", torch.jagged),
]  # fmt: skip


@pytest.mark.slow_but(
    "forward by 0", "backward by 0.0", "two faults, of which one is in fp32 too", "vmap", "checkpoint, reentrant False"
)
@parametrize(PLACES)
def test_the_place(row):
    check(row)
