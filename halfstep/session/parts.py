"""The optimizers of a session, each with what adds up its gradients and the way it is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.optim.masters import MasterStore
from halfstep.optim.steppers import Stepper, make_stepper, needs_closure
from halfstep.plan.compatibility import FSDP_LINES, named
from halfstep.processes.replicas import Replicas
from halfstep.processes.shards import local, reshard
from halfstep.scale.accumulator import Collected, GradientAccumulator
from halfstep.torch_internals import sparse_indices, sparse_values

Flags = tuple[list[nn.Parameter], Tensor]  # parameters, and for each whether its gradient is not finite
Update = Callable[[], BaseException | None]


@dataclass(frozen=True, eq=False)
class Part:
    """One optimizer of a session."""

    optimizer: Optimizer
    accumulator: GradientAccumulator
    stepper: Stepper
    needs_closure: bool

    def parameters(self) -> list[nn.Parameter]:
        """Returns what the optimizer updates, in its order."""
        return updated_by(self.optimizer)


@dataclass(frozen=True, eq=False)
class LastStep:
    """The last step with gradients of a loss: whether it was skipped, the loss's scale in it, and whose they were."""

    skipped: Tensor
    scale: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StepFacts:
    """What is known of the last step on a loss.

    `scale` is the loss scale that it had where it was `skipped`, else the present one. `bad` names the gradients in
    `p.grad` that are not finite, `left_over` is True where those of the step before were never zeroed. `first_loss` is
    that of the session's first step (None: there was none, or it was not finite).
    """

    scale: float
    skipped: bool
    bad: tuple[str, ...]
    left_over: bool
    first_loss: float | None


def make_part(
    optimizer: Optimizer,
    store: MasterStore,
    *,
    plain: bool,
    full_accumulate: bool,
    replicas: Replicas,
    name_of: Callable[[nn.Parameter], str],
) -> Part:
    """Returns the part of one optimizer; `plain` leaves the step to the optimizer.

    `full_accumulate`: gradients that add up are held in fp32. `replicas` tells of those that are reduced over
    processes, and `name_of` in messages which parameter is meant.
    """
    return Part(
        optimizer,
        GradientAccumulator(lambda: updated_by(optimizer), full_accumulate, lambda: replicas.reduced, replicas.sums),
        make_stepper(optimizer, store, plain=plain, name_of=name_of),
        needs_closure(optimizer),
    )


def memory_of(
    parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer], *, masters: int = 0
) -> dict[str, int]:
    """Returns the bytes of weights, `masters`, gradients, and optimizer state."""
    parameters = list(parameters)
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(_bytes, parameters)),
        "masters": masters,
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(_bytes(value) for value in states if isinstance(value, Tensor)),
    }


def _bytes(t: Tensor) -> int:
    """Returns the bytes that lie here of a dense tensor, and of the entries and their indices of a sparse one."""
    return sparse_indices(t).nbytes + sparse_values(t).nbytes if t.is_sparse else local(t).nbytes


def parts_to_step(parts: Sequence[Part], awaiting: Sequence[Part], optimizer: Optimizer | None) -> list[Part]:
    """Returns those `awaiting` a step after a backward pass: all, or that of one `optimizer`.

    Raises:
        SessionError: there are none, or the optimizer is not one of these, or makes its steps itself.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SessionError(
            f"step() takes one of the session's optimizers, not {type(optimizer).__name__}, and no closure"
        )
    asked = [part for part in parts if optimizer is None or part.optimizer is optimizer]
    if not asked:
        what = "the optimizer is not one of this session's" if parts else "this session has no optimizer (inference)"
        raise SessionError(f"{what}; give it to halfstep.initialize")
    for part in asked:
        if part.needs_closure:
            name = type(part.optimizer).__name__
            raise SessionError(
                f"{name} needs a closure: call optimizer.step(closure), with session.backward inside the closure"
            )
    found = [part for part in asked if part in awaiting]
    if not found:
        raise SessionError(
            "step() without gradients: call session.backward(loss) first (loss.backward() alone is not scaled)"
        )
    return found


class Replacements:
    """Looks for parameters of models that were replaced since their optimizer was made: they would never train again.

    `parts` are all of a session. The models are looked at only where a gradient is absent that never was before.
    """

    def __init__(self, roots: Iterable[nn.Module], parts: Sequence[Part]) -> None:
        self._roots, self._parts = list(roots), parts
        self._idle: set[nn.Parameter] = set()

    def look(self, absent: Sequence[nn.Parameter]) -> None:
        """Looks before a step to which some parameters come without a gradient.

        Raises:
            SessionError: some of these are in none of the models, and others are there in their place.
        """
        if self._idle.issuperset(absent):
            return
        reshard(self._roots)
        updated = {id(p) for part in self._parts for p in part.parameters()}
        present = {id(p) for root in self._roots for p in root.parameters()}
        shapes = [p.shape for p in absent if id(p) not in present]
        names = [
            name
            for root in self._roots
            for name, p in root.named_parameters()
            if p.requires_grad and id(p) not in updated and p.shape in shapes
        ]
        if names or (shapes and len(absent) == len(updated)):
            raise SessionError(
                "parameters that the optimizer updates are no longer in the model "
                f"({named(names) or 'of shapes ' + named(map(str, map(tuple, shapes)))}): what replaced them, such as "
                f"fully_shard or parallelize_module, has to come first: {FSDP_LINES}"
            )
        self._idle.update(absent)


def step_each(updates: Sequence[Update]) -> tuple[int, BaseException | None]:
    """Makes updates in their order; returns how many were made, and the first error of a hook on the way.

    An update returns what was raised after it, and raises what was before it: it and those that follow are not made
    then. Where that is the first one, nothing was, and it is raised here.
    """
    count, failed = 0, None
    try:
        for update in updates:
            raised = update()
            failed = failed or raised
            count += 1
    except BaseException as error:
        if not count:
            raise
        failed = failed or error
    return count, failed


def last_steps(parts: Sequence[Part], collected: Sequence[Collected], skipped: Tensor) -> dict[int, LastStep]:
    """Returns what a step was for each loss, by its id."""
    found: dict[int, LastStep] = {}
    for part, held in zip(parts, collected, strict=True):
        for loss_id, scale in held.scales.items():
            others = found[loss_id].parts if loss_id in found else ()
            found[loss_id] = LastStep(skipped, scale, (*others, part))
    return found


def updated_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns what an optimizer updates, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
