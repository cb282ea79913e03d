"""Makes `optimizer.step()` raise, or call the session that makes the step in its place; LR schedulers still work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.torch_internals import SCHEDULED

_ORIGINAL = "_halfstep_original_step"  # functools.wraps carries it on, so the original is found below wrappers


def forbid_step(optimizer: Optimizer, message: str, prepare: Callable[[], None] | None = None) -> Callable[[], None]:
    """Makes `optimizer.step()` raise a SessionError with `message`; returns a function that undoes this.

    For `prepare` see `send_step`.
    """

    def refuse(closure: Any = None) -> None:
        raise SessionError(message)

    return send_step(optimizer, refuse, prepare)


def send_step(
    optimizer: Optimizer, instead: Callable[..., Any], prepare: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Makes `optimizer.step()` call `instead` with its arguments; returns a function that undoes this.

    `prepare` makes the optimizer's first state. It is called in place of a step with zero gradients and learning rates,
    which serves only to make state: `torch.distributed.checkpoint.state_dict` makes such a step before it reads or
    loads a state.

    An LR scheduler wraps `optimizer.step` when it is made, and looks for the mark of its wrapper on its first `step()`.
    If it was made before this call, it finds the mark on the new `step`. If it is made later, it wraps the new `step`,
    which therefore passes all calls on to the old one after this is undone.
    """
    original = original_step(optimizer)
    released = False

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if released:
            return original(*args, **kwargs)
        if prepare is not None and not args and kwargs == {"closure": None} and _changes_nothing(self):
            return prepare()
        return instead(*args, **kwargs)

    setattr(step, _ORIGINAL, original)
    if hasattr(optimizer.step, SCHEDULED):
        setattr(step, SCHEDULED, True)
    put_back = put_over(optimizer, "step", MethodType(step, optimizer))

    def undo() -> None:
        nonlocal released
        released = True
        put_back()

    return undo


def put_over(optimizer: Optimizer, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Sets `method` as attribute `name` of an optimizer; returns a function that undoes this if it is still set."""
    held = vars(optimizer).get(name)
    setattr(optimizer, name, method)

    def undo() -> None:
        if vars(optimizer).get(name) is not method:
            return
        if held is None:
            delattr(optimizer, name)
        else:
            setattr(optimizer, name, held)

    return undo


def _changes_nothing(optimizer: Optimizer) -> bool:
    """Returns whether a step would only make state: there is none, and gradients and learning rates are 0.

    Reads the gradients on the host.
    """
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not optimizer.state and not any(map(float, rates)) and not any(bool(grad.any()) for grad in grads)


def original_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Returns the `step` of `optimizer` that `send_step` replaced, or its current one if that was not called."""
    step: Callable[..., Any] = getattr(optimizer.step, _ORIGINAL, optimizer.step)
    return step
