"""What the page of a run shows, as plain data: the charts draw it, and nothing in it is larger than a screen needs."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfstep.errors import HalfstepError, LogError
from halfstep.formats import BF16, E4M3, E5M2, FORMATS, FP16, Format, as_format
from halfstep.plan.io import from_dict
from halfstep.records import SEVERITIES, UPDATE, StepValues, Verdict
from halfstep.report.gather import BIAS, MARGIN, MEASURES, Array, Limits, Sums, gather, limits_of
from halfstep.report.run import Run

POINTS = 4000  # of a line; more steps are thinned to the smallest and the largest value of each group
SHOWN = (FP16, BF16, E4M3, E5M2)
UNPLANNED = FP16  # what a log without a plan is judged by
GRADIENTS = ("activation_grad", "weight_grad")
KINDS = (*GRADIENTS, "activation", "weight", UPDATE)


@dataclass(frozen=True)
class Row:
    """A verdict or finding in the table of the page."""

    step: int
    severity: str
    what: str
    place: str
    evidence: str
    advice: str
    cure: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """The page of a run: facts by name, what the log lacks, verdicts and findings, and the data of the charts."""

    title: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    charts: dict[str, Any]


def page_of(run: Run, low: Format | torch.dtype | str | None = None) -> Page:
    """Returns the page of a run, its shares judged by `low`, or else by the low format of the run's plan.

    Raises:
        FormatError: `low` names no known format.
        LogError: `run` is no Run.
    """
    if not isinstance(run, Run):
        raise LogError(f"a page is made of the Run that read_log(path) returns, not of {run!r:.60}")
    planned = None if run.plan is None else FORMATS.get(str(run.plan.get("low")))
    judge = (planned or UNPLANNED) if low is None else as_format(low)
    gathered = gather(run.observations(), run.observed, judge, run.modules)
    return Page(
        title=shown(f"{run.path.resolve().parent.name}/{run.path.name}"),
        facts=tuple(_facts(run, judge)),
        notes=run.notes,
        rows=tuple(_rows(run)),
        charts={
            "formats": {fmt.name: _limits(limits_of("", fmt)) for fmt in dict.fromkeys((*SHOWN, judge))},
            "update": {"kind": UPDATE, **_limits(limits_of(UPDATE, judge))},
            "low": judge.name,
            "shift": _shift(run.steps),
            "timeline": _timeline(run.steps),
            "columns": [list(column) for column in gathered.columns],
            "gradients": GRADIENTS,
            "kinds": {
                name: _kind(sums)
                for name, sums in sorted(gathered.kinds.items(), key=lambda item: _kind_order(item[0]))
            },
        },
    )


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path as text that can be written, which that of a file whose name is not UTF-8 cannot be."""
    return os.fsencode(path).decode(errors="replace")


def thin(values: Array, points: int = POINTS) -> npt.NDArray[np.int64]:
    """Returns the places of at most `points` values that draw the line of all: extremes of groups, both ends.

    >>> thin(np.array([3.0, 1.0, 2.0, 9.0, 5.0, 5.0, 5.0, 4.0]), points=6)
    array([0, 1, 3, 4, 7])
    """
    if len(values) <= points:
        return np.arange(len(values))
    chosen = {0, len(values) - 1}
    for group in np.array_split(np.arange(len(values)), max(1, points // 2 - 1)):
        finite = group[np.isfinite(values[group])]
        if len(finite):
            chosen.update((int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])))
        else:  # where the line has a gap
            chosen.add(int(group[0]))
    return np.array(sorted(chosen))


def _timeline(steps: Sequence[StepValues]) -> dict[str, Any]:
    skips = [values.step for values in steps if values.skipped]
    return {
        "steps": len(steps),
        "skipped": len(skips),
        "skips": _some(skips),
        "lines": {name: _line(name, steps) for name in ("loss", "grad_norm", "scale")},
    }


def _line(name: str, steps: Sequence[StepValues]) -> dict[str, Any]:
    """Returns the points of a line, and the steps at which its value was not finite."""
    given = [(values.step, value) for values in steps if (value := getattr(values, name)) is not None]
    number, value = (np.array(column, dtype=np.float64) for column in (zip(*given, strict=True) if given else ((), ())))
    finite = np.isfinite(value)
    places = thin(value)
    if name == "scale" and len(value):  # constant between its changes
        places = np.unique([0, *np.flatnonzero(np.diff(value)) + 1, len(value) - 1])
        places = places[thin(value[places])]
    drawn = np.where(finite, value, np.nan)[places]
    return {"x": _packed(number[places]), "y": _packed(drawn), "nonfinite": _some(number[~finite].tolist())}


def _some(steps: Sequence[float], points: int = POINTS // 2) -> list[int]:
    """Returns the steps, or as many of them, evenly taken, as a line of marks can show."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), points)).astype(int)
    return [int(steps[place]) for place in places]


def _shift(steps: Sequence[StepValues]) -> int:
    """Returns the exponent of the loss scale that the histogram is shown with: the last of the run."""
    last = next((values.scale for values in reversed(steps) if 0 < values.scale < math.inf), 1.0)
    return round(math.log2(last))


def _limits(limits: Limits) -> dict[str, Any]:
    """Returns limits as the page reads them: base-2 logarithms and the largest value, None where there is none."""
    endless = math.isinf(limits.top)
    return {
        "zero": math.log2(limits.zero),
        "normal": math.log2(limits.normal),
        "top": None if endless else math.log2(limits.top),
        "max": None if endless else limits.top,
    }


def _kind_order(kind: str) -> tuple[int, str]:
    return KINDS.index(kind) if kind in KINDS else len(KINDS), kind


def _kind(sums: Sums) -> dict[str, Any]:
    used = np.flatnonzero(sums.histogram[0])
    first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    totals = sums.shares.sum(1)
    shares = dict(zip(MEASURES, np.moveaxis(sums.shares[1:], 2, 0), strict=True))
    with np.errstate(invalid="ignore"):  # where nothing was observed, 0 / 0: no color
        maps = {
            "lost": shares["lost"] / shares["nonzero"],
            "small": shares["small"] / shares["nonzero"],
            "zero": shares["zeros"] / shares["count"],
            "saturated": shares["saturated"] / shares["count"],
        }
    return {
        "modules": sums.modules,
        "formats": sorted(sums.formats),
        "sampled": sums.sampled,
        "first": first - MARGIN - BIAS,
        "bins": end - first,
        "histogram": _packed(sums.histogram[:, first:end]),
        "largest": _packed(sums.largest),
        "totals": {name: _packed(totals[:, index]) for index, name in enumerate(MEASURES)},
        "maps": {name: _packed(values.astype(np.float32)) for name, values in maps.items()},
    }


def _packed(values: npt.NDArray[Any]) -> str:
    """Returns numbers as the page reads them: base64 of little-endian float64, or float32 where they are that."""
    return base64.b64encode(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _rows(run: Run) -> Iterator[Row]:
    """Yields verdicts and findings, the gravest first."""
    rows = []
    for event in run.events:
        record = event.record
        cure = tuple(map(str, record.cure))
        if isinstance(record, Verdict):
            place = f"{record.module or 'the model itself'}" + (f", {record.where}" if record.where else "")
            what = f"{record.kind}: {record.operator} ({record.phase})"
            rows.append(Row(event.step, "verdict", what, place, record.evidence, record.advice, cure))
        else:
            rows.append(
                Row(event.step, record.severity, record.code, record.place, record.evidence, record.advice, cure)
            )
    order = ("verdict", *reversed(SEVERITIES))
    yield from sorted(rows, key=lambda row: order.index(row.severity) if row.severity in order else len(order))


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
        yield (
            "steps",
            f"{run.steps[0].step:,} to {run.steps[-1].step:,}: {len(run.steps):,}, of them {skipped:,} skipped",
        )
        last = [values.loss for values in run.steps if values.loss is not None]
        if last:
            yield "loss", f"{last[0]:.4g} at first, {last[-1]:.4g} at last"
    if run.observed:
        several = f"{len(run.observed):,} steps, from {run.observed[0]:,} to {run.observed[-1]:,}"
        yield "observed", several if len(run.observed) > 1 else f"step {run.observed[0]:,}"
    first = run.processes[0]
    yield "begun", datetime.fromtimestamp(first.start, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    seconds = sum(process.end - process.start for process in run.processes)
    several = f" in {len(run.processes)} processes" if len(run.processes) > 1 else ""
    yield "ran for", _duration(seconds) + several
    yield "versions", "; ".join(dict.fromkeys(f"halfstep {p.halfstep}, torch {p.torch}" for p in run.processes))
    if machine is not None:
        yield (
            "machine",
            (
                f"{machine.device}; {machine.processor}, cores: {machine.cores}, threads: {machine.threads}; "
                f"{machine.system}, Python {machine.python}"
            ),
        )


def _plan(entries: dict[str, Any]) -> str:
    try:
        plan = from_dict(entries)
    except HalfstepError:
        return f"{entries.get('name')}: not a plan that this halfstep reads"
    parts = [
        plan.name,
        f"weights {plan.param}",
        "operations by the table" if plan.ops == "table" else "operations as written",
        f"norms {plan.norms}",
        f"masters {plan.master}",
        "no loss scale" if plan.scale.kind == "none" else f"{plan.scale.kind} loss scale from {plan.scale.init:g}",
    ]
    rules = [rule.pattern for rule in plan.rules]
    return ", ".join(parts) + (f"; rules on {', '.join(rules)}" if rules else "")


def _duration(seconds: float) -> str:
    """Returns a time in words.

    >>> _duration(3.25), _duration(125), _duration(7500)
    ('3.2 s', '2 min 5 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
