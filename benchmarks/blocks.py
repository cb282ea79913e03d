"""Sizes of the Triton kernels' blocks beside the bandwidth of a copy: the update of AdamW (split masters) and the read.

    python benchmarks/blocks.py --json blocks.json          # on a GPU; some seconds a row

Each row is a number of elements and of warps a program, timed in turns with a copy. The first of each kind is what
halfstep uses. The file is written after each row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from halfstep.timing import take_turns
from halfstep.train.kernels import devices
from halfstep.train.kernels.batch import Batch, Options, Scratch

SIZES = {"UPDATE": ((1024, 8), (512, 4), (1024, 4), (2048, 8), (4096, 8)), "READ": ((4096, 4), (2048, 4), (8192, 8))}
BYTES = {"UPDATE": 26, "READ": 2}  # an element: weight, remainder and both moments twice, and the gradient


def calls_on(device: torch.device, numel: int) -> dict[str, Callable[[], object]]:
    """Returns a call of each kernel, and a copy."""
    kernels = devices.triton_kernels(device)
    assert kernels is not None
    weight = torch.ones(numel, dtype=torch.bfloat16, device=device)
    extra, target = torch.zeros_like(weight, dtype=torch.int16), torch.zeros_like(weight)
    states = {name: [torch.zeros_like(weight, dtype=torch.float32)] for name in ("exp_avg", "exp_avg_sq")}
    found, step = torch.zeros((), dtype=torch.bool, device=device), torch.zeros((), device=device)
    batch = Batch("split", [weight], [extra], [torch.ones_like(weight)], states, [step])
    options = Options(1e-4, 0.01, False, True, (0.9, 0.999, 1e-8))
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(weight)}
    for kind, sizes in SIZES.items():
        for size, warps in sizes:
            own, scratch = replace(batch, memory={}), Scratch()  # tables are of blocks
            run = partial(kernels.read, own.grads, scratch)
            if kind == "UPDATE":
                run = partial(kernels.update, "adam", own, options, None, found, scratch)

            def call(kind: str = kind, size: int = size, warps: int = warps, run: Callable[[], object] = run) -> None:
                with patch.multiple(kernels, **{f"_{kind}_BLOCK": size, f"_{kind}_WARPS": warps}):
                    run()

            calls[f"{kind} {size} {warps}"] = call
    return calls


def main() -> int:
    """Measures row by row, and returns the exit code: 1 where Triton does not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--numel", type=int, default=2**28)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    if device.type == "cpu":
        print("a CPU has no Triton kernels: nothing to measure")
        return 0
    if devices.triton_kernels(device) is None:
        return 1
    calls = calls_on(device, options.numel)
    copy = calls.pop("copy")
    for name, call in calls.items():
        times = take_turns({"copy": copy, name: call}, device=device, seconds=options.seconds)
        kind, size, warps = name.split()
        took, bandwidth = median(times[name]), 4 * options.numel / median(times["copy"])
        share = BYTES[kind] * options.numel / took / bandwidth
        rows.append({"kernel": kind.lower(), "elements": int(size), "warps": int(warps), "ms": 1e3 * took})
        rows[-1] |= {"gb_s": bandwidth * share / 1e9, "copy_gb_s": bandwidth / 1e9, "of_copy_bandwidth": share}
        print(f"{name:16} {1e3 * took:9.3f} ms, {share:7.1%} of a copy's {bandwidth / 1e9:.0f} GB/s", flush=True)
        if options.json is not None:
            found = {"benchmark": "blocks", "elements": options.numel, "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
