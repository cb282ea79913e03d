"""A habitual `optimizer.step()` is stopped while a session owns the step; LR schedulers go on as always."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from halfstep.errors import SessionError

_ORIGINAL = "_halfstep_original_step"  # functools.wraps carries it on, so the original is found below wrappers
_TRACKED = "_wrapped_by_lr_sched"  # the mark by which an LR scheduler knows that it has wrapped `step` already


def forbid_step(optimizer: Optimizer, message: str) -> Callable[[], None]:
    """Makes `optimizer.step()` raise a SessionError with `message`; returns the undo.

    LR schedulers wrap `optimizer.step` when they are made, and look for their wrapper on their first `step()`: one made
    before finds its mark on the guard, one made while the guard stands wraps the guard, which `undo` then turns into a
    pass-through.
    """
    held = vars(optimizer).get("step")
    original = original_step(optimizer)
    released = False

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if released:
            return original(*args, **kwargs)
        raise SessionError(message)

    setattr(step, _ORIGINAL, original)
    if hasattr(optimizer.step, _TRACKED):
        setattr(step, _TRACKED, True)
    guard = MethodType(step, optimizer)
    optimizer.step = guard  # type: ignore[method-assign]

    def undo() -> None:
        nonlocal released
        released = True
        if vars(optimizer).get("step") is not guard:
            return
        if held is None:
            del optimizer.step
        else:
            optimizer.step = held  # type: ignore[method-assign]

    return undo


def original_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Returns the `step` that `optimizer` would run if no guard stood on it."""
    step: Callable[..., Any] = getattr(optimizer.step, _ORIGINAL, optimizer.step)
    return step
