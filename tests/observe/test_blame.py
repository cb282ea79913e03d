"""What blame finds, leaves alone, and refuses."""

from __future__ import annotations

import logging
import random

import numpy
import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule, Scaling, SessionError
from tests.contracts.cases import differing, mixed_plans, snapshot, start, train


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x):
        return x + torch.relu(self.fc(x) * self.gain) / self.gain


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


def tower(plan="O1", low="fp16", **options):
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = halfstep.initialize(model, optimizer, plan, low=low, **options)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    return model, optimizer, session, lambda: nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_a_forward_overflow_is_found_at_its_operation_and_line(plan):
    model, _, session, closure = tower(plan)
    model.blocks[1].gain = 1e6
    verdict = session.blame(closure)
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "blocks.1", "mul", "forward")
    assert verdict.where.startswith("test_blame.py:")
    assert verdict.where.endswith(" in forward")
    assert verdict.cure == (Rule("blocks.1", FULL),)
    assert verdict.call.operator == "mul"
    assert verdict.call.output_formats == ("float16",)
    session.close()


def test_a_scale_that_is_too_high_gets_a_lower_one():
    _, _, session, closure = tower(loss_scale=2.0**24)
    verdict = session.blame(closure)
    assert (verdict.kind, verdict.phase) == ("scale too high", "backward")
    (edit,) = verdict.cure
    assert isinstance(edit, Scaling)
    assert edit.init < 2.0**24
    session.close()


@mixed_plans
def test_a_healthy_step_gets_no_verdict(name, low):
    _, _, session, closure = tower(name, low)
    assert session.blame(closure) is None
    session.close()


@mixed_plans
def test_blame_leaves_everything_as_it_was(name, low):
    model, optimizer, session = start(name, low)
    train(session, model, optimizer, [0, 1])
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    session.backward(nn.functional.mse_loss(model(inputs), targets))
    inputs = inputs.clone()
    inputs[0, 0] = torch.inf
    before, grads = snapshot(model, optimizer, session), [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()

    def closure():
        random.random()
        numpy.random.rand()
        torch.rand(1)
        return nn.functional.mse_loss(model(inputs), targets)

    assert session.blame(closure).kind == "input data"
    assert differing(before, snapshot(model, optimizer, session)) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(g is None or torch.equal(g, v) for g, v in zip(grads, values, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    session.step()
    session.close()


@pytest.mark.parametrize(
    ("closure", "words"),
    [
        (lambda model, x: 1.0, "returned float, not the loss"),
        (lambda model, x: model(x), "shape"),
        (lambda model, x: model(x).mean().detach(), "needs no gradient"),
        (lambda model, x: model(x).mean().backward(), "NoneType"),
    ],
)
def test_a_closure_that_computes_no_loss_is_refused(closure, words):
    model, _, session, _ = tower()
    with pytest.raises(SessionError, match=words):
        session.blame(lambda: closure(model, torch.randn(4, 8)))
    session.close()


def test_what_is_no_function_is_refused():
    _, _, session, closure = tower()
    with pytest.raises(SessionError, match="takes a function"):
        session.blame(closure())
    session.close()


def test_a_closure_that_does_not_repeat_says_so_and_tries_nothing():
    model, _, session, _ = tower()
    batches = iter([torch.full((4, 8), torch.nan), *[torch.randn(4, 8)] * 9])
    verdict = session.blame(lambda: model(next(batches)).square().mean())
    assert verdict.kind == "input data"
    assert "does not repeat" in verdict.evidence
    session.close()


def test_a_failure_that_the_closure_does_not_reproduce_gets_no_verdict_but_a_notice(caplog):
    model, _, session, closure = tower("O2")
    session.backward(model(torch.full((4, 8), torch.inf)).square().mean())
    session.step()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert session.blame(closure) is None
    assert "does not reproduce" in caplog.text
    session.close()


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_gradients_that_nobody_zeroed_are_told_from_a_failure_that_did_not_repeat(plan):
    model, _, session, closure = tower(plan)
    session.backward(model(torch.full((4, 8), torch.inf)).square().mean())
    session.step()
    session.backward(closure())
    session.step()
    assert session.blame(closure).kind == "stale gradients"
    session.close()
