"""What a step must survive: gradients in unusual memory, weights that change their memory format, refusals."""

import numpy
import pytest
import torch
from torch import nn

import halfstep
from halfstep import SessionError
from tests.contracts.cases import backward_and_step


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


class Filter(nn.Module):
    """A complex filter beside a layer: autograd hands its gradient over with torch's conjugate bit."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.full((3,), 1 + 1j))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.layer(x)) * self.filter.conj() * (1 + 2j), n=4)


def conjugate_view(t):
    """The same values as torch's conjugate bit over their conjugates."""
    return t.resolve_conj().conj_physical().conj()


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_gradient_with_the_conjugate_bit_trains_as_without(build, name):
    trained = []
    for way in ("plain", "step", "unscale_", "hook"):
        torch.manual_seed(0)
        model = Filter()
        optimizer = build(model.parameters(), lr=0.125)
        session = halfstep.initialize(model, optimizer, name, low="fp16")
        if way == "hook":
            optimizer.register_step_pre_hook(lambda *_, p=model.filter: setattr(p, "grad", conjugate_view(p.grad)))
        for _ in range(3):
            optimizer.zero_grad()
            session.backward(model(torch.ones(2, 4)).square().sum())
            grad = model.filter.grad
            model.filter.grad = grad.resolve_conj() if way == "plain" else conjugate_view(grad)
            assert model.filter.grad.is_conj() is (way != "plain")
            if way == "unscale_":
                session.unscale_()
            session.step(max_norm=1.0)
        session.close()
        trained.append(model.filter.detach().clone())
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-6, atol=1e-7)


def test_gradients_with_the_conjugate_bit_may_be_left_when_the_session_closes():
    model = Filter()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="fp16")
    session.backward(model(torch.ones(2, 4)).square().sum())
    scaled = model.filter.grad.resolve_conj().clone()
    model.filter.grad = conjugate_view(model.filter.grad)
    scale = session.status().scales[0]
    session.close()
    assert torch.equal(model.filter.grad * scale, scaled)


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_gradient_of_another_shape_is_named_whatever_the_optimizer(build):
    model = nn.Linear(3, 2)
    session = halfstep.initialize(model, build(model.parameters()), "O1", low="bf16")
    session.backward(model(torch.ones(1, 3)).sum())
    model.weight.data = model.weight.data.reshape(3, 2)
    with pytest.raises(SessionError, match=r"'weight' has shape \(2, 3\)"):
        session.step()


@pytest.mark.parametrize("master", ["copy", "split"])
def test_weights_in_another_memory_format_keep_their_values(master):
    model = nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16", master=master)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)
    backward_and_step(session, model(torch.randn(2, 3, 8, 8)).sum())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


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


def test_max_norm_takes_any_real_number():
    model = nn.Linear(2, 2)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1", low="bf16")
    session.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(SessionError, match="max_norm is True"):
        session.step(max_norm=True)
    assert session.step(max_norm=numpy.float32(1.0)).step == 1


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


def test_clipping_divides_by_the_norm_and_a_millionth_as_torch_does():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1", low="bf16")
    backward_and_step(session, model(torch.full((1, 1), 2.0**-20)).sum(), max_norm=2.0**-20)
    assert model.weight.item() == pytest.approx(-(2.0**-20) * 2.0**-20 / (2.0**-20 + 1e-6), rel=1e-5)  # about half


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "fp16")])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.ASGD])
@pytest.mark.parametrize(("max_norm", "moved"), [(1.5, 1.5), (3.0, 3.0), (6.0, 3.0)])
def test_clipping_measures_the_true_gradient(name, low, loss_scale, build, max_norm, moved):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    session = halfstep.initialize(model, build(model.parameters(), lr=1.0), name, low=low, loss_scale=loss_scale)
    assert backward_and_step(session, model(torch.full((1, 1), 3.0)).sum(), max_norm=max_norm).grad_norm.item() == 3.0
    session.close()
    assert model.weight.item() == pytest.approx(-moved, rel=1e-5)


def test_a_step_counts_as_one_for_schedulers(recwarn):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward_and_step(session, model(torch.ones(1, 2)).sum())
    scheduler.step()
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []


@pytest.mark.parametrize("reorder", [False, True])
def test_o0_clips_bit_identically_to_torch_however_groups_order_the_parameters(reorder):
    def start():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(11, 11), nn.LayerNorm(11)) for _ in range(12)])
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}] if reorder else model.parameters()
        return model, torch.optim.AdamW(groups, lr=1e-2)

    ours, theirs = start(), start()
    session = halfstep.initialize(*ours, "O0")
    for seed in range(20):
        x = torch.randn(7, 11, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in (ours, theirs):
            optimizer.zero_grad()
            loss = (model(x) * torch.arange(11)).square().mean()
            loss.backward() if model is theirs[0] else session.backward(loss)
        norm = nn.utils.clip_grad_norm_(theirs[0].parameters(), 0.1)
        theirs[1].step()
        assert torch.equal(session.step(max_norm=0.1).grad_norm, norm)
    assert all(torch.equal(p, q) for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True))
