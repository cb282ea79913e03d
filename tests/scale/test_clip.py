"""The factor that clips gradients: that of torch's `clip_grads_with_norm_`, bit for bit."""

from __future__ import annotations

import pytest
import torch

from halfstep.train.scale.norm import Clip

BITS = torch.arange(0, 2**32, 2**32 // 65_521, dtype=torch.int64).to(torch.int32).view(torch.float32)
NORMS = torch.cat(
    [BITS.abs(), torch.tensor([0.0, 1e-45, 1e-6, 1 - 1e-6, 1.0, 3.4e38, float("inf"), float("nan")])],
)


@pytest.mark.slow_but("30", "inf")
@pytest.mark.parametrize("max_norm", [1.0, 0.1, 1e-30, 5, 1e39, float("inf")])
def test_equals_torch(max_norm: float) -> None:
    clip = Clip(torch.device("cpu"))
    for norm in NORMS[:: 97 if max_norm != 1.0 else 7]:
        ones = torch.nn.Parameter(torch.zeros(()))
        ones.grad = torch.ones(())
        torch.nn.utils.clip_grads_with_norm_([ones], max_norm, norm)
        factor = clip.factor(norm, max_norm)
        assert ones.grad is not None
        assert factor.dtype is torch.float32
        assert torch.equal(factor.view(torch.int32), ones.grad.view(torch.int32)) or (factor.isnan() and norm.isnan())


def test_takes_another_limit_at_each_step() -> None:
    clip, norm = Clip(torch.device("cpu")), torch.tensor(4.0)
    assert [round(float(clip.factor(norm, limit)), 5) for limit in (1.0, 2.0, 8.0, 1.0)] == [0.25, 0.5, 1.0, 0.25]
    assert float(norm) == 4.0
