"""Casts to formats of 8 bits as Triton kernels for CUDA: one read of a matrix writes it and its transpose, both cast.

The bits are those of `round_operand` in `train/cast/recipes.py`, for scales that are powers of two: of the tensor, of a
row, or of 32 elements. Scales of the first two need a pass of their own over the matrix.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.formats import Format

_TILE, _WARPS = 64, 8
_EXACT = {"enable_fp_fusion": False, "num_warps": _WARPS}


# fmt: off
@triton.jit
def _load(x, rows, columns, row_step, column_step, TILE: tl.constexpr):
    """Loads a tile as fp32, zeros outside of the matrix."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = row.to(tl.int64)[:, None] * row_step + column.to(tl.int64)[None, :] * column_step
    value = tl.load(x + at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    return value.to(tl.float32), row, column


@triton.jit
def _amax_kernel(
    x, rows, columns, row_step, column_step, amax, amax_t,
    BY_ROW: tl.constexpr, PAIR: tl.constexpr, TILE: tl.constexpr,
):
    """Writes the bits of the largest magnitude of the matrix, or of each row and each column."""
    value, row, column = _load(x, rows, columns, row_step, column_step, TILE)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BY_ROW:
        tl.atomic_max(amax + row, tl.max(bits, 1), mask=row < rows)
        if PAIR:
            tl.atomic_max(amax_t + column, tl.max(bits, 0), mask=column < columns)
    else:
        tl.atomic_max(amax, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _factors(bits, LARGEST: tl.constexpr):
    """Returns what multiplies values before and after the cast, from the bits of their largest magnitude."""
    exponent = tl.where(bits == 0, 127, tl.minimum(((LARGEST - bits) >> 23) + 127, 253))
    finite = bits < 0x7F800000
    encode = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return encode, tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _cast(
    value, row, column, rows, padded, amax, out, decode, counts,
    SCOPE: tl.constexpr, LARGEST: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr,
):
    """Casts a tile and writes it to `out` (rows, padded), with its decoding factors and what was lost."""
    if SCOPE == "tensor":
        encode, factor = _factors(tl.load(amax), LARGEST)
        tl.store(decode, factor)
    elif SCOPE == "row":
        by_row, factors = _factors(tl.load(amax + row, mask=row < rows, other=0), LARGEST)
        tl.store(decode + row, factors, mask=row < rows)
        encode = by_row[:, None]
    else:
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        by_block, factors = _factors(tl.max(tl.reshape(bits, (TILE, TILE // 32, 32)), 2), LARGEST)
        block = tl.min(column, 0) // 32 + tl.arange(0, TILE // 32)
        at = row.to(tl.int64)[:, None] * (padded // 32) + block[None, :]
        tl.store(decode + at, factors, mask=(row < rows)[:, None] & (block < padded // 32)[None, :])
        encode = tl.reshape(tl.broadcast_to(by_block[:, :, None], (TILE, TILE // 32, 32)), (TILE, TILE))
    scaled = value * encode
    exponents = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(exponents, 2.0 ** (1 - BIAS)) * (1.5 * 2.0 ** (23 - FRACTION))
    number = (scaled + anchor) - anchor  # on the grid of the format
    bits = number.to(tl.int32, bitcast=True)
    normal = ((bits & 0x7FFFFFFF) >> (23 - FRACTION)) - ((127 - BIAS) << FRACTION)
    small = (tl.abs(number) * 2.0 ** (BIAS - 1 + FRACTION)).to(tl.int32)
    code = tl.where(tl.abs(number) < 2.0 ** (1 - BIAS), small, normal) | ((bits >> 24) & 0x80)
    code = tl.where(number == number, code, 0x7F)
    at = row.to(tl.int64)[:, None] * padded + column[None, :]
    tl.store(out + at, code.to(tl.uint8), mask=(row < rows)[:, None] & (column < padded)[None, :])
    flushed = tl.sum(tl.sum(((value != 0) & (number == 0)).to(tl.int32), 1), 0)
    infinite = tl.sum(tl.sum(((value - value) != 0).to(tl.int32), 1), 0)
    tl.atomic_add(counts + 1, flushed.to(tl.int64))
    tl.atomic_add(counts + 2, infinite.to(tl.int64))


@triton.jit
def _cast_kernel(
    x, rows, columns, row_step, column_step, padded, padded_t, amax, amax_t, out, out_t, decode, decode_t, counts,
    counts_t, SCOPE: tl.constexpr, LARGEST: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    PAIR: tl.constexpr, TILE: tl.constexpr,
):
    """Casts a matrix along its rows, and with `PAIR` its transpose along the columns."""
    value, row, column = _load(x, rows, columns, row_step, column_step, TILE)
    _cast(value, row, column, rows, padded, amax, out, decode, counts, SCOPE, LARGEST, FRACTION, BIAS, TILE)
    if PAIR:
        _cast(
            tl.trans(value), column, row, columns, padded_t, amax_t, out_t, decode_t, counts_t, SCOPE, LARGEST,
            FRACTION, BIAS, TILE,
        )
# fmt: on


def cast(
    x: Tensor,
    fmt: Format,
    columns: int | None,
    counts: Sequence[Tensor],
    *,
    whole: bool = False,
    multiple: int = 1,
) -> list[tuple[Tensor, Tensor]]:
    """Casts a matrix to a format of 8 bits along its rows, and, for a second of `counts`, its transpose too.

    `columns` is the number of neighbours in a row that share a scale (32), None for a row, and for all with `whole`.
    The summed dimension of each result is filled up with zeros to a `multiple`. Returns the elements, and their
    decoding factors, with a column for each scale of a row. `counts` are those of `round_operand`.
    """
    scope, pair = "tensor" if whole else "row" if columns is None else "32", len(counts) == 2
    sizes = [tuple(x.shape), (x.shape[1], x.shape[0])][: len(counts)]  # rows of a result, and elements in each
    padded = [inner + -inner % multiple for _, inner in sizes]
    out: list[Tensor] = []
    decode: list[Tensor] = []
    amax: list[Tensor] = []
    for (rows, _), width in zip(sizes, padded, strict=True):
        out.append(x.new_empty((rows, width), dtype=torch.uint8))
        decode.append(
            x.new_empty((1 if whole else rows, 1 if columns is None else width // columns), dtype=torch.float32)
        )
        amax.append(amax[0] if whole and amax else x.new_zeros(decode[-1].shape[0], dtype=torch.int32))
    given = (x, *x.shape, *x.stride())
    grid = triton.cdiv(padded[1] if pair else x.shape[0], _TILE), triton.cdiv(padded[0], _TILE)
    with torch.cuda.device_of(x):
        if scope != "32":
            _amax_kernel[grid](*given, amax[0], amax[-1], BY_ROW=scope == "row", PAIR=pair, TILE=_TILE, **_EXACT)
        _cast_kernel[grid](
            *given,
            *(each for first in (padded, amax, out, decode, counts) for each in (first[0], first[-1])),
            SCOPE=scope,
            LARGEST=struct.unpack("<i", struct.pack("<f", fmt.max))[0],
            FRACTION=fmt.fraction_bits,
            BIAS=1 - int(math.log2(fmt.smallest_normal)),
            PAIR=pair,
            TILE=_TILE,
            **_EXACT,
        )
    return [(each.view(fmt.dtype), factors) for each, factors in zip(out, decode, strict=True)]
