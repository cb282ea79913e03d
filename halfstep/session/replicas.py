"""What a session shares with the other processes that train its models: its state, and what each step found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.cast.arriving import line_to_shard
from halfstep.errors import SessionError
from halfstep.kernels.batch import Scratch
from halfstep.optim.masters import MasterStore
from halfstep.plan.compatibility import named
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.processes.findings import LOSSES, Findings, LateNumbers
from halfstep.processes.replicas import Replicas
from halfstep.processes.shards import shards
from halfstep.scale.accumulator import Collected
from halfstep.scale.norm import Reading, read
from halfstep.scale.scales import LossScales
from halfstep.session.parts import Step, updated_by
from halfstep.sharded import is_sharded

_LOG = logging.getLogger("halfstep")


@dataclass(frozen=True, eq=False)
class SharedState:
    """State of a session that must be the same in all processes; `adopt` calls `replaced` at its end."""

    plan: Plan
    store: MasterStore
    scales: LossScales
    optimizers: Callable[[], Sequence[Optimizer]]
    name_of: Callable[[nn.Parameter], str]
    replaced: Callable[[], None]

    def line_to_shard(self) -> str:
        """Returns the call of `fully_shard` that fits the plan, for messages."""
        return line_to_shard(self.plan)

    def described(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Returns a description of the plan, one entry per line, and of the parameters, one per line."""
        plan = [f"the plan's {key} = {value!r}" for key, value in to_dict(self.plan).items()]
        return [*plan, *(f"{self.name_of(p)} of shape {tuple(p.shape)} stored as {_described(p)}" for p in parameters)]

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the weights that have a master or a remainder, each followed by its master or remainder."""
        stored = [p for p in parameters if self.store.keeps(p)]
        return [tensor for p in stored for tensor in (p, self.store.extra(p))]

    def moments(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Returns the optimizer state of each of these parameters; empty for a parameter without state."""
        states: dict[int, dict[str, Any]] = {}
        for optimizer in self.optimizers():
            own = optimizer.state_dict()["state"]
            states |= {id(p): own.get(index, {}) for index, p in enumerate(updated_by(optimizer))}
        return [dict(states.get(id(p), {})) for p in parameters]

    def take_moments(self, parameters: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]) -> None:
        """Loads another process's optimizer states of these parameters into the session's optimizers."""
        theirs = dict(zip(map(id, parameters), states, strict=True))
        for optimizer in self.optimizers():
            updated = updated_by(optimizer)
            if theirs.keys().isdisjoint(map(id, updated)):
                continue
            saved = optimizer.state_dict()
            own = saved["state"]
            merged = {index: theirs.get(id(p), own.get(index, {})) for index, p in enumerate(updated)}
            saved["state"] = {index: state for index, state in merged.items() if state}
            if own or saved["state"]:
                optimizer.load_state_dict(saved)

    def options(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Returns the options of each param group (such as the learning rate) that has any of these parameters."""
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self._groups(parameters)
        ]

    def take_options(self, parameters: Sequence[nn.Parameter], options: Sequence[dict[str, Any]]) -> None:
        """Writes another process's `options` into the param groups here that have any of these parameters."""
        for group, theirs in zip(self._groups(parameters), options, strict=False):
            for name, value in theirs.items():
                own = group.get(name)
                if isinstance(own, Tensor) and isinstance(value, Tensor):
                    own.copy_(value)  # a schedule may hold it
                else:
                    group[name] = value

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        wanted = set(map(id, parameters))
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        return [group for group in groups if not wanted.isdisjoint(map(id, group["params"]))]

    def state(self) -> Any:
        """Returns the state of the loss scales."""
        return self.scales.state_dict()

    def adopt(self, state: Any, parameters: Sequence[nn.Parameter], *, sent_again: bool) -> None:
        """Loads the loss scales of another process, after its weights and masters were written into these parameters.

        With `sent_again`, the same weights will be written once more; that write will not count as a change of them.
        """
        self.store.note(parameters, writes_to_come=int(sent_again))
        if state != self.scales.state_dict():
            self.scales.load_state_dict(state)
        self.replaced()


def agree(replicas: Replicas, step: Step, square: Tensor, *, stop: bool) -> None:
    """Replaces what this process has found in a step, `square` of its norm, by what all that step together have."""
    params = [part.accumulator.parameters() for part in step.parts]
    gradients = [
        _of_all(own, held.params, reading.flags)
        for own, held, reading in zip(params, step.held, step.readings, strict=True)
    ]
    bad = torch.cat(gradients)
    losses = _losses(step.held, square.device)
    here = replicas.is_own(square.device)
    stops = here if stop else torch.zeros_like(here)
    spoils = losses.any() | bad.any() if replicas.staged else losses.any()
    scales = [held.scale for held in (step.held[:1] if replicas.staged else step.held)]
    same = torch.stack((_number_of(scales, square.device), replicas.sampled(square.device)))
    told = bad.any().view(1) if replicas.staged else bad
    own = Findings(square, told, losses, here & spoils, stops, torch.where(here, same.view(2, 1), 0.0))
    found = replicas.agree(own, [p for each in params for p in each])
    heard = torch.split(bad if replicas.staged else found.gradients, list(map(len, params)))
    skips = [found.gradients.any() if replicas.staged else each.any() for each in heard]
    step.readings = [
        Reading(reading.norm, skip, each) for reading, skip, each in zip(step.readings, skips, heard, strict=True)
    ]
    for held in step.held:
        held.found = found.losses.any() | found.same[0].any()
        held.flags = {loss_id: found.losses[loss_id] for loss_id in held.losses}
    step.norm, step.flags = found.norm, list(zip(params, heard, strict=True))
    step.spoiled, step.reports = found.processes, (found.stops, found.same)


def read_by_shards(
    held: Collected, device: torch.device, scratch: Scratch, *, sharded: bool
) -> tuple[Reading, list[tuple[int, Tensor]]]:
    """Returns the reading of this process's gradients, and their norms, one for each number of shards."""
    numbers = [shards(p) for p in held.params] if sharded else []
    kinds = sorted(set(numbers)) or [1]
    if len(kinds) == 1:
        reading = read(held.grads, device=device, scratch=scratch)
        return reading, [(kinds[0], reading.norm)]
    norms: list[tuple[int, Tensor]] = []
    flags: dict[int, Tensor] = {}
    for kind in kinds:
        members = [i for i, number in enumerate(numbers) if number == kind]
        found = read([held.grads[i] for i in members], device=device, scratch=scratch)
        norms.append((kind, found.norm))
        flags |= zip(members, found.flags.unbind(), strict=True)
    all_flags = torch.stack([flags[i] for i in range(len(numbers))])
    return Reading(
        torch.linalg.vector_norm(torch.stack([norm for _, norm in norms])), all_flags.any(), all_flags
    ), norms


def share_of_square(norms: Sequence[tuple[int, Tensor]], size: int) -> Tensor:
    """Returns what this process adds to the squared norm over `size` processes (0-dim float64)."""
    shares = [norm.double().square() * (number / size) for number, norm in norms]
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum()


class Hearing:
    """Reads on the host what the processes reported with their steps: requests to stop, and differences between them.

    On a GPU, reports are read some steps later, so that the host need not wait. All processes read a report at the same
    step, and stop together.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._late = LateNumbers()
        self._looks_at_weights = True

    def hear(self, step: Step) -> None:
        """Takes the reports of a step and reads those that are due now, on a GPU those of some steps ago."""
        if step.reports is None:
            return
        stops, differs = step.reports
        told = (stops, *differs) if self._looks_at_weights else (stops, differs[0])
        heard: list[list[int]] = [[], [], []]
        for number in self._late.read(torch.cat(told)):
            heard[number // len(stops)].append(number % len(stops))
        step.stopping, scales, weights = heard
        if weights:
            self._looks_at_weights = False
            _say_that_weights_differ(self._replicas.parted())
        if scales:
            raise _scales_differ(scales)


def _say_that_weights_differ(parted: Mapping[str, Sequence[int]]) -> None:
    ranks = sorted({rank for each in parted.values() for rank in each})
    _LOG.warning(
        "the replicas have diverged: weights in process %s differ from those in process 0 (%s); code that loads or "
        "writes weights or optimizer states after DistributedDataParallel has wrapped the model must do so in all "
        "processes",
        ", ".join(map(str, ranks)),
        named(parted),
    )


def _scales_differ(ranks: Sequence[int]) -> SessionError:
    return SessionError(
        f"gradients of process {', '.join(map(str, ranks))} carry another loss scale than those of process 0, so they "
        "do not fit together; the step was skipped. Use the same loss_id for a backward pass in all "
        "processes, and load the same session state in all of them"
    )


def _described(p: nn.Parameter) -> str:
    return f"{p.dtype} and placed as {p.placements}" if is_sharded(p) else str(p.dtype)


def _of_all(parameters: Sequence[nn.Parameter], present: Sequence[nn.Parameter], flags: Tensor) -> Tensor:
    """Returns a flag for each of `parameters`; `flags` are those of `present`, and all other parameters get False."""
    if len(present) == len(parameters):
        return flags
    known = dict(zip(map(id, present), flags.unbind(), strict=True))
    clean = torch.zeros((), dtype=torch.bool, device=flags.device)
    return torch.stack([known.get(id(p), clean) for p in parameters])


def _losses(collected: Sequence[Collected], device: torch.device) -> Tensor:
    """Returns `LOSSES` flags (bool): entry i tells whether the loss with `loss_id` i has overflowed."""
    flags = torch.zeros(LOSSES, dtype=torch.bool, device=device)
    for held in collected:
        for loss_id in held.losses:
            if loss_id >= LOSSES:
                raise SessionError(
                    f"loss_id is {loss_id}; with several processes it must be below {LOSSES}, since each step has room "
                    "for the overflow flags of that many losses"
                )
        for loss_id, flag in held.flags.items():
            flags[loss_id] |= flag.to(device, non_blocking=True)
    return flags


def _number_of(scales: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a number (0-dim float64) that is the same in processes with the same loss scales."""
    values = [(i + 1) * scale.to(device, torch.float64, non_blocking=True) for i, scale in enumerate(scales)]
    return torch.stack(values).sum()
