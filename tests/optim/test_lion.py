"""Lion where signs and options are odd; its law is tested as every row's is, and in test_own_step.py."""

import pytest
import torch
from torch.nn import Parameter

from halfstep.train.optim.optimizers import Lion
from tests.optim.cases import HERE, assert_same_bits, own_run


def lion(values, **options):
    p = Parameter(torch.tensor(values))
    return p, Lion([p], **{"lr": 0.25, **options})


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
