"""Which operation, or tensor, is taken for the first that made a number not finite."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep.explain.diagnose.counter import WINDOW
from tests.contracts.cases import Same, backward_and_step


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


def elsewhere(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_what_another_thread_computed_is_no_input_data(caplog):
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    session, _ = session_on(model)

    def closure():
        return model[1](elsewhere(lambda: model[0](torch.ones(4, 8)).log().sub(torch.inf))).float().mean()

    assert halfstep.blame(session, closure) is None
    assert "could not be recorded" in caplog.text


def test_a_loss_that_another_thread_computed_is_no_input_data_to_the_guardian(caplog):
    model = nn.Linear(8, 8)
    session, optimizer = session_on(model)
    inputs = torch.ones(4, 8)
    for _ in range(2 * WINDOW):
        optimizer.zero_grad()
        model(inputs)
        backward_and_step(session, elsewhere(lambda: model(inputs).float().mean().sub(torch.inf)))
    assert "could not be recorded" in caplog.text


class Infinite(Same):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class Boom(nn.Module):
    def forward(self, x):
        return Infinite.apply(x)


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_an_infinity_that_a_backward_multiplies_by_is_the_origin_and_no_mask(low):
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), Boom()), nn.Linear(16, 2))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low=low)
    inputs = torch.randn(4, 8)
    verdict = halfstep.blame(session, lambda: model(inputs).float().square().mean())
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("invalid", "1.1", "mul", "backward")
    assert verdict.where.endswith("in backward")
    assert verdict.advice == "the code passes inf to mul: check where it comes from"


class MaskedAgain(torch.autograd.Function):
    """A softmax whose backward masks the scores again, as attention that keeps no scores does."""

    @staticmethod
    def forward(ctx, scores, mask):
        ctx.save_for_backward(scores, mask)
        return scores.masked_fill(mask, -torch.inf).softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        scores, mask = ctx.saved_tensors
        chances = scores.masked_fill(mask, -torch.inf).softmax(-1)
        inner = chances * (gradient - (gradient * chances).sum(-1, keepdim=True))
        return (inner / 0.0 if gradient.shape[0] == 5 else inner), None


@pytest.mark.parametrize(("rows", "operator"), [(4, None), (5, "div")])
def test_a_mask_that_a_backward_writes_again_is_still_one(rows, operator):
    model = nn.Linear(8, 8)
    session, _ = session_on(model)
    mask = torch.ones(rows, 8).triu(1).bool()
    weights = torch.randn(rows, 8)
    verdict = halfstep.blame(session, lambda: (MaskedAgain.apply(model(weights), mask) * weights).mean())
    assert (None if verdict is None else verdict.operator) == operator


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)


def test_one_fault_in_a_hook_is_one_though_a_cast_moves_it_to_the_module_around():
    model = Around()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="bf16")
    inputs = torch.randn(4, 8)

    def closure():
        hidden = model(inputs)
        hidden.register_hook(lambda gradient: gradient / (gradient * 0).norm())
        return hidden.square().mean()

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.operator, verdict.phase) == ("invalid", "div", "backward")
    assert verdict.evidence.endswith("in fp32 the same closure fails too")
    assert "two faults" not in verdict.advice
