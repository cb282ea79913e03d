"""The documentation pages that commands and errors refer to, by topic."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
FOLDER = next((folder for folder in (_HERE / "docs", _HERE.parent / "docs") if folder.is_dir()), _HERE)  # of all pages
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
    """Returns the words that refer to a page, such as "more: docs/nan.md"."""
    return f"more: {page}"
