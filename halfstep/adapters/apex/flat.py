"""`apex_C`: several tensors of one dtype as one, and apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.errors import SetupError

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the elements of tensors of one dtype in a row.

    Raises:
        SetupError: they are of several dtypes, or there are none.
    """
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) != 1:
        raise SetupError(f"flatten is given tensors of {len(dtypes)} dtypes; give one or more, all of one dtype")
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns views of `flat` in the shapes of `tensors`.

    Raises:
        SetupError: `flat` has not as many elements as they.
    """
    sizes = [t.numel() for t in tensors]
    if flat.numel() != sum(sizes):
        raise SetupError(
            f"unflatten is given {flat.numel()} elements for tensors of {sum(sizes)}; give what flatten made"
        )
    return tuple(part.view(t.shape) for part, t in zip(torch.split(flat, sizes), tensors, strict=True))
