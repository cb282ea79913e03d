"""The power of the loss scale that a gradient goes with, against what two backward passes at two scales show."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.explain.diagnose.counter import degree
from halfstep.explain.tape.recorder import OpRecorder

X = torch.linspace(-1.0, 2.0, 12).view(3, 4)

GRADIENTS = {
    "as it comes": (lambda g: g * 3, 1),
    "a product with a weight": (lambda g: g @ X.t(), 1),
    "added to a product": (lambda g: torch.addmm(g, X[:, :3], g), 1),
    "a cast": (lambda g: g.double() * 2, 1),
    "a masked sum": (lambda g: torch.where(X > 0, g, 0.0).sum(), 1),
    "its square": (lambda g: g * g, 2),
    "a power": (lambda g: g.abs() ** 1.5, 1.5),
    "a square root": (lambda g: g.abs().sqrt(), 0.5),
    "divided by its norm": (lambda g: g / g.norm(), 0),
    "times the inverse root of its squares": (lambda g: g * g.pow(2).mean().rsqrt(), 0),
    "its sign": (lambda g: g.sign() * 1e5, 0),
    "a choice by its sign": (lambda g: torch.ones_like(g) * (g > 0), 0),
    "a constant over it": (lambda g: 3 * g.reciprocal(), -1),
    "none of it": (lambda g: X * 5, 0),
    "in place": (lambda g: g.clone().mul_(2).add_(1.0 * g), 1),
}


class Looked(torch.autograd.Function):
    """Shows a gradient on its way."""

    @staticmethod
    def forward(ctx, x, look):
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look(gradient)
        return gradient, None


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_power_is_that_of_two_passes(name, scaled):
    function, power = GRADIENTS[name]
    linear = nn.Linear(4, 4)
    nn.init.normal_(linear.weight)
    found, notes = [], []
    for scale in (1.0, 16.0) if scaled else (1.0,):
        recorder = OpRecorder([linear])

        def look(gradient, recorder=recorder):
            found.append(function(gradient))
            notes.append(recorder.notes[-1])

        with recorder:
            loss = Looked.apply(linear(X), look).square().sum()
            (loss * scale if scaled else loss).backward()
    assert [degree(note) for note in notes] == [power] * len(notes)
    if scaled:
        one, other = (out.double().abs().max() for out in found)
        assert math.log(float(other / one), 16.0) == pytest.approx(power, abs=1e-3)


def test_what_a_checkpoint_computes_again_does_not_grow():
    linear = nn.Linear(4, 4)
    recorder = OpRecorder([linear])
    with recorder:
        out = checkpoint(lambda x: linear(x).sigmoid(), X.clone().requires_grad_(), use_reentrant=False)
        (out.sum() * 8.0).backward()
    again = [note for note in recorder.notes if note.aten == "sigmoid"]
    assert [degree(note) for note in again] == [0.0, 0.0]
    (gradient,) = [note for note in recorder.notes if note.aten == "sigmoid_backward"]
    assert degree(gradient) == 1.0
