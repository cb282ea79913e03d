"""The reference update: plain tensor operations in a fixed order, each rounded once, that run on every device.

Faster implementations are tested against this one. The order of operations is part of the contract: a compiled loop can
give the same bits if it does the same operations and fuses no multiplication with an addition (`-ffp-contract=off`).
Coefficients are computed in double and rounded once to the dtype of the update. Square roots are taken in double,
because torch's fp32 square root on a CPU is off by one unit in the last place for some values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.batch import Batch, Options

Number = float | Tensor

# An optimizer's update: yields, parameter by parameter, the new weight and the new states, in the order of
# `Options.states`. It gets full weights and full, unscaled gradients (layout `full`), and changes none of them.
Law = Callable[[Batch, Any], Iterator[Sequence[Tensor]]]


def update(law: Law, batch: Batch, options: Options, found: Tensor) -> None:
    """Updates full weights and states in place by `law`, the optimizer's rule; changes nothing if `found` is true."""
    # `torch.where` chooses the old or the new values, because multiplying an update by zero would keep its NaNs.
    held = zip(batch.weights, *batch.states.values(), strict=True)
    for old, new in zip(held, law(batch, options), strict=True):
        for tensor, value in zip(old, new, strict=True):
            torch.where(found, tensor, value, out=tensor)


def decayed(batch: Batch, options: Options) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yields each weight, its gradient and its states, after weight decay."""
    # If `maximize` is true, the gradient is negated first, so that an update always descends.
    decay, kept = options.weight_decay, None
    if decay and options.decoupled:
        kept = rounded(1 - precise(options.lr, batch) * decay, batch)
    for w, grad, *states in zip(batch.weights, batch.grads, *batch.states.values(), strict=True):
        g = -grad if options.maximize else grad
        if kept is not None:
            yield w * kept, g, states
        else:
            yield w, g + w * decay if decay else g, states


def precise(value: Number, batch: Batch) -> Number:
    """Moves a tensor to the batch's device, in the dtype that `widest` returns; returns a Python number as it is."""
    return value.to(batch.device, widest(batch.device)) if isinstance(value, Tensor) else value


def rounded(value: Number, batch: Batch) -> Number:
    """Moves a tensor to the batch's device and rounds it to the update's dtype; returns a Python number as it is."""
    return value.to(batch.device, batch.dtype) if isinstance(value, Tensor) else value


def bias_corrections(
    batch: Batch, beta1: float, beta2: float, *, corrected: bool, lr: Number | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns two lists with the divisors of Adam's bias correction: 1 - beta1^t and sqrt(1 - beta2^t) per parameter.

    `t` is the step count of the parameter. A running mean is divided by the first, and the square root of a running
    mean of squares by the second, since these means begin at zero. With `lr`, the first list has lr / (1 - beta1^t)
    instead. If `corrected` is false, both powers are replaced by 0. The elements are 0-dim tensors in the dtype of the
    update.
    """
    steps = torch.stack(batch.steps).to(batch.device, widest(batch.device))
    if not corrected:
        steps = torch.full_like(steps, torch.inf)  # what they come to
    means, roots = 1 - beta1**steps, (1 - beta2**steps).sqrt()
    firsts = means if lr is None else lr / means
    return list(firsts.to(batch.dtype).unbind()), list(roots.to(batch.dtype).unbind())


def root(t: Tensor) -> Tensor:
    """Returns the square root of each element, correctly rounded to the dtype of `t`."""
    return t.to(widest(t.device)).sqrt().to(t.dtype)


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest float dtype that the device supports; coefficients are computed in it."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
