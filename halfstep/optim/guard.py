"""Replaces `optimizer.step` with a function that raises, or with one that calls `session.step`; LR schedulers work.

Also lends fp32 weights to methods of an optimizer that write weights outside of its step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.torch_internals import SCHEDULED

_ORIGINAL = "_halfstep_original_step"  # functools.wraps carries it on, so the original is found below wrappers


def forbid_step(optimizer: Optimizer, message: str, prepare: Callable[[], None] | None = None) -> Callable[[], None]:
    """Makes `optimizer.step()` raise a SessionError with `message`; returns a function that undoes this."""

    def refuse(closure: Any = None) -> None:
        raise SessionError(message)

    return send_step(optimizer, refuse, prepare)


def send_step(
    optimizer: Optimizer, instead: Callable[..., Any], prepare: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Makes `optimizer.step()` call `instead` with its arguments; returns a function that undoes this."""
    # `prepare` makes the optimizer's initial state. It is called in place of `instead` if a step would only make
    # state: if there is no state yet, and all gradients and learning rates are zero.
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


def lend_weights(optimizer: Optimizer, lend: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Makes `train()` and `eval()` of an optimizer run inside `lend()`; returns a function that undoes this."""

    def lending(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with lend():
                return method(*args, **kwargs)

        return call

    methods = {name: getattr(optimizer, name, None) for name in ("train", "eval")}
    with ExitStack() as stack:
        for name, method in methods.items():
            if callable(method):
                stack.callback(put_over(optimizer, name, lending(method)))
        return stack.pop_all().close


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
    """Returns whether a step would only make state: no state yet, and all gradients and learning rates are zero."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not optimizer.state and not any(map(float, rates)) and not any(bool(grad.any()) for grad in grads)


def original_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Returns the `step` that `send_step` or `forbid_step` has replaced, or the present one if neither was called."""
    step: Callable[..., Any] = getattr(optimizer.step, _ORIGINAL, optimizer.step)
    return step
