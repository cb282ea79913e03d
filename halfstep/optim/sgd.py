"""The update rule of `torch.optim.SGD`, as halfstep computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import Batch, Options
from halfstep.optim.eager import decayed, rounded
from halfstep.optim.fused import Kernel
from halfstep.torch_internals import fused_sgd_


@dataclass(frozen=True)
class SgdOptions(Options):
    """The options of a param group of `torch.optim.SGD`, whose momentum starts as the first gradient, undampened."""

    momentum: float
    dampening: float
    nesterov: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The name of the momentum; empty if the momentum factor is 0."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def numbers(self) -> tuple[float, ...]:
        """Momentum, dampening and nesterov, in the order in which the kernels take them (kernels/optimizers.h)."""
        return self.momentum, self.dampening, self.nesterov


def options(group: Mapping[str, Any]) -> SgdOptions:
    """Returns the options of a param group."""
    return SgdOptions(
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
        decoupled=False,
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
    )


def eager(batch: Batch, options: SgdOptions) -> Iterator[list[Tensor]]:
    """Yields the new weight and momentum of each parameter, by Sutskever et al. 2013, as in torch's documentation."""
    lr = rounded(options.lr, batch)
    for i, (w, g, states) in enumerate(decayed(batch, options)):
        if not states:
            yield [w - g * lr]
            continue
        held = states[0] * options.momentum + g * (1 - options.dampening)
        held = torch.where(batch.fresh[i] == 1, g, held)
        yield [w - (g + held * options.momentum if options.nesterov else held) * lr, held]


def fused(options: SgdOptions) -> Kernel | None:
    """Returns torch's fused kernel, or None with both momentum and dampening, which the kernel would compute wrongly.

    halfstep gives the kernel a momentum of zeros to start from. With dampening, the first momentum would then be `(1 -
    dampening) * gradient`; in torch's SGD it is the gradient itself.
    """
    return None if options.momentum and options.dampening else _fused


def _fused(batch: Batch, options: SgdOptions, lr: Any, flag: Tensor) -> None:
    fused_sgd_(
        batch.weights,
        batch.grads,
        batch.states["momentum_buffer"] if options.momentum else [],
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        lr=lr,
        dampening=options.dampening,
        nesterov=options.nesterov,
        maximize=options.maximize,
        is_first_step=False,  # on a skipped first step it would keep uninitialised memory as momentum
        found_inf=flag,
    )
