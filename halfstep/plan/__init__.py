"""What a model trains in: policies, rules, op changes and plans, all frozen; nothing here touches a model."""

from halfstep.edits import FULL, LOW, Edit, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.plan.choose import choose_low, choose_plan, needs_emulation
from halfstep.plan.io import from_dict, load_plan, save_plan, to_dict
from halfstep.plan.levels import LEVELS, Level, as_scaling, customize, level
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats, resolve

__all__ = [
    "FULL",
    "LEVELS",
    "LOW",
    "Assignment",
    "Edit",
    "Level",
    "ModuleFormats",
    "OpChange",
    "OpChanges",
    "Plan",
    "Policy",
    "Rule",
    "Scaling",
    "as_scaling",
    "choose_low",
    "choose_plan",
    "customize",
    "from_dict",
    "level",
    "load_plan",
    "needs_emulation",
    "resolve",
    "save_plan",
    "to_dict",
]
