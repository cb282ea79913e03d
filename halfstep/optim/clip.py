"""Clips gradients by the norm of all gradients of a step, for optimizers whose update rule includes this (LAMB)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels.batch import Options, as_real
from halfstep.optim.eager import widest
from halfstep.torch_internals import foreach_norm


def group_factors(
    all_options: Sequence[Options], grads: Sequence[Tensor], factor: Tensor | None
) -> list[Tensor | None]:
    """Returns, for each param group, the factor that unscales its gradients and clips them to the group's `max_norm`.

    `factor` (0-dim fp32; None means 1) unscales the gradients. The norm to clip is the L2 norm of the unscaled
    gradients of all groups together. The factor of a group is `factor` times the clip coefficient, or just `factor` if
    the group has no `max_norm`. If the norm is infinite or NaN, the clip coefficient is 0 or NaN, so that a non-finite
    gradient is still non-finite after clipping. Nothing is read on the host.
    """
    most = [options.max_norm for options in all_options]
    if not grads or not any(most):
        return [factor] * len(most)
    device = grads[0].device if factor is None else factor.device
    norm = _norm(grads, device) if factor is None else _norm(grads, device) * factor
    found: list[Tensor | None] = []
    for limit in most:
        if limit is None:
            found.append(factor)
            continue
        clip = (limit / norm).clamp(max=1.0)
        found.append((clip if factor is None else clip * factor).to(torch.float32))
    return found


def _norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the L2 norm over all elements of `grads`, in a dtype in which no square of an fp32 value overflows."""
    places: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            places.setdefault(grad.device, []).append(as_real(grad))
    norms = [
        torch.linalg.vector_norm(torch.stack(list(foreach_norm(held, 2, dtype=widest(where))))).to(device)
        for where, held in places.items()
    ]
    return (
        torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float32, device=device)
    )
