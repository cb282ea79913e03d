"""LARC against the paper's rule written out in float64, alone, around schedulers and in sessions."""

import pickle

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.adapters.apex.larc import LARC
from tests.contracts import cases as contracts
from tests.optim.cases import gradients, parameters


def textbook(w, grads, *, lr, momentum, weight_decay, trust, clip, eps=1e-8):
    """You et al. 2017, section 4, before SGD with momentum, in float64."""
    held = None
    for g in grads:
        size, length = float((w**2).sum()) ** 0.5, float((g**2).sum()) ** 0.5
        if size and length:
            rate = trust * size / (length + weight_decay * size + eps)
            rate = min(rate / lr, 1.0) if clip else rate
            g = rate * (g + weight_decay * w)
        held = g if held is None else momentum * held + g
        w = w - lr * held
    return w


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("trust", [0.001, 0.02, 10.0])
def test_weights_are_the_papers(clip, trust):
    params = parameters()
    starts = [p.detach().double() for p in params]
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), trust, clip)
    all_grads = [gradients(params, seed) for seed in range(4)]
    for grads in all_grads:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        assert optimizer.step(lambda: 5.0) == 5.0
    for i, p in enumerate(params):
        found = textbook(
            starts[i], [g[i].double() for g in all_grads],
            lr=0.1, momentum=0.9, weight_decay=0.01, trust=trust, clip=clip,
        )  # fmt: skip
        torch.testing.assert_close(p.double(), found, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_a_step_by_hand():
    """Norms 5 and 10: the rate is 0.5 * 5 / 10 = 0.25, and 0.25 / 0.5 of the gradient where lr is the most."""
    p, q = (Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    for weight, clip in ((p, False), (q, True)):
        optimizer = LARC(torch.optim.SGD([weight], lr=0.5), trust_coefficient=0.5, clip=clip, eps=0.0)
        weight.grad = torch.tensor([6.0, 8.0])
        optimizer.step()
    assert p.grad.tolist() == [1.5, 2.0]
    assert p.tolist() == [2.25, 3.0]
    assert q.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("weight", "grad"), [(0.0, 2.0), (2.0, 0.0)])
def test_a_norm_of_zero_leaves_the_gradient(weight, grad):
    p = Parameter(torch.full((3,), weight))
    p.grad = torch.full((3,), grad)
    LARC(torch.optim.SGD([p], lr=0.5, weight_decay=0.1)).step()
    assert p.grad.tolist() == [grad] * 3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stays_so(value):
    p = Parameter(torch.ones(3))
    p.grad = torch.tensor([1.0, value, 1.0])
    LARC(torch.optim.SGD([p], lr=0.5)).step()
    assert not torch.isfinite(p.grad).all()


def test_what_the_optimizer_raises_leaves_its_weight_decay():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("mine")

    optimizer = LARC(Broken([p := Parameter(torch.ones(1))], lr=0.1, weight_decay=0.5))
    p.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_groups_state_and_hooks_are_the_optimizers():
    inner = torch.optim.SGD([p := Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    optimizer = LARC(inner)
    assert optimizer.param_groups is inner.param_groups
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    p.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert calls == [1]
    assert inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict()["state"].keys() == {0}
    optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.zero_grad()
    assert p.grad is None
    other = pickle.loads(pickle.dumps(optimizer))
    assert (other.clip, other.param_groups[0]["lr"]) == (True, 0.05)
    assert "SGD" in repr(other)


@contracts.every_plan
def test_a_session_trains_skips_and_resumes_bit_identically(name, low):
    def larc(params, lr):
        return LARC(torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1))

    contracts.assert_trains_skips_and_resumes(name, low, larc)


@pytest.mark.parametrize("stepping", ["session", "optimizer"])
def test_it_reads_masters_and_true_gradients_in_a_session(stepping):
    """Weights of 1 + 2**-10, which bf16 rounds to 1, and a true gradient of 1: LARC sees both."""
    seen = []

    class Looks(LARC):
        def _adapt(self, p, grad, lr, decay):
            seen.append((p.dtype, p[0, 0].item(), grad.dtype, grad[0, 0].item()))

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1 + 2.0**-10)
    optimizer = Looks(torch.optim.SGD(model.parameters(), lr=0.1))
    with halfstep.initialize(model, optimizer, "O2", low="bf16", loss_scale=64.0, stepping=stepping) as session:
        session.backward(model(torch.ones(1, 1)).sum())
        (session if stepping == "session" else optimizer).step()
    assert seen == [(torch.float32, 1 + 2.0**-10, torch.float32, 1.0)]


def test_bad_input_gets_words():
    with pytest.raises(TypeError, match="LARC got list; pass an optimizer"):
        LARC([])
    sgd = torch.optim.SGD([p := Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="trust_coefficient must be 0 or more, not -1"):
        LARC(sgd, -1)
    p.grad = torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match="LARC got a sparse gradient"):
        LARC(sgd).step()
