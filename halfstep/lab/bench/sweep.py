"""Benchmarks several models and batch sizes, and finds the largest batch that fits into a memory limit.

Each pair of model and batch size is a point of a sweep, at which every row runs in its own process, and the processes
take training steps in turn. In the search for the largest batch, each batch size is tried in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import msgspec
import torch

from halfstep.errors import WorkloadError
from halfstep.lab.bench.bench import UNTIMED, Progress, bench
from halfstep.lab.bench.lane import COUNTED, Origin, OutOfMemory, Remote, Task
from halfstep.lab.bench.tally import PEAK_METHOD, first_batch
from halfstep.lab.bench.variants import Entry
from halfstep.lab.workloads.load import load_workload
from halfstep.lab.workloads.workload import Workload
from halfstep.machine import read_machine
from halfstep.measurements import Largest, Point, Sweep
from halfstep.version import __version__

SCHEMA = 1
MOST = 2**20  # examples in a batch: where a workload has no end of them


@dataclass(frozen=True)
class Asked:
    """What a sweep was asked to measure."""

    models: tuple[str, ...]  # names in MODELS, or workloads; "NAME@16" has only that batch size
    batches: tuple[int, ...]  # none: each model's own
    rows: tuple[Entry, ...]
    steps: int  # timed, of each configuration
    device: torch.device
    settings: Mapping[str, str] = field(default_factory=dict)  # of each model
    data: Path | None = None
    seed: int = 0
    command: str = ""
    within: float | None = None  # as in `bench`

    def points(self) -> list[tuple[str, Workload]]:
        """Returns the model and the workload of each point, in the order in which they are measured."""
        if self.steps < 1 or not self.models or not self.rows:
            raise WorkloadError(
                "a sweep needs at least one model, one level and one timed step; pass --model, --levels and --steps"
            )
        if "batch" in self.settings and self.batches:
            raise WorkloadError("--set batch and --batch-size both set the batch size; pass only one of them")
        found = []
        for model in self.models:
            name, at, own = model.partition("@")
            if at and not own.isdecimal():
                raise WorkloadError(f"model {name}: @{own} is not a batch size; write for example {name}@16")
            batches = [own] if at else [str(batch) for batch in self.batches]
            for size in [{"batch": batch} for batch in batches] or [{}]:
                found.append((name, load_workload(name, {**self.settings, **size}, data=self.data)))
        return found

    def words(self) -> dict[str, str]:
        """Returns what was asked as a dict of texts; a saved sweep can be continued if its texts are the same."""
        machine, data = read_machine(self.device), "none"
        if self.data is not None:  # a digest of the full path, so that no home folder is disclosed
            path = self.data.resolve()
            data = f"{path.name} ({hashlib.sha256(str(path).encode()).hexdigest()[:12]})"
        return {
            "models": ", ".join(self.models),
            "batch sizes": ", ".join(map(str, self.batches)) or "the models' own",
            "rows": ", ".join(row.name for row in self.rows),
            "steps": str(self.steps),
            "settings": ", ".join(f"{key}={value}" for key, value in sorted(self.settings.items())) or "none",
            "data": data,
            "seed": str(self.seed),
            "device": machine.device,
            "processor": machine.processor,
            "threads": str(machine.threads),
            "torch": machine.torch,
            "halfstep": __version__,
            "peak memory": PEAK_METHOD,
            **({} if self.within is None else {"gradient error": f"{self.within:g}"}),
        }

    def failed(self, point: Point) -> bool:
        """Tells whether a point should be measured again because one of its rows failed."""
        # Rows that ran out of memory do not count, nor do rows that were refused: they would fail again.
        refused = {row.name for row in self.rows if row.refused is not None}
        return any(run.error and not run.out_of_memory and run.name not in refused for run in point.result.runs)

    def origin(self, model: str, workload: Workload) -> Origin:
        return Origin(model, {**self.settings, "batch": str(workload.batch)}, self.data)


def sweep(
    asked: Asked,
    *,
    done: Sweep | None = None,
    keep: Callable[[Sweep], None] = lambda result: None,
    progress: Progress = lambda what, done, total: None,
) -> Sweep:
    """Measures the points of a sweep that are missing in `done` or failed there, and returns a sweep with all points.

    `keep` is called with the sweep so far after each point, `progress` with the current activity, the examples trained
    and their total. A `KeyboardInterrupt` ends the sweep and keeps the points that are complete.
    """
    points, words = asked.points(), asked.words()
    result = Sweep(SCHEMA, words, len(points), ()) if done is None else done
    check_same(result.asked, words)
    for _, workload in points:
        first_batch(workload, asked.seed)  # missing data ends it here, before anything was measured
    steps = UNTIMED + asked.steps
    each = steps * sum(row.refused is None for row in asked.rows)
    sizes = [each * workload.batch for _, workload in points]
    for at, (model, workload) in enumerate(points):
        if at < len(result.points) and not asked.failed(result.points[at]):
            continue

        def tell(what: str, done: int, _: int) -> None:
            count = sum(sizes[:at]) + done * workload.batch  # noqa: B023  # called in this round alone
            progress(f"{model}, batch {workload.batch}: {what}", count, sum(sizes))  # noqa: B023

        found = bench(
            workload, asked.rows, steps=steps, seeds=(asked.seed,), device=asked.device,
            origin=asked.origin(model, workload), command=asked.command, alone=True, within=asked.within, progress=tell,
        )  # fmt: skip
        if not found.complete:
            break
        point = Point(model, workload.batch, workload.examples(), found)
        result = replace(result, points=(*result.points[:at], point, *result.points[at + 1 :]))
        keep(result)
    return result


def read_sweep(path: Path) -> Sweep | None:
    """Returns the sweep that a file holds, or None if the file does not exist."""
    if path.exists() and not path.is_file():
        raise WorkloadError(
            f"{path} is not a regular file, but a sweep keeps what it has measured in one; pass one to --json"
        )
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    try:
        fields = json.loads(text)
        schema = fields["schema"]
        if schema == SCHEMA:
            return msgspec.convert(fields, Sweep, strict=False)  # "nan" and "inf" are numbers
        why = f"its schema is {schema}, that of this halfstep version is {SCHEMA}"
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        why = f"{type(error).__name__}: {error}"
    raise WorkloadError(
        f"{path} holds no sweep that this halfstep version can read ({why}); pass another file to --json "
        "(nothing was written to this one)"
    )


def check_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises an error if `now` asks for another sweep than `before`, so that the saved sweep cannot be continued."""
    differs = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differs:
        said = "; ".join(f"{key}: {before.get(key, '-')} in the file, {now.get(key, '-')} now" for key in differs)
        raise WorkloadError(
            f"the results file holds another sweep ({said}); use the options of that sweep, or name another file"
        )


# ---- the largest batch


def largest_batches(
    asked: Asked, limit: int, *, progress: Callable[[str], None] = lambda what: None
) -> tuple[Largest, ...]:
    """Returns for each model and row the largest batch whose first steps fit into `limit` bytes."""
    if asked.batches or "batch" in asked.settings:
        raise WorkloadError(
            "the search for the largest batch sets the batch size itself; leave out --batch-size and --set batch"
        )
    if limit < 1:
        raise WorkloadError(f"expected a memory limit of at least 1 byte, got {limit}; pass for example 2GiB")
    found: list[Largest] = []
    points = asked.points()
    with suppress(KeyboardInterrupt):
        for (model, workload), row in product(points, asked.rows):
            most = workload.examples() or MOST
            found.append(
                _search(Task(asked.origin(model, workload), row, asked.device), asked.seed, limit, most, progress)
                if row.refused is None
                else Largest(model, row.name, limit, error=row.refused)
            )
    return tuple(found)


def _search(task: Task, seed: int, limit: int, most: int, progress: Callable[[str], None]) -> Largest:
    tried: dict[int, bool] = {}
    name = task.entry.name

    def fits(batch: int) -> bool:
        progress(f"{task.origin.model} {name}: batch {batch}")
        origin = replace(task.origin, settings=task.origin.settings | {"batch": str(batch)})
        tried[batch] = True
        try:  # the first steps, which reach its peak memory
            with closing(Remote(replace(task, origin=origin))) as remote:
                remote.begin(seed, counted=True, limit=limit)
                for number in range(COUNTED):
                    remote.step(number, COUNTED)
        except OutOfMemory:
            tried[batch] = False
        return tried[batch]

    found, error = None, None
    try:
        found = largest(fits, most=most)
    except WorkloadError as failed:
        error = str(failed)
    return Largest(task.origin.model, name, limit, found, tuple(tried.items()), error)


def largest(fits: Callable[[int], bool], *, most: int) -> int:
    """Returns the largest size up to `most` that fits, by doubling and bisection; 0 if not even 1 fits.

    >>> [largest(lambda size: size <= edge, most=40) for edge in (0, 1, 21, 39, 40, 50)]
    [0, 1, 21, 39, 40, 40]
    """
    low, high = 0, 1  # low fits, as far as is known
    while fits(high):
        low = high
        if low == most:
            return low
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
