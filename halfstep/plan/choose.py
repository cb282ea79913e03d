"""Turns what a user passes (a level, a Plan or a path) into a Plan."""

from __future__ import annotations

import os

import torch

from halfstep.errors import PlanError
from halfstep.formats import BF16, LOW_FORMATS, Format, as_format
from halfstep.machine import DeviceFacts, units
from halfstep.plan.io import load_plan
from halfstep.plan.levels import LEVELS, customize, level
from halfstep.plan.plan import Plan

_NO_UNITS = "this processor has no {} units"


def choose_plan(
    plan: Plan | str, low: Format | torch.dtype | str | None, facts: DeviceFacts
) -> tuple[Plan, str | None]:
    """Returns the plan for a level, a Plan or the path of a plan file, and a notice about the chosen format (or None).

    If `low` is None and no Plan or plan file sets the format, it is one that the device of `facts` computes fast. The
    notice then says which.

    Raises:
        PlanError: an unknown level, a value that is not a plan, or a plan file that cannot be read.
        FormatError: an unknown format.
    """
    wanted = None if low is None else as_format(low)
    if isinstance(plan, Plan):
        return (plan if wanted is None else customize(plan, low=wanted)), None
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(
            f"plan is {plan!r:.80}; expected a level ({', '.join(LEVELS)}), a Plan or the path of a plan file"
        )
    name = os.fspath(plan)
    picked, notice = choose_low(facts) if wanted is None else (wanted, None)
    if not name.endswith((".toml", ".json")):
        chosen = level(name, picked)
        return chosen, None if chosen.ops == "none" else notice
    loaded = load_plan(name, low=picked)
    if wanted is not None:
        return customize(loaded, low=wanted), None
    names_its_own = load_plan(name, low=next(fmt for fmt in LOW_FORMATS if fmt is not picked)).low is loaded.low
    return loaded, None if names_its_own or loaded.ops == "none" else notice


def choose_low(facts: DeviceFacts) -> tuple[Format, str]:
    """Returns the low-precision format for a device, bf16 if possible and else fp16, and a notice that names it.

    >>> choose_low(DeviceFacts("cuda", capability=(7, 5)))[0].name
    'fp16'
    """
    for fmt in LOW_FORMATS:
        found = units(fmt, facts)
        if found is not None:
            return fmt, f"low is not set; using {fmt}, which this device computes in hardware ({found})"
    if needs_emulation(BF16, facts):
        return BF16, f"low is not set; using {BF16}; {emulation_notice(BF16, facts)}"
    return BF16, (
        f"low is not set; using {BF16}, for which this device ({facts}) has no units: "
        "training at level O0 would be faster"
    )


def needs_emulation(fmt: Format, facts: DeviceFacts) -> bool:
    """Returns whether products in a format are emulated by default, that is computed in fp32 and then rounded."""
    # They are on a CPU unless native products are known to be twice as fast. Without units for a format, torch's own
    # products and convolutions in it take up to 70 times as long as emulated ones, and some of its operations fail.
    return facts.kind == "cpu" and units(fmt, facts) is None


def emulation_notice(fmt: Format, facts: DeviceFacts) -> str:
    """Returns the line that says why products in a format are emulated on a processor, and how."""
    name = facts.processor.name
    why = f"torch makes little of this processor's {fmt} units" if fmt.name.upper() in name else _NO_UNITS.format(fmt)
    return f"{why}: products are computed in fp32 and rounded, as a GPU's tensor cores do ({name})"
