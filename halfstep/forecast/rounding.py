"""Rounds fp32 tensors to a format by casting them, which takes little longer than reading and writing their memory."""

from __future__ import annotations

from torch import Tensor

from halfstep.formats import TF32, Format, round_nearest, saturate


def rounded(values: Tensor, fmt: Format) -> Tensor:
    """Returns an fp32 tensor rounded to a format.

    The values are the same as from `round_nearest`, but torch's own cast computes them many times faster.

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
