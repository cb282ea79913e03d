"""In the shape of apex's L0 run_amp tests: basic casts, promotion, and weights, as inside a model at O1."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.adapters.apex import sessions, uninstall
from halfstep.errors import OpError
from tests.adapters.apex.cases import as_hardware, small

FULL = torch.float32


@pytest.fixture
def casts(amp):
    amp.initialize(small(), verbosity=0)
    with sessions()[0].autocast():
        yield


def either(low):
    """Returns an fp32 and a low tensor of the same values, both with gradients."""
    x = torch.randn(4, 6).to(low)
    return x.float().requires_grad_(), x.requires_grad_()


def formats(functions, low):
    """Returns the formats of results on an fp32 and a low tensor; the gradient has that of the input."""
    found = {}
    for name, function in functions.items():
        for x in either(low):
            y = function(x)
            found[name, x.dtype] = y.dtype
            y.float().sum().backward()
            assert x.grad.dtype is x.dtype, name
    return found


PRODUCTS = {
    "linear": lambda x: F.linear(x, torch.ones(5, 6)),
    "nn.Linear": nn.Linear(6, 5),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(2, 4, 3)),
    "conv2d": lambda x: F.conv2d(x[None, None], torch.ones(2, 1, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], torch.ones(1, 2, 3, 3)),
    "matmul": lambda x: torch.matmul(x, torch.ones(6, 2)),
    "@": lambda x: x @ torch.ones(6, 2),
    "mm": lambda x: x.mm(torch.ones(6, 2)),
    "mv": lambda x: torch.mv(x, torch.ones(6)),
    "addmm": lambda x: torch.addmm(torch.ones(4, 2), x, torch.ones(6, 2)),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 6, 2)),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 4, 2), x[None], torch.ones(1, 6, 2)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
}
DENIED = {
    "softmax": lambda x: F.softmax(x, 1),
    "Tensor.softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "softplus": F.softplus,
    "gelu": F.gelu,
    "nn.GELU": nn.GELU(),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "group_norm": lambda x: F.group_norm(x, 2, torch.ones(6), torch.zeros(6)),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 3),
    "nn.LocalResponseNorm": lambda x: nn.LocalResponseNorm(3)(x[None]),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, torch.ones_like(x)),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="linear"),
    "grid_sample": lambda x: F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2), align_corners=False),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "l1_loss": lambda x: F.l1_loss(x, torch.ones_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.ones_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.int64)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, torch.ones(4, 6)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "kl_div": lambda x: F.kl_div(x, torch.ones_like(x), reduction="batchmean"),
    "exp": torch.exp,
    "Tensor.exp": lambda x: x.exp(),
    "log1p": lambda x: torch.log(x.abs() + 1),
    "pow": lambda x: torch.pow(x, 2),
    "**": lambda x: x**2,
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "tan": torch.tan,
    "sum": torch.sum,
    "Tensor.sum": lambda x: x.sum(1),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(1),
    "norm": torch.norm,
    "std": torch.std,
    "Tensor.std": lambda x: x.std(),
    "var": lambda x: torch.var(x, 1),
    "dist": lambda x: torch.dist(x, torch.ones_like(x)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
}
AS_THEY_COME = {
    "relu": torch.relu,
    "nn.ReLU": nn.ReLU(),
    "mean": torch.mean,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "max": lambda x: x.max(),
    "cpu": lambda x: x.cpu(),
    "batch norm": nn.BatchNorm1d(6),  # with fp32 parameters
    "batch norm without statistics": nn.BatchNorm1d(6, track_running_stats=False),
}


def test_products_run_low(casts, low):
    assert formats(PRODUCTS, low) == {(name, given): low for name in PRODUCTS for given in (FULL, low)}


def test_apexs_fp32_functions_run_full(casts, low):
    assert formats(DENIED, low) == {(name, given): FULL for name in DENIED for given in (FULL, low)}


def test_what_is_on_no_list_follows_its_input(casts, low):
    assert formats(AS_THEY_COME, low) == {(name, given): given for name in AS_THEY_COME for given in (FULL, low)}


def test_binary_cross_entropy_is_banned_on_low_inputs_unless_registered(amp, low):
    x, target = torch.full((4, 6), 0.5), torch.ones(4, 6)
    amp.initialize(small(), verbosity=0)
    with sessions()[0].autocast():
        assert F.binary_cross_entropy(x, target).dtype is FULL
        with pytest.raises(OpError, match="with_logits"):
            F.binary_cross_entropy(x.to(low), target.to(low))
    uninstall()
    amp.register_float_function(F, "binary_cross_entropy")
    amp.initialize(small(), verbosity=0)
    with sessions()[0].autocast():
        assert F.binary_cross_entropy(x.to(low), target.to(low)).dtype is FULL


def test_in_place_operations_keep_the_format_of_what_they_write_to(casts, low):
    x = torch.ones(3, dtype=low)
    assert x.exp_().dtype is low
    assert x.add_(torch.ones(3)).dtype is low
    assert torch.ones(3).add_(x).dtype is FULL


PAIRS = {
    "add": torch.add,
    "+": lambda a, b: a + b,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1),
    "atan2": torch.atan2,
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 6, 6, dtype=a.dtype)),
}
COMPARED = (torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne)


def test_the_widest_input_wins(casts, low):
    for name, first, second in itertools.product(PAIRS, (FULL, low), (FULL, low)):
        a, b = torch.randn(4, 6).to(first), torch.randn(4, 6).to(second)
        expected = low if first is second is low else FULL
        assert PAIRS[name](a, b).dtype is expected, name
        if name in ("+", "mul"):
            assert torch.equal(PAIRS[name](a, b).float(), PAIRS[name](a.to(expected), b.to(expected)).float())


def test_comparisons_take_mixed_inputs(casts, low):
    a = torch.randn(4, 6).to(low)
    assert [compare(a, a.float()).all() == compare(a, a).all() for compare in COMPARED] == [True] * len(COMPARED)


@pytest.mark.parametrize("kind", [FULL, "low"])
def test_casts_of_weights_are_never_old_ones(amp, low, casts, kind):
    """apex's cache test: train, evaluate, train; the weights of each pass are those of that time."""
    kind = low if kind == "low" else kind
    weight = torch.tensor([1.5], dtype=kind, requires_grad=True)
    x = torch.tensor([[2.0]])

    def product():
        return F.linear(x, weight[:, None])

    for _ in range(2):
        assert product().item() == 2 * weight.item()
        with torch.no_grad():
            assert product().item() == 2 * weight.item()
            weight.mul_(0.5)
    product().sum().backward()
    assert weight.grad.item() == 2.0
    with torch.no_grad():
        weight.copy_(torch.tensor([4.0]))
    assert product().item() == 8.0


def test_a_weight_used_twice_gets_the_sum_of_its_gradients(casts, low):
    """apex failed here on every torch since 2021."""
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    F.linear(F.linear(x, weight), weight).float().sum().backward()
    hand = weight.detach().clone().requires_grad_()
    with as_hardware(low):
        F.linear(F.linear(x.to(low), hand.to(low)), hand.to(low)).float().sum().backward()
    torch.testing.assert_close(weight.grad, hand.grad, rtol=2.0**-7, atol=2.0**-7)
