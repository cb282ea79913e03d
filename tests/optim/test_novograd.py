"""NovoGrad: its law against one written out in float64, and training, skipping and resuming by it."""

import copy

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.errors import StateError
from halfstep.optim.novograd import NovoGrad
from tests.contracts import cases as contracts
from tests.optim.cases import TRUE, assert_same_bits, gradients, own_run, parameters

CASES = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 0.1, "init_zero": True},
    {"lr": 1e-2, "weight_decay": 0.1, "reg_inside_moment": True, "betas": (0.95, 0.98)},
    {"lr": torch.tensor(1e-2), "norm_type": 0, "grad_averaging": False, "weight_decay": 0.1},
    {"lr": 1e-2, "norm_type": 0, "bias_correction": False, "eps": 1e-3, "init_zero": True},
]
each_case = pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
each_kind = pytest.mark.parametrize("kind", [None, "copy", "split", "none"])


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
@each_case
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


def test_steps_by_hand():
    """The first gradient over its norm, 5; then norms 5 and 0 mixed half and half as squares."""
    p = Parameter(torch.tensor([1.0, 2.0]))
    optimizer = NovoGrad([p], lr=0.5, betas=(0.0, 0.5), eps=0.0, bias_correction=False)
    p.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(lambda: 7.0) == 7.0
    torch.testing.assert_close(p.detach(), torch.tensor([0.7, 1.6]))
    assert optimizer.state[p]["norm"].item() == 5.0
    p.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["norm"], torch.tensor(12.5**0.5))
    assert set(optimizer.state[p]) == {"exp_avg", "norm", "step"}


@each_case
def test_its_own_step_is_a_sessions_on_full_weights(options):
    params, run = parameters(), own_run(NovoGrad, options)
    optimizer = NovoGrad(params, **options)
    for seed in range(4):
        grads = gradients(params, seed)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        run.step(grads)
    for p, value in zip(params, run.values(), strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-6)


@each_case
def test_copy_and_split_train_bit_identically(options):
    runs = [own_run(NovoGrad, options, kind) for kind in ("copy", "split")]
    for seed in range(12):
        for run in runs:
            run.step(gradients(run.params, seed), torch.tensor(0.125), torch.tensor(seed % 5 == 3))
    assert_same_bits(runs[0].params, runs[1].params)
    assert_same_bits(runs[0].values(), runs[1].values())


@each_kind
def test_a_skipped_step_changes_nothing_and_the_next_first_one_is_a_first_one(kind):
    run, plain = own_run(NovoGrad, CASES[0], kind), own_run(NovoGrad, CASES[0], kind)
    run.step([torch.full_like(p, float("nan")) for p in run.params], None, TRUE)
    assert run.optimizer.state_dict()["state"] == {}
    for each in (run, plain):
        each.step(gradients(each.params, 0))
    assert_same_bits(run.everything(), plain.everything())
    run.step([torch.full_like(p, float("inf")) for p in run.params], None, TRUE)
    assert_same_bits(run.everything(), plain.everything())


@contracts.every_plan
def test_a_session_trains_skips_and_resumes_bit_identically(name, low):
    def begun():
        model, optimizer = contracts.make(0, NovoGrad, lr=0.01, weight_decay=0.01)
        return model, optimizer, halfstep.initialize(model, optimizer, name, low=low)

    whole, first, again = begun(), begun(), begun()
    skips = [] if name == "O0" else [1]
    for run, steps in ((whole, range(5)), (first, range(3))):
        contracts.train(run[2], run[0], run[1], steps, poison=skips)
    for part, state in zip(again, [copy.deepcopy(part.state_dict()) for part in first], strict=True):
        part.load_state_dict(state)
    contracts.train(again[2], again[0], again[1], range(3, 5))
    assert contracts.differing(contracts.snapshot(*again[:2]), contracts.snapshot(*whole[:2])) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "learning rate must be 0 or more, not -1.0"),
        ({"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\), not \(1.0, 0.9\)"),
        ({"norm_type": 1}, "norm_type must be 2, or 0 for the largest magnitude, not 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        NovoGrad([Parameter(torch.ones(1))], **options)


def test_a_state_of_another_shape_is_refused():
    params = parameters()
    optimizer = NovoGrad(params)
    session = halfstep.initialize(torch.nn.ParameterList(params), optimizer, "O1", low="bf16")
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {0: {"exp_avg": torch.zeros(7, 19), "norm": torch.zeros(3), "step": torch.tensor(1.0)}}
    with pytest.raises(StateError, match=r"'norm' that came: it has shape \(3,\)"):
        optimizer.load_state_dict(state)
    session.close()
