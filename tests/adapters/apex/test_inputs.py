"""What models at O2 and O3 are given, and optimizers that have trained before."""

import pytest
import torch
from torch import nn

from tests.adapters.apex.cases import loss_of, sgd, small, step, values, vectors


class Looking(nn.Module):
    """Notes what its forward was given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return {"out": [self.linear(torch.ones(1, 8)), "text"]}  # an fp32 tensor made inside


class Batch:
    """A batch of a script's own."""

    def __init__(self, x):
        self.x = x

    def to(self, *args, **kwargs):
        return Batch(self.x.to(*args, **kwargs))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_nested_inputs_and_outputs_are_cast(amp, low, level):
    model = amp.initialize(Looking(), opt_level=level, verbosity=0)
    x, ids = torch.ones(1, 8), torch.tensor([999])
    wide = x.double()
    out = model([x, (ids, "name")], wide, Batch(x), mask={"m": x > 0, "x": x, "n": None})
    ((listed, double, batch), kwargs) = model.seen[0]
    assert listed[0].dtype is batch.x.dtype is kwargs["mask"]["x"].dtype is low
    assert listed[1] == (ids, "name")
    assert double is wide
    assert kwargs["mask"]["m"].dtype is torch.bool
    assert kwargs["mask"]["n"] is None
    assert out["out"][0].dtype is torch.float32
    assert out["out"][1] == "text"
    assert x.dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_that_has_trained_goes_on(amp, level):
    model = small()
    optimizer = sgd(model)
    loss_of(model, vectors()).backward()
    optimizer.step()
    before = values(model)
    buffers = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for state, buffer in zip(optimizer.state.values(), buffers, strict=True):
        assert torch.equal(state["momentum_buffer"], buffer)
    step(amp, model, optimizer, vectors())
    optimizer.zero_grad()
    assert any(not torch.equal(values(model)[name], value) for name, value in before.items())
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
