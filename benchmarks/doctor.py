"""Whether `halfstep doctor` measures right: its ratios beside those that torch.utils.benchmark finds.

    python benchmarks/doctor.py [--json FILE]

Prints for each work and format the speed against fp32 as both have it, medians of five processes of each in turn, with
the lowest and highest, and by how much the medians differ. The exit code is 1 if any differs by more than 15%. Each
figure comes from a process of its own, since the same product in fp16 takes up to half as long again in another: how
its memory lies is drawn once per process. Run it on a quiet machine; it takes some seven minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from halfstep.machine import read_machine

LIMIT = 0.15
RUNS = 5
TURNS = 8
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def statements() -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """Returns by kind of work what is timed, written anew, on operands of the sizes that the doctor takes on a CPU."""
    torch.manual_seed(0)
    return {
        "matrix product": ("a @ b", {"a": torch.randn(512, 512), "b": torch.randn(512, 512)}),
        "convolution": (
            "F.conv2d(a, b, padding=1)",
            {"a": torch.randn(4, 64, 28, 28), "b": torch.randn(64, 64, 3, 3) / 24},
        ),
        "attention": (
            "F.scaled_dot_product_attention(a, b, c)",
            {name: torch.randn(1, 16, 256, 64) for name in "abc"},
        ),
        "copy": ("a.copy_(b)", {"a": torch.randn(2**24), "b": torch.randn(2**24)}),
    }


def seconds(statement: str, operands: dict[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Returns the median seconds of one call."""
    values = {name: operand.to(dtype) for name, operand in operands.items()}
    timer = Timer(statement, globals={"F": F, **values}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.25).median)


def by_hand() -> dict[str, float]:
    """Returns by work and format the speed against fp32, of which a run goes before each."""
    found = {}
    for work, (statement, operands) in statements().items():
        for name, dtype in DTYPES.items():
            if name != "fp32":
                pairs = [
                    (seconds(statement, operands, DTYPES["fp32"]), seconds(statement, operands, dtype))
                    for _ in range(TURNS)
                ]
                found[f"{work}, {name}"] = median(base / took for base, took in pairs)
    return found


def of_process() -> dict[str, float]:
    """Returns what `by_hand` finds in a process of its own."""
    run = subprocess.run([sys.executable, __file__, "--by-hand"], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def of_doctor() -> dict[str, float]:
    """Returns the same as `halfstep doctor` has it."""
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "doctor.json"
        command = [sys.executable, "-m", "halfstep", "doctor", "--device", "cpu", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rates = json.loads(path.read_text())["rates"]
    native = [rate for rate in rates if rate["how"] == "native" and rate["vs_fp32"]]
    return {f"{rate['work'].partition(',')[0]}, {rate['format']}": rate["vs_fp32"] for rate in native}


def words(values: list[float]) -> str:
    """Returns the median and the range."""
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--by-hand", action="store_true", help="print what torch.utils.benchmark finds, as JSON")
    options = parser.parse_args()
    if options.by_hand:
        print(json.dumps(by_hand()))
        return
    runs = [(of_doctor(), of_process()) for _ in range(RUNS)]
    table = Table("work", "doctor", "torch.utils.benchmark", "differs by", box=None)
    rows = []
    for work in runs[0][1]:
        doctor, hand = ([run[side][work] for run in runs] for side in (0, 1))
        differs = abs(median(doctor) / median(hand) - 1)
        rows.append({"work": work, "doctor": doctor, "by_hand": hand, "differs": differs})
        table.add_row(work, words(doctor), words(hand), f"{differs:.1%}")
    Console().print(table)
    if options.json is not None:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": date,
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(int(any(row["differs"] > LIMIT for row in rows)))


if __name__ == "__main__":
    main()
