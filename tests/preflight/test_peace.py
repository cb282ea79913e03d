"""Healthy runs are left in peace by check, and nothing of it stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import FULL, Rule
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.cifar_resnet import CifarResNet
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM, SentimentLSTM
from halfstep.lab.workloads.load import Regression, load_workload
from halfstep.records import COMPARED
from tests.contracts.cases import batch, differing, every_plan, snapshot, start
from tests.models.zoo import TASKS
from tests.preflight.planted import Does, Two, opened


class Unread(ImdbLSTM):
    """imdb_lstm on random words, so that it needs no data."""

    def build(self, seed):
        torch.manual_seed(seed)
        return SentimentLSTM(100, embedding=16, hidden=16)

    def batches(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(100, (8, 20), generator=generator), torch.randint(2, (8,), generator=generator).float()


class Unseen(CifarResNet):
    """cifar_resnet on noise."""

    def batches(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(8, 3, 32, 32, generator=generator), torch.randint(10, (8,), generator=generator)


QUICK = [
    CharLM(d=32, layers=1, heads=2, length=16, batch=4),
    Unseen(width=4),
    Unread(),
    Regression(d_in=16, d_out=8),
]


def above_notes(job, plan, low):
    model = job.build(0)
    batches, optimizer = job.batches(0), job.optimizer(model, fused=True)

    def closure():
        inputs, targets = next(batches)
        return job.loss(model(inputs), targets)

    with halfstep.initialize(model, optimizer, plan, low=low) as session:
        return [str(finding) for finding in halfstep.check(session, closure) if finding.severity != "note"]


@every_plan
@pytest.mark.parametrize("job", QUICK, ids=lambda job: type(job).__bases__[0].__name__ + job.name)
@pytest.mark.slow_but("O0", "O1-fp16", "O2-fp16")
def test_healthy_workloads_are_left_in_peace(job, name, low):
    assert above_notes(job, name, low) == []


@pytest.mark.slow_but("GPT with a mask buffer-O2", "LSTM-O1")
@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("name", TASKS)
def test_six_common_models_are_left_in_peace(name, plan):
    task = TASKS[name]
    model, (examples,) = task.build(), task.batches(1)
    with halfstep.initialize(model, task.optimizer(model.parameters()), plan, low="fp16") as session:
        found = halfstep.check(session, lambda: task.loss(model, examples))
    assert [str(finding) for finding in found if finding.severity != "note"] == []


@pytest.mark.slow
@every_plan
@pytest.mark.parametrize("workload", ["char_lm", "cifar_resnet", "imdb_lstm", "regression"])
def test_healthy_workloads_in_full_size_are_left_in_peace(workload, name, low, data_dir):
    folders = {"cifar_resnet": "cifar10", "imdb_lstm": "imdb"}
    job = load_workload(workload, data=data_dir / folders[workload] if workload in folders else None)
    assert above_notes(job, name, low) == []


@every_plan
def test_nothing_is_left_behind(name, low):
    model, optimizer, session = start(name, low)
    for step in range(2):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        session.backward(F.mse_loss(model(inputs), targets))
        if step == 0:
            session.step()
    before, gradients, state = snapshot(model, optimizer, session), [p.grad for p in model.parameters()], None
    values = [None if g is None else g.clone() for g in gradients]
    state = torch.get_rng_state()

    def closure():
        inputs, targets = batch(5)
        return F.mse_loss(model(F.dropout(inputs)), targets)

    halfstep.check(session, closure)
    assert differing(before, snapshot(model, optimizer, session)) == []
    assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(a is None or torch.equal(a, g) for a, g in zip(values, gradients, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    session.step()


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_what_is_not_in_the_session_are_left_alone(fails):
    other, inputs = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)

    def picky(x):
        if fails and x.dtype is torch.float16:
            raise TypeError("fp32 alone")
        return x

    model, leaves = Two(Does(picky)), [*other.parameters(), inputs]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    found = halfstep.check(opened(model), lambda: model(other(inputs)).square().mean())
    assert [finding.cure for finding in found if finding.severity != "note"] == [(Rule("planted", FULL),)] * fails
    assert all(bool((leaf.grad == 1).all()) for leaf in leaves)


def test_sparse_gradients_are_checked_as_well():
    table = nn.Embedding(10, 8, sparse=True)
    (compared,) = halfstep.check(opened(table), lambda: table(torch.arange(3)).square().mean())
    assert compared.code == COMPARED
