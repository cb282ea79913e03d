"""Measures one step for a probe, from the end of the previous step to the end of this one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol

from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.later import is_capturing
from halfstep.modes import run_uncompiled
from halfstep.records import PRECISION, UPDATE, Observation
from halfstep.torch_internals import parameters_of
from halfstep.train.kernels.stats import Updates
from halfstep.train.probe.hooks import StepHooks, readable, undo_all
from halfstep.train.probe.rows import Pending, StepRows, Subject

Owners = dict[int, tuple[Parameter, str, str]]  # by id: a parameter, the first module that has it, and its name there


class OverflowWatch(Protocol):
    """Looks in the forwards of one step for overflows that a later operation absorbs, while `on` is true."""

    on: bool

    def end(self, losses: Sequence[Tensor]) -> None:
        """Notes the overflows that the losses of a backward pass depend on."""

    def observations(self, step: int) -> list[Observation]:
        """Returns what was found, as observations."""


# Begins a watch: adds what ends it to the list, and returns it with the function that leaves the emulation's modes.
Overflows = Callable[[list[Callable[[], None]]], tuple[OverflowWatch, Callable[[], None]]]
# Begins to count what recipes of products lose in some modules; called at a step, the result returns what reads that.
Operands = Callable[[Container[str]], Callable[[int], Callable[[], Sequence[Observation]]]]
Errors = Callable[[str, str, Tensor], None]  # takes a module, a place in its output, and the errors there
# Begins to call one of some modules again in fp32, in the next forward: passes on the errors of its outputs, in their
# spread, and adds what ends this to the list. Returns what switches it off and on.
Shadows = Callable[[Mapping[str, nn.Module], Errors, list[Callable[[], None]]], Callable[[bool], None]]


More = tuple[Overflows | None, Shadows | None, Operands | None]
"""What a probe begins in a step beside statistics of tensors."""


class Window:
    """Measures tensors of some `kinds` in `modules`, a dict by name, from its creation until `close`."""

    # What is added to `undo` refers to neither modules nor window, so that a finalizer may hold it.

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        kinds: frozenset[str],
        sample: int | None,
        undo: list[Callable[[], None]],
        more: More,
    ) -> None:
        absorbed, shadows, operands = more
        self.kinds = kinds
        self.hooks: StepHooks | None = None
        self.watch: OverflowWatch | None = None
        self._modules = modules
        self.unread: set[str] = set()  # types of tensors that could not be read
        self.captured = False  # by a CUDA graph, whose replays would count again
        self._rows = StepRows(sample)
        self._scale = 0
        self._weights_read = False
        self._undo = undo
        if kinds & {"activation", "activation_grad"}:
            undo.append(run_uncompiled())
            self.hooks = StepHooks(
                partial(self._saw, "activation") if "activation" in kinds else None,
                partial(self._saw, "activation_grad") if "activation_grad" in kinds else None,
            )
            undo.append(self.hooks.take_off)
            self.hooks.put_on(modules)
        if absorbed is not None:
            self.watch, self._off_emulation = absorbed(undo)
        self._operands = None if operands is None or is_capturing() else operands(modules)
        self._shadow: Callable[[bool], None] | None = None
        if shadows is not None:
            undo.append(run_uncompiled())
            self._shadow = shadows(modules, partial(self._saw, PRECISION), undo)

    @cached_property
    def owners(self) -> Owners:
        """The floating-point and complex parameters of the modules by id, collected at the first access."""
        return owned(self._modules)

    def pause(self, *, on: bool) -> None:
        """Stops (`on=False`) or resumes observing what the modules compute."""
        if self.hooks is not None:
            self.hooks.active = on
        if self.watch is not None:
            self.watch.on = on
        if self._shadow is not None:
            self._shadow(on)

    def close(self) -> None:
        """Detaches the window and leaves the modules as they were before."""
        if self.hooks is not None:
            self.hooks.remove()
        if self.watch is not None:
            self._off_emulation()
        undo_all(self._undo)

    def pending(self, step: int) -> Pending:
        """Returns the measurements, with their copy to the host started."""
        operands = tuple if self._operands is None or self._capturing() else self._operands(step)
        return self._rows.pending(step, () if self.watch is None else self.watch.observations(step), operands)

    def carry(self, scale: Tensor, losses: Sequence[Tensor]) -> None:
        if self.watch is not None:
            self.watch.end(losses)
        if self.hooks is not None:
            self.hooks.new_backward()
        if not self._capturing():
            self._scale = self._rows.add_scale(scale)

    def read(self, params: Sequence[Parameter], grads: Sequence[Tensor], scale: Tensor) -> None:
        """Measures gradients of a step, which are multiplied by `scale`; the first call also measures the weights."""
        if self._capturing():
            return
        owners = self.owners
        if "weight" in self.kinds and not self._weights_read:
            self._weights_read = True
            self._add([(p, Subject(module, "weight", name)) for p, module, name in owners.values()])
        if "weight_grad" in self.kinds:
            number = self._rows.add_scale(scale)
            pairs = [(owners[id(p)], grad) for p, grad in zip(params, grads, strict=True) if id(p) in owners]
            self._add([(grad, Subject(module, "weight_grad", name, number)) for (_, module, name), grad in pairs])

    def update(self, updates: Updates) -> None:
        if self._capturing():
            return
        owned = [self.owners.get(id(p)) for p in updates.params]
        self._rows.add_updates(updates, [owner and Subject(owner[1], UPDATE, owner[2]) for owner in owned])

    def _saw(self, kind: str, module: str, place: str, t: Tensor) -> None:
        self._add([(t, Subject(module, kind, place, self._scale if kind == "activation_grad" else 0))])

    def _add(self, pairs: Sequence[tuple[Tensor, Subject]]) -> None:
        if self._capturing():
            return
        read = [(readable(t.detach()), subject) for t, subject in pairs]
        self.unread.update(type(t).__name__ for (t, _), (found, _) in zip(pairs, read, strict=True) if found is None)
        self._rows.add([t for t, _ in read if t is not None], [subject for t, subject in read if t is not None])

    def _capturing(self) -> bool:
        capturing = is_capturing()
        self.captured = self.captured or capturing
        return capturing


def owned(modules: Mapping[str, nn.Module]) -> Owners:
    """Returns, by id, each floating-point or complex parameter with the first module that has it and its name there."""
    found: Owners = {}
    for module_name, module in modules.items():
        for name, p in parameters_of(module).items():
            if p is not None and (p.is_floating_point() or p.is_complex()):
                found.setdefault(id(p), (p, module_name, name))
    return found
