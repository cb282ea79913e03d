"""Facts of the number formats that halfstep trains in, and exact rounding to each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfstep.errors import FormatError


@dataclass(frozen=True)
class Format:
    """A binary floating-point format and its facts (IEEE 754-2019; OCP 8-bit floating point specification 1.0).

    `bits` counts sign, exponent and fraction; `dtype` is the torch dtype that stores it (TF32 is stored as float32);
    `max`, `smallest_normal` and `smallest_subnormal` are positive values; `eps` is the distance from 1 to the next value.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_inf: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name


FP32 = Format("fp32", 32, 8, 23, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, True, torch.float32)
TF32 = Format("tf32", 19, 8, 10, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, True, torch.float32)
BF16 = Format("bf16", 16, 8, 7, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, True, torch.bfloat16)
FP16 = Format("fp16", 16, 5, 10, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True, torch.float16)
E4M3 = Format("e4m3", 8, 4, 3, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 5, 2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True, torch.float8_e5m2)

FORMATS = {fmt.name: fmt for fmt in (FP32, TF32, BF16, FP16, E4M3, E5M2)}
_BY_DTYPE = {fmt.dtype: fmt for fmt in (FP32, BF16, FP16, E4M3, E5M2)}


def as_format(value: Format | torch.dtype | str) -> Format:
    """Returns the Format that a Format, a torch.dtype or a name such as "bf16" stands for.

    Raises:
        FormatError: the value names no known format.

    >>> as_format("bf16").bits
    16
    >>> as_format(torch.float16).name
    'fp16'
    """
    if isinstance(value, Format):
        return value
    found = _BY_DTYPE.get(value) if isinstance(value, torch.dtype) else FORMATS.get(value)
    if found is None:
        raise FormatError(
            f"unknown format {value!r}; known are {', '.join(FORMATS)} and the torch dtypes {', '.join(map(str, _BY_DTYPE))}"
        )
    return found
