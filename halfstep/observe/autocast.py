"""Autocast around an operation that came to a dispatch mode, where torch turns it off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import enable_reentrant_dispatch

_AUTOCAST = tuple(
    torch._C._dispatch_key_parse(f"Autocast{device}") for device in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
)


def as_called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation that came to a dispatch mode; a custom one with autocast as it was where it was called.

    Inside a mode autocast is off; without one what a custom operation computes with is cast.
    """
    if not isinstance(func, OpOverload) or func.namespace in ("aten", "prims"):
        return func(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with enable_reentrant_dispatch():
        outside = torch._C._dispatch_tls_local_exclude_set()
    name: str = func.name()  # type: ignore[no-untyped-call]
    for key in _AUTOCAST:  # a kernel of its own for autocast turns it off inside
        if not outside.has(key) and not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)
