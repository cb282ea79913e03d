"""Lion, one of halfstep's own optimizers: it moves weights by the sign of a momentum, with half of Adam's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.batch import Batch, Options
from halfstep.optim.eager import decayed, rounded
from halfstep.optim.own_step import check_arguments, own_step


class Lion(Optimizer):
    """Lion, "Symbolic Discovery of Optimization Algorithms" (Chen et al. 2023), algorithm 2; needs no session.

    A step multiplies each weight by 1 - lr * weight_decay and subtracts lr * sign(beta1 * m + (1 - beta1) * gradient),
    where m is the momentum. Then m becomes beta2 * m + (1 - beta2) * gradient. The sign of 0 is 0, and the sign of NaN
    is NaN. The paper advises a learning rate 3 to 10 times smaller than for AdamW, and a weight decay larger by the
    same factor.

    Args:
        params: parameters, named parameters, or param groups.
        lr: the learning rate, a number or a tensor with one element.
        betas: beta1, used for the update, and beta2, used for the momentum; both in [0, 1).
        weight_decay: decoupled weight decay.
        maximize: whether to maximize the loss instead of minimizing it.

    Raises:
        ValueError: a number is out of its range.
        TypeError: `params` is a model.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments("Lion", params, betas, {"learning rate": lr, "weight decay": weight_decay})
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure` if passed, updates the parameters that have a gradient, and returns the closure's result.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return own_step(self, options, eager, closure)


@dataclass(frozen=True)
class LionOptions(Options):
    """The options of `Lion`."""

    beta1: float
    beta2: float

    @property
    def states(self) -> tuple[str, ...]:
        """The name of the momentum, the only state."""
        return ("exp_avg",)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The betas, in the order in which the kernels take them (kernels/optimizers.h)."""
        return self.beta1, self.beta2


def options(group: Mapping[str, Any]) -> LionOptions:
    """Returns the options of a param group."""
    return LionOptions(
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
        decoupled=True,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
    )


def eager(batch: Batch, options: LionOptions) -> Iterator[list[Tensor]]:
    """Yields the new weight and momentum of each parameter, by Chen et al. 2023, algorithm 2."""
    lr = rounded(options.lr, batch)
    for w, g, (m,) in decayed(batch, options):
        mixed = m * options.beta1 + g * (1 - options.beta1)
        sign = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0, which would train on
        yield [w - sign * lr, m * options.beta2 + g * (1 - options.beta2)]
