"""The line that a user adds: checks what it is given, decides on the plan, and opens the session."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.cast.enter import owners
from halfstep.cast.functions import check_functions
from halfstep.diagnose.guardian import Guardian, OnFailure
from halfstep.edits import OpChanges, Rule, Scaling, Width
from halfstep.errors import SetupError
from halfstep.formats import Format
from halfstep.machine import read_facts
from halfstep.optim.steppers import needs_closure
from halfstep.optim.table import row_of
from halfstep.plan.choose import choose_plan, needs_emulation
from halfstep.plan.fit import (
    as_list,
    check_closures,
    check_models,
    check_optimizers,
    check_parameters,
    device_of,
    first_device,
    unwrap,
)
from halfstep.plan.forwards import check_forwards
from halfstep.plan.levels import customize
from halfstep.plan.plan import Master, Plan, PlanInput
from halfstep.plan.resolve import resolve
from halfstep.processes import living_wrappers_of
from halfstep.session.session import Session, Sink

_LOG = logging.getLogger("halfstep")


def initialize(  # noqa: PLR0913  # the one public entry; each keyword is a documented override of the plan
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    plan: Plan | str = "O1",
    *,
    low: Format | torch.dtype | str | None = None,
    loss_scale: str | float | Scaling | None = None,
    norms: Width | None = None,
    master: Master | None = None,
    rules: Sequence[Rule] = (),
    ops: OpChanges | Mapping[str, Iterable[str]] | None = None,
    input: PlanInput | None = None,
    emulate: bool | None = None,
    sinks: Sequence[Sink] = (),
    on_failure: OnFailure = "raise",
) -> Session:
    """Starts mixed precision training of a model: forward runs under the plan, `session` does backward and step.

    `plan` is a level ("O0" to "O3"), a Plan, or the path of a plan file; the keywords change it. `low=None` takes the
    format that the device computes fast and says so once. `optimizer=None` is inference. What the model is given stays
    as it comes, and products cast what they take; `input="low"` casts all of it to low first. `emulate` computes the
    low format's products in a wider one, rounded exactly (None: fp16 on a CPU, where it was not measured to be fast).
    Each sink is called with each StepRecord, and a `Recorder`, such as a RunLog, with all other records too. A model
    that is still in a session leaves it first, with a notice. If steps keep being skipped for a reason that no lower
    loss scale cures, `step` raises a NumericsError that says what broke; `on_failure="warn"` logs it once and goes on.

    Raises:
        PlanError: the plan or a keyword is unknown, contradicts its level or fits no module.
        SetupError: the model or optimizer cannot be trained under the plan. After any error all is as it was.
    """
    models = as_list(model, nn.Module, "model")
    optimizers = [] if optimizer is None else as_list(optimizer, Optimizer, "optimizer")
    facts = read_facts(first_device(models))
    chosen, notice = choose_plan(plan, low, facts)
    chosen = customize(chosen, loss_scale=loss_scale, norms=norms, master=master, rules=rules, ops=ops, input=input)
    if not isinstance(sinks, (list, tuple)) or any(isinstance(sink, type) or not callable(sink) for sink in sinks):
        raise SetupError(f"sinks is {sinks!r:.80}; give a list of functions, each called with every StepRecord")
    if on_failure not in get_args(OnFailure):
        raise SetupError(f"on_failure is {on_failure!r}; give 'raise' or 'warn' for steps that keep being skipped")
    if emulate not in (None, True, False):
        raise SetupError(f"emulate is {emulate!r}; give True, False, or None to decide by the device")
    device = device_of(models, chosen)
    roots = [unwrap(m) for m in models]
    if emulate is not None and chosen.ops == "none":
        raise SetupError(
            f"emulate={emulate} at {chosen.name}, which runs everything as written; leave it out or use O1 to O3"
        )
    earlier = [owner for owner in owners(m for root in roots for m in root.modules()) if isinstance(owner, Session)]
    check_models(models, chosen, made_low=[p for session in earlier for p in session.low_parameters()])
    _refuse_wrapped_before(roots, chosen)
    check_optimizers(optimizers, models)
    check_parameters(optimizers, models, chosen)
    check_closures([optimizer for optimizer in optimizers if needs_closure(optimizer)], chosen)
    check_forwards(roots, resolve(chosen, roots))
    check_functions(chosen.op_changes)
    foreign = [optimizer for optimizer in optimizers if row_of(optimizer) is None]
    if foreign and chosen.master == "split":
        chosen = replace(chosen, master="copy")
    for session in earlier:
        _LOG.warning(
            "the model was still in a session (%s), now closed; the weights keep their training so far",
            session.plan.name,
        )
        session.close()
    if notice:
        _LOG.warning(notice)
    for optimizer in foreign if chosen.param == "low" or (chosen.ops != "none" and device.type != "cpu") else ():
        _say_that_it_steps_itself(type(optimizer).__name__)
    if emulate is None:
        emulate = chosen.ops != "none" and needs_emulation(chosen.low, facts)
    session = Session(models, optimizers, chosen, emulate=emulate, processor=facts.processor, sinks=sinks)
    return _guarded(session, on_failure)


def _refuse_wrapped_before(roots: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses models whose gradients a wrapper reduces that was made before the plan stores their weights low."""
    if plan.param == "low" and living_wrappers_of(roots):
        raise SetupError(
            f"the model has been wrapped in DistributedDataParallel; at {plan.name} the weights change their format, "
            "which would silently end its gradient reduction. Initialize the plain model first and wrap it after "
            "(`session = halfstep.initialize(model, optimizer, ...)`, `wrapped = DistributedDataParallel(model)`), and "
            "delete what is left of earlier wrappers"
        )


def _guarded(session: Session, on_failure: OnFailure) -> Session:
    """Has the guardian watch the steps of a session that scales or casts."""
    if session.optimizers and session.plan.ops != "none":
        session.watchers.append(Guardian(session.stage, session.tell, on_failure=on_failure))
    return session


@functools.cache
def _say_that_it_steps_itself(name: str) -> None:
    """Says, once per process, what an optimizer of this name costs."""
    _LOG.warning(
        "halfstep has no update of its own for %s: it steps itself, on fp32 copies of weights that are stored low "
        "(2 bytes per parameter more than split masters take), and waits for the device at each step; "
        "torch.optim.Adam, AdamW and SGD and halfstep's Lion have one",
        name,
    )
