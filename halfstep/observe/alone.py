"""Running a model that is replicated over processes in this one alone: nothing is sent, and nothing waited for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import scatter_kwargs


@contextmanager
def alone(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Takes DistributedDataParallel out of the way of models, whenever they were wrapped in it.

    Calls of a wrapper go to its module, so that no buffer is sent, and its hooks on gradients wait for none. A replay
    that took part in a reduction would be paired with the next step of the other processes.
    """
    with ExitStack() as stack:
        for wrapper in wrappers_of(roots):
            stack.callback(_pass_through(wrapper))
        yield


def group_is_open() -> bool:
    """Tells whether this process is one of a group that trains together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def wrappers_of(roots: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Returns who reduces gradients of the models' parameters; nobody but the garbage collector knows them all."""
    if not group_is_open():
        return []
    own = {id(p) for root in roots for p in root.parameters()}
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in wrappers if any(id(p) in own for p in each.parameters())]


def _pass_through(wrapper: DistributedDataParallel) -> Callable[[], None]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if wrapper.device_ids:
            given, named = scatter_kwargs(args, kwargs, wrapper.device_ids)
            args, kwargs = given[0], named[0]
        return wrapper.module(*args, **kwargs)

    wrapper.__dict__["forward"] = forward

    def undo() -> None:
        wrapper.__dict__.pop("forward", None)

    return undo
