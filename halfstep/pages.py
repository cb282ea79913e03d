"""The documentation pages that commands and errors refer to, by topic."""

from __future__ import annotations

FRONT = "docs/index.md"
QUICKSTART = "docs/quickstart.md"
GUIDE = "docs/guide.md"
LEVELS = "docs/which-level.md"
NAN = "docs/nan.md"
MISMATCH = "docs/mismatch.md"
DIAGNOSIS = "docs/diagnosis.md"
SLOWER = "docs/slower.md"
PLANS = "docs/plans.md"
SEEING = "docs/seeing.md"
TRAINERS = "docs/trainers.md"
PROCESSES = "docs/processes.md"
MIGRATION = "docs/migration.md"
LIMITS = "docs/limits.md"
SUPPORT = "docs/support.md"


def more(page: str) -> str:
    """Returns the words that refer to a page.

    >>> more(NAN)
    'more: docs/nan.md'
    """
    return f"more: {page}"
