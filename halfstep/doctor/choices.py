"""Measures the facts by which sessions choose formats, and compares them with halfstep's table of processor classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.doctor.rates import CONVOLUTION, EMULATED, NATIVE, PRODUCT
from halfstep.formats import BF16, FP16
from halfstep.gains import weighed
from halfstep.machine import WORTH, Processor, WideBackward
from halfstep.measurements import Choice, Rate
from halfstep.timing import speedup, take_turns

_WIDTHS, _LENGTHS, _HEADS = (32, 64, 128), (64, 128, 256, 512), 8
_FASTER = 1.05  # what differs by less is as fast

Rates = Mapping[tuple[str, str, str], Rate]


def gain(rates: Rates, low: str) -> float:
    """Returns how many times as fast native products of a format are as emulated ones, as `machine.Processor` has it.

    It is 0 where torch has no native kernel for matrix products or convolutions.
    """
    found = [
        _against_fp32(rates, work, low, NATIVE) / (_against_fp32(rates, work, low, EMULATED) or 1.0)
        for work in (PRODUCT, CONVOLUTION)
    ]
    return weighed(*found) if all(found) else 0.0


def _against_fp32(rates: Rates, work: str, fmt: str, how: str) -> float:
    rate = rates.get((work, fmt, how))
    return 0.0 if rate is None or rate.vs_fp32 is None else rate.vs_fp32


def wide_backward(*, seconds: float) -> WideBackward:
    """Returns pairs (head width, longest sequence for which attention's backward pass is faster in fp32 than in bf16).

    Head widths for which fp32 is not faster are left out.
    """
    share = seconds / (len(_WIDTHS) * len(_LENGTHS))
    found = []
    for width in _WIDTHS:
        longest = 0
        for length in _LENGTHS:
            if _gain_of_wide(width, length, share) <= _FASTER:
                break
            longest = length
        if longest:
            found.append((width, longest))
    return tuple(found)


def _gain_of_wide(width: int, length: int, seconds: float) -> float:
    """Returns the time of attention's backward pass in bf16 divided by its time in fp32 with casts from and to bf16."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = (1, _HEADS, length, width)
    made = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16() for _ in range(4)]
    (*operands, grad) = made
    low = _backward(operands, grad)
    wide_pass = _backward([each.float() for each in operands], grad.float())

    def wide() -> object:
        for each in (*operands, grad):
            each.float()
        return [each.to(torch.bfloat16) for each in wide_pass()]

    times = take_turns({"low": low, "wide": wide}, device=torch.device("cpu"), seconds=seconds)
    return speedup(times["low"], times["wide"]) or 0.0


def _backward(operands: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that runs the backward pass of causal attention and can be called repeatedly."""
    leaves = query, key, value = [each.detach().requires_grad_() for each in operands]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def compare(used: Processor, table: Processor, *, bf16: float, fp16: float, wide: WideBackward) -> tuple[Choice, ...]:
    """Returns for each choice of formats the value that sessions use, the one in halfstep's table and the measured one.

    `used` are the facts about the processor that sessions use now, and `table` those in halfstep's table. The other
    arguments are the measured facts.
    """
    measured = replace(used, bf16=bf16, fp16=fp16, wide_backward=wide)
    said = zip(_said(used), _said(table), _said(measured), strict=True)
    return tuple(Choice(what, now, by_table, here, now == here) for (what, now), (_, by_table), (_, here) in said)


def _said(row: Processor) -> list[tuple[str, str]]:
    return [
        *((f"{low} products", _how(row.gain(low))) for low in (BF16, FP16)),
        ("attention's backward pass in fp32 up to length", _lengths(row.wide_backward)),
    ]


def _how(gain: float | None) -> str:
    if gain is None:
        return "not measured"
    return "native" if gain >= WORTH else "emulated"


def _lengths(wide: WideBackward) -> str:
    return ", ".join(f"{length} at head width {width}" for width, length in wide) or "never"
