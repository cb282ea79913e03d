"""`halfstep.initialize`, which starts training: it checks arguments, chooses the plan and opens a guarded session."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from halfstep.edits import OpChanges, Rule, Scaling, Width
from halfstep.errors import SetupError
from halfstep.explain.diagnose.guardian import Guardian, OnFailure
from halfstep.explain.diagnose.shadow import shadows_in_turn
from halfstep.explain.tape.absorbed import watch_absorbed
from halfstep.formats import Format
from halfstep.machine import read_facts
from halfstep.modes import ordinary_tensors
from halfstep.plan.io import choose_plan
from halfstep.plan.levels import customize
from halfstep.plan.matching import first_device
from halfstep.plan.plan import Master, Moments, Plan, PlanInput, Products, Rounding
from halfstep.train.processes.collectives import agreed, telling_of_errors
from halfstep.train.session.decide import Stepping
from halfstep.train.session.open import open_session
from halfstep.train.session.session import Session, Sink
from halfstep.validate import as_list, check_keywords, short, with_near_misses


@with_near_misses
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
    frozen: Width | None = None,
    moments: Moments | None = None,
    full_moments: Sequence[str] | None = None,
    rounding: Rounding | None = None,
    products: Products | None = None,
    emulate: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    sinks: Sequence[Sink] = (),
    on_failure: OnFailure = "raise",
    stepping: Stepping = "session",
) -> Session:
    """Starts mixed precision training of a model: its forward runs under the plan, the session does backward and step.

    If the model is still in a session, that session is closed first, with a warning. Trainable parameters in bf16 or
    fp16, such as those of a model from a hub, become fp32 weights at O1, get fp32 masters at O2, and train without fp32
    values at O3; a warning says what was done. For a sharded model, every process must make this call.

    Args:
        model: a module, or several that train together.
        optimizer: one or several; None for inference. An empty list is for `session.add_optimizers`.
        plan: a level ("O0" to "O3"), a Plan, or the path of a plan file.
        low: the low-precision format; by default the plan's, or else the one that the device computes fast.
        loss_scale: "dynamic", "none", a number or a Scaling, instead of the plan's.
        norms: the width of normalisation parameters, instead of the plan's.
        master: "copy", "split" or "none", instead of the plan's.
        rules: rules that are added to the plan's.
        ops: ops that move to other lists of the op table, by list.
        input: "low" casts all floating inputs of the model; by default they keep their format.
        frozen: "low" stores weights that no optimizer updates low, without masters; by default they stay in fp32, so
            that your code can average into them.
        moments: "bf16" or "8bit" keeps the averages of Adam, AdamW, Lion and SGD in 2 bytes or 1 between steps; updates
            are computed in fp32, and `optimizer.state_dict()` is fp32. By default they are kept as without halfstep.
        full_moments: patterns of parameter names, such as `"*embed*"`, whose averages stay as they are.
        rounding: "stochastic" rounds the updates of bf16 weights without masters up or down at random.
        products: "fp8", "fp8-row", "fp8-mx", "fp8-block" or "nvfp4" rounds the operands of the products of linear
            layers to 8 bits (4 bits); by default they run in the low format.
        emulate: whether products of the low format are computed in a wider one and rounded exactly; by default on a
            CPU whose native products are less than twice as fast.
        process_group: processes that step together though they hold different models, such as the stages of a pipeline
            written by hand. Stages of torch.distributed.pipelining, replicas and shards are found without it.
        sinks: are called with each StepRecord; a `Recorder`, such as a RunLog, also gets all other records.
        on_failure: if steps keep being skipped and no lower loss scale cures this, `step` raises a NumericsError that
            says what broke; with "warn" this is only logged, once.
        stepping: with "optimizer" your loop keeps its own `optimizer.step()`, which is skipped if a gradient is not
            finite. Each backward pass leaves unscaled fp32 gradients in `p.grad`, to be read and clipped as usual.

    Raises:
        PlanError: the plan or a keyword is unknown, contradicts its level or fits no module.
        SetupError: the model or optimizer cannot be trained under the plan, or another process that holds shards of the
            model raised an error. After any error nothing has changed.
        SessionError: the processes that hold the model's shards differ in what they train, or one of them is gone.
    """
    models = as_list(model, nn.Module, "model")
    with ordinary_tensors():
        with telling_of_errors(models):
            optimizers = [] if optimizer is None else as_list(optimizer, Optimizer, "optimizer", empty=True)
            facts = agreed(read_facts(first_device(models)))
            chosen, notice = choose_plan(plan, low, facts)
            chosen = customize(
                chosen,
                loss_scale=loss_scale,
                norms=norms,
                master=master,
                rules=rules,
                ops=ops,
                input=input,
                frozen=frozen,
                moments=moments,
                full_moments=full_moments,
                rounding=rounding,
                products=products,
            )
            _check_settings(chosen, sinks, on_failure, stepping, emulate)
            _check_group(process_group, chosen)
        session = open_session(
            models,
            optimizers,
            chosen,
            facts=facts,
            notice=notice,
            emulate=emulate,
            stepping=stepping,
            training=optimizer is not None,
            group=process_group,
            sinks=sinks,
        )
        if session.plan.ops != "none":  # else nothing runs low
            session.watchers.append(Guardian(session.runtime, session.tell, on_failure=on_failure))
            session.overflows = partial(watch_absorbed, session.runtime.roots, session.runtime.under)
            session.shadows = shadows_in_turn
            if session.plan.low.needs_scale and optimizer is not None:
                session.sample_absorbed()
        return session


def check_adapted(settings: Mapping[str, Any]) -> None:
    """Raises a TypeError unless the settings are keywords of `initialize` that an adapter leaves to its user."""
    # Without model, optimizer, plan and stepping.
    check_keywords("an adapter's initialize()", settings, list(inspect.signature(initialize).parameters)[3:-1])


def _check_settings(plan: Plan, sinks: Any, on_failure: Any, stepping: Any, emulate: Any) -> None:
    if not isinstance(sinks, (list, tuple)) or any(isinstance(sink, type) or not callable(sink) for sink in sinks):
        raise SetupError(
            f"sinks is {short(sinks)}; expected a list of functions, or objects such as RunLog(path) (not classes), "
            "that can be called with a StepRecord"
        )
    if on_failure not in get_args(OnFailure):
        raise SetupError(
            f"on_failure is {on_failure!r}; expected 'raise' (an error) or 'warn' (a warning) for when steps keep "
            "being skipped"
        )
    if stepping not in get_args(Stepping):
        raise SetupError(
            f"stepping is {stepping!r}; expected 'session' (for session.step()) or 'optimizer' (for optimizer.step())"
        )
    if not any(emulate is each for each in (None, True, False)):
        raise SetupError(f"emulate is {emulate!r}; expected True, False, or None to decide by the device")
    if emulate is not None and plan.ops == "none":
        raise SetupError(
            f"emulate={emulate} has no effect at {plan.name}, which runs everything as written; leave it out, or use "
            "O1 to O3"
        )


def _check_group(group: Any, plan: Plan) -> None:
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):  # what torch gives those outside of a group is none
        raise SetupError(
            f"process_group is {short(group)}; expected a torch.distributed.ProcessGroup with this process in it, such "
            "as torch.distributed.group.WORLD or mesh.get_group()"
        )
    if plan.ops == "none":
        raise SetupError(
            f"process_group has no effect at {plan.name}, where nothing is scaled or skipped; leave it out"
        )
