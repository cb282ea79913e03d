"""The `backward`, `scaling`, `unscale_` and `step` of a session: under its plan, or as in a plain loop.

A session calls them on one object: a `PlainTraining` if the plan casts and scales nothing, otherwise a `MixedTraining`
or `TrueGradients`. So the session itself does not look at the plan in these methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.cast.casting import Casting
from halfstep.kernels.batch import Scratch
from halfstep.observe.probe import Probes
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import check_gradients
from halfstep.optim.update_watch import UpdateWatch
from halfstep.processes.replicas import Replicas
from halfstep.processes.shards import Unreduced, reshard
from halfstep.records import StepRecord
from halfstep.scale.accumulator import Collected
from halfstep.scale.buffers import BufferGuard
from halfstep.scale.loss import overflowed, poisoned, scaled
from halfstep.scale.norm import Clip, Reading, read
from halfstep.scale.scales import LossScales
from halfstep.scale.scaling import Scale
from halfstep.session.parts import Flags, LastStep, Part, Replacements, Update, last_steps, step_each
from halfstep.session.replicas import Agreed, Hearing, agree, read_by_shards, share_of_square
from halfstep.sharded import is_sharded
from halfstep.stack import begin_pass


@dataclass(eq=False)
class Stepped:
    """The outcome of a step.

    `record` is the record of the step, `parts` are those that made it, and `failed` is an error that a hook raised
    afterwards, else None. `last` has the `LastStep` of each loss, by loss id. `flags` has a pair for each part: its
    parameters, and flags that tell which of them had a gradient that was not finite. `spoiled` tells for each process
    whether a loss overflowed there; it is None if this process trains alone. `stopping` lists the processes that
    requested all to stop.
    """

    record: StepRecord
    parts: list[Part]
    failed: BaseException | None
    last: Mapping[int, LastStep] = field(default_factory=dict)
    flags: Sequence[Flags] = ()
    spoiled: Tensor | None = None
    stopping: Sequence[int] = ()


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

    def backward(self, loss: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of a loss."""
        begin_pass(partial(loss.backward, **kwargs))

    def scaling(
        self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Returns a context that does nothing and yields the scale 1."""
        return nullcontext(self._one)

    def unscale_(self) -> None:
        """Does nothing, since the gradients are not scaled."""

    def step(
        self, parts: list[Part], number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool
    ) -> Stepped:
        """Clips the gradients as torch does, and calls the `step` of each optimizer."""
        norm = None
        self._replacements.look([p for part in parts for p in part.parameters() if p.grad is None])
        collected = [part.accumulator.collect() if self.probes.looking else self._nothing for part in parts]
        read_for(self.probes, collected)
        if max_norm is not None:
            reshard(self.roots)
            mine = {id(p) for part in parts for p in part.parameters()}
            ordered = [p for root in self.roots for p in root.parameters() if id(p) in mine]
            norm = nn.utils.clip_grad_norm_(ordered, max_norm)  # in the model's order, on which the sum's bits depend
            norm = norm.full_tensor() if is_sharded(norm) else norm
        store = MasterStore("none", torch.float32)
        count, failed = step_each(updates_of(self.probes, parts, collected, [None] * len(parts), self._false, store))
        record = StepRecord(number, self._false.clone(), self._one, norm, loss=loss)
        return Stepped(record, parts[:count], failed)


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

    def __post_init__(self) -> None:
        self._replacements = Replacements(self.roots, self.parts)
        self._scratch = Scratch()  # of the read of the gradients
        self._clip = Clip(self.device)
        self._hearing = Hearing(self.replicas)
        self._unmade: tuple[list[Part], Agreed, list[Tensor | None]] | None = None
        self._unreduced = Unreduced(self.roots) if self.replicas.sharded and self.scales.active else None

    def backward(self, loss: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of a loss times its scale; an error leaves the gradients as they were."""
        scale = self.scales.of(loss_id)
        self._before(loss_id, scale)
        try:
            with self.casting.backward():
                sent = poisoned(loss) if self.replicas.joining else loss
                begin_pass(partial(scaled(sent, scale).backward, **kwargs))
        except BaseException:
            self._undo()
            with self.replicas.naming_who_is_gone("the backward pass"):
                raise
        self._after(loss_id, scale, overflowed(loss))

    @contextmanager
    def scaling(self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True) -> Iterator[Tensor]:
        """Yields the loss scale (0-dim fp32) for a backward pass that the caller runs inside the context."""
        scale = self.scales.of(loss_id)
        self._before(loss_id, scale)
        if not losses and self.scales.active:
            self.replicas.refuse_a_stage_alone()
        bad = [overflowed(loss) for loss in losses]
        found = bad[0] if len(bad) == 1 else torch.stack(bad).any() if bad else None
        try:
            with self.casting.backward():
                yield self._sent(scale.value, found)
        except BaseException:
            self._undo()
            with self.replicas.naming_who_is_gone("the backward pass"):
                raise
        self._after(loss_id, scale, found, unscale)

    def _sent(self, scale: Tensor, not_finite: Tensor | None) -> Tensor:
        """Returns the scale to multiply losses by: `scale`, or NaN within `join()` if a loss is not finite."""
        # Within DistributedDataParallel's `join()`, processes exchange only gradients.
        if not_finite is None or not self.replicas.joining:
            return scale
        return scale.masked_fill(not_finite.to(scale.device), math.nan)

    def _before(self, loss_id: int, scale: Scale) -> None:
        if self._unreduced is not None:
            self._unreduced.before_backward(scale.value)
        self._unmade = None
        self.replicas.find_stages()
        self.replicas.sums.before_backward()
        for part in self.parts:
            part.accumulator.before_backward(loss_id, scale.value)

    def _undo(self) -> None:
        for part in self.parts:
            part.accumulator.undo_backward()

    def _after(self, loss_id: int, scale: Scale, not_finite: Tensor | None, unscale: bool = True) -> None:
        for part in self.parts:
            part.accumulator.after_backward(loss_id, scale.value, not_finite)
        self.scales.went_backward(loss_id)

    def unscale_(self) -> None:
        """Makes the gradients in `p.grad` true gradients in fp32."""
        for part in self.parts:
            part.accumulator.unscale_()

    def step(
        self, parts: list[Part], number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool
    ) -> Stepped:
        """Reads the gradients once, and updates the weights in one pass if all gradients are finite."""
        self.casting.weights_changed()
        collected = [part.accumulator.collect() for part in parts]
        self._replacements.look([p for held in collected for p in held.absent])
        for held in collected:  # before one of them has stepped, and before kernels read what has no memory
            if len(parts) > 1 or set(map(type, held.grads)) != {Tensor}:
                check_gradients(held.params, held.grads, self.name_of)
        if self._unmade is not None and self._unmade[0] == parts:  # the others have made this step
            _, agreed, factors = self._unmade
        else:
            agreed, factors = self._agreed(parts, collected, stop=stop)
        if agreed.processes is not None:
            self._unmade = parts, agreed, factors
        collected, norm = agreed.collected, agreed.norm
        found = agreed.readings[0].found
        for flag in (*(reading.found for reading in agreed.readings[1:]), *(held.found for held in collected)):
            if flag is not None:
                found = found | (flag if flag.device == self.device else flag.to(self.device))
        if max_norm is not None:
            clip = self._clip.factor(norm, max_norm)
            factors = [clip if factor is None else factor * clip for factor in factors]
        read_for(self.probes, collected)
        count, failed = step_each(updates_of(self.probes, parts, collected, factors, found, self.store))
        heard = self._hearing.hear(agreed)  # always: it may ask the other processes
        if self._unmade is not None:
            self._unmade = parts[count:], agreed.rest(count), self._unmade[2][count:]
        parts, collected = parts[:count], collected[:count]
        for part in parts:
            part.accumulator.consumed()
        self.buffers.restore(found)
        self.scales.update(collected, [reading.found for reading in agreed.readings[:count]])
        synced = any([part.stepper.syncs for part in parts])
        return Stepped(
            StepRecord(number, found, collected[0].scale, norm, synced, loss),
            parts,
            failed or heard,
            last_steps(parts, collected, found),
            agreed.flags[:count],
            agreed.processes,
            self._hearing.stopping,
        )

    def _agreed(
        self, parts: list[Part], collected: list[Collected], *, stop: bool
    ) -> tuple[Agreed, list[Tensor | None]]:
        """Reads the gradients once; returns what all processes found together, and a factor for each part."""
        summing, sharded = self.replicas.summing(), self.replicas.sharded
        readings: list[Reading] = []
        norms: list[tuple[int, Tensor]] = []  # with the number of different shards
        factors: list[Tensor | None] = []
        for held in collected:
            if sharded:
                reading, own = read_by_shards(held, self.device, self._scratch)
            else:
                reading = read(held.grads, device=self.device, scratch=self._scratch)
                own = [(1, reading.norm)]
            factor = held.inverse.to(self.device) if self.scales.active else None
            readings.append(reading)
            factors.append(factor)
            norms += own if factor is None else [(number, norm * factor) for number, norm in own]
        norm = norms[0][1] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm for _, norm in norms]))
        if summing:
            square = share_of_square(norms if sharded else [(1, norm)], self.replicas.size)
            return agree(self.replicas, parts, collected, readings, square, stop=stop), factors
        flags = [(held.params, reading.flags) for held, reading in zip(collected, readings, strict=True)]
        return Agreed(collected, readings, norm, flags), factors


class TrueGradients(MixedTraining):
    """Mixed training for loops that call `optimizer.step`: each backward pass leaves true gradients in `p.grad`."""

    def _after(self, loss_id: int, scale: Scale, not_finite: Tensor | None, unscale: bool = True) -> None:
        super()._after(loss_id, scale, not_finite)
        if unscale and (self.scales.active or any(True for _ in self.store)):  # else they are true already
            self.unscale_()


Training = PlainTraining | MixedTraining
"""An object that runs the backward passes and steps of a session."""


def read_for(probes: Probes, collected: Sequence[Collected]) -> None:
    """Passes the gradients of a step to the probes that measure this step."""
    if probes.looking:
        for held in collected:
            probes.read(held.params, held.grads, held.carried)


def updates_of(
    probes: Probes,
    parts: Sequence[Part],
    collected: Sequence[Collected],
    factors: Sequence[Tensor | None],
    found: Tensor,
    store: MasterStore,
) -> list[Update]:
    """Returns a function for each part that makes its update; the probes watch it if they measure this step."""
    triples = zip(parts, collected, factors, strict=True)
    if probes.looking:
        return [watched(probes, part, held, factor, found, store) for part, held, factor in triples]
    return [partial(part.stepper.step, held.params, held.grads, factor, found) for part, held, factor in triples]


def watched(
    probes: Probes, part: Part, held: Collected, factor: Tensor | None, found: Tensor, store: MasterStore
) -> Update:
    """Returns a function that updates the weights of one optimizer (a part) and lets the probes measure the updates."""
    # `held` has the parameters and their gradients, which are multiplied by `factor` (None for no factor); `found`
    # tells whether the step is skipped because a gradient is not finite.

    def update() -> BaseException | None:
        watch = partial(UpdateWatch, part.optimizer, part.stepper, store, found)
        with probes.updating(watch, held.params, held.grads, factor):
            return part.stepper.step(held.params, held.grads, factor, found)

    return update
