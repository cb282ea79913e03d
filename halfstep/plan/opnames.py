"""Checks that op changes name ops that exist, can be cast, and are not one op under two names."""

from __future__ import annotations

from halfstep.edits import OpChanges
from halfstep.errors import PlanError
from halfstep.plan.optable import find


def check_op_changes(changes: OpChanges) -> None:
    """Checks every op name against the dispatcher; functions ("module:function") are looked up when a session starts.

    Raises:
        PlanError: a name is not an op or cannot be cast (with near misses), or two lists have one op under two names.
    """
    listed: dict[str, tuple[str, str]] = {}
    for category, op in changes.listed():
        for overload in () if ":" in op else find(op):
            name, where = listed.setdefault(overload, (op, category))
            if where != category:
                raise PlanError(
                    f"op {op!r} in {category} and {name!r} in {where} are both {overload!r}; list each op only once"
                )
