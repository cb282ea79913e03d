"""What a session gives to its sinks."""

import io

import pytest
import torch
from rich.console import Console

import halfstep
from halfstep.errors import SetupError
from halfstep.explain.report.live import LiveLine
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import read_log
from halfstep.records import Finding, Recorder, SessionStart
from tests.contracts.cases import Kept, backward_and_step


def open_session(name, low, **options):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, halfstep.initialize(model, opt, name, low=low, **options)


@pytest.mark.parametrize(("name", "low"), [("O0", "bf16"), ("O1", "fp16"), ("O2", "bf16")])
def test_the_loss_of_a_step_is_the_true_sum_of_its_backwards(name, low):
    model, session = open_session(name, low)
    for _ in range(2):
        session.backward(model(torch.tensor([[1.0, 2.0]])).sum())
        assert backward_and_step(session, model(torch.tensor([[0.5, 0.0]])).sum()).loss.item() == 3.5
    record = backward_and_step(session, model(torch.tensor([[4.0, 0.0]])).sum())
    assert record.loss.item() == 4.0
    assert not record.loss.requires_grad


def test_two_fp16_losses_add_up_beyond_the_range_of_fp16():
    model, session = open_session("O2", "fp16", loss_scale=1.0)
    with session.autocast():
        for _ in range(2):
            loss = model(torch.tensor([[40000.0, 0.0]])).half().sum()
            assert loss.dtype == torch.float16
            session.backward(loss)
    assert session.step().loss.item() == 80000.0


def test_a_backward_with_a_direction_of_its_own_has_no_loss():
    model, session = open_session("O0", "bf16")
    session.backward(model(torch.ones(3, 2)), gradient=torch.ones(3, 1))
    assert session.step().loss is None


def test_a_recorder_is_told_what_opens_and_what_it_is_given_and_a_function_is_not():
    kept, steps = Kept(), []
    assert isinstance(kept, Recorder)
    model, session = open_session("O2", "fp16", sinks=[kept, steps.append], emulate=True)
    (start,) = kept.others
    assert start == SessionStart(start.plan, "cpu", emulated=True, modules=("",))
    assert (start.plan["name"], start.plan["low"]) == ("O2", "fp16")
    finding = Finding("note", "code", "place", "evidence", "advice")
    session.tell(finding)
    record = backward_and_step(session, model(torch.ones(1, 2)).sum())
    assert kept.others == [start, finding]
    assert kept.steps == steps == [record]
    with session.trial(session.plan) as trial:  # which is no session of its own to them
        trial.tell(finding)
        assert trial.last_step(0) == session.last_step(0)
    assert kept.others == [start, finding, finding]


def test_log_live_line_and_tensorboard_take_all_that_a_session_gives(tmp_path):
    tensorboard = pytest.importorskip("halfstep.explain.report.tensorboard")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    sinks = [RunLog(tmp_path / "log"), LiveLine(console=console), tensorboard.TensorBoard(tmp_path / "board")]
    assert all(isinstance(sink, Recorder) for sink in sinks)
    model, session = open_session("O2", "bf16", sinks=sinks)
    session.observe(every=1)
    for _ in range(2):
        backward_and_step(session, model(torch.ones(1, 2)).sum())
    session.tell(Finding("note", "code", "place", "evidence", "advice"))
    session.close()
    for sink in sinks:
        sink.close()
    run = read_log(tmp_path / "log")
    assert [values.step for values in run.steps] == [1, 2]
    assert run.observed == (1, 2)
    assert len(run.events) == 1
    assert "step 2" in console.file.getvalue()
    assert any((tmp_path / "board").iterdir())


def test_a_recorder_that_refuses_leaves_the_model_as_it_was():
    class Refuses(Kept):
        def record(self, record):
            raise OSError("no space")

    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = type(model)
    with pytest.raises(OSError, match="no space"):
        halfstep.initialize(model, opt, "O2", low="bf16", sinks=[Refuses()])
    assert type(model) is kind
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("sinks", [[RunLog], ["run.jsonl"], "run.jsonl"])
def test_what_is_no_sink_is_refused(sinks):
    with pytest.raises(SetupError, match=r"expected a list of functions, or objects .* with a StepRecord"):
        open_session("O1", "bf16", sinks=sinks)
