"""From what a user wrote, a level, a Plan or a path, to the Plan that was meant."""

from __future__ import annotations

import os

import torch

from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16, Format, as_format
from halfstep.plan.hardware import default_low
from halfstep.plan.io import load_plan
from halfstep.plan.levels import LEVELS, customize, level
from halfstep.plan.plan import Plan


def choose_plan(
    plan: Plan | str, low: Format | torch.dtype | str | None, device: torch.device
) -> tuple[Plan, str | None]:
    """Returns the plan that a level, a Plan or a plan file names, and what to say of the format picked for it.

    `low=None` takes what `device` computes fast; a notice (or None) tells so.

    Raises:
        PlanError: no such level, no plan, or a plan file that cannot be read.
        FormatError: an unknown format.
    """
    wanted = None if low is None else as_format(low)
    if isinstance(plan, Plan):
        return (plan if wanted is None else customize(plan, low=wanted)), None
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(f"plan is {plan!r:.80}; give a level ({', '.join(LEVELS)}), a Plan or the path of a plan file")
    name = os.fspath(plan)
    picked, notice = default_low(device) if wanted is None else (wanted, None)
    if not name.endswith((".toml", ".json")):
        chosen = level(name, picked)
        return chosen, None if chosen.ops == "none" else notice
    loaded = load_plan(name, low=picked)
    if wanted is not None:
        return customize(loaded, low=wanted), None
    names_its_own = load_plan(name, low=FP16 if picked is BF16 else BF16).low is loaded.low
    return loaded, None if names_its_own or loaded.ops == "none" else notice
