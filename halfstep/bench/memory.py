"""The most memory that a training step holds: the allocator's count on CUDA, the bytes of live tensors elsewhere."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from halfstep.modes import as_called
from halfstep.torch_internals import TorchDispatchMode, storage_identity, tree_leaves

METHODS = {"cuda": "the allocator's peak"}
LIVE_TENSORS = "bytes of live tensors"


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Counts the bytes of the tensors that ops make while it is on, from the first op that returns one to its end.

    `live` is what is held now and `peak` the most that was. A storage counts once, however many tensors view it; memory
    that a kernel takes and gives back inside one op is not seen.

    >>> with LiveBytes() as count:
    ...     kept = torch.zeros(100) + torch.ones(100)
    >>> count.live, count.peak
    (400, 1200)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def restart(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = as_called(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_identity(storage), storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class AllocatorBytes:
    """Counts what CUDA's caching allocator has given out on a device since it was entered; see `LiveBytes`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> AllocatorBytes:
        torch.cuda.synchronize(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        self.restart()
        return self

    def __exit__(self, *error: object) -> None:
        """Has nothing to put back."""

    def restart(self) -> None:
        """Forgets the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int:
        """The most bytes that were held since the last `restart`."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def counting(device: torch.device) -> AllocatorBytes | LiveBytes:
    """Returns a context that counts the bytes held on a device, without those from before it was entered."""
    return AllocatorBytes(device) if device.type == "cuda" else LiveBytes()


def peak_method(device: torch.device) -> str:
    """Returns how `counting` counts on a device, in words."""
    return METHODS.get(device.type, LIVE_TENSORS)
