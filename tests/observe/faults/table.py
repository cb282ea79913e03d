"""The planted faults, one row each: where it is, how it is run, and what a verdict must say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.observe.faults import plants
from tests.observe.faults.hosts import (
    PLANT_AT,
    WIDTH,
    Attention,
    Cnn,
    Encoder,
    Lstm,
    Stacked,
    TorchAttention,
    Transformer,
    images,
    rows,
    words,
)


def nothing(model: nn.Module) -> None:
    """Breaks, or mends, nothing."""


@dataclass(frozen=True)
class Fault:
    """A model that fails, and the verdict that it must get.

    `model` builds it, `breaks` spoils it, `spoils` spoils its input; `expect` is module, operator, phase, kind. `edit`
    says that an edit of the plan cures it; `mends` is what the words advise where none does (None: nothing does).
    `compiled` wraps it in torch.compile, `stale` steps twice without `zero_grad` before, the first time from an
    infinite loss.
    """

    name: str
    model: Callable[[], nn.Module]
    plan: str
    low: str
    expect: tuple[str, str, str, str]
    edit: bool = True
    breaks: Callable[[Any], None] = nothing
    spoils: Callable[[torch.Tensor], torch.Tensor] | None = None
    mends: Callable[[Any], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    stale: bool = False

    def inputs(self) -> torch.Tensor:
        made = self.model()
        return images() if isinstance(made, Cnn) else rows() if isinstance(made, Stacked) else words()


HOSTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cnn": Cnn,
    "lstm": Lstm,
    "transformer": Transformer,
    "attention": TorchAttention,
    "encoder": Encoder,
    "checkpoint": lambda plant: Transformer(plant, reentrant=False),
    "reentrant": lambda plant: Transformer(plant, reentrant=True),
    "compiled cnn": Cnn,
    "compiled transformer": Transformer,
}

FORWARD, BACKWARD = "forward", "backward"
PLANTS: dict[str, tuple[Callable[[], nn.Module], tuple[str, str, str], bool, Callable[[Any], None] | None]] = {
    "gain": (plants.Gain, ("mul", FORWARD, "overflow"), True, None),
    "squares": (plants.Squares, ("pow", FORWARD, "overflow"), True, None),
    "total": (plants.Total, ("sum", FORWARD, "overflow"), True, None),
    "eps": (plants.Eps, ("div", FORWARD, "invalid"), True, None),
    "log": (plants.LogOfZero, ("log", FORWARD, "invalid"), True, None),
    "where": (plants.WhereTrap, ("div", BACKWARD, "invalid"), False, lambda p: setattr(p, "fixed", True)),
    "sqrt": (plants.SqrtOfZero, ("sqrt", BACKWARD, "invalid"), False, lambda p: setattr(p, "eps", 1e-4)),
    "in place": (plants.InPlace, ("mul", FORWARD, "overflow"), True, None),
    "rows": (plants.Rows, ("mul", FORWARD, "overflow"), True, None),
    "custom forward": (plants.CustomForward, ("mul", FORWARD, "overflow"), True, None),
    "custom backward": (plants.CustomBackward, ("mul", BACKWARD, "overflow"), True, None),
    "custom divide": (plants.CustomDivide, ("div", BACKWARD, "invalid"), False, None),
}

# which plant in which host under which plan; a plant fails only where what it computes with is low
PLANTED = (
    ("gain", "cnn", "O1 fp16"), ("gain", "lstm", "O2 fp16"), ("gain", "transformer", "O3 fp16"),
    ("gain", "attention", "O2 fp16"), ("gain", "checkpoint", "O2 fp16"), ("gain", "reentrant", "O2 fp16"),
    ("gain", "compiled cnn", "O2 fp16"),
    ("squares", "cnn", "O2 fp16"), ("squares", "lstm", "O3 fp16"), ("squares", "encoder", "O2 fp16"),
    ("squares", "checkpoint", "O2 fp16"), ("squares", "reentrant", "O3 fp16"),
    ("squares", "compiled transformer", "O2 fp16"),
    ("total", "transformer", "O2 fp16"), ("total", "encoder", "O3 fp16"),
    ("eps", "cnn", "O2 fp16"), ("eps", "lstm", "O1 fp16"), ("eps", "transformer", "O2 fp16"),
    ("eps", "attention", "O3 fp16"), ("eps", "reentrant", "O2 fp16"), ("eps", "compiled cnn", "O3 fp16"),
    ("log", "cnn", "O1 bf16"), ("log", "lstm", "O2 bf16"), ("log", "transformer", "O2 fp16"),
    ("log", "attention", "O3 bf16"), ("log", "checkpoint", "O2 bf16"), ("log", "compiled transformer", "O2 bf16"),
    ("where", "cnn", "O2 fp16"), ("where", "transformer", "O1 bf16"), ("where", "checkpoint", "O2 bf16"),
    ("where", "reentrant", "O1 fp16"),
    ("sqrt", "cnn", "O1 fp16"), ("sqrt", "lstm", "O2 bf16"), ("sqrt", "encoder", "O2 fp16"),
    ("sqrt", "checkpoint", "O1 bf16"), ("sqrt", "reentrant", "O2 fp16"), ("sqrt", "compiled cnn", "O1 bf16"),
    ("in place", "cnn", "O1 fp16"), ("in place", "checkpoint", "O2 fp16"), ("rows", "lstm", "O2 fp16"),
    ("custom forward", "cnn", "O2 fp16"), ("custom forward", "transformer", "O3 fp16"),
    ("custom forward", "lstm", "O1 fp16"), ("custom forward", "checkpoint", "O2 fp16"),
    ("custom backward", "cnn", "O2 fp16"), ("custom backward", "lstm", "O3 fp16"),
    ("custom backward", "transformer", "O2 fp16"), ("custom backward", "reentrant", "O2 fp16"),
    ("custom divide", "cnn", "O1 bf16"), ("custom divide", "transformer", "O2 fp16"),
    ("custom divide", "checkpoint", "O2 bf16"), ("custom divide", "reentrant", "O1 fp16"),
)  # fmt: skip


def planted(plant: str, host: str, plan: str) -> Fault:
    make, expect, edit, mends = PLANTS[plant]
    build = HOSTS[host]
    where = PLANT_AT[type(build(nn.Identity()))]
    level, low = plan.split()
    return Fault(
        f"{plant} in {host}, {plan}",
        lambda: build(make()),
        level,
        low,
        (where, *expect),
        edit,
        mends=None if mends is None else lambda model: mends(model.get_submodule(where)),
        options={"emulate": False} if host.startswith("compiled") else {},
        compiled=host.startswith("compiled"),
    )


def write(path: str, value: float) -> Callable[[nn.Module], None]:
    """Returns what writes a value into the first element of a parameter or buffer."""

    def spoil(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(owner), name).view(-1)[0] = value

    return spoil


def grow(path: str, factor: float, rows: int | None = None) -> Callable[[nn.Module], None]:
    """Returns what multiplies the first rows of a parameter, or all of it."""

    def spoil(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(owner), name)[:rows].mul_(factor)

    return spoil


def both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    """Returns what breaks twice."""

    def spoil(model: nn.Module) -> None:
        one(model)
        other(model)

    return spoil


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what puts a value into the first element of a batch."""

    def spoil(inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone()
        inputs.view(-1)[0] = value
        return inputs

    return spoil


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Transformer(nn.Identity(), Attention(**options))


def see_something(model: Any) -> None:
    model.blocks[1].attn.empty = False


def see_a_key(model: Any) -> None:
    model.hidden = 1


SCALE, NORMAL = "scale too high", {"loss_scale": 2.0**30}
BIG = 1e5
OTHERS = (
    # masks
    Fault("a row masked by -inf", attention(empty=True), "O2", "fp16",
          ("blocks.1.attn", "softmax", FORWARD, "masked row"), False, mends=see_something),
    Fault("a row masked by -inf, bf16", attention(empty=True, style="where"), "O1", "bf16",
          ("blocks.1.attn", "softmax", FORWARD, "masked row"), False, mends=see_something),
    Fault("a row masked by -1e9 that is added", attention(mask=-1e9, empty=True, style="add"), "O2", "fp16",
          ("blocks.1.attn", "softmax", FORWARD, "masked row")),
    Fault("a row masked by -1e9 that is chosen", attention(mask=-1e9, empty=True, style="where"), "O3", "fp16",
          ("blocks.1.attn", "softmax", FORWARD, "masked row")),
    Fault("zero times -inf", attention(style="add"), "O2", "fp16",
          ("blocks.1.attn", "mul", FORWARD, "invalid"), False),
    Fault("all keys of a sample hidden", lambda: TorchAttention(nn.Identity(), hidden=6), "O1", "fp16",
          ("attn", "softmax", FORWARD, "masked row"), False, mends=see_a_key),
    Fault("all keys of a sample hidden, bf16", lambda: TorchAttention(nn.Identity(), hidden=6), "O2", "bf16",
          ("attn", "softmax", FORWARD, "masked row"), False, mends=see_a_key),
    # products
    Fault("scores of attention", attention(gain=1e6), "O1", "fp16", ("blocks.1.attn", "mul", FORWARD, "overflow")),
    Fault("scores of torch's attention", lambda: TorchAttention(nn.Identity()), "O2", "fp16",
          ("attn", "baddbmm", FORWARD, "overflow"), breaks=grow("attn.in_proj_weight", 1e3, rows=2 * WIDTH)),
    Fault("scores of torch's encoder", lambda: Encoder(nn.Identity()), "O1", "fp16",
          ("layer.self_attn", "linear", FORWARD, "overflow"),
          breaks=grow("layer.self_attn.in_proj_weight", 1e6, rows=2 * WIDTH)),
    Fault("a head", lambda: Cnn(nn.Identity()), "O1", "fp16", ("head", "linear", FORWARD, "overflow"),
          breaks=both(grow("conv2.weight", 100), grow("head.weight", 1e4))),
    Fault("a convolution", lambda: Cnn(nn.Identity()), "O2", "fp16", ("conv2", "conv2d", FORWARD, "overflow"),
          breaks=grow("conv2.weight", 1e5)),
    Fault("an input beyond the format", lambda: Cnn(nn.Identity()), "O2", "fp16", ("", "to", FORWARD, "overflow"),
          spoils=lambda x: x * BIG),
    Fault("an input beyond the format of a product", lambda: Cnn(nn.Identity()), "O1", "fp16",
          ("conv1", "conv2d", FORWARD, "overflow"), spoils=lambda x: x * BIG),
    # the loss scale
    Fault("a static scale, cnn", lambda: Cnn(nn.Identity()), "O1", "fp16", ("", "to", BACKWARD, SCALE), options=NORMAL),
    Fault("a static scale, lstm", lambda: Lstm(nn.Identity()), "O2", "fp16", ("", "to", BACKWARD, SCALE),
          options=NORMAL),
    Fault("a static scale, transformer", lambda: Transformer(nn.Identity()), "O3", "fp16", ("", "to", BACKWARD, SCALE),
          options=NORMAL),
    # input data and weights
    Fault("NaN in the input", lambda: Cnn(nn.Identity()), "O1", "bf16", ("conv1", "conv2d", FORWARD, "input data"),
          False, spoils=first(math.nan), mends=nothing),
    Fault("inf in the input", lambda: Cnn(nn.Identity()), "O2", "fp16", ("conv1", "conv2d", FORWARD, "input data"),
          False, spoils=first(math.inf), mends=nothing),
    Fault("NaN in a weight of a convolution", lambda: Cnn(nn.Identity()), "O2", "bf16",
          ("conv2", "conv2d", FORWARD, "weights"), False, breaks=write("conv2.weight", math.nan)),
    Fault("NaN in a weight of an LSTM", lambda: Lstm(nn.Identity()), "O1", "bf16",
          ("lstm", "lstm", FORWARD, "weights"), False, breaks=write("lstm.weight_hh_l0", math.nan)),
    Fault("inf in a weight of torch's attention", lambda: TorchAttention(nn.Identity()), "O1", "fp16",
          ("attn.out_proj", "linear", FORWARD, "weights"), False, breaks=write("attn.out_proj.weight", math.inf)),
    Fault("NaN in a norm of an encoder", lambda: Encoder(nn.Identity()), "O3", "bf16",
          ("layer.norm1", "layer_norm", FORWARD, "weights"), False, breaks=write("layer.norm1.weight", math.nan)),
    Fault("a weight beyond the stored format", lambda: Cnn(nn.Identity()), "O2", "fp16",
          ("conv2", "conv2d", FORWARD, "overflow"), breaks=write("conv2.weight", BIG)),
)  # fmt: skip

# gradients that nobody zeroed
OTHERS += (
    Fault("no zero_grad, cnn", lambda: Cnn(nn.Identity()), "O1", "bf16",
          ("conv1", "zero_grad", BACKWARD, "stale gradients"), False, stale=True, mends=nothing),
    Fault("no zero_grad, lstm", lambda: Lstm(nn.Identity()), "O2", "fp16",
          ("embed", "zero_grad", BACKWARD, "stale gradients"), False, stale=True, mends=nothing),
    Fault("no zero_grad, transformer", lambda: Transformer(nn.Identity()), "O3", "bf16",
          ("embed", "zero_grad", BACKWARD, "stale gradients"), False, stale=True, mends=nothing),
)  # fmt: skip

# several places, and places without a module
OTHERS += (
    Fault("a stream beyond the format", lambda: Stacked(plants.Stream(), nn.Identity()), "O2", "fp16",
          ("blocks.0", "add", FORWARD, "overflow")),
    Fault("two places", lambda: Stacked(plants.Gain(), plants.InPlace()), "O2", "fp16",
          ("blocks.0", "mul", FORWARD, "overflow")),
    Fault("NaN in running statistics", lambda: Cnn(nn.Identity()).eval(), "O1", "fp16",
          ("norm", "batch_norm", FORWARD, "weights"), False, breaks=write("norm.running_var", math.nan)),
)  # fmt: skip

FAULTS = (*(planted(*row) for row in PLANTED), *OTHERS)
