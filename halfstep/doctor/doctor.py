"""Examines a machine: its speed in each format, what its settings cost, and which level and format to train in."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from time import perf_counter

import torch

from halfstep.doctor.choices import Rates, compare, gain, wide_backward
from halfstep.doctor.rates import CONVOLUTION, NATIVE, PRODUCT, by_kind, footprints, measure
from halfstep.doctor.settings import read_settings, read_tools
from halfstep.errors import HalfstepError
from halfstep.machine import model_name, read_facts, read_machine, read_processor, table_row
from halfstep.measurements import Choice, Examination
from halfstep.saved import Saved, check_savable, save

RATES_SECONDS, WIDE_SECONDS, SETTINGS_SECONDS = 11.0, 6.0, 1.0
_WORTH = 1.1  # a format that is faster by less is not recommended for speed


def examine(device: torch.device, *, tell: Callable[[str], None] = lambda _: None, keep: bool = False) -> Examination:
    """Measures a device in under 30 seconds; `tell` is called with the name of each measurement before it starts."""
    if keep:
        if device.type != "cpu":
            raise HalfstepError(f"--save works only for the CPU, got device {device}; add --device cpu")
        check_savable()
    start = perf_counter()
    tell("products, convolutions, attention, copies and casts")
    rates = measure(device, seconds=RATES_SECONDS)
    kinds = by_kind(rates)
    tell("settings")
    settings = read_settings(device, seconds=SETTINGS_SECONDS)
    choices: tuple[Choice, ...] = ()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    saved = None
    if device.type == "cpu":
        tell("the backward pass of attention")
        bf16, fp16, wide = gain(kinds, "bf16"), gain(kinds, "fp16"), wide_backward(seconds=WIDE_SECONDS)
        if keep:
            found = Saved(table_row().name, model_name(), str(torch.__version__), bf16, fp16, wide, date)
            saved = str(save(found))
        choices = compare(read_processor(), table_row(), bf16=bf16, fp16=fp16, wide=wide)
    level, low, reason = recommend(kinds)
    facts = read_facts(device)
    return Examination(
        machine=read_machine(device),
        device=str(facts),
        processor=facts.processor.name,
        source=read_processor().source,
        rates=tuple(rates),
        memory=tuple(footprints(device)),
        settings=settings,
        choices=choices,
        tools=read_tools(device),
        level=level,
        low=low,
        reason=reason,
        seconds=perf_counter() - start,
        date=date,
        saved=saved,
    )


def recommend(rates: Rates) -> tuple[str, str, str]:
    """Returns the recommendation as (level, format, reason)."""
    # The format is the one in which matrix products and convolutions gain most; if none gains, the level is O0. bf16
    # is preferred to fp16, since it needs no loss scale, unless fp16 is faster by a factor of more than `_WORTH`.
    gains = {low: _gain(rates, low) for low in ("bf16", "fp16")}
    best = "fp16" if gains["fp16"] > _WORTH * gains["bf16"] else "bf16"
    other = "fp16" if best == "bf16" else "bf16"
    figures = f"{_words(rates, best)}; {_words(rates, other)}"
    if gains[best] < _WORTH:
        partly = [
            f"{low} is faster in {work}s only; a model with few other operations may gain at O1 (try `halfstep bench`)"
            for low in gains
            for work in (PRODUCT, CONVOLUTION)
            if _gain(rates, low, work) >= _WORTH
        ]
        why = partly[0] if partly else f"no low format is faster than fp32 here by {_WORTH - 1:.0%} or more"
        memory = "O2 takes about fp32's time where products are emulated, with 14 bytes a parameter instead of 16"
        return "O0", best, f"{why}: {figures}. {memory}"
    scale = "it is fast and needs no loss scale" if best == "bf16" else "it is the fastest, with a dynamic loss scale"
    return (
        "O1",
        best,
        f"{figures}. {best} is chosen: {scale}. O2 also stores weights in it; `halfstep bench` compares both levels",
    )


def _gain(rates: Rates, low: str, *works: str) -> float:
    """Returns the speed of a low format relative to fp32 in the kind of work that gains least."""
    found = [rates.get((work, low, NATIVE)) for work in works or (PRODUCT, CONVOLUTION)]
    return min(0.0 if rate is None or rate.vs_fp32 is None else rate.vs_fp32 for rate in found)


def _words(rates: Rates, low: str) -> str:
    """Returns a format's speed in words, such as "bf16 runs matrix products at 1.9 and convolutions at 1.2 ..."."""
    gains = {f"{work}s": _gain(rates, low, work) for work in (PRODUCT, CONVOLUTION)}
    timed = " and ".join(f"{works} at {gain:.2g}" for works, gain in gains.items() if gain)
    none = " and ".join(works for works, gain in gains.items() if not gain)
    parts = [f"runs {timed} times fp32's speed"] * bool(timed) + [f"has no kernel for {none}"] * bool(none)
    return f"{low} {' and '.join(parts)}"
