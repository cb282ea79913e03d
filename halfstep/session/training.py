"""How a session goes backward and steps: under its plan, or, where that runs everything as written, as the loop would.

Both keep their promises without a word of the plan's kind in the session, which has one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.cast.casting import Casting
from halfstep.kernels.batch import Scratch
from halfstep.observe.probe import Probes
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import check_gradients
from halfstep.optim.update_watch import UpdateWatch
from halfstep.processes import Replicas
from halfstep.records import StepRecord
from halfstep.scale.buffers import BufferGuard
from halfstep.scale.ledger import Collected
from halfstep.scale.loss import overflowed, poisoned, scaled
from halfstep.scale.norm import read
from halfstep.scale.scales import LossScales
from halfstep.scale.scaling import Scale
from halfstep.session.parts import Flags, LastStep, Part, Update, last_steps, step_each
from halfstep.session.replicas import Agreed, Hearing, agree
from halfstep.stack import begin_pass


@dataclass(eq=False)
class Stepped:
    """What a step did: its record, which parts have made it, and what a hook raised afterwards.

    `last` has for each loss what the step was to it, `flags` whose gradients overflowed, `spoiled` in which processes a
    loss did (None in one process alone), and `stopping` the processes that want all to stop.
    """

    record: StepRecord
    parts: list[Part]
    failed: BaseException | None
    last: Mapping[int, LastStep] = field(default_factory=dict)
    flags: Sequence[Flags] = ()
    spoiled: Tensor | None = None
    stopping: Sequence[int] = ()


class Training(Protocol):
    """How a session goes backward and steps."""

    def backward(self, loss: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of a loss; after an error the gradients are as they were."""
        ...

    def scaling(
        self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Returns a context around a backward pass that the caller makes, from the scale that it gives (0-dim fp32).

        `unscale=False` leaves gradients scaled that would be true ones after it.
        """
        ...

    def unscale_(self) -> None:
        """Makes the gradients in `p.grad` true fp32 ones."""
        ...

    def step(
        self, parts: list[Part], number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool
    ) -> Stepped:
        """Makes the step `number` of `parts`, on gradients of `loss`; `stop` tells other processes to end it there.

        What is raised here was raised before a part has stepped; what came later is in the result.
        """
        ...


@dataclass(eq=False)
class PlainTraining:
    """Backward and step as the loop itself would make them: nothing is scaled, cast or skipped."""

    roots: Sequence[nn.Module]
    probes: Probes
    device: torch.device

    def __post_init__(self) -> None:
        self._false = torch.zeros((), dtype=torch.bool, device=self.device)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)

    def backward(self, loss: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of a loss."""
        begin_pass(partial(loss.backward, **kwargs))

    def scaling(
        self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Returns a context that does nothing, and the scale 1."""
        return nullcontext(self._one)

    def unscale_(self) -> None:
        """Does nothing: the gradients are true ones."""

    def step(
        self, parts: list[Part], number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool
    ) -> Stepped:
        """Clips as torch does, and steps each optimizer by its own `step`."""
        norm = None
        collected = [part.ledger.collect() for part in parts] if self.probes.looking else []
        for held in collected:
            self.probes.read(held.params, held.grads, held.carried)
        if max_norm is not None:
            mine = {id(p) for part in parts for p in part.parameters()}
            ordered = [p for root in self.roots for p in root.parameters() if id(p) in mine]
            norm = nn.utils.clip_grad_norm_(ordered, max_norm)  # in the model's order, on which the sum's bits depend
        if collected:
            updates = [
                watched(self.probes, part, held, None, self._false, MasterStore("none", torch.float32))
                for part, held in zip(parts, collected, strict=True)
            ]
        else:
            updates = [partial(part.stepper.step, [], [], None, self._false) for part in parts]
        count, failed = step_each(updates)
        record = StepRecord(number, self._false.clone(), self._one, norm, loss=loss)
        return Stepped(record, parts[:count], failed)


@dataclass(eq=False)
class MixedTraining:
    """Runs backward and step under a plan: scales the loss, and skips the step if a gradient is not finite."""

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
        self._scratch = Scratch()  # of the read of the gradients
        self._hearing = Hearing(self.replicas)

    def backward(self, loss: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of a loss times its scale."""
        scale = self.scales.of(loss_id)
        self._before(loss_id, scale)
        try:
            with self.casting.backward():
                sent = poisoned(loss) if self.replicas.joining else loss
                begin_pass(partial(scaled(sent, scale).backward, **kwargs))
        except BaseException:
            self._undo()
            raise
        self._after(loss_id, scale, overflowed(loss))

    @contextmanager
    def scaling(self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool = True) -> Iterator[Tensor]:
        """Returns a context around a backward pass that the caller makes, from the scale that it gives."""
        scale = self.scales.of(loss_id)
        self._before(loss_id, scale)
        try:
            with self.casting.backward():
                yield scale.value
        except BaseException:
            self._undo()
            raise
        bad = [overflowed(loss) for loss in losses]
        self._after(loss_id, scale, bad[0] if len(bad) == 1 else torch.stack(bad).any() if bad else None, unscale)

    def _before(self, loss_id: int, scale: Scale) -> None:
        for part in self.parts:
            part.ledger.before_backward(loss_id, scale.value)

    def _undo(self) -> None:
        for part in self.parts:
            part.ledger.undo_backward()

    def _after(self, loss_id: int, scale: Scale, not_finite: Tensor | None, unscale: bool = True) -> None:
        for part in self.parts:
            part.ledger.after_backward(loss_id, scale.value, not_finite)
        self.scales.went_backward(loss_id)

    def unscale_(self) -> None:
        """Makes the gradients in `p.grad` true fp32 ones."""
        for part in self.parts:
            part.ledger.unscale_()

    def step(
        self, parts: list[Part], number: int, *, max_norm: float | None, loss: Tensor | None, stop: bool
    ) -> Stepped:
        """Reads the gradients once, and updates the weights in one pass where all of them are finite."""
        self.casting.weights_changed()
        collected = [part.ledger.collect() for part in parts]
        for held in collected:  # before one of them has stepped, and before kernels read what has no memory
            if len(parts) > 1 or set(map(type, held.grads)) != {Tensor}:
                check_gradients(held.params, held.grads, self.name_of)
        agreed, factors = self._agreed(parts, collected, stop=stop)
        collected, norm = agreed.collected, agreed.norm
        found = agreed.readings[0].found
        for flag in (*(reading.found for reading in agreed.readings[1:]), *(held.found for held in collected)):
            if flag is not None:
                found = found | (flag if flag.device == self.device else flag.to(self.device))
        if max_norm is not None:
            clip = (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
            factors = [clip if factor is None else factor * clip for factor in factors]
        if self.probes.looking:
            for held in collected:
                self.probes.read(held.params, held.grads, held.carried)
            updates = [
                watched(self.probes, part, held, factor, found, self.store)
                for part, held, factor in zip(parts, collected, factors, strict=True)
            ]
        else:
            updates = [
                partial(part.stepper.step, held.params, held.grads, factor, found)
                for part, held, factor in zip(parts, collected, factors, strict=True)
            ]
        count, failed = step_each(updates)
        heard = self._hearing.hear(agreed)  # always: it may ask the other processes
        parts, collected = parts[:count], collected[:count]
        for part in parts:
            part.ledger.consumed()
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
        """Returns what one read of the gradients finds, in all processes together, and what unscales each part's."""
        readings = [read(held.grads, device=self.device, scratch=self._scratch) for held in collected]
        factors: list[Tensor | None] = [None] * len(parts)
        norms = [reading.norm for reading in readings]
        if self.scales.active:
            inverses = [held.inverse.to(self.device) for held in collected]
            norms = [norm * inverse for norm, inverse in zip(norms, inverses, strict=True)]
            factors = [*inverses]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if self.replicas.summing():
            return agree(self.replicas, parts, collected, readings, norm, stop=stop), factors
        flags = [(held.params, reading.flags) for held, reading in zip(collected, readings, strict=True)]
        return Agreed(collected, readings, norm, flags), factors


class TrueGradients(MixedTraining):
    """Training that leaves true gradients in `p.grad` after each backward pass, for loops that step by themselves."""

    def _after(self, loss_id: int, scale: Scale, not_finite: Tensor | None, unscale: bool = True) -> None:
        super()._after(loss_id, scale, not_finite)
        if unscale and (self.scales.active or any(True for _ in self.store)):  # else they are true already
            self.unscale_()


def watched(
    probes: Probes, part: Part, held: Collected, factor: Tensor | None, found: Tensor, store: MasterStore
) -> Update:
    """Returns the update of a part as the probes look at it."""

    def update() -> BaseException | None:
        watch = partial(UpdateWatch, part.optimizer, part.stepper, store, found)
        with probes.updating(watch, held.params, held.grads, factor):
            return part.stepper.step(held.params, held.grads, factor, found)

    return update
