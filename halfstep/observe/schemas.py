"""What the schema of an operation says about what it does with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_OVERWRITING = tuple(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_UNINITIALISED = tuple(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
)


def aten_name(func: Any, args: Sequence[Any]) -> str:
    """Returns the name of an operation in the dispatcher; of a convolution one that says of how many dimensions."""
    name: str = func._schema.name.rpartition("::")[2]
    if name == "convolution":
        return f"conv{'_transpose' if args[6] else ''}{args[1].dim() - 2}d"
    return name


def scalars(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """Yields the floating-point numbers among the arguments."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, float):
            yield leaf


def is_view(func: Any) -> bool:
    """Tells whether an operation only looks at memory another way."""
    return bool(func.is_view) and not func._schema.is_mutable


def is_overwritten(func: Any, given: tuple[Sequence[Any], Mapping[str, Any]], tensor: Tensor) -> bool:
    """Tells whether an operation writes over a tensor without reading it, as over what `out=` gives it."""
    args, kwargs = given
    if func._schema.name in _OVERWRITING:
        return bool(args) and args[0] is tensor
    return any(each.is_out and kwargs.get(each.name) is tensor for each in func._schema.arguments)


def is_collective(func: Any) -> bool:
    """Tells whether an operation brings values from other processes; it may run on after the call, and never alone."""
    return func.namespace in _COLLECTIVES


def is_uninitialised(func: Any) -> bool:
    """Tells whether an operation gives memory that nobody wrote to."""
    return func._schema.name in _UNINITIALISED
