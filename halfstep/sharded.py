"""Whether a tensor is a shard or another wrapper, and which modules shard their weights: what every room may ask."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from halfstep.torch_internals import NO_TORCH_DISPATCH

if TYPE_CHECKING:  # these modules take a second to import
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_wrapped(t: Tensor) -> bool:
    """Returns whether `t` is a wrapper, such as a DTensor: its class handles operations, its own storage is empty."""
    return type(t).__torch_dispatch__ is not NO_TORCH_DISPATCH


def is_sharded(t: Any) -> TypeGuard[DTensor]:
    """Tells whether a tensor is a DTensor (placed on a mesh of processes), even if each process has all of it."""
    if not isinstance(t, Tensor) or not is_wrapped(t):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def fsdp_modules(roots: Iterable[nn.Module]) -> list[FSDPModule]:
    """Returns the modules that `fully_shard` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    found = {id(module): module for root in roots for module in root.modules() if isinstance(module, FSDPModule)}
    return list(found.values())
