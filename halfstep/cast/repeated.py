"""Tells, for a call that a checkpoint repeats in the backward pass, whether it entered the plan or ran as written.

A checkpoint restores autocast as it was around the call, and the model's own code and a caller outside of the plan may
have set it alike. But it passes the same memory as arguments, by which a call is recognised.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.torch_internals import saved_tensor_hooks, storage_identity, tree_leaves

_MANY = 64  # calls of one module at least, before those whose memory is gone are dropped


class Calls:
    """Remembers, of the calls of one module that a checkpoint may repeat, which entered the plan.

    A call is known by the memory of its arguments, which is not kept alive. Calls with the same arguments are repeated
    last first, as in a backward pass.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[int, ...], deque[bool]] = {}
        self._memory: dict[tuple[int, ...], list[StorageWeakRef]] = {}
        self._room = _MANY

    def note(self, args: Any, kwargs: Any, *, entered: bool) -> None:
        """Records whether a call entered the plan, if a checkpoint may have made the call.

        A non-reentrant checkpoint makes calls under hooks for saved tensors. A reentrant one makes them with gradients
        off, and repeats them only if an argument requires gradients. An evaluation does neither.
        """
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
        """Returns whether the repeated call with these arguments entered the plan; None if no such call is known."""
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
