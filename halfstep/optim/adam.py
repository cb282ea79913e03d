"""The update rule of `torch.optim.Adam` and `torch.optim.AdamW`, as halfstep computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import Batch, Options
from halfstep.optim.eager import bias_corrections, decayed, precise, root
from halfstep.optim.fused import Kernel
from halfstep.torch_internals import fused_adam_, fused_adamw_


@dataclass(frozen=True)
class AdamOptions(Options):
    """The options of a param group of `torch.optim.Adam`, or of `AdamW` if the inherited `decoupled` is true.

    `corrected` says whether the running means are corrected for their bias.
    """

    beta1: float
    beta2: float
    eps: float
    amsgrad: bool
    corrected: bool = True  # for the bias of moments that begin at zero

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the running means of gradient and squared gradient; with amsgrad, also of the maximum."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The betas and eps, in the order in which the kernels take them (kernels/optimizers.h)."""
        return self.beta1, self.beta2, self.eps


def options(group: Mapping[str, Any]) -> AdamOptions:
    """Returns the options of a param group."""
    return AdamOptions(
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
        decoupled=group["decoupled_weight_decay"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        corrected=group.get("bias_correction", True),
    )


def eager(batch: Batch, options: AdamOptions) -> Iterator[list[Tensor]]:
    """Yields the new weight and states of each parameter."""
    # Adam follows Kingma & Ba 2015, algorithm 1; amsgrad follows Reddi et al. 2018; decoupled weight decay follows
    # Loshchilov & Hutter 2019.
    lr = precise(options.lr, batch)
    sizes, roots = bias_corrections(batch, options.beta1, options.beta2, corrected=options.corrected, lr=lr)
    for (w, g, states), size, correction in zip(decayed(batch, options), sizes, roots, strict=True):
        mean, square, *peaks = states
        m = mean * options.beta1 + g * (1 - options.beta1)
        v = square * options.beta2 + (g * (1 - options.beta2)) * g  # in torch's order: g * g may overflow
        highest = [torch.maximum(peak, v) for peak in peaks]
        (divisor,) = highest or [v]
        yield [w - (m / (root(divisor) / correction + options.eps)) * size, m, v, *highest]


def fused(options: AdamOptions) -> Kernel | None:
    """Returns torch's fused kernel, or None if bias correction is off, since the kernel always applies it."""
    return _fused if options.corrected else None


def _fused(batch: Batch, options: AdamOptions, lr: Any, flag: Tensor) -> None:
    kernel = fused_adamw_ if options.decoupled else fused_adam_
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
