"""`apex_C`: joins tensors of one dtype into one flat tensor, and splits it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.errors import SetupError

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a 1-D tensor of the elements of all tensors, which must have one dtype.

    Raises:
        SetupError: the tensors have several dtypes, or the list is empty.
    """
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) != 1:
        raise SetupError(
            f"flatten got {len(tensors)} tensors of {len(dtypes)} dtypes; pass one or more tensors, all of one dtype"
        )
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns views of `flat` in the shapes of `tensors`.

    Raises:
        SetupError: `flat` and `tensors` have different numbers of elements.
    """
    sizes = [t.numel() for t in tensors]
    if flat.numel() != sum(sizes):
        raise SetupError(
            f"unflatten got a flat tensor of {flat.numel()} elements for tensors that have {sum(sizes)} together; pass "
            "the result of flatten"
        )
    return tuple(part.view(t.shape) for part, t in zip(torch.split(flat, sizes), tensors, strict=True))
