"""The experiment: same weights, same batches, in turn; what it keeps when something fails or someone interrupts."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from halfstep.errors import DataError, OpError, SetupError, WorkloadError
from halfstep.formats import BF16, FP32
from halfstep.lab.bench import bench as experiment
from halfstep.lab.bench.bench import bench
from halfstep.lab.bench.variants import End, Entry, entries
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM
from halfstep.lab.workloads.load import Regression
from halfstep.machine import AVX2, AVX512_BF16, DeviceFacts
from halfstep.train.cast.recipes import RECIPES

FACTS = DeviceFacts("cpu", processor=AVX512_BF16)
CPU = torch.device("cpu")
SMALL = Regression(batch=4, d_in=8, d_out=8, layers=1)
O0 = Entry("O0", FP32, peer=False)


class Recorder:
    """A variant that trains nothing and writes down what it is asked."""

    def __init__(self, name, log):
        self.name = name
        self.log = log
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.closed = False

    def train(self, inputs, targets):
        self.log.append((self.name, inputs, self.optimizer.param_groups[0]["lr"]))
        return torch.tensor(float(len(self.log)))

    def observe(self):
        pass

    def end(self):
        return End(skipped=2, scale=8.0, memory={"weights": 72})

    def close(self):
        self.closed = True


@dataclass(frozen=True)
class Recorded(Entry):
    """A row whose variant is a Recorder."""

    log: list = None
    made: list = None

    def start(self, workload, seed, device):
        self.made.append(Recorder(self.level, self.log))
        return self.made[-1]


def recorded(*names):
    log, made = [], []
    return [Recorded(name, FP32, peer=False, log=log, made=made) for name in names], log, made


def test_rows_take_turns_on_the_same_batch_and_the_first_changes():
    rows, log, _ = recorded("a", "b", "c")
    bench(SMALL, rows, steps=3, device=CPU, memory=False)
    assert "".join(name for name, _, _ in log) == "abcbcacab"
    for i in range(0, 9, 3):
        assert log[i][1] is log[i + 1][1] is log[i + 2][1]


def test_the_learning_rate_follows_the_workload():
    class Falling(Regression):
        def lr_factor(self, step, steps):
            return 1 - step / steps

    rows, log, _ = recorded("a")
    bench(Falling(batch=4, d_in=8, d_out=8), rows, steps=4, device=CPU, memory=False)
    assert [lr for _, _, lr in log] == [1.0, 0.75, 0.5, 0.25]


def test_figures_are_kept_a_seed():
    rows, _, made = recorded("a")
    result = bench(SMALL, rows, steps=10, seeds=(3, 4), device=CPU, memory=False)
    (run,) = result.runs
    assert result.seeds == (3, 4)
    assert len(run.times_ms) == 2 * (10 - 2)
    assert run.train_loss == (10.0, 20.0)
    assert len(run.validation["loss"]) == 2
    assert (run.skipped, run.scale) == ((2, 2), (8.0, 8.0))
    assert run.bytes_per_parameter == {"weights": 1.0}
    assert [variant.closed for variant in made] == [True, True]
    assert result.complete


def test_rows_of_one_seed_start_from_the_same_weights_and_end_apart(on_processor, peers_here):
    on_processor(AVX512_BF16)
    job = Regression(batch=4, d_in=8, d_out=8, lr=0.1)
    result = bench(job, entries(["O0", "O1", "O3"], [BF16], FACTS, peer=True), steps=1, device=CPU, memory=False)
    losses = {run.name.removesuffix(" (emulated)"): run.train_loss[0] for run in result.runs}
    assert losses["O0"] == pytest.approx(losses["O1 bf16"], rel=1e-2)
    assert losses["O1 bf16"] == pytest.approx(losses["torch.amp bf16"], rel=1e-5)
    assert losses["O0"] != losses["O1 bf16"]


def test_the_error_of_a_gradient_is_over_the_noise_of_batches(on_processor):
    """Against O2's by hand, of a model with rounded weights."""

    class Changing(Regression):
        def batches(self, seed):
            return (next(super(Changing, self).batches(each)) for each in range(seed, 9))

    on_processor(AVX2)
    job = Changing(batch=16, d_in=16, d_out=16)
    rows = entries(["O0", "O1", "O2"], [BF16], FACTS, peer=False, products=("plan", "fp8", "nvfp4"))[:6]
    result = bench(job, rows, steps=1, device=CPU, memory=False, within=0.5)
    errors = {run.name.replace(" (emulated)", ""): run.gradient_error for run in result.runs}
    assert (errors["O0"], result.within) == (0.0, 0.5)
    assert 1e-4 < errors["O1 bf16"] < 0.02
    assert 2 * errors["O1 bf16"] < errors["O1 bf16, products fp8"] < errors["O1 bf16, products nvfp4"] / 2

    def gradient(batch, cast=lambda t: t):
        model = job.build(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(cast(p))
        job.loss(model(batch[0]), batch[1]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    batches = job.batches(0)
    one, other = next(batches), next(batches)
    noise = (gradient(one) - gradient(other)).norm()
    stored = (gradient(one, lambda t: t.bfloat16().float()) - gradient(one)).norm() / noise
    assert 0.5 * stored < errors["O2 bf16"] < 4 * stored
    assert bench(job, rows[:1], steps=1, device=CPU, memory=False).runs[0].gradient_error is None
    assert bench(SMALL, rows[:1], steps=1, device=CPU, memory=False, within=1.0).runs[0].gradient_error is None


def test_seeds_differ_and_repeat():
    rows = [O0]
    first = bench(SMALL, rows, steps=2, seeds=(0, 1), device=CPU, memory=False).runs[0]
    again = bench(SMALL, rows, steps=2, seeds=(1,), device=CPU, memory=False).runs[0]
    assert first.train_loss[0] != first.train_loss[1]
    assert first.train_loss[1] == again.train_loss[0]


def test_speedups_are_over_o0_and_over_the_peer_of_the_same_format(peers_here):
    result = bench(SMALL, entries(["O0", "O1"], [BF16], FACTS, peer=True), steps=2, device=CPU, memory=False)
    o0, o1, amp = result.runs
    assert (o0.vs_o0, o0.vs_amp) == (1.0, None)
    assert o1.vs_o0 is not None
    assert o1.vs_amp is not None
    assert amp.vs_amp == 1.0


def test_peak_memory_is_that_of_a_step_with_all_optimizer_state():
    job = Regression(batch=1, d_in=100, d_out=100, layers=1)
    run, low = bench(job, [O0, Entry("O3", BF16, peer=False)], steps=1, device=CPU).runs
    weights = 4 * 100 * 101
    # weights and gradients, and the few vectors of an example
    assert 2 * weights <= run.peak_bytes < 2 * weights + 8000
    assert run.bytes_per_parameter == {"weights": 4.0, "masters": 0.0, "gradients": 4.0, "optimizer": 0.0}
    assert low.bytes_per_parameter["weights"] == low.bytes_per_parameter["gradients"] == 2.0


def test_what_building_a_model_takes_is_no_part_of_the_peak():
    class Wasteful(Regression):
        def build(self, seed):
            torch.zeros(10**6)
            return super().build(seed)

    (run,) = bench(Wasteful(batch=1, d_in=8, d_out=8), [O0], steps=1, device=CPU).runs
    assert run.peak_bytes < 10**5


def test_a_plan_that_does_not_fit_is_a_row_that_says_why():
    class Refusing(Entry):
        def start(self, workload, seed, device):
            raise SetupError("does not fit")

    result = bench(SMALL, [Refusing("O1", BF16, peer=False), O0], steps=1, seeds=(0, 1), device=CPU)
    refused, o0 = result.runs
    assert (refused.error, refused.step_ms, refused.train_loss) == ("does not fit", None, ())
    assert (o0.error, len(o0.train_loss)) == (None, 2)
    assert result.complete


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_for_whose_op_tables_a_process_has_no_room_have_one_of_their_own(real, monkeypatch):
    """Torch's dispatcher has room for five; O0 has none, and rows of one table share it."""
    asked = []

    def lane(task):
        asked.append(task.entry.name)
        raise WorkloadError("asked for")

    if not real:
        monkeypatch.setattr(experiment, "Remote", lane)
    rows = [row for row in entries(["O0", "O2"], [BF16], FACTS, peer=False, products=["plan", *RECIPES])]
    rows.append(dataclasses.replace(rows[1], moments="bf16"))
    job = Regression(batch=16, d_in=32, d_out=32, layers=2)
    result = bench(job, rows, steps=2, device=CPU, memory=False)
    assert [run.name for run in result.runs if run.error] == asked == ([] if real else ["O2 bf16, products nvfp4"])
    assert all(len(run.train_loss) == 1 for run in result.runs if run.name not in asked)


def test_a_row_that_is_refused_is_never_started():
    rows, _, made = recorded("a")
    row = Recorded("a", FP32, peer=False, refused="no units", made=made)
    result = bench(SMALL, [row, *rows], steps=1, device=CPU)
    assert result.runs[0].error == "no units"
    assert len(made) == 2  # memory and one seed of the other


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupt_ends_it_with_what_was_measured(after):
    class Interrupted(Regression):
        def batches(self, seed):
            if seed == 1:
                for i, batch in enumerate(super().batches(seed)):
                    if i == after:
                        raise KeyboardInterrupt
                    yield batch
            yield from super().batches(seed)

    rows, _, made = recorded("a", "b")
    result = bench(Interrupted(batch=4, d_in=8, d_out=8), rows, steps=4, seeds=(0, 1), device=CPU, memory=False)
    assert not result.complete
    for run in result.runs:
        assert len(run.times_ms) == 4 + after
        assert len(run.train_loss) == 2
        assert len(run.validation["loss"]) == 1
    assert all(variant.closed for variant in made)


@dataclass(frozen=True)
class Failing(Recorded):
    """A row whose variant raises `error` from its step `at` on."""

    error: Exception = None
    at: int = 0

    def start(self, workload, seed, device):
        variant = super().start(workload, seed, device)
        train = variant.train

        def fail(inputs, targets):
            if len(self.log) == self.at:
                raise self.error
            return train(inputs, targets)

        variant.train = fail
        return variant


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OpError("it refuses"), "step 3 of seed 0: it refuses"),
        (KeyError("x"), r"step 3 of seed 0: KeyError: 'x' \(test_bench\.py, line \d+\)"),
    ],
)
def test_a_row_that_fails_in_training_says_where_and_the_others_go_on(error, said):
    rows, log, made = recorded("a")
    failing = Failing("b", FP32, peer=False, log=[], made=made, error=error, at=2)
    lost, kept = bench(SMALL, [failing, *rows], steps=4, seeds=(0, 1), device=CPU, memory=False).runs
    assert re.fullmatch(said, lost.error)
    assert len(lost.times_ms) == len(failing.log) == 2
    assert (lost.train_loss, lost.validation) == ((2.0,), {})
    assert (kept.error, len(kept.times_ms), len(log), len(kept.validation["loss"])) == (None, 8, 8, 2)
    assert [variant.closed for variant in made] == [True] * 3  # the row that failed has no second seed


def test_a_row_that_fails_while_memory_is_counted_is_not_trained():
    rows, _, made = recorded("a")
    failing = Failing("b", FP32, peer=False, log=[], made=made, error=MemoryError("too large"))
    lost, kept = bench(SMALL, [failing, *rows], steps=1, device=CPU).runs
    assert lost.error.startswith("counting memory: MemoryError: too large")
    assert (lost.peak_bytes, lost.step_ms, failing.log) == (None, None, [])
    assert kept.error is None


def test_a_row_that_fails_in_evaluation_says_so_and_the_others_go_on():
    class Picky(Regression):
        def evaluate(self, model):
            if model.bias.requires_grad:
                return {"loss": torch.tensor(0.5)}
            raise RuntimeError("no")

    class Frozen(Recorded):
        def start(self, workload, seed, device):
            variant = super().start(workload, seed, device)
            variant.model.bias.requires_grad_(False)
            return variant

    rows, _, made = recorded("a")
    frozen = Frozen("b", FP32, peer=False, log=[], made=made)
    job = Picky(batch=4, d_in=8, d_out=8)
    lost, kept = bench(job, [frozen, *rows], steps=2, seeds=(7,), device=CPU, memory=False).runs
    assert lost.error.startswith("evaluation after seed 7: RuntimeError: no (test_bench.py")
    assert (len(lost.times_ms), lost.validation) == (2, {})
    assert kept.error is None
    assert kept.validation == {"loss": (0.5,)}
    assert type(kept.validation["loss"][0]) is float


def test_batches_that_end_are_an_error_of_every_row_that_keeps_what_it_has():
    class Short(Regression):
        def batches(self, seed):
            yield from [batch for batch, _ in zip(super().batches(seed), range(2), strict=False)]

    rows, _, _ = recorded("a", "b")
    for run in bench(Short(batch=4, d_in=8, d_out=8), rows, steps=4, device=CPU, memory=False).runs:
        assert run.error == "step 3 of seed 0: the workload's batches() ended; it must yield batches without end"
        assert len(run.times_ms) == 2


def test_missing_data_ends_it_before_anything_is_measured():
    rows, _, made = recorded("a")
    with pytest.raises(DataError, match="aclImdb"):
        bench(ImdbLSTM(), rows, steps=1, device=CPU)
    assert made == []


@pytest.mark.parametrize(("steps", "seeds"), [(0, (0,)), (1, ())])
def test_nothing_to_do_is_an_error(steps, seeds):
    with pytest.raises(WorkloadError, match="expected at least one step and one seed"):
        bench(SMALL, [O0], steps=steps, seeds=seeds, device=CPU)


def test_progress_ends_at_its_total():
    said = []
    bench(SMALL, [O0], steps=2, seeds=(0, 1), device=CPU, progress=lambda *what: said.append(what))
    assert said[0] == ("O0: building the model", 0, 6)
    assert said[-1] == ("O0: evaluation after seed 1", 6, 6)


def test_the_result_says_what_was_asked_and_where_it_ran():
    result = bench(SMALL, [O0], steps=1, device=CPU, command="halfstep bench regression")
    assert result.workload == "regression"
    assert result.settings["d_in"] == "8"
    assert result.parameters == 72
    assert result.command == "halfstep bench regression"
    assert result.machine.torch == torch.__version__
    assert result.machine.threads == torch.get_num_threads()
    assert result.peak_method == "the allocator's peak"
