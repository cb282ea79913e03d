"""The split form of a master weight: a bf16 weight and 16 more bits, together exactly one fp32 value.

All functions work on the bits, so that infinities and every NaN survive, and none reads a value on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 0x8000  # half of the last place of the high half


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bf16 weight and the int16 remainder that `join` turns back into `full`, bit for bit.

    The weight is `full` rounded to nearest, ties away from zero; the remainder is the low 16 bits of `full`, signed.
    Round-to-even has no such inverse: the tie above an even weight would need the remainder +32768. `full` is fp32.

    >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2.0**-8]))
    >>> weight.tolist(), remainder.tolist()
    ([1.0, 1.0078125], [0, -32768])
    """
    bits = full.view(torch.int32)
    return _high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 value of a bf16 `weight` and its int16 `remainder`.

    >>> join(*split(torch.tensor([3.14159274])))
    tensor([3.1416])
    """
    high = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder).view(torch.float32)


def round_half_away(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns fp32 `full` rounded to the low `dtype` as a master is: ties away from zero in bf16, to even in fp16.

    In bf16 this is the weight of `split`, so that both kinds of master train alike. It differs from torch's cast on
    exact ties above an even weight only (1 value in 131,072), by one place.

    >>> tie = torch.tensor([1.0 + 2.0**-8])
    >>> round_half_away(tie, torch.bfloat16).item(), tie.bfloat16().item()
    (1.0078125, 1.0)
    """
    if dtype is not torch.bfloat16:
        return full.to(dtype)
    return _high_half(full.view(torch.int32)).view(torch.bfloat16)


def _high_half(bits: Tensor) -> Tensor:
    return (bits + _HALF).bitwise_right_shift_(16).to(torch.int16)
