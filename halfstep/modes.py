"""Orders dispatch modes, restores autocast in them, makes compiled code run eagerly; marks places on the call stack.

torch switches autocast off in a mode. Compiled code must run eagerly while it is observed, since it ignores hooks that
are added later; torch.compile has one switch for the whole process, its stance, so all requests are counted here.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from halfstep.formats import is_low
from halfstep.torch_internals import (
    DispatchKey,
    HigherOrder,
    OpOverload,
    TorchDispatchMode,
    call_by_key,
    compiled_inside,
    end_stance,
    forced_keys,
    has_kernel,
    has_kernel_for,
    keys_excluded_here,
    keys_included_here,
    mode_stack,
    parsed_key,
    pop_mode,
    push_mode,
    tree_leaves,
)

_AUTOCAST = tuple(parsed_key(f"Autocast{device}") for device in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1"))


def as_called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation that reached a dispatch mode, under the autocast state of its caller if that matters."""
    # torch switches autocast off inside a dispatch mode. It is restored for operations of libraries other than torch,
    # and for composite operations whose inputs mix fp32 and low tensors.
    if is_custom(func):
        with _autocast_as_called(func):
            return func(*args, **kwargs)
    if is_composite(func) and _mixed(args, kwargs):
        return in_parts(func, args, kwargs)
    return func(*args, **kwargs)


def in_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a composite operation as the operations that it is made of."""
    with _autocast_as_called(func) if is_custom(func) or _mixed(args, kwargs) else nullcontext():
        return call_by_key(func)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def is_custom(func: Any) -> bool:
    """Tells whether an operation is from a library other than torch; a dispatch mode may not see what it calls."""
    return isinstance(func, OpOverload) and func.namespace not in ("aten", "prim", "prims")


def autocast_outside(device_type: str) -> torch.dtype | None:
    """Returns autocast's dtype outside the dispatch mode, where an operation was called; None if it is off."""
    with enable_reentrant_dispatch():
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@functools.cache
def is_composite(func: Any) -> bool:
    """Tells whether an operation is made of other operations, and has no kernel of its own, as `silu_backward` has."""
    if not isinstance(func, OpOverload):
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    # To ask for a key of an operation that has no kernel at all ends the process.
    has = functools.partial(has_kernel_for, name)
    return has_kernel(name) and has(DispatchKey.CompositeImplicitAutograd) and not (has("CPU") or has("CUDA"))


def _mixed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    return torch.float32 in dtypes and any(map(is_low, dtypes))


@contextmanager
def _autocast_as_called(func: OpOverload) -> Iterator[None]:
    """Returns a context manager that restores the autocast state under which `func` was called."""
    excluded = keys_excluded_here()
    with enable_reentrant_dispatch():
        outside = keys_excluded_here()
    name: str = func.name()  # type: ignore[no-untyped-call]
    for key in _AUTOCAST:  # a custom operation's own kernel for autocast turns it off inside
        off_inside = is_custom(func) and has_kernel_for(name, key)
        if not outside.has(key) and not off_inside:
            excluded = excluded.remove(key)
    with forced_keys(keys_included_here(), excluded):
        yield


def take_off(mode: TorchDispatchMode, thread: int) -> None:
    """Removes `mode` from `thread`'s mode stack, also from below other modes; does nothing in other threads."""
    # When an earlier mode's `with` block ends, torch pops the top of the stack, which may have been `mode`: then the
    # earlier one is still there, and goes now.
    stack = mode_stack()
    if threading.get_ident() != thread or not stack:
        return
    below = next((index for index, each in enumerate(stack) if each is mode), None)
    later = [] if below is None else [pop_mode() for _ in stack[below + 1 :]]
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for each in reversed(later):
        push_mode(each)


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """A dispatch mode that passes each operation to `run`, which computes it with `compute`.

    It may be entered again inside itself. If another mode, such as emulation, is between the two entries, `run` gets
    what the inner entry sees: the operations as the model called them. Operations inside `run` are not passed to it.
    """

    supports_higher_order_operators = sees_parts = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on = True
        self._local = threading.local()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # once, for all subclasses

    def sees(self) -> bool:
        """Tells whether the running operation is passed to `run`."""
        return self.on

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operation."""
        return self.compute(func, args, kwargs)

    def failed(self, error: Exception) -> bool:
        """Tells whether an error in `run`, but not of the operation itself, is kept from the operation's caller."""
        return False

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation itself."""
        self._local.started = True
        self._local.made.append(as_called(func, args, kwargs))
        return self._local.made[0]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, local = {} if kwargs is None else kwargs, self._local
        inside = getattr(local, "inside", False) or isinstance(func, HigherOrder)
        if inside or func.namespace == "prim" or not self.sees():  # prim: sizes and layouts
            return as_called(func, args, named)
        made: list[Any] = []
        local.inside, local.started, local.made = True, False, made
        try:
            return self.run(func, args, named)
        except Exception as error:
            of_operation = local.started and not made
            if of_operation or not self.failed(error):
                raise
            return made[0] if made else as_called(func, args, named)
        finally:
            local.inside, local.made = False, None


class _Uncompiled:
    """Sets torch.compile's stance to eager while any caller requests this, and then restores the earlier stance."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may release in the middle of another's turn
        self._holders: set[object] = set()
        self._ours: list[Any] = []  # our stance, if it is set

    def enter(self, holder: object) -> None:
        try:
            with self._lock:
                self._holders.add(holder)
                if not self._ours:  # it takes effect at once; one bytecode sets and keeps it, as a Ctrl-C may come
                    self._ours.extend(map(torch.compiler.set_stance, ("force_eager",)))
        except BaseException:
            self.leave(holder)
            raise

    def leave(self, holder: object) -> None:
        """Ends the request of `holder`; may be called again, if a Ctrl-C has come in the middle."""
        with self._lock:
            if self._holders == {holder}:
                for ours in self._ours:
                    end_stance(ours)
                self._ours.clear()
            self._holders.discard(holder)


_UNCOMPILED = _Uncompiled()
"""torch.compile has one stance per process; empty while nobody requests eager code."""


def run_uncompiled() -> Callable[[], None]:
    """Makes compiled code run eagerly until the returned function is called; a second call of it does nothing."""
    _UNCOMPILED.enter(holder := object())
    return lambda: _UNCOMPILED.leave(holder)


def put_on_top(mode: OpMode) -> Callable[[], None]:
    """Puts a mode on the stack, not inside a forward, until the returned function is called."""
    compile_again, thread = run_uncompiled(), threading.get_ident()
    mode.__enter__()  # type: ignore[no-untyped-call]

    def remove() -> None:  # refers to the mode alone, so a finalizer may hold it
        mode.on = False
        take_off(mode, thread)
        compile_again()

    return remove


@contextmanager
def uncompiled(*modes: TorchDispatchMode) -> Iterator[None]:
    """Puts modes on the stack, the last on top, and makes compiled code run eagerly; Ctrl-C leaves none of it on."""
    holder, before = object(), mode_stack()

    def leave() -> None:
        for mode in reversed(modes):
            while mode_stack().count(mode) > before.count(mode):
                take_off(mode, threading.get_ident())
        _UNCOMPILED.leave(holder)

    try:
        try:
            _UNCOMPILED.enter(holder)
            for mode in modes:
                mode.__enter__()  # type: ignore[no-untyped-call]
            yield
        finally:
            leave()
    except BaseException:  # a Ctrl-C may have come in the middle of leaving
        leave()
        raise


def ordinary_tensors() -> AbstractContextManager[Any]:
    """Leaves `torch.inference_mode` for the context, if it is on: tensors that are made in that mode cannot train."""
    # Where it is off nothing is entered, because its end would undo what the context does to the stack of modes.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


# ---- marks on the call stack, which tell halfstep's frames from a model's
Result = TypeVar("Result")

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def begin_pass(run: Callable[[], Result]) -> Result:
    """Calls `run`, a forward or backward pass, and marks on the call stack where the pass begins."""
    return run()


@compiled_inside
def cast_at_boundary(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value`, a tensor or a batch with a `to` method, cast to `dtype` at the entry or exit of a module."""
    return value.to(dtype)
