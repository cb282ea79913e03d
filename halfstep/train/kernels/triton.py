"""The read pass and the update as Triton kernels for CUDA: a launch covers many tensors through tables of addresses.

Importing this file imports Triton. The arithmetic and its order are those of `train/optim/laws.py`, with every
operation rounded separately: launches forbid contraction, and division and square root are correctly rounded. Kernels
are not specialised on hyper-parameters, so that a scheduler which changes them causes no compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.train.kernels.batch import (
    GROUP,
    NOTHING,
    Batch,
    Gradients,
    Judged,
    Options,
    Scratch,
    Wanted,
    is_dense,
)
from halfstep.train.kernels.devices import KINDS, Launch, Launches, Tables, addresses, bits

_Tensors = tuple[Tensor, Tensor, int, Tensor]  # owners, table, number of tensors, gradients

# Elements a program: on a Hopper GPU 86 KB of an update, or 48 KB of a read of bf16, are in flight a multiprocessor. In
# an update a thread has 4 neighbours, 16 bytes of fp32: with more, fp32 and 16-bit elements would lie in the threads in
# different ways and meet in shared memory, behind barriers.
_UPDATE_BLOCK, _UPDATE_WARPS = 1024, 8
_READ_BLOCK, _READ_WARPS = 4096, 4
_KEPT_REGISTERS = 80  # of an update with codes: without a limit, ptxas uses 48 or 64 and puts the rest on a stack
_EXACT = {"enable_fp_fusion": False}  # a * b + c rounds twice, as separate tensor operations do


# Lists of arguments are long: kernels see no objects.
# fmt: off
@triton.jit
def _pointer(address, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _load_as(address, start, at, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.load(_pointer(address, start, TYPE, ALIGNED) + at, mask=mask)


@triton.jit
def _store_as(address, start, at, value, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    tl.store(_pointer(address, start, TYPE, ALIGNED) + at, value.to(TYPE), mask=mask)


@triton.jit
def _load(address, start, at, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads elements of a format as fp32; the bits of a bf16 value are the high half of its fp32 bits."""
    if KIND == "bf16":
        value = (_load_as(address, start, at, mask, tl.int16, ALIGNED).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        value = _load_as(address, start, at, mask, tl.float16, ALIGNED).to(tl.float32)
    else:
        value = _load_as(address, start, at, mask, tl.float32, ALIGNED)
    return value


@triton.jit
def _load_weight(weight, extra, start, at, mask, LAYOUT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads the fp32 values to update: the weight itself, its copy, or both parts of a split weight."""
    if LAYOUT == "copy":
        value = _load(extra, start, at, mask, "fp32", ALIGNED)
    elif LAYOUT == "split":
        high = _load_as(weight, start, at, mask, tl.int16, ALIGNED)
        rest = _load_as(extra, start, at, mask, tl.int16, ALIGNED).to(tl.int32)
        rest = tl.where(((high.to(tl.int32) & 0x7FFF) == 0) & (rest < 0), 0, rest)  # a zero that was written past it
        value = ((high.to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
    else:
        value = _load(weight, start, at, mask, KIND, ALIGNED)
    return value


@triton.jit
def _storable(bits):
    """Returns the bits of fp32 values; a NaN that would round to a zero in bf16 becomes the nearest NaN that does not.

    `storable` in train/optim/masters.py also handles NaNs whose bits are next to those of infinity. They do not occur
    here, as a GPU's arithmetic makes every NaN 0x7FFFFFFF.
    """
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7FFF7FFF, bits - (magnitude - 0x7FFF7FFF), bits)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(index, row, count):
    """Returns what `random_bits` in train/optim/moments.py multiplies by a last factor, of each element (uint32)."""
    step, number = tl.load(row + 4 * count).to(tl.pointer_type(tl.float32)), tl.load(row + 10 * count)
    updates = tl.load(step).to(tl.int64).to(tl.uint32)
    key = _mix(updates * 0x85EBCA77 ^ number.to(tl.uint32) * 0xC2B2AE3D)
    x = index * 0x9E3779B1 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return x ^ (x >> 15)


@triton.jit
def _groups(row, count, start, left, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a block's first element and group, where its elements (n, 64) and groups lie from there, and masks.

    `start` is a number of elements, `left` one of groups, as they share a base (optim/moments.py). The last result
    is the index of each element in the whole tensor. Not MASKED, the block and its groups are full, and callers drop
    the masks, as Triton 3.6 cannot return None. Places have 32 bits, since 64 take more registers.
    """
    length, stride = tl.load(row + 12 * count), tl.load(row + 13 * count)
    first = start // 64
    each = (length + 63) // 64  # groups of a slice
    slices = first // each
    column = first - slices * each
    near, lane = tl.arange(0, BLOCK // 64)[:, None], tl.arange(0, 64)[None, :]
    over = (column.to(tl.uint32) + near.to(tl.uint32)) // each.to(tl.uint32)
    begun = (tl.load(row + 11 * count) + slices * stride + column * 64).to(tl.uint32)
    index = begun + over * (stride - each * 64).to(tl.uint32) + (near * 64 + lane).to(tl.uint32)
    if MASKED:
        start = slices * length + column * 64
        lacking = (each * 64 - length).to(tl.int32)  # of a slice's last group
        at = near * 64 + lane - over.to(tl.int32) * lacking
        present = near < tl.minimum(left, BLOCK // 64).to(tl.int32)
        last = column.to(tl.uint32) + near.to(tl.uint32) - over * each.to(tl.uint32) == each.to(tl.uint32) - 1
        mask = present & ((lane < 64 - lacking) | (last == 0))
    else:
        at, present, mask = near * 64 + lane, near, near
    return start, first, at, mask, near, present, index


@triton.jit
def _elements(row, count, start, left, KEPT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns what `_groups` does; where a block has no groups, only its first element, places and mask."""
    if KEPT:
        start, first, at, mask, group, present, index = _groups(row, count, start, left, MASKED, BLOCK)
    else:
        first, at = start, tl.arange(0, BLOCK)
        mask, group, present, index = at < left, at, at, at
    return start, first, at, mask, group, present, index


@triton.jit
def _block(owners, table, count, grads, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the tensor of this program's block, its row of the table, the block's start, what is left, gradient."""
    tensor = tl.load(owners + tl.program_id(0))
    row = table + tensor
    start = (tl.program_id(0) - tl.load(row)) * BLOCK
    return tensor, row, start, tl.load(row + count) - start // UNIT, tl.load(grads + tensor)


@triton.jit
def _is_full(row, count, left, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns whether a block of an update has all its elements, without gaps."""
    full = left >= BLOCK // UNIT
    if UNIT > 1:
        full = full & (tl.load(row + 12 * count) % UNIT == 0)
    return full


@triton.jit
def _load_state(
    state, base, start, at, mask, first, group, present, WIDTH: tl.constexpr, SIGNED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Loads a state as fp32 from what is kept of it."""
    if WIDTH == "8bit":
        if SIGNED:
            code = _load_as(state, start, at, mask, tl.int8, ALIGNED).to(tl.int32)
        else:
            code = _load_as(state, start, at, mask, tl.uint8, ALIGNED).to(tl.int32)
        least = _load_as(base, first, group, present, tl.int16, False).to(tl.int32)
        magnitude = tl.where(code < 0, -code, code)
        bits = tl.where(least >= 0, (magnitude + least) << 19, (magnitude - 1 - least) << 20)
        value = tl.where(magnitude > 0, bits, 0).to(tl.float32, bitcast=True)
        value = tl.where(code < 0, value * -1.0, value)
    elif WIDTH == "bf16":
        value = _load(state, start, at, mask, "bf16", ALIGNED)
    else:
        value = _load(state, start, at, mask, "fp32", ALIGNED)
    return value


@triton.jit
def _store_rounded(address, start, at, value, mask, random, ALIGNED: tl.constexpr):
    """Stores bf16 values, rounded stochastically by the upper 16 of 32 random bits."""
    bits = value.to(tl.int32, bitcast=True)
    added = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0, (random >> 16).to(tl.int32))
    _store_as(address, start, at, (bits + added) >> 16, mask, tl.int16, ALIGNED)


@triton.jit
def _store_state(
    state, base, start, at, value, mask, first, group, present, random, WIDTH: tl.constexpr, SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Stores a state as `encode` and `to_bf16` in train/optim/moments.py do, by 32 random bits."""
    if WIDTH == "full":
        _store_as(state, start, at, value, mask, tl.float32, ALIGNED)
    elif WIDTH == "bf16":
        _store_rounded(state, start, at, value, mask, random, ALIGNED)
    else:
        if mask is not None:
            value = tl.where(mask, value, 0.0)
        bits = value.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
        if STOCHASTIC:
            fine = (magnitude + (random >> 13).to(tl.int32)) >> 19
            first_bits = tl.where(tl.arange(0, 64)[None, :] == 0, (random >> 12 & 1).to(tl.int32), 0)
            coarse = (fine + tl.max(first_bits, axis=1, keep_dims=True)) >> 1
        else:
            fine = (magnitude + 0x40000) >> 19
            coarse = (magnitude + 0x80000) >> 20
        if SIGNED:
            most, smallest, counts = 127, 0, magnitude >= 0x10000
        else:
            most, smallest, counts = 255, 1, magnitude > 0
        least = tl.min(tl.where(counts, fine, 1 << 30), axis=1, keep_dims=True)
        near = tl.max(fine, axis=1, keep_dims=True) - least < most
        rounded = tl.where(near, fine, coarse)
        least = tl.maximum(tl.max(rounded, axis=1, keep_dims=True) - most, 0)
        code = tl.where(magnitude > 0, tl.maximum(rounded - least, smallest), 0)
        if SIGNED:
            _store_as(state, start, at, tl.where(bits < 0, -code, code), mask, tl.int8, ALIGNED)
        else:
            _store_as(state, start, at, code, mask, tl.uint8, ALIGNED)
        _store_as(base, first, group, tl.where(near, least, -1 - least), present, tl.int16, False)


@triton.jit
def _store_weight(
    weight, extra, start, at, value, mask, index, row, count, LAYOUT: tl.constexpr, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Stores the weight in its format, rounded at random or half away from zero in bf16, and its copy or remainder."""
    if ROUNDS:
        _store_rounded(weight, start, at, value, mask, _random_bits(index, row, count) * 0x85EBCA77, ALIGNED)
    elif KIND == "bf16":
        bits = _storable(value.to(tl.int32, bitcast=True))
        _store_as(weight, start, at, (bits + 0x8000) >> 16, mask, tl.int16, ALIGNED)
        if LAYOUT == "split":
            _store_as(extra, start, at, bits, mask, tl.int16, ALIGNED)
    elif KIND == "fp16":
        _store_as(weight, start, at, value, mask, tl.float16, ALIGNED)
    else:
        _store_as(weight, start, at, value, mask, tl.float32, ALIGNED)
    if LAYOUT == "copy":
        _store_as(extra, start, at, value, mask, tl.float32, ALIGNED)


@triton.jit
def _gradient(
    grad, start, at, mask, factor, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    value = _load(grad, start, at, mask, GRAD, ALIGNED)
    if SCALED:
        value = value * tl.load(factor)
    if MAXIMIZE:
        value = value * -1.0  # a minus sign would be 0 - value, which loses the sign of zero
    return value


@triton.jit
def _double(bits):
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _power(base, exponent):
    """Returns a float64 raised to an integer, by squaring; the error is far too small to show in fp32."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


# A launch has a table of 8 rows, with a number for each of `count` tensors: its first block, its size, and the
# addresses of weight, extra, step count, and up to three states. With codes or random bits it has 14: the addresses of
# two bases, the number of the parameter, index of its first element, elements of a slice here and in the whole tensor.


@triton.jit(do_not_specialize=["table", "count", "found", "lr_tensor", "lr", "beta1", "beta2", "weight_decay", "out"])
def _corrections_kernel(
    table, count: tl.int64, found, lr_tensor, lr: tl.int64, beta1: tl.int64, beta2: tl.int64, weight_decay: tl.int64,
    out, LR_TENSOR: tl.constexpr, MEANS: tl.constexpr,
):
    """Counts up each tensor's step t and writes 1 - lr * weight_decay, lr / (1 - beta1^t) and sqrt(1 - beta2^t).

    With MEANS, 1 - beta1^t in place of the second.
    """
    # Numbers are passed as the bits of a float64, because the floats that a kernel takes are fp32.
    if tl.load(found) == 0:
        tensor = tl.program_id(0)
        place = tl.load(table + 4 * count + tensor).to(tl.pointer_type(tl.float32))
        step = tl.load(place) + 1.0
        tl.store(place, step)
        if LR_TENSOR:
            rate = tl.load(lr_tensor).to(tl.float64)
        else:
            rate = _double(lr)
        decay = 1.0 - rate * _double(weight_decay)
        size = 1.0 - _power(_double(beta1), step.to(tl.int64))
        if not MEANS:
            size = rate / size
        root = tl.sqrt(1.0 - _power(_double(beta2), step.to(tl.int64)))
        tl.store(out + 3 * tensor, decay.to(tl.float32))
        tl.store(out + 3 * tensor + 1, size.to(tl.float32))
        tl.store(out + 3 * tensor + 2, root.to(tl.float32))


@triton.jit
def _adam_block(
    row, count, grad, start, left, factor, decay, size, root, beta1, rest1, beta2, rest2, eps, weight_decay,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, NEAREST: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):
    KEPT: tl.constexpr = ROUNDS or WIDTH != "full"
    start, first, at, mask, group, present, index = _elements(row, count, start, left, KEPT, MASKED, BLOCK)
    if not MASKED:
        mask, present = None, None
    weight, extra = tl.load(row + 2 * count), tl.load(row + 3 * count)
    mean, square = tl.load(row + 5 * count), tl.load(row + 6 * count)
    g = _gradient(grad, start, at, mask, factor, GRAD, SCALED, MAXIMIZE, ALIGNED)
    w = _load_weight(weight, extra, start, at, mask, LAYOUT, KIND, ALIGNED)
    if KEPT:
        base1, base2 = tl.load(row + 8 * count), tl.load(row + 9 * count)
    else:
        base1, base2, random1, random2 = None, None, None, None
    m = _load_state(mean, base1, start, at, mask, first, group, present, WIDTH, True, ALIGNED)
    v = _load_state(square, base2, start, at, mask, first, group, present, WIDTH, False, ALIGNED)
    if DECOUPLED:
        w = w * decay
    else:
        g = tl.where(weight_decay != 0, g + w * weight_decay, g)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g
    if AMSGRAD:
        peak = tl.load(row + 7 * count)
        highest = _load(peak, start, at, mask, "fp32", ALIGNED)
        highest = tl.where((v > highest) | (v != v), v, highest)
        _store_as(peak, start, at, highest, mask, tl.float32, ALIGNED)
    else:
        highest = v
    w = w - tl.div_rn(m, tl.div_rn(tl.sqrt_rn(highest), root) + eps) * size
    if KEPT:  # late: fewer registers
        random = _random_bits(index, row, count)
        random1, random2 = random * 0x846CA68B, random * 0xC2B2AE3D
    _store_weight(weight, extra, start, at, w, mask, index, row, count, LAYOUT, KIND, ROUNDS, ALIGNED)
    _store_state(mean, base1, start, at, m, mask, first, group, present, random1, WIDTH, True, not NEAREST, ALIGNED)
    _store_state(square, base2, start, at, v, mask, first, group, present, random2, WIDTH, False, True, ALIGNED)


@triton.jit(
    do_not_specialize=[
        "owners", "table", "count", "grads", "corrections", "found", "factor", "beta1", "rest1", "beta2", "rest2",
        "eps", "weight_decay",
    ]
)
def _adam_kernel(
    owners, table, count: tl.int64, grads, corrections, found, factor,
    beta1: tl.float32, rest1: tl.float32, beta2: tl.float32, rest2: tl.float32, eps: tl.float32,
    weight_decay: tl.float32,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, NEAREST: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    UNIT: tl.constexpr = 64 if ROUNDS or WIDTH != "full" else 1
    if tl.load(found) == 0:
        tensor, row, start, left, grad = _block(owners, table, count, grads, UNIT, BLOCK)
        decay = tl.load(corrections + 3 * tensor)
        size = tl.load(corrections + 3 * tensor + 1)
        root = tl.load(corrections + 3 * tensor + 2)
        if _is_full(row, count, left, UNIT, BLOCK):
            _adam_block(
                row, count, grad, start, left, factor, decay, size, root, beta1, rest1, beta2, rest2, eps, weight_decay,
                LAYOUT, KIND, GRAD, SCALED, MAXIMIZE, AMSGRAD, DECOUPLED, WIDTH, ROUNDS, NEAREST, ALIGNED, False, BLOCK,
            )
        else:
            PART: tl.constexpr = BLOCK // 4 if UNIT > 1 else BLOCK  # less takes fewer registers
            for part in range(BLOCK // PART):
                _adam_block(
                    row, count, grad, start + part * PART, left - part * PART // UNIT, factor, decay, size, root, beta1,
                    rest1, beta2, rest2, eps, weight_decay, LAYOUT, KIND, GRAD, SCALED, MAXIMIZE, AMSGRAD, DECOUPLED,
                    WIDTH, ROUNDS, NEAREST, ALIGNED, True, PART,
                )


@triton.jit
def _sgd_block(
    row, count, grad, start, left, factor, lr, momentum, weight_decay, rest1, beta2, rest2, decay,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, LION: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    NEAREST: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):
    KEPT: tl.constexpr = ROUNDS or WIDTH != "full"
    start, first, at, mask, group, present, index = _elements(row, count, start, left, KEPT, MASKED, BLOCK)
    if not MASKED:
        mask, present = None, None
    weight, extra, buffer = tl.load(row + 2 * count), tl.load(row + 3 * count), tl.load(row + 5 * count)
    g = _gradient(grad, start, at, mask, factor, GRAD, SCALED, MAXIMIZE, ALIGNED)
    w = _load_weight(weight, extra, start, at, mask, LAYOUT, KIND, ALIGNED)
    if KEPT:
        base, random = tl.load(row + 8 * count), _random_bits(index, row, count) * 0x846CA68B
    else:
        base, random = None, None
    if LION:
        held = _load_state(buffer, base, start, at, mask, first, group, present, WIDTH, True, ALIGNED)
        mixed = held * momentum + g * rest1
        held = held * beta2 + g * rest2
        _store_state(
            buffer, base, start, at, held, mask, first, group, present, random, WIDTH, True, not NEAREST, ALIGNED
        )
        w = w * decay
        g = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, tl.where(mixed == 0, 0.0, mixed)))  # a NaN stays one
    else:
        g = tl.where(weight_decay != 0, g + w * weight_decay, g)
    if MOMENTUM and not LION:
        held = _load_state(buffer, base, start, at, mask, first, group, present, WIDTH, True, ALIGNED)
        held = held * momentum + g
        _store_state(
            buffer, base, start, at, held, mask, first, group, present, random, WIDTH, True, not NEAREST, ALIGNED
        )
        if NESTEROV:
            g = g + held * momentum
        else:
            g = held
    _store_weight(weight, extra, start, at, w - g * lr, mask, index, row, count, LAYOUT, KIND, ROUNDS, ALIGNED)


@triton.jit(
    do_not_specialize=[
        "owners", "table", "count", "grads", "found", "factor", "lr_tensor", "lr", "momentum", "weight_decay", "rest1",
        "beta2", "rest2", "lr_bits", "decay_bits",
    ]
)
def _sgd_kernel(
    owners, table, count: tl.int64, grads, found, factor, lr_tensor,
    lr: tl.float32, momentum: tl.float32, weight_decay: tl.float32, rest1: tl.float32, beta2: tl.float32,
    rest2: tl.float32, lr_bits: tl.int64, decay_bits: tl.int64,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, LION: tl.constexpr, LR_TENSOR: tl.constexpr, WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr, NEAREST: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """SGD; with LION its update, of which `momentum` is beta1, and weight decay is of the weight."""
    UNIT: tl.constexpr = 64 if ROUNDS or WIDTH != "full" else 1
    if tl.load(found) == 0:
        _tensor, row, start, left, grad = _block(owners, table, count, grads, UNIT, BLOCK)
        rate = lr
        if LR_TENSOR:
            rate = tl.load(lr_tensor).to(tl.float32)
        if LION:  # as the law: in float64
            if LR_TENSOR:
                exact = tl.load(lr_tensor).to(tl.float64)
            else:
                exact = _double(lr_bits)
            decay = (1.0 - exact * _double(decay_bits)).to(tl.float32)
        else:
            decay = 1.0
        if _is_full(row, count, left, UNIT, BLOCK):
            _sgd_block(
                row, count, grad, start, left, factor, rate, momentum, weight_decay, rest1, beta2, rest2, decay, LAYOUT,
                KIND, GRAD, SCALED, MAXIMIZE, MOMENTUM, NESTEROV, LION, WIDTH, ROUNDS, NEAREST, ALIGNED, False, BLOCK,
            )
        else:
            PART: tl.constexpr = BLOCK // 4 if UNIT > 1 else BLOCK
            for part in range(BLOCK // PART):
                _sgd_block(
                    row, count, grad, start + part * PART, left - part * PART // UNIT, factor, rate, momentum,
                    weight_decay, rest1, beta2, rest2, decay, LAYOUT, KIND, GRAD, SCALED, MAXIMIZE, MOMENTUM, NESTEROV,
                    LION, WIDTH, ROUNDS, NEAREST, ALIGNED, True, PART,
                )


@triton.jit
def _whole_block(  # noqa: C901  # two laws, before and after their norms
    row, count, grad, tensor, start, left, corrections, factor, norms, rates, beta1, rest1, beta2, rest2, eps,
    weight_decay, LAMB: tl.constexpr, APPLY: tl.constexpr, INSIDE: tl.constexpr, LARGEST: tl.constexpr,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):
    start, _first, at, mask, _group, _present, index = _elements(row, count, start, left, ROUNDS, MASKED, BLOCK)
    if not MASKED:
        mask = None
    weight, extra, mean, square = (
        tl.load(row + 2 * count), tl.load(row + 3 * count), tl.load(row + 5 * count), tl.load(row + 6 * count)
    )
    size, root = tl.load(corrections + 3 * tensor + 1), tl.load(corrections + 3 * tensor + 2)
    if LAMB or APPLY:
        w = _load_weight(weight, extra, start, at, mask, LAYOUT, KIND, ALIGNED)
        m = _load(mean, start, at, mask, "fp32", ALIGNED)
    if not (LAMB and APPLY):
        g = _gradient(grad, start, at, mask, factor, GRAD, SCALED, False, ALIGNED)
    if LAMB:
        v = _load(square, start, at, mask, "fp32", ALIGNED)
        if not APPLY:
            if INSIDE:
                g = tl.where(weight_decay != 0, g + w * weight_decay, g)
            m = m * beta1 + g * rest1
            v = v * beta2 + (g * g) * rest2
            _store_as(mean, start, at, m, mask, tl.float32, ALIGNED)
            _store_as(square, start, at, v, mask, tl.float32, ALIGNED)
        u = tl.div_rn(tl.div_rn(m, size), tl.div_rn(tl.sqrt_rn(v), root) + eps)
        if not INSIDE:
            u = tl.where(weight_decay != 0, u + w * weight_decay, u)
    elif APPLY:
        divisor = tl.load(rates + 2 * tensor + 1)
        if INSIDE:
            m = m * beta1 + (tl.div_rn(g, divisor) + w * weight_decay) * rest1
            u = tl.div_rn(m, size)
        else:
            m = m * beta1 + g * rest1
            u = tl.div_rn(tl.div_rn(m, size), divisor) + w * weight_decay
        _store_as(mean, start, at, m, mask, tl.float32, ALIGNED)
    else:
        w, u = g, g
    if APPLY:
        w = w - u * tl.load(rates + 2 * tensor)
        _store_weight(weight, extra, start, at, w, mask, index, row, count, LAYOUT, KIND, ROUNDS, ALIGNED)
    else:
        if MASKED:
            w, u = tl.where(mask, w, 0.0), tl.where(mask, u, 0.0)
        w, u = tl.ravel(w).to(tl.float64), tl.ravel(u).to(tl.float64)
        place = norms + 2 * tl.program_id(0)
        if LARGEST:
            tl.store(place, tl.max(tl.abs(w), axis=0))
        else:
            tl.store(place, tl.sum(w * w, axis=0))
        if LAMB:
            tl.store(place + 1, tl.sum(u * u, axis=0))


@triton.jit(
    do_not_specialize=[
        "owners", "table", "count", "grads", "corrections", "found", "norms", "rates", "beta1", "rest1", "beta2",
        "rest2", "eps", "weight_decay", "factor",
    ]
)
def _whole_kernel(
    owners, table, count: tl.int64, grads, corrections, found, norms, rates, beta1: tl.float32, rest1: tl.float32,
    beta2: tl.float32, rest2: tl.float32, eps: tl.float32, weight_decay: tl.float32, factor,
    LAMB: tl.constexpr, APPLY: tl.constexpr, INSIDE: tl.constexpr, LARGEST: tl.constexpr,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROUNDS: tl.constexpr, NEAREST: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Makes the updates of LAMB or NovoGrad with APPLY; before, it writes each block's part of two squared norms.

    These are LAMB's of weight and update, after its states are updated, and NovoGrad's of the gradient, or its largest.
    """
    UNIT: tl.constexpr = 64 if ROUNDS else 1
    if tl.load(found) == 0:
        tensor, row, start, left, grad = _block(owners, table, count, grads, UNIT, BLOCK)
        if _is_full(row, count, left, UNIT, BLOCK):
            _whole_block(
                row, count, grad, tensor, start, left, corrections, factor, norms, rates, beta1, rest1, beta2, rest2,
                eps, weight_decay, LAMB, APPLY, INSIDE, LARGEST, LAYOUT, KIND, GRAD, SCALED, ROUNDS, ALIGNED,
                False, BLOCK,
            )
        else:
            _whole_block(
                row, count, grad, tensor, start, left, corrections, factor, norms, rates, beta1, rest1, beta2, rest2,
                eps, weight_decay, LAMB, APPLY, INSIDE, LARGEST, LAYOUT, KIND, GRAD, SCALED, ROUNDS, ALIGNED,
                True, BLOCK,
            )


@triton.jit(
    do_not_specialize=["table", "count", "corrections", "found", "norms", "rates", "lr_tensor", "lr", "beta2", "rest2"]
)
def _rates_kernel(
    table, count: tl.int64, corrections, found, norms, rates, lr_tensor, lr: tl.int64, beta2: tl.int64, rest2: tl.int64,
    eps: tl.float32, LAMB: tl.constexpr, FLAG: tl.constexpr, LARGEST: tl.constexpr, LR_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr, LENGTH: tl.constexpr,
):
    """Writes the rate of each tensor's update, and NovoGrad's norm and divisor, from what its blocks wrote.

    FLAG says whether LAMB adapts the rate, and whether NovoGrad's first norm is that of the first gradient.
    """
    if tl.load(found) == 0:
        tensor = tl.program_id(0)
        row = table + tensor
        ends = tl.load(row) + (tl.load(row + count) + BLOCK - 1) // BLOCK
        at = tl.load(row) + tl.arange(0, LENGTH)
        one, other = tl.zeros((LENGTH,), tl.float64), tl.zeros((LENGTH,), tl.float64)
        for _ in range(tl.cdiv(ends - tl.load(row), LENGTH)):
            each = tl.load(norms + 2 * at, mask=at < ends, other=0.0)
            if LARGEST:
                one = tl.maximum(one, each)
            else:
                one += each
            if LAMB:
                other += tl.load(norms + 2 * at + 1, mask=at < ends, other=0.0)
            at += LENGTH
        rate = _double(lr)
        if LR_TENSOR:
            rate = tl.load(lr_tensor).to(tl.float64)
        norm = tl.max(one, axis=0) if LARGEST else tl.sqrt(tl.sum(one, axis=0))
        if LAMB:
            length = tl.sqrt(tl.sum(other, axis=0))
            if FLAG:
                rate = tl.where((norm > 0) & (length > 0), norm / length, 1.0) * rate
        else:
            state = tl.load(row + 6 * count).to(tl.pointer_type(tl.float32))
            mixed = tl.load(state).to(tl.float64)
            if LARGEST:
                mixed = mixed * _double(beta2) + norm * _double(rest2)
            else:
                mixed = tl.sqrt(mixed * mixed * _double(beta2) + norm * norm * _double(rest2))
            if FLAG:
                step = tl.load(tl.load(row + 4 * count).to(tl.pointer_type(tl.float32)))
                mixed = tl.where(step == 1, norm, mixed)
            tl.store(state, mixed.to(tl.float32))
            root = tl.load(corrections + 3 * tensor + 2)
            tl.store(rates + 2 * tensor + 1, tl.div_rn(mixed.to(tl.float32), root) + eps)
        tl.store(rates + 2 * tensor, rate.to(tl.float32))


@triton.jit
def _read_block(
    grad, start, left, KIND: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the sum of squares of a block as float64, and whether it holds an infinity or a NaN."""
    # Elements are first multiplied by a power of two that brings the largest near 1, so that no square overflows, and
    # none that matters underflows.
    at, mask = tl.arange(0, BLOCK), None
    if MASKED:
        mask = at < left
    g = _load(grad, start, at, mask, KIND, ALIGNED)
    if MASKED:
        g = tl.where(mask, g, 0.0)
    largest = tl.max(g.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    exponent = tl.maximum(254 - (largest >> 23), 1)
    scaled = g * (exponent << 23).to(tl.float32, bitcast=True)
    one = ((1150 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 1 over it; to divide takes a stack
    return tl.sum(scaled * scaled, axis=0).to(tl.float64) * one * one, largest >= 0x7F800000


@triton.jit(do_not_specialize=["owners", "table", "count", "grads", "squares", "flags"])
def _read_kernel(
    owners, table, count: tl.int64, grads, squares, flags, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the sum of squares of each block; a non-finite element sets flag 0 and that of its tensor (2 on) to 1."""
    _tensor, row, start, left, grad = _block(owners, table, count, grads, 1, BLOCK)
    if left >= BLOCK:
        square, bad = _read_block(grad, start, left, KIND, ALIGNED, False, BLOCK)
    else:
        square, bad = _read_block(grad, start, left, KIND, ALIGNED, True, BLOCK)
    tl.store(squares + tl.program_id(0), square)
    if bad:  # all that write here write the same
        tl.store(flags, 1)
        tl.store(flags + 2 + tl.load(row + 2 * count), 1)


@triton.jit(do_not_specialize=["squares", "count", "flags", "scale", "noted", "most", "norm", "numbers"])
def _judge_kernel(
    squares, count: tl.int64, flags, scale, noted, most: tl.float32, norm, numbers, SCALED: tl.constexpr,
    NOTED: tl.constexpr, CLIPS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Writes the norm, whether to skip (flag 1), and the norm, true norm and factor of `Wanted` in fp32."""
    at, total = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float64)
    for _ in range(tl.cdiv(count, BLOCK)):
        total += tl.load(squares + at, mask=at < count, other=0.0)
        at += BLOCK
    length = tl.sqrt(tl.sum(total, axis=0))
    tl.store(norm, length)
    true = length.to(tl.float32)
    tl.store(numbers, true)
    factor = 1.0
    if SCALED:
        factor = tl.div_rn(1.0, tl.load(scale))
        true = true * factor
    tl.store(numbers + 1, true)
    if CLIPS:
        clip = tl.div_rn(1.0, true + 1e-6) * most
        factor = factor * tl.where(clip > 1.0, 1.0, clip)  # NaN stays, as in torch
    tl.store(numbers + 2, factor)
    skip = tl.load(flags)
    if NOTED:
        skip = skip | tl.load(noted)
    tl.store(flags + 1, skip)


# fmt: on


def can_read(grads: list[Tensor]) -> bool:
    """Returns whether `read` takes these gradients: dense fp32, bf16 or fp16 ones on one device."""
    memory = grads.memory if isinstance(grads, Gradients) else {}
    if "triton" not in memory:
        memory["triton"] = bool(grads) and all(
            type(grad) is Tensor
            and grad.dtype in KINDS
            and grad.device == grads[0].device
            and grad.layout is torch.strided
            for grad in grads
        )
    return bool(memory["triton"])


@torch.no_grad()
def read(grads: list[Tensor], scratch: Scratch, wanted: Wanted = NOTHING) -> tuple[Tensor, Tensor, Tensor, Judged]:
    """Returns the L2 norm over all `grads`, whether any element is non-finite, a flag for each, and what is wanted."""
    # The order of the sums is fixed, so that equal gradients give equal bits.
    device = grads[0].device
    tables = Tables(device, scratch)
    memory = grads.memory if isinstance(grads, Gradients) else {}
    held = grads if "launches" in memory else [grad if is_dense(grad) else grad.contiguous() for grad in grads]
    launches = memory.get("launches") or Launches(held, _READ_BLOCK, [[t.numel() for t in held], range(len(held))])
    if all(map(is_, held, grads)):
        memory["launches"] = launches
    flags = torch.zeros(2 + len(held), dtype=torch.uint8, device=device)
    starts = (grads.starts if isinstance(grads, Gradients) and held is grads else None) or addresses(held)
    made = launches.of(starts)
    squares = torch.empty(sum(launch.ends[-1] for launch in made), dtype=torch.float64, device=device)
    norm, numbers = squares.new_empty(()), torch.empty(3, dtype=torch.float32, device=device)
    scale, noted, most = wanted
    done = 0
    with _on(device):
        for launch in made:
            blocks = launch.ends[-1]
            if not blocks:
                continue
            _read_kernel[(blocks,)](
                tables.owners(launch.ends),
                tables.numbers(launch.table),
                len(launch.places),
                tables.numbers(bytes(launch.pick(starts))),
                squares[done:] if done else squares,
                flags,
                KIND=launch.kind,
                ALIGNED=launch.aligned,
                BLOCK=_READ_BLOCK,
                num_warps=_READ_WARPS,
                **_EXACT,
            )
            done += blocks
        _judge_kernel[(1,)](
            squares,
            done,
            flags,
            flags if scale is None else scale,
            flags if noted is None else noted.view(torch.uint8),
            0.0 if most is None else most,
            norm,
            numbers,
            SCALED=scale is not None,
            NOTED=noted is not None,
            CLIPS=most is not None,
            BLOCK=_READ_BLOCK,
            num_warps=2 * _READ_WARPS,
            **_EXACT,
        )
    if isinstance(grads, Gradients):
        grads.norm = norm
    (bad, skip), (raw, true, factor) = flags[:2].view(torch.bool).unbind(), numbers.unbind()
    return raw, bad, flags[2:].view(torch.bool), (true, skip, None if scale is None and most is None else factor)


def fits(batch: Batch) -> bool:
    """Returns whether the kernels take this batch: the update is in fp32, and the weights are dense in memory."""
    if "triton" in batch.memory:
        return True
    if batch.dtype is not torch.float32 or any(grad.dtype not in KINDS for grad in batch.grads):
        return False
    return all(map(is_dense, batch.weights))


def update(kernel: str, batch: Batch, options: Options, factor: Tensor | None, found: Tensor, scratch: Scratch) -> None:
    """Makes one update by the optimizer `kernel`, in one pass over memory."""
    tables = Tables(batch.device, scratch)
    if "triton" not in batch.memory:
        batch.memory["triton"] = _launches(batch)
    grads = addresses(batch.grads)
    common = _Common(factor, found.view(torch.uint8), *_rate(options.lr, batch.device))
    with _on(batch.device):
        for launch in batch.memory["triton"].of(grads):
            table, count = tables.numbers(launch.table), len(launch.places)
            corrections = _corrections(options, common, table, count, whole=batch.whole) if batch.steps else None
            if not launch.ends[-1]:
                continue
            tensors = (tables.owners(launch.ends), table, count, tables.numbers(bytes(launch.pick(grads))))
            compiled_for = _compiled_for(batch, options, launch, common)
            _LAUNCHES[kernel](tensors, corrections, options, len(batch.states), common, compiled_for)
    torch.autograd.graph.increment_version(batch.weights)  # what autograd may have saved


def _launches(batch: Batch) -> Launches:
    """Returns the launches of the batch's updates."""
    # A row of their tables has one number for each tensor: its size (with `kept` in groups), the addresses of its
    # weight, extra, step count and states, and with `kept` those of its bases and its place.
    states = list(batch.states.values())
    weights, extras, steps, *held = map(addresses, (batch.weights, batch.extras, batch.steps, *states))
    rows = [[weight.numel() for weight in batch.weights], weights, extras, steps, *held, *[[]] * (3 - len(states))]
    length = _UPDATE_BLOCK
    if batch.kept is not None:
        bases = list(batch.kept.bases.values())
        rows[0] = [
            size // place.row * -(-place.row // GROUP) for size, place in zip(rows[0], batch.kept.places, strict=True)
        ]
        rows += [*map(addresses, bases), *[[]] * (2 - len(bases)), *map(list, zip(*batch.kept.places, strict=True))]
        length = _UPDATE_BLOCK // GROUP
    return Launches(batch.grads, length, rows, [weights, extras, *held])


@dataclass(frozen=True)
class _Common:
    """What all launches of an update need; the learning rate is `lr_tensor`, or `lr` if that is None."""

    factor: Tensor | None
    found: Tensor
    lr_tensor: Tensor | None
    lr: float


def _corrections(options: Options, common: _Common, table: Tensor, count: int, *, whole: bool) -> Tensor:
    """Counts up the step of each tensor; returns three coefficients per tensor (fp32), see `_corrections_kernel`."""
    beta1, beta2, *others = options.numbers
    if whole and not others[1]:  # no correction of the bias
        beta1 = beta2 = 0.0
    corrections = torch.empty(3 * count, dtype=torch.float32, device=table.device)
    _corrections_kernel[(count,)](
        table,
        count,
        common.found,
        common.found if common.lr_tensor is None else common.lr_tensor,
        bits(common.lr),
        bits(beta1),
        bits(beta2),
        bits(options.weight_decay),
        corrections,
        LR_TENSOR=common.lr_tensor is not None,
        MEANS=whole,
        num_warps=1,
        **_EXACT,
    )
    return corrections


def _launch_adam(
    tensors: _Tensors,
    corrections: Tensor | None,
    options: Options,
    states: int,
    common: _Common,
    compiled_for: dict[str, Any],
) -> None:
    beta1, beta2, eps = options.numbers
    _adam_kernel[(len(tensors[0]),)](
        *tensors,
        corrections,
        common.found,
        common.found if common.factor is None else common.factor,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        options.weight_decay,
        AMSGRAD=states == 3,
        DECOUPLED=options.decoupled,
        **compiled_for,
    )


def _launch_sgd(
    tensors: _Tensors,
    _: Tensor | None,
    options: Options,
    states: int,
    common: _Common,
    compiled_for: dict[str, Any],
    *,
    lion: bool = False,
) -> None:
    momentum, other = options.numbers  # that of Lion is beta2, that of SGD says whether momentum is Nesterov's
    beta2 = other if lion else 0.0
    _sgd_kernel[(len(tensors[0]),)](
        *tensors,
        common.found,
        common.found if common.factor is None else common.factor,
        common.found if common.lr_tensor is None else common.lr_tensor,
        common.lr,
        momentum,
        options.weight_decay,
        1 - momentum,
        beta2,
        1 - beta2,
        bits(common.lr),
        bits(options.weight_decay),
        MOMENTUM=bool(states),
        NESTEROV=bool(other) and not lion,
        LION=lion,
        LR_TENSOR=common.lr_tensor is not None,
        **compiled_for,
    )


def _launch_whole(
    tensors: _Tensors,
    corrections: Tensor | None,
    options: Options,
    _: int,
    common: _Common,
    compiled_for: dict[str, Any],
    *,
    lamb: bool = False,
) -> None:
    beta1, beta2, eps, _corrected, averages, inside, flag, norm_type = options.numbers
    owners, table, count, _grads = tensors
    norms = torch.empty(2 * len(owners), dtype=torch.float64, device=table.device)
    rates = torch.empty(2 * count, dtype=torch.float32, device=table.device)
    held = (corrections, common.found, norms, rates)
    numbers = (beta1, 1 - beta1 if averages else 1.0, beta2, 1 - beta2, eps, options.weight_decay)
    factor, lr = (common.found if given is None else given for given in (common.factor, common.lr_tensor))
    law = {"LAMB": lamb, "LARGEST": norm_type != 2}
    for apply in (False, True):
        again = {**law, **compiled_for, "APPLY": apply, "INSIDE": bool(inside)}
        _whole_kernel[(len(owners),)](*tensors, *held, *numbers, factor, **again)
        if not apply:
            again = {**law, **_EXACT, "FLAG": bool(flag), "LR_TENSOR": common.lr_tensor is not None}
            again |= {"BLOCK": _UPDATE_BLOCK // (GROUP if compiled_for["ROUNDS"] else 1), "LENGTH": _UPDATE_BLOCK}
            _rates_kernel[(count,)](table, count, *held, lr, *map(bits, (common.lr, beta2, 1 - beta2)), eps, **again)


_Launch = Callable[[_Tensors, Tensor | None, Options, int, _Common, dict[str, Any]], None]
_LAUNCHES: dict[str, _Launch] = {"adam": _launch_adam, "sgd": _launch_sgd, "lion": partial(_launch_sgd, lion=True)}
_LAUNCHES |= {"lamb": partial(_launch_whole, lamb=True), "novograd": _launch_whole}


def _compiled_for(batch: Batch, options: Options, launch: Launch, common: _Common) -> dict[str, Any]:
    """Returns the compile-time arguments that the kernels of all optimizers share."""
    kept = batch.kept
    return {
        "LAYOUT": batch.layout,
        "KIND": KINDS[batch.weights[0].dtype],
        "GRAD": launch.kind,
        "SCALED": common.factor is not None,
        "MAXIMIZE": bool(options.maximize),
        "WIDTH": "full" if kept is None else kept.kind,
        "ROUNDS": kept is not None and kept.rounds,
        "NEAREST": kept is not None and not any(code.stochastic for code in kept.codes[:1]),
        "ALIGNED": launch.aligned,
        "BLOCK": _UPDATE_BLOCK,
        "num_warps": _UPDATE_WARPS,
        "maxnreg": None if kept is None else _KEPT_REGISTERS,
        **_EXACT,
    }


def _rate(lr: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """Returns the learning rate as `lr_tensor` and `lr` of `_Common`."""
    # A tensor that a kernel can read is `lr_tensor`; otherwise that is None, and `lr` is the number.
    if isinstance(lr, Tensor) and (not lr.is_cpu or device.type == "cpu"):
        return lr.to(device, non_blocking=True), 0.0
    return None, float(lr)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which kernels are launched on `device`; on a CPU (Triton's interpreter) it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
