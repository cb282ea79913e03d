"""torch's default dtype and default device belong to the user: training under others gives the same bits."""

from contextlib import contextmanager

import pytest
import torch

import halfstep
from tests.contracts.cases import batch, make

OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    (torch.optim.RMSprop, {}),
]


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


def trained(name, low, build, options, default):
    """The norms of five steps, one of them skipped, and what is trained; all but the model is made under `default`."""
    model, optimizer = make(0, build, **options)
    batches = [batch(step) for step in range(5)]
    norms = []
    with default():
        session = halfstep.initialize(model, optimizer, name, low=low)
        for step, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            session.backward(loss * float("inf") if step == 1 else loss)
            if step == 3:
                session.unscale_()
            norms.append(session.step(max_norm=0.1).grad_norm)
        session.status()
        session.close()
    return norms, list(model.state_dict().values())


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize(("build", "options"), OPTIMIZERS)
@pytest.mark.parametrize(("name", "low"), [("O1", "fp16"), ("O2", "bf16")])
def test_training_does_not_hang_on_torchs_defaults(name, low, build, options, default):
    expected = trained(name, low, build, options, lambda: torch.device("cpu"))
    got = trained(name, low, build, options, DEFAULTS[default])
    for norm, other in zip(got[0], expected[0], strict=True):
        assert norm.dtype is torch.float32
        torch.testing.assert_close(norm, other, rtol=0, atol=0, equal_nan=True)
    for value, other in zip(got[1], expected[1], strict=True):
        assert value.dtype is other.dtype
        assert torch.equal(value, other)
