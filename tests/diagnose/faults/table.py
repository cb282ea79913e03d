"""The planted faults, one row each: where it is, how it is run, and what a verdict must say of it."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from halfstep import LOW, Rule
from tests.diagnose.faults import plants
from tests.diagnose.faults.fault import BACKWARD, FORWARD, SCALE, Fault, both, first, grow, set_at, write
from tests.diagnose.faults.hosts import (
    PLANT_AT,
    WIDTH,
    Attention,
    Cnn,
    Encoder,
    Led,
    Lstm,
    Stacked,
    TorchAttention,
    Transformer,
    images,
    rows,
    sequences,
    words,
)

# how it is built, and in which column of the matrix it counts
HOSTS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "cnn": (Cnn, "cnn"),
    "lstm": (Lstm, "lstm"),
    "transformer": (Transformer, "transformer"),
    "attention": (TorchAttention, "transformer"),  # the plant is behind nn.MultiheadAttention, not inside
    "encoder": (Encoder, "transformer"),
    "checkpoint": (lambda plant: Transformer(plant, reentrant=False), "checkpoint"),
    "reentrant": (lambda plant: Transformer(plant, reentrant=True), "checkpoint"),
    "compiled cnn": (Cnn, "compiled"),
    "compiled lstm": (Lstm, "compiled"),
    "compiled transformer": (Transformer, "compiled"),
}

EPS, CLAMP, GRADIENT = "use 1e-06 or more", "with an eps or a clamp", "is not finite here"
ENTRY = "leave at least one entry of each row unmasked"
GUARD = "or set the scores of such a row to zero with torch.where before the softmax and discard its result"
# what it is, what a verdict says of it (None: nothing), whether an edit cures it, else the words and what they do to it
PLANTS: dict[str, tuple[Any, tuple[str, str, str] | None, bool, str, Callable[[Any], None] | None]] = {
    "gain": (plants.Gain, ("mul", FORWARD, "overflow"), True, "", None),
    "squares": (plants.Squares, ("pow", FORWARD, "overflow"), True, "", None),
    "total": (plants.Total, ("sum", FORWARD, "overflow"), True, "", None),
    "in place": (plants.InPlace, ("mul", FORWARD, "overflow"), True, "", None),
    "rows": (plants.Rows, ("mul", FORWARD, "overflow"), True, "", None),
    "eps": (plants.Eps, ("div", FORWARD, "invalid"), True, EPS, set_at("eps", 1e-6)),
    "log": (plants.LogOfZero, ("log", FORWARD, "invalid"), True, "", None),
    "where": (plants.WhereTrap, ("div", BACKWARD, "invalid"), False, GRADIENT, set_at("fixed", True)),
    "sqrt": (plants.SqrtOfZero, ("sqrt", BACKWARD, "invalid"), False, GRADIENT, set_at("eps", 1e-4)),
    "steep": (plants.Steep, ("mul", BACKWARD, SCALE), True, "", None),
    "masked": (plants.Masked, None, False, "", None),
    "masked -1e9": (lambda: plants.Masked(-1e9, "add"), None, False, "", None),
    "empty": (
        lambda: plants.Masked(empty=True), ("softmax", FORWARD, "masked row"), False, ENTRY, set_at("empty", False)
    ),
    "empty, guarded": (
        lambda: plants.Masked(empty=True), ("softmax", FORWARD, "masked row"), False, GUARD, set_at("style", "guarded")
    ),
    "empty -1e9": (
        lambda: plants.Masked(-1e9, "add", empty=True), ("softmax", FORWARD, "masked row"), True,
        "leave one entry of each row unmasked", set_at("empty", False),
    ),
    "custom forward": (plants.CustomForward, ("mul", FORWARD, "overflow"), True, "", None),
    "custom backward": (plants.CustomBackward, ("mul", BACKWARD, "overflow"), True, "", None),
    "custom eps": (plants.CustomEps, ("div", FORWARD, "invalid"), True, EPS, set_at("eps", 1e-6)),
    "custom divide": (plants.CustomDivide, ("div", BACKWARD, "invalid"), False, GRADIENT, set_at("eps", 1e-3)),
    "custom steep": (plants.CustomSteep, ("mul", BACKWARD, SCALE), True, "", None),
    "custom masked": (plants.CustomMasked, None, False, "", None),
    "custom empty": (
        lambda: plants.CustomMasked(empty=True), ("softmax", FORWARD, "masked row"), False, ENTRY,
        set_at("empty", False),
    ),
    "custom empty -1e9": (
        lambda: plants.CustomMasked(-1e9, empty=True), ("softmax", FORWARD, "masked row"), True,
        "leave one entry of each row unmasked", set_at("empty", False),
    ),
}  # fmt: skip

# which plant in which host under which plan (and static loss scale); it fails only where what it computes with is low
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
    ("steep", "cnn", "O1 fp16"), ("steep", "lstm", "O2 fp16"), ("steep", "transformer", "O3 fp16 65536"),
    ("steep", "encoder", "O2 fp16"), ("steep", "checkpoint", "O2 fp16"), ("steep", "reentrant", "O2 fp16"),
    ("steep", "compiled cnn", "O2 fp16"), ("steep", "compiled lstm", "O1 fp16"),
    ("masked", "cnn", "O1 fp16"), ("masked", "lstm", "O2 bf16"), ("masked", "transformer", "O3 fp16"),
    ("masked", "checkpoint", "O2 fp16"), ("masked", "reentrant", "O1 bf16"),
    ("masked", "compiled transformer", "O2 fp16"),
    ("masked -1e9", "cnn", "O2 fp16"), ("masked -1e9", "lstm", "O1 fp16"), ("masked -1e9", "encoder", "O3 fp16"),
    ("masked -1e9", "reentrant", "O2 fp16"), ("masked -1e9", "compiled cnn", "O1 fp16"),
    ("empty", "cnn", "O2 fp16"), ("empty", "lstm", "O1 bf16"), ("empty", "transformer", "O2 bf16"),
    ("empty", "checkpoint", "O1 fp16"), ("empty", "reentrant", "O3 bf16"), ("empty", "compiled lstm", "O2 fp16"),
    ("empty, guarded", "cnn", "O1 fp16"), ("empty, guarded", "lstm", "O2 fp16"),
    ("empty, guarded", "checkpoint", "O2 bf16"),
    ("empty -1e9", "cnn", "O1 fp16"), ("empty -1e9", "lstm", "O2 fp16"), ("empty -1e9", "transformer", "O2 fp16"),
    ("empty -1e9", "checkpoint", "O2 fp16"), ("empty -1e9", "compiled transformer", "O2 fp16"),
    ("eps", "checkpoint", "O2 fp16"), ("where", "lstm", "O1 fp16"), ("gain", "compiled lstm", "O2 fp16"),
    ("custom eps", "transformer", "O2 fp16"), ("custom eps", "cnn", "O3 fp16"),
    ("custom steep", "cnn", "O1 fp16"), ("custom steep", "lstm", "O2 fp16"), ("custom steep", "checkpoint", "O2 fp16"),
    ("custom masked", "cnn", "O2 fp16"), ("custom masked", "transformer", "O1 bf16"),
    ("custom empty", "lstm", "O2 bf16"), ("custom empty", "checkpoint", "O1 fp16"),
    ("custom empty -1e9", "transformer", "O2 fp16"),
)  # fmt: skip


def planted(plant: str, host: str, plan: str) -> Fault:
    make, expect, edit, advice, mends = PLANTS[plant]
    build, column = HOSTS[host]
    where = PLANT_AT[type(build(nn.Identity()))]
    level, low, *scale = plan.split()
    compiled = host.startswith("compiled")
    options = {"emulate": False} if compiled else {}
    return Fault(
        f"{plant} in {host}, {plan}",
        "custom" if plant.startswith("custom") else column,
        lambda: build(make()),
        level,
        low,
        None if expect is None else (where, *expect),
        edit,
        advice,
        None if mends is None else lambda model: mends(model.get_submodule(where)),
        inputs=images if build is Cnn else words,
        options={**options, "loss_scale": float(scale[0])} if scale else options,
        compiled="eager" if compiled else "",
    )


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Transformer(nn.Identity(), Attention(**options))


def torch_attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: TorchAttention(nn.Identity(), **options)


def parametrized() -> nn.Module:
    """Returns torch's attention with rows of unit length, of which one is zero."""
    model = TorchAttention(nn.Identity())
    parametrize.register_parametrization(model.attn, "in_proj_weight", plants.UnitRows(), unsafe=True)
    return model


def of(model: Callable[[nn.Module], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: model(nn.Identity(), **options)


STATIC, REAL = {"loss_scale": 2.0**30}, {"emulate": False}
CLEAN, RESTORE, ZERO = "torch.nan_to_num", "load the last checkpoint", "optimizer.zero_grad()"
DATA, STALE = "input data", "stale gradients"
BIG = 1e5

# masks of attention as one writes it, and of torch's
ATTN = "blocks.1.attn"
MASKS = (
    Fault("a row masked by -inf", "transformer", attention(empty=True), "O2", "fp16",
          (ATTN, "softmax", FORWARD, "masked row"), False, ENTRY, set_at(f"{ATTN}.empty", False)),
    Fault("a row masked by -inf, bf16", "transformer", attention(empty=True, style="where"), "O1", "bf16",
          (ATTN, "softmax", FORWARD, "masked row"), False, ENTRY, set_at(f"{ATTN}.empty", False)),
    Fault("a row masked by -1e9 that is added", "transformer", attention(mask=-1e9, empty=True, style="add"), "O2",
          "fp16", (ATTN, "softmax", FORWARD, "masked row")),
    Fault("a row masked by -1e9 that is chosen", "transformer", attention(mask=-1e9, empty=True, style="where"), "O3",
          "fp16", (ATTN, "softmax", FORWARD, "masked row")),
    Fault("zero times -inf", "transformer", attention(style="add"), "O2", "fp16",
          (ATTN, "mul", FORWARD, "invalid"), False, "mask with masked_fill", set_at(f"{ATTN}.style", "fill")),
    Fault("all keys of a sample hidden", "attention", torch_attention(hidden=6), "O1", "fp16",
          ("attn", "softmax", FORWARD, "masked row"), False, ENTRY, set_at("hidden", 1)),
    Fault("all keys of a sample hidden, bf16", "attention", torch_attention(hidden=6), "O2", "bf16",
          ("attn", "softmax", FORWARD, "masked row"), False, ENTRY, set_at("hidden", 1)),
    Fault("-1e9 added to all keys of a sample", "attention", torch_attention(hidden=6, added=-1e9), "O2", "fp16",
          ("attn", "softmax", FORWARD, "masked row")),
    Fault("-1e9 added to some keys", "attention", torch_attention(hidden=3, added=-1e9), "O2", "fp16", None, False),
    Fault("some keys of a sample hidden", "attention", torch_attention(hidden=3), "O1", "fp16", None, False),
    Fault("all keys hidden from a fused softmax", "attention", torch_attention(hidden=6, weights=False), "O2", "bf16",
          None, False),
    Fault("later words hidden", "transformer", attention(), "O3", "fp16", None, False),
)  # fmt: skip

# products, and what they are given
PRODUCTS = (
    Fault("scores of attention", "transformer", attention(gain=1e6), "O1", "fp16",
          (ATTN, "mul", FORWARD, "overflow")),
    Fault("scores of torch's attention", "attention", torch_attention(), "O2", "fp16",
          ("attn", "baddbmm", FORWARD, "overflow"), breaks=grow("attn.in_proj_weight", 1e3, rows=2 * WIDTH)),
    Fault("scores of torch's encoder", "attention", of(Encoder), "O1", "fp16",
          ("layer.self_attn", "linear", FORWARD, "overflow"),
          breaks=grow("layer.self_attn.in_proj_weight", 1e6, rows=2 * WIDTH)),
    Fault("a zero row of unit length in torch's attention", "attention", parametrized, "O2", "fp16",
          ("attn.parametrizations.in_proj_weight.0", "div", FORWARD, "invalid"), False, EPS,
          set_at("attn.parametrizations.in_proj_weight.0.eps", 1e-6),
          breaks=grow("attn.parametrizations.in_proj_weight.original", 0.0, rows=1),
          options={"rules": [Rule("attn.parametrizations.in_proj_weight.0", LOW)]}),
    Fault("a head", "cnn", of(Cnn), "O1", "fp16", ("head", "linear", FORWARD, "overflow"), inputs=images,
          breaks=both(grow("conv2.weight", 100), grow("head.weight", 1e4))),
    Fault("a convolution", "cnn", of(Cnn), "O2", "fp16", ("conv2", "conv2d", FORWARD, "overflow"), inputs=images,
          breaks=grow("conv2.weight", 1e5)),
    Fault("an input beyond the format", "cnn", of(Cnn), "O2", "fp16", ("conv1", "conv2d", FORWARD, "overflow"),
          inputs=images, spoils=lambda x: x * BIG),
    Fault("an input beyond the format of a product", "cnn", of(Cnn), "O1", "fp16",
          ("conv1", "conv2d", FORWARD, "overflow"), inputs=images, spoils=lambda x: x * BIG),
    Fault("a weight beyond the stored format", "cnn", of(Cnn), "O2", "fp16", ("conv2", "conv2d", FORWARD, "overflow"),
          inputs=images, breaks=write("conv2.weight", BIG)),
    Fault("a stream beyond the format", "mlp", lambda: Stacked(plants.Stream(), nn.Identity()), "O2", "fp16",
          ("blocks.0", "add", FORWARD, "overflow"), inputs=rows),
    Fault("two places", "mlp", lambda: Stacked(plants.Gain(), plants.InPlace()), "O2", "fp16",
          ("blocks.0", "mul", FORWARD, "overflow"), inputs=rows),
)  # fmt: skip

# the loss scale
SCALES = (
    Fault("a static scale, cnn", "cnn", of(Cnn), "O1", "fp16", ("", "to", BACKWARD, SCALE), inputs=images,
          options=STATIC),
    Fault("a static scale, lstm", "lstm", of(Lstm), "O2", "fp16", ("", "to", BACKWARD, SCALE), options=STATIC),
    Fault("a static scale, transformer", "transformer", of(Transformer), "O3", "fp16", ("", "to", BACKWARD, SCALE),
          options=STATIC),
    Fault("large gradients inside an LSTM", "lstm", of(Lstm), "O2", "fp16", ("lstm", "lstm", BACKWARD, SCALE),
          breaks=both(grow("lstm.weight_ih_l0", 1e3), grow("embed.weight", 1e-3)), options={"loss_scale": 2.0**17}),
    Fault("large gradients inside torch's attention", "attention", of(TorchAttention), "O2", "fp16",
          ("attn", "linear", BACKWARD, SCALE),
          breaks=both(grow("attn.out_proj.weight", 1e4), grow("attn.in_proj_weight", 1e-4))),
)  # fmt: skip

# input data
BLOCKS = {"features": True}
INPUTS = (
    Fault("NaN in the input", "cnn", of(Cnn), "O1", "bf16", ("conv1", "conv2d", FORWARD, DATA), False, CLEAN,
          inputs=images, spoils=first(math.nan)),
    Fault("inf in the input", "cnn", of(Cnn), "O2", "fp16", ("conv1", "conv2d", FORWARD, DATA), False, CLEAN,
          inputs=images, spoils=first(math.inf)),
    Fault("NaN in the input of an LSTM", "lstm", of(Lstm, **BLOCKS), "O2", "bf16", ("lstm", "lstm", FORWARD, DATA),
          False, CLEAN, inputs=sequences, spoils=first(math.nan)),
    Fault("inf in the input of a transformer", "transformer", of(Transformer, **BLOCKS), "O1", "fp16",
          ("blocks.0.norm", "layer_norm", FORWARD, DATA), False, CLEAN, inputs=sequences, spoils=first(math.inf)),
    Fault("-inf in the input of torch's attention", "attention", of(TorchAttention, **BLOCKS), "O3", "fp16",
          ("attn", "linear", FORWARD, DATA), False, CLEAN, inputs=sequences, spoils=first(-math.inf)),
    Fault("NaN in the input of a custom function", "custom", lambda: Led(plants.CustomScaled(), Cnn(nn.Identity())),
          "O2", "fp16", ("plant", "mul", FORWARD, DATA), False, CLEAN, inputs=images, spoils=first(math.nan)),
    Fault("NaN in the input of a checkpoint", "checkpoint", of(Transformer, reentrant=False, **BLOCKS), "O2", "fp16",
          ("blocks.0.norm", "layer_norm", FORWARD, DATA), False, CLEAN, inputs=sequences, spoils=first(math.nan)),
    Fault("NaN in the input of a compiled cnn", "compiled", of(Cnn), "O1", "fp16",
          ("conv1", "conv2d", FORWARD, DATA), False, CLEAN, inputs=images, spoils=first(math.nan), compiled="eager",
          options=REAL),
)  # fmt: skip

# weights
WEIGHTS = (
    Fault("NaN in a weight of a convolution", "cnn", of(Cnn), "O2", "bf16",
          ("conv2", "conv2d", FORWARD, "weights"), False, RESTORE, inputs=images,
          breaks=write("conv2.weight", math.nan)),
    Fault("NaN in running statistics", "cnn", lambda: Cnn(nn.Identity()).eval(), "O1", "fp16",
          ("norm", "batch_norm", FORWARD, "weights"), False, RESTORE, inputs=images,
          breaks=write("norm.running_var", math.nan)),
    Fault("NaN in a weight of an LSTM", "lstm", of(Lstm), "O1", "bf16",
          ("lstm", "lstm", FORWARD, "weights"), False, RESTORE, breaks=write("lstm.weight_hh_l0", math.nan)),
    Fault("inf in a weight of a transformer", "transformer", of(Transformer), "O2", "fp16",
          ("blocks.1.mlp.0", "linear", FORWARD, "weights"), False, RESTORE,
          breaks=write("blocks.1.mlp.0.weight", math.inf)),
    Fault("inf in a weight of torch's attention", "attention", of(TorchAttention), "O1", "fp16",
          ("attn.out_proj", "linear", FORWARD, "weights"), False, RESTORE,
          breaks=write("attn.out_proj.weight", math.inf)),
    Fault("NaN in a weight of torch's attention", "attention", of(TorchAttention), "O3", "bf16",
          ("attn", "linear", FORWARD, "weights"), False, RESTORE, breaks=write("attn.in_proj_weight", math.nan)),
    Fault("NaN in a norm of an encoder", "transformer", of(Encoder), "O3", "bf16",
          ("layer.norm1", "layer_norm", FORWARD, "weights"), False, RESTORE,
          breaks=write("layer.norm1.weight", math.nan)),
    Fault("NaN in the weight of a custom function", "custom", lambda: Cnn(plants.CustomScaled()), "O1", "fp16",
          ("plant", "mul", FORWARD, "weights"), False, RESTORE, inputs=images, breaks=write("plant.weight", math.nan)),
    Fault("NaN in a weight of a checkpoint", "checkpoint", of(Transformer, reentrant=True), "O2", "bf16",
          (f"{ATTN}.out", "linear", FORWARD, "weights"), False, RESTORE, breaks=write(f"{ATTN}.out.bias", math.nan)),
    Fault("NaN in a weight of a compiled cnn", "compiled", of(Cnn), "O2", "fp16",
          ("conv2", "conv2d", FORWARD, "weights"), False, RESTORE, inputs=images,
          breaks=write("conv2.weight", math.nan), compiled="eager", options=REAL),
)  # fmt: skip


def stale(host: str, model: Callable[[], nn.Module], plan: str, low: str, module: str, **options: Any) -> Fault:
    name = f"no zero_grad, {host}, {plan} {low}"
    expect = (module, "zero_grad", BACKWARD, STALE)
    return Fault(name, host, model, plan, low, expect, False, ZERO, stale=True, **options)


LEFT = (
    stale("cnn", of(Cnn), "O1", "bf16", "conv1", inputs=images),
    stale("lstm", of(Lstm), "O2", "fp16", "embed"),
    stale("transformer", of(Transformer), "O3", "bf16", "embed"),
    stale("attention", of(TorchAttention, **BLOCKS), "O2", "bf16", "attn", inputs=sequences),
    stale("custom", lambda: Led(plants.CustomScaled(), Cnn(nn.Identity())), "O1", "fp16", "plant", inputs=images),
    stale("checkpoint", of(Transformer, reentrant=False), "O2", "fp16", "embed"),
    stale("checkpoint", of(Transformer, reentrant=True), "O1", "fp16", "embed"),
    stale("compiled", of(Lstm), "O1", "bf16", "embed", compiled="eager"),
)

FAULTS = (*(planted(*row) for row in PLANTED), *MASKS, *PRODUCTS, *SCALES, *INPUTS, *WEIGHTS, *LEFT)
