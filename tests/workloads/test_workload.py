"""What all workloads share: seeds, shuffling, evaluation, checks of their settings."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.errors import WorkloadError
from halfstep.lab.workloads.load import WORKLOADS, Regression
from halfstep.lab.workloads.workload import Workload, seeded, shuffled


@dataclass(frozen=True, kw_only=True)
class Two(Workload):
    """Two validation batches of different sizes, with losses that can be worked out by hand."""

    def build(self, seed):
        return seeded(seed, lambda: nn.Linear(1, 1))

    def batches(self, seed):
        while True:
            yield torch.ones(1, 1), torch.ones(1, 1)

    def validation(self):
        return [(torch.ones(3, 1), torch.full((3, 1), 2.0)), (torch.ones(1, 1), torch.full((1, 1), 6.0))]

    def loss(self, outputs, targets):
        return (targets - outputs).mean()

    def correct(self, outputs, targets):
        return (targets > 3).float().mean()


class Identity(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        assert not self.training
        assert not torch.is_grad_enabled()
        return x + self.weight


def test_evaluate_weights_batches_by_their_size():
    # losses 1 (three examples) and 5 (one): (3 * 1 + 5) / 4; right are 0 of three and 1 of one
    assert Two().evaluate(Identity()) == {"loss": 2.0, "accuracy": 0.25}


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_mode_as_it_was(training):
    model = Identity().train(training)
    Two().evaluate(model)
    assert model.training is training


def test_evaluate_leaves_the_mode_as_it_was_after_an_error():
    class Broken(Identity):
        def forward(self, x):
            raise ValueError("broken")

    model = Broken().train()
    with pytest.raises(ValueError, match="broken"):
        Two().evaluate(model)
    assert model.training


def test_a_workload_without_accuracy_reports_the_loss_alone():
    assert set(Regression(d_in=2, d_out=2).evaluate(nn.Linear(2, 2))) == {"loss"}


def test_seeded_repeats_and_leaves_the_callers_generator_alone():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = seeded(1, lambda: nn.Linear(3, 3))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.weight, seeded(1, lambda: nn.Linear(3, 3)).weight)
    assert not torch.equal(first.weight, seeded(2, lambda: nn.Linear(3, 3)).weight)


def test_shuffled_gives_each_index_once_an_epoch_in_another_order():
    epochs = shuffled(6, 3, seed=0)
    first, second = (torch.cat([next(epochs), next(epochs)]).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second


@pytest.mark.parametrize(("count", "fits"), [(4, True), (3, False)])
def test_a_batch_is_at_most_all_examples(count, fits):
    if fits:
        assert len(next(shuffled(count, 4, 0))) == 4
    else:
        with pytest.raises(WorkloadError, match="batch=4 is more than the 3 training examples"):
            next(shuffled(count, 4, 0))


@pytest.mark.parametrize("field", ["batch", "lr", "max_norm"])
def test_a_setting_of_zero_is_refused(field):
    with pytest.raises(WorkloadError, match=f"{field} is 0; set it above 0"):
        Two(**{field: 0})


def test_a_workload_is_named_after_its_class_unless_it_says_otherwise():
    assert Two.name == "Two"
    assert Regression.name == "regression"


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_in_a_workload_is_about_precision(name):
    source = Path(inspect.getfile(WORKLOADS[name])).read_text(encoding="utf-8")
    assert not re.findall(r"autocast|float16|bfloat16|\.half\(|GradScaler|initialize", source)
