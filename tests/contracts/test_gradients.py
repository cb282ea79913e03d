"""Gradients equal fp32's on growth steps, after an overflow, across accumulation and across different scales.

The whole model computes in fp32 here (a rule), so scaling by powers of two must change no bit at all.
"""

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule, Scaling
from tests.contracts.cases import backward_and_step, overflowing

EVERYTHING_FULL = (Rule("", FULL),)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(
        model.parameters(), lr=0.125
    )  # a power of two: no rounding, fused with the sum or not


def losses(model, step, count):
    generator = torch.Generator().manual_seed(step)
    return [model(torch.randn(4, 6, generator=generator)).square().mean() for _ in range(count)]


def fp32_gradients(steps, count):
    model, optimizer = build()
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for loss in losses(model, step, count):
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return found


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("count", [1, 3], ids=["one backward", "accumulated"])
def test_true_gradients_equal_fp32_while_the_scale_grows(name, count):
    model, optimizer = build()
    scaling = Scaling("dynamic", init=2.0**10, growth_interval=2, max=2.0**13)
    session = halfstep.initialize(model, optimizer, name, low="fp16", loss_scale=scaling, rules=EVERYTHING_FULL)
    for step, expected in enumerate(fp32_gradients(9, count)):
        optimizer.zero_grad()
        for loss in losses(model, step, count):
            session.backward(loss)
        session.unscale_()
        for p, want in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, want), f"step {step}"
        session.step()
    assert session.status().scales == {0: 2.0**13}


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_weights_equal_fp32_when_steps_with_overflow_lie_between(name):
    model, optimizer = build()
    session = halfstep.initialize(model, optimizer, name, low="fp16", rules=EVERYTHING_FULL)
    reference, plain = build()
    for step in range(6):
        optimizer.zero_grad()
        assert bool(backward_and_step(session, overflowing(losses(model, step, 1)[0])).skipped)
        optimizer.zero_grad()
        backward_and_step(session, losses(model, step, 1)[0])
        plain.zero_grad()
        losses(reference, step, 1)[0].backward()
        plain.step()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(got, want)
    assert session.status().scales == {0: 2.0**10}


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("middle", [False, True], ids=["", "unscale_ between"])
def test_losses_with_scales_of_their_own_add_up_to_fp32(name, middle):
    model, optimizer = build()
    session = halfstep.initialize(model, optimizer, name, low="fp16", rules=EVERYTHING_FULL)
    session.backward(overflowing(losses(model, 0, 1)[0]), loss_id=1)  # halves the scale of loss 1 only
    session.step()
    for step in range(3):
        optimizer.zero_grad()
        for loss_id, loss in enumerate(losses(model, step, 3)):
            session.backward(loss, loss_id=loss_id)
            if middle:
                session.unscale_()
        session.unscale_()
        got = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        for loss in losses(model, step, 3):
            session.backward(loss)
        session.unscale_()
        for a, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-6, atol=1e-7)
        optimizer.zero_grad()
        backward_and_step(session, losses(model, step, 1)[0])
    scales = session.status().scales
    assert scales[1] == scales[0] / 2 == 2.0**15


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_gradients_read_after_unscale_and_changed_are_what_steps(name):
    model, optimizer = build()
    session = halfstep.initialize(model, optimizer, name, low="fp16", rules=EVERYTHING_FULL)
    before = [p.detach().clone() for p in model.parameters()]
    session.backward(losses(model, 0, 1)[0])
    session.unscale_()
    for p in model.parameters():
        p.grad.fill_(1.0)
    session.step()
    for p, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), was - 0.125)


class Signs(nn.Module):
    """Binary weights: the gradient of `sgn` is a tensor of zeros without memory, which no kernel can read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.signs, self.out = nn.Parameter(torch.randn(70)), nn.Linear(70, 3)

    def forward(self, x):
        return self.out(x * torch.sgn(self.signs))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("way", ["step", "unscale_", "closed", "observed"])
def test_gradients_without_memory_are_zeros(name, low, way):
    model = Signs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    before = model.signs.detach().clone()
    if name == "O3":
        before = before.to({"bf16": torch.bfloat16, "fp16": torch.float16}[low]).float()
    with halfstep.initialize(model, optimizer, name, low=low) as session:
        if way == "observed":
            session.observe(every=1)
        session.backward(model(torch.ones(2, 70)).square().mean())
        if way == "unscale_":
            session.unscale_()
            assert torch.equal(model.signs.grad, torch.zeros(70))
        if way != "closed":
            record = session.step(max_norm=1.0)
            assert (bool(record.skipped), session.last_step().bad) == (False, ())
    assert torch.equal(model.signs, before)


def test_gradient_penalty_equals_fp32():
    """The penalty of WGAN-GP: the norm of d(output)/d(input), itself differentiated."""
    reference, _ = build()
    inputs = torch.randn(4, 6)
    x = inputs.clone().requires_grad_()
    (g,) = torch.autograd.grad(reference(x).sum(), x, create_graph=True)
    (reference(x).square().mean() + (g.norm(dim=1) - 1).square().mean()).backward()

    model, optimizer = build()
    session = halfstep.initialize(model, optimizer, "O1", low="fp16", rules=EVERYTHING_FULL)
    x = inputs.clone().requires_grad_()
    (g,) = session.grad(model(x).sum(), x, create_graph=True)
    session.backward(model(x).square().mean() + (g.norm(dim=1) - 1).square().mean())
    session.unscale_()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("story", ["accumulated", "zeroed in place", "left over", "unscaled between", "two losses"])
@pytest.mark.slow_but("accumulated-O2-bf16", "zeroed in place-O2-bf16", "left over-O1-fp16")
def test_ddp_takes_part_in_every_way_to_add_up(story, name, low):
    trained = []
    for wrap in (lambda model: model, nn.parallel.DistributedDataParallel):
        model, optimizer = build()
        session = halfstep.initialize(model, optimizer, name, low=low, loss_scale=Scaling("dynamic", init=2.0**8))
        wrapped = wrap(model)
        state = session.state_dict()
        state["scales"]["1"] = {**state["scales"]["0"], "scale": 2.0**7}
        session.load_state_dict(state)
        for step in range(4):
            if story != "left over":
                optimizer.zero_grad(set_to_none=story != "zeroed in place")
            first, second, third = losses(wrapped, step, 3)
            session.backward(first)
            if story == "unscaled between":
                session.unscale_()
            session.backward(second, loss_id=int(story == "two losses"))
            backward_and_step(session, third)
        session.close()
        trained.append([p.detach().float() for p in model.parameters()])
    for bare, reduced in zip(*trained, strict=True):
        torch.testing.assert_close(reduced, bare, rtol=0.02, atol=0.02)
