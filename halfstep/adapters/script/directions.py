"""What a backward pass starts from: its outputs, and the direction of the gradient of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def paired(tensors: Any, directions: Any) -> tuple[list[Tensor] | None, list[Tensor | None]]:
    """Returns what a backward pass starts from, with the direction of each gradient (None: 1).

    No outputs at all where it is something that nothing can be multiplied with, or that torch refuses.
    """
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [directions] if directions is None or isinstance(directions, Tensor) else list(directions)
    paired: list[Tensor | None] = [None] * len(outputs) if directions is None else given
    fits = len(paired) == len(outputs) and all(isinstance(out, Tensor) and out.requires_grad for out in outputs)
    numbers = fits and all(d is not None or out.numel() == 1 for out, d in zip(outputs, paired, strict=True))
    return (outputs if outputs and numbers else None), paired


def times(directions: Sequence[Tensor | None], outputs: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Returns the directions times a loss scale."""
    return [
        (torch.ones_like(out) if d is None else d) * scale.to(out.device, out.dtype)
        for out, d in zip(outputs, directions, strict=True)
    ]
