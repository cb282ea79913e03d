"""What a step must survive: gradients in unusual memory, weights that change their memory format, refusals."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

import halfstep
from halfstep import SessionError


class Imaginary(nn.Module):
    """A real parameter used as an imaginary part: autograd hands its gradient over with torch's negative bit."""

    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.ones(()))

    def forward(self):
        z = torch.complex(torch.zeros(()), self.b)
        return (z.conj() - torch.tensor(1 - 3j)).abs().square()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD])
def test_a_gradient_with_the_negative_bit_has_its_sign(build, unscale):
    model = Imaginary()
    model().backward()
    assert model.b.grad.is_neg()
    model.b.grad = None
    optimizer = build(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    for _ in range(40):
        optimizer.zero_grad()
        session.backward(model())
        if unscale:
            session.unscale_()
        session.step()
    assert model.b.item() == pytest.approx(3, abs=0.5)
    session.close()


@pytest.mark.parametrize("master", ["copy", "split"])
def test_weights_in_another_memory_format_keep_their_values(master):
    model = nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16", master=master)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)
    session.backward(model(torch.randn(2, 3, 8, 8)).sum())
    session.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    session.close()


def test_of_several_optimizers_all_step_or_none():
    models = [nn.Linear(4, 8), nn.Linear(4, 8)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    session = halfstep.initialize(models, optimizers, "O1", low="bf16")
    session.backward(sum(m(torch.ones(1, 4)).sum() for m in models))
    before = models[0].weight.detach().clone()
    models[1].weight.data = models[1].weight.data[:4]
    with pytest.raises(SessionError, match=r"'1.weight' has shape \(8, 4\)"):
        session.step()
    assert torch.equal(models[0].weight, before)
    assert session.status().steps == 0
    session.close()


def test_max_norm_takes_any_real_number():
    model = nn.Linear(2, 2)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1", low="bf16")
    session.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(SessionError, match="max_norm is True"):
        session.step(max_norm=True)
    assert session.step(max_norm=numpy.float32(1.0)).step == 1
    session.close()


def test_one_backward_serves_two_steps_of_two_optimizers():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    session = halfstep.initialize(models, optimizers, "O1", low="bf16")
    before = [m.bias.detach().clone() for m in models]
    session.backward(sum(m(torch.ones(1, 4)).sum() for m in models))
    for optimizer in optimizers:
        session.step(optimizer)
    for m, was in zip(models, before, strict=True):
        assert torch.equal(m.bias, was - 1)
    with pytest.raises(SessionError, match="without gradients"):
        session.step(optimizers[0])
    session.close()


def test_clipping_divides_by_the_norm_and_a_millionth_as_torch_does():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1", low="bf16")
    session.backward(model(torch.full((1, 1), 2.0**-20)).sum())
    session.step(max_norm=2.0**-20)
    assert model.weight.item() == pytest.approx(-(2.0**-20) * 2.0**-20 / (2.0**-20 + 1e-6), rel=1e-5)  # about half
    session.close()


def test_a_step_counts_as_one_for_schedulers(recwarn):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session.backward(model(torch.ones(1, 2)).sum())
    session.step()
    scheduler.step()
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []
    session.close()
