"""A step of a session: what was found in its gradients, here and in the other processes that train its models."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from halfstep.errors import SessionError
from halfstep.later import Later, is_capturing
from halfstep.records import StepRecord
from halfstep.train.kernels.batch import Scratch
from halfstep.train.processes.findings import LOSSES, NOT_FINITE, Findings
from halfstep.train.processes.shards import shards
from halfstep.train.scale.accumulator import Collected
from halfstep.train.scale.norm import read
from halfstep.train.session.parts import Part
from halfstep.train.session.replicas import Replicas
from halfstep.validate import named

_LOG = logging.getLogger("halfstep")
LAG = 8  # steps


@dataclass(eq=False)
class Step:
    """A step of the optimizers `parts`: their gradients are collected, read and agreed on, and their updates made."""

    parts: list[Part]
    held: list[Collected] = field(default_factory=list)  # the gradients of each part; emptied once the step is made
    overflowed: list[Tensor] = field(default_factory=list)  # of each part: whether a gradient is not finite
    flags: list[tuple[list[nn.Parameter], Tensor]] = field(default_factory=list)  # which of these are not finite
    factors: list[Tensor | None] = field(default_factory=list)  # that make them true gradients; None: they are
    norm: Tensor | None = None  # of the true gradients of all
    bad_loss: Tensor | None = None  # whether a loss was not finite, in any process; None: none was looked at
    spoiled: Tensor | None = None  # in which processes a loss overflowed; None if this one trains alone
    reports: tuple[Tensor, Tensor] | None = None  # who wants all to stop; whose scales and weights differ (2 rows)
    stopping: list[int] = field(default_factory=list)  # processes whose wish to stop all was read at this step
    record: StepRecord = field(init=False)
    made: list[Part] = field(default_factory=list)  # the first of `parts`: all, unless a step hook raises an error

    def read(
        self, replicas: Replicas, device: torch.device, scratch: Scratch, *, scaled: bool, stop: bool = False
    ) -> None:
        """Reads the gradients once, and agrees with the other processes on what was found; `stop` asks all to stop."""
        summing, sharded = replicas.summing(), replicas.sharded
        norms: list[tuple[int, Tensor]] = []  # with the number of different shards
        for held in self.held:
            overflowed, flags, own = _read_by_shards(held, device, scratch, sharded=sharded)
            factor = held.inverse.to(device) if scaled else None
            self.overflowed.append(overflowed)
            self.flags.append((held.params, flags))
            self.factors.append(factor)
            norms += own if factor is None else [(number, norm * factor) for number, norm in own]
        self.norm = norms[0][1] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n for _, n in norms]))
        if summing:
            own = norms if sharded else [(1, self.norm)]
            shares = [norm.double().square() * (number / replicas.size) for number, norm in own]
            _agree(replicas, self, sum(shares[1:], shares[0]), stop=stop)

    def found(self, device: torch.device) -> Tensor:
        """Returns whether the step must be skipped (0-dim bool)."""
        bad = list({id(f): f for held in self.held if (f := held.flags.get(NOT_FINITE)) is not None}.values())
        if bad:  # several of them only if several optimizers had several backward passes
            self.bad_loss = bad[0].to(device) if len(bad) == 1 else torch.stack([f.to(device) for f in bad]).any()
        first, *others = self.overflowed
        for flag in (*others, *(held.found for held in self.held)):
            if flag is not None:
                first = first | (flag if flag.device == device else flag.to(device))
        return first

    def scales(self) -> dict[int, Tensor]:
        return {loss_id: scale for held in self.held[: len(self.made)] for loss_id, scale in held.scales.items()}

    def parts_of(self, loss_id: int) -> list[Part]:
        """Returns the optimizers that this step gave gradients of a loss."""
        return [part for part, held in zip(self.made, self.held, strict=False) if loss_id in held.scales]


def _agree(replicas: Replicas, step: Step, square: Tensor, *, stop: bool) -> None:
    """Replaces what this process has found in a step, `square` of its norm, by what all that step together have."""
    params = [part.accumulator.parameters() for part in step.parts]
    bad = torch.cat([_of_all(own, *found) for own, found in zip(params, step.flags, strict=True)])
    losses = _losses(step.held, square.device)
    here = replicas.is_own(square.device)
    stops = here if stop else torch.zeros_like(here)
    spoils = losses.any() | bad.any() if replicas.staged else losses.any()
    scales = [held.scale for held in (step.held[:1] if replicas.staged else step.held)]
    numbers = [(i + 1) * scale.to(square.device, torch.float64, non_blocking=True) for i, scale in enumerate(scales)]
    same = torch.stack((torch.stack(numbers).sum(), replicas.sampled(square.device)))
    told = bad.any().view(1) if replicas.staged else bad
    own = Findings(square, told, losses, here & spoils, stops, torch.where(here, same.view(2, 1), 0.0))
    found = replicas.agree(own, [p for each in params for p in each])
    heard = torch.split(bad if replicas.staged else found.gradients, list(map(len, params)))
    step.overflowed = [found.gradients.any() if replicas.staged else each.any() for each in heard]
    bad_loss = found.losses[NOT_FINITE]
    for held in step.held:
        held.found = found.losses.any() | found.same[0].any()
        held.flags = {loss_id: found.losses[loss_id] for loss_id in held.losses} | {NOT_FINITE: bad_loss}
    step.norm, step.flags = found.norm, list(zip(params, heard, strict=True))
    step.spoiled, step.reports = found.processes, (found.stops, found.same)


def _read_by_shards(
    held: Collected, device: torch.device, scratch: Scratch, *, sharded: bool
) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Returns whether and which gradients here are not finite, and their norms, one for each number of shards."""
    numbers = [shards(p) for p in held.params] if sharded else []
    kinds = sorted(set(numbers)) or [1]
    if len(kinds) == 1:
        reading = read(held.grads, device=device, scratch=scratch)
        return reading.found, reading.flags, [(kinds[0], reading.norm)]
    norms: list[tuple[int, Tensor]] = []
    flags: dict[int, Tensor] = {}
    for kind in kinds:
        members = [i for i, number in enumerate(numbers) if number == kind]
        found = read([held.grads[i] for i in members], device=device, scratch=scratch)
        norms.append((kind, found.norm))
        flags |= zip(members, found.flags.unbind(), strict=True)
    all_flags = torch.stack([flags[i] for i in range(len(numbers))])
    return all_flags.any(), all_flags, norms


class Hearing:
    """Reads on the host what the processes report with their steps: requests to stop, and differences between them."""

    # On a GPU it does so `LAG` steps later; all processes read the same step, and stop together.

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._coming: deque[Later] = deque()
        self._looks_at_weights = True

    def hear(self, step: Step) -> None:
        """Takes the reports of a step and reads those that are due now, on a GPU those of some steps ago."""
        if step.reports is None:
            return
        stops, differs = step.reports
        told = (stops, *differs) if self._looks_at_weights else (stops, differs[0])
        step.stopping, scales, weights = (*self._due(torch.stack(told)), [], [], [])[:3]
        if weights:
            self._looks_at_weights = False
            parted = self._replicas.parted()
            _LOG.warning(
                "the replicas have diverged: weights in process %s differ from those in process 0 (%s); code that "
                "loads or writes weights or optimizer states after DistributedDataParallel has wrapped the model must "
                "do so in all processes",
                ", ".join(map(str, sorted({rank for each in parted.values() for rank in each}))),
                named(parted),
            )
        if scales:
            raise SessionError(
                f"gradients of process {', '.join(map(str, scales))} carry another loss scale than those of process 0, "
                "so they do not fit together; the step was skipped. Use the same loss_id for a backward pass in all "
                "processes, and load the same session state in all of them"
            )

    def _due(self, flags: Tensor) -> list[list[int]]:
        """Takes rows of flags of this step; returns who set those of the step that is due to be read now."""
        if flags.device.type == "cuda":
            if is_capturing():
                return []
            self._coming.append(Later([flags]))
            if len(self._coming) <= LAG:
                return []
            (flags,) = self._coming.popleft().read()
        found = [[rank for rank, flag in enumerate(row) if flag] for row in flags.tolist()]
        if any(found):
            self._coming.clear()  # who wanted it has been heard
        return found


def _of_all(parameters: Sequence[nn.Parameter], present: Sequence[nn.Parameter], flags: Tensor) -> Tensor:
    """Returns a flag for each of `parameters`; `flags` are those of `present`, and all other parameters get False."""
    if len(present) == len(parameters):
        return flags
    known = dict(zip(map(id, present), flags.unbind(), strict=True))
    clean = torch.zeros((), dtype=torch.bool, device=flags.device)
    return torch.stack([known.get(id(p), clean) for p in parameters])


def _losses(collected: Sequence[Collected], device: torch.device) -> Tensor:
    """Returns `LOSSES` flags (bool): entry i is that of the loss with `loss_id` i, the last one `NOT_FINITE`."""
    flags = torch.zeros(LOSSES, dtype=torch.bool, device=device)
    for held in collected:
        for loss_id in held.losses:
            if loss_id >= LOSSES - 1:
                raise SessionError(
                    f"loss_id is {loss_id}; with several processes it must be below {LOSSES - 1}, since each step has "
                    "room for the overflow flags of that many losses"
                )
        for loss_id, flag in held.flags.items():
            flags[loss_id] |= flag.to(device, non_blocking=True)
    return flags
