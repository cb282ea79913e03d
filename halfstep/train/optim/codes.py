"""The codes in which moments are kept between updates: bf16 and 8 bits, in plain tensor operations.

The compiled loops (`codes.h`, `groups.h` and `triton.py` in `train/kernels`) equal this law bit for bit. All is integer
arithmetic on the bits of fp32 values. What was decoded encodes to the same value again, whatever the random bits, so
that a checkpoint in fp32 loses nothing.

In 8 bits, 64 neighbours in one slice of dimension 0 share a base (int16): the least code of the group's values in units
of their last place. A square (`uint8`) has 4 exponent and 4 fraction bits if the nonzero values of its group lie within
2**15 of the largest, else 5 and 3, with a negative base. A value above 0 is never kept as 0, or an update would be
divided by 0. A signed moment (`int8`) has one exponent bit less beside its sign; values too small become 0.

Random bits come from a hash of the element's index in the whole tensor, the number of its parameter and the number of
the update, so that they are the same however a tensor is sharded, and when training resumes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.formats import mix_bits
from halfstep.train.kernels.batch import GROUP, Batch, Code, Kept, Place

_WORD = 0xFFFFFFFF
_FINE, _COARSE = 19, 20  # bits of fp32 that a code drops, with 4 and with 3 bits of the fraction left
_NONE = 1 << 30


def random_bits(place: Place, count: int, step: Tensor, which: int = 0) -> Tensor:
    """Returns 32 random bits (int64) for each of `count` elements of a tensor at its update number `step` (0-dim).

    `which` is 0 for states and 1 for weights.

    >>> random_bits(Place(0, 2, 8, 8), 2, torch.tensor(1.0)).tolist()
    [4171675901, 3864773882]
    >>> random_bits(Place(0, 0, 8, 8), 4, torch.tensor(1.0)).tolist()[2:]
    [4171675901, 3864773882]
    """
    at = torch.arange(count, dtype=torch.int64, device=step.device)
    index = place.first + at // place.row * place.stride + at % place.row
    key = mix_bits(step.to(torch.int64) * 0x85EBCA77 & _WORD ^ place.number * 0xC2B2AE3D & _WORD ^ which)
    return mix_bits(index * 0x9E3779B1 + key & _WORD)


def noise_of(bits: Tensor, state: int) -> Tensor:
    """Returns the 20 random bits of a batch's first or second state, as int32."""
    return ((bits >> 12) if state == 0 else bits & 0xFFFFF).to(torch.int32)


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 values to bf16, away from zero with a probability of what is cut off; `noise` has 16 bits (int32)."""
    bits = values.view(torch.int32)
    bits = torch.where(values.isnan(), bits, bits + noise)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def rounded_weight(values: Tensor, place: Place, step: Tensor) -> Tensor:
    """Returns fp32 values of a weight without a master, rounded to bf16 at its update number `step`."""
    bits = random_bits(place, values.numel(), step, which=1)
    return to_bf16(values, (bits >> 16).to(torch.int32).view(values.shape))


def encode(values: Tensor, noise: Tensor | None, code: Code) -> tuple[Tensor, Tensor]:
    """Returns the 8-bit codes of groups of fp32 values (n, 64), to nearest without `noise`, and int16 bases (n, 1)."""
    most = 127 if code.signed else 255
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    fine = (magnitude + _added(noise, _FINE)) >> _FINE
    least = torch.where(magnitude > 0, fine, _NONE).amin(1, keepdim=True)
    near = fine.amax(1, keepdim=True) - least < most
    rounded = torch.where(near, fine, (magnitude + _added(noise, _COARSE)) >> _COARSE)
    base = (rounded.amax(1, keepdim=True) - most).clamp(min=0)
    codes = torch.where(magnitude > 0, (rounded - base).clamp(min=0 if code.signed else 1), 0)
    if code.signed:
        codes = torch.where(bits < 0, -codes, codes)
    return codes.to(code.dtype), torch.where(near, base, -1 - base).to(torch.int16)


def decode(codes: Tensor, bases: Tensor) -> Tensor:
    """Returns the fp32 values of groups of 8-bit codes (n, 64) and their bases (n, 1)."""
    number, base = codes.to(torch.int32), bases.to(torch.int32)
    magnitude = number.abs()
    bits = torch.where(base >= 0, (magnitude + base) << _FINE, (magnitude - 1 - base) << _COARSE)
    values = torch.where(magnitude > 0, bits, 0).view(torch.float32)
    return torch.where(number < 0, -values, values)


def _added(noise: Tensor | None, drop: int) -> Tensor | int:
    return 1 << (drop - 1) if noise is None else noise & ((1 << drop) - 1)


def grouped(flat: Tensor, row: int) -> Tensor:
    """Returns the elements of slices of `row` elements as groups (n, 64), the last of a slice filled up with zeros."""
    short = -row % GROUP
    slices = flat.view(-1, row)
    return (torch.nn.functional.pad(slices, (0, short)) if short else slices).reshape(-1, GROUP)


def ungrouped(groups: Tensor, row: int) -> Tensor:
    """Returns the elements of groups, as `grouped` took them."""
    return groups.view(-1, -(-row // GROUP) * GROUP)[:, :row].reshape(-1).contiguous()


def opened(batch: Batch) -> dict[str, list[Tensor]]:
    """Returns the states of a batch in fp32; its tensors must be contiguous."""
    kept = batch.kept
    assert kept is not None
    if kept.kind == "bf16":
        return {name: [t.float() for t in tensors] for name, tensors in batch.states.items()}
    return {
        name: [
            ungrouped(decode(grouped(t.view(-1), place.row), base.view(-1, 1)), place.row).view(t.shape)
            for t, base, place in zip(tensors, kept.bases[name], kept.places, strict=True)
        ]
        for name, tensors in batch.states.items()
    }


def close(batch: Batch, states: Mapping[str, list[Tensor]], found: Tensor | None) -> None:
    """Keeps fp32 `states` as the states of a batch; changes nothing if `found` is true."""
    kept = batch.kept
    assert kept is not None
    for i, (place, step) in enumerate(zip(kept.places, batch.steps, strict=True)):
        bits = random_bits(place, batch.weights[i].numel(), step)
        for k, (name, values) in enumerate(states.items()):
            noise = noise_of(bits, k)
            new = _kept_as(values[i].reshape(-1), noise, kept, k, place)
            old = [batch.states[name][i], *([kept.bases[name][i]] if kept.kind == "8bit" else [])]
            for held, value in zip(old, new, strict=True):
                value = value.view(held.shape)
                held.copy_(value if found is None else torch.where(found, held, value))


def _kept_as(values: Tensor, noise: Tensor, kept: Kept, state: int, place: Place) -> tuple[Tensor, ...]:
    if kept.kind == "bf16":
        return (to_bf16(values, noise >> 4),)
    code = kept.codes[state]
    given = grouped(noise, place.row) if code.stochastic else None
    codes, bases = encode(grouped(values, place.row), given, code)
    return ungrouped(codes, place.row), bases
