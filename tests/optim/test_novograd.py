"""NovoGrad: its law against one written out in float64."""

import pytest
import torch

from halfstep.train.optim.optimizers import NovoGrad
from tests.optim.cases import NOVOGRADS, gradients, own_run


def textbook(
    w, grads, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True, grad_averaging=True,
    reg_inside_moment=False, norm_type=2, init_zero=False,
):  # fmt: skip
    """Ginsburg et al. 2019, algorithm 1, with apex's choices, of one weight in float64."""
    m, v = torch.zeros_like(w), None
    for t, g in enumerate(grads, start=1):
        size = float((g**2).sum()) if norm_type == 2 else float(g.abs().max())
        if v is None:
            v = 0.0 if init_zero else size
        v = betas[1] * v + (1 - betas[1]) * size
        norm = v**0.5 if norm_type == 2 else v
        c1, c2 = (1 - betas[0] ** t, (1 - betas[1] ** t) ** 0.5) if bias_correction else (1.0, 1.0)
        share = 1 - betas[0] if grad_averaging else 1.0
        if reg_inside_moment:
            m = betas[0] * m + share * (g / (norm / c2 + eps) + weight_decay * w)
            w = w - float(lr) * m / c1
        else:
            m = betas[0] * m + share * g
            w = w - float(lr) * (m / c1 / (norm / c2 + eps) + weight_decay * w)
    return w, m, norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [options for _, options in NOVOGRADS], ids=range(len(NOVOGRADS)))
def test_weights_and_state_are_the_textbooks(options, dtype):
    run = own_run(NovoGrad, options, dtype=dtype)
    starts = [p.detach().clone().double() for p in run.params]
    all_grads = [gradients(run.params, seed) for seed in range(5)]
    for grads in all_grads:
        run.step(grads)
    tolerance = 1e-5 if dtype is torch.float32 or isinstance(options["lr"], torch.Tensor) else 1e-12
    for i, p in enumerate(run.params):
        state = run.optimizer.state[p]
        expected = textbook(starts[i], [grads[i].double() for grads in all_grads], **options)
        assert state["norm"].shape == ()
        for got, value in zip((p.detach(), state["exp_avg"], state["norm"]), expected, strict=True):
            value = torch.as_tensor(value, dtype=torch.float64)
            torch.testing.assert_close(got.double(), value, rtol=tolerance, atol=tolerance)
