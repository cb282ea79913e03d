"""Lion's law by hand; what it shares with other optimizers is tested as every row's is, and in test_own_step.py."""

import pytest
import torch
from torch.nn import Parameter

from halfstep.train.optim.optimizers import Lion
from tests.optim.cases import HERE, assert_same_bits, own_run


def lion(values, **options):
    p = Parameter(torch.tensor(values))
    return p, Lion([p], **{"lr": 0.25, **options})


def test_a_step_is_the_sign_of_the_momentum():
    p, optimizer = lion([1.0, 1.0, 1.0], betas=(0.5, 0.75), weight_decay=0.5)
    p.grad = torch.tensor([4.0, -8.0, 0.0])
    optimizer.step()
    assert p.tolist() == [0.875 - 0.25, 0.875 + 0.25, 0.875]  # 1 - 0.25 * 0.5 is left of the weight
    assert optimizer.state[p]["exp_avg"].tolist() == [1.0, -2.0, 0.0]
    p.grad = torch.tensor([-1.0, 8.0, -1.0])  # mixed with half the momentum: 0, 3, -0.5
    optimizer.step()
    assert p.tolist() == [0.625 * 0.875, 1.125 * 0.875 - 0.25, 0.875 * 0.875 + 0.25]
    assert optimizer.state[p]["exp_avg"].tolist() == [0.5, 0.5, -0.25]


def test_maximize_goes_the_other_way_and_a_parameter_without_gradient_stays():
    p, optimizer = lion([1.0], maximize=True)
    optimizer.add_param_group({"params": [q := Parameter(torch.ones(2))]})
    p.grad = torch.tensor([2.0])
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (p.tolist(), q.tolist()) == ([1.25], [1.0, 1.0])
    assert list(optimizer.state) == [p]


@pytest.mark.parametrize("implementation", [name for name in HERE if name != "fused"])
def test_the_sign_of_zero_is_zero_and_that_of_nan_is_nan(implementation):
    """A NaN in a momentum that was loaded: torch's sign of it is 0, and that element would stand still unnoticed."""
    run = own_run(Lion, {"lr": 0.5}, implementation=implementation)
    p = Parameter(torch.tensor([1.0, 1.0, -0.0, 0.0, 1.0]))
    run.params = run.optimizer.param_groups[0]["params"] = [p]
    run.optimizer.state[p]["exp_avg"] = torch.tensor([0.0, -0.0, -0.0, 0.0, float("nan")])
    run.step([torch.tensor([0.0, -0.0, -0.0, 0.0, 1.0])])
    assert p[4].isnan()
    assert_same_bits([p[:4]], [torch.tensor([1.0, 1.0, -0.0, 0.0])])
