"""Reads from an operation's schema what it does with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from halfstep.torch_internals import schema_of

T = TypeVar("T")
_OVERWRITING = tuple(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_RUNNING = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats", "update")  # whichever an operation has; without a flag it trains
_UNINITIALISED = tuple(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
)


def aten_name(func: Any, args: Sequence[Any]) -> str:
    """Returns the dispatcher's name of an operation; for a convolution, a name with its dimensions, such as conv2d."""
    name: str = schema_of(func).name.rpartition("::")[2]
    if name == "convolution":
        return f"conv{'_transpose' if args[6] else ''}{args[1].dim() - 2}d"
    return name


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors among the arguments or results of an operation, which nests them in no other containers."""
    return leaves_of(tree, Tensor)


def leaves_of(tree: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Returns the leaves of a type likewise; torch's trees take several times as long."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found: list[T] = []
    for each in tree:
        if isinstance(each, kind):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            found += leaves_of(each, kind)
    return found


def is_view(func: Any) -> bool:
    """Tells whether an operation only returns a view."""
    return bool(func.is_view) and not schema_of(func).is_mutable


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments that an operation writes to."""
    if not schema_of(func).is_mutable:
        return []
    named = _named(func, args, kwargs)
    into = [each.name for each in schema_of(func).arguments if each.alias_info is not None and each.alias_info.is_write]
    return tensors_of([named.get(name) for name in into])


def overwritten(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments whose elements an operation replaces without reading them."""
    if schema_of(func).name in _OVERWRITING:
        into: Any = args[:1]
    else:
        named = _named(func, args, kwargs)
        into = [named.get(each.name) for each in schema_of(func).arguments if each.is_out]
    given = [id(tensor) for tensor in tensors_of((args, kwargs))]
    return [tensor for tensor in tensors_of(into) if given.count(id(tensor)) == 1]


def is_unread(func: Any, given: tuple[Sequence[Any], Mapping[str, Any]], tensor: Tensor) -> bool:
    """Tells whether the values of a tensor argument have no effect on an operation's output."""
    args, kwargs = given
    if any(tensor is each for each in overwritten(func, args, kwargs)):
        return True
    named = _named(func, args, kwargs)
    training = all(named.get(flag, True) for flag in _TRAINING)
    return training and any(named.get(name) is tensor for name in _RUNNING)


def is_collective(func: Any) -> bool:
    """Tells whether an operation receives values from other processes; it may still be running after the call."""
    return func.namespace in _COLLECTIVES


def is_uninitialised(func: Any) -> bool:
    """Tells whether an operation returns uninitialized memory."""
    return schema_of(func).name in _UNINITIALISED


def by_recipe(func: Any, args: Sequence[Any], outputs: Sequence[Tensor], bad: Callable[[Tensor], object]) -> str:
    """Returns which products of a layer with a recipe are `bad`, and which operands; "" of any other operation."""
    recipe = _named(func, args, {}).get("recipe") if func.namespace == "halfstep" else None
    if recipe is None:
        return ""
    products = [each.name for each, out in zip(schema_of(func).returns, outputs, strict=False) if bad(out)]
    operands = [name for name, t in _named(func, args, {}).items() if isinstance(t, Tensor) and bad(t)]
    whose = f"whose {' and '.join(operands)} {'is' if len(operands) == 1 else 'are'} not finite"
    return f"{' and '.join(products)} by {recipe}, {whose if operands else 'whose operands are finite'}"


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((each.name for each in schema_of(func).arguments), args, strict=False)) | dict(kwargs)
