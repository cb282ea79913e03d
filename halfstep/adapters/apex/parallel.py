"""`apex.parallel`: Reducer, torch's SyncBatchNorm, and torch's DistributedDataParallel with apex's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import SyncBatchNorm

from halfstep.errors import SetupError

__all__ = [
    "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group",
    "flat_dist_call",
]  # fmt: skip


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments: averages gradients over all processes.

    `message_size`, in elements, sets the size of torch's buckets. `delay_allreduce`, which apex required for models
    with unused parameters, becomes `find_unused_parameters`. `retain_allreduce_buffers`, `allreduce_trigger_params`,
    `num_allreduce_streams`, `allreduce_communicators`, `gradient_predivide_factor`, `gradient_average_split_factor` and
    `prof`, which in apex affect only speed and rounding, have no effect.

    Raises:
        ValueError: `shared_param` is set, which apex no longer takes either.
        SetupError: `gradient_average` is False or `allreduce_always_fp32` is True, which torch does not support, or
            `message_size` is not a positive number.
    """

    def __init__(  # noqa: PLR0913  # apex's
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                f"DistributedDataParallel got shared_param={shared_param!r}, which apex no longer takes; pass "
                "delay_allreduce=True for models with shared or unused parameters"
            )
        for wrong, why in (
            (
                not gradient_average,
                "DistributedDataParallel got gradient_average=False, but torch always averages over the processes; "
                "leave it out, and multiply the loss by torch.distributed.get_world_size() to get the sum",
            ),
            (
                allreduce_always_fp32,
                "DistributedDataParallel got allreduce_always_fp32=True, but torch reduces gradients in the dtype of "
                "their weights; leave it out, and use opt_level O1, where weights and gradients are fp32",
            ),
            (
                isinstance(message_size, bool) or not isinstance(message_size, int | float) or not message_size > 0,
                f"message_size is {message_size!r}; pass the number of elements in a bucket, above 0",
            ),
        ):
            if wrong:
                raise SetupError(why)
        super().__init__(
            module,
            bucket_cap_mb=max(1, round(message_size * 4 / 2**20)),  # bytes of fp32, in which apex counted its messages
            find_unused_parameters=delay_allreduce,
        )

    def disable_allreduce(self) -> None:
        """Makes backward passes accumulate local gradients, without all-reduce, until `enable_allreduce`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Makes backward passes average gradients over the processes again."""
        self.require_backward_grad_sync = True


class Reducer:
    """Averages gradients over all processes when a training loop calls `reduce()`.

    `module_or_grads_list` is a module or a list of gradients. If it is a module, the constructor broadcasts the
    parameters of the module from process 0, and `reduce()` averages their gradients.
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        self._reduced = module_or_grads_list
        if isinstance(module_or_grads_list, nn.Module):
            flat_dist_call([p.data for p in module_or_grads_list.parameters()], dist.broadcast, (0,))
        elif not isinstance(module_or_grads_list, list | tuple):
            raise TypeError(f"Reducer got {type(module_or_grads_list).__name__}; pass a module or a list of gradients")

    def reduce(self) -> None:
        """Averages the gradients in place; every process must call it, with gradients of the same parameters."""
        reduced = self._reduced
        if isinstance(reduced, nn.Module):
            reduced = [p.grad for p in reduced.parameters() if p.grad is not None]
        flat_dist_call(reduced, dist.all_reduce)


@torch.no_grad()
def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Joins tensors into one per dtype, applies `call`, such as `dist.all_reduce`, and copies the results back.

    `call` gets a joined tensor, then `extra_args`. After `dist.all_reduce` the sums are divided by the world size.
    """
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        alike = [t for t in tensors if t.dtype is dtype]
        joined = torch.cat([t.reshape(-1) for t in alike])
        call(joined, *(extra_args or ()))
        if call is dist.all_reduce:
            joined.div_(dist.get_world_size())
        for t, part in zip(alike, torch.split(joined, [t.numel() for t in alike]), strict=True):
            t.copy_(part.view(t.shape))


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Returns `module` with each batch norm replaced by torch's SyncBatchNorm; `channel_last` has no effect."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-any-return,no-untyped-call]


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Splits the processes into groups of consecutive ranks, 0 into one; returns the group of this process.

    Raises ValueError if `group_size` does not divide the number of processes.
    """
    return dist.new_subgroups(group_size)[0] if group_size else None  # type: ignore[no-untyped-call]
