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
from halfstep.stack import cast_at_boundary
from halfstep.torch_internals import compiled_inside

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, nn.Module)

Change = Callable[[Tensor], Tensor]
Convert = Callable[[Any], Any]


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
        given = obj.dtype
        return cast_at_boundary(obj, dtype) if given is not dtype and given in CASTABLE else obj
    cast_from = [d for d in CASTABLE if d != dtype]

    def cast(t: Tensor) -> Tensor:
        return cast_at_boundary(t, dtype) if t.dtype in cast_from else t

    def convert(batch: Any) -> Any:
        try:
            return cast_at_boundary(batch, dtype)
        except TypeError:  # a `to` for devices only
            return batch

    new = _change(cast, obj, convert, ())
    return obj if new is None else new


def first_float_dtype(args: Any, kwargs: Any = None) -> torch.dtype | None:
    """Returns the dtype of the first fp32, fp16 or bf16 tensor in `args`, then in `kwargs`; None if there is none."""
    return next((t.dtype for t in tensors_of((args, kwargs)) if t.dtype in CASTABLE), None)


def tensors_of(obj: Any, inside: tuple[int, ...] = ()) -> list[Tensor]:
    """Returns the tensors that `map_tensors` finds, in order."""
    # `inside` has the ids of the objects that contain `obj`. They are not searched again, so that the search ends even
    # if an object contains itself.
    if isinstance(obj, Tensor):
        return [obj]
    if isinstance(obj, _LEAVES) or id(obj) in inside:
        return []
    return [t for child in _children(obj) for t in tensors_of(child, (*inside, id(obj)))]


def _change(fn: Change, obj: Any, convert: Convert | None, inside: tuple[int, ...]) -> Any:
    """Returns `obj` with `fn` applied to each tensor in it, or None if nothing in it changes."""
    # None is returned in place of `obj` because torch.compile cannot compare tuples by `is`. `inside` has the ids of
    # the dataclasses and custom batches that contain `obj`. They are not searched again, so that the search ends even
    # if one of them contains itself.
    if isinstance(obj, Tensor):
        return _unless_same(fn(obj), obj)
    if isinstance(obj, (tuple, list)):
        return _change_sequence(fn, obj, convert, inside)
    if isinstance(obj, Mapping):
        changed = {}
        for key, value in obj.items():
            new = _change(fn, value, convert, inside)
            if new is not None:
                changed[key] = new
        return _rebuild_mapping(obj, changed) if changed else None
    if isinstance(obj, _LEAVES) or not _has_attributes(obj) or id(obj) in inside:
        return None
    if convert is not None and not dataclasses.is_dataclass(obj) and not tensors_of(obj):
        return _unless_same(convert(obj), obj)
    return _change_attributes(fn, obj, convert, (*inside, id(obj)))


def _unless_same(new: Any, old: Any) -> Any:
    return None if new is old else new


def _change_sequence(fn: Change, obj: Any, convert: Convert | None, inside: tuple[int, ...]) -> Any:
    same, items = True, []
    for item in obj:
        if isinstance(item, Tensor):  # also in _change; a call less for the commonest case
            new = fn(item)
            same = same and new is item
        else:
            changed = _change(fn, item, convert, inside)
            same = same and changed is None
            new = item if changed is None else changed
        items.append(new)
    return None if same else _rebuild_sequence(obj, items)


def _change_attributes(fn: Change, obj: Any, convert: Convert | None, inside: tuple[int, ...]) -> Any:
    changed = {}
    for name, value in _attributes(obj):
        new = _change(fn, value, convert, inside)
        if new is not None:
            changed[name] = new
    if not changed:
        return None
    result = copy.copy(obj)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # reaches frozen dataclasses too
    return result


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


def _has_attributes(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) or callable(getattr(type(obj), "to", None))


def _rebuild_sequence(obj: Any, items: list[Any]) -> Any:
    kind = type(obj)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "_make"):  # a named tuple, PackedSequence too
        return kind._make(items)
    if isinstance(obj, tuple):
        return kind(items)
    result = copy.copy(obj)
    result[:] = items
    return result


def _rebuild_mapping(obj: Any, changed: dict[Any, Any]) -> Any:
    if type(obj) is dict:
        return {**obj, **changed}
    values = {**obj, **changed}
    if type(obj) is OrderedDict and torch.compiler.is_compiling():  # which torch.compile may fail to copy
        return OrderedDict(values)
    if not hasattr(type(obj), "__setitem__"):  # read-only views and frozen dicts are built from a dict
        return type(obj)(values)
    kind: Any = type(obj)
    if torch.compiler.is_compiling() and dataclasses.is_dataclass(obj):  # whose copy loses keys there
        return kind(**values)
    result = copy.copy(obj)
    for key, value in changed.items():
        result[key] = value
    return result


def _children(obj: Any) -> list[Any]:
    if isinstance(obj, (tuple, list)):
        return list(obj)
    if isinstance(obj, Mapping):
        return list(obj.values())
    return [value for _, value in _attributes(obj)] if _has_attributes(obj) else []
