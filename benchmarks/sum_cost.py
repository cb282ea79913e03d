"""Simulates what the one sum of a step costs from 8 to 4,096 processes, against the time of a step.

    python benchmarks/sum_cost.py --json FILE  # some seconds

The model, nothing of which is measured: an all-reduce over a binary tree, up and down, as NCCL's for short messages.
Each message takes a latency, 15 us, times a log-normal factor (median 1, sigma 0.5: jitter of network and host), and
its bytes over a bandwidth, 25 GB/s. A receiver goes on when its last message has come. All begin together, since the
reduction of gradients just before has brought them together. Kernels on the device before and after, 30 of 4 us, are
added. Of trials with other latencies the median and the 99th percentile are given; beside them, without jitter, the
same tree by formula (2 log2(n) messages one after the other) and a ring (2 (n - 1) of them), which shows why short
messages take trees.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from halfstep.machine import read_machine
from halfstep.train.processes.collectives import LOSSES, Findings

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PARAMETERS = 291  # tensors of a Llama of 7 billion weights
LATENCY, SIGMA, BANDWIDTH = 15e-6, 0.5, 25e9  # seconds, of the logarithm, bytes per second
KERNELS = 30 * 4e-6  # seconds
STEPS = (0.05, 0.2, 1.0)  # seconds of a step


def tree(size: int, numbers: np.random.Generator, message: float, trials: int) -> np.ndarray:
    """Returns the seconds of so many all-reduces over a tree of `size` processes, a power of two."""
    done = np.zeros((trials, size))
    for level in range(2 * int(math.log2(size))):
        up = level < math.log2(size)
        senders = done[:, 1::2] if up else done
        came = senders + message + LATENCY * numbers.lognormal(0.0, SIGMA, senders.shape)
        done = np.maximum(done[:, ::2], came) if up else np.concatenate((done, came), axis=1)
    return done.max(axis=1)


def row(size: int, trials: int) -> dict[str, float]:
    """Returns the figures of one number of processes; times in microseconds."""
    own = torch.zeros(size, dtype=torch.bool)
    same = torch.zeros(2, size, dtype=torch.float64)
    flags = torch.zeros(PARAMETERS, dtype=torch.bool), torch.zeros(LOSSES, dtype=torch.bool)
    sent = Findings(torch.zeros(()), *flags, own, own, same).packed().nbytes
    times = tree(size, np.random.default_rng(0), sent / BANDWIDTH, trials) + KERNELS
    hops = 2 * math.log2(size)
    median, late = float(np.median(times)), float(np.quantile(times, 0.99))
    return {
        "processes": size,
        "bytes": sent,
        "median_us": round(median * 1e6, 1),
        "late_us": round(late * 1e6, 1),
        "tree_us": round((hops * (LATENCY + sent / BANDWIDTH) + KERNELS) * 1e6, 1),
        "ring_us": round((2 * (size - 1) * (LATENCY + sent / size / BANDWIDTH) + KERNELS) * 1e6, 1),
        **{f"percent_of_{step:g}_s": round(100 * median / step, 3) for step in STEPS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write every figure and the model's constants to this file")
    options = parser.parse_args(arguments)
    rows = [row(size, options.trials) for size in SIZES]
    print("processes  bytes  median us  99% us  ring us  % of 0.05 s  0.2 s  1 s")
    for each in rows:
        print(
            f"{each['processes']:9.0f} {each['bytes']:6.0f} {each['median_us']:10.0f} {each['late_us']:7.0f} "
            f"{each['ring_us']:8.0f} {each['percent_of_0.05_s']:12.2f} {each['percent_of_0.2_s']:6.2f} "
            f"{each['percent_of_1_s']:4.2f}"
        )
    if options.json is not None:
        result = {
            "model": {
                "parameters": PARAMETERS,
                "latency_s": LATENCY,
                "sigma": SIGMA,
                "bytes_per_s": BANDWIDTH,
                "kernels_s": KERNELS,
                "trials": options.trials,
            },
            "rows": rows,
            "machine": asdict(read_machine(torch.device("cpu"))),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
