"""A loss scale that lives at its floor is an alarm, whatever the rhythm in which it leaves it and comes back."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from torch import nn

import halfstep
from halfstep import NumericsError, Scaling

PLANS = pytest.mark.parametrize("plan", ["O1", "O2"])


def steep(plan, scaling):
    """Returns steps of a model whose gradient is 3e5 times the loss scale: fp16 holds that at 1/8, and not at 1/4."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, halfstep.level(plan, "fp16").edit(scaling))
    inputs = torch.full((1, 8), 1e-3)

    def train(steps):
        records = []
        for _ in range(steps):
            optimizer.zero_grad()
            session.backward(model(inputs).float().sum() * 3e5)
            records.append(session.step())
        session.close()
        return sum(bool(record.skipped) for record in records)

    return train


@PLANS
@pytest.mark.parametrize("interval", [1, 2, 7, 15])
@pytest.mark.slow_but("1-O2", "2-O2")
def test_a_scale_that_keeps_going_back_to_its_floor_is_an_alarm_and_the_cure_trains(plan, interval):
    scaling = Scaling("dynamic", init=1 / 8, min=1 / 8, growth_interval=interval)  # 1/4 is skipped, 1/8 never
    train = steep(plan, scaling)
    with pytest.raises(NumericsError, match=r"the loss scale keeps returning to its floor, 0\.125") as caught:
        train(12 * (interval + 1))
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.phase) == ("scale too high", "backward")
    assert verdict.cure == (dataclasses.replace(scaling, growth_interval=2000),)
    assert f"growth_interval={interval} it soon grows from 0.125 back to 0.25" in verdict.advice
    assert steep(plan, *verdict.cure)(40) == 0


@pytest.mark.slow_but("above-O2")
@PLANS
@pytest.mark.parametrize(
    "scaling",
    [
        Scaling("dynamic", init=1 / 8, min=1 / 8, growth_interval=30),  # a skip in 31 steps
        Scaling("dynamic", init=1 / 4, min=1 / 64, growth_interval=1),  # far from its floor: it is what was asked for
        Scaling("dynamic", init=1 / 4, min=1 / 16, backoff=0.9),  # comes down in 7 skips, once
    ],
    ids=["rarely", "above", "comes down"],
)
def test_one_that_rarely_goes_back_to_its_floor_or_is_above_it_is_none(plan, scaling, caplog):
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert steep(plan, scaling)(130) >= 2
    assert caplog.text == ""
