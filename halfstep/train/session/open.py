"""Opens a session: widens weights that were loaded low, decides, closes an earlier session, and says what it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import SetupError
from halfstep.machine import DeviceFacts, units
from halfstep.modes import ordinary_tensors
from halfstep.plan.compatibility import loaded_low
from halfstep.plan.matching import unwrap
from halfstep.plan.plan import Plan
from halfstep.records import amount
from halfstep.torch_internals import parameters_of
from halfstep.train.cast.modules import all_owners, cast_buffers, owners
from halfstep.train.optim.masters import give_dtype
from halfstep.train.optim.state import widen_states
from halfstep.train.processes.collectives import telling_of_errors
from halfstep.train.processes.shards import reshard
from halfstep.train.processes.wrappers import refuse_wrapped
from halfstep.train.session.decide import (
    Stepping,
    decide,
    say_how_products_run,
    say_what_stays_full,
    say_what_steps_itself,
)
from halfstep.train.session.session import Session, Sink
from halfstep.validate import named

_LOG = logging.getLogger("halfstep")


def open_session(  # noqa: PLR0913  # what `initialize` was given
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    facts: DeviceFacts,
    notice: str | None = None,
    emulate: bool | None = None,
    stepping: Stepping = "session",
    training: bool = True,
    group: dist.ProcessGroup | None = None,
    sinks: Sequence[Sink] = (),
) -> Session:
    """Opens a session on a plan that has been chosen; `notice` says how. After any error nothing has changed."""
    with ordinary_tensors(), ExitStack() as stack:
        with telling_of_errors(models):
            inside = owners(module for model in models for module in unwrap(model).modules())
            earlier = [owner for owner in inside if isinstance(owner, Session)]
            made_low = [p for session in earlier for p in session.low_parameters()]
            others = [each for each in all_owners() if isinstance(each, Session) and each not in earlier]
            _refuse_shared(models, others, lambda other: other.low_parameters())
            stack.enter_context(_widened(models, plan, made_low, optimizers))
            decision = decide(
                models,
                optimizers,
                plan,
                emulate=emulate,
                stepping=stepping,
                facts=facts,
                made_low=made_low,
                training=training,
                group=group,
            )
            to_be_low = {id(p) for p in decision.stored_low()}
            _refuse_shared(models, others, lambda other: (p for p in other.parameters() if id(p) in to_be_low))
        for session in earlier:
            _LOG.warning(
                "the model was still in a session (%s), which is closed now; the weights keep what they have learned",
                session.plan.name,
            )
            session.close()
        if notice:
            logging.getLogger("halfstep.device").log(
                logging.INFO if units(plan.low, facts) else logging.WARNING, notice
            )
        say_how_products_run(decision, told=notice is not None)
        say_what_steps_itself(decision, optimizers)
        say_what_stays_full(decision)
        del others  # which may be freed, if all places for op tables are taken
        return Session(decision, sinks=sinks)


@contextmanager
def _widened(
    models: Sequence[nn.Module], plan: Plan, made_low: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Converts trainable parameters that were loaded low to fp32; an error inside the context undoes this."""
    # Also converts the state that `optimizers` have for them, and the buffers of their modules, since a low format
    # rounds away most changes of running statistics. `made_low`, which are low because of a session, are left alone.
    reshard(models)  # else the low weights that FSDP2 gathered for an evaluation would be taken for the model's
    loaded = {id(p): p for p in loaded_low(models, plan, made_low)}
    roots = [unwrap(model) for model in models]
    if loaded:
        refuse_wrapped(roots, "its trainable weights in low precision become fp32")
    put_back: list[Callable[[], None]] = [partial(give_dtype, p, p.dtype) for p in loaded.values()]
    message = _what_became(list(loaded.values()), plan)
    if not optimizers:
        message += "; for inference only, call model.requires_grad_(False) first, which keeps them as they are"
    try:
        for module in {id(module): module for root in roots for module in root.modules()}.values():
            own = [p for p in parameters_of(module).values() if p is not None and id(p) in loaded]
            for parameter in own:
                give_dtype(parameter, torch.float32)
            if own:
                put_back.append(cast_buffers(module, torch.float32))
        put_back += [widen_states(optimizer, loaded.values()) for optimizer in optimizers]
        yield
        if loaded:
            _LOG.warning(message)
    except BaseException:
        for undo in put_back:
            undo()
        raise


def _what_became(loaded: Sequence[nn.Parameter], plan: Plan) -> str:
    formats = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in loaded}))
    if plan.master != "none":
        what = "each now has an fp32 master, which starts from the loaded value and is what is trained"
    elif plan.param == "low":
        what = f"{plan.name} trains them without fp32 masters, which loses small updates; O2 keeps masters"
    else:
        more = amount(sum(p.numel() * (4 - p.itemsize) for p in loaded))
        what = f"they are fp32 now, which takes {more} more (O2 stores them low, with an fp32 master for each)"
    return (
        f"{len(loaded)} trainable parameters were loaded in {formats}: {what}. state_dict() is fp32; to get the "
        "original format back, call model.to(...) after session.close()"
    )


def _refuse_shared(
    models: Sequence[nn.Module], others: Iterable[Session], stored: Callable[[Session], Iterable[nn.Parameter]]
) -> None:
    """Refuses parameters of the models that are among those that `stored` returns for another open session."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    for other in others:
        shared = [names[id(p)] for p in stored(other) if id(p) in names]
        if shared:
            raise SetupError(
                f"{named(shared)} would be in two open sessions, of which one stores them in low precision: the other "
                "would read and save rounded values. Pass all models that share parameters to one call of "
                "halfstep.initialize, or close the first session before"
            )
