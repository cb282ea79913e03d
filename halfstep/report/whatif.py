"""The tables of a what-if prediction, for the terminal: what training in other formats would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfstep.records import TENSOR_KINDS, Rounded, ScaleRange, WhatIf

WORDS = ("loss scale", "set by", "format", "tensors", "lowest SNR at", "module", "stored")  # not numbers
STAY_FULL = "stay full"  # the code of findings on modules
SHOWN = 8  # modules that should stay full, of each format


def whatif_table(result: WhatIf, *, modules: bool = False) -> Group:
    """Returns tables of safe loss scales, of the effect of formats on each kind of tensor, and of modules to keep full.

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
    rows = []
    for entry in scales:
        low, high = entry.settles
        unneeded = entry.recommended == 1
        line = (
            entry.format,
            "-" if entry.smallest is None else "1 or less" if entry.smallest <= 1 else f"{entry.smallest:.8g}",
            f"{entry.largest:.4g}",
            "none needed" if unneeded else f"{entry.recommended:.8g}",
            "-" if unneeded else f"{low:.8g}" if low == high else f"{low:.8g} to {high:.8g}",
            f"{entry.place or '(model)'}, gradient {entry.largest_gradient:.3g}",
        )
        rows.append(line)
    return _table(("loss scale", "smallest safe", "largest safe", "recommended", "dynamic settles at", "set by"), rows)


def _whole(rows: Sequence[Rounded], formats: Sequence[str]) -> Table:
    lines = []
    for fmt in formats:
        for kind in TENSOR_KINDS:
            group = [row for row in rows if row.format == fmt and row.kind == kind]
            if not group:
                continue
            worst = min(group, key=lambda row: row.snr_db)
            line = (
                fmt,
                kind,
                f"{worst.scale:.8g}",
                _percent(_mean(group, "lost")),
                _percent(_mean(group, "saturated")),
                _decibels(worst.snr_db),
                worst.module or "(model)",
            )
            lines.append(line)
    return _table(("format", "tensors", "at scale", "lost", "saturated", "SNR dB", "lowest SNR at"), lines)


def _modules(rows: Sequence[Rounded]) -> Table:
    lines = [
        (
            row.module or "(model)",
            row.kind,
            row.format,
            "low" if row.low else "full",
            f"{row.scale:.8g}",
            _percent(row.lost),
            _percent(row.saturated),
            _decibels(row.snr_db),
        )
        for row in rows
    ]
    return _table(("module", "tensors", "format", "stored", "at scale", "lost", "saturated", "SNR dB"), lines)


def _below(result: WhatIf) -> Iterator[str]:
    for fmt in result.formats:
        others = [finding for finding in result.stay_full[fmt] if finding.code != STAY_FULL]
        findings = [finding for finding in result.stay_full[fmt] if finding.code == STAY_FULL]
        yield f"{fmt}: {len(findings) or 'no'} module{'' if len(findings) == 1 else 's'} should stay full"
        for finding in findings[:SHOWN]:
            yield f"  {finding.place}: {finding.evidence}"
        if len(findings) > SHOWN:
            yield f"  and {len(findings) - SHOWN} more"
        for finding in others:
            yield f"{fmt}: {finding.code} at {finding.place}: {finding.evidence}; {finding.advice}"
    yield (
        "Lost: nonzero values that become zero. SNR: squares of the values over squares of their rounding errors;"
        " 20 dB is a ratio of 100. Safe: the largest gradient times the scale is below the format's largest"
        " value, and each module's gradients have 20 dB."
    )


def _mean(rows: Sequence[Rounded], name: str) -> float:
    weights = [row.stats.nonzero if name == "lost" else row.stats.count for row in rows]
    total = sum(weights)
    return sum(getattr(row, name) * weight for row, weight in zip(rows, weights, strict=True)) / total if total else 0.0


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Returns a table that, in a narrow terminal, wraps names and headers but never figures."""
    table = Table(box=None, padding=(0, 1))
    for header, *cells in zip(headers, *lines, strict=True):
        figures = [word for cell in cells for word in cell.split() if header not in WORDS]
        table.add_column(
            header,
            overflow="fold",
            justify="left" if header in WORDS else "right",
            min_width=max(map(len, figures), default=None),
        )
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


def _decibels(value: float) -> str:
    return f"{value:.0f}" if isfinite(value) else "exact" if value > 0 else "none"
