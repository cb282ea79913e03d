"""The command `halfstep ops`, which prints the op table."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from halfstep.cli.screen import stdout
from halfstep.errors import PlanError
from halfstep.machine import read_facts
from halfstep.plan.choose import choose_plan
from halfstep.report.ops import op_lines, op_table

Text = Annotated[str, typer.Argument(metavar="TEXT", help="Only ops whose name contains this.")]
PlanName = Annotated[str, typer.Option("--plan", help="The level, or plan file, whose treatment of each op is shown.")]
Low = Annotated[str, typer.Option("--low", help="The low format: bf16 or fp16.")]


def ops(text: Text = "", plan: PlanName = "O1", low: Low = "bf16") -> None:
    """Print the op table: which op runs low, which in fp32, which in the format of its widest input, and why."""
    chosen, _ = choose_plan(plan, low, read_facts(torch.device("cpu")))
    lines = [line for line in op_lines(chosen) if text in line.op]
    if not lines:
        raise PlanError(
            f"no op in the table has {text!r} in its name; ops that are not in the table run in the formats of their "
            "inputs"
        )
    stdout().print(op_table(lines, plan=chosen.name))
