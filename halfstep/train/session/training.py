"""The backward passes and steps of a session, by its plan: a step, from its gradients to what all processes found."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.errors import SessionError
from halfstep.later import Later, is_capturing
from halfstep.records import StepRecord
from halfstep.torch_internals import hooks_of, post_accumulate_hooks_of
from halfstep.train.cast.casting import Casting
from halfstep.train.kernels.batch import NOTHING, Judged, Scratch, Wanted
from halfstep.train.optim.hooks import check_gradients
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.steppers import watching
from halfstep.train.probe.probe import Probes
from halfstep.train.processes.collectives import LOSSES, NOT_FINITE, Findings
from halfstep.train.processes.shards import Unreduced, reshard, shards, whole
from halfstep.train.scale.accumulator import Collected
from halfstep.train.scale.buffers import BufferGuard
from halfstep.train.scale.loss import overflowed
from halfstep.train.scale.norm import Clip, read
from halfstep.train.scale.scaling import LossScales
from halfstep.train.session.parts import Part, Replacements
from halfstep.train.session.replicas import Replicas
from halfstep.validate import named

_LOG = logging.getLogger("halfstep")
LAG = 8  # steps
_LIMITS = ("clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_", "clip_grad_norm_", "clip_grad_value_")
_INSTEAD = "Clip by session.step(max_norm=...), or call session.unscale_() before your code limits gradients"
_HOOK = (
    "a hook on the gradient of %s uses %s, but gradients carry the loss scale in the backward pass: if the hook limits "
    f"gradients, it limits scaled values, and updates become too small; then remove it. {_INSTEAD}"
)
_CHANGE = (
    "the gradient of %s was changed between session.backward and session.step, while it carried the loss scale: a "
    "limit, as of clip_grad_norm_, then acts on scaled values, and what a plain loss.backward() adds is too small (a "
    f"mask, a factor, and scaled values put back are harmless). {_INSTEAD}, and pass each loss to session.backward"
)


@dataclass(eq=False)
class Step:
    """A step of the optimizers `parts`: their gradients are collected, read and agreed on, and their updates made."""

    parts: list[Part]
    held: list[Collected] = field(default_factory=list)  # the gradients of each part; emptied once the step is made
    overflowed: list[Tensor] = field(default_factory=list)  # of each part: whether a gradient is not finite
    flags: list[tuple[list[nn.Parameter], Tensor]] = field(default_factory=list)  # which of these are not finite
    factors: list[Tensor | None] = field(default_factory=list)  # that make them true gradients; None: they are
    norm: Tensor | None = None  # of the true gradients of all
    skip: Tensor | None = None  # whether to skip, if one kernel has made it with the norm and the factor
    bad_loss: Tensor | None = None  # whether a loss was not finite, in any process; None: none was looked at
    spoiled: Tensor | None = None  # in which processes a loss overflowed; None if this one trains alone
    reports: tuple[Tensor, Tensor] | None = None  # who wants all to stop; whose scales and weights differ (2 rows)
    stopping: list[int] = field(default_factory=list)  # processes whose wish to stop all was read at this step
    record: StepRecord = field(init=False)
    made: list[Part] = field(default_factory=list)  # the first of `parts`: all, unless a step hook raises an error

    def read(
        self,
        replicas: Replicas,
        device: torch.device,
        scratch: Scratch,
        *,
        scaled: bool,
        stop: bool = False,
        max_norm: float | None = None,
    ) -> None:
        """Reads the gradients once, and agrees with the other processes on what was found; `stop` asks all to stop."""
        summing, sharded = replicas.summing(), replicas.sharded
        norms: list[tuple[int, Tensor]] = []  # with the number of different shards
        for held in self.held:
            wanted = NOTHING
            if len(self.held) == 1 and not summing and held.scale.device == device:
                wanted = Wanted(held.scale if scaled and not held.true else None, held.found, max_norm)
            found, flags, own, judged = _read_by_shards(held, device, scratch, wanted, sharded=sharded)
            self.overflowed.append(found)
            self.flags.append((held.params, flags))
            if wanted is not NOTHING and judged is not None:
                self.norm, self.skip, factor = judged
                self.factors.append(factor)
                return
            factor = held.inverse.to(device) if scaled else None
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
        if self.skip is not None:
            return self.skip
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


@dataclass(eq=False)
class PlainTraining:
    """Backward and step as in a plain loop: nothing is scaled, cast or skipped."""

    roots: Sequence[nn.Module]
    parts: Sequence[Part]
    probes: Probes
    device: torch.device

    def __post_init__(self) -> None:
        self._replacements = Replacements(self.roots, self.parts)
        self._false = torch.zeros((), dtype=torch.bool, device=self.device)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self._nothing = Collected([], [], self._one, None, (), {}, {}, true=True)  # an optimizer's own step reads none
        self._store = MasterStore("none", torch.float32)

    def scaling(
        self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Returns a context that does nothing and yields the scale 1."""
        return nullcontext(self._one)

    def unscale_(self) -> None:
        """Does nothing, since the gradients are not scaled."""

    def step(self, step: Step, number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool) -> None:
        """Clips the gradients as torch does, and calls the `step` of each optimizer."""
        parts = step.parts
        self._replacements.look([p for part in parts for p in part.parameters() if p.grad is None])
        step.held = [part.accumulator.collect() if self.probes.looking else self._nothing for part in parts]
        read_for(self.probes, step)
        if max_norm is not None:
            reshard(self.roots)
            mine = {id(p) for part in parts for p in part.parameters()}
            meshes: dict[Any, list[Parameter]] = {}  # in the model's order, on which the sum's bits depend
            for p in (p for root in self.roots for p in root.parameters() if id(p) in mine and p.grad is not None):
                meshes.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
            together = list(meshes.values()) or [[]]  # torch takes gradients of one mesh at a time
            norms = [whole(nn.utils.get_total_norm(p.grad for p in each if p.grad is not None)) for each in together]
            step.norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
            for each in together:
                nn.utils.clip_grads_with_norm_(each, max_norm, step.norm)
        step.record = StepRecord(number, self._false.clone(), self._one, step.norm, loss=loss)
        step.factors = [None] * len(parts)
        update_each(step, self._false, self._store, self.probes)


@dataclass(eq=False)
class MixedTraining:
    """Backward and step under a plan: scales the loss, and skips the step if a gradient is not finite."""

    roots: Sequence[nn.Module]
    parts: Sequence[Part]
    casting: Casting
    scales: LossScales
    store: MasterStore
    buffers: BufferGuard
    replicas: Replicas
    probes: Probes
    device: torch.device
    name_of: Callable[[nn.Parameter], str]
    unscales: bool
    scratch: Scratch

    def __post_init__(self) -> None:
        self._replacements = Replacements(self.roots, self.parts)
        self._clip = Clip(self.device)
        self._coming: deque[Later] = deque()  # reports of steps
        self._looks_at_weights = True
        self._knows_hooks = self._knows_changes = False
        self._unreduced = Unreduced(self.roots, scaled=self.scales.active) if self.replicas.sharded else None

    @contextmanager
    def scaling(  # noqa: C901  # parts of it would be calls in each step
        self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True
    ) -> Iterator[Tensor]:
        """Yields the loss scale (0-dim fp32) for a backward pass; an error in it leaves the gradients as they were."""
        scale = self.scales.of(loss_id)
        if self._unreduced is not None:
            self._unreduced.before_backward(scale.value)
        self.replicas.find_stages()
        self.replicas.sums.before_backward()
        if self.scales.active and not self._knows_hooks:
            self._look_at_hooks()
        penalty = self.scales.penalties.pop(loss_id, None)
        for part in self.parts:
            cleared = part.accumulator.before_backward(loss_id, scale.value)
            if cleared is not None:
                penalty = cleared if penalty is None else penalty | cleared.to(penalty.device, non_blocking=True)
        if not losses and self.scales.active:
            self.replicas.refuse_a_stage_alone()
        bad = [overflowed(loss) for loss in losses]
        found = bad[0] if len(bad) == 1 else torch.stack(bad).any() if bad else None
        noted = None if found is None else {NOT_FINITE: found}
        if found is not None and penalty is not None:  # then the loss scale may have made it infinite
            penalty = penalty.to(found.device, non_blocking=True)
            noted = {loss_id: found & penalty, NOT_FINITE: found > penalty}
        sent = scale.value
        if found is not None and self.replicas.joining:  # where processes exchange only gradients
            sent = sent.masked_fill(found.to(sent.device), math.nan)
        try:
            with self.casting.backward():
                yield sent
        except BaseException:
            for part in self.parts:
                part.accumulator.undo_backward()
            with self.replicas.naming_who_is_gone("the backward pass"):
                raise
        for part in self.parts:
            part.accumulator.after_backward(loss_id, scale.value, noted, watch=self.scales.active)
        self.scales.went_backward(loss_id)
        if self.unscales and unscale and (self.scales.active or any(True for _ in self.store)):  # else they are true
            self.unscale_()

    def unscale_(self) -> None:
        for part in self.parts:
            part.accumulator.unscale_()

    def step(self, step: Step, number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool) -> None:
        """Reads the gradients once, and updates the weights in one pass if all gradients are finite."""
        parts = step.parts
        self.casting.weights_changed()
        step.held = [part.accumulator.collect() for part in parts]
        if self.scales.active and not self._knows_changes:
            self._look_at_changes(step.held)
        self._replacements.look([p for held in step.held for p in held.absent])
        for held in step.held:  # before one of them has stepped, and before kernels read what has no memory
            if len(parts) > 1 or set(map(type, held.grads)) != {Tensor}:
                check_gradients(held.params, held.grads, self.name_of)
        scaled = self.scales.active
        step.read(self.replicas, self.device, self.scratch, scaled=scaled, stop=stop, max_norm=max_norm)
        found = step.found(self.device)
        if max_norm is not None and step.norm is not None and step.skip is None:
            clip = self._clip.factor(step.norm, max_norm)
            step.factors = [clip if factor is None else factor * clip for factor in step.factors]
        synced = any([part.stepper.syncs for part in parts])
        step.record = StepRecord(number, found, step.held[0].scale, step.norm, synced, loss, step.bad_loss)
        read_for(self.probes, step)
        try:
            update_each(step, found, self.store, self.probes)
        finally:
            if step.spoiled is not None:  # the other processes have made all of it
                step.made = list(parts)
            if step.made:
                self._end(step, found)

    def _end(self, step: Step, found: Tensor) -> None:
        for part in step.made:
            part.accumulator.consumed()
        self.buffers.restore(found)
        if self.scales.active:
            count, void = len(step.made), step.bad_loss if self.replicas.agreeing() else None
            self.scales.update(step.held[:count], step.overflowed[:count], void)
        self._hear(step)

    def _hear(self, step: Step) -> None:
        """Reads what the processes reported with a step: requests to stop, and differences between them."""
        # On a GPU it reads the reports of `LAG` steps before; all processes read the same ones, and stop together.
        if step.reports is None:
            return
        stops, differs = step.reports
        told = (stops, *differs) if self._looks_at_weights else (stops, differs[0])
        step.stopping, scales, weights = (*self._due(torch.stack(told)), [], [], [])[:3]
        if weights:
            self._looks_at_weights = False
            parted = self.replicas.parted()
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

    def _look_at_hooks(self) -> None:
        """Warns of a hook that limits gradients, at the first backward pass."""
        self._knows_hooks = True
        owners: list[tuple[str, Any]] = [(self.name_of(p), p) for part in self.parts for p in part.parameters()]
        owners += ((name or "the model", module) for root in self.roots for name, module in root.named_modules())
        limits = ((where, name) for where, owner in owners for name in _names_in_hooks(owner) if name in _LIMITS)
        for limit in islice(limits, 1):
            _LOG.warning(_HOOK, *limit)

    def _look_at_changes(self, held: Iterable[Collected]) -> None:
        """Warns of the first gradient that has changed since the backward pass that left it scaled."""
        for p in [each.changed for each in held if each.changed is not None][:1]:
            self._knows_changes = True
            _LOG.warning(_CHANGE, self.name_of(p))


Training = PlainTraining | MixedTraining
"""An object that runs the backward passes and steps of a session."""


def read_for(probes: Probes, step: Step) -> None:
    """Passes the gradients of a step to the probes that measure this step."""
    if probes.looking:
        for held in step.held:
            probes.read(held.params, held.grads, held.carried)


def update_each(step: Step, found: Tensor, store: MasterStore, probes: Probes) -> None:
    """Makes the updates of a step, unless `found`; an error of a hook ends the step there, as in torch."""
    for part, held, factor in zip(step.parts, step.held, step.factors, strict=True):
        watch = partial(watching, part.stepper, store, factor, found)
        with probes.updating(watch, held.params, held.grads) if probes.looking else nullcontext():
            failed = part.stepper.step(held.params, held.grads, factor, found)
        step.made.append(part)
        if failed is not None:  # after the update
            raise failed


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
    held: Collected, device: torch.device, scratch: Scratch, wanted: Wanted, *, sharded: bool
) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]], Judged | None]:
    """Returns a `Reading` of the gradients here in parts: found, flags, a norm for each number of shards, judged."""
    numbers = [shards(p) for p in held.params] if sharded else []
    kinds = sorted(set(numbers)) or [1]
    if len(kinds) == 1:
        reading = read(held.grads, device=device, scratch=scratch, wanted=wanted)
        return reading.found, reading.flags, [(kinds[0], reading.norm)], reading.judged
    norms: list[tuple[int, Tensor]] = []
    flags: dict[int, Tensor] = {}
    for kind in kinds:
        members = [i for i, number in enumerate(numbers) if number == kind]
        found = read([held.grads[i] for i in members], device=device, scratch=scratch)
        norms.append((kind, found.norm))
        flags |= zip(members, found.flags.unbind(), strict=True)
    all_flags = torch.stack([flags[i] for i in range(len(numbers))])
    return all_flags.any(), all_flags, norms, None


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


def _names_in_hooks(owner: Any) -> Iterator[str]:
    """Yields the names that the code of hooks on the gradients of a parameter or module uses; of a builtin its own."""
    late = post_accumulate_hooks_of(owner) if isinstance(owner, Tensor) else None
    for hook in (*(hooks_of(owner) or {}).values(), *(late or {}).values()):
        function: Any = getattr(hook, "func", hook)  # of a functools.partial
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        yield from (getattr(function, "__name__", ""),) if code is None else _names_in(code)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # such as a comprehension
        yield from _names_in(inner) if isinstance(inner, CodeType) else ()
