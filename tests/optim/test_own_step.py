"""Lion, LAMB and NovoGrad by themselves and in sessions; their laws have files of their own."""

import copy

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.errors import StateError
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.optimizers import Lamb, Lion, NovoGrad
from halfstep.train.optim.steppers import ForeignStepper, make_stepper
from tests.contracts.cases import assert_trains_skips_and_resumes, every_plan
from tests.optim.cases import LAMBS, LIONS, NOVOGRADS, gradients, own_run, parameters


@pytest.mark.parametrize(("cls", "options"), [*LIONS, *LAMBS, *NOVOGRADS])
def test_its_own_step_is_that_of_a_session_on_full_weights(cls, options):
    params, run = parameters(), own_run(cls, options)
    optimizer = cls(params, **options)
    for seed in range(4):
        grads = gradients(params, seed)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        run.step(grads)
    tolerance = 0 if cls is Lion else 1e-6  # the norms of a session's flat copies sum in another order
    for p, value in zip(params, run.values(), strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=tolerance, atol=tolerance)
    for p, q in zip(params, run.params, strict=True):
        one, other = (each["exp_avg"] for each in (optimizer.state[p], run.optimizer.state[q]))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow_but("O1-fp16-NovoGrad", "O3-bf16-Lion")
@pytest.mark.parametrize(
    ("cls", "options"), [(Lion, {"weight_decay": 0.1}), (Lamb, {}), (NovoGrad, {"weight_decay": 0.01})]
)
@every_plan
def test_a_session_trains_skips_and_resumes_bit_identically(name, low, cls, options):
    assert_trains_skips_and_resumes(name, low, cls, **options)


@pytest.mark.parametrize(
    ("cls", "options", "said"),
    [
        (Lion, {"lr": -1.0}, "learning rate must be a number, 0 or more, not -1.0"),
        (Lion, {"lr": float("nan")}, "learning rate must be a number, 0 or more, not nan"),
        (Lion, {"lr": "1e-3"}, "learning rate must be a number, 0 or more, not '1e-3'"),
        (Lion, {"lr": torch.ones(2)}, r"learning rate must be a number, 0 or more, not tensor\(\[1., 1.\]\)"),
        (Lion, {"weight_decay": -0.1}, "weight decay must be a number, 0 or more, not -0.1"),
        (Lion, {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), not \(0.9, 1.0\)"),
        (Lion, {"betas": 0.9}, r"betas must be two numbers in \[0, 1\), not 0.9"),
        (Lamb, {"betas": ("0.9", 0.9)}, r"betas must be two numbers in \[0, 1\), not \('0.9', 0.9\)"),
        (Lamb, {"max_grad_norm": "1"}, "max_grad_norm must be a number above 0, or None for no clipping, not '1'"),
        (Lamb, {"eps": -1.0}, "eps must be a number, 0 or more, not -1.0"),
        (Lamb, {"max_grad_norm": 0.0}, "max_grad_norm must be a number above 0, or None for no clipping, not 0.0"),
        (NovoGrad, {"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\), not \(1.0, 0.9\)"),
        (NovoGrad, {"norm_type": 1}, "norm_type must be 2, or 0 for the largest magnitude, not 1"),
    ],
)
def test_numbers_out_of_range_are_refused(cls, options, said):
    with pytest.raises(ValueError, match=said):
        cls([Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("cls", [Lion, Lamb, NovoGrad])
def test_a_model_is_no_parameters(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__} expected parameters, not Linear; pass model\.parameters\(\)"):
        cls(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("cls", [Lion, Lamb, NovoGrad])
def test_sparse_gradients_are_refused_before_anything_changes(cls):
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = cls([p, q])
    p.grad, q.grad = torch.ones(2), torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match=f"{cls.__name__} takes no sparse gradients"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cls", "entry", "name"),
    [
        (Lion, {"exp_avg": torch.zeros(3)}, "exp_avg"),
        (NovoGrad, {"exp_avg": torch.zeros(7, 19), "norm": torch.zeros(3), "step": torch.tensor(1.0)}, "norm"),
    ],
)
def test_a_state_of_another_shape_is_refused(cls, entry, name):
    params = parameters()
    optimizer = cls(params)
    halfstep.initialize(torch.nn.ParameterList(params), optimizer, "O1", low="bf16")
    state = copy.deepcopy(optimizer.state_dict()) | {"state": {0: entry}}
    with pytest.raises(StateError, match=rf"loaded optimizer state '{name}', which has shape \(3,\)"):
        optimizer.load_state_dict(state)


def test_a_subclass_steps_itself_unless_it_names_the_row_that_it_goes_by():
    store = MasterStore("none", torch.bfloat16)
    other = type("Other", (Lamb,), {})
    same = type("Same", (Lamb,), {"updates_as": Lamb})
    of_same = type("OfSame", (same,), {})
    for cls, foreign in ((other, True), (same, False), (of_same, True)):
        stepper = make_stepper(cls([Parameter(torch.ones(1))]), store, plain=False)
        assert isinstance(stepper, ForeignStepper) is foreign
