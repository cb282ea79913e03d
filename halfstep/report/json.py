"""Results of commands as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.machine import Machine
from halfstep.measurements import BenchResult, Examination, Footprint, Inspection, Largest, Rate, Sweep
from halfstep.records import Finding, WhatIf
from halfstep.report.lines import plain

_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def bench_json(result: BenchResult) -> str:
    """Returns every figure of a benchmark as JSON; a non-finite number is the text "nan", "inf" or "-inf"."""
    fields = plain(result)
    _round_times(fields)
    return _json(fields)


def sweep_json(result: Sweep) -> str:
    """Returns every figure of a sweep as JSON; one that was read from such JSON gives the same bytes."""
    fields = plain(result)
    for point in fields["points"]:
        _round_times(point["result"])
    return _json(fields)


def largest_json(found: Sequence[Largest], *, asked: Mapping[str, str], command: str) -> str:
    """Returns the largest batches, with what was asked and what was tried, as JSON."""
    return _json({"command": command, "asked": dict(asked), "largest": plain(found)})


def compute_json(found: Sequence[Rate | Footprint], *, machine: Machine, command: str) -> str:
    """Returns what formats cost by themselves as JSON."""
    return _json({"command": command, "machine": plain(machine), "rows": plain(found)})


def _round_times(result: dict[str, Any]) -> None:
    for run in result["runs"]:
        run["times_ms"] = [round(each, 3) for each in run["times_ms"]]  # no clock here is better than a microsecond


def whatif_json(result: WhatIf) -> str:
    """Returns a prediction as JSON, with the histogram of each kind of tensor of each module."""
    return _json(plain(result))


def check_json(found: Sequence[Finding], *, workload: str, plan: str, low: str) -> str:
    """Returns the findings of a check, with the edits that cure them, and what was checked as JSON."""
    return _json({"workload": workload, "plan": plan, "low": low, "findings": plain(found)})


def doctor_json(found: Examination) -> str:
    """Returns what was measured of a machine as JSON."""
    return _json(plain(found))


def inspection_json(found: Inspection, *, workload: str) -> str:
    """Returns where the time of a step goes as JSON."""
    return _json({"workload": workload} | plain(found))


def _json(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"
