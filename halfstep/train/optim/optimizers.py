"""halfstep's own optimizers and their `step` without a session, and the table of all that halfstep updates itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from halfstep.train.kernels.batch import Batch, as_real
from halfstep.train.optim import laws
from halfstep.train.optim.laws import LAMB, LION, NOVOGRAD, Row, write
from halfstep.validate import with_near_misses


class _Own(Optimizer):
    """The base of halfstep's optimizers."""

    _row: ClassVar[Row]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure` if passed, updates the parameters that have a gradient, and returns the closure's result.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return own_step(self, self._row, closure)


@with_near_misses
class Lion(_Own):
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

    _row = LION

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


@with_near_misses
class Lamb(_Own):
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

    _row = LAMB

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


@with_near_misses
class NovoGrad(_Own):
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

    _row = NOVOGRAD

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


@torch.no_grad()
def own_step(optimizer: Optimizer, row: Row, closure: Callable[[], Any] | None) -> Any:
    """Makes a step by the law of `row` in the dtype of the weights; returns what `closure`, if any, returned."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    given = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
    if any(grad.is_sparse for _, grad in given):
        raise RuntimeError(f"{type(optimizer).__name__} takes no sparse gradients; use sparse=False")
    factors = row.factors(groups, [grad for _, grad in given], None)
    for group, factor in zip(groups, factors, strict=True):
        for p in group["params"]:
            if p.grad is not None and p.numel():
                batch = _batch_of(p, optimizer.state[p], row, row.states(group))
                grad = p.grad if factor is None else p.grad * factor.to(p.device)
                batch.grads.append(as_real(grad.to(p.dtype)))
                write(row.law, group, batch, torch.zeros((), dtype=torch.bool, device=p.device))
    return loss


def _batch_of(p: Parameter, state: dict[str, Any], row: Row, names: tuple[str, ...]) -> Batch:
    """Returns a batch that holds only `p`, without its gradient; makes missing state and counts the step."""
    for name in names:
        if state.get(name) is None:
            state[name] = p.detach().new_zeros(()) if name in row.scalars else torch.zeros_like(p)
    steps: list[Tensor] = []
    if row.counts:
        held = state.get("step")
        step = held if isinstance(held, Tensor) else torch.full((), float(held or 0), dtype=torch.float32, device="cpu")
        state["step"] = step.add_(1) if step is held else step + 1
        steps.append(state["step"])
    return Batch("full", [as_real(p.detach())], [], [], {name: [as_real(state[name])] for name in names}, steps)


def check_arguments(name: str, params: object, betas: Any, others: Mapping[str, Any]) -> None:
    """Checks what an optimizer is made from; `others` are numbers by name."""
    if isinstance(params, nn.Module):
        raise TypeError(f"{name} expected parameters, not {type(params).__name__}; pass model.parameters()")
    for words, value in others.items():
        if not _is_number(value) or not value >= 0:
            raise ValueError(f"{name}'s {words} must be a number, 0 or more, not {value!r}")
    pair = betas if isinstance(betas, (tuple, list)) else ()
    if len(pair) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in pair):
        raise ValueError(f"{name}'s betas must be two numbers in [0, 1), not {betas!r}")


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


# ---- the table of all that halfstep updates itself; CONTRIBUTING.md says how to add one
TABLE: dict[type[Optimizer], Row] = {
    Adam: laws.ADAM,
    AdamW: laws.ADAM,
    SGD: laws.SGD,
    Muon: laws.MUON,
    Lion: laws.LION,
    Lamb: laws.LAMB,
    NovoGrad: laws.NOVOGRAD,
}

KERNELS = {"foreach", "fused", "capturable"}  # options of torch that choose how its own step computes, not what


def any_row_of(cls: type[Optimizer]) -> Row | None:
    """Returns the row of a class of optimizers, whatever their options; None if it has none."""
    return TABLE.get(_class_of_row(cls))


def row_of(optimizer: Optimizer) -> Row | None:
    """Returns the row of `optimizer`; None if it has none, or has options that only its own `step` supports."""
    return None if unsupported_options(optimizer) else any_row_of(type(optimizer))


def unsupported_options(optimizer: Optimizer) -> list[str]:
    """Returns the options of an optimizer that only its own `step` supports, as "name=value"."""
    # Those that its row does not read, unless they have the default value or only choose a kernel, and tensors, except
    # as the learning rate.
    cls, found = _class_of_row(type(optimizer)), []
    if cls not in TABLE:
        return []
    parameters = inspect.signature(cls).parameters
    for group in optimizer.param_groups:
        for name in optimizer.defaults.keys() & group.keys() - KERNELS:
            value = group[name]
            if any(isinstance(each, Tensor) for each in (value if isinstance(value, tuple | list) else [value])):
                supported = name == "lr"
            else:
                supported = name in TABLE[cls].reads or (name in parameters and value == parameters[name].default)
            if not supported:
                found.append(f"{name}={value!r}")
    return sorted({*found})


def _class_of_row(cls: type[Optimizer]) -> type[Optimizer]:
    # A subclass that differs in its constructor alone names its class. Not inherited: one of it may compute otherwise.
    named: type[Optimizer] = vars(cls).get("updates_as", cls)
    return named
