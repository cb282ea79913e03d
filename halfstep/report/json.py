"""Results of commands as JSON, and a benchmark back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import msgspec

from halfstep.errors import DataError
from halfstep.records import BenchResult, Finding, WhatIf

_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def bench_json(result: BenchResult) -> str:
    """Returns every figure of a benchmark as JSON; a non-finite number is the text "nan", "inf" or "-inf"."""
    return _json(asdict(result))


def whatif_json(result: WhatIf) -> str:
    """Returns a prediction as JSON, with the histogram of each kind of tensor of each module."""
    return _json(asdict(result))


def check_json(found: Sequence[Finding], *, workload: str, plan: str, low: str) -> str:
    """Returns the findings of a check, with the edits that cure them, and what was checked as JSON."""
    return _json({"workload": workload, "plan": plan, "low": low, "findings": [asdict(finding) for finding in found]})


def read_bench(text: str | bytes) -> BenchResult:
    """Returns the benchmark that `bench_json` wrote.

    Raises:
        DataError: the text is not JSON, or not of a benchmark; the message has the place in the file.
    """
    try:
        return msgspec.convert(json.loads(text), BenchResult, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise DataError(f"not the JSON of a benchmark: {error}") from error


def _json(fields: dict[str, Any]) -> str:
    text = json.dumps(_plain(fields), indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"


def _plain(value: Any) -> Any:
    """Returns the value in what JSON has; times to a microsecond, as no clock here is better."""
    if isinstance(value, dict):
        return {
            key: [round(v, 3) for v in inner] if key == "times_ms" else _plain(inner) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
