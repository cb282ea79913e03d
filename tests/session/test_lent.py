"""Weights that user code replaces for a while, as averages are for an evaluation, and then puts back."""

import pytest
import torch
from torch import nn

import halfstep


def trained(level, low, *, averaged, optimizer=torch.optim.SGD):
    """Trains at a small rate; if `averaged`, other weights are in place for a while after every second step."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    target = model.weight.detach() + 0.02
    made = optimizer(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    with halfstep.initialize(model, made, level, low=low) as session:
        for step in range(10):
            x = torch.randn(8, 16, generator=generator)
            made.zero_grad()
            session.backward((model(x) - x @ target.T).square().mean())
            session.step()
            if averaged and step % 2:
                kept = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.copy_(p.data + 0.01)
                stored = model.state_dict()["weight"].to(model.weight.dtype)
                assert torch.equal(stored, model.weight) or low == "bf16"  # which keeps its remainders
                with torch.no_grad():
                    model(x)
                for p, value in zip(model.parameters(), kept, strict=True):
                    averaged(p, value)
    return model.weight.detach()


def through_data(p, value):
    p.data.copy_(value)


@torch.no_grad()
def in_place(p, value):
    p.copy_(value)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad], ids=["own update", "its own step"])
@pytest.mark.parametrize("put_back", [through_data, in_place])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_weights_that_are_put_back_bit_for_bit_keep_their_masters(low, put_back, optimizer):
    undisturbed = trained("O2", low, averaged=None, optimizer=optimizer)
    assert torch.equal(trained("O2", low, averaged=put_back, optimizer=optimizer), undisturbed)
