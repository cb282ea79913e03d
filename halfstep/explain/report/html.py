"""Pages of runs and measurements: one HTML file that opens without a network, with no more points than a screen."""

from __future__ import annotations

import base64
import gzip
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import numpy.typing as npt
import torch

from halfstep.edits import Edit, spell
from halfstep.errors import HalfstepError, LogError
from halfstep.explain.report.gather import FIRST, MEASURES, MODEL, AbsorbedAt, Gathered, PrecisionOf, Sums, gather
from halfstep.explain.report.headline import GRADIENTS, Headline, headline
from halfstep.explain.report.lines import Event
from halfstep.explain.report.run import PROCESSES, ProcessRow, Run, shown
from halfstep.explain.report.sweep import Sheet
from halfstep.explain.report.tables import cells
from halfstep.formats import FORMATS, FP16, NARROW, Format, as_format
from halfstep.later import COLUMNS
from halfstep.plan.io import from_dict
from halfstep.records import (
    ABSORBED_SAMPLE,
    LIMITS,
    SEVERITIES,
    SUSPECT,
    UPDATE,
    UPDATE_LIMITS,
    Array,
    Limits,
    StepValues,
    Verdict,
    absorbed_finding,
    limits_of,
    skips_in_words,
)

POINTS = 4000  # of a line; more steps are thinned to the smallest and the largest value of each group
SHOWN = NARROW
UNPLANNED = FP16  # what a log without a plan is judged by
HIGHEST = 24  # the exponent of the largest loss scale that the histogram can be shown with, unless the run had a larger
PHASES = {"forward": ("activation", *GRADIENTS), "backward": GRADIENTS}  # what a verdict may show in, by its phase
KINDS = (*GRADIENTS, "activation", "weight", UPDATE)


@dataclass(frozen=True)
class TableRow:
    """A verdict or finding in the table of the page."""

    step: int
    severity: str
    what: str
    place: str
    evidence: str
    advice: str
    edit: str


@dataclass(frozen=True)
class Page:
    """The page of a run: its headline, facts, notes on what the log lacks, verdicts and findings, and chart data."""

    title: str
    headline: Headline
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    rows: tuple[TableRow, ...]
    charts: dict[str, Any]


def page_of(run: Run, low: Format | torch.dtype | str | None = None, *, now: float | None = None) -> Page:
    """Returns the page of a run; `now`, by default the time of the call, decides whether it counts as going on."""
    if not isinstance(run, Run):
        raise LogError(f"expected a Run, as read_log(path) returns it, got {run!r:.60}")
    planned = None if run.plan is None else FORMATS.get(str(run.plan.get("low")))
    judge = (planned or UNPLANNED) if low is None else as_format(low)
    gathered = gather(run.observations(), run.observed, judge, run.modules)
    found = headline(run, gathered, time.time() if now is None else now)
    return Page(
        title=shown(f"{run.path.resolve().parent.name}/{run.path.name}"),
        headline=found,
        facts=tuple(_facts(run, judge)),
        notes=run.notes,
        rows=tuple(_rows(run, gathered)),
        charts=_charts(run, gathered, found),
    )


def _charts(run: Run, gathered: Gathered, found: Headline) -> dict[str, Any]:
    """Returns the data of the charts; all shares are computed here, none in JavaScript."""
    judge, steps = gathered.low, run.steps
    formats = tuple(dict.fromkeys((*SHOWN, judge)))
    shift = _shift(steps)
    moves = range(min(0, shift), max(HIGHEST, shift) + 1)
    kinds = sorted(gathered.kinds, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))
    skips = [values.step for values in steps if values.skipped]
    return {
        "formats": {fmt.name: _limits(limits_of(fmt)) for fmt in formats},
        "update": {"kind": UPDATE, **_limits(UPDATE_LIMITS)},
        "low": judge.name,
        "shift": shift,
        "shifts": [moves[0], moves[-1]],
        "timeline": {
            "verdicts": [[each.step, each.record.kind] for each in run.events if isinstance(each.record, Verdict)],
            "first": steps[0].step if steps else 0,
            "last": steps[-1].step if steps else 0,
            "steps": len(steps),
            "skipped": len(skips),
            "skips": _some(skips),
            "broken": _some([it.step for it in steps if it.bad_loss or not math.isfinite(it.loss or 0.0)]),
            "lines": {name: _line(name, steps) for name in COLUMNS},
        },
        "columns": [list(column) for column in gathered.columns],
        "gradients": GRADIENTS,
        "kinds": {kind: _kind(kind, gathered.kinds[kind], formats, moves) for kind in kinds},
        "focus": _focus(gathered, found.verdict),
    }


def thin(values: Array, points: int = POINTS) -> npt.NDArray[np.int64]:
    """Returns the indices of at most `points` values that, drawn as a line, look like all values.

    >>> thin(np.array([3.0, 1.0, 2.0, 9.0, 5.0, 5.0, 5.0, 4.0]), points=6)  # of each group the smallest and the largest
    array([0, 1, 3, 4, 7])
    """
    if len(values) <= points:
        return np.arange(len(values))
    chosen = {0, len(values) - 1}
    for group in np.array_split(np.arange(len(values)), max(1, points // 2 - 1)):
        finite = group[np.isfinite(values[group])]
        if len(finite):
            chosen.update((int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])))
        else:  # where the line has a gap
            chosen.add(int(group[0]))
    return np.array(sorted(chosen))


def _line(name: str, steps: Sequence[StepValues]) -> dict[str, Any]:
    """Returns the line of the field `name` over the steps, as points `x` and `y` for JavaScript."""
    given = [(values.step, value) for values in steps if (value := getattr(values, name)) is not None]
    number, value = (np.array(column, dtype=np.float64) for column in (zip(*given, strict=True) if given else ((), ())))
    places = thin(value)
    if name == "scale" and len(value):  # constant between its changes
        places = np.unique([0, *np.flatnonzero(np.diff(value)) + 1, len(value) - 1])
        places = places[thin(value[places])]
    return {"x": number[places].tolist(), "y": _short(np.where(np.isfinite(value), value, np.nan)[places], 12)}


def _some(steps: Sequence[float], points: int = POINTS // 2) -> list[int]:
    return [int(steps[int(place)]) for place in np.linspace(0, len(steps) - 1, min(len(steps), points))]


def _shift(steps: Sequence[StepValues]) -> int:
    """Returns log2 of the most frequent loss scale of unskipped steps, of equally frequent ones the last."""
    # The last scale would not do: a failing run ends with lower and lower scales.
    made = [values.scale for values in steps if 0 < values.scale < math.inf and not values.skipped]
    tried = [values.scale for values in steps if 0 < values.scale < math.inf] or [1.0]
    return round(math.log2(Counter(reversed(made or tried[-1:])).most_common(1)[0][0]))


def _focus(gathered: Gathered, event: Event | None) -> dict[str, Any] | None:
    """Returns what the page shows first for a verdict: a kind of tensor and a module; None if nothing fits."""
    if event is None or not isinstance(event.record, Verdict):
        return None
    verdict = event.record
    kinds = [kind for kind in verdict.kind.focus or PHASES.get(verdict.phase, ()) if kind in gathered.kinds]
    near = {kind: _nearest(verdict.module or MODEL, gathered.kinds[kind].modules) for kind in kinds}
    saturated = MEASURES.index("saturated")
    beyond = [
        kind
        for kind in kinds
        if (name := near[kind][1]) is not None
        and (sums := gathered.kinds[kind]).shares[sums.modules.index(name), :, saturated].any()
    ]
    chosen = min(beyond or kinds, key=lambda kind: near[kind][0], default=None)
    if chosen is None:
        return None
    return {"kind": chosen, "module": near[chosen][1], "saturated": bool(beyond)}


def _nearest(name: str, modules: Sequence[str]) -> tuple[int, str | None]:
    """Returns (distance, module) of a module in `modules`, or of the closest around it, or of one inside it.

    >>> _nearest("h.1.attn", ["h", "h.1"]), _nearest("h", ["h.0", "h.1"]), _nearest("h.1", ["h.10"])
    ((1, 'h.1'), (100, 'h.0'), (10000, None))
    """
    if name in modules:
        return 0, name
    around = [each for each in modules if name.startswith(f"{each}.")]
    if around:
        closest = max(around, key=len)
        return name.count(".") - closest.count("."), closest
    inside = [each for each in modules if each.startswith(f"{name}.")]
    return (100, inside[0]) if inside else (10000, None)


def _limits(limits: Limits) -> dict[str, Any]:
    """Returns a format's limits for JavaScript, as base-2 logarithms, and its largest value as `max`."""
    endless = math.isinf(limits.top)
    return {
        "zero": math.log2(limits.zero),
        "normal": math.log2(limits.normal),
        "top": None if endless else math.log2(limits.top),
        "max": None if endless else limits.top,
    }


def _kind(kind: str, sums: Sums, formats: Sequence[Format], moves: Sequence[int]) -> dict[str, Any]:
    used = np.flatnonzero(sums.histogram[0])
    first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    scales = [2.0**move for move in moves] if kind in GRADIENTS else [1.0]
    limits = (
        {UPDATE: UPDATE_LIMITS} if kind == UPDATE else {fmt.name: LIMITS.get(kind) or limits_of(fmt) for fmt in formats}
    )
    counted = sums.shares.sum(1)  # in all steps
    by, totals = _shares(sums.shares[1:]), _shares(counted)
    totals["subnormal"] = totals["small"] - totals["lost"]
    return {
        "modules": sums.modules,
        "formats": sorted(sums.formats),
        "sampled": sums.sampled,
        "first": FIRST + first,
        "bins": end - first,
        "share": _short(sums.histogram[:, first:end] / np.maximum(1, sums.histogram.sum(1, keepdims=True))),
        "judged": {  # by format: of each module and loss scale the lost, subnormal and saturated share
            name: _short(np.stack([sums.judge(each, scale) for scale in scales], axis=1))
            for name, each in limits.items()
        },
        "nonzero": counted[:, MEASURES.index("nonzero")].tolist(),
        "count": counted[:, MEASURES.index("count")].tolist(),
        "run": {name: np.nan_to_num(values).tolist() for name, values in totals.items()},
        "maps": {name: _short(each) for name, each in by.items() if name != "small" or kind not in LIMITS},
    }


def _shares(counted: Array) -> dict[str, Array]:
    """Returns the shares of lost, small, zero and saturated values, by name; NaN where nothing was counted."""
    by = dict(zip(MEASURES, np.moveaxis(counted, -1, 0), strict=True))
    with np.errstate(invalid="ignore"):
        return {
            "lost": by["lost"] / by["nonzero"],
            "small": by["small"] / by["nonzero"],
            "zero": by["zeros"] / by["count"],
            "saturated": by["saturated"] / by["count"],
        }


def _short(values: Array, digits: int = 5) -> Any:
    """Returns finite numbers and NaN, which JSON has as null, for JavaScript, with so many digits.

    >>> _short(np.array([1 / 3, 2e-9 / 3, 0.0, 1 - 1e-9, 1.0, np.nan]))  # what is less than 1 stays less
    [0.33333, 6.6667e-10, 0.0, 0.99999, 1.0, nan]
    """
    power = 10.0 ** (digits - 1 - np.floor(np.log10(np.maximum(np.abs(values), 1e-290))))
    short = np.round(values * power) / power
    return np.where((values < 1) & (short == 1), 1 - 10.0**-digits, short).ravel().tolist()


def _rows(run: Run, gathered: Gathered) -> Iterator[TableRow]:
    rows = [_absorbed(each) for each in gathered.absorbed]
    rows += [_imprecise(each) for each in gathered.precision if max(each.off_by) > SUSPECT]
    for event in run.events:
        record = event.record
        edit, advice = _parted(record.advice, record.cure)
        if isinstance(record, Verdict):
            place = record.place + (f", {record.where}" if record.where else "")
            what = f"{record.kind}: {record.operator} ({record.phase})"
            rows.append(TableRow(event.step, "verdict", what, place, record.evidence, advice, edit))
        else:
            rows.append(TableRow(event.step, record.severity, record.code, record.place, record.evidence, advice, edit))
    order = ("verdict", *reversed(SEVERITIES))
    yield from sorted(rows, key=lambda row: order.index(row.severity) if row.severity in order else len(order))


def _absorbed(each: AbsorbedAt) -> TableRow:
    found = absorbed_finding(each.first)
    evidence = f"{found.evidence}; seen in {len(each.steps):,} of the steps that were looked at"
    return TableRow(each.first.step, found.severity, found.code, found.place, evidence, found.advice, "")


def _imprecise(each: PrecisionOf) -> TableRow:
    shown = ", ".join(f"{off:.1%} at step {step:,}" for step, off in [*zip(each.steps, each.off_by, strict=True)][-6:])
    severity, what = "warning" if each.is_lost else "note", f"returns what is off by, of its spread in fp32: {shown}"
    advice = "halfstep.check(session, closure) tells whether it harms, and tries edits that cure it"
    return TableRow(each.steps[-1], severity, "precision", each.module, what, advice, "")


def _parted(advice: str, cure: Sequence[Edit]) -> tuple[str, str]:
    """Splits advice into the code that makes the edits, one line or "", and the remaining text.

    >>> from halfstep.edits import FULL, Rule
    >>> _parted("plan.edit(Rule('a', FULL)); tried: it trains", [Rule("a", FULL)]), _parted("take less", [])
    (("plan = plan.edit(Rule('a', FULL))", 'tried: it trains'), ('', 'take less'))
    """
    code = spell(cure)
    return (f"plan = {code}", advice.replace(code, "", 1).strip(" ,;")) if cure else ("", advice)


def _facts(run: Run, judge: Format) -> Iterator[tuple[str, str]]:
    plan, machine = run.plan or {}, run.machine
    yield "plan", _plan(plan) if plan else "not in the log"
    planned = plan.get("low")
    emulated = ", emulated (rounded exactly, computed wider)" if run.emulated else ""
    yield "low format", f"{planned or 'not in the log'}{emulated}"
    if judge.name != planned:
        yield "judged by", f"what {judge.name} can hold"
    skipped = sum(values.skipped for values in run.steps)
    if run.steps:
        first, last = run.steps[0].step, run.steps[-1].step
        skips = skips_in_words(f"{skipped:,} skipped", sum(bool(values.bad_loss) for values in run.steps))
        yield "steps", f"{first:,} to {last:,}: {len(run.steps):,}, of them {skips}"
        losses = [values.loss for values in run.steps if values.loss is not None]
        if losses:
            yield "loss", f"{losses[0]:.4g} at first, {losses[-1]:.4g} at last"
    if run.observed:
        several = f"{len(run.observed):,} steps, from {run.observed[0]:,} to {run.observed[-1]:,}"
        yield "observed", several if len(run.observed) > 1 else f"step {run.observed[0]:,}"
    if plan.get("ops") == "table" and planned == FP16.name:
        yield "absorbed overflows", "looked for at step {} of a session and at every {}th".format(*ABSORBED_SAMPLE)
    yield "begun", datetime.fromtimestamp(run.processes[0].start, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    seconds = sum(process.end - process.start for process in run.processes)
    minutes, rest = divmod(round(seconds), 60)
    took = f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
    several = f" in {len(run.processes)} processes" if len(run.processes) > 1 else ""
    yield "ran for", (f"{seconds:.1f} s" if seconds < 60 else took) + several
    yield "versions", "; ".join(dict.fromkeys(f"halfstep {p.halfstep}, torch {p.torch}" for p in run.processes))
    if machine is not None:
        chip = f"{machine.processor}, cores: {machine.cores}, threads: {machine.threads}"
        yield "machine", f"{machine.device}; {chip}; {machine.system}, Python {machine.python}"


def _plan(entries: dict[str, Any]) -> str:
    try:
        plan = from_dict(entries)
    except HalfstepError:
        return f"{entries.get('name')}: not a plan that this halfstep version can read"
    parts = [
        plan.name,
        f"weights {plan.param}",
        "operations by the table" if plan.ops == "table" else "operations as written",
        f"norms {plan.norms}",
        f"masters {plan.master}",
        *([f"products {plan.products}"] if plan.products != "plan" else []),
        *([f"moments {plan.moments}"] if plan.moments != "full" else []),
        f"{plan.scale.kind} loss scale from {plan.scale.init:g}" if plan.scale.active else "no loss scale",
    ]
    rules = [rule.pattern for rule in plan.rules]
    return ", ".join(parts) + (f"; rules on {', '.join(rules)}" if rules else "")


_HERE = Path(__file__).parent
_PLOTLY = next(_HERE.glob("plotly-*.min.js.gz"), None)  # the part with lines, bars and maps, which the build fetched
if _PLOTLY is None:
    from plotly.offline import get_plotlyjs


def page_html(run: Run, low: Format | torch.dtype | str | None = None, *, processes: Sequence[ProcessRow] = ()) -> str:
    """Returns the page of a run as HTML."""
    page, script = page_of(run, low), (_HERE / "page.js").read_text(encoding="utf-8")
    table = {"headers": PROCESSES, "processes": cells(processes, PROCESSES)}
    return _render("page.html", page.charts, page=page, script=script, **table)


def sheet_html(sheet: Sheet) -> str:
    """Returns the page of a measurement as HTML."""
    return _render("charts.html", sheet.charts, sheet=sheet)


def _render(template: str, data: object, **values: object) -> str:
    plotly = _PLOTLY.read_bytes() if _PLOTLY else gzip.compress(get_plotlyjs().encode(), mtime=0)
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined)
    return pages.get_template(template).render(
        packed=[
            base64.b85encode(each).decode().replace("<", "/")  # so that no name ends the script
            for each in (gzip.compress(msgspec.json.encode(data), mtime=0), plotly)
        ],
        drawing=(_HERE / "drawing.js").read_text(encoding="utf-8"),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        **values,
    )
