"""The commands without a workload: `halfstep levels` and `ops` print what plans do, `doctor` measures this machine."""

from __future__ import annotations

from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Annotated

import torch
import typer

from halfstep.cli.options import Device, Json, Quiet, check_writable, device_of, progress_bar, stdout, write
from halfstep.edits import OpChange
from halfstep.errors import PlanError
from halfstep.explain.report.lines import to_json
from halfstep.explain.report.tables import doctor_report, level_table, op_table
from halfstep.lab.doctor.doctor import examine
from halfstep.machine import read_facts
from halfstep.plan.io import choose_plan
from halfstep.plan.levels import LEVELS
from halfstep.plan.optable import find

Text = Annotated[str, typer.Argument(metavar="TEXT", help="Only ops whose name contains this, or of this list.")]
PlanName = Annotated[str, typer.Option("--plan", "--level", help="The level, or plan file, to show each op under.")]
Low = Annotated[str, typer.Option("--low", help="The low format: bf16 or fp16.")]


def levels() -> None:
    """Print the levels O0 to O3: what each stores low, casts and scales."""
    stdout().print(level_table(LEVELS.values()))


def ops(text: Text = "", plan: PlanName = "O1", low: Low = "bf16") -> None:
    """Print the op table: which op runs low, which in fp32, which in the format of its widest input, and why."""
    chosen, _ = choose_plan(plan, low, read_facts(torch.device("cpu")))
    plain = text.removeprefix("torch.")
    alike = op_table(chosen, lambda line: plain in line.op or text == line.category)
    own = op_table(chosen, lambda line: line.op.partition(".")[0] == plain or text in ("", line.category))
    if own is None and ":" not in text:
        try:
            named = {overload.partition(".")[0] for overload in find(text)}
        except PlanError:  # no op of torch that can be cast, perhaps a part of names
            if alike is None or hasattr(torch.ops.aten, plain):  # it writes in place, is a view, or the like
                raise
            own = alike
        else:
            own = op_table(chosen, lambda line: line.op in named)
    if own is None:
        runs = "is not in the table: it runs in the formats of its inputs"
        what = "is a Python function, whose operations run by their own rows" if ":" in text else runs
        deny = f'deny it: ops={{"deny": ["{text}"]}} in halfstep.initialize, or plan.edit({OpChange("deny", text)})'
        _check_module(*text.partition(":")[:2])
        to = "at O0 all ops do" if chosen.ops == "none" else f"to run it in fp32, {deny}"
        stdout().print(f"{text} {what}; {to}.", soft_wrap=True)
    found = own if alike is None else alike
    if found is not None:
        stdout().print(found)


def _check_module(name: str, colon: str) -> None:
    """Refuses a "module:function" whose module cannot be imported, from the current folder either; imports none."""
    with suppress(ImportError, ValueError):  # of a package before the last dot
        if not colon or find_spec(name) or PathFinder.find_spec(name.partition(".")[0], [""]):
            return
    raise PlanError(f"module {name!r} cannot be imported; name an importable module before the colon")


Save = Annotated[bool, typer.Option("--save", help="Save the measurements; later sessions on this machine use them.")]


def doctor(device: Device = "auto", json: Json = None, save: Save = False, quiet: Quiet = False) -> None:
    """Measure this machine's speed in each format, and recommend what to train in; takes half a minute."""
    place = device_of(device)
    check_writable(json)
    with progress_bar("parts", quiet=quiet) as now:
        found = examine(place, told=lambda what, done, parts: now(f"measuring {what}", done, parts), keep=save)
    stdout().print(doctor_report(found))
    write(json, to_json(found))
