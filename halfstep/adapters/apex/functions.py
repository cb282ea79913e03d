"""Chooses the format in which functions of a script run, by registering or decorating them; turns casts off and on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeVar

import torch

from halfstep.adapters.apex.state import STATE
from halfstep.edits import OpChange, OpList
from halfstep.errors import PlanError
from halfstep.plan.optable import find
from halfstep.train.cast.functions import call_as

__all__ = [
    "disable_casts", "float_function", "half_function", "promote_function", "register_float_function",
    "register_half_function", "register_promote_function",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def disable_casts() -> Iterator[None]:
    """Turns casts off inside the block, also in models at O1; can be nested, and restores casts after an error too."""
    with ExitStack() as stack:
        for casting in STATE.castings():
            stack.enter_context(casting.as_written())
        yield


def _register(category: OpList, module: Any, name: str) -> None:
    """Makes the function `name` of a module or class run as those of a list, from the next `initialize` on."""
    if not isinstance(name, str) or not callable(getattr(module, name, None)):
        raise ValueError(f"No function named {name} in module {module}; pass a function's name and its module or class")
    STATE._registered.append(OpChange(category, _spelled(module, name)))
    if STATE.castings():
        warnings.warn(
            f"{name} was registered after amp.initialize, so it is cast only after the next amp.initialize; "
            "register functions before amp.initialize",
            stacklevel=2,
        )


def _spelled(module: Any, name: str) -> str:
    """Returns the name by which a Plan lists a function: the name of a torch op, or "module:function"."""
    if module in (torch, torch.nn.functional, torch.Tensor):
        with suppress(PlanError):
            find(name)
            return name
    if isinstance(module, ModuleType):
        return f"{module.__name__}:{name}"
    if isinstance(module, type) and "<locals>" not in module.__qualname__:
        return f"{module.__module__}:{module.__qualname__}.{name}"
    raise ValueError(
        f"{name!r} cannot be registered, since {getattr(module, '__qualname__', module)!s:.80} cannot be imported by "
        "name; pass a module or a class that can, or decorate the function with amp.half_function, float_function or "
        "promote_function"
    )


def _decorated(category: OpList, function: Function) -> Function:
    """Decorates a function: inside a model at O1 it runs as those of a list."""
    if not callable(function):
        raise TypeError(f"amp's decorators expect a function, got {function!r}; pass a function, or register by name")

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for casting in STATE.castings():
            switch = casting.switch
            if switch is not None and switch.is_on():
                return call_as(category, switch, function, args, kwargs)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# In low precision, in fp32, and in the widest format among the arguments.
register_half_function, half_function = partial(_register, "allow"), partial(_decorated, "allow")
register_float_function, float_function = partial(_register, "deny"), partial(_decorated, "deny")
register_promote_function, promote_function = partial(_register, "promote"), partial(_decorated, "promote")
