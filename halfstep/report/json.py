"""Writes the results of commands as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from halfstep.measurements import BenchResult, Sweep
from halfstep.report.lines import plain

_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def to_json(result: object) -> str:
    """Returns records as JSON with field names as keys; non-finite numbers become the text "nan", "inf" or "-inf"."""
    text = json.dumps(plain(result), indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"


def bench_json(result: BenchResult) -> str:
    """Returns every figure of a benchmark as JSON."""
    fields = plain(result)
    _round_times(fields)
    return to_json(fields)


def sweep_json(result: Sweep) -> str:
    """Returns every figure of a sweep as JSON."""
    fields = plain(result)
    for point in fields["points"]:
        _round_times(point["result"])
    return to_json(fields)


def _round_times(result: dict[str, Any]) -> None:
    for run in result["runs"]:
        run["times_ms"] = [round(each, 3) for each in run["times_ms"]]  # no clock here is better than a microsecond
