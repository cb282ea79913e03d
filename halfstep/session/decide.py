"""Decides what a session will do, once, before it changes anything."""

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
from halfstep.formats import Format
from halfstep.machine import WORTH, DeviceFacts, Processor
from halfstep.optim.steppers import needs_closure
from halfstep.optim.table import row_of, unsupported_options
from halfstep.plan.choose import emulation_notice, needs_emulation
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

MPS = (
    "{plan} is refused on MPS, the GPU of Apple silicon, where nothing of halfstep has been run: train at O0 there, or "
    "move the model to the CPU"
)
_LOG = logging.getLogger("halfstep")
Stepping = Literal["session", "optimizer"]


@dataclass(frozen=True, eq=False)
class Decision:
    """What a session will do: which models it trains, under which plan, and on which device and processor.

    `roots` are the models without their wrappers, and `assignment` has the formats that the plan gives their modules.
    `emulate` says whether products of the low format are computed in a wider format, and `asked` whether the user asked
    for that (True), asked not to (False), or left it to the `facts` of the device. `mixed` is False if the plan casts
    and scales nothing. `stepping` says whose `step` the training loop calls: the session's or the optimizer's.
    Parameters in `already_low` are stored in the plan's low format before the session starts; they keep their values
    and their dtype.
    """

    roots: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    plan: Plan
    assignment: Assignment
    device: torch.device
    emulate: bool
    asked: bool | None
    facts: DeviceFacts
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
    """Returns what a session for these models and optimizers will do; adapts the plan to what the optimizers support.

    `emulate=None` decides by the `facts` of the device. `made_low` are parameters that another session stores low and
    that will be fp32 again when this session opens. Other trainable parameters in a low format are refused, unless
    `already_low` lists them.

    Raises:
        PlanError: the plan fits no module.
        SetupError: the models or optimizers cannot be trained under the plan.
    """
    reshard(models)
    device = device_of(models, plan)
    if facts.kind == "mps" and plan.ops != "none":
        raise SetupError(MPS.format(plan=plan.name))
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
    return Decision(
        roots,
        tuple(optimizers),
        plan,
        assignment,
        device,
        mixed and needs_emulation(plan.low, facts) if emulate is None else emulate,
        emulate,
        facts,
        mixed,
        stepping,
        tuple(already_low),
    )


def emulates_after(decision: Decision, saved: bool | None) -> bool:
    """Returns whether a session emulates products once it has loaded a state, and logs where that was otherwise.

    `saved` says whether the session that saved the state did; None in states that do not say.
    """
    if saved is None or saved is decision.emulate or not decision.mixed:
        return decision.emulate
    low, kinds = decision.plan.low, {True: "emulated", False: "native"}
    came = f"the session state was saved by training with {kinds[saved]} {low} products"
    if decision.asked is not None:
        _LOG.warning(
            "%s, and emulate=%s was passed: they are %s from here on, and the run does not repeat bit for bit",
            came, decision.asked, kinds[decision.emulate],
        )  # fmt: skip
        return decision.emulate
    gain = decision.facts.processor.gain(low)
    costs = f"; {_slower(low, decision.facts.processor)}" if not saved and gain is not None and gain < 1.0 else ""
    _LOG.warning("%s, so they are here too; pass emulate=%s to change that%s", came, not saved, costs)
    return saved


def decide_for_copies(decision: Decision, copies: Sequence[nn.Module], plan: Plan) -> Decision:
    """Returns what a session without optimizers will do with copies of the models, under another plan."""
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
    """Warns about optimizers without an update in halfstep, if their step needs more time or memory than in fp32."""
    if decision.plan.param == "low" or (decision.mixed and decision.device.type != "cpu"):
        for optimizer in optimizers:
            if row_of(optimizer) is None:
                options = ", ".join(unsupported_options(optimizer))
                _say_that_it_steps_itself(type(optimizer).__name__ + (options and f" with {options}"))


def say_how_products_run(decision: Decision, *, told: bool) -> None:
    """Logs, once per process, that products are emulated by default, or what the wish not to do so costs.

    If `told`, a notice about the format has said by now that products are emulated.
    """
    low, processor = decision.plan.low, decision.facts.processor
    gain = processor.gain(low)
    if not decision.mixed or decision.facts.kind != "cpu":
        return
    if decision.asked is None and decision.emulate and not told:
        _say(emulation_notice(low, decision.facts))
    elif decision.asked is False and gain is not None and gain < 1.0:
        _say(f"emulate=False: {_slower(low, processor)}")
    elif decision.asked and gain is not None and gain >= WORTH:
        _say(
            f"emulate=True: native {low} products are about {gain:.2g} times as fast as emulated ones on this "
            f"processor ({processor.name})"
        )


def _slower(low: Format, processor: Processor) -> str:
    gain = processor.gain(low)
    times = f"about {1 / gain:.2g} times" if gain else "many times"
    return f"native {low} products take {times} as long as emulated ones on this processor ({processor.name})"


@functools.cache
def _say(notice: str) -> None:
    _LOG.warning(notice)


@functools.cache
def _say_that_it_steps_itself(name: str) -> None:
    """Warns, once per process and `name`, that halfstep has no update for such an optimizer, and what that costs."""
    _LOG.warning(
        "halfstep has no update of its own for %s, so the optimizer's own step runs. It needs fp32 copies of the "
        "weights that are stored low (2 bytes per parameter more than split masters take), and waits for the device at "
        "each step. To avoid this, use torch.optim.Adam, AdamW or SGD, or halfstep's Lion, Lamb or NovoGrad",
        name,
    )


def check_training(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses optimizers that cannot train their parameters under a plan.

    Raises:
        SetupError: an optimizer does not fit the plan because of its parameters, their shards, or its closure.
    """
    check_parameters(optimizers, models, plan)
    _refuse_whole_rows(optimizers, plan)
    check_closures([optimizer for optimizer in optimizers if needs_closure(optimizer)], plan)


def _refuse_whole_rows(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuses optimizers that have sharded parameters, if their update in halfstep needs whole weights."""
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
    """Refuses models that are already wrapped in DistributedDataParallel, if the plan stores their weights low."""
    if plan.param == "low" and living_wrappers_of(roots):
        raise SetupError(
            "the model has been wrapped in DistributedDataParallel, which would silently stop reducing gradients when "
            f"the weights change format at {plan.name}; delete all references to earlier wrappers, call "
            "`session = halfstep.initialize(model, optimizer, ...)` first, then "
            "`wrapped = DistributedDataParallel(model)`"
        )
