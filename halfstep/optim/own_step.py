"""The `step` of halfstep's own optimizers without a session: it updates weights and state in the weights' dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.kernels.batch import Batch, Options, as_real
from halfstep.optim.clip import group_factors
from halfstep.optim.eager import Law, update


@torch.no_grad()
def own_step(
    optimizer: Optimizer,
    options_of: Callable[[Mapping[str, Any]], Options],
    law: Law,
    closure: Callable[[], Any] | None,
    *,
    counts: bool = False,
) -> Any:
    """Calls `closure` if passed, updates the parameters that have a gradient, and returns the closure's result."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    all_options = [options_of(group) for group in groups]
    given = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
    if any(grad.is_sparse for _, grad in given):
        raise RuntimeError(f"{type(optimizer).__name__} takes no sparse gradients; use sparse=False")
    factors = group_factors(all_options, [grad for _, grad in given], None)
    for group, options, factor in zip(groups, all_options, factors, strict=True):
        for p in group["params"]:
            if p.grad is not None and p.numel():
                batch = _batch_of(p, optimizer.state[p], options, counts=counts)
                grad = p.grad if factor is None else p.grad * factor.to(p.device)
                batch.grads.append(as_real(grad.to(p.dtype)))
                update(law, batch, options, torch.zeros((), dtype=torch.bool, device=p.device))
    return loss


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


def _batch_of(p: Parameter, state: dict[str, Any], options: Options, *, counts: bool) -> Batch:
    """Returns a batch that holds only `p`, without its gradient; makes missing state and counts the step."""
    for name in options.states:
        if state.get(name) is None:
            state[name] = p.detach().new_zeros(()) if name in options.scalars else torch.zeros_like(p)
    steps: list[Tensor] = []
    if counts:
        held = state.get("step")
        step = held if isinstance(held, Tensor) else torch.full((), float(held or 0), dtype=torch.float32, device="cpu")
        state["step"] = step.add_(1) if step is held else step + 1
        steps.append(state["step"])
    states = {name: [as_real(state[name])] for name in options.states}
    return Batch("full", [as_real(p.detach())], [], [], states, steps)
