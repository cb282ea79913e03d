"""Trains one workload under several plans side by side, and measures speed, memory and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone

import torch
from torch import Tensor

from halfstep.bench.memory import PEAK_METHOD, counting
from halfstep.bench.tally import Tally, first_batch, foreseen, next_batch, notes, reason, records
from halfstep.bench.variants import Entry, Variant, timed_step
from halfstep.errors import WorkloadError
from halfstep.machine import read_machine
from halfstep.measurements import BenchResult
from halfstep.workloads.workload import Batch, Workload

MEMORY_STEPS = 3  # the first makes the optimizer's state; the peak is that of the last
WARMUP_STEPS = 5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Experiment:
    """What is trained, for how many steps and on which device; `tick(what)` is called after each step, for progress."""

    workload: Workload
    steps: int
    device: torch.device
    tick: Callable[[str], None]


@dataclass(frozen=True)
class Lane:
    """A row of the benchmark while it trains from one seed: its model, initial learning rates and losses so far."""

    tally: Tally
    variant: Variant
    base_lr: tuple[float, ...]
    losses: list[Tensor] = field(default_factory=list)


def bench(  # noqa: PLR0913  # what one experiment is; all of it stands in the result
    workload: Workload,
    rows: Sequence[Entry],
    *,
    steps: int,
    seeds: Iterable[int] = (0,),
    device: torch.device,
    command: str = "",
    memory: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> BenchResult:
    """Trains `workload` once per entry of `rows`, from the same weights on the same batches, one step of each in turn.

    Returns the measurements, with one row for each entry. If an entry raises an exception, in halfstep or in the
    workload, the error is stored in its row and the other entries continue. A `KeyboardInterrupt` ends the benchmark
    and keeps what was measured so far. `memory` adds a short run of each entry that measures its peak bytes. `progress`
    is called with the current activity, the steps done and the total steps.

    Raises:
        WorkloadError: no step or seed to run, or the workload fails before its first step.
        DataError: the workload's data is missing.
    """
    seeds = tuple(seeds)
    if steps < 1 or not seeds:
        raise WorkloadError(f"expected at least one step and one seed, got steps={steps} and {len(seeds)} seeds")
    with foreseen(f"{workload.name}: building the model"):
        parameters = sum(p.numel() for p in workload.build(seeds[0]).parameters())
    first_batch(workload, seeds[0])  # missing data ends it here, before anything was measured
    tallies = [Tally(row, error=row.refused) for row in rows]
    total = (len(seeds) * steps + MEMORY_STEPS * memory) * sum(row.refused is None for row in rows)
    experiment = Experiment(workload, steps, device, _ticker(progress, total))
    complete = True
    try:
        if memory:
            _measure_memory(experiment, tallies, seeds[0])
        for seed in seeds:
            _train(experiment, tallies, seed)
    except KeyboardInterrupt:
        complete = False
    return BenchResult(
        workload=workload.name,
        settings=settings_of(workload),
        parameters=parameters,
        steps=steps,
        warmup=warmup(steps),
        seeds=seeds,
        runs=records(tallies, parameters),
        peak_method=PEAK_METHOD,
        notes=notes(tallies),
        complete=complete,
        machine=read_machine(device),
        command=command,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def settings_of(workload: Workload) -> dict[str, str]:
    """Returns the settings of a workload by name, in the form in which a result stores them."""
    return {each.name: str(getattr(workload, each.name)) for each in fields(workload) if each.name != "data"}


def warmup(steps: int) -> int:
    """Returns how many steps at the start of each seed's run are not timed.

    >>> warmup(100), warmup(10), warmup(1)
    (5, 2, 0)
    """
    return min(WARMUP_STEPS, steps // 5)


def _ticker(progress: Progress, total: int) -> Callable[[str], None]:
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    return tick


def _measure_memory(experiment: Experiment, tallies: Sequence[Tally], seed: int) -> None:
    """Measures the peak bytes of each row while its model is built and trained for a few steps.

    The results are stored in the rows' tallies.
    """
    batch = _to_device(first_batch(experiment.workload, seed), experiment.device)
    for tally in tallies:
        _count(experiment, tally, batch, seed)


def _count(experiment: Experiment, tally: Tally, batch: Batch, seed: int) -> None:
    with ExitStack() as stack:
        with counting(experiment.device) as count:
            variant = _start(experiment, tally, seed, stack)
            if variant is None:
                return
            with tally.failing("counting memory"):
                for _ in range(MEMORY_STEPS):
                    count.restart()
                    variant.train(*batch)
                    experiment.tick(f"{tally.entry.name}: memory")
        if tally.error is None:
            tally.peak, tally.memory = count.peak, variant.facts().memory


def _train(experiment: Experiment, tallies: Sequence[Tally], seed: int) -> None:
    """Trains all rows from one seed, one step of each row in turn, then evaluates each row."""
    lanes: list[Lane] = []
    batches = experiment.workload.batches(seed)
    with ExitStack() as stack:
        for tally in tallies:
            variant = _start(experiment, tally, seed, stack)
            if variant is not None:
                lanes.append(Lane(tally, variant, tuple(group["lr"] for group in variant.optimizer.param_groups)))
        try:
            for step in range(experiment.steps):
                running = _running(lanes)
                batch = _deal(batches, running, experiment.device, f"batch {step + 1} of seed {seed}")
                if batch is None:
                    break
                turn = step % len(running)  # so that none always follows the same other
                for lane in running[turn:] + running[:turn]:
                    with lane.tally.failing(f"step {step + 1} of seed {seed}"):
                        factor = experiment.workload.lr_factor(step, experiment.steps)
                        loss, took = timed_step(lane.variant, batch, lane.base_lr, factor)
                        lane.losses.append(loss)
                        lane.variant.observe()
                        if step >= warmup(experiment.steps):
                            lane.tally.times_ms.append(took)
                    experiment.tick(f"{lane.tally.entry.name}: seed {seed}")
        finally:
            for lane in lanes:
                lane.tally.add_losses([float(loss) for loss in lane.losses])
        for lane in _running(lanes):
            with lane.tally.failing(f"evaluation after seed {seed}"):
                lane.tally.add_end(experiment.workload.evaluate(lane.variant.model), lane.variant.facts())


def _running(lanes: Sequence[Lane]) -> list[Lane]:
    return [lane for lane in lanes if lane.tally.error is None]


def _deal(batches: Iterator[Batch], lanes: Sequence[Lane], device: torch.device, what: str) -> Batch | None:
    """Returns the next batch on `device`, or None if there are no lanes or the batch cannot be loaded.

    An exception becomes the error of all lanes; the message begins with `what`, the name of the batch.
    """
    try:
        return _to_device(next_batch(batches), device) if lanes else None
    except Exception as error:  # whatever a user's workload raises
        for lane in lanes:
            lane.tally.error = f"{what}: {reason(error)}"
        return None


def _start(experiment: Experiment, tally: Tally, seed: int, stack: ExitStack) -> Variant | None:
    """Returns a row's variant, ready to train; None if the row failed earlier or fails now.

    An exception, for example because the plan does not fit the workload, becomes the row's error, so that the other
    rows go on. When `stack` is closed, it closes the variant.
    """
    if tally.error is not None:
        return None
    variant = None
    with tally.failing():
        variant = tally.entry.start(experiment.workload, seed, experiment.device)
        stack.callback(variant.close)
    return variant


def _to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)
