"""Loss scaling is needed and works; masters keep what low weights lose."""

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import backward_and_step, batch

FAINT = 2.0**28


class Faint(nn.Module):
    """A small network; train_faint multiplies its loss by 2**-28, so that no gradient reaches 2**-24."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


def train_faint(plan, low="fp16", **options):
    torch.manual_seed(0)
    model = Faint()
    opt = torch.optim.SGD(model.parameters(), lr=0.05 * FAINT)
    session = halfstep.initialize(model, opt, plan, low=low, **options)
    first = last = 0.0
    for step in range(61):  # the first and the last batch are the same
        inputs = batch(step % 4)[0]
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :1]) / FAINT
        backward_and_step(session, loss)
        last = float(loss.detach()) * FAINT
        first = first or last
    session.close()
    return first, last


@pytest.mark.slow_but("O1")
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_gradients_below_the_smallest_fp16_number_need_loss_scaling(plan):
    _, reference = train_faint("O0", low="fp16")
    first, unscaled = train_faint(plan, loss_scale=1.0)
    _, dynamic = train_faint(plan)
    _, constant = train_faint(plan, loss_scale=2.0**18)
    assert reference < 0.2 * first, "the task can be learned"
    assert unscaled == first, "with scale 1 the gradients underflow and nothing is learned"
    assert dynamic < 0.25 * first
    assert constant < 0.25 * first


@pytest.mark.slow_but("stochastic-500", "split-500")
@pytest.mark.parametrize("steps", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("master", ["none", "none-stochastic", "copy", "split"])
def test_updates_of_relative_size_2_to_the_minus_13(master, steps):
    """bf16 keeps 8 significant bits: 1 - 2**-13 rounds to 1, so without a master the weight never moves,
    unless it is rounded stochastically: then 256 weights move as they should, on average (their mean to 0.003)."""
    model = nn.Linear(256, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt = torch.optim.SGD(model.parameters(), lr=2.0**-13)
    master, _, rounding = master.partition("-")
    plan, options = ("O3", {"rounding": rounding or "nearest"}) if master == "none" else ("O2", {"master": master})
    session = halfstep.initialize(model, opt, plan, low="bf16", **options)
    weight, expected = model.weight, torch.ones(())
    for _ in range(steps):
        opt.zero_grad()
        session.backward(weight.float().sum())  # the gradient is 1
        session.step()
        expected = expected - 2.0**-13
    value = model.state_dict()["weight"]
    if rounding:
        assert value.mean().item() == pytest.approx(expected.item(), abs=0.01)
    elif master == "none":
        assert (value == 1.0).all()
    else:
        assert (value == expected).all()


def test_rows_of_sparse_gradients_are_rounded_stochastically_too():
    table = nn.Embedding(50, 8, sparse=True)
    nn.init.ones_(table.weight)
    opt = torch.optim.SGD(table.parameters(), lr=2.0**-12)
    with halfstep.initialize(table, opt, "O3", low="bf16") as session:
        for _ in range(200):
            session.backward(table(torch.tensor([1, 2])).float().sum())
            session.step()
            opt.zero_grad()
    assert table.weight[1].mean().item() == pytest.approx(1 - 200 * 2.0**-12, abs=0.01)
    assert torch.equal(table.weight[0], torch.ones(8))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_copy_and_split_train_bit_identically(optimizer):
    results = []
    for master in ("copy", "split"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        opt = optimizer(model.parameters(), lr=1e-3)
        session = halfstep.initialize(model, opt, "O2", low="bf16", master=master)
        for step in range(50):
            inputs, targets = batch(step)
            opt.zero_grad()
            backward_and_step(session, nn.functional.mse_loss(model(inputs), targets), max_norm=1.0)
        results.append([*model.parameters(), *model.state_dict().values()])
        results[-1] = [t.detach().clone() for t in results[-1]]
        session.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_accumulation_over_many_backwards_keeps_growing():
    """A bf16 sum of ones stops at 256; gradients of a second backward on are held in fp32."""
    model = nn.Linear(1, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    for _ in range(1000):
        session.backward(model.weight.float().sum())
    session.unscale_()
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 1000.0
    session.step()
    opt.zero_grad()
    session.backward(model.weight.float().sum())
    assert model.weight.grad.dtype is torch.bfloat16


def test_a_gan_trains_in_one_session_and_in_two():
    for together in (True, False):
        torch.manual_seed(0)
        g, d = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        opt_g, opt_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)
        if together:
            session_g = session_d = halfstep.initialize([g, d], [opt_g, opt_d], "O2", low="fp16")
        else:
            session_g, session_d = (halfstep.initialize(m, o, "O2", low="fp16") for m, o in ((g, opt_g), (d, opt_d)))
        before = [p.detach().clone() for p in (*g.parameters(), *d.parameters())]
        bce = nn.BCEWithLogitsLoss()
        for step in range(4):
            real, noise = batch(step)[0], batch(step)[1]
            opt_d.zero_grad()
            fake = g(noise)
            session_d.backward(bce(d(real), torch.ones(16, 1)) + bce(d(fake.detach()), torch.zeros(16, 1)), loss_id=0)
            assert not bool(session_d.step(opt_d).skipped)
            opt_g.zero_grad()
            session_g.backward(bce(d(fake), torch.ones(16, 1)), loss_id=1)
            assert not bool(session_g.step(opt_g).skipped)
        assert all(not torch.equal(a, b) for a, b in zip(before, [*g.parameters(), *d.parameters()], strict=True))
        session_g.close()
        session_d.close()
