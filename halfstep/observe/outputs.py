"""Finds the floating-point tensors in whatever a module returns, and where in it each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.sharded import is_wrapped
from halfstep.torch_internals import is_functorch_wrapped

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensors_in(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (place, tensor) for the floating-point and complex tensors in an output, each tensor once.

    Searches lists, tuples, mappings, dataclasses and the attributes of other objects that a model defines, at any
    depth. The place has the keys and indices that lead to the tensor, joined by dots; it is "" for a bare tensor.

    >>> [place for place, _ in tensors_in({"logits": torch.ones(1), "hidden": (torch.ones(1), torch.ones(1).int())})]
    ['logits', 'hidden.0']
    """
    return _walk(output, "", set())


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


def _walk(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if id(value) not in seen and (value.is_floating_point() or value.is_complex()):
            seen.add(id(value))
            yield place, value
        return
    if isinstance(value, (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)) or id(value) in seen:
        return
    seen.add(id(value))
    for key, child in _children(value):
        yield from _walk(child, f"{place}.{key}" if place else key, seen)


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
