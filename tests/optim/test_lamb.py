"""LAMB: its law against the paper written out in float64, and its clipping."""

from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.optimizers import TABLE, Lamb
from halfstep.train.optim.step import OnePassStepper
from tests.optim.cases import FALSE, LAMBS, gradients, own_run


def textbook(
    starts, all_grads, *, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True,
    grad_averaging=True, max_grad_norm=1.0, decoupled_weight_decay=True, always_adapt=False,
):  # fmt: skip
    """You et al. 2020, algorithm 2, weight by weight in float64."""
    values = [(w.clone(), torch.zeros_like(w), torch.zeros_like(w)) for w in starts]
    for t, grads in enumerate(all_grads, start=1):
        norm = sum(float((g**2).sum()) for g in grads) ** 0.5
        over = norm / max_grad_norm if max_grad_norm is not None and norm > max_grad_norm else 1.0
        for i, ((w, m, v), g) in enumerate(zip(values, grads, strict=True)):
            g = g / over
            if not decoupled_weight_decay:
                g = g + weight_decay * w
            m = betas[0] * m + (1 - betas[0] if grad_averaging else 1) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
            u = (m / c1) / ((v / c2) ** 0.5 + eps)
            if decoupled_weight_decay:
                u = u + weight_decay * w
            size, length = float((w**2).sum()) ** 0.5, float((u**2).sum()) ** 0.5
            adapts = (weight_decay or always_adapt) and size and length
            values[i] = w - float(lr) * (size / length if adapts else 1.0) * u, m, v
    return [w for w, _, _ in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [options for _, options in LAMBS], ids=range(len(LAMBS)))
def test_weights_are_the_textbooks(options, dtype):
    run = own_run(Lamb, options, dtype=dtype)
    starts = [p.detach().clone().double() for p in run.params]
    all_grads = [gradients(run.params, seed) for seed in range(5)]
    for grads in all_grads:
        run.step(grads)
    clipped = options.get("max_grad_norm", 1.0) == 1.0  # by a coefficient in fp32
    tolerance = (
        1e-5 if dtype is torch.float32 or isinstance(options["lr"], torch.Tensor) else 1e-7 if clipped else 1e-12
    )
    expected = textbook(starts, [[g.double() for g in grads] for grads in all_grads], **options)
    for p, value in zip(run.params, expected, strict=True):
        torch.testing.assert_close(p.double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_norm_of_zero_leaves_the_learning_rate(start):
    p = Parameter(torch.full((2,), start))
    optimizer = Lamb([p], lr=0.5, eps=1.0, weight_decay=0.0, always_adapt=True, bias_correction=False)
    p.grad = torch.full((2,), 1.0 - start)
    optimizer.step()
    assert torch.isfinite(p).all()
    assert bool((p != start).all()) is (start == 0.0)


def test_gradients_of_all_groups_are_clipped_by_one_norm():
    p, q = (Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q], "max_grad_norm": None}]
    optimizer = Lamb(groups, lr=0.1, betas=(0.0, 0.5), max_grad_norm=1.0, weight_decay=0.0)
    p.grad, q.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.tensor([0.6]))
    assert optimizer.state[q]["exp_avg"].item() == 4.0
    assert (p.grad.item(), q.grad.item()) == (3.0, 4.0)


@pytest.mark.parametrize("whole", [True, False])
def test_the_norms_of_a_weight_that_is_larger_than_the_parts_of_others_are_those_of_the_whole(whole):
    start = torch.randn(2**19 + 1000, generator=torch.Generator().manual_seed(1))
    p, grad = Parameter(start.clone()), torch.sin(torch.arange(len(start)))
    stepper = OnePassStepper(Lamb([p], lr=1e-2), MasterStore("none", torch.bfloat16), replace(TABLE[Lamb], whole=whole))
    stepper.step([p], [grad], None, FALSE)
    (expected,) = textbook([start.double()], [[grad.double()]], lr=1e-2)
    assert torch.allclose(p.double(), expected, rtol=1e-5, atol=1e-6) is whole
