"""Which operation, or tensor, is taken for the first that made a number not finite."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.diagnose.counter import WINDOW


def session_on(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return halfstep.initialize(model, optimizer, "O1", low="bf16"), optimizer


NORMALISED = {
    "softmax": lambda scores: scores.softmax(-1).mean(),
    "log_softmax": lambda scores: scores.log_softmax(-1).mean(),
    "cross_entropy": lambda scores: F.cross_entropy(scores, torch.zeros(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("operator", NORMALISED)
def test_a_row_that_a_mask_has_emptied_is_named_in_each_normaliser(operator):
    model = nn.Linear(8, 8)
    session, _ = session_on(model)
    empty = torch.zeros(4, 8, dtype=torch.bool)
    empty[1] = True
    verdict = halfstep.blame(
        session, lambda: NORMALISED[operator](model(torch.ones(4, 8)).masked_fill(empty, -torch.inf))
    )
    assert (verdict.kind, verdict.operator) == ("masked row", operator)
    session.close()


def elsewhere(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_what_another_thread_computed_is_no_input_data(caplog):
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    session, _ = session_on(model)

    def closure():
        return model[1](elsewhere(lambda: model[0](torch.ones(4, 8)).log().sub(torch.inf))).float().mean()

    with caplog.at_level(logging.WARNING, "halfstep"):
        assert halfstep.blame(session, closure) is None
    assert "could not be recorded" in caplog.text
    session.close()


def test_a_loss_that_another_thread_computed_is_no_input_data_to_the_guardian(caplog):
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model)
    inputs = torch.ones(4, 8)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2 * WINDOW):
            optimizer.zero_grad()
            model(inputs)
            session.backward(elsewhere(lambda: model(inputs).float().mean().sub(torch.inf)))
            session.step()
    assert "could not be recorded" in caplog.text
    session.close()
