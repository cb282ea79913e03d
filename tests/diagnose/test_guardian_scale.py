"""What the guardian says of loss scales: too high, too low, at a floor, or not to blame."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule, Scaling
from halfstep.explain.diagnose.counter import WINDOW
from tests.diagnose.closures import alarm, run, session_on, train_on
from tests.diagnose.faults.hosts import Cnn
from tests.diagnose.faults.plants import CustomBackward


def test_the_first_skips_of_a_dynamic_scale_are_normal(caplog):
    model = Cnn(nn.Identity())
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=2.0**40, max=2.0**40))
    records = run(session, optimizer, model, 5 * WINDOW)
    assert sum(bool(record.skipped) for record in records) > WINDOW + 2
    assert not bool(records[-1].skipped)
    assert caplog.text == ""


def test_a_floor_that_is_too_high_is_named():
    model = Cnn(nn.Identity())
    session, optimizer = session_on(model, loss_scale=Scaling("dynamic", init=2.0**30, min=2.0**29, max=2.0**40))
    verdict = alarm(run, session, optimizer, model, 3 * WINDOW).verdict
    assert verdict.kind == "scale too high"
    session.close()
    session = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    assert not bool(run(session, optimizer, model, 2 * WINDOW)[-1].skipped)


def steep(scaling, gradient=3e5):
    """Returns what runs steps of a model with a gradient of 3e5 by the scale: fp16 holds that at 1/8, not at 1/4."""
    model, inputs = nn.Linear(8, 4, bias=False), torch.full((1, 8), 1e-3)
    session, optimizer = session_on(model, loss_scale=scaling, lr=0.0)

    def train(steps):
        return train_on(lambda: model(inputs).float().sum() * gradient, session, optimizer, steps)

    return train


def dynamic(init, least):
    return Scaling("dynamic", init=init, min=least)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (Scaling("static", init=1.0), "it stays at 1"),
        (Scaling("static", init=64.0), "it stays at 64"),
        (dynamic(64.0, 1.0), "its floor is 1"),
        (dynamic(2.0**20, 1.0), "its floor is 1"),
        (dynamic(2.0**20, 0.25), "its floor is 0.25"),
        (Scaling("none"), "it stays at 1"),
    ],
)
def test_a_loss_scale_below_1_is_named_where_only_that_helps(scaling, limit):
    cure = dynamic(2.0**-3, 2.0**-15)
    error = alarm(steep(scaling), 2 * WINDOW)
    verdict = error.verdict
    assert (verdict.kind, verdict.phase, verdict.cure) == ("scale too high", "backward", (cure,))
    assert f"like those before it: the loss scale is too high, and {limit}\n" in str(error)
    assert "would not help" not in str(error)
    assert (
        "this operation needs a loss scale of 0.125 or less; later operations of the backward pass may need less"
        in verdict.evidence
    )
    assert "not tried" in verdict.advice
    assert not bool(steep(cure)(1)[0].skipped)


@pytest.mark.parametrize(("gradient", "kind"), [(1.09e12, "scale too high"), (1.11e12, "overflow")])
def test_below_two_to_the_minus_24_no_scale_is_looked_for(gradient, kind):
    error = alarm(steep(Scaling("static", init=1.0), gradient), 2 * WINDOW)  # 65504 * 2**24 is 1.099e12
    assert error.verdict.kind == kind
    assert ("would not help" in str(error)) == (kind == "overflow")


@pytest.mark.parametrize("init", [8.0, 2.0**20])
def test_a_dynamic_scale_that_may_come_down_below_1_does(init, caplog):
    assert not bool(steep(dynamic(init, 2.0**-3))(4 * WINDOW)[-1].skipped)
    assert caplog.text == ""


@pytest.mark.parametrize("scaling", [Scaling("static", init=1024.0), Scaling("static", init=1.0), Scaling("dynamic")])
def test_an_overflow_that_no_scale_changes_is_not_laid_to_the_scale(scaling):
    model = Cnn(CustomBackward())
    error = alarm(run, *session_on(model, loss_scale=scaling), model, 2 * WINDOW)
    assert "and a lower loss scale would not help" in str(error)
    verdict = error.verdict
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "plant", "mul", "backward")
    assert verdict.cure == (Rule("plant", FULL),)


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_of_a_constant_scale_that_the_first_overflow_fits_nothing_more_is_claimed(plan):
    """The gradients grow eightfold from each layer to the one before it."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    for weight in model.parameters():
        weight.data.copy_(8 * torch.eye(32))
    inputs = torch.randn(8, 32) * 1e-6
    session, optimizer = session_on(model, plan, loss_scale=2.0**18, lr=0.0)

    def loss():
        return model(inputs).float().sum()

    verdict = alarm(train_on, loss, session, optimizer).verdict
    assert (verdict.kind, verdict.cure) == ("scale too high", (Scaling("dynamic", init=2.0**15, min=1.0),))
    assert (
        "this operation needs a loss scale of 32768 or less; later operations of the backward pass may need less"
        in verdict.evidence
    )
    assert "are finite" not in str(verdict)
    session.close()
    session = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    skipped = [bool(record.skipped) for record in train_on(loss, session, optimizer, 6 * WINDOW)]
    assert any(skipped[: 3 * WINDOW])  # 2**15 is too much for the layers before
    assert not any(skipped[3 * WINDOW :])


class Wave(nn.Module):
    """A sine so steep that fp16 cannot hold its slope."""

    def forward(self, x):
        return torch.sin(x * 3e5)


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_an_overflow_in_a_backward_pass_of_the_loss_itself_is_not_laid_to_the_scale(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), Wave(), nn.Linear(8, 1))
    session, optimizer = session_on(model, plan)

    def loss():
        inputs = torch.randn(8, 4).mul_(1e-4).requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return slope.square().mean() * 1e-12

    error = alarm(train_on, loss, session, optimizer, 2 * WINDOW)
    verdict = error.verdict
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "1", "mul", "backward")
    assert "and a lower loss scale would not help" in str(error)
    assert "in a backward pass of your own (torch.autograd.grad), which no loss scale reaches" in verdict.evidence
    session.close()
    session = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    assert not bool(train_on(loss, session, optimizer, 3 * WINDOW)[-1].skipped)


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_losses_with_scales_of_their_own_that_of_the_failing_one_counts(plan, order):
    model = nn.ModuleDict({"trunk": nn.Linear(16, 16), "0": nn.Linear(16, 4), "1": nn.Linear(16, 4)})
    session, optimizer = session_on(model, plan, lr=0.0)
    inputs = torch.randn(8, 16)

    def training():
        for _ in range(6 * WINDOW):
            optimizer.zero_grad()
            for loss_id in order:  # the gradient of the second fits fp16 at a scale of 1/8 and below
                with session.autocast():
                    loss = model[str(loss_id)](model["trunk"](inputs)).float().sum() * (3e5 if loss_id else 1.0)
                session.backward(loss, loss_id=loss_id)
            session.step()

    verdict = alarm(training).verdict
    assert (verdict.kind, verdict.module, verdict.cure) == ("scale too high", "1", (dynamic(2.0**-3, 2.0**-15),))
    assert session.status().scales[1] < session.status().scales[0]
