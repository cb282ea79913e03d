"""Casts the arguments of the Python functions named in a plan's op changes, by wrapping these functions.

torch's dispatcher does not see calls of Python functions, so a wrapper replaces the function in its module or class.
The wrapper also replaces it in modules that imported it earlier (`from my_ops import swish`). Where a closure, a
default argument or an object holds the function, it cannot be replaced, and runs as written.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in

from halfstep.edits import OpChanges, OpList
from halfstep.errors import PlanError
from halfstep.formats import CASTABLE
from halfstep.plan.optable import LOSSES
from halfstep.train.cast.opregistry import DeferringLock
from halfstep.train.cast.ops import OpEngine, Switch
from halfstep.train.cast.tree import cast_floats, tensors_of

Undo = Callable[[], None]
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_LOCK = DeferringLock()


@dataclass(frozen=True)
class _Patch:
    """How one session makes the calls of a function, while it is on."""

    is_on: Callable[[], bool]
    call: Call


def call_as(
    category: OpList, switch: Switch, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a Python function as an op of one list (allow, deny, infer or promote): casts its floating arguments."""
    dtype = {"allow": switch.low, "deny": torch.float32, "promote": torch.float32}.get(category)
    differ = category != "promote" or len({t.dtype for t in tensors_of((args, kwargs)) if t.dtype in CASTABLE}) > 1
    if dtype is not None and differ:
        args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
    with TorchAutocast(switch.device_type, dtype=switch.low, enabled=False):
        return function(*args, **kwargs)


_PLACES: weakref.WeakSet[_Attribute] = weakref.WeakSet()  # that a session patches, or somebody's wrapper keeps


class _Attribute:
    """An attribute of a module or class whose value is a function; a wrapper replaces it while a session patches it."""

    def __init__(self, holder: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(holder, name)
        patches: list[_Patch] = []

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for patch in tuple(patches):  # a finalizer may take one out meanwhile
                if patch.is_on():
                    return patch.call(function, args, kwargs)
            return function(*args, **kwargs)

        self.holder, self.name, self.function, self.wrapper, self.patches = holder, name, function, wrapper, patches
        self.own = vars(holder).get(name)
        wrapper._halfstep_place = self  # type: ignore[attr-defined]
        _PLACES.add(self)
        bound = isinstance(self.own, (staticmethod, classmethod)) or hasattr(function, "__self__")
        setattr(holder, name, staticmethod(wrapper) if isinstance(holder, type) and bound else wrapper)

    def remove(self, patch: _Patch) -> None:
        with _LOCK:
            self.patches.remove(patch)
            if self.patches or getattr(self.holder, self.name, None) is not self.wrapper:
                return  # else somebody wrapped ours: it stays below theirs, and passes
            if self.own is None:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, self.own)


def patch_functions(changes: OpChanges, engine: OpEngine) -> Undo:
    """Makes Python functions ("module:function") follow their op list in `changes` inside the engine's regions."""
    # Autocast is off inside them. torch's losses of several operations run in fp32, unless `changes` names them.
    asked = _functions(changes)
    *patches, full = [
        _Patch(engine.switch.is_on, functools.partial(call_as, category, engine.switch))
        for category in (*(category for category, _ in asked), "deny")
    ]
    names = _names_of([_find(op) for _, op in asked])
    places = [(_place(*at, patch), patch) for each, patch in zip(names, patches, strict=True) for at in each]
    # By torch's name alone: a look at all modules takes long.
    places += [(_place(*_find(op), full), full) for op in LOSSES if all(op != other for _, other in asked)]
    return _undo_of(places, engine)


def patch_function(holder: Any, name: str, call: Call, *, owner: object) -> Undo:
    """Makes `call(function, args, kwargs)` stand for `holder.name(...)`, until this is undone or `owner` is gone."""
    patch = _Patch(lambda: True, call)
    return _undo_of([(_place(holder, name, patch), patch)], owner)


def _undo_of(places: list[tuple[_Attribute, _Patch]], owner: object) -> Undo:
    def undo() -> None:
        while places:
            place, patch = places.pop()
            place.remove(patch)

    weakref.finalize(owner, _LOCK.defer, undo).atexit = False  # of a session that nobody closes
    return undo


def check_functions(changes: OpChanges) -> None:
    """Raises the PlanError that `patch_functions` would raise, but replaces nothing."""
    for _, op in _functions(changes):
        _find(op)


def _names_of(functions: list[tuple[Any, str]]) -> list[list[tuple[Any, str]]]:
    """Returns each function, a (holder, name), with the other names by which imported modules hold it."""
    own = [_written(getattr(holder, name)) if isinstance(holder, ModuleType) else None for holder, name in functions]
    written = {id(each): each for each in own if each is not None}  # by identity: isinstance would wake lazy objects
    with _LOCK:  # which adds places
        written |= {id(place.wrapper): place.function for place in _PLACES if id(place.function) in written}
    found = [
        (module, bound, written[id(value)])
        for module in list(sys.modules.values())
        if written and isinstance(module, ModuleType)
        for bound, value in list(vars(module).items())
        if id(value) in written
    ]
    return [
        [(holder, name), *((m, bound) for m, bound, f in found if f is each and (m is not holder or bound != name))]
        for (holder, name), each in zip(functions, own, strict=True)
    ]


def _written(function: Any) -> Any:
    place = getattr(function, "_halfstep_place", None)
    return place.function if isinstance(place, _Attribute) else function


def _functions(changes: OpChanges) -> list[tuple[OpList, str]]:
    return [(category, op) for category, op in changes.listed() if ":" in op]


def _find(op: str) -> tuple[Any, str]:
    """Returns the module or class that holds the function in "module:function", and the function's name there."""
    module, _, path = op.partition(":")
    try:
        holder: Any = importlib.import_module(module)
    except ImportError as error:
        raise PlanError(
            f"op {op!r}: module {module!r} cannot be imported ({error}); name an importable module before the colon"
        ) from error
    *classes, name = path.split(".")
    for part in classes:
        holder = getattr(holder, part, None)
    if not callable(getattr(holder, name, None)):
        raise PlanError(f"op {op!r}: module {module!r} has no function {path!r}; name a function that it has")
    return holder, name


def _place(holder: Any, name: str, patch: _Patch) -> _Attribute:
    """Adds a patch to the function `holder.name` and returns its `_Attribute`."""
    with _LOCK:
        current = getattr(holder, name)
        place = getattr(current, "_halfstep_place", None)
        if not isinstance(place, _Attribute) or place.wrapper is not current:
            place = _Attribute(holder, name)
        place.patches.append(patch)
        return place
