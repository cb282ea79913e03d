"""torch's own fused Adam, AdamW and SGD kernels as an implementation of the update: one pass over all tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import Adam, Batch, Options, Sgd, is_dense

_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float64)


def fits(batch: Batch, options: Options) -> bool:
    """Returns whether torch's kernels compute this update.

    They walk over raw memory, so the weights must be dense; and they take the first momentum as `(1 - dampening) *
    gradient` when its buffer holds zeros, which is torch's own rule, `gradient`, without dampening only.
    """
    if batch.device.type not in _DEVICES or batch.dtype not in _DTYPES:
        return False
    if isinstance(options, Sgd) and options.momentum and options.dampening:
        return False
    return batch.layout != "full" or all(is_dense(weight) for weight in batch.weights)


def update(batch: Batch, options: Options, found: Tensor) -> None:
    """Updates full weights and states in place from full, unscaled gradients; where `found` is true nothing changes.

    The step counts come already advanced and the flag of torch's kernels for a first step is never set: on a skipped
    first step they would keep uninitialised memory as momentum.
    """
    lr = options.lr
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(batch.device, non_blocking=True)
    flag = found.to(torch.float32)
    if isinstance(options, Adam):
        _adam(batch, options, lr, flag)
    else:
        _sgd(batch, options, lr, flag)


def _adam(batch: Batch, options: Adam, lr: Any, flag: Tensor) -> None:
    kernel = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
    kernel(
        batch.weights,
        batch.grads,
        batch.states["exp_avg"],
        batch.states["exp_avg_sq"],
        batch.states["max_exp_avg_sq"] if options.amsgrad else [],
        batch.steps,
        lr=lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=options.amsgrad,
        maximize=options.maximize,
        found_inf=flag,
    )


def _sgd(batch: Batch, options: Sgd, lr: Any, flag: Tensor) -> None:
    torch._fused_sgd_(
        batch.weights,
        batch.grads,
        batch.states["momentum_buffer"] if options.momentum else [],
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        lr=lr,
        dampening=options.dampening,
        nesterov=options.nesterov,
        maximize=options.maximize,
        is_first_step=False,
        found_inf=flag,
    )
