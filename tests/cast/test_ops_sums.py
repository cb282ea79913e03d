"""Gradients that many rows add to are summed in fp32: a bf16 sum of ones stops at 256, an fp16 one at 2048."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from tests.contracts.cases import backward_and_step

ROWS = 6000
ZEROS = torch.zeros(ROWS, dtype=torch.int64)

USES = {
    "embedding": lambda w: F.embedding(ZEROS, w),
    "embedding with padding": lambda w: F.embedding(ZEROS, w, padding_idx=1),
    "embedding_bag": lambda w: F.embedding_bag(ZEROS, w, torch.arange(ROWS), mode="sum"),
    "embedding_bag of two": lambda w: F.embedding_bag(ZEROS.view(-1, 2), w, mode="sum"),
    "index": lambda w: w[ZEROS],
    "index_select": lambda w: w.index_select(0, ZEROS),
    "layer_norm": lambda w: F.layer_norm(torch.zeros(ROWS, 4).to(w.dtype), (4,), w[1], w[0]),
    "group_norm": lambda w: F.group_norm(torch.zeros(ROWS, 4).to(w.dtype), 2, w[1], w[0]),
    "linear bias": lambda w: F.linear(torch.zeros(ROWS, 4), torch.zeros(4, 4), w[0]),
}


class Uses(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))
        self.use = use

    def forward(self):
        return self.use(self.weight)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("use", USES)
def test_a_gradient_of_six_thousand_ones_is_six_thousand(use, name, low):
    model = Uses(USES[use])
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), name, low=low, loss_scale=1.0)
    out = model()
    session.backward(out.sum())
    dtype = session.plan.low.dtype
    assert model.weight.grad.dtype is dtype
    expected = torch.tensor(float(ROWS)).to(dtype)  # 6016 in bf16
    assert torch.equal(model.weight.grad[0], expected.expand(4))
    assert not model.weight.grad[1].any()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_summed_in_fp32_by_the_step(optimizer):
    model = nn.Embedding(2, 4, sparse=True)
    before = model.weight.detach().clone()
    opt = optimizer(model.parameters(), lr=2.0**-12)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    record = backward_and_step(session, model(ZEROS).sum())
    assert float(record.grad_norm) == 2 * ROWS
    if optimizer is torch.optim.SGD:
        torch.testing.assert_close(model.state_dict()["weight"][0], before[0] - ROWS * 2.0**-12)


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_sparse_bag_takes_fp32_weights_for_its_samples(name):
    bag = nn.EmbeddingBag(3, 4, mode="sum", sparse=True)
    with torch.no_grad():
        bag.weight.fill_(1.0)
    opt = torch.optim.SGD(bag.parameters(), lr=1.0)
    session = halfstep.initialize(bag, opt, name, low="bf16")
    out = bag(torch.tensor([[0, 1, 1]]), per_sample_weights=torch.tensor([[0.5, 0.25, 2.0]]))
    assert out.tolist() == [[2.75] * 4]
    backward_and_step(session, out.sum())
    assert bag.state_dict()["weight"][:, 0].tolist() == [0.5, -1.25, 1.0]


def test_activations_are_gathered_as_they_are():
    """Only weights are read through fp32: the copy of an activation would cost more than it brings."""
    seen = []

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = self.layer(x)
            with torch.utils._python_dispatch._disable_current_modes(), Casts(seen):
                return x[torch.tensor([0, 1])]

    model = Picks()
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O2", low="bf16")
    assert model(torch.randn(3, 4)).shape == (2, 4)
    assert torch.ops.aten._to_copy.default not in seen


class Casts(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
