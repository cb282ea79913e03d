"""Tables on the device for kernels that process many tensors in one launch: addresses, sizes, each block's tensor."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from operator import or_

import torch
from torch import Tensor

from halfstep.torch_internals import foreach_add_
from halfstep.train.kernels.batch import Scratch

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VECTOR = 16  # bytes: tensors that start at multiples of it are read and written in pieces this wide


@dataclass(frozen=True)
class Group:
    """The tensors of one launch."""

    places: list[int]  # their indices in the lists passed to `groups`
    kind: str  # the format of their gradients
    aligned: bool  # all start at multiples of 16 bytes

    def pick(self, numbers: Sequence[int]) -> array[int]:
        """Returns this group's entries of `numbers`, which has one per parameter; zeros if `numbers` is empty."""
        if len(numbers) == len(self.places):  # it has them all, in their order
            return array("q", numbers)
        return array("q", [numbers[i] for i in self.places] if numbers else bytes(8 * len(self.places)))


def groups(grads: list[Tensor], addresses: Sequence[Sequence[int]]) -> Iterator[Group]:
    """Yields parameters in groups of one gradient format and one alignment."""
    found: dict[tuple[str, bool], list[int]] = {}
    held = [starts for starts in addresses if starts]
    kinds = {grad.dtype for grad in grads}
    if len(kinds) == 1 and reduce(or_, chain.from_iterable(held), 0) % _VECTOR == 0:  # as almost always, and faster
        yield Group(list(range(len(grads))), KINDS[kinds.pop()], True)
        return
    for i, (grad, *starts) in enumerate(zip(grads, *held, strict=True)):
        aligned = reduce(or_, starts) % _VECTOR == 0
        found.setdefault((KINDS[grad.dtype], aligned), []).append(i)
    for (kind, aligned), places in found.items():
        yield Group(places, kind, aligned)


def addresses(tensors: list[Tensor]) -> list[int]:
    """Returns the memory addresses of the tensors."""
    return [t.data_ptr() for t in tensors]


class Tables:
    """Makes tables on a device without waiting for it, and keeps them in `scratch` for later steps.

    Tables are copied through pinned memory. While a CUDA graph is captured, their numbers are passed as arguments of
    kernels instead, since a graph records arguments.
    """

    def __init__(self, device: torch.device, scratch: Scratch) -> None:
        self._device = device
        self._scratch = scratch
        self._captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def numbers(self, *rows: array[int]) -> Tensor:
        """Returns rows of integers as one flat int64 tensor, row after row."""
        joined = b"".join(map(bytes, rows))

        def make() -> Tensor:
            values = torch.frombuffer(bytearray(joined), dtype=torch.int64)
            if self._captured:
                return filled(values.tolist(), self._device)
            return (values.pin_memory() if self._device.type == "cuda" else values).to(self._device, non_blocking=True)

        return self._kept(joined, make)

    def owners(self, ends: array[int]) -> Tensor:
        """Returns, for each block, the index of its tensor (int32); `ends` are cumulative counts from `block_ends`."""

        def make() -> Tensor:
            blocks = torch.arange(ends[-1], device=self._device)
            return torch.bucketize(blocks, self.numbers(ends), out_int32=True, right=True)

        return self._kept(b"owners" + bytes(ends), make)

    def _kept(self, key: bytes, make: Callable[[], Tensor]) -> Tensor:
        return self._scratch.kept((self._device, key), make, captured=self._captured)


def block_ends(sizes: Sequence[int], length: int) -> array[int]:
    """Returns the cumulative numbers of blocks of `length` elements in tensors of these sizes.

    >>> list(block_ends([1, 0, 5], 4))
    [1, 1, 3]
    """
    return array("q", list(accumulate([-(-size // length) for size in sizes])))


def filled(values: list[int], device: torch.device) -> Tensor:
    """Returns integers as a tensor without a copy from the host.

    >>> filled([1, 2**62], torch.device("cpu"))
    tensor([                  1, 4611686018427387904])
    """
    table = torch.zeros(len(values), dtype=torch.int64, device=device)
    foreach_add_(list(table.unbind()), values)
    return table


def bits(number: float) -> int:
    """Returns the bits of a float64 as an integer, because the floats that a kernel takes are fp32.

    >>> hex(bits(1.0))
    '0x3ff0000000000000'
    """
    value: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return value
