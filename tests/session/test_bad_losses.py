"""A loss that is not finite says nothing about the loss scale: its step is skipped and counted, and no scale falls."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep
from halfstep import Scaling
from tests.scale.sync import NoSync

INF, NAN = float("inf"), float("nan")


def steep(outputs, session, scale):
    """A loss that is finite, and too large times any scale here."""
    return outputs.square().mean() * 1e35


def penalised(outputs, session, scale):
    """A loss with a penalty on a gradient that is finite, but not times this scale."""
    x = torch.ones(1, requires_grad=True)
    (slope,) = session.grad((x * (1e38 if scale > 1 else 1.0)).sum(), x, create_graph=True)
    return outputs.square().mean() + slope.sum()


def spoiled_penalty(outputs, session, scale):
    """A penalty that is NaN because what is differentiated is, as of a bad batch."""
    x = torch.ones(1, requires_grad=True)
    (slope,) = session.grad((x * NAN).sum(), x, create_graph=True)
    return outputs.square().mean() + slope.sum()


# of each, the losses of one step (by loss id), each times these factors or made by these functions; whether one is bad,
# and the ids of the losses whose scale falls
CASES = {
    "fine": ([(0, 1.0)], False, ()),
    "a NaN": ([(0, NAN)], True, ()),
    "an infinity": ([(0, -INF)], True, ()),
    "one micro-batch of three": ([(0, 1.0), (0, NAN), (0, 1.0)], True, ()),
    "one of two losses": ([(0, NAN), (1, 1.0)], True, ()),
    "the other of two losses": ([(0, 1.0), (1, NAN)], True, ()),
    "one beside a loss that overflows": ([(0, NAN), (1, steep)], True, ()),  # which does so again in the next step
    "a finite one that overflows by its scale": ([(0, steep)], False, (0,)),
    "a finite one of two": ([(0, 1.0), (1, steep)], False, (1,)),
    "a penalty that overflows by the scale": ([(0, penalised)], False, (0,)),
    "a penalty of a bad batch": ([(0, spoiled_penalty)], True, ()),
}


@pytest.mark.parametrize(("losses", "bad", "falls"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("stepping", ["session", "optimizer"])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_only_a_finite_loss_lowers_its_scale(losses, bad, falls, stepping, hysteresis):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    records = []
    scaling = Scaling("dynamic", init=8.0, hysteresis=hysteresis)
    session = halfstep.initialize(
        model, optimizer, "O1", low="fp16", loss_scale=scaling, stepping=stepping, sinks=[records.append]
    )

    def train(losses):
        optimizer.zero_grad()
        for loss_id, make in losses:
            outputs = model(torch.ones(3, 4))
            loss = make(outputs, session, 8.0) if callable(make) else outputs.square().mean() * make
            session.backward(loss, loss_id=loss_id)
        optimizer.step() if stepping == "optimizer" else session.step()

    train([(loss_id, 1.0) for loss_id, _ in losses])
    before = session.state_dict()["scales"]
    for _ in range(hysteresis):
        train(losses)
    assert bool(records[-1].skipped) == (bad or bool(falls))
    assert bool(records[-1].bad_loss) == bad
    status, after = session.status(), session.state_dict()["scales"]
    assert status.bad_losses == hysteresis * bad
    assert status.scales == {loss_id: 4.0 if loss_id in falls else 8.0 for loss_id, _ in losses}
    assert ("for a loss that was not finite" in str(status)) == bad
    if bad:
        assert after == before  # the count of clean steps too


def test_a_loss_in_fp16_that_is_finite_lowers_the_scale_it_overflows_by():
    weight = nn.Parameter(torch.ones(1))
    session = halfstep.initialize(Times(weight), torch.optim.SGD([weight], 0.1), "O1", low="fp16")
    loss = session_loss = weight.half().sum() * 60000  # beyond fp16 times any scale above 1, and fp32 holds it
    assert session_loss.dtype is torch.float16
    session.backward(loss)
    record = session.step()
    assert (bool(record.skipped), bool(record.bad_loss)) == (True, False)
    assert session.status().scales[0] < float(record.scale)


class Times(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(("plan", "low"), [("O0", "bf16"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_steps_with_a_bad_loss_are_counted_without_a_wait_and_come_back_with_the_state(plan, low):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, plan, low=low)
    old = session.state_dict()
    assert "bad_losses" not in old  # torch.distributed.checkpoint looks for each entry in a checkpoint
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean() * (NAN if plan != "O0" and step in (1, 4) else 1.0)
        with NoSync() if plan != "O0" else nullcontext():
            session.backward(loss)
            record = session.step()
    assert (record.bad_loss is None) == (plan == "O0")
    expected = 0 if plan == "O0" else 2
    assert session.status().bad_losses == session.status().skipped == expected
    saved = session.state_dict()
    session.load_state_dict(old)
    assert session.status().bad_losses == 0
    session.load_state_dict(saved)
    assert session.status().bad_losses == expected
