"""The `scaling`, `unscale_` and `step` of a session, by its plan: `PlainTraining` if that casts and scales nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.records import StepRecord
from halfstep.torch_internals import hooks_of, post_accumulate_hooks_of
from halfstep.train.cast.casting import Casting
from halfstep.train.kernels.batch import Scratch
from halfstep.train.optim.hooks import check_gradients
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.steppers import watching
from halfstep.train.probe.probe import Probes
from halfstep.train.processes.findings import NOT_FINITE
from halfstep.train.processes.shards import Unreduced, reshard, whole
from halfstep.train.scale.accumulator import Collected
from halfstep.train.scale.buffers import BufferGuard
from halfstep.train.scale.loss import overflowed
from halfstep.train.scale.norm import Clip
from halfstep.train.scale.scales import LossScales
from halfstep.train.session.parts import Part, Replacements
from halfstep.train.session.replicas import Replicas
from halfstep.train.session.step import Hearing, Step

_LOG = logging.getLogger("halfstep")
_LIMITS = ("clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_", "clip_grad_norm_", "clip_grad_value_")
_INSTEAD = "Clip by session.step(max_norm=...), or call session.unscale_() before your code limits gradients"
_HOOK = (
    "a hook on the gradient of %s calls %s, but gradients carry the loss scale in the backward pass: scaled values are "
    f"limited, and updates become too small. Remove the hook. {_INSTEAD}"
)
_CHANGE = (
    "the gradient of %s was changed between session.backward and session.step, while it carried the loss scale: a "
    "limit, as of clip_grad_norm_, then acts on scaled values, and what a plain loss.backward() adds is too small (a "
    f"mask or a factor is harmless). {_INSTEAD}, and pass each loss to session.backward"
)


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
        self._hearing = Hearing(self.replicas)
        self._habits = Habits(self.name_of)
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
        if self.scales.active:
            self._habits.look_at_hooks(p for part in self.parts for p in part.parameters())
        for part in self.parts:
            part.accumulator.before_backward(loss_id, scale.value)
        if not losses and self.scales.active:
            self.replicas.refuse_a_stage_alone()
        bad = [overflowed(loss) for loss in losses]
        found = bad[0] if len(bad) == 1 else torch.stack(bad).any() if bad else None
        noted = None if found is None else {NOT_FINITE: found}
        penalty = self.scales.penalties.pop(loss_id, None)
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
        if self.scales.active:
            self._habits.look_at_changes(step.held)
        self._replacements.look([p for held in step.held for p in held.absent])
        for held in step.held:  # before one of them has stepped, and before kernels read what has no memory
            if len(parts) > 1 or set(map(type, held.grads)) != {Tensor}:
                check_gradients(held.params, held.grads, self.name_of)
        step.read(self.replicas, self.device, self.scratch, scaled=self.scales.active, stop=stop)
        found = step.found(self.device)
        if max_norm is not None and step.norm is not None:
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
        self._hearing.hear(step)


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


class Habits:
    """Looks once at the hooks of all parameters, and at each step whether other code has changed a scaled gradient."""

    def __init__(self, name_of: Callable[[Parameter], str]) -> None:
        self._name_of = name_of
        self._knows_hooks = self._knows_changes = False

    def look_at_hooks(self, params: Iterable[Parameter]) -> None:
        """Warns of a hook that limits gradients, at the first backward pass."""
        if not self._knows_hooks:
            self._knows_hooks = True
            limits = ((self._name_of(p), name) for p in params for name in _names_in_hooks(p) if name in _LIMITS)
            for limit in islice(limits, 1):
                _LOG.warning(_HOOK, *limit)

    def look_at_changes(self, held: Iterable[Collected]) -> None:
        """Warns of the first gradient that has changed since the backward pass that left it scaled."""
        for p in [each.changed for each in held if each.changed is not None and not self._knows_changes][:1]:
            self._knows_changes = True
            _LOG.warning(_CHANGE, self._name_of(p))


def _names_in_hooks(p: Parameter) -> Iterator[str]:
    """Yields the names that the code of a parameter's hooks uses; of a builtin its own name."""
    for hook in (*(hooks_of(p) or {}).values(), *(post_accumulate_hooks_of(p) or {}).values()):
        function: Any = getattr(hook, "func", hook)  # of a functools.partial
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        yield from (getattr(function, "__name__", ""),) if code is None else code.co_names
