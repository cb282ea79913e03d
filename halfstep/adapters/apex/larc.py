"""`apex.parallel.LARC`: wraps any optimizer, and adapts the learning rate of each weight to the weight's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LARC"]


class LARC(Optimizer):
    """Wraps an optimizer with LARC ("Large Batch Training of Convolutional Networks", You et al. 2017).

    The local rate of a weight is `trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)`. Before the
    optimizer's own step the gradient `g` becomes `rate * (g + weight_decay * w)`, and the optimizer's own weight decay
    is off. With `clip` the rate is `min(rate / lr, 1)`, so that the effective rate is at most `lr`; without `clip` the
    rate multiplies `lr`. If a weight or its gradient has norm 0, the gradient stays as it is, without decay.

    A LARC object has the param groups, state and hooks of the wrapped optimizer. So LR schedulers and sessions accept
    the LARC object as well as the wrapped optimizer.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `trust_coefficient` or `eps` is negative.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LARC got {type(optimizer).__name__}; pass an optimizer, such as torch.optim.SGD")
        for name, value in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"LARC's {name} must be 0 or more, not {value}")
        self.optim = optimizer  # Optimizer.__init__ would make groups and state of another optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # before it is there, as while it is unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients to None or zero."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Multiplies the gradients by the local rates, and steps the wrapped optimizer; returns the closure's loss.

        Raises:
            RuntimeError: a gradient is sparse; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.optim.param_groups
        if any(p.grad is not None and p.grad.is_sparse for group in groups for p in group["params"]):
            raise RuntimeError(
                "LARC got a sparse gradient, but it decays all weights and so needs dense ones; pass sparse=False to "
                "the layer"
            )
        decays = [group.get("weight_decay", 0.0) for group in groups]
        try:
            for group, decay in zip(groups, decays, strict=True):
                for p in group["params"]:
                    if p.grad is not None:
                        self._adapt(p, p.grad, group["lr"], decay)
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _adapt(self, p: Tensor, grad: Tensor, lr: float | Tensor, decay: float) -> None:
        """Replaces `grad`, in place, with `rate * (grad + decay * p)`, where `rate` is the local rate of `p`.

        Does not wait for the device. If `p` or `grad` has norm 0, `grad` stays as it is.
        """
        size, length = (torch.linalg.vector_norm(t.detach(), dtype=_wide(t)) for t in (p, grad))
        rate = self.trust_coefficient * size / (length + size * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        adapted = ((grad + p * decay) * rate).to(grad.dtype)
        grad.copy_(torch.where((size != 0) & (length != 0), adapted, grad))


def _wide(t: Tensor) -> torch.dtype:
    """Returns the dtype in which norms of `t` are computed: wide enough for fp16 and bf16 values not to overflow."""
    if t.is_complex():
        return torch.complex128 if t.dtype is torch.complex128 else torch.complex64
    return torch.float64 if t.dtype is torch.float64 else torch.float32
