"""Runs the same benchmark in several processes, one after another, and joins their results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from halfstep.bench.results import read_bench
from halfstep.bench.tally import speedups
from halfstep.errors import WorkloadError
from halfstep.measurements import BenchResult, BenchRun
from halfstep.timing import spread

_LINES = 3  # of what a process said last before it ended without a result


def repeat(
    arguments: Sequence[str], count: int, *, command: str, progress: Callable[[str, int, int], None]
) -> BenchResult:
    """Runs `halfstep bench` with these arguments in `count` processes and returns their results as one.

    Processes of the same code differ in speed, since memory is placed differently in each; only several processes can
    show how much they differ. A `KeyboardInterrupt` ends the benchmark and keeps the processes that have finished.

    Raises:
        WorkloadError: a process ended without a result.
    """
    results: list[BenchResult] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        try:
            for number in range(count):
                progress(f"process {number + 1} of {count}", number, count)
                results.append(_run([*arguments, "--json", str(path)], path))
        except KeyboardInterrupt:
            if not results:
                raise
    progress("", count, count)
    return replace(together(results), complete=len(results) == count, command=command)


def _run(arguments: Sequence[str], path: Path) -> BenchResult:
    path.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", "halfstep", "bench", *arguments], capture_output=True, text=True)
    if not path.exists():
        last = " ".join(done.stderr.strip().splitlines()[-_LINES:])
        raise WorkloadError(f"a process of the benchmark ended with code {done.returncode}; it wrote: {last}")
    return read_bench(path)


def together(results: Sequence[BenchResult]) -> BenchResult:
    """Returns the results of several processes as one: the steps of all in order, everything else from the first."""
    rows = [[result.runs[number] for result in results] for number in range(len(results[0].runs))]
    return replace(results[0], runs=speedups([_joined(runs) for runs in rows]))


def _joined(runs: Sequence[BenchRun]) -> BenchRun:
    times = tuple(chain.from_iterable(run.times_ms for run in runs))
    error = next((run.error for run in runs if run.error is not None), None)
    counts = tuple(len(run.times_ms) for run in runs)
    return replace(runs[0], times_ms=times, step_ms=spread(times), error=error, processes=counts)
