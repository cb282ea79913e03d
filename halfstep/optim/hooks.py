"""Runs an optimizer's step hooks for an update that does not call its `step`; watches the steps of all optimizers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.torch_internals import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    step_post_hooks_of,
    step_pre_hooks_of,
)


class _Watch:
    """A step hook that passes the optimizer to a method, without keeping the method's object alive."""

    def __init__(self, look: WeakMethod[Callable[[Optimizer], None]]) -> None:
        self._look = look

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        look = self._look()
        if look is not None:
            look(optimizer)


def watch_steps(look: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Calls the method `look` with each optimizer of this process before it steps; returns a function that undoes this.

    If `look` raises, the step is not made. The object that the method belongs to is held by a weak reference: once it
    is deleted, the calls end.
    """
    method = WeakMethod(look, lambda _: undo())
    undo: Callable[[], None] = register_optimizer_step_pre_hook(_Watch(method)).remove
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
