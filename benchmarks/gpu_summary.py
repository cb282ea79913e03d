"""What `gpu.sh` has found, as a short table and as JSON: how each part ended, and each figure beside its goal."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch

TIMED_OUT = (124, 137)
WORKLOADS = ("char_lm", "cifar_resnet")
ACCURACY_RUNS = ("O1 bf16", "O2 bf16", "O1 fp16", "O2 fp16")
EMULATED = " (emulated)"
Found = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One measured number and the least, or the most, that it should be; None, and `why`, where it was not measured."""

    what: str
    value: float | None
    wanted: float
    at_most: bool = False
    why: str = ""

    @property
    def verdict(self) -> str:
        """Whether the figure is what it should be."""
        if self.value is None:
            return "open"
        holds = self.value <= self.wanted if self.at_most else self.value >= self.wanted
        return "holds" if holds else "MISSED"


def read(path: Path) -> Found:
    """Returns what a part has written, {} where it has written nothing whole."""
    try:
        found: Found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def step_figures(found: Found) -> Iterator[Figure]:
    """Yields the figures of the optimizer step, of Triton's kernels."""
    rows = {row["name"]: row for row in found.get("rows", [])}
    split, clipped, copy = (
        rows.get(f"halfstep {name}", {}) for name in ("split triton", "split triton + clip", "copy triton")
    )
    yield Figure("optimizer step, split: times parts", split.get("vs_peer"), 1.5)
    yield Figure("optimizer step, split, clipping: times parts", clipped.get("vs_peer"), 2.0)
    yield Figure("optimizer step, split: share of copy bandwidth", split.get("of_copy_bandwidth"), 0.85)
    yield Figure("bytes per parameter, O2 split AdamW", split.get("bytes_held"), 14.1, at_most=True)
    yield Figure("bytes per parameter, O2 copy AdamW", copy.get("bytes_held"), 16.1, at_most=True)


def train_figures(workload: str, found: Found) -> Iterator[Figure]:
    """Yields the figures of whole training steps in bf16."""
    runs = {run["name"]: run for result in found.get("results", []) for run in result.get("runs", [])}
    low, light = (runs.get(f"{name} bf16", {}).get("times_ms", []) for name in ("O2", "O3"))
    ratios = [b / a for a, b in zip(low, light, strict=False)]
    yield Figure(f"{workload} bf16: O2, times O3", median(ratios) if ratios else None, 0.98)
    if workload == "gpt2":
        yield Figure("gpt2 bf16: O1, times torch.amp", runs.get("O1 bf16", {}).get("vs_amp"), 1.0)
        yield Figure("gpt2 bf16: O2, times torch.amp", runs.get("O2 bf16", {}).get("vs_amp"), 1.05)


def accuracy_figures(folder: Path, left_out: Mapping[str, str]) -> Iterator[Figure]:
    """Yields for each run how far its validation loss is above fp32's, as a share of what is allowed: 2% of fp32's.

    `left_out` says why a workload was not run.
    """
    for workload in WORKLOADS:
        found = read(folder / f"{workload}-seed0.json").get("runs", [])
        losses = {run["name"].removesuffix(EMULATED): run.get("validation", {}).get("loss", []) for run in found}
        baseline = losses.get("O0", [])
        for name in ACCURACY_RUNS:
            loss = losses.get(name, [])
            value = (float(loss[0]) - baseline[0]) / baseline[0] if loss and baseline else None
            why = left_out.get(workload, "")
            yield Figure(f"{workload} {name}: validation loss above fp32's", value, 0.02, at_most=True, why=why)


def fp8_figure(found: Found) -> Figure:
    """Returns the time of a step with products in fp8."""
    return Figure("fp8 layers: time of a step over bf16's", found.get("rows", {}).get("fp8", {}).get("time"), 1.0, True)


def block_figure(found: Found) -> Figure:
    """Returns how near the update with the best size of blocks is to a copy."""
    shares = [row["of_copy_bandwidth"] for row in found.get("rows", []) if row["kernel"] == "update"]
    return Figure("update, best block: share of copy bandwidth", max(shares, default=None), 0.85)


def tests(path: Path) -> Found | None:
    """Returns how many tests passed, failed and were skipped, and which failed."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    failed = [
        f"{c.get('classname')}::{c.get('name')}"
        for c in cases
        if c.find("failure") is not None or c.find("error") is not None
    ]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped, "failures": failed}


def said(code: int) -> str:
    """Returns an exit code in words."""
    return "done" if code == 0 else "out of time" if code in TIMED_OUT else f"failed ({code})"


def explained(figures: Iterable[Figure], ended: str) -> Iterator[Figure]:
    """Yields the figures, those that were not measured with the reason: that of their own, or how the part ended."""
    for figure in figures:
        measured = figure.value is not None
        yield replace(figure, why="" if measured else figure.why or ("not measured" if ended == "done" else ended))


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a file of gpu.sh's."""
    return path.read_text(encoding="utf-8").splitlines()


def main() -> int:
    """Prints the table, writes summary.json, and returns 1 where a part failed or a figure was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--name", default="summary", help="of the file with the figures, without .json")
    parser.add_argument("--room", type=Path, required=True, help="where gpu.sh has left the results of the tests")
    options = parser.parse_args()
    lines = [line.split() for line in lines_of(options.room / "parts.txt")]
    parts = [
        {"part": name, "exit": int(code), "seconds": int(took), "limit": int(limit)}
        for name, code, took, limit in lines
    ]
    counts = {name: tests(options.room / f"{name}.xml") for name in ("tests", "graph")}
    ended = {str(entry["part"]): said(int(str(entry["exit"]))) for entry in parts}
    found, left_out = options.results, dict(line.split(" ", 1) for line in lines_of(options.room / "left_out.txt"))
    figures: list[Figure] = []
    if "optimizer_step" in ended:
        figures += explained(step_figures(read(found / "optimizer_step.json")), ended["optimizer_step"])
    for workload in ("gpt2", "resnet50"):
        if workload in ended:
            figures += explained(train_figures(workload, read(found / f"{workload}.json")), ended[workload])
    if "accuracy" in ended:
        figures += explained(accuracy_figures(found / "accuracy", left_out), ended["accuracy"])
    for name, figure in (("fp8", fp8_figure), ("blocks", block_figure)):
        if name in ended:
            figures += explained([figure(read(found / f"{name}.json"))], ended[name])
    gpu = torch.cuda.get_device_name() if options.device == "cuda" and torch.cuda.is_available() else None
    for entry in parts:
        count = counts.get(str(entry["part"]))
        detail = "" if count is None else ", ".join(f"{count[key]} {key}" for key in ("passed", "failed", "skipped"))
        print(f"{entry['part']:<50} {said(int(str(entry['exit']))):<14} {entry['seconds']:>4} s  {detail}")
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.3f}"
        sign = "<=" if figure.at_most else ">="
        why = f" ({figure.why})" if figure.why else ""
        print(f"{figure.what:<50} {value:>8} {sign} {figure.wanted:<6} {figure.verdict}{why}")
    if gpu is None:
        print("not on a GPU: these figures show that the script works, and nothing else")
    summary = {
        "device": gpu or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "parts": parts,
        "tests": counts,
        "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in figures],
    }
    (options.results / f"{options.name}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    missed = any(figure.verdict == "MISSED" for figure in figures) and gpu is not None
    return int(missed or any(entry["exit"] for entry in parts))


if __name__ == "__main__":
    sys.exit(main())
