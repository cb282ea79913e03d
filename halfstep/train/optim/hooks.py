"""What stands in place of an optimizer's methods, and its step hooks, run for updates that do not call its `step`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from types import MethodType
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import SessionError
from halfstep.torch_internals import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    SCHEDULED,
    step_post_hooks_of,
    step_pre_hooks_of,
)

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


class _Watch:
    """A step hook that passes the optimizer to a method, without keeping the method's object alive."""

    def __init__(self, look: WeakMethod[Callable[[Optimizer], None]]) -> None:
        self.look = look

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        look = self.look()
        if look is not None:
            look(optimizer)


def watch_steps(look: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Calls `look`, a method held weakly, with each optimizer before it steps; returns a function that undoes this."""
    # Those whose object is gone are taken away here: when it goes, torch may be going over them.
    for key, hook in list(GLOBAL_STEP_PRE_HOOKS.items()):
        if type(hook) is _Watch and hook.look() is None:
            GLOBAL_STEP_PRE_HOOKS.pop(key, None)
    undo: Callable[[], None] = register_optimizer_step_pre_hook(_Watch(WeakMethod(look))).remove
    return undo


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns whether a step of `optimizer` runs any hook, its own or a global one, except those of `watch_steps`."""
    own = step_pre_hooks_of(optimizer) or step_post_hooks_of(optimizer)
    others = [hook for hook in GLOBAL_STEP_PRE_HOOKS.values() if type(hook) is not _Watch]
    return bool(own or others or GLOBAL_STEP_POST_HOOKS)


def run_pre_hooks(optimizer: Optimizer) -> None:
    """Runs the global step pre-hooks and the optimizer's own, in torch's order, as for `step()` without arguments."""
    for hook in chain(GLOBAL_STEP_PRE_HOOKS.values(), step_pre_hooks_of(optimizer).values()):
        hook(optimizer, (optimizer,), {})


def run_post_hooks(optimizer: Optimizer) -> BaseException | None:
    """Runs the optimizer's own step post hooks and the global ones, in torch's order."""
    # The first hook that raises is the last to run, as in torch. Its exception is returned, not raised, because the
    # step has already been made.
    try:
        for hook in chain(step_post_hooks_of(optimizer).values(), GLOBAL_STEP_POST_HOOKS.values()):
            hook(optimizer, (optimizer,), {})
    except BaseException as error:
        return error
    return None


def run_own_step(optimizer: Optimizer, step: Callable[[], Any]) -> BaseException | None:
    """Runs the optimizer's own `step`; returns the exception that a post hook raised after the step, or None."""
    hooks = step_post_hooks_of(optimizer)
    if not hooks and not GLOBAL_STEP_POST_HOOKS:
        step()
        return None
    done: list[Optimizer] = []
    note = optimizer.register_step_post_hook(lambda of, *_: done.append(of))
    hooks.move_to_end(note.id, last=False)  # an OrderedDict
    try:
        step()
    except BaseException as error:
        if not done:
            raise
        return error
    finally:
        note.remove()
    return None
