"""Whether a tensor is a shard or another wrapper, and which modules shard their weights: what every room may ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
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


def tied(
    model: nn.Module, policy: Callable[[], Callable[[nn.Module], bool] | None]
) -> Iterator[tuple[list[str], bool]]:
    """Yields the names of each parameter of several modules that is no shard yet, and if FSDP2 would part it.

    It would if these modules are in several of those that the `policy` shards alone.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for p, own in names.items():
        if not is_sharded(p) and len({modules[name.rpartition(".")[0]] for name in own}) > 1:
            alone = policy() or (lambda module: False)
            groups = [name for name, module in modules.items() if name and alone(module)]
            around = {max((g for g in groups if name.startswith(f"{g}.")), key=len, default="") for name in own}
            yield own, len({modules[each] for each in around}) > 1
