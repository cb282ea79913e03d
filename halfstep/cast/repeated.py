"""Remembers which calls entered the plan, because activation checkpoints repeat calls in the backward pass.

A call enters the plan if it switches the plan's casts on. A repeated call must run as the original call did, but a
checkpoint restores only the state of autocast. That does not tell whether the original call entered the plan: autocast
was off before the call also if the model's own code runs this call without casts. So a repeated call is recognized by
its arguments, which are in the same memory as those of the original call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_internals import StorageWeakRef, saved_tensor_hooks, storage_identity, tree_leaves

_MANY = 64  # calls of one module at least, before those whose memory is gone are dropped


class Calls:
    """Remembers which calls of one module entered the plan (switched its casts on), so that repeated calls do the same.

    Only calls that an activation checkpoint may repeat are remembered. A call is recognized by the memory of its
    arguments; this memory is not kept alive. If several calls had the same arguments, the last one is repeated first,
    as in a backward pass.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[int, ...], deque[bool]] = {}
        self._memory: dict[tuple[int, ...], list[StorageWeakRef]] = {}
        self._room = _MANY

    def note(self, args: Any, kwargs: Any, *, entered: bool) -> None:
        """Records whether a call entered the plan, if an activation checkpoint may repeat the call."""
        hooked = saved_tensor_hooks(True) is not None
        if not hooked and (torch.is_grad_enabled() or not _asks_for_gradients(args, kwargs)):
            return
        key, memory = _memory_of(args, kwargs)
        if len(self._ways) >= self._room:
            self._drop_freed()
            self._room = max(_MANY, 2 * len(self._ways))
        if key not in self._ways or self._is_freed(key):
            self._ways[key] = deque(maxlen=_MANY)
            self._memory[key] = [StorageWeakRef(storage) for storage in memory]  # type: ignore[no-untyped-call]
        self._ways[key].appendleft(entered)

    def repeated(self, args: Any, kwargs: Any) -> bool | None:
        """Returns whether a repeated call entered the plan at first; None if no call with these arguments is known."""
        key, _ = _memory_of(args, kwargs)
        ways = self._ways.get(key)
        if ways is None or self._is_freed(key):
            return None
        ways.rotate(-1)  # a graph that is kept is run through again in the same order
        return ways[-1]

    def _is_freed(self, key: tuple[int, ...]) -> bool:
        return any(reference.expired() for reference in self._memory[key])  # type: ignore[no-untyped-call]

    def _drop_freed(self) -> None:
        for key in [key for key in self._ways if self._is_freed(key)]:
            del self._ways[key], self._memory[key]


def _asks_for_gradients(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))


def _memory_of(args: Any, kwargs: Any) -> tuple[tuple[int, ...], list[Any]]:
    storages = []
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            try:
                storages.append(leaf.untyped_storage())
            except (RuntimeError, NotImplementedError):  # sparse, or a wrapper: it has none of its own
                continue
    return tuple(storage_identity(storage) for storage in storages), storages
