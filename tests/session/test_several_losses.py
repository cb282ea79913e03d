"""A session of several models, optimizers and losses: what is said of one of them is not another's."""

from __future__ import annotations

import logging

import torch
from torch import nn

import halfstep


def two(on_failure="warn", plan="O1", low="fp16"):
    """A session of two models with an optimizer each, and a function that trains one of them by its own loss."""
    models = [nn.Sequential(nn.Linear(16, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    session = halfstep.initialize(models, optimizers, plan, low=low, on_failure=on_failure)

    def train(index, inputs, factor=1.0):
        optimizers[index].zero_grad()
        session.backward(models[index](inputs).float().sum() * factor, loss_id=index)
        return session.step(optimizers[index])

    return session, models, train


def test_a_loss_is_blamed_at_its_own_scale_after_a_skipped_step_of_another(caplog):
    session, models, train = two()
    inputs = torch.ones(4, 16)
    while bool((last := train(1, inputs, factor=100.0)).skipped):  # it settles at 128: 4 * 100 * 128 < 65504
        pass
    assert float(last.scale) == 128.0
    assert bool(train(0, inputs * 1e9).skipped)
    with caplog.at_level(logging.INFO, "halfstep"):
        assert session.blame(lambda: models[1](inputs).float().sum() * 100.0, loss_id=1) is None
    assert "loss scale 128" in caplog.text
    assert "does not reproduce" not in caplog.text
    session.close()


def test_a_loss_is_blamed_at_the_scale_of_its_own_skipped_step_after_a_good_one_of_another():
    session, models, train = two()
    inputs = torch.ones(4, 16)
    assert bool(train(1, inputs, factor=100.0).skipped)
    for _ in range(3):
        train(0, inputs)
    verdict = session.blame(lambda: models[1](inputs).float().sum() * 100.0, loss_id=1)
    assert verdict.kind == "scale too high"
    assert "at loss scale 65536" in verdict.evidence
    session.close()


def test_a_loss_whose_gradients_were_set_apart_is_blamed_at_its_own_scale():
    model = nn.Sequential(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, "O1", low="fp16", on_failure="warn")
    inputs = torch.ones(4, 16)
    for _ in range(12):  # loss 1 comes down to 128, loss 0 stays where it is
        optimizer.zero_grad()
        session.backward(model(inputs).float().sum() * 100.0, loss_id=1)
        session.backward(model(inputs).float().sum() * 1e-3, loss_id=0)
        last = session.step()
    assert session.status().scales == {0: 65536.0, 1: 128.0}
    assert not bool(last.skipped)
    optimizer.zero_grad()
    session.backward(model(inputs).float().sum() * 100.0, loss_id=1)
    session.backward(model(inputs * 1e9).float().sum(), loss_id=0)
    assert bool(session.step().skipped)
    assert session.blame(lambda: model(inputs).float().sum() * 100.0, loss_id=1) is None
    session.close()
