"""The edits of a plan that may cure a failure, from the one that changes least to the one that changes most."""

from __future__ import annotations

from dataclasses import replace

from halfstep.errors import PlanError
from halfstep.observe.diagnosis import Diagnosis
from halfstep.plan.optable import ROWS, find
from halfstep.plan.plan import Edit, OpChange, Plan
from halfstep.plan.policy import FULL, Policy
from halfstep.plan.rules import Rule
from halfstep.plan.scaling import Scaling

FULL_OUT = Policy("full", "full", "full")
_ROOM = 4.0  # a constant scale is set this factor below the largest that passes: gradients grow
_BY_OP = ("deny",)  # ops of these categories lose little by running full everywhere


def candidates(plan: Plan, found: Diagnosis) -> list[tuple[Edit, ...]]:
    """Returns what may cure a failure of the low format, to be tried in this order; empty where no edit can."""
    if plan.ops == "none" or found.kind not in ("overflow", "invalid", "masked row"):
        return []
    edits: list[tuple[Edit, ...]] = []
    if found.module is not None and _is_cheap(found.operator):
        edits.append((OpChange("deny", found.operator),))
    for name in _upwards(found.module):
        edits += [(Rule(name, FULL),), (Rule(name, FULL_OUT),)] if name else []
    return [*edits, (Rule("", FULL),)] if found.module is not None else edits


def scaling_cure(scaling: Scaling, lower: float, *, estimated: bool = False) -> tuple[Edit, ...]:
    """Returns the loss scale in place of one that was too high, where `lower` passes, or is `estimated` to."""
    if scaling.kind != "dynamic":
        return (Scaling("static", init=lower / _ROOM),)
    floor = min(scaling.min, lower / _ROOM if estimated else lower, 1.0)
    return (replace(scaling, init=lower, min=floor, max=max(scaling.max, lower)),)


def _is_cheap(operator: str) -> bool:
    try:
        overloads = set(find(operator))
    except PlanError:
        return False
    return any(row.category in _BY_OP and overloads & set(row.overloads) for row in ROWS)


def _upwards(module: str | None) -> list[str]:
    """Returns a module's name as rules spell it, then those of the modules around it, the model itself last.

    >>> _upwards("decoder.attn")
    ['decoder.attn', 'decoder', '']
    """
    if module is None:
        return []
    name = module.rpartition(":")[2]
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
