"""Logs of several processes of one run, side by side."""

import math
from dataclasses import replace

import pytest

from halfstep.errors import LogError
from halfstep.explain.report.run import PROCESSES, first_overflow, read_log, rows_of
from halfstep.explain.report.tables import cells
from halfstep.kinds import Kind
from halfstep.plan.io import to_dict
from halfstep.plan.levels import level
from halfstep.records import Verdict
from tests.report.logs import START, seen, step, write


def log_of(folder, process, records):
    return read_log(write(folder / f"{process}.jsonl", [replace(START, process=process), *records]))


def logs(folder, *records):
    """Logs that processes write at the same time; each has `records` of its own."""
    runs = [log_of(folder, process, mine) for process, mine in enumerate(records)]
    begun, ended = min(run.processes[0].start for run in runs), max(run.processes[-1].end for run in runs)
    return [replace(run, processes=(replace(run.processes[0], start=begun, end=ended),)) for run in runs]


VERDICT = Verdict("head", "mul", "forward", Kind.OVERFLOW, None, (), "", "")


def test_each_process_has_a_row_in_the_order_of_the_processes(tmp_path):
    shared = [step(1, scale=8.0, loss=1.0), step(2, scale=8.0, skipped=True, loss=1.0), step(3, scale=4.0, loss=0.5)]
    spoiled = [shared[0], step(2, scale=8.0, skipped=True, loss=math.inf), shared[2]]
    zero, one = logs(tmp_path, shared, spoiled)
    rows = rows_of([one, zero])
    assert cells(rows, PROCESSES) == [
        ["0", str(zero.path), "1 to 3", "1", "4", ""],
        ["1", str(one.path), "1 to 3", "1", "4", "step 2: its loss"],
    ]
    assert first_overflow(rows) == "first not finite, at step 2: process 1: its loss"


def test_the_first_overflow_names_the_parameter_and_all_processes_that_saw_it(tmp_path):
    gradient = seen(2, "head", {0: 1}, infinities=1)
    other = replace(VERDICT, kind=Kind.ANOTHER_PROCESS)
    mine = [step(1), step(2, skipped=True, loss=math.nan), gradient]
    runs = logs(tmp_path, mine, [*mine[:2], other], [step(1), VERDICT, step(2, skipped=True)])
    assert first_overflow(rows_of(runs[:2])) == (
        "first not finite, at step 2: process 0: weight_grad of head.weight; process 1: its loss"
    )
    assert first_overflow(rows_of(runs)) == "first not finite, at step 1: process 2: mul in head (forward)"
    assert first_overflow(rows_of(logs(tmp_path / "clean", [step(1)], [step(1)]))) is None


def test_a_process_that_was_killed_has_fewer_steps_and_one_may_have_none(tmp_path):
    rows = rows_of(logs(tmp_path, [step(1), step(2)], [step(1)], []))
    assert [PROCESSES["steps"](row) for row in rows] == ["1 to 2", "1 to 1", "none"]


def test_logs_without_a_number_count_in_their_order(tmp_path):
    rows = rows_of([replace(run, process=None) for run in logs(tmp_path, [step(1)], [step(1)])])
    assert [row.process for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([step(2)], "one begins with step 1, the other with step 2"),
        ([step(1, skipped=True)], "only one skipped step 1"),
        ([step(1, scale=2.0)], "step 1 had a loss scale of 1 in one, 2 in the other"),
        ([replace(START, plan=to_dict(level("O1", "fp16"))), step(1)], "their plans differ"),
        ([replace(START, modules=("other",)), step(1)], "their modules differ"),
    ],
)
def test_logs_that_are_not_of_one_run_are_one_error(changed, message, tmp_path):
    zero, one = logs(tmp_path, [step(1)], [step(1)])
    other = read_log(write(tmp_path / "other.jsonl", changed))
    if other.plan is None:
        other = replace(other, plan=zero.plan, modules=zero.modules)
    other = replace(other, processes=zero.processes)
    with pytest.raises(LogError, match=f"are not of one run: {message}; pass one log of each process"):
        rows_of([zero, one, other])


def test_another_run_the_same_file_and_the_same_process_are_told(tmp_path):
    zero, one = logs(tmp_path, [step(1)], [step(1)])
    later = replace(one, processes=(replace(one.processes[0], start=zero.processes[-1].end + 1, end=2e10),))
    with pytest.raises(LogError, match="one had ended before the other began"):
        rows_of([zero, later])
    with pytest.raises(LogError, match="they are the same file"):
        rows_of([zero, replace(zero)])
    with pytest.raises(LogError, match="are both of process 0; pass one log"):
        rows_of([zero, replace(one, process=0)])
