"""LAMB: its law against the paper written out in float64, its clipping, and training, skipping and resuming by it."""

import copy

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.lamb import Lamb
from halfstep.optim.masters import MasterStore
from halfstep.optim.split import round_half_away
from halfstep.optim.steppers import make_stepper
from tests.contracts import cases as contracts
from tests.optim.cases import TRUE, assert_same_bits, gradients, own_run, parameters

CASES = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 0.0},
    {"lr": 1e-2, "weight_decay": 0.0, "always_adapt": True, "max_grad_norm": None},
    {"lr": torch.tensor(1e-2), "decoupled_weight_decay": False, "grad_averaging": False},
    {"lr": 1e-2, "betas": (0.5, 0.8), "eps": 1e-3, "bias_correction": False, "max_grad_norm": 100.0},
]
each_case = pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
each_kind = pytest.mark.parametrize("kind", [None, "copy", "split", "none"])


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
@each_case
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


def test_a_step_by_hand():
    """From zero state Adam's direction is the gradient's sign; 5 long, it is as long as lr times the weight's norm."""
    p = Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Lamb([p], lr=0.5, eps=0.0, weight_decay=0.0, always_adapt=True, max_grad_norm=None)
    p.grad = torch.tensor([2.0, -8.0])
    assert optimizer.step(lambda: 7.0) == 7.0
    torch.testing.assert_close(p.detach(), torch.tensor([3.0, 4.0]) - 2.5 / 2**0.5 * torch.tensor([1.0, -1.0]))
    assert set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq", "step"}
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_norm_of_zero_leaves_the_learning_rate(start):
    p = Parameter(torch.full((2,), start))
    optimizer = Lamb([p], lr=0.5, eps=1.0, weight_decay=0.0, always_adapt=True, bias_correction=False)
    p.grad = torch.full((2,), 1.0 - start)
    optimizer.step()
    assert torch.isfinite(p).all()
    assert bool((p != start).all()) is (start == 0.0)


@each_case
def test_its_own_step_has_the_bits_of_a_sessions_on_full_weights(options):
    params, run = parameters(), own_run(Lamb, options)
    optimizer = Lamb(params, **options)
    for seed in range(4):
        grads = gradients(params, seed)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        run.step(grads)
    # The norms of a session's flat copies sum in another order.
    for p, value in zip(params, run.values(), strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-6)


def test_gradients_of_all_groups_are_clipped_by_one_norm():
    p, q = (Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q], "max_grad_norm": None}]
    optimizer = Lamb(groups, lr=0.1, betas=(0.0, 0.5), max_grad_norm=1.0, weight_decay=0.0)
    p.grad, q.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.tensor([0.6]))
    assert optimizer.state[q]["exp_avg"].item() == 4.0
    assert (p.grad.item(), q.grad.item()) == (3.0, 4.0)


@each_kind
def test_clipping_reads_unscaled_gradients(kind):
    one, other = own_run(Lamb, CASES[0], kind), own_run(Lamb, CASES[0], kind)
    for seed in range(3):
        grads = gradients(one.params, seed, scale=1024.0)
        one.step(grads, torch.tensor(2.0**-10))
        other.step([grad.float() * 2.0**-10 for grad in grads])
    assert_same_bits(one.everything(), other.everything())


@each_case
def test_copy_and_split_train_bit_identically(options):
    runs = [own_run(Lamb, options, kind) for kind in ("copy", "split")]
    for seed in range(12):
        for run in runs:
            run.step(gradients(run.params, seed), torch.tensor(0.125), torch.tensor(seed % 5 == 3))
    assert_same_bits(runs[0].params, runs[1].params)
    assert_same_bits(runs[0].values(), runs[1].values())
    stored = [round_half_away(value, torch.bfloat16) for value in runs[0].values()]
    assert_same_bits([p.detach() for p in runs[0].params], stored)


@each_kind
def test_a_skipped_step_changes_nothing(kind):
    run = own_run(Lamb, CASES[0], kind)
    run.step([torch.full_like(p, float("nan")) for p in run.params], None, TRUE)
    assert run.optimizer.state_dict()["state"] == {}
    run.step(gradients(run.params, 0))
    before = run.everything()
    run.step([torch.full_like(p, float("inf")) for p in run.params], None, TRUE)
    assert_same_bits(run.everything(), before)


@contracts.every_plan
def test_a_session_trains_skips_and_resumes_bit_identically(name, low):
    def begun():
        model, optimizer = contracts.make(0, Lamb, lr=0.01)
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
        ({"eps": -1.0}, "eps must be 0 or more, not -1.0"),
        ({"weight_decay": float("nan")}, "weight decay must be 0 or more, not nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), not \(0.9, 1.0\)"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, or None not to clip, not 0.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Lamb([Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused_before_anything_changes():
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = Lamb([p, q])
    p.grad, q.grad = torch.ones(2), torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match="Lamb takes no sparse gradients"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]


def test_a_subclass_steps_itself_unless_it_names_the_row_that_it_goes_by():
    store = MasterStore("none", torch.bfloat16)
    other = type("Other", (Lamb,), {})
    same = type("Same", (Lamb,), {"updates_as": Lamb})
    of_same = type("OfSame", (same,), {})
    for cls, foreign in ((other, True), (same, False), (of_same, True)):
        stepper = make_stepper(cls([Parameter(torch.ones(1))]), store, plain=False)
        assert isinstance(stepper, ForeignStepper) is foreign
