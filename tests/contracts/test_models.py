"""What real models and training loops bring along: adapters on frozen weights, sparse gradients, custom batches."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, LOW, Rule, SessionError
from tests.contracts.cases import backward_and_step, batch, mixed_plans


class Adapter(nn.Module):
    """LoRA: a frozen low matrix and a trainable fp32 product of two thin ones."""

    def __init__(self, low):
        super().__init__()
        self.base = nn.Linear(8, 4, dtype=low).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x))


@mixed_plans
def test_frozen_low_weights_stay_as_they_are_and_the_adapter_trains(name, low):
    dtype = halfstep.formats.as_format(low).dtype
    model = Adapter(dtype)
    base = model.base.weight.detach().clone()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    session = halfstep.initialize(model, opt, name, low=low)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1])
        backward_and_step(session, loss)
        losses.append(loss.detach())
    assert losses[-1] < 0.8 * losses[0]
    session.close()
    assert model.base.weight.dtype is dtype
    assert torch.equal(model.base.weight, base)
    assert model.up.weight.dtype is torch.float32


@mixed_plans
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_embedding_gradients_train(name, low, optimizer):
    model = nn.EmbeddingBag(16, 4, sparse=True, mode="mean")
    opt = optimizer(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, name, low=low)
    rows, target = torch.arange(8).view(4, 2), torch.randn(4, 4)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(rows), target)
        assert not bool(backward_and_step(session, loss).skipped)
        losses.append(loss.detach())
    assert losses[-1] < 0.99 * losses[0]
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_sparse_gradients_are_counted_and_looked_at(name):
    model = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, name, low="bf16")
    rows, size = torch.tensor([3, 3, 5]), 4 if name == "O1" else 2
    backward_and_step(session, model(rows).sum())
    memory = session.status().memory
    assert memory["weights"] == 4000 * size
    assert memory["gradients"] == 3 * (8 + 4 * size)  # an index and a row of values for each entry
    assert halfstep.blame(session, lambda: model(rows).sum()) is None
    optimizer.zero_grad()
    backward_and_step(session, model(rows).sum() * torch.inf)
    assert session.status().nonfinite_gradients == ("weight",)
    verdict = halfstep.blame(session, lambda: model(rows).sum() * torch.inf)
    assert verdict is not None


@mixed_plans
def test_a_param_group_added_later_trains(name, low):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    opt = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    session = halfstep.initialize(model, opt, name, low=low)

    def step():
        opt.zero_grad()
        model.zero_grad()
        backward_and_step(session, nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]))

    step()
    before = model.state_dict()["0.weight"].clone()
    step()
    assert torch.equal(model.state_dict()["0.weight"], before)
    opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
    step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@mixed_plans
def test_parameters_without_a_gradient_this_step_stay_as_they_are(name, low):
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, name, low=low)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    backward_and_step(session, model["a"](batch(0)[0]).square().mean())
    after = model.state_dict()
    assert {k for k in before if not torch.equal(before[k], after[k])} == {"a.weight", "a.bias"}


def test_float64_and_complex_parameters_keep_their_dtype():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single = nn.Linear(8, 4)
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.wave = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x):
            return self.single(x) * self.wide * self.wave.abs()

    model = Mixed()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    assert (model.single.weight.dtype, model.wide.dtype, model.wave.dtype) == (
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    )
    backward_and_step(session, model(batch(0)[0]).square().mean().float())
    assert not torch.equal(model.wide, torch.ones(4, dtype=torch.float64))
    assert not torch.equal(model.wave, torch.ones(4, dtype=torch.complex64))


@dataclasses.dataclass(frozen=True)
class Sample:
    inputs: torch.Tensor
    lengths: torch.Tensor
    name: str


@mixed_plans
def test_nested_and_custom_batches_go_through_the_model(name, low):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, sample, options):
            assert sample.lengths.dtype is torch.int64
            return {"out": self.layer(sample.inputs) + self.layer(options["more"][0]), "name": sample.name}

    model = Takes()
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low)
    sample = Sample(batch(0)[0], torch.arange(3), "first")
    out = model(sample, options={"more": [batch(1)[0]]})
    assert out["out"].dtype is torch.float32
    assert out["name"] == "first"
    assert sample.inputs.dtype is torch.float32


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_a_module_kept_full_gives_its_output_the_format_of_its_input(name, low):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    session = halfstep.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low, rules=[Rule("1", FULL)]
    )
    dtype = session.plan.low.dtype
    model(batch(0)[0])
    assert seen[1] == (dtype, dtype)
    assert model[1].weight.dtype is torch.float32


def test_a_low_module_inside_a_full_one_computes_low():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 4))
    rules = [Rule("0", FULL), Rule("0.0", LOW)]
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16", rules=rules)
    assert [p.dtype for p in model.parameters()][::2] == [torch.bfloat16, torch.float32, torch.bfloat16]
    x, inner, seen = batch(0)[0], model[0][0], []
    inner.register_forward_hook(lambda module, args, out: seen.append(out))
    assert model(x).dtype is torch.float32
    assert seen[0].dtype is torch.float32, "the full module around it casts nothing"
    assert torch.equal(seen[0], nn.functional.linear(x.bfloat16(), inner.weight, inner.bias).float())


def test_a_loss_with_weights_runs_under_the_plan_in_autocast():
    model, head = nn.Linear(8, 8), nn.Linear(8, 1)
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    session = halfstep.initialize([model, head], opt, "O1", low="bf16")
    with session.autocast():
        assert (model(batch(0)[0]) @ torch.randn(8, 2)).dtype is torch.bfloat16
        assert torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32


def test_binary_cross_entropy_on_low_inputs_names_the_safe_op():
    model = nn.Linear(8, 1)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    with session.autocast(), pytest.raises(Exception, match="binary_cross_entropy_with_logits"):
        nn.functional.binary_cross_entropy(torch.rand(4).bfloat16(), torch.ones(4).bfloat16())
    loss = nn.functional.binary_cross_entropy(torch.sigmoid(model(batch(0)[0])), torch.ones(16, 1))
    backward_and_step(session, loss)


def test_grad_of_what_is_no_scalar_needs_directions():
    model = nn.Linear(8, 1)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="fp16", loss_scale=128)
    x = batch(0)[0].requires_grad_()
    with pytest.raises(SessionError, match=r"shape \(16, 1\).*grad_outputs"):
        session.grad(model(x), x)
    (g,) = session.grad(model(x), x, grad_outputs=torch.ones(16, 1))
    torch.testing.assert_close(g, model.weight.detach().expand(16, 8), rtol=1e-3, atol=1e-4)


def test_weights_written_behind_the_session_are_adopted():
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O2", low="bf16", master="copy")
    model.weight.data.fill_(0.5)
    session.adopt_weights()
    assert torch.equal(model.state_dict()["weight"], torch.full((4, 8), 0.5))
    session.close()
    assert torch.equal(model.weight, torch.full((4, 8), 0.5))


@pytest.mark.parametrize(("low", "master"), [("bf16", "split"), ("bf16", "copy"), ("fp16", "copy"), ("bf16", "none")])
def test_weights_are_fp32_in_full_weights_and_what_is_written_there_is_kept_in_the_masters(low, master):
    model = nn.Linear(8, 4)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = halfstep.initialize(model, opt, "O2", low=low, master=master)
    session.backward(model(batch(0)[0]).mean())
    held = [(p, p.dtype, p.data_ptr(), p.grad, p.grad.clone()) for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written = torch.full((4, 8), 0.5) + torch.arange(32).view(4, 8) * 2.0**-20
    with session.full_weights():
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert all(p.dtype is torch.float32 and p.grad is None for p in model.parameters())
        model.weight.data.copy_(written)
    for p, dtype, place, grad, values in held:
        assert (p.dtype, p.data_ptr()) == (dtype, place)
        assert p.grad is grad
        assert torch.equal(p.grad, values)
    kept = written if master != "none" else written.bfloat16().float()  # no value lies between two others
    assert torch.equal(model.state_dict()["weight"], kept)
    assert torch.equal(model.weight.detach(), written.to(model.weight.dtype))
    assert torch.equal(model.state_dict()["bias"], before["bias"])
    session.step()
    assert not torch.equal(model.state_dict()["weight"], kept)


@pytest.mark.parametrize("master", ["split", "copy"])
def test_full_weights_that_nothing_writes_change_no_bit_of_what_follows(master):
    def trained(look):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16", master=master)
        for step in range(6):
            session.backward(model(batch(step)[0]).square().sum())
            if look:
                with session.full_weights():
                    pass
            if step % 2:
                session.step()
                model.zero_grad()
        session.close()
        return model.state_dict()

    plain, looked = trained(False), trained(True)
    assert all(torch.equal(plain[name], looked[name]) for name in plain)


def test_status_names_what_is_not_finite_and_counts_bytes():
    model = nn.Linear(8, 4)
    opt = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, opt, "O2", low="bf16")
    backward_and_step(session, model(batch(0)[0]).sum())
    status = session.status()
    assert status.memory == {"weights": 72, "masters": 72, "gradients": 72, "optimizer": 36 * 8 + 2 * 4}
    assert (status.level, status.low, status.steps, status.skipped) == ("O2", "bf16", 1, 0)
    assert status.nonfinite_parameters == ()
    with torch.no_grad():
        model.bias[0] = torch.nan
    assert session.status().nonfinite_parameters == ("bias",)
    assert "non-finite parameters: bias" in str(session.status())


class Contrast(nn.Module):
    """Holds the model and writes a contrastive loss out, as sentence-transformers' MultipleNegativesRankingLoss."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.scores.weight)

    def forward(self, x):
        scores = self.scores(x)
        return torch.logsumexp(scores, 1) - scores.diagonal()


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_contrastive_loss_inside_forward_is_computed_in_fp32_at_low_weights(low):
    model, x = Contrast(), 4 * torch.eye(4)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low=low):
        assert torch.allclose(model(x), torch.tensor(1 + 3 * math.exp(-4)).log(), rtol=0, atol=1e-6)  # bf16: 0.0625


def test_a_class_weighted_loss_inside_forward_trains_at_low_weights():
    class Classifies(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, x, y):
            logits = self.layer(x)
            return self.loss(logits, y) + nn.functional.nll_loss(logits.log_softmax(1), y, weight=self.loss.weight)

    for name, low in (("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")):
        model = Classifies()
        session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low)
        assert not bool(backward_and_step(session, model(batch(0)[0], torch.arange(16) % 4)).skipped)
        session.close()


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_loss_computed_inside_forward_is_full(name, low):
    class Loses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, y):
            logits = self.layer(x)
            self.logits = logits.detach()
            return nn.functional.cross_entropy(logits, y)

    model = Loses()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low)
    y = torch.arange(16) % 4
    loss = model(batch(0)[0], y)
    assert model.logits.dtype is halfstep.formats.as_format(low).dtype
    assert torch.equal(loss, nn.functional.cross_entropy(model.logits.float(), y))
    session.backward(loss)
    assert float(session.step().scale) == {"bf16": 1.0, "fp16": 65536.0 if name == "O2" else 1.0}[low]  # not capped
    session.close()
    session = halfstep.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low, ops={"promote": ["cross_entropy"]}
    )
    loss = model(batch(0)[0], y)
    assert torch.equal(loss, nn.functional.cross_entropy(model.logits, y).float())  # the way back: a low loss


def test_an_fp16_loss_computed_inside_forward_caps_the_scale_too():
    class Loses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean() / 64}

    model = Loses()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O2", low="fp16")
    record = backward_and_step(session, model(batch(0)[0])["loss"])
    assert (float(record.scale), bool(record.skipped)) == (32768.0, False)
    session.close()
    session = halfstep.initialize(model, opt, "O2", low="fp16", loss_scale=2.0**17)
    with pytest.raises(SessionError, match=r"131072"):
        session.backward(model(batch(0)[0])["loss"])


class Registered(nn.Module):
    """A base class that keeps a registry and wants a name."""

    names: ClassVar = {}

    def __init_subclass__(cls, name, **kwargs):
        super().__init_subclass__(**kwargs)
        assert name not in cls.names
        cls.names[name] = cls


class Named(Registered, name="named"):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)


def test_registries_of_classes_are_left_alone():
    model = Named()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    assert isinstance(model, Named)
    assert model(batch(0)[0]).dtype is torch.float32
    assert Registered.names == {"named": Named}
    session.close()
    assert type(model) is Named


def test_a_gradient_penalty_of_another_loss_backs_off_that_loss_scale():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    session = halfstep.initialize(model, opt, "O1", low="fp16")
    skipped = []
    for _ in range(20):
        opt.zero_grad()
        x = batch(0)[0].requires_grad_()
        (g,) = session.grad(model(x).sum(), x, loss_id=1, create_graph=True)
        session.backward((g.norm(dim=1) - 1).square().mean(), loss_id=1)
        skipped.append(bool(session.step().skipped))
    assert skipped[0]
    assert not any(skipped[12:])
    assert 1.0 < session.status().scales[1] < 65536.0


class Diffusion(nn.Module):
    """A timestep embedding beside the picture, as diffusion models have it; keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.conv, self.time, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x, t, extra):
        self.seen = {"x": x, "t": t, **extra}
        angles = t[:, None] * torch.exp2(-torch.arange(4.0))
        h = self.conv(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        return self.out(h)


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_model_code_sees_inputs_as_given(name, low):
    model = Diffusion()
    x, t, noise = torch.randn(2, 1, 4, 4), torch.tensor([999.0, 513.0]), torch.tensor([2049.0])
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low) as session:
        out = model(x, t, {"noise": noise})
        assert all(model.seen[key] is value for key, value in (("x", x), ("t", t), ("noise", noise)))
        assert out.dtype is torch.float32
        assert not bool(backward_and_step(session, out.square().mean() / 64).skipped)
    dtype = halfstep.formats.as_format(low).dtype
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low=low, input="low"):
        model(x, t, {"noise": noise})
        assert {value.dtype for value in model.seen.values()} == {dtype}
        assert torch.equal(model.seen["t"].float(), t.to(dtype).float())
    rule = Rule("1", halfstep.Policy("full", "low", "full") if name == "O1" else LOW, input="low")
    both = nn.Sequential(nn.Identity(), nn.Conv2d(1, 1, 1))
    got = []
    with halfstep.initialize(both, None, name, low=low, rules=[rule]):
        conv = torch.nn.Conv2d._conv_forward
        both[1]._conv_forward = lambda x, *rest: got.append(x.dtype) or conv(both[1], x, *rest)
        both(x)
    assert got == [dtype]


class Detector(nn.Module):
    """Boxes and targets beside pictures, as Faster R-CNN takes them: in lists of dicts, compared and gathered by."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, images, targets):
        boxes = torch.stack([target["boxes"] for target in targets])
        assert boxes.dtype is torch.float32
        low, high = boxes[..., :2], boxes[..., 2:]
        if not bool((low < high).all()):
            raise ValueError("all boxes should have positive height and width")
        pooled = self.features(torch.stack(images)).mean((2, 3))
        return {"boxes": nn.functional.smooth_l1_loss(low.repeat(1, 1, 2) + self.head(pooled)[:, None], boxes)}


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_boxes_and_targets_arrive_as_given(name):
    model = Detector()
    images = [torch.randn(3, 8, 8) for _ in range(2)]
    boxes = torch.tensor([[512.0, 512.0, 513.0, 513.0]])  # 513 is 512 in bf16
    targets = [{"boxes": boxes} for _ in range(2)]
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-6), name, low="bf16") as session:
        assert not bool(backward_and_step(session, sum(model(images, targets).values())).skipped)
