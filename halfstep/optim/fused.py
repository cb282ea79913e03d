"""torch's own fused kernels as an implementation of the update: one pass over all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import Batch, Options, is_dense

# torch's kernel of an optimizer: updates a batch of layout `full` in place, with the learning rate as torch takes it,
# and nothing where the flag (0-dim fp32) is 1.
Kernel = Callable[[Batch, Any, Any, Tensor], None]

_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float64)


def fits(batch: Batch, options: Options) -> bool:
    """Returns whether torch's fused kernels take the batch: they walk over raw memory, so weights must be dense."""
    if batch.device.type not in _DEVICES or batch.dtype not in _DTYPES:
        return False
    return batch.layout != "full" or all(is_dense(weight) for weight in batch.weights)


def update(kernel: Kernel, batch: Batch, options: Options, found: Tensor) -> None:
    """Updates full weights and states in place from full, unscaled gradients; changes nothing if `found` is true."""
    lr = options.lr
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(batch.device, non_blocking=True)
    kernel(batch, options, lr, found.to(torch.float32))
