"""A benchmark against a saved one: simulated runs of the same code differ rarely, a planted slowdown is found."""

import math
import random
from dataclasses import replace

import pytest

from halfstep.bench.against import (
    check_comparable,
    check_comparable_sweep,
    compare,
    compare_sweeps,
    load_saved,
    load_saved_sweep,
)
from halfstep.bench.repeat import repeat, together
from halfstep.errors import WorkloadError
from halfstep.machine import Machine
from halfstep.measurements import BenchChange, BenchResult, BenchRun, Point, Sweep
from halfstep.report.against import against_table
from halfstep.report.json import bench_json, sweep_json
from halfstep.workloads.load import load_workload

MACHINE = Machine("cpu", "P", 1, 1, (), "s", "3", "2", "0", None)


def result(runs, **edits):
    """A result with these rows."""
    fields = {"parameters": 1, "steps": 1, "warmup": 0, "seeds": (0,), "peak_method": "counted", "notes": ()}
    fields |= {"complete": True, "machine": MACHINE, "command": "", "date": ""}
    return BenchResult("w", {"batch": "4"}, runs=tuple(runs), **fields | edits)


def simulated(
    seed, *, slower=1.0, steps=100, rows=("O0", "O1 bf16", "torch.amp bf16"), peak=1000, scatter=0.04, apart=0.003
):
    """Runs of a machine that wanders by a fifth: steps scatter by 4%, processes differ by 0.3%, where not said."""
    rng = random.Random(seed)
    times, machine = {name: [] for name in rows}, 0.0
    own = {name: rng.gauss(0, apart) for name in rows}
    for _ in range(steps):
        machine = 0.95 * machine + rng.gauss(0, 0.05)
        for name in rows:
            base = 10.0 * (slower if name == "O1 bf16" else 1.0)
            outlier = 1.5 if rng.random() < 0.03 else 1.0
            times[name].append(base * 2.718 ** (machine + own[name] + rng.gauss(0, scatter)) * outlier)
    return result(
        BenchRun(
            name, name.split()[0] if "amp" not in name else "O1", "bf16", "amp" in name, False,
            times_ms=tuple(times[name]), peak_bytes=peak,
        )
        for name in rows
    )  # fmt: skip


def repeated(seed, *, count=8, slower=1.0):
    """Runs of a shared machine in `count` processes: steps scatter by 10%, processes differ by 1%."""
    parts = [simulated(100 * seed + i, slower=slower, scatter=0.1, apart=0.01) for i in range(count)]
    return together(parts)


def verdicts(before, now):
    return {change.name: change for change in compare(before, now)}


def test_runs_of_the_same_code_differ_in_at_most_one_of_twenty():
    found = [verdicts(simulated(2 * i, steps=150), simulated(2 * i + 1, steps=150))["O1 bf16"] for i in range(200)]
    assert sum(change.verdict != "alike" for change in found) <= 10


def test_a_slowdown_of_a_twentieth_is_found_in_nineteen_of_twenty():
    found = [
        verdicts(simulated(2 * i, steps=150), simulated(2 * i + 1, steps=150, slower=1.05))["O1 bf16"]
        for i in range(200)
    ]
    assert sum(change.verdict == "slower" and change.is_worse for change in found) >= 190


def test_on_a_shared_machine_eight_processes_tell_a_twentieth_from_noise():
    alike = [verdicts(repeated(2 * i), repeated(2 * i + 1))["O1 bf16"] for i in range(100)]
    assert sum(change.verdict != "alike" for change in alike) <= 5
    found = [verdicts(repeated(2 * i), repeated(2 * i + 1, slower=1.05))["O1 bf16"] for i in range(100)]
    assert sum(change.verdict == "slower" for change in found) >= 95


def test_on_a_shared_machine_one_process_says_nothing_that_is_not_so():
    alike = [verdicts(repeated(2 * i, count=1), repeated(2 * i + 1, count=1))["O1 bf16"] for i in range(200)]
    assert sum(change.verdict != "alike" for change in alike) <= 10


def test_a_process_without_steps_counts_for_nothing():
    whole, cut = repeated(0, count=4), repeated(1, count=4)
    runs = tuple(replace(run, times_ms=run.times_ms[:-99], processes=(100, 100, 100, 1)) for run in cut.runs)
    found = verdicts(whole, replace(cut, runs=runs))["O1 bf16"]
    assert found.verdict == "alike"


def test_what_gets_faster_is_no_fault():
    change = verdicts(simulated(0), simulated(1, slower=0.8))["O1 bf16"]
    assert (change.verdict, change.is_worse) == ("faster", False)
    assert change.low < change.time < change.high < 0.9


def test_a_machine_that_is_slower_as_a_whole_changes_nothing():
    now = simulated(1)
    doubled = replace(
        now, runs=tuple(replace(run, times_ms=tuple(2 * t for t in run.times_ms), peak_bytes=None) for run in now.runs)
    )
    found = verdicts(simulated(0), doubled)
    assert found["O1 bf16"].verdict == found["O0"].verdict == "alike"
    assert (found["O1 bf16"].yardstick, found["O0"].yardstick) == ("torch.amp bf16", "torch.amp bf16")
    assert found["torch.amp bf16"].yardstick == "O0"


def test_without_a_yardstick_milliseconds_count():
    change = verdicts(simulated(0, rows=("O1 bf16",)), simulated(0, rows=("O1 bf16",), slower=2.0))["O1 bf16"]
    assert (change.yardstick, change.verdict) == (None, "slower")
    assert change.time == pytest.approx(2.0)


def test_memory_that_grew_by_a_hundredth_is_worse():
    for peak, worse in ((1000, False), (1009, False), (1020, True), (900, False)):
        found = verdicts(simulated(0), simulated(0, peak=peak))["O1 bf16"]
        assert found.is_worse == worse


def test_rows_that_cannot_be_compared_say_why():
    found = verdicts(simulated(0, rows=("O0",)), simulated(1))
    assert found["O1 bf16"] == BenchChange("O1 bf16", "new", None)
    assert verdicts(simulated(0), simulated(1, steps=8))["O1 bf16"].verdict == "too few steps"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a benchmark result"),
        ("[]", "is not a benchmark result"),
        ("{}", "workload|machine"),
        (bench_json(simulated(0)).replace('"runs"', '"rows"'), "runs"),
        (
            bench_json(result([BenchRun("a", "O0", "bf16", False, False, times_ms=(0.0,))])),
            "a step time that is not positive and finite",
        ),
    ],
)
def test_a_file_that_is_no_result_is_one_error(tmp_path, text, why):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(WorkloadError, match=why):
        load_saved(tmp_path / "x.json")
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_saved(tmp_path / "none.json")


def test_other_work_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "saved.json").write_text(bench_json(simulated(0)))
    found = load_saved(tmp_path / "saved.json")
    check_comparable(found, "w", {"batch": 4})
    with pytest.raises(WorkloadError, match="workload 'w', but this run measures 'v'"):
        check_comparable(found, "v", {"batch": 4})
    with pytest.raises(WorkloadError, match="batch is 4 in the file, 8 now"):
        check_comparable(found, "w", {"batch": 8})


def test_the_table_ends_with_what_is_worse():
    def last(before, now):
        changes = compare(before, now)
        return str(against_table(changes, file="f", saved=MACHINE).renderables[-1])

    assert last(simulated(0), simulated(1, slower=1.3)) == "worse: O1 bf16."
    assert last(simulated(0), simulated(1, slower=0.7)) == "faster: O1 bf16."
    assert last(simulated(0), simulated(1)) == "nothing differs beyond the noise."


def edited(saved, **changes):
    return replace(saved, runs=tuple(replace(run, **changes) if run.level == "O1" else run for run in saved.runs))


FAILS = {"error": "step 1: KeyError: 'x'", "times_ms": ()}


@pytest.mark.parametrize(
    ("before", "now", "said", "worse"),
    [
        (simulated(0), edited(simulated(0, rows=("O0", "O1 bf16")), **FAILS),
         "worse: O1 bf16 (failed), torch.amp bf16 (gone).", True),
        (simulated(0), simulated(0, rows=("O0",)), "worse: O1 bf16 (gone), torch.amp bf16 (gone).", True),
        (edited(simulated(0), **FAILS), simulated(0, rows=("O0",)), "nothing differs beyond the noise.", False),
        (edited(simulated(0), train_loss=(1.0,)), edited(simulated(0), train_loss=(math.nan,)),
         "worse: O1 bf16 (diverged), torch.amp bf16 (diverged).", True),
        (edited(simulated(0), validation={"loss": (1.0,)}), edited(simulated(0), validation={"loss": (math.inf,)}),
         "worse: O1 bf16 (diverged), torch.amp bf16 (diverged).", True),
        (edited(simulated(0), train_loss=(math.nan,)), edited(simulated(0), train_loss=(math.nan,)),
         "nothing differs beyond the noise.", False),
        (edited(simulated(0), **FAILS), edited(simulated(0), **FAILS), "nothing differs beyond the noise; not judged: "
         "O1 bf16 (failed before too), torch.amp bf16 (failed before too).", False),
    ],
)  # fmt: skip
def test_a_row_that_no_longer_works_is_worse_and_named(before, now, said, worse):
    changes = compare(before, now)
    assert str(against_table(changes, file="f", saved=MACHINE).renderables[-1]) == said
    assert any(change.is_worse for change in changes) == worse


def test_rows_of_too_few_steps_are_named_and_none_is_judged():
    changes = compare(simulated(0), simulated(1, steps=8))
    said = "not judged: O0 (too few steps), O1 bf16 (too few steps), torch.amp bf16 (too few steps)."
    assert str(against_table(changes, file="f", saved=MACHINE).renderables[-1]) == said
    assert not any(change.is_judged or change.is_worse for change in changes)


def test_memory_that_was_counted_another_way_is_not_compared():
    before, now = simulated(0), simulated(1, peak=2000)
    assert all(change.memory == 2 for change in verdicts(before, now).values())
    weighed = verdicts(replace(before, peak_method="weighed"), now)
    assert [(change.memory, change.is_worse) for change in weighed.values()] == [(None, False)] * 3


def test_a_process_that_fails_is_one_error_with_what_it_said():
    with pytest.raises(WorkloadError, match=r"a process of the benchmark ended with code 2; it wrote: .*no workload"):
        repeat(["no workload"], 2, command="", progress=lambda what, done, total: None)


def sweep(*results, total=None):
    """A sweep over batch sizes 1, 2, 3 and so on; None leaves one out."""
    points = [Point("m", batch, None, each) for batch, each in enumerate(results, start=1) if each is not None]
    return Sweep(1, {}, len(results) if total is None else total, tuple(points))


def test_a_sweep_is_held_row_by_row_at_each_model_and_batch():
    before = sweep(simulated(0), simulated(2))
    changes = compare_sweeps(before, sweep(simulated(1), simulated(3, slower=1.2)))
    assert {change.name: change.verdict for change in changes} == {
        "m, batch 1, O0": "alike", "m, batch 1, O1 bf16": "alike", "m, batch 1, torch.amp bf16": "alike",
        "m, batch 2, O0": "alike", "m, batch 2, O1 bf16": "slower", "m, batch 2, torch.amp bf16": "alike",
    }  # fmt: skip
    assert {change.yardstick for change in changes} == {"torch.amp bf16", "O0"}
    alone = compare(simulated(2), simulated(3, slower=1.2))  # for one row it is known as exactly
    assert [(each.low, each.high) for each in changes[3:]] == [(each.low, each.high) for each in alone]
    assert str(against_table(changes, file="f", saved=MACHINE).renderables[-1]) == "worse: m, batch 2, O1 bf16."


def test_of_sweeps_of_the_same_code_at_most_one_in_twenty_calls_any_row_different():
    """Twelve points of three rows; with what is noise to one row alone it is twelve in twenty."""
    alarms = 0
    for number in range(40):
        first, second = (
            sweep(*(simulated(1000 * number + 20 * half + i, scatter=0.1, apart=0.01) for i in range(12)))
            for half in (0, 1)
        )
        alarms += any(change.verdict != "alike" for change in compare_sweeps(first, second))
    assert alarms <= 2


def test_points_of_one_sweep_alone_are_new_or_gone_and_of_a_broken_one_not_judged():
    before = sweep(simulated(0), simulated(2), None)
    now = sweep(simulated(1), None, simulated(3), total=2)
    found = {change.name: change.verdict for change in compare_sweeps(before, now) if change.verdict != "alike"}
    rows = ("O0", "O1 bf16", "torch.amp bf16")
    assert found == {f"m, batch {at}, {row}": word for at, word in ((3, "new"), (2, "gone")) for row in rows}
    slower, new = simulated(1, slower=1.04), [simulated(i) for i in range(2, 7)]
    found = compare_sweeps(sweep(simulated(0)), sweep(slower, *new))
    assert [change.name for change in found if change.is_worse] == ["m, batch 1, O1 bf16"]  # new ones hide nothing
    broken = compare_sweeps(before, replace(now, total=3))
    assert "gone" not in {change.verdict for change in broken}


def test_another_sweep_is_refused_before_anything_is_measured(tmp_path):
    work = load_workload("regression", {"batch": "2"})
    with pytest.raises(
        WorkloadError, match=r"--against file has m, batch 1, but this sweep has m, batch 2; at least one model and"
    ):
        check_comparable_sweep(sweep(simulated(0)), [("m", work)])
    with pytest.raises(WorkloadError, match="workload 'w', but this run measures 'regression'"):
        check_comparable_sweep(sweep(simulated(0), simulated(0)), [("m", work)])
    path = tmp_path / "x.json"
    with pytest.raises(WorkloadError, match="holds no measured sweep point"):
        load_saved_sweep(path)
    path.write_text(sweep_json(sweep(None)))
    with pytest.raises(WorkloadError, match="holds no measured sweep point"):
        load_saved_sweep(path)
    path.write_text(sweep_json(sweep(result([BenchRun("a", "O0", "bf16", False, False, times_ms=(0.0,))]))))
    with pytest.raises(WorkloadError, match="run 'a' has a step time that is not positive and finite"):
        load_saved_sweep(path)
    path.write_text(bench_json(simulated(0)))
    with pytest.raises(WorkloadError, match=r"KeyError: 'schema'.*pass another file to --against"):
        load_saved_sweep(path)
    path.write_text(sweep_json(sweep(simulated(0))))
    assert len(load_saved_sweep(path).points) == 1
    with pytest.raises(WorkloadError, match="is not a benchmark result of this halfstep version"):
        load_saved(path)
