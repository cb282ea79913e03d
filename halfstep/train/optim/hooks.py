"""What stands in place of an optimizer's methods, its step hooks, and the gradients that it finds in `p.grad`.

Hooks are run for updates that do not call the optimizer's `step`. They and the `step` see gradients unscaled in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import SessionError
from halfstep.formats import is_narrow
from halfstep.sharded import is_sharded, is_wrapped
from halfstep.torch_internals import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    SCHEDULED,
    sparse_indices,
    sparse_values,
    step_post_hooks_of,
    step_pre_hooks_of,
)
from halfstep.train.processes.shards import like, local

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


def updated_by(optimizer: Optimizer) -> list[Parameter]:
    """Returns the parameters that an optimizer updates, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _changes_nothing(optimizer: Optimizer) -> bool:
    """Returns whether a step would only make state: no state yet, and all gradients and learning rates are zero."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    grads = [p.grad for p in updated_by(optimizer) if p.grad is not None]
    return not optimizer.state and not any(map(float, rates)) and not any(bool(grad.any()) for grad in grads)


def original_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Returns the `step` that `send_step` or `forbid_step` has replaced, or the present one if neither was called."""
    step: Callable[..., Any] = getattr(optimizer.step, _ORIGINAL, optimizer.step)
    return step


class _Weak:
    """A global hook that calls a method, without keeping the method's object alive."""

    def __init__(self, method: Callable[..., None]) -> None:
        self.method = WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if (method := self.method()) is not None:
            method(*args)


def hook_weakly(
    hooks: MutableMapping[int, Any], register: Callable[[Any], Any], method: Callable[..., None]
) -> Callable[[], None]:
    """Adds a method, held weakly, to `hooks` of torch, in which `register` puts it; returns what takes it away."""
    # Those whose object is gone are taken away here: when it goes, torch may be going over them.
    for key, hook in list(hooks.items()):
        if type(hook) is _Weak and hook.method() is None:
            hooks.pop(key, None)
    undo: Callable[[], None] = register(_Weak(method)).remove
    return undo


def watch_steps(look: Callable[..., None]) -> Callable[[], None]:
    """Calls `look`, a method held weakly, with each optimizer before it steps; returns a function that undoes this."""
    return hook_weakly(GLOBAL_STEP_PRE_HOOKS, register_optimizer_step_pre_hook, look)


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns whether a step of `optimizer` runs any hook, its own or a global one, except those of `watch_steps`."""
    own = step_pre_hooks_of(optimizer) or step_post_hooks_of(optimizer)
    others = [hook for hook in GLOBAL_STEP_PRE_HOOKS.values() if type(hook) is not _Weak]
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


def check_gradients(
    params: list[Parameter], grads: list[Tensor], name_of: Callable[[Parameter], str] | None = None
) -> None:
    """Refuses gradients that do not fit their parameters."""
    for p, grad in zip(params, grads, strict=True):
        if type(grad) is not Tensor and is_wrapped(grad):
            raise SessionError(_wrapped(grad, p, named(p, name_of)))
        own = local(p)
        if grad.shape != own.shape or grad.device != own.device:
            raise SessionError(
                f"the gradient of {named(p, name_of)} has shape {tuple(grad.shape)} on {grad.device}, but the "
                f"parameter has {tuple(p.shape)} on {p.device}; call zero_grad() after you reshape or move a parameter"
            )


def _wrapped(grad: Tensor, p: Parameter, name: str) -> str:
    """Returns the error message for a gradient of a tensor subclass that is not stored as `p` is, such as a DTensor."""
    if is_sharded(grad) and is_sharded(p):
        return (
            f"the gradient of {name} is placed over the processes as {grad.placements}, but the parameter as "
            f"{p.placements}; set p.grad = p.grad.redistribute(p.device_mesh, p.placements) before session.step()"
        )
    return (
        f"the gradient of {name} is of type {type(grad).__name__}, which has no plain "
        "storage; set p.grad to a plain tensor (.to_local(), .full_tensor())"
    )


def named(p: Parameter, name_of: Callable[[Parameter], str] | None) -> str:
    """Returns how an error message calls `p`: "the parameter 'NAME'", or "a parameter" if `name_of` is None."""
    return "a parameter" if name_of is None else f"the parameter {name_of(p)!r}"


@contextmanager
def true_gradients(params: list[Parameter], grads: list[Tensor], factor: Tensor | None) -> Iterator[None]:
    """Sets `p.grad` of each parameter to its gradient times `factor` within a `with` block, in fp32 if `p` is low."""
    # At the end of the block, `p.grad` becomes what it was before, even if code in the block assigned another
    # gradient.
    held: list[tuple[Parameter, Tensor | None]] = []
    try:
        for p, grad in zip(params, grads, strict=True):
            true = like(p, _unscaled(grad, torch.float32 if is_narrow(p.dtype) else p.dtype, factor))
            held.append((p, p.grad))
            _assign(p, true)
        yield
    finally:
        for p, previous in held:
            if p.grad is not None:
                _assign(p, previous)


def _unscaled(grad: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Returns `grad`, dense or sparse, converted to `dtype` and multiplied by `factor`."""
    local = None if factor is None else factor.to(grad.device, non_blocking=True)
    if grad.is_sparse:
        values = _unscaled(sparse_values(grad), dtype, local)
        indices, coalesced = sparse_indices(grad), grad.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, grad.shape, device=grad.device, is_coalesced=coalesced, check_invariants=False
        )
    with torch.set_grad_enabled(grad.requires_grad):  # kept for what differentiates gradients, as AdaHessian does
        full = (grad if grad.requires_grad else grad.detach()).to(dtype)
        return full if local is None else full * local


def widened(grad: Tensor) -> Tensor:
    """Returns a sparse gradient with low-precision values as fp32, so that the values of one row add up in fp32."""
    if not is_narrow(grad.dtype) or grad.is_coalesced():
        return grad
    return _unscaled(grad, torch.float32, None)


def _assign(p: Parameter, grad: Tensor | None) -> None:
    p.grad = None
    if grad is not None and p.grad_dtype not in (None, grad.dtype):
        p.grad_dtype = None  # any dtype, also those that hooks assign
    p.grad = grad
