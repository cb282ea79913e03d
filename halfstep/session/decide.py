"""What a session is to do, decided once, before anything is touched."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.cast.functions import check_functions
from halfstep.errors import SetupError
from halfstep.machine import DeviceFacts, Processor
from halfstep.optim.steppers import needs_closure
from halfstep.optim.table import row_of
from halfstep.plan.choose import needs_emulation
from halfstep.plan.compatibility import (
    check_closures,
    check_models,
    check_optimizers,
    check_parameters,
    device_of,
    unwrap,
)
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, check_forwards, resolve
from halfstep.processes.replicas import living_wrappers_of
from halfstep.processes.shards import is_sharded, reshard

_LOG = logging.getLogger("halfstep")
Stepping = Literal["session", "optimizer"]


@dataclass(frozen=True, eq=False)
class Decision:
    """Which models train under which plan, where, and with what of this machine.

    `roots` are the models without wrappers, and `assignment` is what the plan gives their modules. `emulate` says that
    products of the low format are computed in a wider one. `mixed` is False where everything runs as written.
    `stepping` says who is called for a step. Parameters that are `already_low`, in the plan's format, start from what
    they are and keep their dtype.
    """

    roots: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    plan: Plan
    assignment: Assignment
    device: torch.device
    emulate: bool
    processor: Processor
    mixed: bool
    stepping: Stepping = "session"
    already_low: tuple[nn.Parameter, ...] = ()


def decide(  # noqa: PLR0913  # all that it depends on
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    emulate: bool | None,
    stepping: Stepping = "session",
    facts: DeviceFacts,
    made_low: Sequence[nn.Parameter] = (),
    already_low: Sequence[nn.Parameter] = (),
) -> Decision:
    """Returns what a session of these models and optimizers is to do; `plan` becomes one that fits the optimizers.

    `emulate=None` decides by the `facts` of the device. `made_low` are parameters that will be fp32 again by then;
    trainable ones that are low otherwise are refused, unless they are told to be `already_low`.

    Raises:
        PlanError: the plan fits no module.
        SetupError: the models or optimizers cannot be trained under the plan.
    """
    reshard(models)
    device = device_of(models, plan)
    roots = tuple(unwrap(model) for model in models)
    check_models(models, plan, made_low=[*made_low, *already_low])
    if not already_low:  # else nothing changes its format
        _refuse_wrapped_before(roots, plan)
    check_optimizers(optimizers, models)
    check_training(optimizers, models, plan)
    assignment = resolve(plan, roots, made_low=made_low)
    check_forwards(roots, assignment)
    check_functions(plan.op_changes)
    if plan.master == "split" and any(row_of(optimizer) is None for optimizer in optimizers):
        plan = replace(plan, master="copy")
        assignment = resolve(plan, roots, made_low=made_low)
    mixed = plan.ops != "none"
    if emulate is None:
        emulate = mixed and needs_emulation(plan.low, facts)
    return Decision(
        roots,
        tuple(optimizers),
        plan,
        assignment,
        device,
        emulate,
        facts.processor,
        mixed,
        stepping,
        tuple(already_low),
    )


def decide_for_copies(decision: Decision, copies: Sequence[nn.Module], plan: Plan) -> Decision:
    """Returns what a session without optimizers is to do with copies of the models, under another plan."""
    mixed = plan.ops != "none"
    return replace(
        decision,
        roots=tuple(copies),
        optimizers=(),
        plan=plan,
        assignment=resolve(plan, copies),
        emulate=decision.emulate and mixed,
        mixed=mixed,
    )


def say_what_steps_itself(decision: Decision, optimizers: Sequence[Optimizer]) -> None:
    """Says what the optimizers cost that halfstep has no update of its own for, where they cost more than in fp32."""
    if decision.plan.param == "low" or (decision.mixed and decision.device.type != "cpu"):
        for optimizer in optimizers:
            if row_of(optimizer) is None:
                _say_that_it_steps_itself(type(optimizer).__name__)


@functools.cache
def _say_that_it_steps_itself(name: str) -> None:
    """Says, once per process, what an optimizer of this name costs."""
    _LOG.warning(
        "halfstep has no update of its own for %s: it steps itself, on fp32 copies of weights that are stored low "
        "(2 bytes per parameter more than split masters take), and waits for the device at each step; "
        "torch.optim.Adam, AdamW and SGD and halfstep's Lion, Lamb and NovoGrad have one",
        name,
    )


def check_training(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses optimizers that cannot train their parameters under a plan.

    Raises:
        SetupError: an optimizer cannot, by its parameters, their shards, or the closure that it needs.
    """
    check_parameters(optimizers, models, plan)
    _refuse_whole_rows(optimizers, plan)
    check_closures([optimizer for optimizer in optimizers if needs_closure(optimizer)], plan)


def _refuse_whole_rows(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuses optimizers of halfstep's own whose law needs whole weights, where they get sharded ones."""
    for optimizer in optimizers:
        row = row_of(optimizer)
        if plan.ops == "none" or row is None or not row.whole:
            continue
        if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
            raise SetupError(
                f"{type(optimizer).__name__} needs the norms of whole weights, and its parameters are sharded over "
                "processes; use torch.optim.AdamW, Adam or SGD, or halfstep.Lion, or train replicas under "
                "DistributedDataParallel"
            )


def _refuse_wrapped_before(roots: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses models whose gradients a wrapper reduces that was made before the plan stores their weights low."""
    if plan.param == "low" and living_wrappers_of(roots):
        raise SetupError(
            f"the model has been wrapped in DistributedDataParallel; at {plan.name} the weights change their format, "
            "which would silently end its gradient reduction. Initialize the plain model first and wrap it after "
            "(`session = halfstep.initialize(model, optimizer, ...)`, `wrapped = DistributedDataParallel(model)`), and "
            "delete what is left of earlier wrappers"
        )
