"""The mode that finds host syncs finds them."""

import pytest
import torch

from tests.scale.sync import NoSync


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, float, int, torch.nonzero])
def test_a_read_on_the_host_fails(read):
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        read(torch.tensor(1.0))


def test_work_on_the_device_passes():
    with NoSync():
        torch.where(torch.tensor(True), torch.ones(3), torch.zeros(3)).sum()
