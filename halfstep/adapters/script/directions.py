"""What a backward pass starts from: outputs, and a gradient direction (torch's `grad_tensors`) for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def paired(tensors: Any, directions: Any) -> tuple[list[Tensor] | None, list[Tensor | None]]:
    """Returns the outputs that a backward pass starts from, and for each output its gradient (direction).

    A direction of None means that the gradient is 1. None is returned in place of the outputs if halfstep cannot scale
    them (a GradientEdge has no value), or if torch will refuse the arguments.
    """
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [directions] if directions is None or isinstance(directions, Tensor) else list(directions)
    paired: list[Tensor | None] = [None] * len(outputs) if directions is None else given
    fits = len(paired) == len(outputs) and all(isinstance(out, Tensor) and out.requires_grad for out in outputs)
    numbers = fits and all(d is not None or out.numel() == 1 for out, d in zip(outputs, paired, strict=True))
    return (outputs if outputs and numbers else None), paired


def times(directions: Sequence[Tensor | None], outputs: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Returns each direction times a loss scale.

    A direction is the gradient of the output at the same position in `outputs`; None means that the gradient is 1.
    """
    return [
        (torch.ones_like(out) if d is None else d) * scale.to(out.device, out.dtype)
        for out, d in zip(outputs, directions, strict=True)
    ]
