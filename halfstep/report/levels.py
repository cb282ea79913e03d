"""The table of levels for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from halfstep.edits import Scaling
from halfstep.formats import BF16, FP16
from halfstep.plan.levels import Level

OPS = {"none": "as written", "table": "the table"}
OPS_AT_LOW = "allow and promote rows, losses full; the rest as stored"
FULL_OR_LOW = {"full": "fp32", "low": "low"}
HEADERS = (
    "level",
    "weights",
    "ops",
    "norms",
    "master (bf16 / fp16)",
    "scale (bf16 / fp16)",
    "inputs",
    "outputs",
    "for",
)


def level_table(levels: Iterable[Level]) -> Table:
    """Returns a table with a row for each level: what it stores low, what it casts, and how it scales the loss."""
    table = Table(*HEADERS, box=None, padding=(0, 1), title_justify="left", title="low is bf16 or fp16")
    for row in levels:
        plan, in_fp16 = row.plans[BF16], row.plans[FP16]
        cast = plan.ops == "table"
        low_weights = plan.param == "low"
        table.add_row(
            plan.name,
            FULL_OR_LOW[plan.param],
            OPS_AT_LOW if low_weights else OPS[plan.ops],
            FULL_OR_LOW[plan.norms] if low_weights else "by the table" if cast else "-",
            _pair(plan.master, in_fp16.master) if low_weights else "weights are fp32" if cast else "-",
            _pair(_scale(plan.scale), _scale(in_fp16.scale)),
            "as given" if plan.input == "keep" else FULL_OR_LOW[plan.input],
            "as written" if plan.output == "keep" else FULL_OR_LOW[plan.output],
            row.purpose,
        )
    return table


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first} / {second}"


def _scale(scaling: Scaling) -> str:
    return f"{scaling.init:g}" if scaling.active and not scaling.adapts else scaling.kind
