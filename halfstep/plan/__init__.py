"""What a model trains in: policies, rules, op changes and plans, all frozen; nothing here touches a model."""

from halfstep.plan.levels import LEVELS, Level, as_scaling, customize, level
from halfstep.plan.plan import Edit, OpChange, OpChanges, Plan
from halfstep.plan.policy import FULL, LOW, Policy
from halfstep.plan.rules import Rule
from halfstep.plan.scaling import Scaling

__all__ = [
    "FULL",
    "LEVELS",
    "LOW",
    "Edit",
    "Level",
    "OpChange",
    "OpChanges",
    "Plan",
    "Policy",
    "Rule",
    "Scaling",
    "as_scaling",
    "customize",
    "level",
]
