"""A number of seconds is shared by all rows: who is trained, for how many steps, and who is only timed."""

import io
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from halfstep.errors import WorkloadError
from halfstep.explain.report.bench import bench_table
from halfstep.formats import BF16, FP32
from halfstep.initialize import initialize
from halfstep.lab.bench import bench as bench_module
from halfstep.lab.bench.bench import SLOW, Course, bench, course, turn_of, warmup
from halfstep.lab.bench.lane import Origin, Remote, Step, Task
from halfstep.lab.bench.variants import AmpVariant, End, Entry
from halfstep.lab.workloads.load import Regression

CPU = torch.device("cpu")
SMALL = Regression(batch=4, d_in=8, d_out=8, layers=1)
O0, O1, AMP = Entry("O0", FP32, peer=False), Entry("O1", BF16, peer=False), Entry("torch.amp", BF16, peer=True)


def shared(trials, **given):
    return course(trials, 0, **{"left": 60.0, "validation": 0.0, "seeds": 1, "most": 1000} | given)


def test_rows_that_are_trained_make_as_many_steps_as_fit():
    assert shared({0: 1.0, 1: 2.0}) == Course(20, 4, seconds=60.0)
    assert shared({0: 1.0, 1: 2.0}, most=7).steps == 7
    assert shared({0: 1.0, 1: 2.0}, seeds=2) == Course(10, 2, seconds=30.0)
    assert shared({0: 100.0}).steps == 1


def test_a_row_is_too_slow_from_five_times_o0_s_step_on():
    assert shared({0: 1.0, 1: SLOW}).slow == {}
    taken = shared({0: 1.0, 1: SLOW + 0.1})
    assert (taken.slow, taken.steps) == ({1: 5.1}, 60)


# Two thirds of what 4 s of a process, 2 steps of O0 and 2 of torch.amp leave hold so many rounds of 1 + 20 s. With 58 s
# its trial has one step, as four more do not fit.
@pytest.mark.parametrize(("seconds", "tried", "timed"), [(110, 2, 2), (108, 2, 1), (58, 1, 1), (57, 1, 0)])
def test_two_thirds_of_the_time_may_go_to_timing_a_slow_row(clock, seconds, tried, timed):
    (_, amp) = bench(SMALL, [O0, AMP], seconds=seconds, device=CPU, clock=clock).runs
    assert [len(lane.made) for lane in clock.lanes if lane.name == "torch.amp"] == [tried + timed]
    assert amp.times_ms == (2e4,) * (1 + timed)


def test_a_validation_takes_its_part_or_is_left_out():
    with_it = shared({0: 1.0, 1: 2.0}, validation=4.0)
    assert (with_it.validate, with_it.steps) == (True, (60 - 4 * 3) // 3)
    assert shared({0: 1.0, 1: 2.0}, validation=10.0).validate
    without = shared({0: 1.0, 1: 2.0}, validation=10.1)
    assert (without.validate, without.steps) == (False, 20)


@pytest.mark.parametrize(
    ("seconds", "steps", "turn"), [(0.05, 1000, 1), (0.01, 1000, 5), (0.001, 1000, 20), (0.001, 40, 5), (0.001, 39, 1)]
)
def test_a_turn_lasts_long_enough_to_be_measured_and_there_are_several(seconds, steps, turn):
    assert turn_of([2 * seconds, seconds], steps) == turn


def test_the_first_fifth_of_a_turn_is_cold():
    assert [replace(Course(1, 0), turn=turn).cold for turn in (1, 5, 9, 10, 20)] == [0, 1, 1, 2, 4]


class Played:
    """A lane whose steps take as many seconds of `Clock` as its row says."""

    def __init__(self, entry, clock):
        self.name, self.clock = entry.level, clock
        self.took = {"O0": 1.0, "O1": 1.5, "torch.amp": clock.slow}[entry.level]
        self.made, self.begun, self.closed, self.validated = [], 0, False, []

    def ready(self):
        self.clock.now += 4

    def begin(self, seed, *, counted=False):
        self.begun += 1

    def step(self, number, steps):
        took = self.took * self.clock.hogged.get((self.name, len(self.made)), 1.0)
        self.clock.now += took * self.clock.drag
        self.clock.log.append(self.name)
        self.made.append(number)
        return Step(1.0, 1e3 * took)

    def gauge(self):
        return self.clock.validation

    def end(self, *, validate):
        self.validated.append(validate)
        return End(0, 1.0, {"weights": 288}, 100, {"loss": 2.0} if validate else {})

    def close(self):
        self.closed = True


class Clock:
    def __init__(self):
        self.now, self.slow, self.drag, self.validation, self.log, self.lanes = 0.0, 20.0, 1.0, 0.5, [], []
        self.hogged = {}  # times as long, by row and the number of its step since the start

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def lane(entry):
        clock.lanes.append(Played(entry, clock))
        return clock.lanes[-1]

    monkeypatch.setattr(bench_module, "Local", lambda entry, deal: lane(entry))
    monkeypatch.setattr(bench_module, "Remote", lambda task: lane(task.entry))
    return clock


def test_a_row_that_is_too_slow_is_timed_and_not_trained_and_the_others_make_as_many_steps_as_each_other(clock):
    result = bench(SMALL, [O0, O1, AMP], seconds=150, device=CPU, clock=clock)
    full, low, amp = result.runs
    assert (amp.slow, amp.times_ms, amp.train_loss, amp.validation) == (20.0, (2e4, 2e4, 2e4), (), {})
    assert (amp.peak_bytes, amp.bytes_per_parameter, amp.vs_o0) == (100, {"weights": 4.0}, pytest.approx(1 / 20))
    # 150 s less 4 of a process, the trial of 2 steps each, 2 more of torch.amp and O0, and 2 validations
    steps = int((150 - 4 - 2 * 22.5 - 2 * 21 - 0.5 * 2.5) / 2.5)
    assert result.steps == steps == 23
    for run in (full, low):
        assert (run.slow, len(run.times_ms)) == (None, steps - warmup(steps))
        assert (run.train_loss, run.validation) == ((1.0,), {"loss": (2.0,)})
    o0, o1, peer = sorted(clock.lanes, key=lambda lane: lane.name)
    assert (o0.made, o1.made) == ([0, 1, 2, 3, *range(steps)], [0, 1, *range(steps)])
    assert (peer.made, peer.begun, peer.validated) == ([0, 1, 2, 3], 1, [False])
    assert clock.log[6:14] == ["O0", "torch.amp"] * 2 + ["O0", "O1", "O1", "O0"]
    assert clock.now <= 150
    console = Console(file=io.StringIO(), width=200)
    console.print(bench_table(result, width=200))
    said = "torch.amp bf16: timed over 3 steps and not trained, as a step takes 20.0 times that of O0."
    assert said in console.file.getvalue()


def test_progress_names_the_row_whose_step_is_awaited(clock):
    told = {}
    bench(
        SMALL,
        [O0, O1, AMP],
        seconds=150,
        device=CPU,
        clock=clock,
        progress=lambda w, *_: told.update({len(clock.log): w}),
    )
    assert [told[made].split()[0].rstrip(":") for made in range(len(clock.log))] == clock.log


def test_a_row_of_which_few_steps_would_fit_makes_one_and_that_is_its_time(clock):
    clock.slow = 60.0
    result = bench(SMALL, [O0, O1, AMP], seconds=120, device=CPU, clock=clock)
    full, low, amp = result.runs
    assert (amp.slow, amp.times_ms, amp.peak_bytes, amp.bytes_per_parameter) == (60.0, (6e4,), None, {"weights": 4.0})
    assert [lane.made for lane in clock.lanes if lane.name == "torch.amp"] == [[0]]
    assert (full.peak_bytes, low.peak_bytes) == (100, 100)
    assert result.steps == int((120 - 4 - 5 - 60 - 1.25) / 2.5)
    assert clock.now <= 120


# One step of a row's trial, or that and the next, waited for other work.
@pytest.mark.parametrize("late", [[1], [1, 2]])
@pytest.mark.parametrize("name", ["O1", "torch.amp"])
def test_steps_that_other_work_delayed_do_not_cut_a_row_short(clock, name, late):
    clock.slow, clock.hogged = 2.0, {(name, number): 15.0 for number in late}
    result = bench(SMALL, [O0, O1, AMP], seconds=250, device=CPU, clock=clock)
    assert [run.slow for run in result.runs] == [None] * 3
    assert {len(run.times_ms) for run in result.runs} == {result.steps - warmup(result.steps)}
    assert {max(run.times_ms) for run in result.runs} == {1e3, 1.5e3, 2e3}
    hogged = next(lane for lane in clock.lanes if lane.name == name)
    assert hogged.made[: 2 + len(late) + 1] == [*range(2 + len(late)), 0]


def test_a_step_of_o0_that_other_work_delayed_hides_no_slow_row(clock):
    clock.hogged = {("O0", 1): 15.0}
    full, _, amp = bench(SMALL, [O0, O1, AMP], seconds=250, device=CPU, clock=clock).runs
    assert (full.slow, amp.slow, len(amp.times_ms)) == (None, 20.0, 3)
    assert max(full.times_ms) == 1e3


def test_a_row_that_is_timed_and_whose_steps_differ_is_named(clock):
    clock.hogged = {("torch.amp", 3): 3.0}
    result = bench(SMALL, [O0, O1, AMP], seconds=250, device=CPU, clock=clock)
    console = Console(file=io.StringIO(), width=300)
    console.print(bench_table(result, width=300))
    assert "the quartiles of torch.amp bf16 lie more than a third" in console.file.getvalue()


def test_a_row_below_the_bound_is_trained(clock):
    clock.slow = 5.0
    result = bench(SMALL, [O0, O1, AMP], seconds=120, device=CPU, clock=clock)
    assert [run.slow for run in result.runs] == [None] * 3
    assert {len(run.times_ms) for run in result.runs} == {result.steps - warmup(result.steps)}
    assert clock.now <= 120


def test_steps_without_seconds_train_every_row_to_the_end(clock):
    result = bench(SMALL, [O0, AMP], steps=2, device=CPU, clock=clock)
    assert [(run.slow, len(run.times_ms)) for run in result.runs] == [(None, 2), (None, 2)]


def test_steps_beside_seconds_are_the_most(clock):
    assert bench(SMALL, [O0, O1], steps=3, seconds=120, device=CPU, clock=clock).steps == 3
    assert bench(SMALL, [O0, O1], steps=300, seconds=120, device=CPU, clock=clock).steps < 50


def test_a_machine_that_becomes_slower_ends_all_rows_after_the_same_step(clock):
    steps = bench(SMALL, [O0, O1], seconds=120, device=CPU, clock=clock).steps
    begin = Played.begin

    def slower(lane, seed, *, counted=False):
        lane.clock.drag = 1.0 if counted else 4.0
        return begin(lane, seed, counted=counted)

    clock.now, clock.lanes[:] = 0.0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Played, "begin", slower)
        result = bench(SMALL, [O0, O1], seconds=120, seeds=(0, 1), device=CPU, clock=clock)
    assert 1 < result.steps < steps / 2
    assert [len(lane.made) for lane in clock.lanes] == [2 + 2 * result.steps] * 2
    assert {len(run.train_loss) for run in result.runs} == {2}


def test_without_o0_a_row_is_held_against_the_fastest(clock):
    (low, amp) = bench(SMALL, [O1, AMP], seconds=200, device=CPU, clock=clock).runs
    assert (low.slow, amp.slow) == (None, pytest.approx(20 / 1.5))


def test_a_validation_that_takes_too_long_is_left_out(clock):
    clock.validation = 1000.0
    (run,) = bench(SMALL, [O0], seconds=30, device=CPU, clock=clock).runs
    assert (run.validation, clock.lanes[0].validated, clock.now <= 30) == ({}, [False, False], True)


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_no_time_is_an_error(seconds):
    with pytest.raises(WorkloadError, match="more than 0 seconds"):
        bench(SMALL, [O0], seconds=seconds, device=CPU)


def test_a_peer_trains_in_its_own_process_and_not_here(monkeypatch):
    monkeypatch.setattr(AmpVariant, "train", lambda *given: pytest.fail("it trains here"))
    with initialize(SMALL.build(0), None, "O1", low="bf16"):  # there it would be an error, as below
        full, amp = bench(SMALL, [O0, AMP], steps=2, device=CPU).runs
    assert (full.error, amp.error) == (None, None)
    assert (len(amp.times_ms), amp.validation.keys()) == (2, {"loss"})
    assert amp.bytes_per_parameter == full.bytes_per_parameter


OPENS = """
import halfstep
from halfstep.lab.workloads.load import Regression

kept = []


class Own(Regression):
    def build(self, seed):
        kept.append(halfstep.initialize(super().build(seed), None, "O1", low="bf16"))
        return super().build(seed)


def mine(batch="2"):
    return Own(batch=int(batch), d_in=4, d_out=4)
"""


def test_a_session_in_the_process_of_a_peer_is_an_error(tmp_path, forked):
    (tmp_path / "own.py").write_text(OPENS, encoding="utf-8")
    with (
        closing(Remote(Task(Origin(f"{tmp_path / 'own.py'}:mine", {}), AMP, CPU))) as peer,
        pytest.raises(WorkloadError, match="a session is open in the process of a peer"),
    ):
        peer.begin(0)


def test_a_peer_of_a_workload_that_no_other_process_can_load_is_an_error_before_anything_is_measured():
    class Own(Regression):
        pass

    with pytest.raises(WorkloadError, match=r"cannot load Own; pass origin=Origin\("):
        bench(Own(batch=4, d_in=8, d_out=8), [O0, AMP], steps=1, device=CPU)
