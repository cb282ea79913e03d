"""The optimizers of a session, each with its accumulator and stepper, and what runs its models without a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.errors import SessionError
from halfstep.formats import needs_scale
from halfstep.modes import begin_pass
from halfstep.plan.compatibility import FSDP_LINES
from halfstep.plan.plan import Plan
from halfstep.torch_internals import (
    PARAM_HOOKS,
    REGISTRATION_HOOKS,
    TorchDispatchMode,
    modules_of,
    parameters_of,
    sparse_indices,
    sparse_values,
)
from halfstep.train.cast.casting import Casting
from halfstep.train.optim.hooks import hook_weakly, updated_by
from halfstep.train.optim.masters import Fit
from halfstep.train.optim.steppers import Stepper
from halfstep.train.processes.shards import local, reshard
from halfstep.train.scale.accumulator import GradientAccumulator
from halfstep.train.scale.loss import FP16_LOSS_CEILING, wide
from halfstep.train.scale.scaling import LossScales
from halfstep.validate import named

_LOG = logging.getLogger("halfstep")


@dataclass(frozen=True, eq=False)
class Part:
    """One optimizer of a session, with its gradient accumulator and its stepper, which makes its updates."""

    optimizer: Optimizer
    accumulator: GradientAccumulator
    stepper: Stepper
    needs_closure: bool

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the optimizer updates, in the order of its groups."""
        return updated_by(self.optimizer)


@dataclass(frozen=True)
class StepFacts:
    """What is known about the last step that used gradients of one loss."""

    scale: float  # of that step if it was skipped, else the present one
    skipped: bool
    bad: tuple[str, ...]  # parameters whose `p.grad` is not finite
    left_over: bool  # gradients of the step before were never zeroed
    first_loss: float | None  # of the session's first step, if finite


def memory_of(
    parameters: Sequence[nn.Parameter], optimizers: Iterable[Optimizer], *, masters: int = 0, moments: int = 0
) -> dict[str, int]:
    """Returns the bytes of "weights", "masters" (as passed), "gradients" and "optimizer" state with `moments`."""
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(_bytes, parameters)),
        "masters": masters,
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(_bytes(value) for value in states if isinstance(value, Tensor)) + moments,
    }


def _bytes(t: Tensor) -> int:
    """Returns the bytes of a tensor in this process: for a sparse tensor those of its values and indices."""
    return sparse_indices(t).nbytes + sparse_values(t).nbytes if t.is_sparse else local(t).nbytes


def parts_to_step(parts: Sequence[Part], awaiting: Sequence[Part], optimizer: Optimizer | None) -> list[Part]:
    """Returns the parts to step: those in `awaiting`, which had a backward pass since their last step."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SessionError(
            f"step() expected one of the session's optimizers, got {type(optimizer).__name__}; it takes no closure"
        )
    asked = [part for part in parts if optimizer is None or part.optimizer is optimizer]
    if not asked:
        raise SessionError("the optimizer is not one of this session's; pass the optimizer to halfstep.initialize")
    for part in asked:
        if part.needs_closure:
            name = type(part.optimizer).__name__
            raise SessionError(
                f"{name} needs a closure: call optimizer.step(closure), with session.backward inside the closure"
            )
    found = [part for part in asked if part in awaiting]
    if not found:
        raise SessionError(
            "step() was called without gradients; call session.backward(loss) first (not loss.backward(), which does "
            "not scale the loss)"
        )
    return found


def on_registration(method: Callable[[nn.Module, str, nn.Module | None], None]) -> Callable[[], None]:
    """Calls a method for each module put into another, while its object lives or until what is returned is called."""
    return hook_weakly(REGISTRATION_HOOKS, modules_of_torch.register_module_module_registration_hook, method)


class Replacements:
    """Finds modules and parameters that were replaced or added after the optimizers were made."""

    def __init__(self, roots: Iterable[nn.Module], parts: Sequence[Part]) -> None:
        self._roots, self._parts = list(roots), parts
        self._idle: set[nn.Parameter] = set()
        self._names = WeakTensorKeyDictionary()  # of all parameters that have been seen in the models
        self._waiting = WeakTensorKeyDictionary()  # those that came since, and what to call it, until it is told
        self._known: set[int] = set()  # ids of the models' modules
        self._told: set[str] = set()
        self._find_added()
        self._waiting = WeakTensorKeyDictionary()
        on_registration(self._note)
        hook_weakly(PARAM_HOOKS, modules_of_torch.register_module_parameter_registration_hook, self._note)

    def _note(self, owner: nn.Module, *_: object) -> None:
        self._registered |= id(owner) in self._known

    def look(self, absent: Sequence[nn.Parameter]) -> None:
        """Checks, before a step, what was added since the last one, and the parameters that have no gradient."""
        unknown = not self._idle.issuperset(absent)
        if unknown or self._registered or sum(map(len, self._lists)) != self._length:
            reshard(self._roots)
            if unknown:
                self._look_at_absent(absent)
            self._find_added()
        if any(p.grad is not None for p in self._waiting):
            self._look_at_added()

    def _find_added(self) -> None:
        """Notes parameters that are new in the models, each by the outermost new module around it."""
        known: set[int] = set()
        self._lists = []
        for root in self._roots:
            above = label = ""  # the prefix of names in a module that was put in, and what to call it
            for name, module in root.named_modules():
                known.add(id(module))
                if isinstance(module, nn.Sequential | nn.ModuleList):
                    self._lists.append(modules_of(module))  # `insert` of these calls no hook
                if not (above and name.startswith(above)):
                    above = f"{name}." if name and id(module) not in self._known else ""
                    label = f"{name} ({type(module).__name__})"
                for own, p in parameters_of(module).items():
                    if p is not None and p not in self._names:
                        self._names[p] = full_name = f"{name}.{own}".lstrip(".")
                        self._waiting[p] = label if above else f"{full_name} ({type(p).__name__})"
        self._known, self._length, self._registered = known, sum(map(len, self._lists)), False

    def _look_at_added(self) -> None:
        updated = self._updated()
        trained = {p: self._waiting[p] for p in list(self._waiting) if p.grad is not None}
        for p in trained:
            del self._waiting[p]
        told = dict.fromkeys(where for p, where in trained.items() if id(p) not in updated and where not in self._told)
        self._told.update(told)
        if told:
            _LOG.warning(
                "what was put into the model after halfstep.initialize is updated by no optimizer of the session "
                f"({named(told)}): pass its parameters to optimizer.add_param_group, unless your code updates them; if "
                "it replaced a module or a parameter, make the optimizer and call halfstep.initialize again after that"
            )

    def _updated(self) -> set[int]:
        return {id(p) for part in self._parts for p in part.parameters()}

    def _look_at_absent(self, absent: Sequence[nn.Parameter]) -> None:
        """Raises an error if parameters without a gradient are in the model no more, and others in their place."""
        updated = self._updated()
        present = {id(p) for root in self._roots for p in root.parameters()}
        gone = [p for p in absent if id(p) not in present]
        others = [p for root in self._roots for p in root.parameters() if p.requires_grad and id(p) not in updated]
        if {p.shape for p in gone} & {p.shape for p in others} or (gone and len(absent) == len(updated)):
            names = named(self._names[p] if p in self._names else f"of shape {tuple(p.shape)}" for p in gone)
            raise SessionError(
                f"parameters that the optimizer updates are no longer in the model ({names}): a module was replaced, "
                "or a call such as fully_shard, parallelize_module or weight_norm replaced its parameters. Make the "
                f"optimizer and call halfstep.initialize again after that; to shard: {FSDP_LINES}"
            )
        self._idle.update(absent)


@dataclass(frozen=True, eq=False)
class Runtime:
    """Runs the models `roots` under a plan, forward and backward, but makes no step."""

    plan: Plan
    roots: Sequence[nn.Module]
    device: torch.device
    casting: Casting
    scales: LossScales
    full: Callable[[nn.Parameter], Tensor]  # a stored parameter's fp32 value
    fit: Callable[[nn.Parameter], Fit]  # of a parameter in the low format
    summing: Callable[[], bool]  # whether processes decide together on each step

    def is_entered(self) -> bool:
        """Returns whether this thread runs code under the plan: a forward, or a backward pass of the session."""
        switch = self.casting.switch
        return switch is not None and torch.is_autocast_enabled(switch.marker)

    def backward(self, loss: Tensor, scale: float | None) -> float:
        """Runs a loss's backward pass times `scale`, keeping its graph; returns the scale: an fp16 loss limits it."""
        if scale is None:
            with self.casting.backward():
                begin_pass(lambda: loss.backward(retain_graph=True))  # type: ignore[no-untyped-call]
            return 1.0
        low_loss = needs_scale(loss.dtype) or self.scales.ceiling is not None  # one that a forward returned
        if low_loss and self.plan.scale.adapts:
            scale = min(scale, FP16_LOSS_CEILING)
        with self.casting.backward():
            begin_pass(lambda: (wide(loss) * scale).backward(retain_graph=True))  # type: ignore[no-untyped-call]
        return scale

    @contextmanager
    def recording(self, recorder: TorchDispatchMode) -> Iterator[None]:
        """Returns a context in which `recorder` sees each operation that the models call."""
        with self.under(recorder), recorder:
            yield

    def whole_products(self) -> AbstractContextManager[None]:
        """Returns a context in which each emulated product is one operation, forward and backward."""
        return self.casting.over_emulation()

    def under(self, mode: TorchDispatchMode) -> AbstractContextManager[None]:
        """Returns a context in which the dispatch mode `mode` sees operations before emulation changes them."""
        return self.casting.over_emulation(mode)
