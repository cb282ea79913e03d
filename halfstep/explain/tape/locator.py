"""Finds from the stack, not by hooks, in which module, line of user code and torch function an operation was called."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import unwrap as unwrap_function
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType, TracebackType

import torch
from torch import Tensor, nn

from halfstep.explain.tape.nonfinite import elements
from halfstep.modes import OURS, begin_pass, cast_at_boundary
from halfstep.plan.matching import uncompiled, unwrap
from halfstep.torch_internals import (
    CHECKPOINT_FILE,
    DISPATCH_FILES,
    ENGINE,
    FOLDER,
    FUNCTIONAL_FILES,
    NO_BACKWARD,
    StorageWeakRef,
    backward_task,
    frames_of,
    sparse_values,
    storage_identity,
    without_modes,
)

_MARKS = {id(begin_pass.__code__): "end", id(cast_at_boundary.__code__): "cast"}  # of functions that stay
_LIBRARY = os.path.dirname(os.__file__) + os.sep  # Python's own modules, and in some installations packages in it


@dataclass(frozen=True)
class Place:
    """The place from which an operation was called."""

    module: str | None  # the dotted name of the running module; None outside of every module
    line: str | None  # "file.py:12 in forward"; None if the stack has no user code (only C++, in a backward pass)
    call: tuple[int, int]  # the same for all operations of one call of a C++ function from Python
    function: str = ""  # the torch function written in Python that called the operation
    again: bool = False  # a checkpoint runs this part of a forward a second time


class Locator:
    """Finds names of modules and tensors ("1:attn" in several models) and the place of the running operation."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._modules: dict[int, tuple[str, weakref.ref[nn.Module]]] = {}  # weak, so that a session is not kept alive
        # (kind, name, tensor) and the bytes in its storage, keyed by memory: several may share a flat piece
        self._tensors: dict[int, list[tuple[range, tuple[str, str, Tensor]]]] = {}
        self._identities: list[StorageWeakRef] = []  # these keep the identity of freed memory from being reused
        self._kinds: dict[str, str] = {}  # by file
        classes = {id(type(module)): type(module) for root in roots for module in root.modules()}.values()
        defined = [each for c in classes for base in c.__mro__ if base is not nn.Module for each in vars(base).values()]
        methods = [unwrap_function(each) for each in defined if isinstance(each, FunctionType)]
        codes = [each.__code__ for each in methods if isinstance(each, FunctionType)]
        self._methods = {id(code): code for code in codes}  # to hash a code object takes long
        files = {getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in classes}
        self._files = {path for path in files if path.startswith(OURS)}  # of workloads, whose code counts as user code
        for number, root in enumerate(map(unwrap, roots)):
            model = f"{number}:" if len(roots) > 1 else ""
            for name, module in root.named_modules():
                self._modules.setdefault(id(module), (model + uncompiled(name), weakref.ref(module)))
            for name, parameter in root.named_parameters():
                known = model + uncompiled(name)
                self._know(parameter, "parameter", known, parameter)
                if parameter.grad is not None:
                    self._know(parameter.grad, "gradient", known, parameter)
            for name, buffer in root.named_buffers():
                self._know(buffer, "buffer", model + uncompiled(name), buffer)

    def _know(self, memory: Tensor, kind: str, name: str, tensor: Tensor) -> None:
        held = memory_of(memory)
        if held is None:
            return
        self._tensors.setdefault(identity_of(held), []).append((_span(held), (kind, name, tensor)))
        self._identities.append(StorageWeakRef(held.untyped_storage()))  # type: ignore[no-untyped-call]

    def module(self, name: str) -> nn.Module | None:
        return next((module() for known, module in self._modules.values() if known == name), None)

    def tensor(self, tensor: Tensor) -> tuple[str, str, Tensor] | None:
        """Returns (kind, name, tensor) of the models' tensor that shares memory with `tensor`, or None."""
        held = memory_of(tensor)
        known = [] if held is None else self._tensors.get(identity_of(held), [])
        if held is None or not known:
            return None
        return next((each for span, each in known if _span(held).start in span), known[0][1])

    def here(self) -> Place:
        """Returns the place of the running operation; searches the stack upwards, to the call that began the pass."""
        module = line = call = enclosing = None
        function, again, in_backward = "", False, backward_task() != NO_BACKWARD
        for frame in frames_of(sys._getframe(1)):
            found = module is not None and line is not None
            if found and (again or not in_backward):
                break
            code = frame.f_code
            kind = self._kind(code)
            if kind == "end":
                break
            again = again or kind == "checkpoint"
            if kind == "cast" and call is None:
                function = "to"
            if not found and kind not in ("below", "cast"):
                if call is None:
                    call = (id(frame), frame.f_lasti)
                if line is None and kind == "functional" and not function:
                    function = code.co_name
                if line is None and kind == "user":
                    line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
                module = self._running_in(frame) if module is None else module
                enclosing = self._of(frame, code.co_freevars) if enclosing is None else enclosing
        module = enclosing if module is None and again else module
        return Place(None if module is None else module[0], line, call or (0, 0), function, again)

    def _kind(self, code: CodeType) -> str:
        path = code.co_filename
        kind = self._kinds.get(path)
        if kind is None:
            kind = self._kinds[path] = "user" if path in self._files else _kind(path)
        if kind == "below":
            kind = _MARKS.get(id(code), kind)
        return "end" if kind == "torch" and code.co_name == ENGINE else kind

    def _running_in(self, frame: FrameType) -> tuple[str, weakref.ref[nn.Module]] | None:
        """Returns the module whose method runs in a frame; the method may call it something else than `self`."""
        first = frame.f_code.co_varnames[:1]
        if first and id(frame.f_code) in self._methods:
            return self._modules.get(id(frame.f_locals.get(first[0])))
        return self._of(frame, first)

    def _of(self, frame: FrameType, names: Sequence[str]) -> tuple[str, weakref.ref[nn.Module]] | None:
        return self._modules.get(id(frame.f_locals.get("self"))) if "self" in names else None

    def of_error(self, trace: TracebackType | None) -> Place:
        """Returns the place where an error was raised: the innermost module and line of user code in the traceback."""
        module = line = None
        for frame, number in walk_tb(trace):
            code = frame.f_code
            if self._kind(code) == "user":
                line = f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}"
            known = self._running_in(frame)
            module = module if known is None else known[0]
        return Place(module, line, (0, 0))


def memory_of(tensor: Tensor) -> Tensor | None:
    """Returns the tensor that holds a tensor's elements: itself, or the values of a sparse or nested tensor."""
    try:
        held = _dense(tensor)
        return held if held is not None and identity_of(held) else None
    except (NotImplementedError, RuntimeError):
        return None


def storage_of(tensor: Tensor) -> int:
    """Returns the identity of the memory of a tensor's elements; 0 if unknown."""
    held = memory_of(tensor)
    return 0 if held is None else identity_of(held)


def _dense(tensor: Tensor) -> Tensor | None:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    with without_modes():
        if tensor.is_nested:
            return elements(tensor)
        tensor = tensor.detach()
        if tensor.is_sparse:
            return sparse_values(tensor)
        compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
        return tensor.values() if tensor.layout in compressed else None


def identity_of(held: Tensor) -> int:
    """Returns the identity of the memory of a tensor whose elements are in its own storage."""
    return int(storage_identity(held.untyped_storage()))


def _span(held: Tensor) -> range:
    """Returns the bytes of its storage that a tensor has; never an empty range."""
    reach = 1 + sum(stride * (size - 1) for size, stride in zip(held.shape, held.stride(), strict=True) if size)
    start = int(held.storage_offset())
    return range(start * held.itemsize, (start + reach) * held.itemsize)


def _kind(path: str) -> str:
    # The kinds are "checkpoint", "functional" (torch functions written in Python), "below" (dispatch, and halfstep
    # itself), "torch" for the rest of torch and Python's own modules, and "user" for all other files.
    library = path.startswith(_LIBRARY) and "-packages" + os.sep not in path
    kinds = {
        "checkpoint": path == CHECKPOINT_FILE,
        "functional": path in FUNCTIONAL_FILES,
        "below": path in DISPATCH_FILES or path.startswith(OURS),
        "torch": library or path.startswith(FOLDER),
    }
    return next((kind for kind, holds in kinds.items() if holds), "user")
