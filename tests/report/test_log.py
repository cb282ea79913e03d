"""The log of a run: what is written comes back, also from a process that was killed."""

import contextlib
import errno
import io
import json
import math
import os
import signal
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep
import halfstep.explain.report.log
from halfstep.errors import LogError
from halfstep.explain.report.lines import Event, decode, encode
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import read_log
from halfstep.later import AsyncReader
from halfstep.records import Finding, Observation, OpCall, StepRecord, StepValues, Verdict
from tests import forks
from tests.contracts.cases import backward_and_step
from tests.report import logs
from tests.report.logs import step
from tests.scale.sync import NoSync, no_cuda_sync

INF, NAN = math.inf, math.nan


def observation(number, module="head", *, bins=None, **stats):
    exponents = [0] * 256
    for bin_, count in (bins or {}).items():
        exponents[bin_] = count
    counted = logs.counted(exponents, count=sum(exponents) + stats.get("zeros", 0), **stats)
    return Observation(number, module, "weight_grad", "weight", "fp16", 8.0, counted)


def write(path, *records):
    logs.write(path, records)


def written(path, *records):
    """The run that is read after records were written."""
    write(path, *records)
    return read_log(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def numbers(run):
    return [values.step for values in run.steps]


def train(path, steps, name="O2", low="bf16"):
    """Trains a small model with a log; returns session and log."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    log = RunLog(path)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low, sinks=[log])
    for _ in range(steps):
        model.zero_grad()
        backward_and_step(session, model(torch.ones(1, 4)).square().sum())
    return session, log


def test_a_session_writes_plan_machine_and_each_step(path):
    _, log = train(path, 3)
    log.close()
    run = read_log(path)
    assert run.plan["name"] == "O2"
    assert isinstance(run.emulated, bool)
    assert run.machine.torch == torch.__version__
    assert numbers(run) == [1, 2, 3]
    assert [values.scale for values in run.steps] == [1.0, 1.0, 1.0]
    assert run.steps[0].loss > run.steps[2].loss > 0
    assert run.steps[0].grad_norm > 0
    (process,) = run.processes
    assert process.start <= run.steps[0].time <= run.steps[2].time <= process.end
    assert process.halfstep == halfstep.__version__
    assert [note for note in run.notes if "tensor" not in note] == []


def test_lines_are_json_without_nan():
    line = encode(StepValues(1, 2.5, True, 1.0, INF, NAN))
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found == {
        "type": "step", "step": 1, "time": 2.5, "skipped": True, "scale": 1.0, "grad_norm": "inf", "loss": "nan",
        "bad_loss": None,
    }  # fmt: skip


def test_an_observation_is_written_without_the_empty_ends(tmp_path):
    line = json.loads(encode(observation(1, bins={100: 2, 102: 1})))
    assert (line["first"], line["exponents"]) == (100, [2, 0, 1])
    empty = json.loads(encode(observation(1)))
    assert (empty["first"], empty["exponents"]) == (0, [])


OLD = b"""\
{"type":"start","schema":2,"time":1790000000.5,"halfstep":"0.1.0","torch":"2.13.0"}
{"type":"step","step":1,"time":1790000001.25,"skipped":true,"scale":65536.0,"grad_norm":"inf","loss":"nan"}
{"type":"step","step":2,"time":1790000002.25,"skipped":false,"scale":32768.0,"grad_norm":null,"loss":2.5}
{"type":"observation","step":2,"module":"head","kind":"weight_grad","name":"weight","format":"fp16","scale":8.0,\
"sampled":false,"count":5,"zeros":2,"negatives":1,"infinities":0,"nans":0,"total":1.5,"squares":"inf","amax":4.0,\
"first":126,"exponents":[1,0,2]}
{"type":"verdict","after":2,"module":"net","operator":"mul","phase":"forward","kind":"overflow","where":null,\
"cure":[{"edit":"rule","pattern":"net","policy":"full","buffers":"keep","input":"policy"},\
{"edit":"scale","kind":"dynamic","init":32768.0},{"edit":"op_change","list":"deny","op":"exp"}],\
"evidence":"seen","advice":"do","call":{"module":"net","operator":"mul",\
"phase":"forward","input_formats":["float16"],"output_formats":["float16"],"input_ranges":[["-inf",2.0]],\
"output_ranges":[null],"line":null}}
{"type":"finding","after":0,"severity":"warning","code":"eps","place":"norm","evidence":"1e-8","advice":"more","cure":[]}
"""


CURE = (
    halfstep.Rule("net", halfstep.FULL),
    halfstep.Scaling("dynamic", init=32768.0),
    halfstep.OpChange("deny", "exp"),
)


def test_a_log_of_an_earlier_halfstep_is_read(path):
    path.write_bytes(OLD)
    run = read_log(path)
    assert not any("cannot be read" in note for note in run.notes)
    assert repr(run.steps) == repr(
        (
            StepValues(1, 1790000001.25, True, 65536.0, INF, NAN),
            StepValues(2, 1790000002.25, False, 32768.0, None, 2.5),
        )
    )
    bins = {126: 1, 128: 2}
    (seen,) = run.observations()
    assert seen == observation(2, bins=bins, zeros=2, negatives=1, total=1.5, squares=INF, amax=4.0)
    call = OpCall("net", "mul", "forward", ("float16",), ("float16",), ((-INF, 2.0),), (None,), None)
    verdict = Verdict("net", "mul", "forward", "overflow", None, CURE, "seen", "do", call)
    assert run.events == (Event(2, verdict), Event(0, Finding("warning", "eps", "norm", "1e-8", "more")))
    assert not run.processes[0].closed


@pytest.mark.parametrize("cure", [{"edit": "rules"}, {"edit": "rule", "pattern": "net"}, {"list": "deny", "op": "exp"}])
def test_a_line_whose_edit_is_none_is_damaged(path, cure):
    log = OLD.replace(b'"cure":[]', b'"cure":[%s]' % json.dumps(cure).encode())
    path.write_bytes(log)
    run = read_log(path)
    assert len(run.events) == 1
    assert any("1 of the lines cannot be read" in note and "is not an edit" in note for note in run.notes)


def test_a_statistic_that_a_log_lacks_is_zero(path):
    path.write_bytes(OLD.replace(b'"negatives":1,', b""))
    (seen,) = read_log(path).observations()
    assert (seen.stats.negatives, seen.stats.zeros) == (0, 2)


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_end_of_a_log_says_what_ended_it(path, error):
    with contextlib.suppress(ValueError), RunLog(path) as log:
        log(step(1))
        if error:
            raise error
    log.close()
    (process,) = read_log(path).processes
    assert (process.closed, process.error) == (True, error and "ValueError")
    assert path.read_bytes().count(b'"type":"end"') == 1


@given(
    bins=st.dictionaries(st.integers(0, 255), st.integers(1, 2**40), max_size=6),
    total=st.floats(),
    amax=st.sampled_from([0.0, 1.5, INF, 3e38]),
)
def test_observations_come_back_as_they_were(bins, total, amax):
    seen = observation(7, bins=bins, zeros=3, negatives=2, infinities=1, nans=1, total=total, amax=amax)
    back = decode(encode(seen))
    assert repr(back) == repr(seen)


def test_verdicts_and_findings_come_back_with_the_step_before_and_their_edits(path):
    call = OpCall("net", "mul", "forward", ("fp16",), ("fp16",), ((-1.0, 2.0),), (None,), "train.py:3 in forward")
    own = halfstep.Rule("type:Norm*", halfstep.Policy("full", "low", "input"), buffers="low", input="keep")
    cure = (own, *CURE, halfstep.Scaling("dynamic", init=2.0**-15, min=2.0**-20, hysteresis=2))
    verdict = Verdict("net", "mul", "forward", "overflow", "train.py:3", cure, "70000", "compute fp32", call)
    finding = Finding("warning", "eps", "norm", "1e-8", "1e-6 or more")
    write(path, finding, step(1), step(2), verdict)
    events = read_log(path).events
    assert events == (Event(0, finding), Event(2, verdict))
    plan = halfstep.level("O2", "fp16")
    assert plan.edit(*events[1].record.cure) == plan.edit(*cure)


def test_a_folder_stands_for_the_log_in_it(tmp_path, path):
    write(tmp_path, step(1))
    assert numbers(read_log(tmp_path)) == [1]
    path.rename(tmp_path / "other.jsonl")
    assert read_log(tmp_path).path.name == "other.jsonl"


def test_folders_that_are_not_there_are_made(tmp_path):
    write(tmp_path / "runs" / "first" / "log.jsonl", step(1))
    assert numbers(read_log(tmp_path / "runs" / "first")) == [1]


def test_steps_are_written_without_a_sync(path):
    with RunLog(path) as log, NoSync():
        for number in range(1, 4):
            log(step(number, norm=1.0, loss=0.5))
    assert numbers(read_log(path)) == [1, 2, 3]


def test_a_loss_that_the_user_changes_later_was_read_before(path):
    loss = torch.tensor(1.5)
    with RunLog(path) as log:
        log(StepRecord(1, torch.tensor(False), torch.tensor(1.0), None, loss=loss.detach()))
        loss.add_(100.0)
    assert read_log(path).steps[0].loss == 1.5


@pytest.mark.parametrize(
    "loss", [torch.tensor([2.0]), torch.tensor(2.0, dtype=torch.float16), torch.tensor(2.0).double()]
)
def test_a_loss_of_any_format_or_of_one_element_is_a_number(path, loss):
    write(path, StepRecord(1, torch.tensor(False), torch.tensor(1.0), None, loss=loss))
    assert read_log(path).steps[0].loss == 2.0


class Arrival:
    """Stands for the event behind a copy: it comes when the test says so, or when it is waited for."""

    def __init__(self):
        self.come = False

    def query(self):
        return self.come

    def synchronize(self):
        self.come = True


@pytest.fixture
def late(monkeypatch):
    """A reader for which the CPU is a device that works behind the host, and the events of its copies."""
    events = []

    class Reader(AsyncReader):
        def add(self, record):
            super().add(record)
            events.append(Arrival())
            self._coming[-1][-1]._done = [events[-1]]

    monkeypatch.setattr(halfstep.explain.report.log, "AsyncReader", Reader)
    return events


def test_steps_are_written_when_they_have_arrived_and_in_order(path, late):
    log = RunLog(path)
    log(step(1))
    late[0].come = True
    log(step(2))
    assert numbers(read_log(path)) == [1]
    log(step(3))
    late[2].come = True  # before the second
    log(step(4))
    assert numbers(read_log(path)) == [1]
    late[1].come = True
    log(step(5))
    assert numbers(read_log(path)) == [1, 2, 3]
    log.flush()
    assert numbers(read_log(path)) == [1, 2, 3, 4, 5]
    assert all(each.come for each in late)  # numbers that have not arrived are waited for, not read as they lie
    log(step(6))
    log.close()
    assert numbers(read_log(path)) == [1, 2, 3, 4, 5, 6]


def test_a_log_that_is_dropped_writes_what_is_left(path, late):
    log = RunLog(path)
    log(step(1))
    assert numbers(read_log(path)) == []
    del log
    assert numbers(read_log(path)) == [1]


def test_an_observation_comes_after_its_step(path, late):
    write(path, step(1), step(2))
    log = RunLog(path)
    log(step(1))
    late[-1].come = True  # before what was observed of the step, but after the step was written
    log.record(observation(1, "again"))
    log.close()
    assert [seen.module for seen in read_log(path).observations()] == ["again"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_no_step_waits(path):
    skipped, scale, norm, loss = (torch.tensor(value, device="cuda") for value in (False, 2.0, 0.5, 4.0))
    with no_cuda_sync(), RunLog(path) as log:
        for number in range(1, 50):
            log(StepRecord(number, skipped, scale, norm, loss=loss))
    run = read_log(path)
    assert numbers(run) == list(range(1, 50))
    assert (run.steps[-1].scale, run.steps[-1].grad_norm, run.steps[-1].loss) == (2.0, 0.5, 4.0)


def test_a_resumed_run_goes_on_in_the_same_file(path):
    write(path, step(1, loss=1.0), step(2, loss=2.0))
    run = written(path, step(3, loss=3.0))
    assert numbers(run) == [1, 2, 3]
    assert len(run.processes) == 2
    assert not any("went back" in note for note in run.notes)


def test_of_steps_that_are_made_again_the_last_making_counts(path):
    write(path, step(1, loss=1.0), step(2, loss=2.0), step(3, loss=3.0), observation(2), observation(3))
    run = written(path, step(2, loss=20.0), observation(2, "new"))
    assert [values.loss for values in run.steps] == [1.0, 20.0]
    assert [(seen.step, seen.module) for seen in run.observations()] == [(2, "new")]
    assert run.observed == (2,)
    assert any("went back to step 2; 2 earlier steps" in note for note in run.notes)


def test_an_observation_before_the_step_gone_back_to_stays(path):
    write(path, step(1), observation(1), step(2), observation(2), step(3), step(2), step(3), step(3))
    assert [seen.step for seen in read_log(path).observations()] == [1]


def cut(path, count):
    """Leaves what a process leaves that was killed `count` bytes before the end of its last record."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"type":"end"' in lines[-1]
    path.write_bytes(b"".join(lines[:-1])[:-count])


def test_a_log_goes_on_after_a_cut_line(path):
    write(path, step(1), step(2))
    cut(path, 20)
    assert any("line 3 was cut" in note for note in read_log(path).notes)
    run = written(path, step(2), step(3))
    assert numbers(run) == [1, 2, 3]
    assert len(run.processes) == 2
    assert any("line 3 is damaged" in note for note in run.notes)


def test_every_cut_of_a_log_is_read_or_refused_with_a_reason(path):
    write(path, step(1, loss=1.0), observation(1, bins={100: 2}), Finding("note", "a", "b", "c", "d"))
    whole = path.read_bytes()
    first = whole.index(b"\n")
    ends = {at + offset for at in range(len(whole)) if whole[at] == ord("\n") for offset in (-1, 0, 1)}
    for end in sorted({0, 1, 8, *range(2, len(whole), 9), *(ends - {len(whole)})}):
        path.write_bytes(whole[:end])
        if end < first:
            with pytest.raises(LogError, match="empty" if end == 0 else "cut within its first line|not a run log"):
                read_log(path)
        else:
            run = read_log(path)
            found = len(run.steps) + len(list(run.observations())) + len(run.events) + run.processes[0].closed
            assert found == whole[: end + 1].count(b"}\n") - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"type":"sta', "cut within its first line"),
        (b"epoch,loss\n1,2\n", "not a run log"),
        (b"\x89PNG\x00\xff\n", "not a run log"),
        (b'{"loss":1.0}\n', "first line is not the start of one"),
        (b"[1]\n", "first line is not the start of one"),
        (b'{"type":"start","schema":3,"new":1}\n', "schema 3, but this halfstep version reads schemas up to 2"),
        (b'{"type":"start","schema":2}\n', "damaged in its first line .*missing required field `time`"),
        (b'{"type":"start","schema":2,"time":1e18,"halfstep":"1","torch":"2"}\n', "damaged in its first line"),
    ],
)
def test_what_is_no_log_is_refused_by_reader_and_writer(path, content, message):
    path.write_bytes(content)
    with pytest.raises(LogError, match=message):
        read_log(path)
    if content:
        with pytest.raises(LogError, match=message):
            RunLog(path)
        assert path.read_bytes() == content


def test_a_large_file_without_lines_is_not_read_whole(tmp_path):
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(2**26)
    tracemalloc.start()
    try:
        for use in (read_log, RunLog):
            with pytest.raises(LogError, match="is empty"):
                use(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_lines_of_another_kind_are_noted(path):
    write(path, step(1))
    with path.open("ab") as file:
        file.write(b'{"type":"weather"}\n{"type":"step","step":"one"}\n\n\xff\xfe\n' + b"\0" * 9 + b"\n")
        seen = observation(1, bins={3: 1})
        file.write(encode(seen).replace(b'"first":3', b'"first":256'))
    run = read_log(path)
    assert numbers(run) == [1]
    assert any("5 of the lines cannot be read" in note and "line 4" in note for note in run.notes)
    assert list(run.observations()) == []


def test_what_a_log_lacks_is_said(path):
    write(path)
    notes = " ".join(read_log(path).notes)
    assert "no session" in notes
    assert "no step" in notes
    assert "no tensor was observed" in notes


def test_a_path_without_a_log_is_refused(tmp_path):
    with pytest.raises(LogError, match="there is no file"):
        read_log(tmp_path / "nowhere")
    with pytest.raises(LogError, match=r"no run\.jsonl and not exactly one other \.jsonl file \(found: none\)"):
        read_log(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl")
    with pytest.raises(LogError, match=r"a\.jsonl, b\.jsonl"):
        read_log(tmp_path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LogError, match="cannot be written"):
        RunLog(tmp_path / "file" / "log")


@pytest.mark.parametrize("path", [3, None, b"run.jsonl", ["run.jsonl"]])
def test_what_is_no_path_is_refused(path):
    for use in (RunLog, read_log):
        with pytest.raises(LogError, match="is not a path"):
            use(path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(LogError, match="cannot be written"):
        RunLog(tmp_path / name)
    with pytest.raises(LogError, match=r"cannot be read|there is no file"):
        read_log(tmp_path / name)


def test_a_full_disk_ends_the_log_and_not_the_run(path, caplog):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(path)
    log._file._file.close()
    log._file._file = Full()
    log(step(1))
    log(step(2))
    assert len(caplog.records) == 1
    assert "can no longer be written" in caplog.text


def test_a_closed_log_says_so_once(path, caplog):
    log = RunLog(path)
    log.close()
    log.close()
    log(step(1))
    log(step(2))
    assert len(caplog.records) == 1
    assert numbers(read_log(path)) == []


def test_a_record_of_another_kind_is_refused(path):
    with RunLog(path) as log, pytest.raises(LogError, match="got dict"):
        log.record({"loss": 1.0})
    with RunLog(path) as log, pytest.raises(LogError, match=r"got dict: .*; pass the log to initialize"):
        log({"loss": 1.0})


PROGRAM = """
import sys
import torch
import halfstep
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = halfstep.initialize(model, optimizer, "O2", low="bf16", sinks=[halfstep.RunLog(sys.argv[1])])
for number in range(1, 10**6):
    optimizer.zero_grad()
    session.backward(model(torch.ones(1, 4)).square().sum())
    session.step()
    print(number, flush=True)
"""


def test_a_killed_process_leaves_all_its_steps(path):
    with forks.Forked([sys.executable, "-c", PROGRAM, path], text=True) as process:
        printed = [int(line) for line, _ in zip(process.stdout, range(20), strict=False)]
        process.kill()
    assert process.returncode == -signal.SIGKILL
    run = read_log(path)
    assert numbers(run) == list(range(1, len(run.steps) + 1))
    assert run.steps[-1].step >= printed[-1] == 20
    assert run.machine is not None
    assert not run.processes[0].closed


def test_a_log_takes_one_session(path):
    log = RunLog(path)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halfstep.initialize(model, optimizer, "O1", low="bf16", sinks=[log]).close()
    with pytest.raises(LogError, match="has a session; give each session its own RunLog"):
        halfstep.initialize(model, optimizer, "O1", low="bf16", sinks=[log])
    halfstep.initialize(model, optimizer, "O1", low="bf16", sinks=[RunLog(path)]).close()


@pytest.mark.parametrize("step", ["-1", str(2**63), "1.5"])
def test_a_step_that_no_run_has_is_a_damaged_line(path, step):
    RunLog(path).close()
    line = {"type": "step", "step": 7, "time": 1.0, "skipped": False, "scale": 1.0, "grad_norm": None, "loss": None}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line).replace("7", step) + "\n")
    run = read_log(path)
    assert [step.step for step in run.steps] == [7]
    assert any("1 of the lines cannot be read" in note for note in run.notes)


def test_what_is_written_after_a_log_was_read_is_not_part_of_what_was_read(path):
    write(path, step(1), observation(1))
    cut(path, 1)
    with path.open("ab") as file:
        file.write(b"\n" + encode(observation(2))[:-30])  # the run is writing it
    run = read_log(path)
    write(path, step(2), observation(2))
    assert run.observed == (1,)
    assert [seen.step for seen in run.observations()] == [1]


def test_many_returns_are_one_note(path):
    write(path, *(step(number) for number in range(1, 9) for _ in range(2)))  # as two processes would
    notes = [note for note in read_log(path).notes if "went back" in note]
    assert len(notes) == 4
    assert "went back 8 times in all; if several processes wrote this log at once, give each" in notes[-1]


def test_a_text_that_is_not_unicode_does_not_end_the_run(path):
    write(path, step(1), Verdict("net", "mul", "forward", "overflow", "caf\udce9.py:3", (), "\u00e9", "do"))
    (event,) = read_log(path).events
    assert (event.record.where, event.record.evidence) == ("caf?.py:3", "\u00e9")
