"""Facts of the number formats that halfstep trains in, and exact rounding to each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import FormatError


@dataclass(frozen=True)
class Format:
    """A binary floating-point format and its facts (IEEE 754-2019; OCP 8-bit floating point specification 1.0).

    `bits` counts sign, exponent and fraction; `dtype` is the torch dtype that stores it (TF32 is stored as float32);
    `max` is the largest finite value; `eps` is the distance from 1 to the next value; `has_inf` is whether there are
    infinities (E4M3 has none, and one NaN of each sign).
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

    def __reduce__(self) -> str | tuple[Any, ...]:  # a copy of a known format is the format, which `is` compares
        return (as_format, (self.name,)) if FORMATS.get(self.name) is self else super().__reduce__()

    def __str__(self) -> str:
        return self.name

    def rounds_to_zero(self, value: float) -> bool:
        """Returns whether a nonzero value becomes 0 when it is rounded to the nearest value of the format.

        >>> FP16.rounds_to_zero(2.0**-25), FP16.rounds_to_zero(-3e-8)
        (True, False)
        """
        return 0 < abs(value) <= self.smallest_subnormal / 2

    @property
    def needs_scale(self) -> bool:
        """Whether gradients in the format are lost without a loss scale: its range is narrower than fp32's.

        >>> FP16.needs_scale, BF16.needs_scale
        (True, False)
        """
        return self.exponent_bits < FP32.exponent_bits

    @property
    def usable_eps(self) -> float:
        """The smallest power of ten that is at least 8 times the smallest subnormal.

        An optimizer or a norm can use it as its `eps` in this format: it does not round to 0.

        >>> FP16.usable_eps
        1e-06
        """
        return 10.0 ** math.ceil(math.log10(8 * self.smallest_subnormal))


FP32 = Format("fp32", 32, 8, 23, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, True, torch.float32)
TF32 = Format("tf32", 19, 8, 10, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, True, torch.float32)
BF16 = Format("bf16", 16, 8, 7, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, True, torch.bfloat16)
FP16 = Format("fp16", 16, 5, 10, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True, torch.float16)
E4M3 = Format("e4m3", 8, 4, 3, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 5, 2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True, torch.float8_e5m2)
E2M1 = Format("e2m1", 4, 2, 1, 6.0, 1.0, 0.5, 0.5, False, torch.float4_e2m1fn_x2)
"""For the operands of products alone, with a scale for each few elements; its dtype stores two in a byte."""

FORMATS = {fmt.name: fmt for fmt in (FP32, TF32, BF16, FP16, E4M3, E5M2)}
BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values() if fmt is not TF32}
NARROW = tuple(
    sorted((fmt for fmt in FORMATS.values() if fmt.bits <= 16), key=lambda fmt: (-fmt.bits, fmt.exponent_bits))
)
"""The formats of at most 16 bits, in the order in which reports show them."""
LOW_FORMATS = (BF16, FP16)
"""The formats that levels train in; where the user names none, the first that the device computes fast."""

CASTABLE = (torch.float32, *(fmt.dtype for fmt in LOW_FORMATS))
"""The dtypes that plans cast from and to."""
is_low: Callable[[object], bool] = frozenset(fmt.dtype for fmt in LOW_FORMATS).__contains__
"""Tells whether a dtype is one that levels train in; on hot paths, so without a call of Python's."""
needs_scale: Callable[[object], bool] = frozenset(fmt.dtype for fmt in LOW_FORMATS if fmt.needs_scale).__contains__
"""Tells whether a dtype is that of a low format whose gradients need a loss scale."""

_ASKED = {
    **{name.replace("-", ""): name for name in ("fp8-row", "fp8-mx", "fp8-block", "nvfp4")},
    **{"mxfp8": "fp8-mx", "float8e8m0": "fp8-mx", **dict.fromkeys(("fp8", "float8", "e4m3", "e5m2"), "fp8")},
    **dict.fromkeys(("fp4", "mxfp4", "float4", "e2m1"), "nvfp4"),
}  # by how names of formats begin, the recipe of products
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000  # of the bits of a float32
_WORD = 0xFFFFFFFF


def as_format(value: Format | torch.dtype | str, among: Collection[Format] = FORMATS.values()) -> Format:
    """Returns the Format that a Format, a torch.dtype or a name such as "bf16" stands for.

    Raises:
        FormatError: the value names no known format; the message names those `among` which the caller chooses.

    >>> as_format("bf16").bits
    16
    >>> as_format(torch.float16).name
    'fp16'
    """
    if isinstance(value, Format):
        return value
    found = BY_DTYPE.get(value) if isinstance(value, torch.dtype) else FORMATS.get(str(value))
    if found is None:
        dtypes = ", ".join(str(fmt.dtype) for fmt in among if fmt is not TF32)
        known = f"{', '.join(map(str, among))} or the torch dtypes {dtypes}"
        word = re.sub(r"^torch\.|mixed_?|[- ]", "", str(value).lower())  # "BF16", "16-mixed", "mixed_bfloat16"
        named = getattr(torch, word, getattr(torch, f"{word}16", None))  # "half", "bfloat16", "bfloat"
        near = [fmt for fmt in among if fmt.dtype is named or word.startswith((fmt.name, fmt.name.removeprefix("fp")))]
        hint = f"; did you mean {near[0].name!r}?" if near else for_products(value)
        raise FormatError(f"unknown format {value!r}; expected one of {known}{hint}")
    return found


def for_products(asked: object) -> str:
    """Returns advice for who asks for fp32 or a format that operands of products alone have; nothing for another."""
    name = re.sub(r"^torch\.|[^a-z0-9]", "", str(asked).lower())
    if name in ("fp32", "float32", "float", "32", "32true"):
        return "; for fp32 pass plan='O0' and leave out low"
    word = next((recipe for start, recipe in _ASKED.items() if name.startswith(start)), None)
    bits = 4 if word == "nvfp4" else 8
    return f"; for products in {bits} bits keep low='bf16' and pass products={word!r}" if word else ""


def is_narrow(dtype: torch.dtype) -> bool:
    """Returns whether a dtype is a floating one narrower than fp32, whether or not levels train in it."""
    return dtype.is_floating_point and dtype.itemsize < 4


def bits_of(t: Tensor) -> Tensor:
    """Returns the bits of a tensor as integers of its width, in the same memory."""
    return t.view(_INTEGERS[t.dtype.itemsize])


def count_overflows(before: Tensor, after: Tensor, fmt: Format) -> Tensor:
    """Returns how many finite values of `before` overflowed in rounding to `fmt`, as a 0-dim int64 tensor.

    `after` has the rounded values; both tensors are float32 and have the same shape. A value overflowed if it is more
    than half a rounding step beyond the format's `max`, or became infinite or NaN. Any rounding is allowed:
    `round_nearest`, with or without `saturate` before it, or a cast by torch to the format and back to float32. Does
    not sync.

    >>> values = torch.tensor([1.0, 70000.0, 1e-9, float("inf")])
    >>> count_overflows(values, round_nearest(values, FP16), FP16)
    tensor(1)
    """
    before, after = _float32_values(before), _float32_values(after)
    half_step = 2.0 ** (math.frexp(fmt.max)[1] - 2 - fmt.fraction_bits)
    beyond = (before.abs() > fmt.max + half_step) | ~after.isfinite()
    return (before.isfinite() & beyond).sum()


def saturate(t: Tensor, fmt: Format) -> Tensor:
    """Returns `t` clamped to the finite range of `fmt`, as saturating casts to 8-bit formats do; NaN stays NaN."""
    return t.clamp(-fmt.max, fmt.max)


def round_nearest(t: Tensor, fmt: Format) -> Tensor:
    """Returns the float32 tensor `t` rounded to the nearest values of `fmt`, ties to even, as float32.

    Rounds like IEEE 754 and torch's casts: subnormals are rounded like other values, zero keeps its sign, and NaN stays
    NaN. Values that are half a rounding step or more beyond `max` become infinite. E4M3 has no infinity, so such values
    and infinities become `max`, as in the saturating cast of the OCP 8-bit floating point specification 1.0. To get no
    infinities in E5M2, round `saturate(t, E5M2)`. No gradient flows through.

    Raises:
        FormatError: `t` is not float32.

    >>> round_nearest(torch.tensor([1.0, 3.14159, 70000.0]), BF16)
    tensor([1.0000e+00, 3.1406e+00, 7.0144e+04])
    >>> round_nearest(torch.tensor([3.14159, 70000.0]), E4M3)
    tensor([  3.2500, 448.0000])
    """
    t = _float32_values(t)
    drop = FP32.fraction_bits - fmt.fraction_bits
    if drop == 0:
        return t.clone()
    # No copysign, isnan or isinf, of which torch.compile makes no vector code.
    bits = t.view(torch.int32)
    if fmt.smallest_normal == FP32.smallest_normal:  # beyond `max` the carry makes infinity
        # Half a step less one, plus the last kept bit: carries exactly where nearest-even goes up, into the exponent.
        rounded = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & -(1 << drop)
        return torch.where((bits & _MAGNITUDE) > _INFINITE, bits, rounded).view(torch.float32)  # NaN stays as it is
    # Next to 1.5 * 2**23 steps of `fmt` the float32 grid is that of `fmt`: the addition rounds to it, to even.
    anchor = (bits & _INFINITE).view(torch.float32).clamp(fmt.smallest_normal, fmt.max) * (1.5 * 2.0**drop)
    rounded = (t + anchor) - anchor
    beyond = torch.where(rounded.abs() > fmt.max, rounded * FP32.max, rounded) if fmt.has_inf else None
    rounded = saturate(rounded, fmt) if beyond is None else beyond
    return ((rounded.view(torch.int32) & _MAGNITUDE) | (bits & ~_MAGNITUDE)).view(torch.float32)


def round_stochastic(t: Tensor, fmt: Format, noise: Tensor) -> Tensor:
    """Returns the float32 tensor `t` rounded to values of a `fmt` narrower in range than float32, as float32.

    A value between two of the format becomes the farther from 0 with a probability of its distance from the other.
    `noise` has 32 random bits for each (int64, see `mix_bits`). `t` must lie in the finite range of `fmt`; NaN stays.

    >>> noise = mix_bits(torch.arange(8))
    >>> round_stochastic(torch.full((8,), 2.25), E2M1, noise)
    tensor([2., 2., 2., 3., 3., 2., 2., 2.])
    """
    bits, cut = t.view(torch.int32), (1 << (FP32.fraction_bits - fmt.fraction_bits)) - 1
    size = (bits & _MAGNITUDE).view(torch.float32)
    lifted = torch.where(size < fmt.smallest_normal, fmt.smallest_normal, 0.0)  # to where a step is that of subnormals
    raised = (size + lifted).view(torch.int32) + (noise & cut).to(torch.int32)
    rounded = (raised & ~cut).view(torch.float32) - lifted
    rounded = torch.where(size.isnan(), size, rounded)
    return (rounded.view(torch.int32) | (bits & ~_MAGNITUDE)).view(torch.float32)


def mix_bits(x: Tensor) -> Tensor:
    """Returns hashes of 32-bit numbers; int64 holds both. The same on every device, so that random bits are too."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def _float32_values(t: Tensor) -> Tensor:
    if t.dtype != torch.float32:
        raise FormatError(f"rounding expects float32 values, got {t.dtype}; pass t.float() if that loses nothing")
    return t.detach()
