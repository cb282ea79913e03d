"""The command `halfstep levels`, which prints what each level does."""

from __future__ import annotations

from halfstep.cli.screen import stdout
from halfstep.plan.levels import LEVELS
from halfstep.report.levels import level_table


def levels() -> None:
    """Print the levels O0 to O3: what each stores low, casts and scales."""
    stdout().print(level_table(LEVELS.values()))
