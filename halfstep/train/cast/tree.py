"""Tensors inside nested arguments and results: find them, change them, keep everything around them as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.formats import CASTABLE
from halfstep.modes import cast_at_boundary
from halfstep.torch_internals import compiled_inside

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, nn.Module)

Change = Callable[[Tensor], Tensor]


def map_tensors(fn: Change, obj: Any) -> Any:
    """Returns `obj` with `fn` applied to each tensor in it; `obj` itself if `fn` changed none."""
    # Any depth of lists, tuples, mappings, dataclasses and objects with a `to` method; what changes is copied.
    if isinstance(obj, Tensor):
        return fn(obj)
    new = _change(fn, obj, None, ())
    return obj if new is None else new


@compiled_inside
def cast_floats(obj: Any, dtype: torch.dtype) -> Any:
    """Returns `obj` with its fp32, fp16 and bf16 tensors cast to `dtype`; float64, complex, integer and bool stay."""
    # A custom batch is copied and its attributes are cast; if none holds a tensor, its own `to(dtype)` is called.
    if isinstance(obj, Tensor):  # `t.to(t.dtype)` costs 0.7 us
        return cast_at_boundary(obj, dtype) if obj.dtype is not dtype and obj.dtype in CASTABLE else obj

    def cast(t: Tensor) -> Tensor:
        return cast_at_boundary(t, dtype) if t.dtype is not dtype and t.dtype in CASTABLE else t

    new = _change(cast, obj, dtype, ())
    return obj if new is None else new


def first_float_dtype(args: Any, kwargs: Any = None) -> torch.dtype | None:
    """Returns the dtype of the first fp32, fp16 or bf16 tensor in `args`, then in `kwargs`; None if there is none."""
    return next((t.dtype for t in tensors_of((args, kwargs)) if t.dtype in CASTABLE), None)


def tensors_of(obj: Any) -> list[Tensor]:
    """Returns the tensors that `map_tensors` finds, in order."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(note, obj)
    return found


def _change(fn: Change, obj: Any, to: torch.dtype | None, inside: tuple[int, ...]) -> Any:
    """Returns `obj`, no tensor, with `fn` applied to each tensor in it, or None if nothing in it changes."""
    # None is returned in place of `obj` because torch.compile cannot compare tuples by `is`. `inside` has the ids of
    # the dataclasses and custom batches that contain `obj`. They are not searched again, so that the search ends even
    # if one of them contains itself. Batches without a tensor are cast `to` a format by themselves.
    if isinstance(obj, (tuple, list)):
        parts: Any = enumerate(obj)
    elif isinstance(obj, Mapping):
        parts = obj.items()
    elif isinstance(obj, _LEAVES) or not _has_attributes(obj) or id(obj) in inside:
        return None
    elif to is not None and not dataclasses.is_dataclass(obj) and not tensors_of(obj):
        try:
            new = cast_at_boundary(obj, to)
        except TypeError:  # a `to` for devices only
            return None
        return None if new is obj else new
    else:
        parts, inside = _attributes(obj), (*inside, id(obj))
    changed = {}
    for key, value in parts:
        if isinstance(value, Tensor):
            new = fn(value)
            if new is not value:
                changed[key] = new
        else:
            new = _change(fn, value, to, inside)
            if new is not None:
                changed[key] = new
    return _rebuilt(obj, changed) if changed else None


def _has_attributes(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) or callable(getattr(type(obj), "to", None))


def _attributes(obj: Any) -> list[tuple[str, Any]]:
    """Returns (name, value) for all that `obj` itself stores: dataclass fields, else its slots and its `__dict__`."""
    if dataclasses.is_dataclass(obj):
        return [(f.name, getattr(obj, f.name)) for f in dataclasses.fields(obj) if hasattr(obj, f.name)]
    names: list[str] = []
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    in_slots = [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(obj, name)]
    return [(name, getattr(obj, name)) for name in in_slots] + list(getattr(obj, "__dict__", {}).items())


def _rebuilt(obj: Any, changed: dict[Any, Any]) -> Any:
    """Returns a copy of `obj` with these items or attributes in place of its own."""
    kind: Any = type(obj)
    if isinstance(obj, (tuple, list)):
        items = [changed.get(index, item) for index, item in enumerate(obj)]
        if isinstance(obj, tuple):
            return getattr(kind, "_make", kind)(items)  # of a named tuple, PackedSequence too
        if kind is list:
            return items
        result = copy.copy(obj)
        result[:] = items
        return result
    if isinstance(obj, Mapping):
        values = {**obj, **changed}
        # read-only views and frozen dicts are built from a dict; torch.compile may fail to copy an OrderedDict
        if kind in (dict, OrderedDict) or not hasattr(kind, "__setitem__"):
            return kind(values)
        if torch.compiler.is_compiling() and dataclasses.is_dataclass(obj):  # whose copy loses keys there
            return kind(**values)
    result = copy.copy(obj)
    for name, value in changed.items():
        if isinstance(obj, Mapping):
            result[name] = value
        else:
            object.__setattr__(result, name, value)  # reaches frozen dataclasses too
    return result
