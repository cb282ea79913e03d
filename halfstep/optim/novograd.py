"""NovoGrad, one of halfstep's own optimizers: it divides gradients by a running norm, one number per weight tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.batch import Batch, Options
from halfstep.optim.eager import bias_corrections, rounded, widest
from halfstep.optim.own_step import check_arguments, own_step


class NovoGrad(Optimizer):
    """NovoGrad, "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (Ginsburg et al. 2019), as in apex.

    Each weight tensor has one running norm of its gradients, the root of a running mean of squared norms. The update is
    the running mean of the gradients divided by the running norm, plus `weight_decay` times the weight. With
    `reg_inside_moment` the order is that in the paper: each gradient is divided by the running norm, `weight_decay`
    times the weight is added, and the running mean of these sums is the update.

    Args:
        params: parameters, named parameters, or param groups.
        lr: the learning rate, a number or a tensor with one element.
        betas: coefficients of the running means of the gradient and of its squared norm; both in [0, 1).
        eps: added to the norm.
        weight_decay: this times the weight is added to the update.
        bias_correction: whether to correct the bias of the running means as Adam does.
        grad_averaging: whether a step adds (1 - beta1) times the gradient to its running mean; if False, the gradient.
        reg_inside_moment: whether to take the running mean of gradient / norm + decay, as in the paper.
        norm_type: 2 for the L2 norm; 0 for the largest magnitude, whose running mean is taken without squares.
        init_zero: whether the running norm begins at 0; if False, it begins at the norm of the first gradient.

    Raises:
        ValueError: a number is out of its range.
        TypeError: `params` is a model.
    """

    def __init__(  # noqa: PLR0913  # the numbers of its law
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        reg_inside_moment: bool = False,
        norm_type: int = 2,
        init_zero: bool = False,
    ) -> None:
        check_arguments("NovoGrad", params, betas, {"learning rate": lr, "eps": eps, "weight decay": weight_decay})
        if norm_type not in (0, 2):
            raise ValueError(f"NovoGrad's norm_type must be 2, or 0 for the largest magnitude, not {norm_type!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "reg_inside_moment": reg_inside_moment,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure` if passed, updates the parameters that have a gradient, and returns the closure's result.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return own_step(self, options, eager, closure, counts=True)


@dataclass(frozen=True)
class NovoGradOptions(Options):
    """The options of `NovoGrad`."""

    beta1: float
    beta2: float
    eps: float
    corrected: bool
    averaging: bool
    inside: bool
    norm_type: int
    from_zero: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the running mean of the gradients and of the running norm."""
        return "exp_avg", "norm"

    @property
    def scalars(self) -> tuple[str, ...]:
        """The name of the running norm, which is one number per weight tensor."""
        return ("norm",)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The betas and eps."""
        return self.beta1, self.beta2, self.eps


def options(group: Mapping[str, Any]) -> NovoGradOptions:
    """Returns the options of a param group."""
    return NovoGradOptions(
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        maximize=False,
        decoupled=True,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        corrected=group["bias_correction"],
        averaging=group["grad_averaging"],
        inside=group["reg_inside_moment"],
        norm_type=group["norm_type"],
        from_zero=group["init_zero"],
    )


def eager(batch: Batch, options: NovoGradOptions) -> Iterator[list[Tensor]]:
    """Yields the new weight and states of each parameter, by Ginsburg et al. 2019, algorithm 1."""
    share = 1 - options.beta1 if options.averaging else 1.0
    means, roots = bias_corrections(batch, options.beta1, options.beta2, corrected=options.corrected)
    lr, decay = rounded(options.lr, batch), options.weight_decay
    rows = zip(batch.weights, batch.grads, *batch.states.values(), batch.steps, means, roots, strict=True)
    for w, g, mean, held, step, of_mean, of_root in rows:
        norm = _followed(held, g, step, options)
        divisor = norm / of_root + options.eps
        if options.inside:
            m = mean * options.beta1 + (g / divisor + w * decay) * share
            u = m / of_mean
        else:
            m = mean * options.beta1 + g * share
            u = (m / of_mean) / divisor + w * decay
        yield [w - u * lr, m, norm]


def _followed(held: Tensor, g: Tensor, step: Tensor, options: NovoGradOptions) -> Tensor:
    """Returns the new running norm: the old one, `held`, averaged with the norm of the gradient `g`."""
    wide = widest(g.device)
    mixed: Tensor
    before, beta = held.to(wide), options.beta2
    if options.norm_type == 2:
        norm = torch.linalg.vector_norm(g, dtype=wide)
        mixed = (before.square() * beta + norm.square() * (1 - beta)).sqrt()
    else:
        norm = torch.linalg.vector_norm(g, torch.inf, dtype=wide)
        mixed = before * beta + norm * (1 - beta)
    if not options.from_zero:
        mixed = torch.where(step.to(g.device) == 1, norm, mixed)
    return mixed.to(held.dtype)
