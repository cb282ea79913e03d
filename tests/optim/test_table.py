"""The table of optimizers: what a row can ask for, and that what no kernel knows is an error and not another update."""

from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, RMSprop

import halfstep
from halfstep.errors import PlanError, SessionError, SetupError
from halfstep.plan.matching import match_parameters
from halfstep.train.kernels import library
from halfstep.train.kernels.batch import Batch, Scratch
from halfstep.train.optim.implementations import IMPLEMENTATIONS, update
from halfstep.train.optim.laws import Row
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.optimizers import KERNELS, TABLE, Lamb, Lion, row_of, unsupported_options
from halfstep.train.optim.step import OnePassStepper
from tests.optim.cases import FALSE, MUONS, OWN, OWN_STEP, WHOLE, has_kernel

BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(library.find() is None, reason="needs the compiled loops")


@needs_compiler
@pytest.mark.parametrize(("cls", "options"), [own for own in OWN if has_kernel("native", *own)])
def test_a_loop_that_a_row_names_is_there(cls, options):
    weight = Parameter(torch.ones(3))
    stepper = OnePassStepper(cls([weight], **options), MasterStore("none", BF16), TABLE[cls])
    stepper._implementations = {"native": IMPLEMENTATIONS["native"]}
    stepper.step([weight], [torch.ones(3)], None, FALSE)
    assert not torch.equal(weight, torch.ones(3))


GROUP = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}


def batch_of(states):
    return Batch("full", [torch.ones(3)], [], [torch.ones(3)], {n: [torch.zeros(3)] for n in states}, [torch.zeros(())])


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "states", "numbers"),
    [
        ("adagrad", (), ()),
        ("adam", ("exp_avg", "exp_avg_sq"), (0.9, 0.999)),
        ("adam", ("exp_avg",), (0.9, 0.999, 1e-8)),
        ("sgd", ("a", "b"), (0.9, 0.0)),
        ("lion", (), (0.9, 0.99)),
        ("lion", ("exp_avg",), (0.9, 0.99, 0.0)),
    ],
)
def test_a_compiled_loop_that_does_not_know_the_row_is_an_error_and_changes_nothing(kernel, states, numbers):
    batch = batch_of(states)
    row = Row(reads=(), states=lambda _: states, law=TABLE[Lion].law, native=kernel, numbers=lambda _: numbers)
    with pytest.raises(LookupError, match=rf"'{kernel}' with {len(numbers)} numbers and the states"):
        update(row, batch, GROUP, None, FALSE, Scratch(), IMPLEMENTATIONS)
    assert batch.weights[0].tolist() == [1.0] * 3
    assert batch.steps[0] == 0


@pytest.mark.parametrize(("cls", "options"), [*OWN_STEP, (SGD, {"dampening": torch.tensor(0.5), "momentum": 0.9})])
def test_options_that_a_row_does_not_know_are_left_to_the_optimizers_own_step(cls, options):
    one = Parameter(torch.ones(1))
    optimizer = cls([one], **options)
    name, value = next(iter(options.items()))
    assert row_of(optimizer) is None
    assert unsupported_options(optimizer) == [f"{name}={value!r}"]
    in_one_group = cls([{"params": [one]}, {"params": [Parameter(torch.ones(1))], **options}])
    assert row_of(in_one_group) is None


def arguments(cls):
    """The names of the constructor's arguments with their defaults."""
    return [(name, argument.default) for name, argument in signature(cls).parameters.items()]


def varied(cls, cases):
    """The options that some case of a class with the row of `cls` gives another value than the constructor does."""
    rows = [(each, options) for each, options in cases if TABLE[each] is TABLE[cls]]
    return {
        name
        for each, options in rows
        for name, value in cls([Parameter(torch.ones(1, 1))], **options).defaults.items()
        if isinstance(value, torch.Tensor) or (name, value) not in arguments(each)
    }


class Noting(dict):
    """A param group that notes which of its options are read."""

    def __init__(self, group, read):
        super().__init__(group)
        self.read = read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("cls", TABLE)
def test_a_row_lists_what_its_law_reads(cls):
    row, read = TABLE[cls], set()
    one = torch.ones(1, 1)
    for each, options in OWN + WHOLE + MUONS:
        if TABLE[each] is row:
            group = Noting(each([Parameter(one)], **options).param_groups[0], read)
            names = row.states(group)
            states = {name: [torch.zeros(() if name in row.scalars else (1, 1))] for name in names}
            list(row.law(Batch("full", [one], [], [one], states, [torch.ones(())], owners=[one]), group))
            row.factors([group], [one], None)
            if row.native:
                row.options(group)
    assert read == {*row.reads}


@pytest.mark.parametrize("cls", TABLE)
def test_each_option_is_tried_or_listed_as_one_that_the_row_does_not_know(cls):
    """In tests/optim/cases.py: in OWN or WHOLE, or in OWN_STEP; those in KERNELS change no number."""
    defaults = {*cls([Parameter(torch.ones(1, 1))]).defaults}
    listed = {name for each, options in OWN_STEP if each is cls for name in options}
    read = {*TABLE[cls].reads}
    assert listed - read == defaults - KERNELS - read, "list in OWN_STEP the options that the row does not read"
    assert read & defaults - varied(cls, OWN + WHOLE + MUONS) == set(), "give these options another value in some case"


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (RMSprop, {}, "RMSprop, for which halfstep has no update of its own"),
        (SGD, {"dampening": 0.5, "momentum": 0.9}, "SGD with dampening=0.5, for which halfstep has no update"),
        (Adam, {"amsgrad": True}, "Adam with amsgrad=True, whose max_exp_avg_sq halfstep keeps in full only"),
        (Lamb, {}, "Lamb, whose exp_avg and exp_avg_sq halfstep keeps in full only"),
    ],
)
def test_an_optimizer_whose_states_are_kept_in_full_only_is_refused(cls, options, words):
    model = torch.nn.Linear(3, 2)
    optimizer = cls(model.parameters(), lr=0.1, **options)
    told = f"moments='8bit' does not work with {words}.*; use moments=\"full\""
    with pytest.raises(SetupError, match=told):
        halfstep.initialize(model, optimizer, "O0", moments="8bit")
    session = halfstep.initialize(model, [], "O2", low="bf16", moments="8bit")
    with session, pytest.raises(SetupError, match=told):
        session.add_optimizers([optimizer])


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_moments_need_the_sessions_own_step_at_o0_and_patterns_that_match(cls):
    model = torch.nn.Linear(3, 2)
    given = [model, cls(model.parameters(), lr=0.1)]
    with pytest.raises(SetupError, match="works at O0 only with the session's own step"):
        halfstep.initialize(*given, "O0", moments="bf16", stepping="optimizer")
    with pytest.raises(PlanError, match=r"'wieght' of full_moments matches no parameter; did you mean 'weight'"):
        halfstep.initialize(*given, "O2", low="bf16", full_moments=["w*", "wieght"])
    with halfstep.initialize(*given, "O2", low="bf16", moments="bf16", full_moments=["w*"]) as session:
        assert match_parameters(session.plan.full_moments, [model]) == [model.weight]


@pytest.fixture
def forgetful(monkeypatch):
    """The row of AdamW does not know eps and amsgrad."""
    reads = ("lr", "betas", "weight_decay", "maximize", "decoupled_weight_decay")
    monkeypatch.setitem(TABLE, AdamW, replace(TABLE[AdamW], reads=reads))


def test_an_option_that_a_row_forgets_is_left_to_the_optimizers_own_step_and_named(forgetful, caplog):
    def trained(plan, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = AdamW(model.parameters(), lr=0.1, **options)
        session = halfstep.initialize(model, optimizer, plan, low="bf16")
        for scale in (4.0, 1.0, 1.0):
            optimizer.zero_grad()
            session.backward(model(torch.full((1, 3), scale)).square().sum())
            session.step()
        session.close()
        return optimizer.state_dict()["state"][0].keys()

    assert "max_exp_avg_sq" not in trained("O2")
    assert "halfstep has no update" not in caplog.text
    assert "max_exp_avg_sq" in trained("O2", amsgrad=True)
    assert "AdamW with amsgrad=True: its own step runs, on fp32 copies of low weights, and is waited for" in caplog.text
    trained("O3", amsgrad=True)
    assert "on fp32 copies of low weights, rounded to nearest, and is waited for" in caplog.text


def test_an_option_that_only_the_own_step_supports_is_refused_in_a_session_that_has_begun(forgetful):
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16")
    session.backward(model(torch.ones(1, 3)).sum())
    session.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["eps"] = 1e-3
    optimizer.load_state_dict(state)
    session.backward(model(torch.ones(1, 3)).sum())
    before = model.weight.clone()
    with pytest.raises(SessionError, match=r"AdamW now has eps=0.001, which halfstep's update of it does not support"):
        session.step()
    assert torch.equal(model.weight, before)
