"""The split form of a master weight: a bf16 weight and a 16-bit remainder, which together are exactly one fp32 value.

All functions work on the bits, so that infinities and NaNs survive. No function reads a value on the host.

The bf16 weight of a NaN must be a NaN too. Rounding adds to the bits: it would turn the NaNs with the smallest bits,
just above those of infinity, into infinity, and the NaNs with the largest bits into a zero of the other sign. So
`storable` replaces these NaNs by others.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 0x8000  # half of the last place of the high half
_INFINITY = 0x7F800000
_FIRST_NAN, _LAST_NAN = 0x7F808000, 0x7FFF7FFF  # of those whose rounded high half is a NaN


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bf16 weight and the int16 remainder that `join` turns back into `full`, bit for bit.

    `full` is fp32. The weight is `full` rounded to nearest, ties away from zero; the remainder is the low 16 bits of
    `full`, as a signed number. With ties rounded to even this would be impossible: a tie above an even weight would
    need the remainder +32768. NaNs that `storable` replaces come back as their replacements.

    >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2.0**-8]))
    >>> weight.tolist(), remainder.tolist()
    ([1.0, 1.0078125], [0, -32768])
    """
    bits = storable(full.view(torch.int32))
    return _high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 value of a bf16 `weight` and its int16 `remainder`.

    `split` returns no negative remainder with a zero. Where code has written a zero past a remainder (through
    `p.data`, such as a mask), the sum of the two would be a NaN: the value is the zero.

    >>> join(*split(torch.tensor([3.14159274]))), join(torch.zeros(1).bfloat16(), torch.tensor([-1], dtype=torch.int16))
    (tensor([3.1416]), tensor([0.]))
    """
    bits = weight.view(torch.int16)  # a comparison of numbers would take subnormals for zeros where they are flushed
    least = (bits & 0x7FFF).neg_().clamp_(min=-1).bitwise_left_shift_(15)  # 0 beside a zero; a third of `where`'s time
    written = torch.maximum(remainder, least)
    return bits.to(torch.int32).bitwise_left_shift_(16).add_(written).view(torch.float32)


def round_half_away(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the fp32 tensor `full` rounded to the low `dtype`: ties away from zero in bf16, to even in fp16.

    In bf16 this is the weight that `split` returns, so that both kinds of master train alike. It differs from torch's
    cast only on exact ties above an even weight (1 value in 131,072), by one unit in the last place.

    >>> tie = torch.tensor([1.0 + 2.0**-8])
    >>> round_half_away(tie, torch.bfloat16).item(), tie.bfloat16().item()
    (1.0078125, 1.0)
    """
    if dtype is not torch.bfloat16:
        return full.to(dtype)
    return _high_half(storable(full.view(torch.int32))).view(torch.bfloat16)


def storable(bits: Tensor) -> Tensor:
    """Returns the int32 `bits` of fp32 values, with some NaNs replaced so that every NaN rounds to a NaN in bf16."""
    # Fewer are not possible, since there are 131,070 more fp32 NaNs than pairs of a NaN weight and a remainder.
    magnitude = bits & 0x7FFFFFFF
    is_nan = (magnitude - _INFINITY).clamp_(0, 1)
    held = magnitude.clamp(max=_LAST_NAN).clamp_(min=is_nan.mul_(_FIRST_NAN))
    return held.sub_(magnitude).add_(bits)  # with the sign of before


def _high_half(bits: Tensor) -> Tensor:
    return (bits + _HALF).bitwise_right_shift_(16).to(torch.int16)
