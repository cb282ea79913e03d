"""The regression of the talk."""

import torch
from torch import nn

from halfstep.lab.workloads.load import Regression


def test_with_one_layer_it_is_the_code_of_the_talk():
    job = Regression(layers=1)
    model = job.build(0)
    inputs, targets = next(job.batches(0))
    assert inputs.shape == (64, 1024)
    assert targets.shape == (64, 512)
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (512, 1024)
    optimizer = job.optimizer(model, fused=False)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 1e-3
    assert job.loss(torch.zeros(2, 2), torch.full((2, 2), 3.0)).item() == 9.0


def test_it_has_two_layers_unless_told_otherwise():
    first, relu, last = Regression().build(0)
    assert (first.weight.shape, type(relu), last.weight.shape) == ((1024, 1024), nn.ReLU, (512, 1024))


def test_further_layers_are_hidden_ones():
    assert [type(m) for m in Regression(layers=3).build(0)] == [nn.Linear, nn.ReLU] * 2 + [nn.Linear]


def test_the_batch_stays_the_same_and_depends_on_the_seed():
    job = Regression(batch=2, d_in=3, d_out=3)
    batches = job.batches(0)
    first, second = next(batches), next(batches)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], next(job.batches(1))[0])
