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
from halfstep.plan.plan import Plan
from halfstep.torch_internals import BatchNorm
from halfstep.validate import real

LOW_TYPES = (torch.float16, torch.bfloat16)

_OPTIONS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_LEVELS: MappingProxyType[str | None, tuple[object, ...]] = MappingProxyType(
    {
        None: (None, False, None, None, 1.0),  # of enabled=False
        "O0": (torch.float32, False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": ("low", False, True, True, "dynamic"),
        "O3": ("low", False, False, False, 1.0),
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

_NOT_AT_O1 = MappingProxyType(
    {
        "cast_model_type": "O1 inserts casts around Torch functions rather than model weights, so with O1, the model "
        "weights themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' "
        "or 'O3'. cast_model_type was {}",
        "keep_batchnorm_fp32": "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so "
        "keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {}",
        "master_weights": "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves "
        "should be FP32.",
    }
)
DENIED = (
    "gelu", "grid_sample", "std", "var", "torch.nn.functional:local_response_norm",
    "torch.nn.functional:multilabel_soft_margin_loss",
)  # fmt: skip
"""Functions that apex computed in fp32, but the op table and torch.autocast do not."""


class Properties:
    """The options of one call of `initialize`, which scripts read as attributes; `options` is a dict of them all."""

    options: dict[str, Any]

    def __init__(self, opt_level: str | None, low: torch.dtype) -> None:
        """Takes the options of a level, with `low` for the low format; None is the level of `enabled=False`."""
        if opt_level not in _LEVELS:
            raise RuntimeError(
                f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'. "
                "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
            )
        values = (low if value == "low" else value for value in _LEVELS[opt_level])
        options = dict(zip(_OPTIONS, values, strict=True))
        vars(self)["options"] = {"enabled": opt_level is not None, "opt_level": opt_level, **options}

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["options"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only; set it with an argument of amp.initialize")

    def override(self, name: str, value: Any, refuse: Callable[[str], None]) -> None:
        """Sets an option to a caller's value; calls `refuse` with a message if the value contradicts the level."""
        value = self.options[name] = _checked(name, value)
        if name == "patch_torch_functions" and value and self.opt_level != "O1":
            refuse("Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'.")
        if self.opt_level == "O1" and name in _NOT_AT_O1 and (name != "cast_model_type" or value in LOW_TYPES):
            refuse(_NOT_AT_O1[name].format(value))

    def lines(self) -> list[str]:
        """Returns the options as text in apex's layout, one line per option."""
        return [f"{name:22} : {value}" for name, value in self.options.items()]


def switch(name: str, value: Any) -> bool:
    """Returns the value of an option that is on or off."""
    if value not in (True, False, "True", "False"):
        raise ValueError(f"{name} is {value!r}; pass True or False")
    return value in (True, "True")


def _checked(name: str, value: Any) -> Any:
    if name == "cast_model_type":
        if value is not False and value not in (torch.float32, *LOW_TYPES):
            allowed = "torch.float16, torch.bfloat16, torch.float32 or False (no cast)"
            raise ValueError(f"{name} is {value!r}; pass {allowed}")
        return value
    if name != "loss_scale":
        return switch(name, value)
    try:
        return value if value == "dynamic" else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; pass a number, such as 128.0 or '128.0', or 'dynamic'") from None


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
    stored = properties.cast_model_type in LOW_TYPES
    low = properties.cast_model_type if stored else low
    if cast_model_outputs not in (None, torch.float32, low):
        raise ValueError(
            f"cast_model_outputs is {cast_model_outputs}; pass torch.float32 or the low format, {as_format(low).dtype}"
        )
    settings: dict[str, Any] = {"scale": scaling, "output": "low" if cast_model_outputs is low else "full"}
    if stored:
        plan = replace(level("O2" if properties.master_weights else "O3", low), norms="low", input="low", **settings)
        if not any(isinstance(module, BatchNorm) for model in models for module in model.modules()):
            return plan
        full = Rule("type:_BatchNorm", Policy("full", "low", "input"))
        return plan.edit(full if properties.keep_batchnorm_fp32 else Rule("type:_BatchNorm", LOW, buffers="low"))
    plan = replace(level("O1", low), **settings)
    if properties.patch_torch_functions:
        return plan.edit(*(OpChange("deny", op) for op in DENIED), *changes)
    if not scaling.adapts and scaling.first == 1.0 and cast_model_outputs is None:
        return level("O0", low)
    return replace(plan, name="O0").edit(Rule("", FULL))


def make_scaling(loss_scale: str | float, least: float | None, most: float) -> Scaling:
    """Returns the Scaling for the argument `loss_scale` of `initialize`, "dynamic" or a number."""
    if loss_scale != "dynamic":
        return Scaling("static", init=loss_scale_of(loss_scale))
    least = SMALLEST_SCALE if least is None else real("min_loss_scale", least, low=SMALLEST_SCALE, high=LARGEST_SCALE)
    most = real("max_loss_scale", most, low=SMALLEST_SCALE, high=LARGEST_SCALE)
    return Scaling("dynamic", init=max(min(2.0**16, most), least), min=least, max=most)
