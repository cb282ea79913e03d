"""The life of models and optimizers under `halfstep run`: what comes, goes and is copied trains and frees as in Python.

Each test is a cell of a table. Its rows are what happens to a model or its optimizer (made, called, joined by an
optimizer, stepped, copied, pickled, swapped, dropped), its columns what happens next.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from halfstep.train.session.session import Session
from tests.adapters.under_run import under_run

SETTINGS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")]
SEVERAL = [("O1", "fp16"), ("O2", "bf16")]
X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Probing(nn.Module):
    """Calls itself in its constructor, as detectors do that ask for their strides."""

    def __init__(self, probe=True):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        if probe:
            self.width = self(torch.zeros(1, 4)).shape[1]

    def forward(self, x):
        return self.last(self.first(x))


class Trainer:
    """Holds a model and its optimizer, in the order that it is told."""

    def __init__(self, order="model first", optimizer=Adam):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        if order == "model first":
            self.model = model
        if order == "parameters first":
            self.kept = list(model.parameters())
        self.optimizer = optimizer(model.parameters(), lr=0.05)
        self.model = model

    def fit(self, steps=1, scale=1.0):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(X) * scale - X.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def values(self):
        return [value.clone() for value in self.model.state_dict().values()]


def moved(before, trainer):
    return max((a - b).abs().max().item() for a, b in zip(before, trainer.values(), strict=True))


def sessions():
    """Returns the sessions in which modules of this process are; what came before the test is frozen."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Session)]  # others' proxies may be dead
    return [each for each in found if not each.closed]


# called -> joined


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_called_then_joined_steps_are_counted_and_skipped(level, low, probe):
    with under_run(level, low) as run:
        model = Probing(probe)
        optimizer = Adam(model.parameters(), lr=0.01)
        for step in range(4):
            for _ in range(2):
                (model(X).square().mean() * (float("inf") if step == 3 else 1.0)).backward()
            before = [value.clone() for value in model.state_dict().values()]
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, before, model.state_dict().values()))
        assert len(sessions()) == 1
    assert run.trained.steps == 4
    assert run.trained.skipped >= 1


def test_passed_backward_in_its_constructor_then_joined_it_is_trained_at_o2():
    with under_run("O2", "bf16") as run:
        model = Probing()
        for _ in range(2):  # to try the model
            model(X).sum().backward()
            model.zero_grad()
        optimizer = Adam(model.parameters())
        model(X).mean().backward()
        optimizer.step()
        assert model.last.weight.dtype is torch.bfloat16
    assert run.trained.steps == 1


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_called_then_joined_before_its_backward_pass_the_first_step_is_the_sessions(low):
    with under_run("O1", low) as run:
        model = nn.Linear(4, 1)
        loss = model(X).sum() * float("inf")
        optimizer = Adam(model.parameters())
        before = model.weight.detach().clone()
        loss.backward()
        optimizer.step()
        assert torch.equal(model.weight, before)
    assert (run.trained.steps, run.trained.skipped) == (1, 1)


def test_called_and_stepped_by_hand_then_joined_goes_on_with_the_counts():
    with under_run("O1", "fp16") as run:
        model = nn.Linear(4, 1)
        model(X).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X).mean().backward()
        optimizer.step()
    assert run.trained.steps == 2
    assert run.trained.memory["gradients"] > 0


@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_called_while_another_trains_then_joined(level, low):
    with under_run(level, low) as run:
        first, second = Trainer(), nn.Linear(4, 1)
        second(X)
        first.fit()
        second(X)
        optimizer = SGD(second.parameters(), lr=0.1)
        second(X).mean().backward()
        optimizer.step()
        first.fit()
        assert len(sessions()) == 1
    assert run.trained.steps == 3


def test_called_without_any_optimizer_at_all_models_are_freed():
    with under_run("O1", "bf16"):
        models = []
        for _ in range(4):
            model = nn.Linear(4, 1)
            model(X)
            models.append(weakref.ref(model))
        del model
        gc.collect()
        assert sum(model() is not None for model in models) <= 1


def test_called_for_a_gradient_after_its_optimizer_is_gone_it_is_not_trained_by_hand():
    with under_run("O2", "bf16") as run:
        probing = Probing()
        optimizer = SGD(probing.parameters(), lr=0.1)
        probing(X).mean().backward()
        optimizer.step()
        del optimizer
        x = X.clone().requires_grad_()
        probing(x).mean().backward()
        assert x.grad.abs().sum() > 0
    assert run.trained.steps == 1


# copied, pickled -> stepped

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}
ORDERS = ["model first", "optimizer first", "parameters first"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("level", "low"), SETTINGS)
@pytest.mark.slow_but("O1-fp16-pickle-optimizer first", "O2-bf16-deepcopy-parameters first")
def test_a_copy_of_model_and_optimizer_trains_as_the_original_does(level, low, how, order):
    with under_run(level, low) as run:
        trainer = Trainer(order)
        trainer.fit(2)
        twin = COPIES[how](trainer)
        assert all(map(torch.equal, twin.values(), trainer.values()))
        assert [p.dtype for group in twin.optimizer.param_groups for p in group["params"]] == [torch.float32] * 4
        mine, theirs = trainer.fit(3), twin.fit(3)
        assert len(sessions()) == 1
        assert mine == theirs
        assert all(map(torch.equal, twin.values(), trainer.values()))
    assert run.trained.steps == 8


@pytest.mark.parametrize("optimizer", [Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_whose_original_is_gone_trains_on(how, optimizer):
    with under_run("O2", "bf16") as run:
        trainer = Trainer(optimizer=optimizer)
        trainer.fit(2)
        trainer = COPIES[how](trainer)
        gc.collect()
        before = trainer.values()
        trainer.fit(1)
        assert moved(before, trainer) > 1e-3
    assert run.trained.steps == 3


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_skips_a_step_whose_gradients_overflow(how):
    with under_run("O2", "fp16"):
        trainer = Trainer()
        trainer.fit()
        twin = COPIES[how](trainer)
        before = twin.values()
        twin.fit(1, scale=1e30)
        assert moved(before, twin) == 0


def test_copies_that_are_only_kept_stay_out_of_the_session_and_are_fp32():
    with under_run("O2", "bf16"):
        trainer = Trainer()
        trainer.fit()
        best = copy.deepcopy(trainer)
        trainer.fit(2)
        (session,) = sessions()
        assert len(session.optimizers) == 1
        assert {p.dtype for p in best.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_a_copy_of_a_model_alone_gets_another_optimizer(level, low):
    """As Reptile does: each task trains a copy, whose weights move those of the model."""
    with under_run(level, low) as run:
        model, refs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), []
        outer = SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            inner = copy.deepcopy(model)
            optimizer = SGD(inner.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                inner(X).square().mean().backward()
                optimizer.step()
            for p, q in zip(model.parameters(), inner.parameters(), strict=True):
                p.data.add_(q.data - p.data, alpha=0.5)
            refs.append(weakref.ref(inner))
        del inner, optimizer
        gc.collect()
        assert len(sessions()) == 1
        assert outer.param_groups[0]["lr"] == 0.5
        assert sum(ref() is not None for ref in refs) <= 1
    assert run.trained.steps >= 6


# stepped -> dropped


@pytest.mark.parametrize("dropped", ["both", "optimizer", "model first"])
@pytest.mark.parametrize(("level", "low"), [("O0", "bf16"), *SEVERAL])
def test_what_a_script_drops_is_freed_and_the_session_closes(level, low, dropped):
    with under_run(level, low) as run:
        trainer = Trainer()
        trainer.fit(2)
        before = trainer.values()
        model, optimizer = weakref.ref(trainer.model), weakref.ref(trainer.optimizer)
        gc.disable()
        try:
            if dropped == "optimizer":
                del trainer.optimizer
                assert optimizer() is None
                assert sessions() == []
                assert type(trainer.model) is nn.Sequential
                assert all(map(torch.equal, before, trainer.model.parameters()))
            elif dropped == "model first":
                del trainer.model
                del trainer.optimizer
            else:
                del trainer
            assert optimizer() is None
            assert (model() is None) == (dropped != "optimizer")
        finally:
            gc.enable()
    assert run.trained.steps == 2
    assert run.trained.memory["optimizer"] > 0


class Agent(nn.Module):
    """Holds its own optimizer, and with `cycle` itself."""

    def __init__(self, cycle):
        super().__init__()
        self.body = nn.Linear(4, 1)
        self.optimizer = SGD(self.parameters(), lr=0.1)
        self.itself = [self] if cycle else []

    def fit(self):
        self.optimizer.zero_grad()
        self.body(X).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_one_after_the_other_is_freed_where_a_model_holds_its_optimizer(level, low, cycle):
    with under_run(level, low) as run:
        refs = []
        for _ in range(5):
            agent = Agent(cycle)
            agent.fit()
            refs.append(weakref.ref(agent))
        del agent
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 2
    assert run.trained.steps == 5


@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_dropped_beside_another_that_goes_on(level, low):
    with under_run(level, low) as run:
        one, other = Trainer(), Trainer()
        one.fit()
        other.fit()
        model, optimizer = weakref.ref(one.model), weakref.ref(one.optimizer)
        del one
        assert optimizer() is None
        other.fit()
        other.fit()
        gc.collect()
        assert model() is None
        (session,) = sessions()
        assert len(session.optimizers) == 1
    assert run.trained.steps == 4


def test_dropped_before_it_was_ever_called():
    with under_run("O2", "bf16"):
        trainer = Trainer()
        refs = [weakref.ref(trainer.model), weakref.ref(trainer.optimizer), weakref.ref(trainer.model[0].weight)]
        gc.disable()
        try:
            del trainer
            assert [ref() for ref in refs[:2]] == [None, None]
        finally:
            gc.enable()


def test_dropped_with_its_scheduler():
    with under_run("O2", "bf16") as run:
        trainer = Trainer()
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
        trainer.fit()
        trainer.scheduler.step()
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
        optimizer = weakref.ref(trainer.optimizer)
        del trainer
        gc.collect()
        assert optimizer() is None
    assert run.trained.steps == 1


# stepped -> swapped


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_swapped_for_another_optimizer_the_model_goes_on(level, low, kept):
    with under_run(level, low) as run:
        trainer = Trainer()
        trainer.fit(2)
        old = [trainer.optimizer] if kept else []
        trainer.optimizer = SGD(trainer.model.parameters(), lr=0.1)
        before = trainer.values()
        trainer.fit(2)
        assert moved(before, trainer) > 1e-3
        (session,) = sessions()
        assert [type(optimizer) for optimizer in session.optimizers] == [SGD]
        del old
    assert run.trained.steps == 4


@pytest.mark.parametrize(("level", "low"), SEVERAL)
def test_swapped_for_another_model_each_is_trained(level, low):
    with under_run(level, low):
        trainer = Trainer()
        trainer.fit()
        first = trainer.model
        trainer.model = nn.Linear(4, 1)
        trainer.optimizer.add_param_group({"params": list(trainer.model.parameters())})
        before = trainer.values()
        trainer.fit()
        assert moved(before, trainer) > 1e-3
        first(X)


@pytest.mark.parametrize("kept", [True, False])
def test_an_optimizer_state_is_loaded_exactly_into_the_next(kept):
    with under_run("O2", "bf16") as run:
        trainer = Trainer()
        trainer.fit(2)
        old, state = [trainer.optimizer] * kept, trainer.optimizer.state_dict()
        expected = copy.deepcopy(state["state"][0])
        trainer.optimizer = Adam(trainer.model.parameters(), lr=0.05)
        trainer.optimizer.load_state_dict(state)
        taken = trainer.optimizer.state_dict()["state"][0]
        assert all(torch.equal(taken[name], value) for name, value in expected.items())
        trainer.fit()
        del old
        assert trainer.optimizer.state_dict()["state"][0]["step"] == 3
    assert run.trained.steps == 3


def test_a_task_of_reptile_collects_no_garbage(monkeypatch):
    """A full collection takes as long as a thousand steps of a small model."""
    with under_run("O2", "bf16") as run:
        model = nn.Linear(4, 1)
        outer = SGD(model.parameters(), lr=0.5)
        collected = []
        monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
        for _ in range(5):
            inner = copy.deepcopy(model)
            optimizer = SGD(inner.parameters(), lr=0.1)
            inner(X).mean().backward()
            optimizer.step()
        assert collected == []
        assert len(outer.param_groups) == 1
        monkeypatch.undo()
    assert run.trained.steps == 5


@pytest.mark.filterwarnings("error")
def test_a_module_that_is_called_before_any_optimizer_may_share_its_parameters_with_others():
    with under_run("O1", "bf16"):
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1))  # calls a module that has the weight twice
        assert layer(X).shape == (8, 1)
