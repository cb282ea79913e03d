"""The levels O0 to O3 as a table of plans, and the keywords that adjust a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch

from halfstep.edits import LARGEST_SCALE, OP_LISTS, SMALLEST_SCALE, OpChange, OpChanges, Rule, Scaling
from halfstep.errors import PlanError
from halfstep.formats import BF16, FORMATS, FP16, LOW_FORMATS, Format, as_format, for_products
from halfstep.plan.plan import Plan
from halfstep.validate import as_tuple, near_miss, real, with_near_misses

_OFF, _DYNAMIC, _ONE = Scaling("none"), Scaling("dynamic"), Scaling("static", init=1.0)
_NAMED_SCALES = MappingProxyType({"dynamic": _DYNAMIC, "none": _OFF})


@dataclass(frozen=True)
class Level:
    """A row of the table: what a level is for, and its plan in each low format."""

    purpose: str
    plans: Mapping[Format, Plan]


def _row(purpose: str, in_bf16: Plan, **in_fp16: Any) -> Level:
    """Returns the Level with a bf16 plan; its fp16 plan is the same except for the fields `in_fp16`."""
    return Level(purpose, MappingProxyType({BF16: in_bf16, FP16: replace(in_bf16, low=FP16, **in_fp16)}))


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        row.plans[BF16].name: row
        for row in (
            _row(
                "the baseline",
                Plan("O0", BF16, param="full", ops="none", norms="full", master="none", scale=_OFF, output="keep"),
            ),
            _row(
                "safe default",
                Plan("O1", BF16, param="full", ops="table", norms="full", master="none", scale=_OFF),
                scale=_DYNAMIC,
            ),
            _row(
                "fastest that keeps accuracy",
                Plan("O2", BF16, param="low", ops="table", norms="full", master="split", scale=_OFF),
                master="copy",
                scale=_DYNAMIC,
            ),
            _row(
                "upper bound on speed",
                Plan(
                    "O3", BF16, param="low", ops="table", norms="low", master="none", scale=_OFF, rounding="stochastic"
                ),
                scale=_ONE,
                rounding="nearest",
            ),
        )
    }
)


@with_near_misses
def level(name: str, low: Format | torch.dtype | str) -> Plan:
    """Returns the plan of a level in a low format.

    Raises:
        PlanError: no level has this name, or halfstep cannot train in the format.
        FormatError: an unknown format.

    >>> level("O2", "bf16").master
    'split'
    """
    row = LEVELS.get(name) if isinstance(name, str) else None
    if row is None:
        raise PlanError(f"unknown level {name!r}; expected one of {', '.join(LEVELS)}{_level_hint(name)}")
    fmt = as_format(low, LOW_FORMATS)
    if fmt not in LOW_FORMATS:
        known = " or ".join(each.name for each in LOW_FORMATS)
        raise PlanError(f"level {name} cannot train in {fmt.name}; use {known}{for_products(fmt)}")
    return row.plans[fmt]


def _level_hint(name: object) -> str:
    if not isinstance(name, str):
        return " (strings)"
    if name in FORMATS or for_products(name):
        return for_products(name) or f"; pass a format as low={name!r}"
    letters = name.strip().upper().replace("0", "O", 1) if name.strip()[:1] == "0" else name.strip().upper()
    if letters in LEVELS:
        why = "the letter O, not the digit 0" if name.strip()[:1] == "0" else "the capital letter O and a digit"
        return f"; did you mean {letters!r} ({why})?"
    return "; a plan file ends in .toml or .json" if "." in name else near_miss(name, LEVELS if letters != "O" else ())


def customize(
    plan: Plan,
    *,
    low: Format | torch.dtype | str | None = None,
    loss_scale: str | float | Scaling | None = None,
    rules: Iterable[Rule] = (),
    ops: OpChanges | Mapping[str, Iterable[str]] | None = None,
    **changes: str | Iterable[str] | None,
) -> Plan:
    """Returns the plan with the keywords of `initialize` applied; None and () leave it as it is.

    Another `low` also changes fields such as master and scale: those that still have the value of the plan's level get
    the level's value for the new format. Of `rules` and `ops` that contradict the plan's, the later win.

    >>> customize(level("O2", "bf16"), low="fp16", loss_scale=128).scale.init
    128.0
    """
    norms = changes.get("norms")
    if norms is not None and plan.param == "full":
        raise PlanError(
            f"norms is {norms!r}, but at {plan.name} (param 'full') weights are fp32 and the op table decides how "
            "norms compute; leave norms out, or move an op to another row, for example ops={'allow': ['layer_norm']}"
        )
    values: dict[str, Any] = {} if low is None else _for_format(plan, as_format(low, LOW_FORMATS))
    values |= {name: value for name, value in changes.items() if value is not None}
    stored = [values.get(name, getattr(plan, name)) for name in ("param", "master", "low")]
    if changes.get("rounding") is None and stored != ["low", "none", BF16]:
        values["rounding"] = "nearest"
    if loss_scale is not None:
        values["scale"] = as_scaling(loss_scale)
    return replace(plan, **values).edit(*as_tuple("rules", rules, of="Rules"), *_op_edits(ops))


def _for_format(plan: Plan, low: Format) -> dict[str, Any]:
    """Returns new values for the fields that change with `low`: those in which the plan still equals its level."""
    row = LEVELS.get(plan.name)
    if row is None or low not in LOW_FORMATS:
        return {"low": low}
    before, after = row.plans[plan.low], row.plans[low]
    names = [each.name for each in fields(Plan) if getattr(plan, each.name) == getattr(before, each.name)]
    return {name: getattr(after, name) for name in names}


def as_scaling(value: str | float | Scaling) -> Scaling:
    """Returns a Scaling for "dynamic", "none", a number, a number as text, or a Scaling."""
    if isinstance(value, Scaling):
        return value
    if isinstance(value, str) and value in _NAMED_SCALES:
        return _NAMED_SCALES[value]
    number: object = value
    with suppress(ValueError):
        number = float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, Real):
        hint = near_miss(value, _NAMED_SCALES)
        raise PlanError(f"loss_scale is {value!r}; expected 'dynamic', 'none', a number or a Scaling{hint}")
    return Scaling("static", init=loss_scale_of(number))


def loss_scale_of(value: object) -> float:
    """Returns a number that was passed as `loss_scale`, as a float."""
    return real("loss_scale", value, low=SMALLEST_SCALE, high=LARGEST_SCALE)


def _op_edits(ops: OpChanges | Mapping[str, Iterable[str]] | None) -> list[OpChange]:
    if ops is None:
        return []
    if not isinstance(ops, OpChanges):
        if not isinstance(ops, Mapping):
            raise PlanError(f"ops is {ops!r}; expected OpChanges or a dict of lists, such as {{'deny': ['softmax']}}")
        for key in ops:
            if key not in OP_LISTS:
                raise PlanError(f"ops has key {key!r}; expected one of {', '.join(OP_LISTS)}{near_miss(key, OP_LISTS)}")
        ops = OpChanges(**{key: as_tuple(f"ops[{key!r}]", value, of="op names") for key, value in ops.items()})
    return [OpChange(name, op) for name, op in ops.listed()]
