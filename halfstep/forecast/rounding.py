"""Rounding to a format at the speed of memory."""

from __future__ import annotations

from torch import Tensor

from halfstep.formats import TF32, Format, round_nearest, saturate


def rounded(values: Tensor, fmt: Format) -> Tensor:
    """Returns the same as `round_nearest` for an fp32 tensor, but by torch's own cast, many times as fast.

    >>> import torch
    >>> from halfstep.formats import E4M3
    >>> rounded(torch.tensor([3.14159, 1e6]), E4M3)
    tensor([  3.2500, 448.0000])
    """
    if fmt is TF32:  # no dtype is TF32
        return round_nearest(values, fmt)
    if not fmt.has_inf:  # torch before 2.12 turns values beyond the format into NaN
        values = saturate(values, fmt)
    return values.to(fmt.dtype).float()
