"""The reference update: plain tensor operations in a fixed order, each rounded once, that run on every device.

Faster implementations are tested against this one. The order of operations is part of the contract, so that a loop
without contraction (`-ffp-contract=off`) can give the same bits: coefficients are computed in double and rounded once
to the dtype of the update, and square roots are taken in double, as torch's own fp32 root on a CPU is one place off for
some values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.batch import Adam, Batch, Options, Sgd

Number = float | Tensor


def update(batch: Batch, options: Options, found: Tensor) -> None:
    """Updates full weights and states in place from full, unscaled gradients; where `found` is true nothing changes.

    `batch` has layout `full`. New values are chosen with `where`, never multiplied by a zero, which would keep a NaN.
    """
    if isinstance(options, Adam):
        _adam(batch, options, found)
    else:
        _sgd(batch, options, found)


def _adam(batch: Batch, options: Adam, found: Tensor) -> None:
    sizes, roots = _corrections(batch, options)
    peaks = batch.states["max_exp_avg_sq"] if options.amsgrad else batch.states["exp_avg_sq"]
    decay = _rounded(1 - _double(options.lr, batch) * options.weight_decay, batch) if options.weight_decay else 1.0
    rows = zip(
        batch.weights,
        batch.grads,
        batch.states["exp_avg"],
        batch.states["exp_avg_sq"],
        peaks,
        sizes,
        roots,
        strict=True,
    )
    for weight, grad, mean, square, peak, size, root in rows:
        g = -grad if options.maximize else grad
        w = weight
        if options.weight_decay and options.decoupled:
            w = w * decay
        elif options.weight_decay:
            g = g + w * options.weight_decay
        m = mean * options.beta1 + g * (1 - options.beta1)
        v = square * options.beta2 + (g * g) * (1 - options.beta2)
        highest = torch.maximum(peak, v) if options.amsgrad else v
        w = w - (m / (_sqrt(highest) / root + options.eps)) * size
        _set(weight, w, found)
        _set(mean, m, found)
        _set(square, v, found)
        if options.amsgrad:
            _set(peak, highest, found)


def _sgd(batch: Batch, options: Sgd, found: Tensor) -> None:
    lr = _rounded(options.lr, batch)
    for i, (weight, grad) in enumerate(zip(batch.weights, batch.grads, strict=True)):
        g = -grad if options.maximize else grad
        if options.weight_decay:
            g = g + weight * options.weight_decay
        if options.momentum:
            momentum = batch.states["momentum_buffer"][i]
            buffer = momentum * options.momentum + g * (1 - options.dampening)
            buffer = torch.where(batch.fresh[i] == 1, g, buffer)
            g = g + buffer * options.momentum if options.nesterov else buffer
            _set(momentum, buffer, found)
        _set(weight, weight - g * lr, found)


def _corrections(batch: Batch, options: Adam) -> tuple[list[Tensor], list[Tensor]]:
    """Returns lr / (1 - beta1^t) and sqrt(1 - beta2^t) for each step count, as 0-dim tensors of the update's dtype."""
    steps = torch.stack(batch.steps).to(_precise(batch.device))
    sizes = _double(options.lr, batch) / (1 - options.beta1**steps)
    roots = (1 - options.beta2**steps).sqrt()
    return list(sizes.to(batch.dtype).unbind()), list(roots.to(batch.dtype).unbind())


def _double(value: Number, batch: Batch) -> Number:
    return value.to(batch.device, _precise(batch.device)) if isinstance(value, Tensor) else value


def _rounded(value: Number, batch: Batch) -> Number:
    return value.to(batch.device, batch.dtype) if isinstance(value, Tensor) else value


def _sqrt(t: Tensor) -> Tensor:
    return t.to(_precise(t.device)).sqrt().to(t.dtype)


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _set(old: Tensor, new: Tensor, found: Tensor) -> None:
    torch.where(found, old, new, out=old)
