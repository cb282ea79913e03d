"""The split form of a master weight: a bf16 weight and 16 more bits, together exactly one fp32 value.

All functions work on the bits, so that infinities and NaNs survive, and none reads a value on the host.

Rounding to nearest would turn the NaNs next to infinity into infinity, and the NaNs of largest magnitude into a zero of
the other sign. A NaN weight must be NaN in the low format too, so `storable` replaces these NaNs by others.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 0x8000  # half of the last place of the high half
_INFINITY = 0x7F800000
_FIRST_NAN, _LAST_NAN = 0x7F808000, 0x7FFF7FFF  # of those whose rounded high half is a NaN


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bf16 weight and the int16 remainder that `join` turns back into `full`, bit for bit.

    `full` is fp32; only the NaNs that `storable` replaces do not come back. The weight is `full` rounded to nearest,
    ties away from zero; the remainder is the low 16 bits of `full`, signed. Round-to-even has no such inverse: the tie
    above an even weight would need the remainder +32768.

    >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2.0**-8]))
    >>> weight.tolist(), remainder.tolist()
    ([1.0, 1.0078125], [0, -32768])
    """
    bits = storable(full.view(torch.int32))
    return _high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 value of a bf16 `weight` and its int16 `remainder`.

    >>> join(*split(torch.tensor([3.14159274])))
    tensor([3.1416])
    """
    high = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder).view(torch.float32)


def round_half_away(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns fp32 `full` rounded to the low `dtype` as weights are: ties away from zero in bf16, to even in fp16.

    In bf16 this is the weight of `split`, so that both kinds of master train alike. It differs from torch's cast only
    on exact ties above an even weight (1 value in 131,072), by one unit in the last place.

    >>> tie = torch.tensor([1.0 + 2.0**-8])
    >>> round_half_away(tie, torch.bfloat16).item(), tie.bfloat16().item()
    (1.0078125, 1.0)
    """
    if dtype is not torch.bfloat16:
        return full.to(dtype)
    return _high_half(storable(full.view(torch.int32))).view(torch.bfloat16)


def storable(bits: Tensor) -> Tensor:
    """Returns the int32 `bits` of fp32 values; a NaN that would not round to a NaN becomes the nearest that does.

    Magnitudes of 0x7F800001 to 0x7F807FFF become 0x7F808000; those from 0x7FFF8000 on, which include a GPU's own
    0x7FFFFFFF, become 0x7FFF7FFF. These are 131,070 of all 2**32 patterns, exactly the number by which NaNs outnumber
    the pairs of a NaN weight and a remainder. Uses integer arithmetic, which is faster than comparisons.
    """
    magnitude = bits & 0x7FFFFFFF
    is_nan = (magnitude - _INFINITY).clamp_(0, 1)
    held = magnitude.clamp(max=_LAST_NAN).clamp_(min=is_nan.mul_(_FIRST_NAN))
    return held.sub_(magnitude).add_(bits)  # with the sign of before


def _high_half(bits: Tensor) -> Tensor:
    return (bits + _HALF).bitwise_right_shift_(16).to(torch.int16)
