"""The recipes of products in 8 and 4 bits: how each operand of each product of a linear layer is rounded.

This is the law, in plain tensor operations. An operand is
M x K, K the dimension that its product sums over. It is cut into blocks, and each is scaled so that its largest value
fits the format. Scales are powers of two, so that scaling rounds nothing, but in "nvfp4". A block that has an infinity
or a NaN becomes NaN as a whole, so that no cast hides one behind its format's largest value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from halfstep.formats import E2M1, E4M3, E5M2, FP32, Format, mix_bits, round_nearest, round_stochastic, saturate
from halfstep.machine import FIRST_CAPABILITY
from halfstep.train.kernels.devices import triton_casts
from halfstep.train.processes.shards import Part

Product = Literal["output", "grad_input", "grad_weight"]
Operand = Literal["a", "b"]
Units = Literal["fp32", "bf16", "own"]
"""What multiplies the rounded operands: "own" are the device's units for the recipe, the others emulate them."""

_ROTATED = 16  # elements that a Hadamard transform mixes
_SIGNS = 0x5C97  # of these elements, before they are mixed; any will do
_INFINITE = 0x7F800000
_BEYOND = 2.0**100  # products of elements and their sums stay far below


@dataclass(frozen=True)
class Cast:
    """How one operand is rounded."""

    elements: Format
    block: tuple[int | None, int | None] = (None, None)  # rows and columns that share a scale; None: all
    in_two_levels: bool = False  # scales are e4m3 beside one in fp32 for the tensor, not powers of two
    stochastic: bool = False
    rotated: bool = False  # by a Hadamard transform of each 16 elements along K


@dataclass(frozen=True)
class Recipe:
    """How the operands of the three products of a linear layer are rounded."""

    casts: Mapping[tuple[Product, Operand], Cast]
    multiple: int  # the layer's sizes must be multiples of this
    on: tuple[int, int] | None = None  # the first CUDA capability with units for it; None: emulated everywhere


@dataclass
class Rounded:
    """A rounded operand; its values are `grid * factor`, and `grid` is exact in bf16.

    `grid` is exact for values of blocks from 2**-126 on: below, bf16 has fewer bits.
    """

    numbers: Tensor  # the elements as numbers, in bf16
    grid: Tensor  # the elements times the scales that change along K, in bf16
    factor: Tensor  # what products are multiplied by, in fp32: (1, 1) or (M, 1)
    decode: Tensor  # a decoding factor for each block, in fp32: what scaled_mm takes
    fmt: Format
    is_power: bool  # whether `factor` is a power of two

    @property
    def values(self) -> Tensor:
        """The values in fp32."""
        return self.grid.float() * self.factor

    @property
    def elements(self) -> Tensor:
        """The elements in their own dtype; a format of 4 bits has none."""
        return self.numbers.to(self.fmt.dtype)


@dataclass
class Coded:
    """A rounded operand as a device's own units take it."""

    elements: Tensor
    decode: Tensor  # a decoding factor for each block, in fp32


def _recipe(
    x: Cast,
    g: Cast,
    *,
    w: Cast | None = None,
    multiple: int = 16,
    mixed: bool = False,
    on: tuple[int, int] | None = None,
) -> Recipe:
    """Returns the recipe that rounds inputs, gradients and weights (as inputs, if not given) so in every product."""
    casts: dict[tuple[Product, Operand], Cast] = {
        ("output", "a"): x,
        ("output", "b"): w or x,
        ("grad_input", "a"): g,
        ("grad_input", "b"): w or x,
        ("grad_weight", "a"): replace(g, rotated=mixed),
        ("grad_weight", "b"): replace(x, rotated=mixed),
    }
    return Recipe(casts, multiple, on)


_FP8 = FIRST_CAPABILITY[E4M3]
_ROW, _MX, _BLOCK = Cast(E4M3, (1, None)), Cast(E4M3, (1, 32)), Cast(E4M3, (1, 128))
_FOUR = Cast(E2M1, (1, 16), in_two_levels=True)

RECIPES: Mapping[str, Recipe] = {
    "fp8": _recipe(Cast(E4M3), Cast(E5M2), on=_FP8),
    "fp8-row": _recipe(_ROW, _ROW, on=_FP8),
    "fp8-mx": _recipe(_MX, _MX, multiple=32, on=(10, 0)),  # scales rounded up, arXiv 2506.08027
    "fp8-block": _recipe(_BLOCK, _BLOCK, w=replace(_BLOCK, block=(128, 128))),  # arXiv 2412.19437
    "nvfp4": _recipe(_FOUR, replace(_FOUR, stochastic=True), w=replace(_FOUR, block=(16, 16)), mixed=True),
}
"""The values of `Plan.products` beside "plan". "nvfp4" is that of arXiv 2509.25149."""


def round_operand(
    x: Tensor, cast: Cast, *, counts: Tensor | None = None, seed: Tensor | None = None, part: Part | None = None
) -> Rounded:
    """Rounds an operand (M, K), or this process's `part` of one, of whole blocks, with the bits that the whole has.

    `counts` (3, int64) has added to it the elements that saturated, those that became 0, and those that were not
    finite. `seed` (0-dim, int64) and the largest value choose the random bits of a stochastic cast: the same on
    every device. Does not sync.
    """
    wide = rotated(x) if cast.rotated else x.float()
    tiles = _tiles(wide, cast.block)
    encode, inner, outer, is_power = (_in_two_levels if cast.in_two_levels else _by_powers)(tiles, cast, part)
    scaled = tiles * encode if is_power else tiles / encode
    saturated = None if is_power else torch.count_nonzero(scaled.abs() > cast.elements.max)
    if cast.stochastic:
        assert seed is not None
        kept = saturate(scaled, cast.elements)
        largest = outer.amax().view(torch.int32).long()  # differs from batch to batch of an accumulation
        numbers = round_stochastic(kept, cast.elements, _random_bits(kept, seed + largest * 0x9E3779B1, part))
    elif is_power:  # then nothing is beyond the format
        numbers = _rounded_(scaled, cast.elements)
    else:
        numbers = round_nearest(saturate(scaled, cast.elements), cast.elements)
    if counts is not None:
        if saturated is not None:
            counts[0] += saturated
        if wide.device.type == "cpu" and bool(encode.isfinite().all()):  # of a CPU, nothing waits
            counts[1] += torch.count_nonzero(wide) - torch.count_nonzero(numbers)
        else:  # zeros of a block that is not finite become NaN
            counts[1] += torch.count_nonzero((tiles != 0) & (numbers == 0))
            counts[2] += wide.numel() - torch.count_nonzero(wide.isfinite())
    low = _elements(numbers, wide).bfloat16()
    grid = low if inner is None else _elements(numbers * inner, wide).bfloat16()
    decode = outer if inner is None else inner * outer
    return Rounded(low, grid, _flat(outer), _flat(decode), cast.elements, is_power)


def code_operand(
    x: Tensor, cast: Cast, *, multiple: int, counts: Sequence[Tensor], parts: Sequence[Part | None] = (None, None)
) -> list[Coded]:
    """Rounds an operand (M, K) for a device's own units, and with a second of `counts` its transpose too.

    What each sums over is filled up with zeros to a `multiple`. `counts`, and `parts` of each, as in `round_operand`.
    Does not sync.
    """
    shared = any(parts) and None in cast.block  # scales, which kernels do not wait for
    kernels = triton_casts(x.device) if x.numel() and not shared else None
    if kernels is not None:
        whole = cast.block == (None, None)
        coded = kernels.cast(x, cast.elements, cast.block[1], counts, whole=whole, multiple=multiple)
        return [Coded(*each) for each in coded]
    filled = (pad(each, (0, -each.shape[1] % multiple)) for each in (x, x.t()))
    each = zip(filled, counts, parts, strict=False)
    rounded = [round_operand(t, cast, counts=lost, part=part) for t, lost, part in each]
    return [Coded(each.elements, each.decode) for each in rounded]


def multiply(a: Rounded, b: Rounded, *, units: Units, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Returns the product of two rounded operands in bf16: sums in fp32, which are rounded once, or not if `wide`.

    `units` are those that multiply, "bf16" or "fp32", which gives the bits of `torch.nn.functional.scaled_mm` on a CPU
    for "fp8" and "fp8-row". Units for bf16 sum in another order: at most some of 10,000 elements are another neighbour
    of the sum.
    """
    factors = (a.factor * b.factor.t()).clamp(max=2.0**127)  # both first, since either alone may overflow the sums
    if units == "fp32" or not (a.is_power and b.is_power):
        out = (a.grid.float() @ b.grid.float().t()) * factors
        out = out if bias is None else out + bias
    elif bias is None:
        out = (a.grid @ b.grid.t()) * factors
    else:
        factors = factors.clamp(min=FP32.smallest_subnormal)
        added = bias / factors
        out = torch.addmm(added.clamp(-_BEYOND, _BEYOND).bfloat16(), a.grid, b.grid.t()) * factors
        out = torch.where(added.abs() > _BEYOND, bias, out)  # beyond bf16, and all that is left of the sum
    return out if wide else out.bfloat16()


def multiply_coded(a: Coded, b: Coded, *, bias: Tensor | None = None, fast: bool = False) -> Tensor:
    """Returns the product of two operands in bf16 by a device's own units; with `fast` sums may have fewer bits."""
    how: dict[str, Any] = {"bias": bias, "output_dtype": torch.bfloat16, "use_fast_accum": fast}
    left, right = a.decode, b.decode.t()
    if left.shape[1] > 1:
        kind, left, right = ScalingType.BlockWise1x32, _in_tiles(left), _in_tiles(b.decode)
        how |= {"swizzle_a": SwizzleType.SWIZZLE_32_4_4, "swizzle_b": SwizzleType.SWIZZLE_32_4_4}
    else:
        kind = ScalingType.TensorWise if left.numel() == right.numel() == 1 else ScalingType.RowWise
    return scaled_mm(a.elements, b.elements.t(), left, kind, right, kind, **how)


def _in_tiles(decode: Tensor) -> Tensor:
    """Returns factors as e8m0 in the order of cuBLAS: tiles of 128 rows and 4 columns, each with rows r, r + 32, ...

    See "1D block scaling factors layout" in the cuBLAS documentation.
    """
    rows, columns = decode.shape
    filled = pad(decode, (0, -columns % 4, 0, -rows % 128))
    tiles = filled.view(-1, 4, 32, filled.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return (tiles.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu).flatten()


Scaling = tuple[Tensor, Tensor | None, Tensor, bool]
"""What multiplies blocks, or divides them if it is no power of two; inner and outer decoding; if it is a power."""


def _by_powers(tiles: Tensor, cast: Cast, part: Part | None) -> Scaling:
    """Scales each block by the largest power of two with which it fits; 2**126 at most, whose inverse is normal."""
    own = _amax(tiles)
    bits = (own if part is None or cast.block[part.dim] is not None else part.largest(own)).view(torch.int32)
    largest = struct.unpack("<i", struct.pack("<f", cast.elements.max))[0]
    exponent = (((largest - bits) >> 23) + 127).clamp(max=253)
    exponent = torch.where(bits == 0, 127, exponent)
    encode, decode = (
        torch.where(bits >= _INFINITE, math.nan, (e << 23).view(torch.float32)) for e in (exponent, 254 - exponent)
    )
    if cast.block[1] is None:
        return encode, None, decode, True
    return encode, decode, torch.ones_like(decode[:1, :, :1]), True


def _in_two_levels(tiles: Tensor, cast: Cast, part: Part | None) -> Scaling:
    """Scales each block by an e4m3 number, and these by one fp32 number for the tensor (arXiv 2509.25149)."""
    own = _amax(tiles)
    whole = own.amax((0, 2), keepdim=True)
    whole = whole if part is None else part.largest(whole)
    outer = (whole / (cast.elements.max * E4M3.max)).clamp(min=FP32.smallest_normal)
    outer = torch.where(whole.isfinite(), outer, math.nan)
    inner = round_nearest(own / (cast.elements.max * outer), E4M3)
    return torch.where(inner == 0, math.inf, inner * outer), inner, outer, False  # whose inverse may be infinite


def _rounded_(values: Tensor, fmt: Format) -> Tensor:
    """Rounds values within the range of a format in place, to nearest even; what is not finite becomes NaN."""
    # Next to 1.5 * 2**23 steps of the format the fp32 grid is that of the format: an addition rounds to it.
    exponents = (values.view(torch.int32) & _INFINITE).view(torch.float32)
    anchor = exponents.clamp_(min=fmt.smallest_normal).mul_(1.5 * 2.0 ** (FP32.fraction_bits - fmt.fraction_bits))
    return values.add_(anchor).sub_(anchor)


def _amax(tiles: Tensor) -> Tensor:
    return tiles.abs().amax(3, keepdim=True).amax(1, keepdim=True)


def _tiles(x: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """Returns a matrix as (blocks of rows, rows, blocks of columns, columns), the last blocks filled up with zeros."""
    rows, columns = (max(size if given is None else given, 1) for given, size in zip(block, x.shape, strict=True))
    short = [(-size % step) if size else step for size, step in zip(x.shape, (rows, columns), strict=True)]
    x = pad(x, (0, short[1], 0, short[0])) if any(short) else x
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _elements(tiles: Tensor, like: Tensor) -> Tensor:
    """Returns tiles as the matrix that they were made of."""
    return tiles.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def _flat(scales: Tensor) -> Tensor:
    return scales[:, 0, :, 0]


def rotated(x: Tensor) -> Tensor:
    """Transforms each 16 elements along K, the last ones filled up with zeros; products of two such are unchanged."""
    x = pad(x.float(), (0, -x.shape[1] % _ROTATED)).contiguous()
    signs = ((_SIGNS >> torch.arange(_ROTATED, dtype=torch.int32, device=x.device)) & 1) * 2 - 1
    y = x.reshape(-1, _ROTATED) * (0.25 * signs)
    for half in (1, 2, 4, 8):  # additions alone, in an order that is the same on every device
        low, high = y.view(-1, 2, half).unbind(1)
        y = torch.stack([low + high, low - high], 1)
    return y.view(x.shape)


def _random_bits(tiles: Tensor, seed: Tensor, part: Part | None) -> Tensor:
    """Returns 32 random bits for each element, by its place in the operand."""
    index = torch.arange(tiles.numel(), dtype=torch.int64, device=tiles.device)
    index = (index if part is None else part.index(index, tiles.shape[2] * tiles.shape[3])).view(tiles.shape)
    return mix_bits(index * 0x9E3779B1 + mix_bits(seed & 0xFFFFFFFF) & 0xFFFFFFFF)
