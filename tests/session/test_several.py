"""A session of several models, optimizers and losses: each is seen, and what is said of one is not another's."""

import copy
import logging

import pytest
import torch
from torch import nn

import halfstep
from halfstep import NumericsError
from halfstep.errors import SessionError, SetupError
from halfstep.explain.diagnose import guardian
from halfstep.explain.diagnose.counter import WINDOW
from halfstep.train.probe.probe import LONGEST
from halfstep.train.session.decide import _say


def several(count, on_failure="warn", plan="O1", low="fp16"):
    """A session of models with an optimizer each, and a function that trains one of them by its own loss."""
    models = [nn.Sequential(nn.Linear(16, 4)) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    session = halfstep.initialize(models, optimizers, plan, low=low, on_failure=on_failure)

    def train(index, inputs, factor=1.0):
        optimizers[index].zero_grad()
        session.backward(models[index](inputs).float().sum() * factor, loss_id=index)
        return session.step(optimizers[index])

    return session, models, train


def test_a_loss_is_blamed_at_its_own_scale_after_a_skipped_step_of_another(caplog):
    session, models, train = several(2)
    inputs = torch.ones(4, 16)
    while bool((last := train(1, inputs, factor=100.0)).skipped):  # it settles at 128: 4 * 100 * 128 < 65504
        pass
    assert float(last.scale) == 128.0
    assert bool(train(0, inputs * 1e9).skipped)
    with caplog.at_level(logging.INFO, "halfstep"):
        assert halfstep.blame(session, lambda: models[1](inputs).float().sum() * 100.0, loss_id=1) is None
    assert "loss scale 128" in caplog.text
    assert "does not reproduce" not in caplog.text


def test_a_loss_is_blamed_at_the_scale_of_its_own_skipped_step_after_a_good_one_of_another():
    session, models, train = several(2)
    inputs = torch.ones(4, 16)
    assert bool(train(1, inputs, factor=100.0).skipped)
    for _ in range(3):
        train(0, inputs)
    verdict = halfstep.blame(session, lambda: models[1](inputs).float().sum() * 100.0, loss_id=1)
    assert verdict.kind == "scale too high"
    assert "at loss scale 65536" in verdict.evidence


def test_a_loss_whose_gradients_were_set_apart_is_blamed_at_its_own_scale():
    model = nn.Sequential(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, "O1", low="fp16", on_failure="warn")
    inputs = torch.ones(4, 16)
    for _ in range(12):  # loss 1 comes down to 128, loss 0 stays where it is
        optimizer.zero_grad()
        session.backward(model(inputs).float().sum() * 100.0, loss_id=1)
        session.backward(model(inputs).float().sum() * 1e-3, loss_id=0)
        last = session.step()
    assert session.status().scales == {0: 65536.0, 1: 128.0}
    assert not bool(last.skipped)
    optimizer.zero_grad()
    session.backward(model(inputs).float().sum() * 100.0, loss_id=1)
    session.backward(model(inputs * 1e9).float().sum(), loss_id=0)
    assert bool(session.step().skipped)
    assert halfstep.blame(session, lambda: model(inputs).float().sum() * 100.0, loss_id=1) is None


@pytest.mark.parametrize(("count", "bad"), [(2, 0), (2, 1), (3, 1), (8, 0), (8, 7), (16, 3)])
@pytest.mark.slow_but("2-0", "2-1", "3-1", "8-7")
def test_of_several_optimizers_the_one_whose_steps_are_all_skipped_is_noticed(count, bad):
    session, _, train = several(count, "raise")
    good, failing = torch.full((4, 16), 1e-3), torch.full((4, 16), torch.nan)

    def training():
        for _ in range(2 * WINDOW):
            for index in range(count):
                train(index, failing if index == bad else good)

    with pytest.raises(NumericsError) as caught:
        training()
    assert (caught.value.verdict.kind, caught.value.verdict.module) == ("input data", "0")
    assert f"in model {bad} (the first is 0)" in caught.value.verdict.evidence
    last_of_run = (WINDOW - 1) * count + bad + 1
    looked_at = -(-last_of_run // WINDOW) * WINDOW + 1  # after the window that it is in
    assert session.status().steps == looked_at + 1 + (bad - looked_at) % count


def test_an_optimizer_that_steps_after_many_steps_of_another_is_noticed():
    _session, _, train = several(2, "raise", low="bf16")
    good, failing = torch.ones(4, 16), torch.full((4, 16), torch.nan)

    def training():
        for _ in range(2 * WINDOW):
            for _ in range(5):
                train(0, good)
            train(1, failing)

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.module == "0"
    assert "in model 1 (the first is 0)" in caught.value.verdict.evidence


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_steps_after_backward_passes_of_all_are_explained(order):
    models = [nn.Sequential(nn.Linear(16, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    session = halfstep.initialize(models, optimizers, "O1", low="bf16")
    batches = [torch.full((4, 16), torch.nan), torch.ones(4, 16)]

    def training():
        for _ in range(2 * WINDOW):
            for index, model in enumerate(models):
                optimizers[index].zero_grad()
                session.backward(model(batches[index]).float().sum(), loss_id=index)
            for index in order:
                session.step(optimizers[index])

    with pytest.raises(NumericsError) as caught:
        training()
    assert (caught.value.verdict.kind, caught.value.verdict.module) == ("input data", "0")
    assert "in model 0 (the first is 0)" in caught.value.verdict.evidence


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_losses_of_one_optimizer_the_one_that_fails_is_noticed(bad):
    model = nn.Sequential(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, "O1", low="fp16")
    good, failing = torch.full((4, 16), 1e-3), torch.full((4, 16), torch.nan)

    def training():
        for step in range(4 * WINDOW):
            loss_id = step % 2
            optimizer.zero_grad()
            batch = failing if loss_id == bad else good
            session.backward(model(batch).float().sum(), loss_id=loss_id)
            session.step()

    with pytest.raises(NumericsError) as caught:
        training()
    assert caught.value.verdict.kind == "input data"


def test_what_others_do_is_forgotten_while_a_step_is_waited_for(monkeypatch):
    monkeypatch.setattr(guardian, "_OTHERS", 3)
    session, _, train = several(2, "raise", low="bf16")
    inputs = torch.ones(4, 16)
    for _ in range(WINDOW + 1):
        train(0, inputs * torch.nan)
    noted = []
    for _ in range(9):
        train(1, inputs)
        noted.append(len(session.watchers[0]._armed.recorder.notes))
    assert 0 < noted[0] < noted[1] < noted[2]
    assert noted[3] == noted[7] == 0
    with pytest.raises(NumericsError):
        train(0, inputs * torch.nan)


def observed(order, every, tensors="weight_grad"):
    """The steps and models of what a probe saw where optimizers step in a given order."""
    session, _, train = several(1 + max(order), low="bf16")
    probe = session.observe(every=every, tensors=tensors)
    for index in order:
        train(index, torch.ones(4, 16))
    seen = sorted({(each.step, each.kind, int(each.module[0])) for each in probe.flush()})
    session.close()
    return [(step, model) for step, kind, model in seen if kind == "weight_grad"], seen


@pytest.mark.parametrize("every", [4, 5])
def test_a_probe_sees_each_of_several_optimizers(every):
    seen, _ = observed(([0, 1] * 6)[:11], every)
    looks = [1, every, 2 * every]
    assert seen == [(step + i, (step + i - 1) % 2) for step in looks for i in (0, 1)]


def test_a_probe_sees_the_optimizer_that_steps_rarely():
    seen, _ = observed([0, 0, 0, 0, 0, 1] * 4, 12)
    assert [model for step, model in seen if step < 12] == [0] * 5 + [1]
    assert [(step, model) for step, model in seen if 12 <= step < 18] == [(12, 1), (13, 0)]


def test_a_probe_does_not_wait_for_an_optimizer_that_never_steps():
    session, _, train = several(2, low="bf16")
    probe = session.observe(every=50, tensors="weight_grad")
    for _ in range(2 * LONGEST):
        train(0, torch.ones(4, 16))
    assert {each.step for each in probe.flush()} == set(range(1, LONGEST + 1))


def test_weights_are_read_once_a_look_and_no_notice_is_given(caplog):
    _, seen = observed([0, 1] * 3, 50, ("weight", "activation", "weight_grad"))
    assert [each for each in seen if each[1] == "weight"] == [(1, "weight", 0), (1, "weight", 1)]
    assert [each for each in seen if each[1] == "activation"] == [(1, "activation", 0), (2, "activation", 1)]
    assert caplog.text == ""


def test_an_optimizer_that_comes_while_gradients_wait_is_refused_and_later_steps():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    session = halfstep.initialize(model, first, "O1", low="fp16", loss_scale=128.0)
    session.backward(model(torch.ones(2, 4)).mean())
    before = model[1].weight.detach().clone()
    with pytest.raises(SessionError, match="add optimizers after the step"):
        session.add_optimizers([second])
    session.step()
    assert torch.equal(model[1].weight, before)
    first.zero_grad()
    second.zero_grad()
    session.add_optimizers([second])
    session.backward(model(torch.ones(2, 4)).mean())
    session.step()
    assert 0 < (model[1].weight - before).abs().max() < 1  # of true gradients, not of scaled ones


def test_optimizers_that_cannot_all_be_added_leave_none_behind():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    session = halfstep.initialize(model, None, "O1", low="bf16")
    made, make = [], session._make_part

    def fail_second(optimizer, undo):
        made.append(optimizer)
        if len(made) == 2:
            raise RuntimeError("planted")
        return make(optimizer, undo)

    session._make_part = fail_second
    with pytest.raises(RuntimeError, match="planted"):
        session.add_optimizers([first, second])
    assert session.optimizers == ()
    assert "step" not in vars(first)


def test_an_optimizer_that_comes_after_the_wrapper_steps_with_the_other_processes(process_group):
    model = torch.nn.Linear(4, 1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    session = halfstep.initialize(wrapped, None, "O1", low="bf16")
    session.add_optimizers([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert session.runtime.summing()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_sharded_model_that_holds_whole_weights_after_an_evaluation_is_taken_as_it_is(level, process_group):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    policy = halfstep.fsdp_policy(level, low="bf16")
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 4))
    session = halfstep.initialize(model, optimizer, level, low="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    session.backward(model(torch.ones(2, 4)).square().mean())
    session.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(halfstep.errors.SetupError, match="sharded over processes"):
        halfstep.check(session, lambda: model(torch.ones(2, 4)).square().mean())


def test_halfsteps_own_optimizer_of_whole_weights_is_refused_for_shards_when_it_comes_later(process_group):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mp_policy=halfstep.fsdp_policy("O1", low="bf16"))
    session = halfstep.initialize(model, None, "O1", low="bf16")
    with pytest.raises(halfstep.errors.SetupError, match="Lamb needs the norms of whole weights"):
        session.add_optimizers([halfstep.Lamb(model.parameters())])


class WithoutRow(torch.optim.RMSprop):
    """Of a class that halfstep has no update for."""


@pytest.mark.parametrize("late", [True, False])
def test_an_optimizer_that_steps_itself_resumes_from_a_session_that_got_it_early_or_late(late, caplog):
    _say.cache_clear()

    def opened(late):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = WithoutRow(model.parameters(), lr=0.01)
        session = halfstep.initialize(model, None if late else optimizer, "O2", low="bf16")
        if late:
            session.add_optimizers([optimizer])
        return model, optimizer, session

    def train(model, optimizer, session, steps):
        for step in steps:
            optimizer.zero_grad()
            session.backward(model(torch.full((2, 8), float(step))).square().mean())
            session.step()

    model, optimizer, session = opened(late)
    assert caplog.text.count("no update of its own for WithoutRow") == 1
    train(model, optimizer, session, range(1, 5))
    states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, session)]
    train(model, optimizer, session, range(5, 9))
    resumed = opened(not late)
    assert {session.plan.master, resumed[2].plan.master} == {"copy", "split"}
    for each, state in zip(resumed, states, strict=True):
        each.load_state_dict(state)
    train(*resumed, range(5, 9))
    assert torch.equal(resumed[0].state_dict()["weight"], model.state_dict()["weight"])


class Tied(nn.Module):
    """A model of its own whose weight is a parameter of another one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.own = nn.Linear(8, 8)

    def forward(self, x):
        return self.own(nn.functional.linear(x, self.weight))


@pytest.mark.parametrize("second", ["O0", "O1", "O2"])
def test_a_parameter_that_an_open_session_stores_low_is_refused_in_another_one(second):
    first = nn.Linear(8, 8)
    other = Tied(first.weight)
    value = first.weight.detach().clone()
    session = halfstep.initialize(first, torch.optim.SGD(first.parameters(), lr=0.1), "O2", low="bf16")
    with session, pytest.raises(SetupError, match="weight would be in two open sessions"):
        halfstep.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), second, low="bf16")
    assert torch.equal(first.weight, value)
    halfstep.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), second, low="bf16").close()


def test_a_parameter_that_a_second_session_would_store_low_is_refused():
    first = nn.Linear(8, 8)
    other = Tied(first.weight)
    with halfstep.initialize(first, torch.optim.SGD([first.bias], lr=0.1), "O2", low="bf16"):
        with pytest.raises(SetupError, match="weight would be in two open sessions"):
            halfstep.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), "O2", low="bf16")
        with halfstep.initialize(other, torch.optim.SGD(other.own.parameters(), lr=0.1), "O2", low="bf16"):
            assert first.weight.dtype is torch.float32
