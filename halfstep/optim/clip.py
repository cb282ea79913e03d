"""Clipping that belongs to an optimizer's law: by the norm of all gradients that the optimizer steps with."""

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
    """Returns what multiplies the gradients of each param group: `factor`, and what keeps their norm at its `max_norm`.

    The norm is the L2 norm of all elements of `grads` times `factor` (0-dim fp32, None for 1), over all groups
    together; each group has its own most, or none. Nothing is read on the host. Where the norm is not finite, the
    product with a gradient that is not stays so.
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
    """Returns the L2 norm over all elements, summed so wide that no square of a low or fp32 element overflows."""
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
