import copy
import itertools

import pytest
import torch
from torch import optim
from torch.nn import Parameter

from halfstep.errors import StateError
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.optimizers import Lion
from halfstep.train.optim.state import exact_state_loading
from halfstep.train.optim.steppers import make_stepper
from tests.optim.cases import FALSE, assert_same_bits, bits, gradients, parameters

BF16 = torch.bfloat16
CASES = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.1, amsgrad=True),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
    "Lion": lambda ps: Lion(ps, lr=0.1, weight_decay=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
}


class Training:
    def __init__(self, name, kind):
        self.params = parameters()
        self.optimizer = CASES[name](self.params)
        self.store = MasterStore(kind or "none", BF16)
        for p in self.params if kind else ():
            self.store.track(p)
        self.stepper = make_stepper(self.optimizer, self.store, plain=False)
        self.undo = exact_state_loading(self.optimizer)

    def go(self, seeds):
        for seed in seeds:
            self.stepper.step(self.params, gradients(self.params, seed), None, FALSE)

    def weights(self):
        return [self.store.full(p).clone() for p in self.params]

    def everything(self):
        state = [
            v for s in self.optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)
        ]
        return [bits(t).clone() for t in [*self.params, *self.weights(), *state]]


def loaded(name, kind, weights, state, order):
    training = Training(name, kind)
    loads = {
        "weights": lambda: [training.store.load(p, w) for p, w in zip(training.params, weights, strict=True)],
        "state": lambda: training.optimizer.load_state_dict(state),
    }
    for part in order:
        loads[part]()
    return training


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["copy", "split"])
@pytest.mark.parametrize("order", list(itertools.permutations(["weights", "state"])))
@pytest.mark.parametrize("through_file", [True, False])
def test_training_resumes_bit_identically(name, kind, order, through_file, tmp_path):
    whole, first = Training(name, kind), Training(name, kind)
    whole.go(range(6))
    first.go(range(3))
    weights, state = first.weights(), first.optimizer.state_dict()
    if through_file:
        torch.save([weights, state], tmp_path / "checkpoint")
        weights, state = torch.load(tmp_path / "checkpoint", weights_only=True)
    again = loaded(name, kind, weights, state, order)
    assert_same_bits(again.everything(), first.everything())
    again.go(range(3, 6))
    assert_same_bits(again.everything(), whole.everything())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["copy", None])
def test_what_was_loaded_is_not_written_to_later(name, kind):
    first = Training(name, kind)
    first.go(range(2))
    state = copy.deepcopy(first.optimizer.state_dict())
    before = copy.deepcopy(state)
    loaded(name, kind, first.weights(), state, ["state", "weights"]).go(range(2))
    for index, entry in before["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(state["state"][index][key], value, rtol=0, atol=0)


def test_low_state_of_a_low_weight_becomes_full():
    training = Training("AdamW", "copy")
    training.go(range(1))
    state = copy.deepcopy(training.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"].bfloat16()
    training.optimizer.load_state_dict(state)
    for p in training.params:
        assert training.optimizer.state[p]["exp_avg"].dtype is torch.float32


def test_full_weights_load_as_torch_does():
    p = Parameter(torch.ones(2))
    optimizer = optim.AdamW([p])
    exact_state_loading(optimizer)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, dtype=torch.float64), "exp_avg_sq": torch.ones(2)}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert {v.dtype for v in optimizer.state[p].values()} == {torch.float32}


def test_a_state_of_another_optimizer_is_refused_as_torch_does_and_the_next_one_loads():
    training = Training("AdamW", "copy")
    training.go(range(1))
    before = training.everything()
    with pytest.raises(ValueError, match="parameter group"):
        training.optimizer.load_state_dict(optim.AdamW([Parameter(torch.ones(1))]).state_dict())
    assert_same_bits(training.everything(), before)
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert_same_bits(training.everything(), before)


def test_after_undo_torch_loads_as_ever():
    training = Training("AdamW", "copy")
    training.go(range(1))
    state = training.optimizer.state_dict()
    training.undo()
    training.optimizer.load_state_dict(state)
    assert training.optimizer.state[training.params[0]]["exp_avg"].dtype is BF16


def saved(name="AdamW", kind="copy"):
    """A trained run, its state as it would come from a file, and what the run holds."""
    training = Training(name, kind)
    training.go(range(2))
    return training, copy.deepcopy(training.optimizer.state_dict()), training.everything()


def assert_refused(training, state, before, match):
    with pytest.raises(StateError, match=match):
        training.optimizer.load_state_dict(state)
    assert_same_bits(training.everything(), before)


@pytest.mark.parametrize(
    ("name", "key"),
    [("AdamW", "exp_avg"), ("AdamW", "exp_avg_sq"), ("AdamW", "max_exp_avg_sq"), ("SGD", "momentum_buffer")],
)
@pytest.mark.parametrize("kind", [None, "copy", "split"])
def test_a_state_of_another_shape_is_refused(name, key, kind):
    training, state, before = saved(name, kind)
    state["state"][1][key] = torch.zeros(32)
    assert_refused(training, state, before, rf"parameter 1 of shape \(33,\).*'{key}'.*shape \(32,\)")


def test_a_step_count_is_one_number():
    training, state, _ = saved()
    state["state"][0]["step"] = 2
    state["state"][1]["step"] = torch.tensor([2.0])
    training.optimizer.load_state_dict(state)
    training.go([2])
    assert [training.optimizer.state[p]["step"].tolist() for p in training.params[:3]] == [3.0, 3.0, 3.0]
    before = training.everything()
    state["state"][0]["step"] = torch.zeros(2)
    assert_refused(training, state, before, r"step count of parameter 0.*shape \(2,\)")


CUT = "was the file cut short"
REFUSED = [
    ("AdamW", lambda state: state["state"][1]["exp_avg"].fill_(float("nan")), "'exp_avg' of parameter 1.*not finite"),
    (
        "RMSprop",
        lambda state: state["state"][0]["square_avg"].fill_(float("inf")),
        "'square_avg' of parameter 0.*not fin",
    ),
    ("AdamW", lambda state: state["state"][0].update(exp_avg=torch.zeros(19, 7)), r"0 of shape \(7, 19\).*\(19, 7\)"),
    ("AdamW", lambda state: state["state"][0].update(exp_avg=None), r"parameter 0.*'exp_avg'.*no tensor \(None\)"),
    *(
        ("AdamW", lambda state, key=key: state["state"][2].pop(key), f"parameter 2 has no '{key}'; {CUT}")
        for key in ("step", "exp_avg_sq", "max_exp_avg_sq")
    ),
    *(
        ("RMSprop", lambda state, key=key: state.pop(key), f"the optimizer state has no '{key}'; {CUT}")
        for key in ("state", "param_groups")
    ),
    *(
        ("AdamW", lambda state, params=params: state["param_groups"][0].update(params=params), "no list under 'params'")
        for params in (None, 4, True, torch.tensor(0.0))
    ),
    ("AdamW", lambda state: state["param_groups"][0].pop("betas"), "group 0 of the optimizer state has no 'betas'"),
    *(
        ("Adafactor", lambda state, at=at, key=key: state["state"][at].update({key: None}), rf"parameter {at}.*{key}")
        for at, key in ((0, "row_var"), (1, "variance"))
    ),
]


@pytest.mark.parametrize(("name", "spoil", "said"), REFUSED)
def test_what_no_training_can_go_on_from_is_refused(name, spoil, said):
    training, state, before = saved(name)
    spoil(state)
    assert_refused(training, state, before, said)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adafactor"])
def test_a_state_of_the_parameters_in_another_order_is_refused_by_an_optimizer_that_made_no_step(name):
    _, state, _ = saved(name)
    state["state"][0], state["state"][1] = state["state"][1], state["state"][0]
    fresh = Training(name, "copy")
    assert_refused(fresh, state, fresh.everything(), "parameters in the same order")


@pytest.mark.parametrize("entry", [{"momentum_buffer": None}, {}])
def test_a_momentum_that_no_update_has_made_loads(entry):
    training, state, _ = saved("SGD")
    state["state"][0] = entry
    training.optimizer.load_state_dict(state)
    training.go([2])
    assert training.optimizer.state[training.params[0]]["momentum_buffer"].any()


def test_what_a_later_hook_adapts_is_not_judged_before_it_ran():
    training, state, _ = saved()
    training.optimizer.register_load_state_dict_pre_hook(lambda _, given: {**given, "state": state["state"]})
    training.optimizer.load_state_dict({"param_groups": state["param_groups"]})
    training.go([2])
    assert [training.optimizer.state[p]["step"].item() for p in training.params] == [3.0] * 5
