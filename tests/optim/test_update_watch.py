"""What is said to be added to a weight is what the step adds, also where the stored weight cannot show it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.errors import SessionError
from halfstep.train.optim.optimizers import Lamb, Lion
from halfstep.train.optim.steppers import watching
from tests.contracts.cases import batch, every_plan, make, train


class WithoutRow(torch.optim.RMSprop):
    """Of a class that no row is for."""


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01, "maximize": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain": (torch.optim.SGD, {}),
    "Lion": (Lion, {"weight_decay": 0.1}),
    "Lamb": (Lamb, {"weight_decay": 0.1}),  # whose weights are whole
    "own step": (WithoutRow, {}),
}


def updates(session, sample=None):
    """Makes the step and returns what was said to be added, by parameter: parts of (stored weight, update)."""
    part, found = session._parts[0], {}
    held = part.accumulator.collect()

    def take(made):
        found.update({p: list(made.parts(index, sample)) for index, p in enumerate(made.params)})

    skipped = torch.zeros((), dtype=torch.bool)
    with watching(part.stepper, session._store, held.inverse, skipped, held.params, held.grads, take):
        session.step()
    return found


def values(session):
    return {p: session._store.full(p).clone() for p in session._parts[0].parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@every_plan
@pytest.mark.slow_but("O0", "O1-fp16", "O2-bf16", "O3-bf16")
def test_an_update_is_the_change_of_the_full_value(name, low, kind):
    optimizer, options = OPTIMIZERS[kind]
    model, opt = make(0, optimizer, lr=0.01, **options)
    session = halfstep.initialize(model, opt, name, low=low)
    for number in range(3):  # the first one too, when there is no state
        opt.zero_grad()
        inputs, targets = batch(number)
        session.backward(F.mse_loss(model(inputs), targets))
        before = values(session)
        found = updates(session)
        assert found.keys() == before.keys()
        for p, after in values(session).items():
            update = torch.cat([update.flatten() for _, update in found[p]]).reshape(p.shape)
            expected = after.double() - before[p].double()
            resolution = torch.finfo(torch.float32).eps * before[p].abs().max()
            if name == "O3":  # only the stored weight is there afterwards
                stored = (before[p].double() + update).float()
                step = (after.abs() * torch.finfo(p.dtype).eps).max() / (1 if low == "bf16" else 2)  # at random or not
                assert (stored - after).abs().max() <= 1.01 * step + 1e-7
            else:
                torch.testing.assert_close(update, expected, rtol=1e-4, atol=2 * float(resolution))


def test_an_update_below_what_fp32_can_add_is_seen():
    model, opt = make(0, torch.optim.SGD, lr=1e-12)
    session = halfstep.initialize(model, opt, "O1", low="bf16")
    inputs, targets = batch(0)
    session.backward(F.mse_loss(model(inputs), targets))
    before = values(session)
    ((_, head),) = updates(session)[model.head.weight]
    assert torch.equal(values(session)[model.head.weight], before[model.head.weight])
    torch.testing.assert_close(head, -1e-12 * model.head.weight.grad.double(), rtol=1e-6, atol=0)


def test_a_foreign_optimizer_without_masters_shows_what_the_weight_cannot_hold():
    model, opt = make(0, WithoutRow, lr=1e-7)
    session = halfstep.initialize(model, opt, "O3", low="bf16")
    inputs, targets = batch(0)
    session.backward(F.mse_loss(model(inputs), targets))
    weight = model.layer_norm.weight  # ones: their neighbours are 2^-7 away
    stored = weight.detach().clone()
    ((before, update),) = updates(session)[weight]
    assert torch.equal(weight, stored)
    assert torch.equal(before, stored)
    assert update.abs().min() > 0
    assert session._parts[0].stepper.unrounded is None


def test_a_large_weight_comes_in_parts_or_as_a_sample():
    model = nn.Linear(300, 300)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    for sample, counts in ((None, [2**16, 90_000 - 2**16]), (1000, [960])):
        opt.zero_grad()
        session.backward(model(torch.ones(1, 300)).sum())
        found = updates(session, sample)[model.weight]
        assert [update.numel() for _, update in found] == counts
        assert all((update == -1.0).all() for _, update in found)


def test_a_transposed_gradient_and_a_sparse_one_reach_their_own_elements():
    model = nn.Embedding(4, 3, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    session.backward(model(torch.tensor([1, 1, 3])).sum())
    ((_, update),) = updates(session)[model.weight]
    assert update.reshape(4, 3)[:, 0].tolist() == [0.0, -2.0, 0.0, -1.0]
    session.close()

    weight = nn.Parameter(torch.zeros(2, 3))
    model = nn.ParameterList([weight])
    opt = torch.optim.SGD([weight], lr=1.0)
    session = halfstep.initialize(model, opt, "O1", low="bf16")
    session.backward((weight.t() * torch.arange(6.0).reshape(3, 2)).sum())
    weight.grad = weight.grad.t().contiguous().t()
    ((_, update),) = updates(session)[weight]
    assert torch.equal(update.reshape(2, 3), -torch.arange(6.0).reshape(3, 2).t().double())


@pytest.mark.parametrize("what", ["gradient", "state"])
def test_what_the_step_refuses_is_left_to_it(what):
    model, opt = make(0, torch.optim.AdamW)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    train(session, model, opt, [0])
    inputs, targets = batch(1)
    opt.zero_grad()
    session.backward(F.mse_loss(model(inputs), targets))
    if what == "gradient":
        model.head.weight.data = model.head.weight.data[:, :1].contiguous()
    else:
        opt.state[model.head.weight]["exp_avg"] = torch.zeros(1)
    with pytest.raises(SessionError, match="has shape"):
        updates(session)
