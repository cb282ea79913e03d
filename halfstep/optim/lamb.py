"""LAMB, one of halfstep's own optimizers: Adam's direction, with a length proportional to the norm of each weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.batch import Batch, Options
from halfstep.optim.eager import Number, bias_corrections, decayed, precise, root, widest
from halfstep.optim.own_step import check_arguments, own_step


class Lamb(Optimizer):
    """LAMB, "Large Batch Optimization for Deep Learning" (You et al. 2020), algorithm 2; works without a session too.

    Adam's update `u` of each weight `w`, with `weight_decay * w` added, is scaled to the length `lr * norm(w)`: the
    weight becomes `w - lr * norm(w) / norm(u) * u`. Both norms are over the whole tensor; if one is 0, their ratio
    counts as 1.

    Args:
        params: parameters, named parameters, or param groups.
        lr: the learning rate, a number or a tensor with one element.
        betas: coefficients of the running means of the gradient and of its square; both in [0, 1).
        eps: added to the square root of the mean square.
        weight_decay: this times the weight is added to the update.
        bias_correction: whether to correct the bias of the running means, which begin at zero.
        grad_averaging: whether a step adds (1 - beta1) times the gradient to its running mean; if False, the gradient.
        max_grad_norm: the norm to which all gradients together are clipped; None for no clipping.
        decoupled_weight_decay: if False, `weight_decay` times the weight is added to the gradient instead.
        always_adapt: if False, updates without weight decay keep Adam's length, as is usual for biases and
            normalisation parameters.

    Raises:
        ValueError: a number is out of its range.
        TypeError: `params` is a model.
    """

    def __init__(  # noqa: PLR0913  # the numbers of its law
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        decoupled_weight_decay: bool = True,
        always_adapt: bool = False,
    ) -> None:
        check_arguments("Lamb", params, betas, {"learning rate": lr, "eps": eps, "weight decay": weight_decay})
        if max_grad_norm is not None and not (isinstance(max_grad_norm, Real) and max_grad_norm > 0):
            raise ValueError(
                f"Lamb's max_grad_norm must be a number above 0, or None for no clipping, not {max_grad_norm!r}"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "decoupled_weight_decay": decoupled_weight_decay,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure` if passed, updates the parameters that have a gradient, and returns the closure's result.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return own_step(self, options, eager, closure, counts=True)


@dataclass(frozen=True)
class LambOptions(Options):
    """The options of `Lamb`."""

    beta1: float
    beta2: float
    eps: float
    corrected: bool
    averaging: bool
    clip_to: float | None
    adapts: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the running means of the gradient and of its square."""
        return "exp_avg", "exp_avg_sq"

    @property
    def numbers(self) -> tuple[float, ...]:
        """The betas and eps."""
        return self.beta1, self.beta2, self.eps

    @property
    def max_norm(self) -> float | None:
        """The norm to which all gradients together are clipped; None for no clipping."""
        return self.clip_to


def options(group: Mapping[str, Any]) -> LambOptions:
    """Returns the options of a param group."""
    return LambOptions(
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        maximize=False,
        decoupled=group["decoupled_weight_decay"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        corrected=group["bias_correction"],
        averaging=group["grad_averaging"],
        clip_to=group["max_grad_norm"],
        adapts=bool(group["always_adapt"] or group["weight_decay"]),
    )


def eager(batch: Batch, options: LambOptions) -> Iterator[list[Tensor]]:
    """Yields the new weight and states of each parameter, by You et al. 2020, algorithm 2."""
    share = 1 - options.beta1 if options.averaging else 1.0
    means, roots = bias_corrections(batch, options.beta1, options.beta2, corrected=options.corrected)
    lr, decay = precise(options.lr, batch), options.weight_decay if options.decoupled else 0.0
    into_gradient = replace(options, weight_decay=0.0) if options.decoupled else options
    rows = zip(decayed(batch, into_gradient), means, roots, strict=True)
    for (w, g, (mean, square)), of_mean, of_root in rows:
        m = mean * options.beta1 + g * share
        v = square * options.beta2 + (g * g) * (1 - options.beta2)
        u = (m / of_mean) / (root(v) / of_root + options.eps)
        if decay:
            u = u + w * decay
        yield [w - u * _length(w, u, lr, batch, options), m, v]


def _length(w: Tensor, u: Tensor, lr: Number, batch: Batch, options: LambOptions) -> Tensor:
    """Returns what Adam's update `u` is multiplied by: lr * norm(w) / norm(u), 0-dim and in the dtype of the update."""
    wide = widest(batch.device)
    trust = torch.ones((), dtype=wide, device=batch.device)
    if options.adapts:
        size, length = (torch.linalg.vector_norm(t, dtype=wide) for t in (w, u))
        trust = torch.where((size > 0) & (length > 0), size / length, trust)
    return (trust * lr).to(batch.dtype)
