"""What commands about one workload print: findings of `check`, the step of `inspect`, the prediction of `whatif`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from halfstep.edits import spell
from halfstep.explain.report.tables import MIB, Columns, table
from halfstep.measurements import Inspection
from halfstep.records import ONE_SCALE, SEVERITIES, TENSOR_KINDS, Finding, Foreseen, Rounded, WhatIf

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
ROWS, NAMED = 20, 3  # operations of a step, and modules or kernels of one kind
GIGA = 1e9
STAY_FULL = "stay full"  # the code of findings on modules
SHOWN = 8  # modules that should stay full, of each format


def check_text(found: Sequence[Finding], *, what: str) -> Text:
    """Returns the findings as text: place, evidence, advice, and edits that the advice does not spell out."""
    counts = Counter(finding.severity for finding in found)
    words = [f"{counts[each]} {each}{'s' * (counts[each] != 1)}" for each in reversed(SEVERITIES) if counts[each]]
    text = Text(f"{what}: {', '.join(words) or 'nothing found'}")
    for finding in found:
        text.append("\n\n")
        text.append(f"{finding.severity}: {finding.code}", style=STYLES[finding.severity])
        text.append(f" at {finding.place}\n  seen: {finding.evidence}\n  do:   {finding.advice}")
        for edit in () if spell(finding.cure) in finding.advice else finding.cure:
            text.append(f"\n  edit: {edit!r}")
    return text


# ---- inspect

OPERATIONS: Columns = {
    "operation": lambda row: row.operator,
    "pass": lambda row: row.phase,
    "formats": lambda row: " -> ".join(  # repeats as counts: "2 bf16"
        ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(side.split(", ")).items())
        for side in row.formats.split(" -> ")
    ),
    "calls": lambda row: f"{row.calls:,}",
    "GFLOP": lambda row: f"{row.flops / GIGA:,.3f}" if row.flops else None,
    "MiB": lambda row: f"{row.bytes / MIB:,.1f}",
    "ms": lambda row: f"{1e3 * row.seconds:,.2f}",
    "share": lambda row: f"{row.share:.1%}",
}


def inspection_report(found: Inspection, *, what: str) -> Group:
    """Returns the slowest operations, the casts, and what would save time; `what` names what was inspected."""
    head = f"{what}: {1e3 * found.seconds:,.1f} ms in operations, each timed alone"
    if found.emulated:
        head += f"; {found.low} is emulated here, so times are not those of a device with units for it"
    shown, rest = found.rows[:ROWS], found.rows[ROWS:]
    parts: list[RenderableType] = [Text(head), Text(), table(shown, OPERATIONS, words=("operation", "pass", "formats"))]
    if rest:
        parts.append(Text(f"and {len(rest)} more rows, {sum(row.share for row in rest):.1%} of the time"))
    return Group(*parts, Text(), *map(Text, _of_inspection(found)))


def _modules(found: Inspection) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in found.modules:
        groups.setdefault((each.type, each.param, each.compute, each.output, each.reason), []).append(each.name)
    for (kind, param, compute, output, reason), names in groups.items():
        named = ", ".join(name or "(model)" for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        yield f"{len(names)} {kind} ({named}): param {param}, compute {compute}, output {output}; why: {reason}"


def _kernels(found: Inspection) -> Iterator[str]:
    for work in dict.fromkeys(row.work for row in found.kernels):
        rows = [row for row in found.kernels if row.work == work]
        rest = [row for row in rows if not row.tensor_cores]
        took, slow = sum(row.seconds for row in rows), sum(row.seconds for row in rest)
        named = f"; not: {', '.join(row.name for row in rest[:NAMED])}" if rest else ""
        yield f"{work}: {1e3 * took:,.2f} ms in kernels, {1 - slow / took:.0%} of it on tensor cores{named}"


def _of_inspection(found: Inspection) -> Iterator[str]:
    for cast in found.casts:
        yield (
            f"casts {cast.source} to {cast.target}: {cast.calls:,} ({cast.of_parameters:,} of parameters), "
            f"{cast.bytes / MIB:,.1f} MiB, {1e3 * cast.seconds:,.2f} ms"
        )
    yield from (*_kernels(found), "", *_modules(found), "")
    yield from found.remarks()
    if not found.savings:
        yield "Nothing was found that would save 1% of the step or more."
    for saving in found.savings:
        saved = "no gain measured"
        if saving.seconds is not None:
            saved = f"would save {1e3 * saving.seconds:,.2f} ms, {saving.seconds / found.seconds:.0%} of the step"
        yield f"{saving.code} at {saving.place}: {saved}"
        yield f"  seen: {saving.evidence}"
        yield f"  do:   {saving.advice}"
        yield from (f"  edit: {edit!r}" for edit in saving.cure)


# ---- whatif

SCALES: Columns = {
    "loss scale": lambda row: row.format,
    "smallest safe": lambda row: (least := row.smallest) and (f"{least:.8g}" if least > 1 else "1 or less"),
    "largest safe": lambda row: f"{row.largest:.4g}",
    "recommended": lambda row: "none needed" if row.recommended == 1 else f"{row.recommended:.8g}",
    "dynamic settles at": lambda row: (
        None if row.recommended == 1 else " to ".join(dict.fromkeys(f"{scale:.8g}" for scale in row.settles))
    ),
    "set by": lambda row: f"{row.place or '(model)'}, gradient {row.largest_gradient:.3g}",
}
KINDS: Columns = {
    "format": lambda group: group[0].format,
    "tensors": lambda group: group[0].kind,
    "at scale": lambda group: f"{_worst(group).scale:.8g}",
    "lost": lambda group: _percent(_mean(group, "lost")),
    "saturated": lambda group: _percent(_mean(group, "saturated")),
    "SNR dB": lambda group: _decibels(_worst(group).snr_db),
    "lowest SNR at": lambda group: _worst(group).module or "(model)",
}
MODULES: Columns = {
    "module": lambda row: row.module or "(model)",
    "tensors": lambda row: row.kind,
    "format": lambda row: row.format,
    "stored": lambda row: "low" if row.low else "full",
    "at scale": lambda row: f"{row.scale:.8g}",
    "lost": lambda row: _percent(row.lost),
    "saturated": lambda row: _percent(row.saturated),
    "SNR dB": lambda row: _decibels(row.snr_db),
}
PRODUCTS: Columns = {
    "products": lambda rows: rows[0].recipe,
    "product": lambda rows: rows[0].loss.product,
    "operand": lambda rows: rows[0].loss.operand,
    "lost": lambda rows: _percent(_share(rows, "flushed")),
    "saturated": lambda rows: _percent(_share(rows, "saturated")),
    "error": lambda rows: f"{_farthest(rows).error:.1%}",
    "product's": lambda rows: f"{_farthest(rows).product_error:.1%}",
    "largest at": lambda rows: _farthest(rows).loss.layer,
}
WORDS = (
    "loss scale", "set by", "format", "tensors", "lowest SNR at", "module", "stored", "products", "product", "operand",
    "largest at",
)  # fmt: skip


def whatif_report(result: WhatIf, *, modules: bool = False) -> Group:
    """Returns tables of safe loss scales, effects of formats, and modules to keep full (`modules`: all)."""
    kinds = (
        [row for row in result.rows if row.low and (row.format, row.kind) == (fmt, kind)]
        for fmt in result.formats
        for kind in TENSOR_KINDS
    )
    shown: list[tuple[Iterable[object], Columns]] = [(result.scales, SCALES), (filter(None, kinds), KINDS)]
    recast: dict[object, list[Foreseen]] = {}
    for row in result.products:
        key = row.recipe, row.loss.product, row.loss.operand, row.loss.layer if modules else ""
        recast.setdefault(key, []).append(row)
    shown += [(recast.values(), PRODUCTS)] if recast else []
    shown += [(result.rows, MODULES)] if modules else []
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    parts: list[RenderableType] = [Text(f"predicted from {steps} in fp32, for what plan {result.plan} stores low")]
    for rows, columns in shown:
        parts += [Text(), table(rows, columns, words=WORDS)]
    return Group(*parts, Text(), *map(Text, _of_whatif(result)))


def _of_whatif(result: WhatIf) -> Iterator[str]:
    for fmt in result.formats:
        others = [finding for finding in result.stay_full[fmt] if finding.code != STAY_FULL]
        findings = [finding for finding in result.stay_full[fmt] if finding.code == STAY_FULL]
        yield f"{fmt}: {len(findings) or 'no'} module{'' if len(findings) == 1 else 's'} should stay full"
        yield from (f"  {finding.place}: {finding.evidence}" for finding in findings[:SHOWN])
        if len(findings) > SHOWN:
            yield f"  and {len(findings) - SHOWN} more"
        for finding in others:
            yield f"{fmt}: {finding.code} at {finding.place}: {finding.evidence}; {finding.advice}"
    if eight := [fmt for fmt in result.formats if fmt in ("e4m3", "e5m2")]:
        yield f"{' and '.join(eight)}: {ONE_SCALE}"
    for recipe in dict.fromkeys(row.recipe for row in result.products):
        much = result.stay_full[recipe]
        yield f"products {recipe}: {len(much) or 'no'} layer{'' if len(much) == 1 else 's'} would lose much"
        yield from (f"  {finding.evidence.partition(': ')[2]}" for finding in much[:SHOWN])
    yield (
        "Lost: nonzero values that become zero. SNR: squares of the values over squares of their rounding errors;"
        " 20 dB is a ratio of 100. Safe: the largest gradient times the scale is below the format's largest"
        " value, and each module's gradients have 20 dB."
    )


def _worst(group: Sequence[Rounded]) -> Rounded:
    return min(group, key=lambda row: row.snr_db)


def _mean(rows: Sequence[Rounded], name: str) -> float:
    counts = [(getattr(row, name), row.stats.nonzero if name == "lost" else row.stats.count) for row in rows]
    return float(sum(share * count for share, count in counts) / max(1, sum(count for _, count in counts)))


def _share(rows: Sequence[Foreseen], name: str) -> float:
    return float(sum(getattr(row.loss, name) for row in rows) / sum(row.loss.elements for row in rows))


def _farthest(rows: Sequence[Foreseen]) -> Foreseen:
    return max(rows, key=lambda row: row.error)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


def _decibels(value: float) -> str:
    return f"{value:.0f}" if isfinite(value) else "exact" if value > 0 else "none"
