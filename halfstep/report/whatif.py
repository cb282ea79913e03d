"""A prediction of what other formats would do, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfstep.records import TENSOR_KINDS, Rounded, ScaleRange, WhatIf

WORDS = ("loss scale", "set by", "format", "tensors", "lowest SNR at", "module", "stored")  # not numbers
SHOWN = 8  # modules that should stay full, of each format


def whatif_table(result: WhatIf, *, modules: bool = False) -> Group:
    """Returns the safe loss scales, what formats do to each kind of tensor, and which modules should stay full.

    `modules` adds a row for each module and kind.
    """
    low = [row for row in result.rows if row.low]
    parts: list[RenderableType] = [_scales(result.scales), Text(), _whole(low, result.formats), Text()]
    parts += [_modules(result.rows), Text()] if modules else []
    return Group(Text(_title(result)), Text(), *parts, *(Text(line) for line in _below(result)))


def _title(result: WhatIf) -> str:
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    return f"predicted from {steps} in fp32, for what plan {result.plan} stores low"


def _scales(scales: Iterable[ScaleRange]) -> Table:
    table = _table("loss scale", "smallest safe", "largest safe", "recommended", "dynamic settles at", "set by")
    for entry in scales:
        low, high = entry.settles
        unneeded = entry.recommended == 1
        table.add_row(
            entry.format,
            "-" if entry.smallest is None else "1 or less" if entry.smallest <= 1 else f"{entry.smallest:g}",
            f"{entry.largest:.4g}",
            "none needed" if unneeded else f"{entry.recommended:g}",
            "-" if unneeded else f"{low:g}" if low == high else f"{low:g} to {high:g}",
            escape(f"{entry.place or '(model)'}, gradient {entry.largest_gradient:.3g}"),
        )
    return table


def _whole(rows: Sequence[Rounded], formats: Sequence[str]) -> Table:
    table = _table("format", "tensors", "at scale", "lost", "saturated", "SNR dB", "lowest SNR at")
    for fmt in formats:
        for kind in TENSOR_KINDS:
            group = [row for row in rows if row.format == fmt and row.kind == kind]
            if not group:
                continue
            worst = min(group, key=lambda row: row.snr_db)
            table.add_row(
                fmt,
                kind,
                f"{worst.scale:g}",
                _percent(_mean(group, "lost")),
                _percent(_mean(group, "saturated")),
                _decibels(worst.snr_db),
                escape(worst.module or "(model)"),
            )
    return table


def _modules(rows: Sequence[Rounded]) -> Table:
    table = _table("module", "tensors", "format", "stored", "at scale", "lost", "saturated", "SNR dB")
    for row in rows:
        table.add_row(
            escape(row.module or "(model)"),
            row.kind,
            row.format,
            "low" if row.low else "full",
            f"{row.scale:g}",
            _percent(row.lost),
            _percent(row.saturated),
            _decibels(row.snr_db),
        )
    return table


def _below(result: WhatIf) -> Iterator[str]:
    for fmt in result.formats:
        findings = result.stay_full[fmt]
        yield f"{fmt}: {len(findings) or 'no'} module{'' if len(findings) == 1 else 's'} should stay full"
        for finding in findings[:SHOWN]:
            yield f"  {finding.place}: {finding.evidence}"
        if len(findings) > SHOWN:
            yield f"  and {len(findings) - SHOWN} more"
    yield (
        "Lost: nonzero values that become zero. SNR: squares of the values over squares of their rounding errors;"
        " 20 dB is one part in a hundred. Safe: the largest gradient times the scale is below the format's largest"
        " value, and each module's gradients have 20 dB."
    )


def _mean(rows: Sequence[Rounded], name: str) -> float:
    weights = [row.stats.nonzero if name == "lost" else row.stats.count for row in rows]
    total = sum(weights)
    return sum(getattr(row, name) * weight for row, weight in zip(rows, weights, strict=True)) / total if total else 0.0


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1))
    for header in headers:
        table.add_column(header, no_wrap=True, justify="left" if header in WORDS else "right")
    return table


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


def _decibels(value: float) -> str:
    return f"{value:.0f}" if isfinite(value) else "exact" if value > 0 else "none"
