"""Lion without a session, and that a session's update is the same; its law and loop are tested as every row's are."""

import copy

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.errors import StateError
from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.lion import Lion
from halfstep.optim.masters import MasterStore
from halfstep.optim.steppers import make_stepper
from tests.contracts import cases as contracts
from tests.optim.cases import FALSE, HERE, LIONS, TRUE, assert_same_bits, gradients, own_run, parameters


def lion(values, **options):
    p = Parameter(torch.tensor(values))
    return p, Lion([p], **{"lr": 0.25, **options})


def test_a_step_is_the_sign_of_the_momentum():
    p, optimizer = lion([1.0, 1.0, 1.0], betas=(0.5, 0.75), weight_decay=0.5)
    p.grad = torch.tensor([4.0, -8.0, 0.0])
    optimizer.step()
    assert p.tolist() == [0.875 - 0.25, 0.875 + 0.25, 0.875]  # 1 - 0.25 * 0.5 is left of the weight
    assert optimizer.state[p]["exp_avg"].tolist() == [1.0, -2.0, 0.0]
    p.grad = torch.tensor([-1.0, 8.0, -1.0])  # mixed with half the momentum: 0, 3, -0.5
    optimizer.step()
    assert p.tolist() == [0.625 * 0.875, 1.125 * 0.875 - 0.25, 0.875 * 0.875 + 0.25]
    assert optimizer.state[p]["exp_avg"].tolist() == [0.5, 0.5, -0.25]


def test_maximize_goes_the_other_way_and_a_parameter_without_gradient_stays():
    p, optimizer = lion([1.0], maximize=True)
    optimizer.add_param_group({"params": [q := Parameter(torch.ones(2))]})
    p.grad = torch.tensor([2.0])
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (p.tolist(), q.tolist()) == ([1.25], [1.0, 1.0])
    assert list(optimizer.state) == [p]


@pytest.mark.parametrize("implementation", [name for name in HERE if name != "fused"])
def test_the_sign_of_zero_is_zero_and_that_of_nan_is_nan(implementation):
    """A NaN in a momentum that was loaded: torch's sign of it is 0, and that element would stand still unnoticed."""
    run = own_run(Lion, {"lr": 0.5}, implementation=implementation)
    p = Parameter(torch.tensor([1.0, 1.0, -0.0, 0.0, 1.0]))
    run.params = run.optimizer.param_groups[0]["params"] = [p]
    run.optimizer.state[p]["exp_avg"] = torch.tensor([0.0, -0.0, -0.0, 0.0, float("nan")])
    run.step([torch.tensor([0.0, -0.0, -0.0, 0.0, 1.0])])
    assert p[4].isnan()
    assert_same_bits([p[:4]], [torch.tensor([1.0, 1.0, -0.0, 0.0])])


@pytest.mark.parametrize(("cls", "options"), LIONS)
def test_its_own_step_has_the_bits_of_a_sessions_on_full_weights(cls, options):
    params, run = parameters(), own_run(cls, options)
    optimizer = cls(params, **options)
    for seed in range(4):
        grads = gradients(params, seed)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        run.step(grads)
    assert_same_bits([p.detach() for p in params], run.values())
    for p, q in zip(params, run.params, strict=True):
        assert_same_bits([optimizer.state[p]["exp_avg"]], [run.optimizer.state[q]["exp_avg"]])


@pytest.mark.parametrize("kind", [None, "copy", "split", "none"])
def test_a_skipped_first_step_leaves_no_state_behind(kind):
    run = own_run(Lion, {}, kind)
    run.step([torch.full_like(p, float("nan")) for p in run.params], None, TRUE)
    assert run.optimizer.state_dict()["state"] == {}
    run.step(gradients(run.params, 0), None, FALSE)
    assert [set(entry) for entry in run.optimizer.state_dict()["state"].values()] == [{"exp_avg"}] * len(run.params)


@contracts.every_plan
def test_a_session_trains_skips_and_resumes_bit_identically(name, low):
    def begun():
        model, optimizer = contracts.make(0, Lion, lr=0.01, weight_decay=0.1)
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
        ({"lr": float("nan")}, "learning rate must be 0 or more, not nan"),
        ({"weight_decay": -0.1}, "weight decay must be 0 or more, not -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), not \(0.9, 1.0\)"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Lion([Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused():
    p, optimizer = lion([1.0, 1.0])
    p.grad = torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_a_state_of_another_shape_is_refused():
    params = parameters()
    optimizer = Lion(params)
    halfstep.initialize(torch.nn.ParameterList(params), optimizer, "O1", low="bf16")
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {0: {"exp_avg": torch.zeros(3)}}
    with pytest.raises(StateError, match=r"'exp_avg' that came: it has shape \(3,\)"):
        optimizer.load_state_dict(state)


def test_a_subclass_steps_itself():
    optimizer = type("Mine", (Lion,), {})([Parameter(torch.ones(1))])
    assert isinstance(make_stepper(optimizer, MasterStore("none", torch.bfloat16), plain=False), ForeignStepper)
