"""Rounding by casts gives what rounding by bits gives."""

import pytest
import torch

from halfstep.explain.forecast.backward import rounded
from halfstep.formats import BF16, E4M3, E5M2, FP16, TF32, round_nearest


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2, TF32], ids=str)
def test_both_roundings_agree_over_all_magnitudes_and_at_the_ends(fmt):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).int().view(torch.float32)
    step = 2.0 ** (torch.tensor(fmt.max).frexp()[1].item() - 2 - fmt.fraction_bits)
    ends = torch.tensor([fmt.max, fmt.max + step, fmt.smallest_subnormal / 2, fmt.smallest_normal, torch.inf, 0.0])
    near = torch.cat([ends, ends.nextafter(torch.tensor(0.0)), ends.nextafter(torch.tensor(torch.inf))])
    values = torch.cat([bits, near, -near])
    torch.testing.assert_close(rounded(values, fmt), round_nearest(values, fmt), rtol=0, atol=0, equal_nan=True)
