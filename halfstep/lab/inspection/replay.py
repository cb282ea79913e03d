"""Repeats operations of a step on random numbers, in other formats or shapes, to measure what an edit would save."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in

from halfstep.lab.inspection.meter import Call, Shape
from halfstep.timing import take_turns
from halfstep.torch_internals import tree_leaves, tree_map
from halfstep.train.cast.tree import cast_floats

SECONDS, TURNS = 0.15, 9  # of one comparison: it ends when both are over
LONG = 1.0  # seconds of a call that is compared twice, and no more

Change = Callable[[Shape], Shape]


def gain(call: Call, change: Change) -> float:
    """Returns how many seconds a call saves if `change` is applied to its tensors."""
    try:
        return _gain(call, lambda: _again(call, change))
    except (RuntimeError, IndexError):
        return 0.0


def gain_of_casts(call: Call, dtype: torch.dtype) -> float:
    """Returns the seconds that a custom operation saves if its inputs are cast to `dtype`; raises as it does."""

    def cast_first(*args: Any, **kwargs: Any) -> object:
        return call.func(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))

    return _gain(call, lambda: _again(replace(call, func=cast_first, autocast=None)))


def _gain(call: Call, make: Callable[[], Callable[[], object]]) -> float:
    device = _device(call)
    made = {"now": _again(call), "then": make()}
    for each in made.values():
        each()
    least = 2 if call.seconds > LONG else TURNS
    times = take_turns(made, device=device, seconds=SECONDS, least=least)
    saved = [now - then for now, then in zip(times["now"], times["then"], strict=False)]
    return quantiles(saved, n=10, method="inclusive")[0]


def taken(call: Call) -> float:
    """Returns the median seconds of a call that is repeated many times."""
    return median(take_turns({"now": _again(call)}, device=_device(call), seconds=SECONDS)["now"])


def _device(call: Call) -> torch.device:
    return next(each.device for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Shape))


def narrowed(wide: torch.dtype, dtype: torch.dtype) -> Change:
    """Returns a change that converts tensors of dtype `wide` to `dtype`."""
    return lambda given: replace(given, dtype=dtype) if given.dtype is wide else given


def padded(multiple: int) -> Change:
    """Returns a change that rounds each size up to a multiple of `multiple`; sizes below `multiple` are unchanged."""

    def change(given: Shape) -> Shape:
        shape = tuple(size if size < multiple else math.ceil(size / multiple) * multiple for size in given.shape)
        order = sorted(range(len(shape)), key=lambda i: given.stride[i])
        stride, step = [0] * len(shape), 1
        for i in order:
            stride[i], step = step if given.stride[i] else 0, step * (shape[i] if given.stride[i] else 1)
        return replace(given, shape=shape, stride=tuple(stride))

    return change


def _again(call: Call, change: Change = lambda given: given) -> Callable[[], object]:
    generators: dict[torch.device, torch.Generator] = {}

    def tensor(each: Any) -> Any:
        if not isinstance(each, Shape):
            return each
        given = change(each)
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        if not made.is_floating_point():
            return made.zero_()
        generator = generators.setdefault(given.device, torch.Generator(device=given.device).manual_seed(0))
        return made.normal_(generator=generator)

    args, kwargs = tree_map(tensor, call.args), tree_map(tensor, call.kwargs)
    low = call.autocast
    autocast = nullcontext() if low is None else TorchAutocast(_device(call).type, dtype=low)

    def run() -> object:
        with torch.no_grad(), autocast:
            return call.func(*args, **kwargs)

    return run
