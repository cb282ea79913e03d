"""What the optimizers that are halfstep's own have in common: with and without a session, their steps are the same."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.adapters.apex.parallel import LARC
from halfstep.errors import StateError
from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.lamb import Lamb
from halfstep.optim.lion import Lion
from halfstep.optim.masters import MasterStore
from halfstep.optim.novograd import NovoGrad
from halfstep.optim.split import round_half_away
from halfstep.optim.steppers import make_stepper
from tests.contracts import cases as contracts
from tests.optim.cases import LIONS, TRUE, assert_same_bits, gradients, own_run, parameters
from tests.optim.test_lamb import CASES as LAMBS
from tests.optim.test_novograd import CASES as NOVOGRADS

NORMED = [(Lamb, options) for options in LAMBS] + [(NovoGrad, options) for options in NOVOGRADS]


def larc(params, lr):
    return LARC(torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1))


TRAINED = [Lamb, partial(NovoGrad, weight_decay=0.01), partial(Lion, weight_decay=0.1), larc]


@pytest.mark.parametrize(("cls", "options"), [*NORMED, *LIONS])
def test_its_own_step_is_a_sessions_on_full_weights(cls, options):
    params, run = parameters(), own_run(cls, options)
    optimizer = cls(params, **options)
    for seed in range(4):
        grads = gradients(params, seed)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        run.step(grads)
    exact = {"rtol": 0, "atol": 0} if cls is Lion else {"rtol": 1e-6, "atol": 1e-6}  # norms sum in another order
    for p, q, value in zip(params, run.params, run.values(), strict=True):
        torch.testing.assert_close(p.detach(), value, **exact)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], run.optimizer.state[q]["exp_avg"], **exact)


@pytest.mark.parametrize(("cls", "options"), NORMED)
def test_copy_and_split_train_bit_identically(cls, options):
    runs = [own_run(cls, options, kind) for kind in ("copy", "split")]
    for seed in range(12):
        for run in runs:
            run.step(gradients(run.params, seed), torch.tensor(0.125), torch.tensor(seed % 5 == 3))
    assert_same_bits(runs[0].params, runs[1].params)
    assert_same_bits(runs[0].values(), runs[1].values())
    stored = [round_half_away(value, torch.bfloat16) for value in runs[0].values()]
    assert_same_bits([p.detach() for p in runs[0].params], stored)


@pytest.mark.parametrize("kind", [None, "copy", "split", "none"])
@pytest.mark.parametrize("cls", [Lamb, NovoGrad, Lion])
def test_a_skipped_step_changes_nothing_and_the_next_first_one_is_a_first_one(cls, kind):
    run, plain = own_run(cls, {}, kind), own_run(cls, {}, kind)
    run.step([torch.full_like(p, float("nan")) for p in run.params], None, TRUE)
    assert run.optimizer.state_dict()["state"] == {}
    for each in (run, plain):
        each.step(gradients(each.params, 0))
    assert_same_bits(run.everything(), plain.everything())
    run.step([torch.full_like(p, float("inf")) for p in run.params], None, TRUE)
    assert_same_bits(run.everything(), plain.everything())


@contracts.every_plan
@pytest.mark.parametrize("make", TRAINED, ids=["Lamb", "NovoGrad", "Lion", "LARC"])
def test_a_session_trains_skips_and_resumes_bit_identically(make, name, low):
    def begun():
        model, optimizer = contracts.make(0, make, lr=0.01)
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
    ("cls", "options", "said"),
    [
        (Lamb, {"lr": -1.0}, "learning rate must be 0 or more, not -1.0"),
        (Lamb, {"eps": -1.0}, "eps must be 0 or more, not -1.0"),
        (Lamb, {"weight_decay": float("nan")}, "weight decay must be 0 or more, not nan"),
        (Lamb, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), not \(0.9, 1.0\)"),
        (Lamb, {"max_grad_norm": 0.0}, "max_grad_norm must be above 0, or None not to clip, not 0.0"),
        (NovoGrad, {"lr": -1.0}, "learning rate must be 0 or more, not -1.0"),
        (NovoGrad, {"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\), not \(1.0, 0.9\)"),
        (NovoGrad, {"norm_type": 1}, "norm_type must be 2, or 0 for the largest magnitude, not 1"),
        (Lion, {"lr": -1.0}, "learning rate must be 0 or more, not -1.0"),
        (Lion, {"lr": float("nan")}, "learning rate must be 0 or more, not nan"),
        (Lion, {"weight_decay": -0.1}, "weight decay must be 0 or more, not -0.1"),
        (Lion, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), not \(0.9, 1.0\)"),
    ],
)
def test_numbers_out_of_range_are_refused(cls, options, said):
    with pytest.raises(ValueError, match=said):
        cls([Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("cls", [Lamb, Lion])
def test_sparse_gradients_are_refused_before_anything_changes(cls):
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = cls([p, q], lr=0.1)
    p.grad, q.grad = torch.ones(2), torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match=f"{cls.__name__} takes no sparse gradients"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cls", "state", "said"),
    [
        (Lion, {"exp_avg": torch.zeros(3)}, "'exp_avg'"),
        (NovoGrad, {"exp_avg": torch.zeros(7, 19), "norm": torch.zeros(3), "step": torch.tensor(1.0)}, "'norm'"),
    ],
)
def test_a_state_of_another_shape_is_refused(cls, state, said):
    params = parameters()
    optimizer = cls(params)
    halfstep.initialize(torch.nn.ParameterList(params), optimizer, "O1", low="bf16")
    given = copy.deepcopy(optimizer.state_dict()) | {"state": {0: state}}
    with pytest.raises(StateError, match=rf"{said} that came: it has shape \(3,\)"):
        optimizer.load_state_dict(given)


def test_a_subclass_steps_itself_unless_it_names_the_row_that_it_goes_by():
    store = MasterStore("none", torch.bfloat16)
    other, lion = type("Other", (Lamb,), {}), type("Mine", (Lion,), {})
    same = type("Same", (Lamb,), {"updates_as": Lamb})
    of_same = type("OfSame", (same,), {})
    for cls, foreign in ((other, True), (lion, True), (same, False), (of_same, True)):
        stepper = make_stepper(cls([Parameter(torch.ones(1))]), store, plain=False)
        assert isinstance(stepper, ForeignStepper) is foreign
