"""Hooks on modules for one step, which see the outputs of forward passes and the gradients of the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from halfstep.sharded import is_wrapped
from halfstep.torch_internals import backward_task, is_functorch_wrapped, version_of

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensors_in(output: Any, place: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields (place, tensor) for each floating-point and complex tensor in an output, at any depth, once.

    >>> [place for place, _ in tensors_in({"logits": torch.ones(1), "hidden": (torch.ones(1), torch.ones(1).int())})]
    ['logits', 'hidden.0']
    """
    seen = set() if seen is None else seen
    leaf = isinstance(output, (str, bytes, int, float, complex, type(None), torch.dtype, torch.device))
    if leaf or id(output) in seen:
        return
    seen.add(id(output))
    if not isinstance(output, Tensor):
        for key, child in _children(output):
            yield from tensors_in(child, f"{place}.{key}" if place else key, seen)
    elif output.is_floating_point() or output.is_complex():
        yield place, output


def readable(t: Tensor) -> Tensor | None:
    """Returns `t`, or a DTensor's local part, if its elements can be read in memory; otherwise None."""
    local = getattr(t, "to_local", None)
    t = local() if local is not None else t
    if is_wrapped(t) or t.is_meta or t.layout not in _LAYOUTS or is_functorch_wrapped(t):
        return None
    return t


def dense(grad: Tensor) -> Tensor:
    """Returns the values of a gradient; for a sparse gradient, the stored values."""
    return grad if grad.layout is torch.strided else grad.coalesce().values()


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        return [(str(name), child) for name, child in zip(names, value, strict=True)]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    if isinstance(value, (torch.nn.Module, type)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).items())


Saw = Callable[[str, str, Tensor], None]  # takes the name of a module, a place in its output, and the tensor there


class _ForwardHook:
    """A forward hook that is left out when its module is copied or pickled."""

    def __init__(self, name: str, saw: Callable[[str, Any], None]) -> None:
        self._name = name
        self._saw = saw

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saw(self._name, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__  # takes three arguments and does nothing, also where halfstep is not installed

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class StepHooks:
    """Passes the tensors in the outputs of modules to `saw`, and their gradients to `saw_grad`."""

    # Not reported: forwards without gradients, a checkpoint's second run, what a module passes on from one inside it.

    def __init__(self, saw: Saw | None, saw_grad: Saw | None) -> None:
        self._saw = saw
        self._saw_grad = saw_grad
        self._undo: list[Callable[[], None]] = []
        self.take_off: Callable[[], None] = partial(undo_all, self._undo)  # refers to no module or hook
        self.active = True
        self._forward: set[str] = set()  # modules that a forward pass with gradients on went through
        self._again: dict[str, int] = {}  # by module: the task of this backward pass that first recomputed it
        self._newest: list[tuple[ReferenceType[Tensor], int]] = []  # with the version of each
        self.saw_any = False

    def put_on(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            self._undo.append(module.register_forward_hook(_ForwardHook(name, self._output)).remove)

    def new_backward(self) -> None:
        self._again.clear()

    def remove(self) -> None:
        """Removes the hooks on modules; a hook on a tensor of a live autograd graph remains, but does nothing."""
        self.active = False
        self.take_off()

    def _output(self, name: str, output: Any) -> None:
        if not self.active or not torch.is_grad_enabled() or torch.compiler.is_compiling() or self._is_repeated(name):
            return
        found = [(place, t) for place, t in tensors_in(output) if not self._is_known(t)]
        if not found:
            return
        self.saw_any = True
        self._newest = [(ref(t), version_of(t)) for _, t in found]
        for place, t in found:
            if self._saw is not None:
                self._saw(name, place, t)
            if self._saw_grad is not None and t.requires_grad:
                self._watch(self._saw_grad, name, place, t)

    def _is_repeated(self, name: str) -> bool:
        """Tells whether a checkpoint recomputes the module `name` after its output has been reported."""
        task = backward_task()
        if task == -1:  # no backward pass is under way
            self._forward.add(name)
            return False
        return name in self._forward or self._again.setdefault(name, task) != task

    def _watch(self, saw_grad: Saw, name: str, place: str, t: Tensor) -> None:
        def hook(gradient: Tensor) -> None:
            if self.active:
                saw_grad(name, place, gradient)

        handle = t.register_hook(hook)  # type: ignore[no-untyped-call]
        if t.is_leaf:  # a leaf outlives the step; a hook on a result is freed with its graph
            self._undo.append(handle.remove)

    def _is_known(self, t: Tensor) -> bool:
        """Tells whether `t` is a tensor of the output that was reported last, and has not been written to since."""
        return any(held() is t and version == version_of(t) for held, version in self._newest)


def undo_all(undo: list[Callable[[], None]]) -> None:
    """Calls the functions in a list, the last first, and empties it."""
    while undo:
        undo.pop()()
