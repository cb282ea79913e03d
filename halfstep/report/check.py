"""The findings of a check, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from halfstep.edits import spell
from halfstep.records import SEVERITIES, Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def check_text(found: Sequence[Finding], *, what: str) -> Text:
    """Returns the findings as text: place, evidence, advice, and edits that the advice does not spell out."""
    text = Text(f"{what}: {_counts(found)}")
    for finding in found:
        text.append("\n\n")
        text.append(f"{finding.severity}: {finding.code}", style=STYLES[finding.severity])
        text.append(f" at {finding.place}\n  seen: {finding.evidence}\n  do:   {finding.advice}")
        for edit in () if spell(finding.cure) in finding.advice else finding.cure:
            text.append(f"\n  edit: {edit!r}")
    return text


def _counts(found: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in found)
    words = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in reversed(SEVERITIES)
        if counts[severity]
    ]
    return ", ".join(words) or "nothing found"
