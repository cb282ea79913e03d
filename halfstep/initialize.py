"""`halfstep.initialize`, which starts training: it checks arguments, chooses the plan and opens a guarded session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from halfstep.diagnose.guardian import Guardian, OnFailure
from halfstep.edits import OpChanges, Rule, Scaling, Width
from halfstep.errors import SetupError
from halfstep.formats import Format
from halfstep.machine import read_facts
from halfstep.modes import ordinary_tensors
from halfstep.observe.overflows import watch_absorbed
from halfstep.plan.choose import choose_plan
from halfstep.plan.compatibility import as_list, first_device
from halfstep.plan.levels import customize
from halfstep.plan.plan import Master, Plan, PlanInput
from halfstep.processes.agree import agreed
from halfstep.processes.gone import telling_of_errors
from halfstep.session.decide import Stepping
from halfstep.session.open import open_session
from halfstep.session.session import Session, Sink
from halfstep.validate import short


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
    emulate: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    sinks: Sequence[Sink] = (),
    on_failure: OnFailure = "raise",
    stepping: Stepping = "session",
) -> Session:
    """Starts mixed precision training of a model: its forward runs under the plan, the session does backward and step.

    `plan` is a level ("O0" to "O3"), a Plan, or the path of a plan file. These keywords change the plan: `low` is the
    low-precision format; if neither `low` nor the plan sets it, the format that the device computes fast is taken and
    logged once. `loss_scale` ("dynamic", "none", a number or a Scaling), `norms` (the width of normalisation
    parameters) and `master` ("copy", "split" or "none") replace those of the plan; `rules` are added to its rules.
    `ops` moves ops to other lists of the op table. `input="low"` casts all floating-point inputs of the model to low;
    by default inputs keep their format and products cast their operands. Weights that no optimizer updates stay in
    fp32, so that code of yours may average into them; `frozen="low"` stores them low, without masters.

    `optimizer=None` is for inference; an empty list is for training whose optimizers `session.add_optimizers` will add,
    and weights that are frozen now stay in fp32. `emulate=True` computes products of the low format in a wider one and
    rounds them exactly. By default, this is done on a CPU whose native products in the format are less than twice as
    fast. Each sink in `sinks` is called with each StepRecord; a `Recorder`, such as a RunLog, also gets all other
    records.

    If steps keep being skipped for a reason that no lower loss scale cures, `step` raises a NumericsError that says
    what broke; with `on_failure="warn"` this is only logged, once. With `stepping="optimizer"` your loop keeps its own
    `optimizer.step()`: each backward pass leaves unscaled fp32 gradients in `p.grad`, which can be read and clipped as
    usual, and the optimizer's `step` is skipped if a gradient is not finite.

    If the model is still in a session, that session is closed first, with a warning. Trainable parameters in bf16 or
    fp16, such as those of a model from a hub, become fp32 weights at O1, get fp32 masters at O2, and train without fp32
    values at O3; a warning says what was done. For a sharded model, every process must make this call.

    `process_group` are the processes that step together though they hold different models, such as the stages of a
    pipeline: they agree on each skip, the loss scale and the gradient norm. Stages of torch.distributed.pipelining,
    replicas and shards are found without it.

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
        return session


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
