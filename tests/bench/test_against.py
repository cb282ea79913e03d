"""A benchmark against a saved one: simulated runs of the same code differ rarely, a planted slowdown is found."""

import json
import random
from dataclasses import dataclass

import pytest

from halfstep.bench.against import check_comparable, compare, load_saved
from halfstep.errors import WorkloadError
from halfstep.measurements import BenchChange, BenchRun
from halfstep.report.against import against_table

FIELDS = {
    "workload": "w", "settings": {"batch": "4"},
    "machine": {"processor": "P", "torch": "2", "halfstep": "0", "threads": 1}, "peak_method": "counted",
}  # fmt: skip


@dataclass
class Result:
    """What of a BenchResult is compared."""

    runs: tuple[BenchRun, ...]
    peak_method: str = "counted"


def simulated(seed, *, slower=1.0, steps=100, rows=("O0", "O1 bf16", "torch.amp bf16"), peak=1000):
    """Runs of a machine that wanders by a fifth: steps scatter by 4%, processes differ by 0.3%."""
    rng = random.Random(seed)
    times, machine = {name: [] for name in rows}, 0.0
    own = {name: rng.gauss(0, 0.003) for name in rows}
    for _ in range(steps):
        machine = 0.95 * machine + rng.gauss(0, 0.05)
        for name in rows:
            base = 10.0 * (slower if name == "O1 bf16" else 1.0)
            outlier = 1.5 if rng.random() < 0.03 else 1.0
            times[name].append(base * 2.718 ** (machine + own[name] + rng.gauss(0, 0.04)) * outlier)
    return Result(
        tuple(
            BenchRun(
                name, name.split()[0] if "amp" not in name else "O1", "bf16", "amp" in name, False,
                times_ms=tuple(times[name]), peak_bytes=peak,
            )
            for name in rows
        )
    )  # fmt: skip


def saved(tmp_path, result, **edits):
    kept = ("name", "times_ms", "peak_bytes", "peer")
    runs = [{name: getattr(run, name) for name in kept} for run in result.runs]
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(FIELDS | {"runs": runs} | edits))
    return path


def verdicts(tmp_path, before, now):
    return {change.name: change for change in compare(load_saved(saved(tmp_path, before)), now)}


def test_runs_of_the_same_code_differ_in_at_most_one_of_twenty(tmp_path):
    found = [verdicts(tmp_path, simulated(2 * i), simulated(2 * i + 1))["O1 bf16"] for i in range(200)]
    assert sum(change.verdict != "alike" for change in found) <= 10


def test_a_slowdown_of_a_twentieth_is_found_in_nineteen_of_twenty(tmp_path):
    found = [verdicts(tmp_path, simulated(2 * i), simulated(2 * i + 1, slower=1.05))["O1 bf16"] for i in range(200)]
    assert sum(change.verdict == "slower" and change.is_worse for change in found) >= 190


def test_what_gets_faster_is_no_fault(tmp_path):
    change = verdicts(tmp_path, simulated(0), simulated(1, slower=0.8))["O1 bf16"]
    assert (change.verdict, change.is_worse) == ("faster", False)
    assert change.low < change.time < change.high < 0.9


def test_a_machine_that_is_slower_as_a_whole_changes_nothing(tmp_path):
    now = simulated(1)
    doubled = Result(
        tuple(
            BenchRun(run.name, run.level, run.low, run.peer, False, times_ms=tuple(2 * t for t in run.times_ms))
            for run in now.runs
        )
    )
    found = verdicts(tmp_path, simulated(0), doubled)
    assert found["O1 bf16"].verdict == found["O0"].verdict == "alike"
    assert (found["O1 bf16"].yardstick, found["O0"].yardstick) == ("torch.amp bf16", "torch.amp bf16")
    assert found["torch.amp bf16"].yardstick == "O0"


def test_without_a_yardstick_milliseconds_count(tmp_path):
    change = verdicts(tmp_path, simulated(0, rows=("O1 bf16",)), simulated(0, rows=("O1 bf16",), slower=2.0))["O1 bf16"]
    assert (change.yardstick, change.verdict) == (None, "slower")
    assert change.time == pytest.approx(2.0)


def test_memory_that_grew_by_a_hundredth_is_worse(tmp_path):
    for peak, worse in ((1000, False), (1009, False), (1020, True), (900, False)):
        found = verdicts(tmp_path, simulated(0), simulated(0, peak=peak))["O1 bf16"]
        assert found.is_worse == worse


def test_rows_that_cannot_be_compared_say_why(tmp_path):
    found = verdicts(tmp_path, simulated(0, rows=("O0",)), simulated(1))
    assert found["O1 bf16"] == BenchChange("O1 bf16", "new", None)
    assert verdicts(tmp_path, simulated(0), simulated(1, steps=8))["O1 bf16"].verdict == "too few steps"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no result"),
        ("[]", "is no result"),
        ("{}", "workload|machine"),
        ('{"machine": {}, "settings": {}, "runs": [{"name": 1}]}', "times_ms"),
        ('{"machine": {}, "settings": [], "runs": []}', "is no result"),
        ('{"machine": {}, "settings": {}, "runs": [{"name": 1, "times_ms": [0]}]}', "a step of no time"),
    ],
)
def test_a_file_that_is_no_result_is_one_error(tmp_path, text, why):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(WorkloadError, match=why):
        load_saved(tmp_path / "x.json")
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_saved(tmp_path / "none.json")


def test_other_work_is_refused_before_anything_is_measured(tmp_path):
    found = load_saved(saved(tmp_path, simulated(0)))
    check_comparable(found, "w", {"batch": 4})
    with pytest.raises(WorkloadError, match="workload 'w', this is 'v'"):
        check_comparable(found, "v", {"batch": 4})
    with pytest.raises(WorkloadError, match="batch 4 there and 8 here"):
        check_comparable(found, "w", {"batch": 8})


def test_the_table_ends_with_what_is_worse(tmp_path):
    def last(before, now):
        changes = compare(load_saved(saved(tmp_path, before)), now)
        return str(against_table(changes, file="f", saved=("P", "2", "0")).renderables[-1])

    assert last(simulated(0), simulated(1, slower=1.3)) == "worse: O1 bf16."
    assert last(simulated(0), simulated(1, slower=0.7)) == "faster: O1 bf16."
    assert last(simulated(0), simulated(1)) == "nothing differs beyond the noise."


def test_memory_that_was_counted_another_way_is_not_compared(tmp_path):
    before, now = simulated(0), simulated(1, peak=2000)
    assert all(change.memory == 2 for change in verdicts(tmp_path, before, now).values())
    path = saved(tmp_path, before, peak_method="weighed")
    assert [(change.memory, change.is_worse) for change in compare(load_saved(path), now)] == [(None, False)] * 3
