"""Opens a session: decides on everything, closes the models' earlier session, and says what a user should know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from halfstep.cast.owners import all_owners, owners
from halfstep.errors import SetupError
from halfstep.machine import DeviceFacts
from halfstep.modes import ordinary_tensors
from halfstep.plan.compatibility import named, unwrap
from halfstep.plan.plan import Plan
from halfstep.processes.collectives import telling_of_errors
from halfstep.session.decide import (
    Stepping,
    decide,
    say_how_products_run,
    say_what_stays_full,
    say_what_steps_itself,
)
from halfstep.session.loaded import widened
from halfstep.session.session import Session, Sink

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
            stack.enter_context(widened(models, plan, made_low, optimizers))
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
        _close(earlier)
        if notice:
            _LOG.warning(notice)
        say_how_products_run(decision, told=notice is not None)
        say_what_steps_itself(decision, optimizers)
        say_what_stays_full(decision)
        return Session(decision, sinks=sinks)


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


def _close(earlier: Iterable[Session]) -> None:
    for session in earlier:
        _LOG.warning(
            "the model was still in a session (%s), which is closed now; the weights keep what they have learned",
            session.plan.name,
        )
        session.close()
