"""`apex.optimizers`: optimizers of torch and of halfstep with the signatures of apex's fused ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import SGD, Adagrad, Adam, Optimizer

from halfstep.errors import SetupError
from halfstep.train.optim.laws import ADAM
from halfstep.train.optim.optimizers import Lamb, NovoGrad, own_step

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

_BETAS = (0.9, 0.999)
_REFUSED: dict[str, tuple[type[Exception], str]] = {
    "amsgrad": (
        RuntimeError,
        "{} does not support the AMSGrad variant, and neither does apex's; leave amsgrad out, or use "
        "torch.optim.AdamW(amsgrad=True), which halfstep supports",
    ),
    "master_weights": (
        SetupError,
        "{} got master_weights=True, which halfstep does not support; pass fp32 parameters and train at opt_level O2, "
        "which keeps fp32 masters",
    ),
    "wd_after_momentum": (
        SetupError,
        "{} got wd_after_momentum=True, which torch's SGD does not have; leave it out to add the weight decay to the "
        "gradient before the momentum, as torch.optim.SGD does",
    ),
    "adagrad_w_mode": (
        SetupError,
        "{} got adagrad_w_mode=True, which torch's Adagrad does not have; leave it out, and the weight decay is added "
        "to the gradient",
    ),
}
"""Arguments of apex's that have to be false: the error for one that is not."""
_NAMES = {"adam_w_mode": "decoupled_weight_decay", "use_nvlamb": "always_adapt"}  # what the base classes call them


def _signature(**defaults: Any) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind, default=value) for name, value in defaults.items()])


class _Fused(Optimizer):
    """Takes apex's arguments: `takes` after `params`, in apex's order; `in_groups` are not the base class's."""

    takes: inspect.Signature
    in_groups: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        bound = self.takes.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, (error, message) in _REFUSED.items():
            if given.pop(name, False):
                raise error(message.format(type(self).__name__))
        self.set_grad_none = given.pop("set_grad_none")
        own = {name: given.pop(name) for name in self.in_groups}
        given.pop("materialize_master_grads", None)  # about how apex stored gradients
        super().__init__(params, **{_NAMES.get(name, name): value for name, value in given.items()})
        self.defaults.update(own)
        for group in self.param_groups:
            group.update({**own, **group})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None or zero; if `set_to_none` is None, `set_grad_none` decides."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, Adam):
    """apex's Adam: AdamW unless `adam_w_mode=False`; `bias_correction=False` leaves the moments uncorrected."""

    updates_as = Adam
    takes = _signature(
        lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False,
        set_grad_none=True, capturable=False, master_weights=False,
    )  # fmt: skip
    in_groups = ("bias_correction",)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure`, if any, and updates the parameters that have a gradient; returns the closure's result."""
        if all(group["bias_correction"] for group in self.param_groups):
            return super().step(closure)
        return own_step(self, ADAM, closure)


class FusedSGD(_Fused, SGD):
    """torch's SGD with apex's arguments; `materialize_master_grads`, about how apex stored gradients, has no effect."""

    updates_as = SGD
    takes = _signature(
        lr=math.nan, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False,
        materialize_master_grads=True, set_grad_none=False,
    )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with their own `lr` if the optimizer was made without one, which is NaN in `defaults`."""
        if math.isnan(self.defaults["lr"]) and "lr" not in param_group:
            raise ValueError("FusedSGD got parameters without a learning rate; pass lr, or a group with 'lr' for each")
        super().add_param_group(param_group)


class FusedLAMB(_Fused, Lamb):
    """`halfstep.Lamb` with apex's arguments; `max_grad_norm` limits the gradient norm over all groups."""

    updates_as = Lamb
    takes = _signature(
        lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-6, weight_decay=0.01, amsgrad=False, adam_w_mode=True,
        grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False,
    )  # fmt: skip


class FusedNovoGrad(_Fused, NovoGrad):
    """`halfstep.NovoGrad` with apex's arguments."""

    updates_as = NovoGrad
    takes = _signature(
        lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, weight_decay=0.0, amsgrad=False,
        reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True,
    )  # fmt: skip


class FusedAdagrad(_Fused, Adagrad):
    """torch's Adagrad with apex's arguments; low-precision weights are updated through fp32 copies."""

    takes = _signature(lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False)
