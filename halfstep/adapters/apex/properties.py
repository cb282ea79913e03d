"""Turns the arguments of `apex.amp.initialize` into a Plan: apex's table of O0 to O3, and its overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from halfstep.edits import FULL, LARGEST_SCALE, LOW, SMALLEST_SCALE, OpChange, Policy, Rule, Scaling
from halfstep.formats import as_format
from halfstep.plan.levels import level, loss_scale_of
from halfstep.plan.plan import Plan, PlanOutput
from halfstep.torch_internals import BatchNorm
from halfstep.validate import real

FIRST_SCALE = 2.0**16
LOW_TYPES = (torch.float16, torch.bfloat16)

_LOW = object()  # stands for the low format in the table
_OPTIONS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_LEVELS: MappingProxyType[str, tuple[object, ...]] = MappingProxyType(
    {
        "O0": (torch.float32, False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": (_LOW, False, True, True, "dynamic"),
        "O3": (_LOW, False, False, False, 1.0),
    }
)
BRIEFS = MappingProxyType(
    {
        "O0": "O0:  Pure FP32 training.\n",
        "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
        "O3": "O3:  Pure FP16 training.",
    }
)
"""What apex printed for each level; people search logs for it."""

DENIED = (
    "gelu", "grid_sample", "std", "var", "torch.nn.functional:local_response_norm",
    "torch.nn.functional:multilabel_soft_margin_loss",
)  # fmt: skip
"""Functions that apex computed in fp32, but the op table and torch.autocast do not."""


class Properties:
    """The options of one call of `initialize`, which scripts read as attributes; `options` is a dict of them all."""

    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        vars(self)["options"] = options

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name not in options:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return options[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only; set it with an argument of amp.initialize")

    def override(self, name: str, value: Any, refuse: Callable[[str], None]) -> None:
        """Sets an option to a caller's value; calls `refuse` with a message if the value contradicts the level."""
        checked = _CHECKS[name](name, value)
        why = _contradiction(self.opt_level, name, checked)
        if why is not None:
            refuse(why)
        self.options[name] = checked

    def lines(self) -> list[str]:
        """Returns the options as text in apex's layout, one line per option."""
        return [f"{name:22} : {value}" for name, value in self.options.items()]


def defaults(opt_level: str, low: torch.dtype) -> Properties:
    """Returns the options of a level, with `low` for the low format."""
    if opt_level not in _LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'. "
            "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    values = (low if value is _LOW else value for value in _LEVELS[opt_level])
    return Properties(enabled=True, opt_level=opt_level, **dict(zip(_OPTIONS, values, strict=True)))


def disabled() -> Properties:
    """Returns the options that `enabled=False` sets."""
    values = (None, False, None, None, 1.0)
    return Properties(enabled=False, opt_level=None, **dict(zip(_OPTIONS, values, strict=True)))


def _model_type(name: str, value: Any) -> Any:
    if value is not False and value not in (torch.float32, *LOW_TYPES):
        raise ValueError(f"{name} is {value!r}; pass torch.float16, torch.bfloat16, torch.float32 or False (no cast)")
    return value


def switch(name: str, value: Any) -> bool:
    """Returns the value of an option that is on or off."""
    if value not in (True, False, "True", "False"):
        raise ValueError(f"{name} is {value!r}; pass True or False")
    return value in (True, "True")


def _loss_scale(name: str, value: Any) -> str | float:
    if value == "dynamic":
        return "dynamic"
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; pass a number, such as 128.0 or '128.0', or 'dynamic'") from None


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": _model_type,
    "patch_torch_functions": switch,
    "keep_batchnorm_fp32": switch,
    "master_weights": switch,
    "loss_scale": _loss_scale,
}


def _contradiction(opt_level: str, name: str, value: Any) -> str | None:
    """Returns a message that says why a level does not allow this value of an option; None if the level allows it."""
    if name == "patch_torch_functions" and value and opt_level != "O1":
        return "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
    if opt_level != "O1":
        return None
    if name == "cast_model_type" and value in LOW_TYPES:
        return (
            "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
            "themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' or "
            f"'O3'. cast_model_type was {value}"
        )
    if name == "keep_batchnorm_fp32":
        return (
            "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so keep_batchnorm_fp32 "
            f"should be None. keep_batchnorm_fp32 was {value}"
        )
    if name == "master_weights":
        return (
            "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
            "FP32."
        )
    return None


def make_plan(
    properties: Properties,
    models: Sequence[nn.Module],
    *,
    low: torch.dtype,
    cast_model_outputs: torch.dtype | None,
    scaling: Scaling,
    changes: Iterable[OpChange],
) -> Plan:
    """Returns the Plan for the options in `properties`."""
    if properties.cast_model_type in LOW_TYPES:
        return _stored_low(properties, models, scaling, cast_model_outputs)
    if properties.patch_torch_functions:
        plan = replace(level("O1", low), scale=scaling, output=_output(cast_model_outputs, low))
        return plan.edit(*(OpChange("deny", op) for op in DENIED), *changes)
    if not scaling.adapts and scaling.first == 1.0 and cast_model_outputs is None:
        return level("O0", low)
    plan = replace(level("O1", low), name="O0", scale=scaling, output=_output(cast_model_outputs, low))
    return plan.edit(Rule("", FULL))


def _stored_low(
    properties: Properties, models: Sequence[nn.Module], scaling: Scaling, outputs: torch.dtype | None
) -> Plan:
    low = properties.cast_model_type
    master = level("O2", low).master if properties.master_weights else "none"
    plan = level("O2" if properties.master_weights else "O3", low)
    plan = replace(plan, norms="low", master=master, scale=scaling, input="low", output=_output(outputs, low))
    if not any(isinstance(module, BatchNorm) for model in models for module in model.modules()):
        return plan
    if properties.keep_batchnorm_fp32:
        return plan.edit(Rule("type:_BatchNorm", Policy("full", "low", "input")))
    return plan.edit(Rule("type:_BatchNorm", LOW, buffers="low"))


def _output(dtype: torch.dtype | None, low: torch.dtype) -> PlanOutput:
    if dtype is None or dtype is torch.float32:
        return "full"
    if dtype is low:
        return "low"
    raise ValueError(f"cast_model_outputs is {dtype}; pass torch.float32 or the low format, {as_format(low).dtype}")


def make_scaling(loss_scale: str | float, least: float | None, most: float) -> Scaling:
    """Returns the Scaling for the argument `loss_scale` of `initialize`, "dynamic" or a number."""
    if loss_scale != "dynamic":
        return Scaling("static", init=loss_scale_of(loss_scale))
    least = SMALLEST_SCALE if least is None else real("min_loss_scale", least, low=SMALLEST_SCALE, high=LARGEST_SCALE)
    most = real("max_loss_scale", most, low=SMALLEST_SCALE, high=LARGEST_SCALE)
    return Scaling("dynamic", init=max(min(FIRST_SCALE, most), least), min=least, max=most)
