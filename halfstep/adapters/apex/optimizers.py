"""`apex.optimizers`: optimizers of torch and of halfstep with the signatures of apex's fused ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from halfstep.errors import SetupError
from halfstep.optim import adam
from halfstep.optim.lamb import Lamb
from halfstep.optim.novograd import NovoGrad
from halfstep.optim.own_step import own_step

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


class _Fused(Optimizer):
    """The base of all optimizers here: `set_grad_none` is the default of `set_to_none` in `zero_grad`."""

    def __init__(self, *args: Any, set_grad_none: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None or zero; if `set_to_none` is None, `set_grad_none` decides."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, Adam):
    """apex's Adam: AdamW unless `adam_w_mode=False`; `bias_correction=False` leaves the moments uncorrected."""

    updates_as = Adam

    def __init__(  # noqa: PLR0913  # apex's
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights:
            raise SetupError(
                "FusedAdam got master_weights=True, which halfstep does not support; pass fp32 parameters and train at "
                "opt_level O2, which keeps fp32 masters"
            )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
            set_grad_none=set_grad_none,
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure`, if any, and updates the parameters that have a gradient; returns the closure's result."""
        if all(group["bias_correction"] for group in self.param_groups):
            return super().step(closure)
        return own_step(self, adam.options, adam.eager, closure, counts=True)


class FusedSGD(_Fused, SGD):
    """torch's SGD with apex's arguments; `materialize_master_grads`, about how apex stored gradients, has no effect."""

    updates_as = SGD

    def __init__(  # noqa: PLR0913  # apex's
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise SetupError(
                "FusedSGD got wd_after_momentum=True, which torch's SGD does not have; leave it out to add the weight "
                "decay to the gradient before the momentum, as torch.optim.SGD does"
            )
        params = list(params)
        if lr is None:
            _require_lr(params)
        super().__init__(
            params, lr=0.0 if lr is None else lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov, set_grad_none=set_grad_none,
        )  # fmt: skip
        self.defaults["lr"] = lr

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with their own `lr` if the optimizer was made without one."""
        if self.defaults["lr"] is None:
            _require_lr([param_group])
        super().add_param_group(param_group)


class FusedLAMB(_Fused, Lamb):
    """`halfstep.optim.lamb.Lamb` with apex's arguments; `max_grad_norm` limits the gradient norm over all groups."""

    updates_as = Lamb

    def __init__(  # noqa: PLR0913  # apex's
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            decoupled_weight_decay=adam_w_mode,
            always_adapt=use_nvlamb,
            set_grad_none=set_grad_none,
        )


class FusedNovoGrad(_Fused, NovoGrad):
    """`halfstep.optim.novograd.NovoGrad` with apex's arguments."""

    updates_as = NovoGrad

    def __init__(  # noqa: PLR0913  # apex's
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            reg_inside_moment=reg_inside_moment,
            norm_type=norm_type,
            init_zero=init_zero,
            set_grad_none=set_grad_none,
        )


class FusedAdagrad(_Fused, Adagrad):
    """torch's Adagrad with apex's arguments; low-precision weights are updated through fp32 copies."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        if adagrad_w_mode:
            raise SetupError(
                "FusedAdagrad got adagrad_w_mode=True, which torch's Adagrad does not have; leave it out, and the "
                "weight decay is added to the gradient"
            )
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, set_grad_none=set_grad_none)


def _require_lr(groups: list[Any]) -> None:
    if not groups or any(not isinstance(group, dict) or "lr" not in group for group in groups):
        raise ValueError("FusedSGD got parameters without a learning rate; pass lr, or a group with 'lr' for each")


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(
            f"{name} does not support the AMSGrad variant, and neither does apex's; leave amsgrad out, or use "
            "torch.optim.AdamW(amsgrad=True), which halfstep supports"
        )
