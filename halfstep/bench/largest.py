"""Finds the largest batch that fits into a memory limit, for each model and each row of a benchmark (level and format).

Each batch size is tried in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

from halfstep.bench.lane import COUNTED
from halfstep.bench.remote import OutOfMemory, Remote, Task
from halfstep.bench.sweep import Asked
from halfstep.errors import WorkloadError
from halfstep.measurements import Largest

MOST = 2**20  # examples: where a workload has no end of them


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
    with suppress(KeyboardInterrupt):
        for each in _rows(asked, limit, progress):
            found.append(each)  # one by one, so that those before an interrupt are there
    return tuple(found)


def _rows(asked: Asked, limit: int, progress: Callable[[str], None]) -> Iterator[Largest]:
    for model, workload in asked.points():
        most = workload.examples() or MOST
        for row in asked.rows:
            if row.refused is not None:
                yield Largest(model, row.name, limit, error=row.refused)
            else:
                yield _search(asked.task(model, workload, row), asked.seed, limit, most, progress)


def _search(task: Task, seed: int, limit: int, most: int, progress: Callable[[str], None]) -> Largest:
    """Finds the largest batch, up to `most` examples, with which a task fits into `limit` bytes."""
    tried: dict[int, bool] = {}
    name = task.entry.name

    def fits(batch: int) -> bool:
        progress(f"{task.origin.model} {name}: batch {batch}")
        origin = replace(task.origin, settings=task.origin.settings | {"batch": str(batch)})
        tried[batch] = _trains(replace(task, origin=origin), seed, limit)
        return tried[batch]

    found, error = None, None
    try:
        found = largest(fits, most=most)
    except WorkloadError as failed:
        error = str(failed)
    return Largest(task.origin.model, name, limit, found, tuple(tried.items()), error)


def _trains(task: Task, seed: int, limit: int) -> bool:
    """Tells whether a configuration's first steps, which reach its peak memory, fit into `limit` bytes."""
    try:
        with closing(Remote(task)) as remote:
            remote.begin(seed, counted=True, limit=limit)
            for number in range(COUNTED):
                remote.step(number, COUNTED)
    except OutOfMemory:
        return False
    return True


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
