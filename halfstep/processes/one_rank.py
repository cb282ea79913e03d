"""Work that one process of a group does for all: it gathers whole tensors, runs a function, and sends the result."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import SessionError
from halfstep.sharded import is_sharded

T = TypeVar("T")


def full_state(root: nn.Module, rank: int) -> dict[str, Tensor]:
    """Returns the state dict of a model with whole tensors in process `rank`, and an empty dict in the others."""
    found = {}
    for name, value in root.state_dict().items():
        whole = value.full_tensor() if is_sharded(value) else value
        if dist.get_rank() == rank:
            found[name] = whole
    return found


def run_on_rank(run: Callable[[], T], rank: int, group: dist.ProcessGroup) -> T:
    """Calls `run` in process `rank` and returns its result in all processes of a group; a collective call."""
    failed: Exception | None = None
    sent: list[Any] = [None, None]
    if dist.get_rank() == rank:
        try:
            result = run()
            sent = [pickle.dumps(result), None]
        except Exception as error:  # whatever it is, the others are waiting
            failed, sent = error, [None, f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(sent, src=rank, group=group)
    if failed is not None:
        raise failed
    if sent[1] is not None:
        raise SessionError(f"process {rank} has raised {sent[1]}")
    answer: T = result if dist.get_rank() == rank else pickle.loads(sent[0])
    return answer
