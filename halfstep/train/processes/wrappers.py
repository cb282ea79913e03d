"""DistributedDataParallel wrappers and stages of pipelines around a session's models, and what is refused of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import SessionError, SetupError
from halfstep.train.processes.shards import group_is_open

T = TypeVar("T")
ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Within the context, sessions that this process opens by itself, for a forecast, tell other processes nothing."""
    token = ALONE.set(True)
    try:
        yield
    finally:
        ALONE.reset(token)


def wrappers_of(roots: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Returns the DistributedDataParallel wrappers of these models' parameters, found through the garbage collector."""
    if not group_is_open():
        return []
    own = {id(p) for root in roots for p in root.parameters()}
    return [each for each in _living(DistributedDataParallel) if any(id(p) in own for p in each.parameters())]


def stage_groups_of(roots: Sequence[nn.Module]) -> list[dist.ProcessGroup]:
    """Returns the groups of the pipelines (`torch.distributed.pipelining`) that the models are stages of."""
    if "torch.distributed.pipelining" not in sys.modules:
        return []
    from torch.distributed.pipelining import PipelineStage

    own = {id(p) for root in roots for p in root.parameters()}
    kind: Any = PipelineStage.__base__  # also of stages that `build_stage` made
    stages = (each for each in _living(kind) if any(id(p) in own for p in each.submod.parameters()))
    return [group for each in stages if (group := each.group or dist.group.WORLD) is not None]


def _living(kind: type[T]) -> list[T]:
    objects = gc.get_objects()  # a million, so without a line of Python for each
    kinds = {each for each in set(map(type, objects)) if kind in each.__mro__}
    return list(compress(objects, map(kinds.__contains__, map(type, objects)))) if kinds else []


def living_wrappers_of(roots: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Returns the DDP wrappers of the models that are still in use, the same in all processes."""
    # Garbage is collected first: otherwise some processes would find a wrapper that others have already freed.
    if not wrappers_of(roots):
        return []
    gc.collect()  # only then, since it takes half a second
    return wrappers_of(roots)


def refuse_wrapped(roots: Sequence[nn.Module], when: str) -> None:
    """Refuses models that are already wrapped in DistributedDataParallel; `when` says when that would go wrong."""
    if living_wrappers_of(roots):
        raise SetupError(
            "the model has been wrapped in DistributedDataParallel, which would silently stop reducing gradients when "
            f"{when}; delete all references to earlier wrappers, call halfstep.initialize first, then wrap the model: "
            "`wrapped = DistributedDataParallel(model)`"
        )


def retire(wrapper: weakref.ref[DistributedDataParallel], low: Sequence[nn.Parameter]) -> None:
    """Makes a DistributedDataParallel wrapper refuse to train once one of its `low` parameters has another dtype."""
    own = wrapper()
    if own is not None and low:
        own.register_forward_pre_hook(_Retired(low))


class _Retired:
    """A hook with which a DDP wrapper, but no copy of it, refuses to train parameters whose dtype has changed."""

    def __init__(self, made_for: Sequence[nn.Parameter]) -> None:
        self._made_for = [(weakref.ref(p), p.dtype) for p in made_for]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if any((p := ref()) is not None and p.dtype is not dtype for ref, dtype in self._made_for):
            raise SessionError(
                "the session of this model is closed and its weights are fp32 again, but DistributedDataParallel was "
                "made for low weights and would no longer reduce their gradients; wrap the model again "
                "(wrapped = DistributedDataParallel(model))"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Retired, ([],)
