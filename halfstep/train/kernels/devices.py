"""Kernels for devices that need another package (Triton for CUDA), imported when first needed, and their tables."""

from __future__ import annotations

import functools
import importlib
import logging
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import or_
from types import ModuleType

import torch
from torch import Tensor

from halfstep.torch_internals import foreach_add_
from halfstep.train.kernels.batch import Judged, Scratch, Wanted

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VECTOR = 16  # bytes: tensors that start at multiples of it are read and written in pieces this wide


@dataclass(frozen=True)
class Launch:
    """The tensors of one launch."""

    places: Sequence[int]  # their indices among all
    kind: str  # the format of their gradients
    aligned: bool  # all start at multiples of 16 bytes
    ends: array[int]  # from `block_ends`
    table: bytes  # of int64: each tensor's first block, its size, and the further rows

    def pick(self, numbers: Sequence[int]) -> array[int]:
        """Returns this launch's entries of `numbers`, which has one per tensor; zeros if `numbers` is empty."""
        if len(numbers) == len(self.places):  # it has them all, in their order
            return array("q", numbers)
        return array("q", [numbers[i] for i in self.places] if numbers else bytes(8 * len(self.places)))


class Launches:
    """Sorts tensors into launches, each of one gradient format and one alignment, for step after step."""

    # `rows` are the numbers of a table that stay the same, the tensors' sizes first. `fixed` of them are addresses that
    # decide the alignment too. Where all is aligned, as almost always, launches are made once.
    def __init__(
        self, grads: list[Tensor], length: int, rows: Sequence[Sequence[int]], fixed: Sequence[Sequence[int]] = ()
    ) -> None:
        self._kinds = [KINDS[grad.dtype] for grad in grads]
        self._length = length
        self._rows = rows
        held = [starts for starts in fixed if starts]
        self._starts = [reduce(or_, starts) for starts in zip(*held, strict=True)] if held else [0] * len(grads)
        self._any = reduce(or_, self._starts, 0)
        self._aligned: list[Launch] | None = None

    def of(self, starts: list[int]) -> list[Launch]:
        """Returns the launches for gradients at these addresses."""
        if reduce(or_, starts, self._any) % _VECTOR:
            return self._made(starts)
        if self._aligned is None:
            self._aligned = self._made(starts)
        return self._aligned

    def _made(self, starts: list[int]) -> list[Launch]:
        found: dict[tuple[str, bool], list[int]] = {}
        for i, (kind, own, start) in enumerate(zip(self._kinds, self._starts, starts, strict=True)):
            found.setdefault((kind, (own | start) % _VECTOR == 0), []).append(i)
        made = []
        for (kind, aligned), places in found.items():
            ends = block_ends([self._rows[0][i] for i in places], self._length)
            launch = Launch(places, kind, aligned, ends, b"")
            rows = [array("q", [0, *ends[:-1]]), *map(launch.pick, self._rows)]
            made.append(replace(launch, table=b"".join(map(bytes, rows))))
        return made


def addresses(tensors: list[Tensor]) -> list[int]:
    """Returns the memory addresses of the tensors."""
    return list(map(Tensor.data_ptr, tensors))


class Tables:
    """Makes tables on a device without waiting for it, and keeps them in `scratch` for later steps."""

    # They are copied through pinned memory. While a CUDA graph is captured, their numbers are passed as arguments of
    # kernels instead, since a graph records arguments.
    def __init__(self, device: torch.device, scratch: Scratch) -> None:
        self._device = device
        self._scratch = scratch
        self._captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def numbers(self, numbers: bytes) -> Tensor:
        """Returns the numbers of an array as a flat int64 tensor."""

        def make() -> Tensor:
            values = torch.frombuffer(bytearray(numbers), dtype=torch.int64)
            if self._captured:
                return filled(values.tolist(), self._device)
            return (values.pin_memory() if self._device.type == "cuda" else values).to(self._device, non_blocking=True)

        return self._kept(numbers, make)

    def owners(self, ends: array[int]) -> Tensor:
        """Returns, for each block, the index of its tensor (int32); `ends` are cumulative counts from `block_ends`."""

        def make() -> Tensor:
            blocks = torch.arange(ends[-1], device=self._device)
            return torch.bucketize(blocks, self.numbers(bytes(ends)), out_int32=True, right=True)

        return self._kept(b"owners" + bytes(ends), make)

    def _kept(self, key: bytes, make: Callable[[], Tensor]) -> Tensor:
        return self._scratch.kept((self._device, key), make, captured=self._captured)


def block_ends(sizes: Sequence[int], length: int) -> array[int]:
    """Returns the cumulative numbers of blocks of `length` elements in tensors of these sizes."""
    return array("q", list(accumulate([-(-size // length) for size in sizes])))


def filled(values: list[int], device: torch.device) -> Tensor:
    """Returns integers as a tensor without a copy from the host."""
    table = torch.zeros(len(values), dtype=torch.int64, device=device)
    foreach_add_(list(table.unbind()), values)
    return table


def bits(number: float) -> int:
    """Returns the bits of a float64 as an integer, because the floats that a kernel takes are fp32."""
    value: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return value


# ---- kernels that another package runs
_LOG = logging.getLogger("halfstep")


def triton_can_read(grads: list[Tensor]) -> bool:
    """Returns whether these gradients are on CUDA, Triton works on their device, and its kernels can read them."""
    kernels = triton_on(grads[0].device) if grads else None
    return kernels is not None and bool(kernels.can_read(grads))


def triton_read(grads: list[Tensor], scratch: Scratch, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor, Judged]:
    """Returns the L2 norm of all, whether any is non-finite, for each whether it is (bool), and what is wanted."""
    kernels = triton_on(grads[0].device)
    assert kernels is not None
    result: tuple[Tensor, Tensor, Tensor, Judged] = kernels.read(grads, scratch, wanted)
    return result


def triton_casts(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton's casts, or None where Triton does not run."""
    return None if triton_on(device) is None else importlib.import_module("halfstep.train.kernels.casts")


def triton_on(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton kernels, or None if the device is not CUDA or they cannot run on it."""
    return triton_kernels(device) if device.type == "cuda" else None


@functools.cache
def triton_kernels(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton kernels, or None, with one warning that says why, if it cannot run on the device."""
    # Tries a small kernel, since Triton needs a C compiler and a GPU that it supports. Also runs the operations that
    # the capture of a CUDA graph uses, so that they are loaded before a capture begins.
    try:
        kernels = importlib.import_module("halfstep.train.kernels.triton")
        kernels.read([torch.ones(1, dtype=torch.float32, device=device)], Scratch())
        filled([0], device)
    except ImportError as error:
        why = f"Triton cannot be imported ({error}); run: pip install triton"
    except Exception as error:  # whatever a compiler and a driver raise
        why = f"Triton does not run here: {type(error).__name__}: {error}"
    else:
        return kernels
    _LOG.warning("halfstep's loops for %s run as torch operations, in more passes over memory: %s", device, why)
    return None
