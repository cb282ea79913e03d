"""Diagnoses sharded models as whole ones: one process gathers a copy, examines it, and tells all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import SessionError, SetupError
from halfstep.machine import free_bytes
from halfstep.plan.plan import Plan
from halfstep.sharded import fsdp_modules
from halfstep.train.processes.collectives import full_state, run_on_rank
from halfstep.train.processes.shards import group_of, reshard, sharded_parameters
from halfstep.train.session.session import Session
from halfstep.validate import with_near_misses

T = TypeVar("T")
PER_ELEMENT = 16  # bytes: fp32 weights and gradients of the copy, and of the copy of it on which cures are tried


@with_near_misses
def on_gathered_copy(session: Session, build: Callable[[], Any], ask: Callable[..., T], *, rank: int = 0) -> T:
    """Returns the result of `ask` on an unsharded copy of a sharded model, on all processes; all must call this.

    The process `rank` calls `build()`, which must return the model as it is before sharding (a list if the session has
    several models). That process loads the current weights and buffers into the model, opens a session `whole` on it
    with the same plan, and calls `ask(whole, model)`:

        verdict = halfstep.on_gathered_copy(
            session, GPT, lambda whole, model: halfstep.blame(whole, lambda: loss_fn(model(inputs), targets))
        )

    `halfstep.check` and `halfstep.inspect` work the same way. Pass as `rank` the process whose `inputs` to use;
    `session.status().spoiled_by` tells which processes had a loss that was not finite. The session `whole` reports the
    last step of `session`. Weights are rounded to the low format, as FSDP2 gathers them. The sharded model and its
    training do not change.

    Raises:
        SessionError: the session is closed, or another process has raised an error, which the message names.
        SetupError: the model is not sharded, does not fit into the memory of that process, or differs from the model
            that `build` returns.
    """
    if not isinstance(session, Session) or session.closed:
        what = "a closed session" if isinstance(session, Session) else type(session).__name__
        raise SessionError(f"on_gathered_copy() takes an open session, not {what}; call it after halfstep.initialize")
    roots = session.runtime.roots
    reshard(roots)  # after an evaluation they hold whole weights
    parameters = sharded_parameters(roots)
    if not parameters:
        raise SetupError("the model is not sharded: use the session itself, as in halfstep.blame(session, closure)")
    group = group_of(parameters)
    if rank not in dist.get_process_group_ranks(group):
        ranks = dist.get_process_group_ranks(group)
        raise SetupError(f"rank is {rank}; the model is sharded over the processes {ranks}: pass one of these")
    built: list[nn.Module] = []
    run_on_rank(lambda: built.extend(_built(build, roots, session.runtime.device)), rank, group)
    states = [full_state(root, rank) for root in roots]

    def look() -> T:
        for model, root, state in zip(built, roots, states, strict=True):
            _fill(model, root, state, session.plan)
        with session.trial(session.plan, built) as whole:
            return ask(whole, *built)

    return run_on_rank(look, rank, group)


def _built(build: Callable[[], Any], roots: Sequence[nn.Module], device: torch.device) -> list[nn.Module]:
    """Calls `build` for unsharded copies of the models `roots`, and returns the copies on the device."""
    needed = PER_ELEMENT * sum(p.numel() for root in roots for p in root.parameters())
    free = free_bytes(device)
    if free is not None and needed > free:
        raise SetupError(
            f"an unsharded copy of the model needs {needed / 2**30:.3g} GiB for its weights and gradients, plus what a "
            f"forward keeps; {device} has {free / 2**30:.3g} GiB free: use a process with more memory and a "
            "checkpoint (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))"
        )
    found = build()
    models = list(found) if isinstance(found, (list, tuple)) else [found]
    for model in models:
        if not isinstance(model, nn.Module) or sharded_parameters([model]):
            what = "a sharded model" if isinstance(model, nn.Module) else type(model).__name__
            raise SetupError(f"build() returned {what}; it must return the model as it is before fully_shard")
    if len(models) != len(roots):
        raise SetupError(f"build() returned {len(models)} models, and the session has {len(roots)}: return as many")
    return [model.to(device) for model in models]


@torch.no_grad()
def _fill(model: nn.Module, root: nn.Module, state: dict[str, Tensor], plan: Plan) -> None:
    """Copies the state of a sharded model into `model`, with weights rounded as the sharded model rounds them."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SetupError(f"build() returned another model than the one that is sharded: {error}") from error
    own = dict(root.named_parameters())
    low = plan.low.dtype if plan.ops != "none" and fsdp_modules([root]) else torch.float32
    for name, p in model.named_parameters():
        p.requires_grad_(own[name].requires_grad)
        if p.dtype is torch.float32:
            p.copy_(p.to(low))
    for copied, module in zip(model.modules(), root.modules(), strict=True):
        copied.training = module.training
