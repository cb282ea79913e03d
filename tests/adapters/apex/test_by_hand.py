"""A model's gradients in apex form are those of the same model cast by hand, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.adapters.apex.cases import LEVELS, as_hardware, batch, network, sgd

SCALE = 1024.0


def _ops_cast(model, x, low):
    """O1: products low, what apex lists as fp32 in fp32, batch norm as its input comes."""
    bn, norm = model.bn, model.norm

    def product(op, h, layer):
        return op(h.to(low), layer.weight.to(low), layer.bias.to(low))

    h = product(F.conv2d, x, model.conv)
    h = F.batch_norm(h, bn.running_mean, bn.running_var, bn.weight, bn.bias, True)
    h = F.gelu(h.float()).mean((2, 3))
    h = F.layer_norm(product(F.linear, h, model.first).float(), (8,), norm.weight, norm.bias)
    return product(F.linear, h, model.last).float()


def _model_cast(model, x, low):
    """O2 and O3: all of it low; layer norm sums in fp32, as the kernel of a GPU and not that of a CPU."""
    norm = model.norm
    h = F.gelu(model.bn(model.conv(x.to(low)))).mean((2, 3))
    h = F.layer_norm(model.first(h).float(), (8,), norm.weight.float(), norm.bias.float()).to(low)
    return model.last(h).float()


def by_hand(level, model, low):
    """Returns the gradients, and what computed them."""
    hand = copy.deepcopy(model)
    if level in ("O2", "O3"):
        for module in hand.modules():
            if not (level == "O2" and isinstance(module, nn.BatchNorm2d)):
                for p in module.parameters(recurse=False):
                    p.data = p.data.to(low)
                for name, b in module.named_buffers(recurse=False):
                    if b.is_floating_point():
                        setattr(module, name, b.to(low))
    x, y = batch()
    forward = {"O0": lambda m, x, _: m(x), "O1": _ops_cast}.get(level, _model_cast)
    with as_hardware(low):
        (F.mse_loss(forward(hand, x, low), y) * (1.0 if level == "O0" else SCALE)).backward()
    factor = 1.0 if level == "O0" else 1 / SCALE
    return {name: p.grad.float() * factor for name, p in hand.named_parameters()}


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_the_model_cast_by_hand(amp, low, level):
    model = network()
    expected = by_hand(level, model, low)
    optimizer = sgd(model)
    scale = None if level == "O0" else SCALE
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    x, y = batch()
    with amp.scale_loss(F.mse_loss(model(x), y), optimizer) as scaled:
        scaled.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype is torch.float32
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_two_ways_differ_from_fp32(amp, low, level):
    model = network()
    cast = by_hand(level, model, low)
    full = by_hand("O0", model, low)
    assert not all(torch.equal(cast[name], full[name]) for name in cast)


def test_a_step_updates_fp32_masters(amp, low):
    """The master moves by lr times gradient, a step far below the weight's last place."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-14)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", max_loss_scale=1024, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert model.weight.dtype is low
    assert model.weight.item() == 1.0
    assert model.state_dict()["weight"].item() == 1.0 - 3 * 2.0**-14
