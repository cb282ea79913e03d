"""A model's gradients in apex form are those of the same model cast by hand, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.adapters.apex.cases import LEVELS, Net, as_hardware, batch, network, sgd

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


class Attends(nn.Module):
    """Token ids in, logits out, by attention that is written out; the loss of its caller takes the logits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.mixed = nn.Linear(8, 24)
        self.last = nn.Linear(8, 11)

    def forward(self, ids):
        q, k, v = self.mixed(self.table(ids)).chunk(3, -1)
        return self.last(torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) @ v)


def _attention_ops_cast(model, ids, low):
    """O1: embeddings as stored, products low, softmax in fp32."""

    def product(h, layer):
        return F.linear(h.to(low), layer.weight.to(low), layer.bias.to(low))

    q, k, v = product(model.table(ids), model.mixed).chunk(3, -1)
    h = torch.softmax((q @ k.transpose(1, 2) * 0.25).float(), -1).to(low) @ v
    return product(h, model.last).float()


def _attention_cast(model, ids, low):
    """O2 and O3: all low; gradients of embeddings add up in fp32, as the kernel of a GPU and not that of a CPU."""
    h = F.embedding(ids, model.table.weight.float()).to(low)
    q, k, v = model.mixed(h).chunk(3, -1)
    return model.last(torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) @ v).float()


def tokens():
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(2))
    return ids, ids.flip(1)


def mean_entropy(out, targets):
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


KINDS = {  # model, batch, loss, and the forward passes by hand at O1, and at O2 and O3
    "convolution": (Net, batch, F.mse_loss, _ops_cast, _model_cast),
    "attention": (Attends, tokens, mean_entropy, _attention_ops_cast, _attention_cast),
}


def by_hand(level, model, low, kind="convolution"):
    """Returns the gradients, and what computed them."""
    _, given, loss_fn, ops_cast, model_cast = KINDS[kind]
    hand = copy.deepcopy(model)
    if level in ("O2", "O3"):
        for module in hand.modules():
            if not (level == "O2" and isinstance(module, nn.BatchNorm2d)):
                for p in module.parameters(recurse=False):
                    p.data = p.data.to(low)
                for name, b in module.named_buffers(recurse=False):
                    if b.is_floating_point():
                        setattr(module, name, b.to(low))
    x, y = given()
    forward = {"O0": lambda m, x, _: m(x), "O1": ops_cast}.get(level, model_cast)
    with as_hardware(low):
        (loss_fn(forward(hand, x, low), y) * (1.0 if level == "O0" else SCALE)).backward()
    factor = 1.0 if level == "O0" else 1 / SCALE
    return {name: p.grad.float() * factor for name, p in hand.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_the_model_cast_by_hand(amp, low, level, kind):
    make, given, loss_fn, *_ = KINDS[kind]
    model = network(make)
    expected = by_hand(level, model, low, kind)
    optimizer = sgd(model)
    scale = None if level == "O0" else SCALE
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    x, y = given()
    with amp.scale_loss(loss_fn(model(x), y), optimizer) as scaled:
        scaled.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype is torch.float32
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_two_ways_differ_from_fp32(amp, low, level, kind):
    model = network(KINDS[kind][0])
    cast = by_hand(level, model, low, kind)
    full = by_hand("O0", model, low, kind)
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
