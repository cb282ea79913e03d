"""Losses that a model computes from low values inside its forward run full at every level: all that torch has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import mixed_plans

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # of kl_div

F = nn.functional
N, C = 8, 6
FIXED = torch.Generator().manual_seed(0)
INDICES = torch.randint(0, C, (N,), generator=FIXED)
SIGNS = torch.randint(0, 2, (N,), generator=FIXED).float() * 2 - 1
SHARES = torch.rand(N, C, generator=FIXED)
ZERO_OR_ONE = (SHARES > 0.5).float()
LABELS = torch.tensor([[0, 2, -1, 1, 1, 1]] * N)

# of a function, or of a class without "Loss": what comes after the first low value `x`; `y` and `z` are low too
AFTER = {
    "nll_loss": lambda y, z: (INDICES,),
    "cross_entropy": lambda y, z: (INDICES,),
    "mse_loss": lambda y, z: (y,),
    "l1_loss": lambda y, z: (y,),
    "smooth_l1_loss": lambda y, z: (y,),
    "huber_loss": lambda y, z: (y,),
    "kl_div": lambda y, z: (SHARES,),
    "poisson_nll_loss": lambda y, z: (y.abs(),),
    "gaussian_nll_loss": lambda y, z: (y, SHARES + 0.1),
    "binary_cross_entropy_with_logits": lambda y, z: (SHARES,),
    "soft_margin_loss": lambda y, z: (ZERO_OR_ONE * 2 - 1,),
    "hinge_embedding_loss": lambda y, z: (ZERO_OR_ONE * 2 - 1,),
    "margin_ranking_loss": lambda y, z: (y, SIGNS[:, None]),
    "cosine_embedding_loss": lambda y, z: (y, SIGNS),
    "triplet_margin_loss": lambda y, z: (y, z),
    "triplet_margin_with_distance_loss": lambda y, z: (y, z),
    "multi_margin_loss": lambda y, z: (INDICES,),
    "multilabel_margin_loss": lambda y, z: (LABELS,),
    "multilabel_soft_margin_loss": lambda y, z: (ZERO_OR_ONE,),
    "ctc_loss": lambda y, z: (torch.tensor([1, 2]), torch.tensor(N), torch.tensor(2)),
}
OTHER_NAMES = {"bcewithlogits": "binary_cross_entropy_with_logits", "crossentropy": "cross_entropy", "kldiv": "kl_div"}
REFUSED = {"binary_cross_entropy", "BCELoss"}  # on low values, with what to use instead
LAYERS = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}  # with weights: a Rule's business


def function_of(class_name):
    short = class_name.removesuffix("Loss").lower()
    names = {name.removesuffix("_loss").replace("_", ""): name for name in AFTER}
    return OTHER_NAMES.get(short) or names[short]


FUNCTIONS = sorted({name for name in dir(F) if name.endswith("_loss")} | AFTER.keys())
CLASSES = sorted({name for name in dir(nn) if name.endswith("Loss")} - LAYERS - REFUSED)


class Computing(nn.Module):
    def __init__(self, loss, name):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.loss, self.after = nn.Linear(C, C), loss, AFTER[name]

    def forward(self, inputs):
        x, y, z = self.project(inputs).chunk(3)
        self.given = (x, *self.after(y, z))
        self.computed = self.loss(*self.given)
        return self.computed


def full(value):
    return value.detach().float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def agrees(loss, name, level, low):
    model = Computing(loss, name)
    session = halfstep.initialize(model, None, level, low=low, emulate=False if low == "bf16" else None)
    model(torch.randn(3 * N, C, generator=torch.Generator().manual_seed(1)) * 3)
    assert model.given[0].dtype is halfstep.formats.as_format(low).dtype
    assert model.computed.dtype is torch.float32
    want = loss(*map(full, model.given))
    session.close()
    torch.testing.assert_close(model.computed.detach(), want, rtol=1e-6, atol=0.0)


@mixed_plans
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in REFUSED])
def test_a_loss_function_of_torchs_is_that_of_the_same_values_in_fp32(name, low, function):
    agrees(lambda *given: getattr(F, function)(*given), function, name, low)


@mixed_plans
@pytest.mark.parametrize("kind", CLASSES)
def test_a_loss_class_of_torchs_is_that_of_the_same_values_in_fp32(name, low, kind):
    agrees(getattr(nn, kind)(), function_of(kind), name, low)


@mixed_plans
def test_a_distance_of_the_users_is_computed_in_fp32(name, low):
    def distance(a, b):
        return (a - b).square().sum(1)

    def loss(*given):
        return F.triplet_margin_with_distance_loss(*given, distance_function=distance, swap=True)

    agrees(loss, "triplet_margin_with_distance_loss", name, low)


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_an_op_change_moves_such_a_loss(name):
    op = "torch.nn.functional:gaussian_nll_loss"
    model = Computing(lambda *given: F.gaussian_nll_loss(*given), "gaussian_nll_loss")
    with halfstep.initialize(model, None, name, low="bf16", ops={"allow": [op]}):
        model(torch.randn(3 * N, C))
        assert model.computed.dtype is torch.bfloat16
    assert not hasattr(F.gaussian_nll_loss, "_halfstep_place")
