"""Calls of a step made again on random numbers, in other formats or shapes, to measure what an edit would save."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from halfstep.inspection.meter import Call, Shape
from halfstep.timing import spread, take_turns
from halfstep.torch_internals import tree_leaves, tree_map

SECONDS = 0.15  # of one comparison

Change = Callable[[Shape], Shape]


def gain(call: Call, change: Change) -> float:
    """Returns what share of its time a call saves if its tensors change; below 0 where it then takes longer.

    The two take turns. 0 where the call cannot be made with them, or where a quarter of the turns goes either way.
    """
    device = next(each.device for each in tree_leaves(call.args) if isinstance(each, Shape))
    try:
        made = {name: _again(call, how) for name, how in (("now", _same), ("then", change))}
        for each in made.values():
            each()
    except (RuntimeError, IndexError):
        return 0.0
    times = take_turns(made, device=device, seconds=SECONDS)
    ratios = spread([now / then for now, then in zip(times["now"], times["then"], strict=False)])
    if ratios is None or ratios.low <= 1 <= ratios.high:
        return 0.0
    return 1 - 1 / ratios.median


def taken(call: Call) -> float:
    """Returns the median seconds of a call made again and again."""
    device = next(each.device for each in tree_leaves(call.args) if isinstance(each, Shape))
    return median(take_turns({"now": _again(call, _same)}, device=device, seconds=SECONDS)["now"])


def narrowed(dtype: torch.dtype) -> Change:
    """Returns the change of fp32 tensors to a low format."""

    def change(given: Shape) -> Shape:
        return Shape(given.shape, given.stride, dtype if given.dtype is torch.float32 else given.dtype, given.device)

    return change


def padded(multiple: int) -> Change:
    """Returns the change of each size to the next multiple; sizes below it stay."""

    def change(given: Shape) -> Shape:
        shape = tuple(size if size < multiple else math.ceil(size / multiple) * multiple for size in given.shape)
        order = sorted(range(len(shape)), key=lambda i: given.stride[i])
        stride, step = [0] * len(shape), 1
        for i in order:
            stride[i], step = step if given.stride[i] else 0, step * (shape[i] if given.stride[i] else 1)
        return Shape(shape, tuple(stride), given.dtype, given.device)

    return change


def _same(given: Shape) -> Shape:
    return given


def _again(call: Call, change: Change) -> Callable[[], object]:
    generator: dict[str, Any] = {}

    def tensor(each: Any) -> Any:
        return _tensor(change(each), generator) if isinstance(each, Shape) else each

    args, kwargs = tree_map(tensor, call.args), tree_map(tensor, call.kwargs)

    def run() -> object:
        with torch.no_grad():
            return call.func(*args, **kwargs)

    return run


def _tensor(given: Shape, generators: dict[str, Any]) -> Tensor:
    made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
    if not made.is_floating_point():
        return made.zero_()
    key = str(given.device)
    generator = generators.setdefault(key, torch.Generator(device=given.device).manual_seed(0))
    return made.normal_(generator=generator)
