"""Writes the results of commands as JSON."""

from __future__ import annotations

import json
import re

from halfstep.explain.report.lines import plain

_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def to_json(result: object) -> str:
    """Returns records as JSON with field names as keys; non-finite numbers become the text "nan", "inf" or "-inf"."""
    text = json.dumps(plain(result), indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"
