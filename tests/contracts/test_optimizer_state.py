"""Optimizer states as they may come from a file: taken, and the next step works, or a StateError changes nothing."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn, optim

import halfstep
from halfstep.torch_internals import LOADS_STATE
from halfstep.train.optim.optimizers import TABLE
from tests.contracts.cases import backward_and_step, differing, snapshot

OPTIMIZERS = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.1, amsgrad=True),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.9),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.1),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
}
BAD = [
    None, True, "x", [], {}, -1, 2.5, 10**400, 2**80, float("nan"), float("inf"), 3, 1j,
    torch.zeros(3), torch.zeros(4, 4, 4), torch.zeros(1), torch.tensor(float("nan")), torch.tensor(-1.0),
    torch.zeros(4, 4, device="meta"), torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4, dtype=torch.complex64),
    torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4).bfloat16(),
]  # fmt: skip


def start(name, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, halfstep.initialize(model, opt, name, low="bf16")


def step(model, optimizer, session):
    optimizer.zero_grad()
    backward_and_step(session, model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().mean())


@st.composite
def spoiled(draw, state):
    """A state with one or two things in it replaced or removed, anywhere."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 2))):
        holders = [state, state["state"], state["param_groups"][0], *state["state"].values()]
        holders = [holder for holder in holders if isinstance(holder, dict) and holder]
        holder = draw(st.sampled_from(holders))
        key = draw(st.sampled_from([*holder, "something else"]))
        if draw(st.booleans()) and key in holder:
            del holder[key]
        else:
            holder[key] = draw(st.sampled_from(BAD))
        if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
            break
    return state


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize(
    "optimizer", ["AdamW", "SGD", *(pytest.param(each, marks=pytest.mark.slow) for each in list(OPTIMIZERS)[2:])]
)
@pytest.mark.filterwarnings("ignore")
def test_a_spoiled_state_is_taken_and_steps_or_changes_nothing(name, optimizer):
    kept = start(name, optimizer)
    step(*kept)
    saved = copy.deepcopy(kept[1].state_dict())
    kept[2].close()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(spoiled(saved))
    def check(state):
        run = start(name, optimizer)
        step(*run)
        before, groups = snapshot(*run), copy.deepcopy(run[1].state_dict()["param_groups"])
        try:
            run[1].load_state_dict(state)
        except halfstep.StateError:
            assert differing(snapshot(*run), before) == []
            assert run[1].state_dict()["param_groups"] == groups
        step(*run)
        moments = [v for s in run[1].state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]
        assert not any(v.dtype is torch.bfloat16 for v in moments if v.dim())
        run[2].close()

    check()


def test_what_a_hook_raises_in_a_load_puts_everything_back():
    model, optimizer, session = start("O2", "AdamW")
    step(model, optimizer, session)
    saved = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, session)
    before = snapshot(model, optimizer, session)

    def fail(_):
        raise RuntimeError("mine")

    optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.load_state_dict(saved)
    assert differing(snapshot(model, optimizer, session), before) == []
    session.close()
    assert "load_state_dict" not in vars(optimizer)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_an_optimizer_outside_loads_the_state_exactly_while_the_session_is_open(low):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    optimizer = optim.Adam(model.parameters())
    session = halfstep.initialize(model, optimizer, "O2", low=low)
    step(model, optimizer, session)
    saved = optimizer.state_dict()
    for value in saved["state"].values():
        value["exp_avg_sq"].fill_(1e-12)  # 0 in fp16
    second, foreign = optim.Adam(model.parameters()), optim.Adam(other.parameters())
    for loads in (second, foreign):
        loads.load_state_dict(saved)
    assert all(v["exp_avg_sq"].unique().tolist() == [torch.tensor(1e-12).item()] for v in second.state.values())
    assert all(v["exp_avg_sq"].dtype is torch.bfloat16 for v in foreign.state.values())
    session.close()
    assert not hasattr(getattr(optim.Optimizer, LOADS_STATE), "_halfstep_place")


CHOICES = ("capturable", "foreach", "differentiable", "maximize")
NO_CHOICES = {"word": "x", "two": torch.ones(2), "meta": torch.ones(1, device="meta"), "half": 0.5}


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "NAdam"])
@pytest.mark.parametrize("value", NO_CHOICES)
@pytest.mark.parametrize("option", CHOICES)
def test_a_choice_that_is_none_is_refused_before_anything_changed(name, optimizer, value, option):
    run = start(name, optimizer)
    step(*run)
    state, before = copy.deepcopy(run[1].state_dict()), snapshot(*run)
    state["param_groups"][0][option] = NO_CHOICES[value]
    with pytest.raises(halfstep.StateError, match=rf"{option}=.*expected True.*False"):
        run[1].load_state_dict(state)
    assert differing(snapshot(*run), before) == []
    step(*run)
    run[2].close()


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(1, device="meta")], ids=["two", "meta"])
@pytest.mark.parametrize("optimizer", ["RMSprop", "NAdam"])
def test_an_option_of_several_numbers_is_refused_before_anything_changed(optimizer, value):
    run = start("O2", optimizer)
    step(*run)
    state, before = copy.deepcopy(run[1].state_dict()), snapshot(*run)
    state["param_groups"][0]["eps"] = value
    with pytest.raises(halfstep.StateError, match=r"eps=.*expected one number"):
        run[1].load_state_dict(state)
    assert differing(snapshot(*run), before) == []
    run[2].close()


ROWS = {cls.__name__: cls for cls in TABLE}


@pytest.mark.parametrize("optimizer", ROWS)
def test_each_option_of_a_row_is_of_its_default_s_kind(optimizer):
    model = torch.nn.Linear(2, 2, bias=False)
    made = ROWS[optimizer](model.parameters(), lr=0.1)
    with halfstep.initialize(model, made, "O2", low="bf16"):
        saved = copy.deepcopy(made.state_dict())
        for name, default in dict(made.defaults).items():
            state = copy.deepcopy(saved)
            group = state["param_groups"][0]
            several, number = isinstance(default, tuple), type(default) in (int, float)
            wrong = [] if default is None else ["x", [default], *([(default[0], "x")] if several else [])]
            wrong += [None] if (several or number) and name != "max_grad_norm" else []
            wrong += [torch.tensor(0.5)] if number and name != "lr" else []
            for value in wrong:
                state["param_groups"][0] = {**group, name: value}
                with pytest.raises(halfstep.StateError, match=rf"{name}=.*expected"):
                    made.load_state_dict(state)
            for value in (default, list(default)) if several else (default,):
                state["param_groups"][0] = {**group, name: value}
                made.load_state_dict(state)
        if "max_grad_norm" in made.defaults:
            state["param_groups"][0]["max_grad_norm"] = None  # as it may be given: no clipping
            made.load_state_dict(state)
