"""The step that the guardian records: which it is, what ends it early, and that it disturbs nothing."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import halfstep
from halfstep import FP16, Scaling
from halfstep.explain.diagnose import guardian
from halfstep.explain.diagnose.counter import WINDOW
from halfstep.explain.tape.absorbed import OverflowTrail
from halfstep.explain.tape.recorder import OpRecorder
from halfstep.train.cast.products import Emulation
from tests.contracts.cases import differing, mixed_plans, overflowing, snapshot, start, train
from tests.diagnose.closures import alarm, closure_of, cross_entropy, run, session_on, train_on
from tests.diagnose.faults.hosts import Cnn, images
from tests.diagnose.faults.plants import Gain, LogOfZero
from tests.observe.test_probe import Counted
from tests.scale.sync import NoSync


def waiting(plant=LogOfZero, low="bf16", **options):
    """A session whose next step is recorded, its optimizer and its model."""
    model = Cnn(plant())
    session, optimizer = session_on(model, "O2", low, **options)
    run(session, optimizer, model, WINDOW + 1)
    return session, optimizer, model


def interrupted(**options):
    """A session whose recorded step was left after its forward."""
    session, optimizer, model = waiting(**options)
    model(images())
    assert recording()
    return session, optimizer, model


def recording():
    return any(isinstance(mode, guardian.Watching) for mode in _get_current_dispatch_mode_stack())


@mixed_plans
@pytest.mark.slow_but("O1-bf16", "O2-fp16")
def test_watching_reads_nothing_on_the_host(name, low):
    model, optimizer, session = start(name, low)
    with NoSync():
        train(session, model, optimizer, range(2 * WINDOW + 2))


@mixed_plans
@pytest.mark.slow_but("O2-fp16")
def test_watching_runs_no_operation(name, low):
    counts = []
    for watched in (False, True):
        model, optimizer, session = start(name, low)
        if not watched:
            session.watchers.clear()
        modes = [Counted() for _ in range(3 * WINDOW)]
        for number, mode in enumerate(modes):
            with mode:
                train(session, model, optimizer, [number], poison=[2])
        counts.append([mode.calls for mode in modes])
        session.close()
    assert counts[0] == counts[1]


@mixed_plans
@pytest.mark.slow_but("O1-bf16", "O2-fp16")
def test_a_recorded_step_that_is_fine_trains_as_any_other(name, low):
    ends = []
    for poison in ((), range(WINDOW)):
        model, optimizer, session = start(name, low, torch.optim.SGD, loss_scale=1.0 if low == "fp16" else None)
        train(session, model, optimizer, range(WINDOW), poison=poison)
        if not poison:
            model, optimizer, session = start(name, low, torch.optim.SGD, loss_scale=1.0 if low == "fp16" else None)
        train(session, model, optimizer, range(20, 23))
        ends.append({k: v for k, v in snapshot(model, optimizer).items() if "seen" not in k})
        session.close()
    assert differing(*ends) == []


def test_a_forward_that_raises_does_not_end_the_recording():
    session, optimizer, model = waiting()
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 5, 6, 6))
    alarm(run, session, optimizer, model, 1)
    assert not recording()


def test_evaluation_before_the_recorded_step_is_not_recorded():
    session, optimizer, model = waiting(Gain, "fp16")
    with torch.inference_mode():
        model.eval()(images())
    model.train()
    alarm(run, session, optimizer, model, 1)


def test_a_mode_of_the_callers_around_each_step_keeps_its_place():
    model = Cnn(Gain())
    session, optimizer = session_on(model)
    for _ in range(3 * WINDOW):
        with Emulation(FP16):
            run(session, optimizer, model, 1)
    assert not recording()


def test_close_in_the_middle_of_a_recorded_step_takes_the_recorder_off():
    session, *_ = interrupted()
    session.close()
    assert not recording()


def test_blame_in_place_of_a_recorded_step_ends_the_recording():
    session, optimizer, model = waiting(Gain, "fp16")
    assert halfstep.blame(session, closure_of(model)).module == "plant"
    assert not recording()
    run(session, optimizer, model, 1)


def test_no_more_than_a_window_of_fine_steps_is_recorded():
    model, recorded = nn.Sequential(nn.Linear(8, 4)), []
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=1.0, min=1.0))

    def loss():
        recorded.append(recording())
        found = cross_entropy(model, torch.full((8, 8), 0.5))
        return overflowing(found) if len(recorded) == 3 else found

    train_on(loss, session, optimizer)
    assert [step for step, on in enumerate(recorded) if on] == list(range(WINDOW + 1, 2 * WINDOW + 1))


def test_evaluation_after_an_interrupted_step_ends_the_recording():
    session, optimizer, model = interrupted(emulate=False)
    recorder = _get_current_dispatch_mode_stack()[0]
    a_forward = len(recorder.notes)
    with torch.no_grad():
        for _ in range(20):
            model(images())
    assert not recording()
    assert len(recorder.notes) < 6 * a_forward
    alarm(run, session, optimizer, model, 8 * WINDOW)  # it is met later


def test_forwards_that_no_backward_pass_follows_end_the_recording(monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 8 * guardian._TRAINING)
    *_, model = interrupted()
    for _ in range(8):
        model(images())
    assert not recording()


def test_many_backward_passes_of_one_step_are_recorded(monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 8 * guardian._TRAINING)
    session, _, model = waiting()
    for _ in range(10):
        session.backward(cross_entropy(model, images()))
    alarm(session.step)


def test_other_work_after_an_interrupted_step_is_not_recorded_for_ever(monkeypatch):
    monkeypatch.setattr(guardian, "_OPERATIONS", 1000)
    _kept = interrupted()
    recorder = _get_current_dispatch_mode_stack()[0]
    number = torch.zeros(())
    for _ in range(2000):
        number = number + 1
    assert float(number) == 2000
    assert len(recorder.notes) == 0


def test_a_session_that_nobody_closes_takes_its_recorder_along():
    interrupted()
    gc.collect()
    assert not recording()


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_callers_over_the_recorder_stays_where_it_is():
    session, *_ = waiting()
    with Plain() as mode:
        session.close()
        assert _get_current_dispatch_mode_stack() == [mode]
    assert not recording()


def fail(*args):
    raise RuntimeError("in the recorder")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(OpRecorder, "_begin"), (OpRecorder, "_look"), (OverflowTrail, "_run"), (guardian, "find_origin")],
)
def test_a_recording_or_explanation_that_fails_does_not_fail_the_step(owner, name, monkeypatch, caplog):
    monkeypatch.setattr(owner, name, fail)
    model = Cnn(LogOfZero())
    assert all(bool(record.skipped) for record in run(*session_on(model, "O2", "bf16"), model, WINDOW + 2))
    assert "could not be recorded" in caplog.text


def test_what_ran_where_it_cannot_be_seen_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(guardian, "find_origin", lambda *args: None)
    model = Cnn(LogOfZero())
    run(*session_on(model, "O2", "bf16"), model, 4 * WINDOW)
    assert caplog.text.count("could not be recorded") == 1


def rollouts(before, steps):
    """Steps whose loss is not finite, each after a rollout: what `before` does with the model and its inputs."""
    model, inputs = nn.Sequential(nn.Linear(4, 8), LogOfZero(), nn.Linear(8, 4)), 4 * torch.randn(8, 4)

    def loss():
        before(model, inputs)
        return cross_entropy(model, inputs)

    train_on(loss, *session_on(model, "O2", "bf16"), steps)


def with_gradients(count):
    return lambda model, inputs: [model(inputs) for _ in range(count)]


def without_gradients(count):
    def play(model, inputs):
        with torch.no_grad():
            return [model(inputs) for _ in range(count)]

    return play


def mixed(count):
    return lambda model, inputs: [model(inputs), without_gradients(count)(model, inputs)]


@pytest.mark.slow_but("16_1")
@pytest.mark.parametrize(
    ("before", "steps"),
    [
        (with_gradients(40), 2 * WINDOW),
        pytest.param(with_gradients(100), 4 * WINDOW, marks=pytest.mark.slow),
        (without_gradients(300), 2 * WINDOW),
        (mixed(3), 2 * WINDOW),
        pytest.param(mixed(10), 4 * WINDOW, marks=pytest.mark.slow),
    ],
)
def test_a_step_after_a_rollout_is_explained_in_the_end(before, steps):
    verdict = alarm(rollouts, before, steps).verdict
    assert (verdict.module, verdict.operator) == ("1", "log")


@pytest.mark.parametrize("before", [with_gradients(5), mixed(1), without_gradients(70)])
@pytest.mark.slow_but("lambda")
def test_patience_grows_until_it_is_enough(before, monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 8)
    alarm(rollouts, before, 12 * WINDOW)


def test_a_step_of_many_forwards_that_its_loss_is_made_of_is_explained(monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 8 * guardian._TRAINING)
    model, inputs = nn.Linear(4, 4), torch.randn(2, 4)

    def loss():
        return sum(model(inputs).sum() for _ in range(25)).sub(torch.inf)

    assert alarm(train_on, loss, *session_on(model, "O1", "bf16")).verdict.operator == "sub"


def test_a_step_that_is_too_long_to_be_recorded_is_said_to_be_once_and_few_are_recorded(monkeypatch, caplog):
    monkeypatch.setattr(guardian, "_OPERATIONS", 20)
    recorded = []

    def before(model, inputs):
        recorded.append(recording())
        with_gradients(8)(model, inputs)

    rollouts(before, 16 * WINDOW)
    assert 1 <= sum(recorded) <= 4  # the pauses between them grow
    assert caplog.text.count("a step has too many operations") == 1
    assert "halfstep.blame(session, closure)" in caplog.text


def test_too_long_an_evaluation_ends_the_recording_before_it_began(monkeypatch):
    monkeypatch.setattr(guardian, "_PATIENCE", 50)
    _session, _, model = waiting()
    without_gradients(50)(model, images())
    assert recording()
    without_gradients(1)(model, images())
    assert not recording()


def test_an_optimizer_that_steps_no_more_is_not_waited_for_for_ever():
    models = [nn.Linear(16, 4), nn.Linear(16, 4)]
    first, then = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in models)
    session = halfstep.initialize(models, [first, then], "O2", low="bf16")
    inputs = torch.randn(4, 16)

    def step(index, optimizer, inputs):
        optimizer.zero_grad()
        session.backward(models[index](inputs).mean(), loss_id=index)
        session.step(optimizer)
        return recording()

    assert [step(0, first, inputs * torch.nan) for _ in range(WINDOW + 1)][-1]  # its next step would be recorded
    assert 40 < sum(step(1, then, inputs) for _ in range(200)) < 80


def test_of_two_sessions_that_wait_at_a_time_each_sees_its_own_step():
    for session, optimizer, model in [waiting(), waiting()]:
        alarm(run, session, optimizer, model, 1)
        session.close()
    assert not recording()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, num_layers=2), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_evaluation_may_come_while_a_step_is_waited_for(low):
    model, inputs = Reads(), torch.randn(3, 2, 8)
    session, optimizer = session_on(model, "O1", low, loss_scale=1.0)
    with torch.inference_mode():
        expected = model(inputs)
    train_on(lambda: model(inputs * torch.nan).mean(), session, optimizer, WINDOW + 1)
    assert recording()
    with torch.inference_mode():  # where an LSTM comes to the recorder whole, and its parts count on autocast
        assert torch.equal(model(inputs), expected)
