"""What a launch over many tensors reads on the device: addresses, sizes, and which block belongs to which tensor."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from halfstep.kernels.batch import Scratch
from halfstep.torch_internals import foreach_add_

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VECTOR = 16  # bytes: tensors that start at multiples of it are read and written in pieces this wide


@dataclass(frozen=True)
class Group:
    """Tensors of one launch: their places in the lists, and what they have in common.

    `kind` is that of the gradients; `aligned` says that all tensors start at multiples of 16 bytes.
    """

    places: list[int]
    kind: str
    aligned: bool

    def pick(self, numbers: Sequence[int]) -> array[int]:
        """Returns the numbers of the tensors of the group; zeros where a list has none."""
        if len(numbers) == len(self.places):  # it has them all, in their order
            return array("q", numbers)
        return array("q", [numbers[i] for i in self.places] if numbers else bytes(8 * len(self.places)))


def groups(grads: list[Tensor], addresses: Sequence[Sequence[int]]) -> Iterator[Group]:
    """Yields groups of parameters that have `grads`, and other tensors at `addresses`: aligned, or empty, lists."""
    found: dict[tuple[str, bool], list[int]] = {}
    held = [starts for starts in addresses if starts]
    for i, (grad, *starts) in enumerate(zip(grads, *held, strict=True)):
        aligned = reduce(or_, starts) % _VECTOR == 0
        found.setdefault((KINDS[grad.dtype], aligned), []).append(i)
    for (kind, aligned), places in found.items():
        yield Group(places, kind, aligned)


def addresses(tensors: list[Tensor]) -> list[int]:
    """Returns where the tensors begin."""
    return [t.data_ptr() for t in tensors]


class Tables:
    """Makes tables on a device without the host waiting for it, and keeps them in `scratch` for the next step.

    They come through pinned memory; while a CUDA graph is captured, as arguments of kernels, which the graph remembers.
    """

    def __init__(self, device: torch.device, scratch: Scratch) -> None:
        self._device = device
        self._scratch = scratch
        self._captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def numbers(self, *rows: array[int]) -> Tensor:
        """Returns integers as an int64 tensor, row after row."""
        joined = b"".join(map(bytes, rows))

        def make() -> Tensor:
            values = torch.frombuffer(bytearray(joined), dtype=torch.int64)
            if self._captured:
                return filled(values.tolist(), self._device)
            return (values.pin_memory() if self._device.type == "cuda" else values).to(self._device, non_blocking=True)

        return self._kept(joined, make)

    def owners(self, ends: array[int]) -> Tensor:
        """Returns for each block its tensor (int32), where `ends` are the numbers of blocks up to and with each."""

        def make() -> Tensor:
            blocks = torch.arange(ends[-1], device=self._device)
            return torch.bucketize(blocks, self.numbers(ends), out_int32=True, right=True)

        return self._kept(b"owners" + bytes(ends), make)

    def _kept(self, key: bytes, make: Callable[[], Tensor]) -> Tensor:
        return self._scratch.kept((self._device, key), make, captured=self._captured)


def block_ends(sizes: Sequence[int], length: int) -> array[int]:
    """Returns the number of blocks of `length` elements that tensors of these sizes have, up to and with each.

    >>> list(block_ends([1, 0, 5], 4))
    [1, 1, 3]
    """
    ends, total = array("q"), 0
    for size in sizes:
        total += -(-size // length)
        ends.append(total)
    return ends


def filled(values: list[int], device: torch.device) -> Tensor:
    """Returns integers as a tensor without a copy from the host.

    >>> filled([1, 2**62], torch.device("cpu"))
    tensor([                  1, 4611686018427387904])
    """
    table = torch.zeros(len(values), dtype=torch.int64, device=device)
    foreach_add_(list(table.unbind()), values)
    return table


def bits(number: float) -> int:
    """Returns the bits of a float64 as an integer, as a kernel's own floats are fp32.

    >>> hex(bits(1.0))
    '0x3ff0000000000000'
    """
    value: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return value
