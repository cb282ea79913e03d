"""A sweep: who makes which step when, what is kept and what refused; with workers that are played, and real ones."""

import errno
import os
import re
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from halfstep.errors import DataError, WorkloadError
from halfstep.explain.report.lines import to_json
from halfstep.formats import BF16, FP32
from halfstep.lab.bench import bench as bench_module
from halfstep.lab.bench.bench import bench
from halfstep.lab.bench.lane import OutOfMemory, Remote, Step, Task
from halfstep.lab.bench.sweep import Asked, read_sweep, sweep
from halfstep.lab.bench.variants import End, Entry
from halfstep.lab.workloads.load import load_workload
from halfstep.saved import replace_file

CPU = torch.device("cpu")
O0, O2 = Entry("O0", FP32, peer=False), Entry("O2", BF16, peer=False)
SMALL = {"d_in": "4", "d_out": "4"}
ASKED = Asked(("regression",), (2, 4), (O0, O2), 2, CPU, SMALL)
OWN = """
import os
import signal

from halfstep.lab.workloads.load import Regression


class Own(Regression):
    def batches(self, seed):
        for number, batch in enumerate(super().batches(seed), start=1):
            if number == 3:
                {third}
            print("noise", flush=True)
            yield batch


def mine(batch="2"):
    return Own(batch=int(batch), d_in=4, d_out=4)
"""


def task_of(row, model="regression", settings=SMALL):
    return Task(replace(ASKED, settings=settings).origin(model, load_workload(model, settings)), row, CPU)


class Played:
    """A worker whose steps take as many milliseconds as its level says; it writes into `log` what it was asked."""

    log: ClassVar = []
    fail = None

    def __init__(self, task):
        self.name, self.steps = task.entry.level, 0
        self.settings = task.origin.settings

    def close(self):
        self.log.append(("closed", self.name))

    def ready(self):
        pass

    def gradient_error(self, seed):
        return {"O0": 0.0, "O2": 0.2}[self.name]

    def begin(self, seed, *, counted, limit=None):
        assert (seed, counted) == (0, True)

    def step(self, number, steps):
        assert number == self.steps
        self.steps += 1
        if self.fail is not None:
            type(self).fail(self)
        self.log.append((self.name, self.steps))
        return Step(1 / self.steps, {"O0": 4.0, "O2": 2.0}[self.name])

    def end(self, *, validate):
        assert not validate
        self.log.append((self.name, self.steps + 1))
        return End(0, 1.0, {"weights": 40}, 1000, {})


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(bench_module, "Remote", Played)
    monkeypatch.setattr(Played, "log", [])
    monkeypatch.setattr(Played, "fail", None)
    return Played


def test_the_processes_of_a_point_take_turns_and_none_always_follows_the_same(played):
    result = sweep(replace(ASKED, batches=(2,)))
    steps = [(name, step) for name, step in played.log if name != "closed"]
    first = {step: next(name for name, number in steps if number == step) for step in range(1, 6)}
    assert first == {1: "O0", 2: "O2", 3: "O0", 4: "O2", 5: "O0"}
    assert sorted(steps) == sorted((name, step) for name in ("O0", "O2") for step in range(1, 7))
    (point,) = result.points
    full, low = point.result.runs
    assert (point.batch, point.examples, point.result.parameters) == (2, None, 40)
    assert (full.times_ms, low.times_ms, low.vs_o0) == ((4.0, 4.0), (2.0, 2.0), 2.0)
    assert low.losses == tuple(1 / step for step in range(1, 6))
    assert (low.peak_bytes, low.bytes_per_parameter) == (1000, {"weights": 1.0})


def test_a_process_that_fails_is_a_row_with_an_error_and_the_others_go_on(played):
    def fail(worker):
        if worker.name == "O0" and worker.settings["batch"] == "4" and worker.steps == 3:
            raise OutOfMemory("out of memory: no more")

    played.fail = fail
    result = sweep(ASKED)
    errors = [run.error for point in result.points for run in point.result.runs]
    assert errors == [None, None, "step 3 of seed 0: out of memory: no more", None]
    assert len(result.points[1].result.runs[1].times_ms) == 2


def test_a_model_that_cannot_be_built_does_not_end_a_sweep(played, monkeypatch):
    monkeypatch.setattr("halfstep.lab.workloads.load.Regression.build", lambda *_: 1 / 0)
    monkeypatch.setattr(played, "begin", lambda *_, **__: 1 / 0)
    errors = [run.error for point in sweep(ASKED).points for run in point.result.runs]
    assert len(errors) == 4
    assert all("ZeroDivisionError" in error for error in errors)


def test_an_interrupted_sweep_goes_on_and_what_was_there_stays_byte_for_byte(played, tmp_path):
    path = tmp_path / "sweep.json"

    def stop(worker):
        if worker.settings["batch"] == "4":
            raise KeyboardInterrupt

    played.fail = stop
    keep = lambda result: replace_file(path, to_json(result).encode())  # noqa: E731
    broken = sweep(ASKED, keep=keep)
    assert (len(broken.points), broken.total) == (1, 2)
    before = path.read_text(encoding="utf-8")
    played.fail = None
    played.log.clear()
    whole = sweep(ASKED, done=read_sweep(path), keep=keep)
    assert [point.batch for point in whole.points] == [2, 4]
    assert len(played.log) == 2 * (6 + 1)  # one point: two processes, six answers and an end each
    after = path.read_text(encoding="utf-8")
    cut = before.rindex("\n    }\n")
    assert after[:cut] == before[:cut]
    played.log.clear()
    sweep(ASKED, done=read_sweep(path), keep=keep)
    assert played.log == []


def test_losses_that_are_no_numbers_come_back_from_the_file(played, tmp_path, monkeypatch):
    step = Played.step
    monkeypatch.setattr(Played, "step", lambda self, *given: Step(float("nan"), step(self, *given).ms))
    text = to_json(sweep(replace(ASKED, batches=(2,))))
    (tmp_path / "sweep.json").write_text(text, encoding="utf-8")
    assert to_json(read_sweep(tmp_path / "sweep.json")) == text


def test_a_model_can_have_its_own_batch_size(played):
    points = replace(ASKED, models=("regression", "char_lm@3"), settings={}).points()
    assert [(name, workload.batch) for name, workload in points] == [
        ("regression", 2),
        ("regression", 4),
        ("char_lm", 3),
    ]


def test_progress_counts_examples(played):
    seen = []
    sweep(ASKED, progress=lambda what, done, total: seen.append((what, done, total)))
    assert ("regression, batch 4: O0: seed 0", 2 * 5 * 2 + 4, 2 * 5 * (2 + 4)) in seen
    assert seen[-1][1:] == (60, 60)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 3}, "steps: 2 in the file, 3 now"),
        ({"batches": (2, 8)}, "batch sizes: 2, 4 in the file, 2, 8 now"),
        ({"rows": (O0,)}, "rows: O0, O2 bf16 in the file, O0 now"),
    ],
)
def test_a_sweep_that_was_asked_for_otherwise_is_not_gone_on_with(played, change, said):
    with pytest.raises(WorkloadError, match=said):
        sweep(replace(ASKED, **change), done=sweep(ASKED))


@pytest.mark.parametrize(
    ("error", "again"), [(WorkloadError("KeyError: x"), True), (OutOfMemory("out of memory"), False)]
)
def test_a_point_that_failed_is_measured_again_unless_memory_ran_out(error, again, played):
    def fail(worker):
        if worker.settings["batch"] == "2":
            raise error

    played.fail = fail
    asked = replace(ASKED, batches=(2, 4))
    first = sweep(asked)
    played.fail = None
    second = sweep(asked, done=first)
    assert [point.batch for point in second.points] == [2, 4]
    assert second.points[1] is first.points[1]
    assert (second.points[0] is first.points[0]) == (not again)
    assert all(run.error is None for run in second.points[0].result.runs) == again


def test_a_sweep_of_other_data_is_another():
    named = [replace(ASKED, data=Path(path)).words()["data"] for path in ("/home/a/cifar10", "/home/b/cifar10")]
    assert named[0] != named[1]
    assert replace(ASKED, data=Path.cwd()).words() == replace(ASKED, data=Path()).words()
    assert all(re.fullmatch(r"cifar10 \([0-9a-f]{12}\)", name) for name in named)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": ("resnet19",)}, "unknown workload 'resnet19'; did you mean 'resnet18'"),
        ({"models": ("regression@x",)}, "@x is not a batch size"),
        ({"models": ()}, "a sweep needs at least one model"),
        ({"rows": ()}, "a sweep needs at least one model"),
        ({"steps": 0}, "a sweep needs at least one model"),
        ({"batches": (0,)}, "batch is 0; set it above 0"),
        ({"settings": {"batch": "3"}}, "pass only one of them"),
        ({"settings": {"depth": "3"}}, "regression has no setting depth"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(played, change, said):
    with pytest.raises(WorkloadError, match=said):
        sweep(replace(ASKED, **change))
    assert played.log == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"workload": "char_lm"}', "KeyError"),
        ('{"schema": 2}', "its schema is 2, that of this halfstep version is 1"),
        ('{"schema": 1}', "ValidationError"),
    ],
)
def test_a_file_that_is_no_sweep_of_this_version_is_refused_and_stays(text, said, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=said):
        read_sweep(path)
    assert path.read_text(encoding="utf-8") == text
    assert read_sweep(tmp_path / "none.json") is None


def test_a_full_disk_leaves_the_results_that_were_there(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    replace_file(path, b"first")

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        replace_file(path, b"second")
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text(encoding="utf-8") == "first"


def test_a_link_to_the_results_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    replace_file(tmp_path / "link.json", b"first")
    replace_file(tmp_path / "link.json", b"second")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == "second"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_what_is_no_file_is_written_to_but_keeps_no_sweep(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    replace_file(pipe, b"text")
    reader.join()
    assert got == ["text"]
    assert pipe.is_fifo()
    with pytest.raises(WorkloadError, match="pipe is not a regular file, but a sweep keeps"):
        read_sweep(pipe)


@pytest.mark.parametrize(
    "measure", [lambda job: sweep(job), lambda job: bench(job.points()[0][1], [O0], steps=1, device=CPU)]
)
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            "ValueError('none today')",
            WorkloadError,
            r"^Own: the first batch failed: ValueError: none today \(own.py, line",
        ),
        ("DataError('it is elsewhere')", DataError, "^it is elsewhere$"),
    ],
)
def test_a_first_batch_that_fails_is_one_message_before_anything_is_measured(
    measure, error, kind, said, played, tmp_path
):
    text = OWN.replace("number == 3", "number == 1").format(third=f"raise {error}")
    (tmp_path / "own.py").write_text("from halfstep.errors import DataError\n" + text, encoding="utf-8")
    with pytest.raises(kind, match=said):
        measure(replace(ASKED, models=(f"{tmp_path / 'own.py'}:mine",), settings={}))
    assert played.log == []


@pytest.mark.parametrize("row", [pytest.param(O0, marks=pytest.mark.slow), O2])
def test_a_worker_trains_as_bench_does_and_counts_the_same_peak(row, forked):
    with closing(Remote(task_of(row))) as remote:
        remote.begin(0, counted=True)
        steps = [remote.step(number, 5) for number in range(5)]
        end = remote.end(validate=True)
    (run,) = bench(load_workload("regression", SMALL), [row], steps=5, device=CPU).runs
    parameters = sum(p.numel() for p in load_workload("regression", SMALL).build(0).parameters())
    assert all(step.ms > 0 for step in steps)
    assert steps[-1].loss == run.train_loss[0]
    assert end.peak == run.peak_bytes
    assert {key: size / parameters for key, size in end.memory.items()} == run.bytes_per_parameter
    assert {key: (value,) for key, value in end.validation.items()} == run.validation


@pytest.mark.parametrize(
    ("third", "kind", "said"),
    [
        pytest.param(
            "raise ValueError('no third')",
            WorkloadError,
            r"^ValueError: no third \(own.py, line 12\)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raise RuntimeError('DefaultCPUAllocator: not enough memory')",
            OutOfMemory,
            "^out of memory: Default",
            marks=pytest.mark.slow,
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", OutOfMemory, "^out of memory: the system killed the process"),
        ("os._exit(7)", WorkloadError, "^the process ended with code 7; it wrote: .*noise"),
    ],
)
def test_a_process_says_how_it_ended(third, kind, said, tmp_path, forked):
    (tmp_path / "own.py").write_text(OWN.format(third=third), encoding="utf-8")
    with closing(Remote(task_of(O0, f"{tmp_path / 'own.py'}:mine", {}))) as remote:
        remote.begin(0)
        assert remote.step(0, 3).loss > 0
        remote.step(1, 3)
        with pytest.raises(WorkloadError, match=said) as raised:
            remote.step(2, 3)
    assert raised.type is kind
