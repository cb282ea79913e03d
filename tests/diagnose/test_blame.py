"""What blame finds and leaves alone, and that its cures train."""

import random

import numpy
import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule, Scaling
from tests.contracts.cases import backward_and_step, differing, mixed_plans, snapshot, start, train
from tests.diagnose.closures import assert_cured, closure_of, opened, tower, verdict_on
from tests.diagnose.faults.hosts import Cnn, Stacked, images, rows, targets
from tests.diagnose.faults.plants import Gain, SqrtOfZero


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_a_forward_overflow_is_found_at_its_operation_and_line(plan):
    model, _, session, closure = tower(plan)
    model.blocks[1].gain = 1e6
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "blocks.1", "mul", "forward")
    assert verdict.where.startswith("closures.py:")
    assert verdict.where.endswith(" in forward")
    assert verdict.cure == (Rule("blocks.1", FULL),)
    assert verdict.call.operator == "mul"
    assert verdict.call.output_formats == ("float16",)


@pytest.mark.slow_but("O1-bf16", "O2-fp16")
@mixed_plans
def test_blame_leaves_everything_as_it_was(name, low):
    model, optimizer, session = start(name, low)
    train(session, model, optimizer, [0, 1])
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    session.backward(nn.functional.mse_loss(model(inputs), targets))
    inputs = inputs.clone()
    inputs[0, 0] = torch.inf
    before, grads = snapshot(model, optimizer, session), [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()

    def closure():
        random.random()
        numpy.random.rand()
        torch.rand(1)
        return nn.functional.mse_loss(model(inputs), targets)

    assert halfstep.blame(session, closure).kind == "input data"
    assert differing(before, snapshot(model, optimizer, session)) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(g is None or torch.equal(g, v) for g, v in zip(grads, values, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    session.step()


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_gradients_that_nobody_zeroed_are_told_from_a_failure_that_did_not_repeat(plan):
    model, optimizer, session, closure = tower(plan, "bf16")
    backward_and_step(session, model(torch.full((4, 8), torch.inf)).square().mean())
    backward_and_step(session, closure())
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.operator, verdict.cure) == ("stale gradients", "zero_grad", ())
    assert "optimizer.zero_grad()" in verdict.advice
    optimizer.zero_grad()
    assert not bool(backward_and_step(session, closure()).skipped)


def test_one_of_two_models_is_named_as_in_its_rule_and_numbered():
    models = [Cnn(nn.Identity()), Stacked(Gain(), nn.Identity())]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = halfstep.initialize(models, optimizers, "O2", low="fp16")
    pictures, inputs, labels = images(), rows(), targets()
    verdict = halfstep.blame(
        session, lambda: nn.functional.cross_entropy(models[0](pictures) + models[1](inputs), labels)
    )
    assert verdict.module == verdict.call.module == "blocks.0"
    assert "in model 1 (the first is 0)" in verdict.evidence
    assert verdict.cure == (Rule("blocks.0", FULL),)


def test_sparse_gradients_are_looked_at():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    indices = torch.tensor([1, 2, 3])
    assert halfstep.blame(session, lambda: model(indices).square().mean()) is None
    with torch.no_grad():
        model[0].weight[2, 0] = torch.nan
    verdict = halfstep.blame(session, lambda: model(indices).square().mean())
    assert (verdict.kind, verdict.module, verdict.operator) == ("weights", "0", "embedding")


def test_a_normal_skip_is_called_normal():
    model = Cnn(nn.Identity())
    session, closure = opened(model, loss_scale=Scaling("dynamic", init=2.0**24)), closure_of(model)
    assert bool(backward_and_step(session, closure()).skipped)
    verdict = halfstep.blame(session, closure)
    assert verdict.kind == "scale too high"
    assert "normal while a dynamic loss scale comes down" in verdict.advice


def test_hooks_of_an_optimizer_in_the_backward_pass_do_not_run():
    model, calls = Cnn(nn.Identity()), []
    session, closure = opened(model, "O1", "bf16"), closure_of(model)
    model.head.weight.register_post_accumulate_grad_hook(calls.append)
    assert halfstep.blame(session, closure) is None
    assert calls == []
    closure().backward()
    assert len(calls) == 1


@pytest.mark.parametrize(("plan", "low"), [("O2", "bf16"), ("O1", "fp16")])
def test_a_hook_on_the_gradient_of_a_parameter_acts_in_trials_too(plan, low):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # no unit is ever on: the gradient is zero
    model[0].weight.register_hook(lambda grad: grad / grad.norm())
    verdict = verdict_on(model, plan, low)
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "div", ())
    assert "in fp32 the same closure fails too" in verdict.evidence
    assert len(model[0].weight._backward_hooks) == 1


@pytest.mark.parametrize(
    ("scaling", "cure"),
    [
        (Scaling("dynamic", init=64.0), Scaling("dynamic", init=2.0**-3, min=2.0**-15)),
        (Scaling("static", init=64.0), Scaling("static", init=2.0**-5)),
        (Scaling("static", init=1.0), Scaling("static", init=2.0**-5)),
        (Scaling("none"), Scaling("static", init=2.0**-5)),
    ],
)
def test_a_loss_scale_below_1_is_offered_where_it_passes(scaling, cure):
    model, inputs = nn.Linear(8, 4, bias=False), torch.full((1, 8), 1e-3)
    session = opened(model, loss_scale=scaling)

    def closure():
        return model(inputs).float().sum() * 3e5  # the gradient of the loss: 65504 / 3e5 is above 1 / 8 only

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.cure) == ("scale too high", (cure,))
    assert "at loss scale 0.125 all gradients are finite" in verdict.evidence
    assert_cured(model, session, verdict, closure)


class Tied(nn.Module):
    """Embedding and head are one matrix, the head's results lie beyond fp16."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.norm(self.emb(tokens)) * 3e3)


def test_modules_that_share_a_parameter_are_cured_together():
    model, tokens = Tied(), torch.arange(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:
        verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(tokens), tokens))
        plan = session.plan
    assert (verdict.module, verdict.kind) == ("head", "overflow")
    assert {rule.pattern for rule in verdict.cure} == {"head", "emb"}
    with halfstep.initialize(model, optimizer, plan.edit(*verdict.cure)) as session:
        assert not backward_and_step(session, nn.functional.cross_entropy(model(tokens), tokens)).skipped


@pytest.mark.parametrize("pattern", ["blocks.*", "type:Overflowing"])
def test_a_cure_takes_the_place_of_a_rule_that_matches_the_module(pattern):
    model, inputs = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(8, 8), Overflowing())}), torch.ones(4, 8)
    with opened(model, rules=[halfstep.Rule(pattern, halfstep.LOW)]) as session:
        verdict = halfstep.blame(session, lambda: model["blocks"](inputs).float().mean())
    assert [edit.pattern for edit in verdict.cure] == [pattern]
    with opened(model, session.plan.edit(*verdict.cure)) as session:
        assert halfstep.blame(session, lambda: model["blocks"](inputs).float().mean()) is None


def test_edits_are_tried_on_a_model_that_holds_a_compiled_module():
    model, inputs = nn.Sequential(nn.Linear(8, 8), torch.compile(Overflowing(), backend="eager")), torch.ones(4, 8)
    with opened(model) as session:
        verdict = halfstep.blame(session, lambda: model(inputs).float().mean())
    assert verdict.cure == (Rule("1", FULL),)
    assert "tried:" in verdict.advice


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) * 1e6 / 1e6


def test_an_operation_of_the_loss_is_cured_by_an_edit_that_autocast_takes_up():
    model, inputs = nn.Linear(8, 4), torch.randn(8, 8)
    session = opened(model)

    def closure():
        with session.autocast():
            return (model(inputs) @ torch.eye(4) * 300).pow(2).mean()

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "", "pow")
    assert verdict.cure[0] == halfstep.OpChange("deny", "pow")
    session.close()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), session.plan.edit(*verdict.cure))
    assert not backward_and_step(session, closure()).skipped


class HandNorm(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x):
        x = x * self.gain
        return self.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


@pytest.mark.parametrize(("gain", "codes"), [(1e3, ["overflow absorbed"]), (10.0, [])])
def test_an_overflow_that_ends_in_zeros_is_noted(gain, codes, caplog, tmp_path):
    model, inputs = HandNorm(gain), torch.randn(8, 8, dtype=torch.float16)
    with halfstep.RunLog(tmp_path / "run.jsonl") as log:
        assert halfstep.blame(opened(model, "O3", sinks=[log]), lambda: model(inputs).square().mean()) is None
    found = [event.record for event in halfstep.read_log(tmp_path / "run.jsonl").events]
    assert [finding.code for finding in found] == codes
    assert all(finding.severity == "warning" and "pow gives" in finding.evidence for finding in found)
    assert all(finding.cure == (halfstep.OpChange("deny", "pow"),) for finding in found)
    assert (caplog.text == "") is (not codes)


def test_anomaly_mode_does_not_hide_what_is_looked_for():
    with torch.autograd.set_detect_anomaly(True):
        verdict = verdict_on(Stacked(SqrtOfZero(), nn.Identity()), "O1", "bf16")
        assert torch.is_anomaly_enabled()
    assert (verdict.kind, verdict.operator, verdict.phase) == ("invalid", "sqrt", "backward")


class Mixture(nn.Module):
    """Experts whose shares the model's own forward adds up, beyond the low format on the way."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        parts = [expert(x) * 1e7 * shares[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return self.norm(torch.stack(parts).sum(0))


@pytest.mark.slow_but("O1")
@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_the_models_own_code_is_cured_and_its_parts_stay_low(plan):
    model = Mixture()
    session, closure = opened(model, plan, loss_scale=64.0), closure_of(model)
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "", "mul")
    assert {rule.pattern: rule.policy.compute for rule in verdict.cure if isinstance(rule, Rule)} == {
        "": "full", "router": "low", "experts": "low",
    }  # fmt: skip
    assert_cured(model, session, verdict, closure, steps=4)


@pytest.mark.parametrize("diverged", [True, False])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_training_that_diverges_in_every_format_is_no_fault_of_the_format(plan, diverged):
    model, inputs, wanted = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(8, 8), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, plan, low="fp16", loss_scale=1.0)
    backward_and_step(session, nn.functional.mse_loss(model(inputs), wanted))
    if diverged:  # as a learning rate does that is too high
        state = model.state_dict()
        model.load_state_dict({**state, "0.weight": state["0.weight"] * 1e6})
    else:  # a batch that is unlike the others
        inputs[0] = 1e6
    verdict = halfstep.blame(session, lambda: nn.functional.mse_loss(model(inputs), wanted))
    assert (verdict.kind, verdict.phase) == ("overflow", "forward")
    assert "in the first step of this session the loss was" in verdict.evidence
    assert ("training has diverged" in verdict.advice) is diverged
    assert bool(verdict.cure) is not diverged


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_a_loss_beyond_all_squares_of_fp16_has_diverged_though_each_weight_fits(plan):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    inputs, wanted = torch.ones(8, 8), torch.zeros(8, 8)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan, low="fp16")
    backward_and_step(session, nn.functional.mse_loss(model(inputs), wanted))
    model.load_state_dict({name: torch.full_like(weight, 1e3) for name, weight in model.state_dict().items()})
    verdict = halfstep.blame(session, lambda: nn.functional.mse_loss(model(inputs), wanted))  # 8000**8 is 2e31
    assert (verdict.kind, verdict.operator, verdict.cure) == ("overflow", "linear", ())
    assert "training has diverged" in verdict.advice


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_to_blame_only_where_they_are_read(training):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).train(training)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")
    model[1].running_var.fill_(torch.nan)
    inputs = torch.randn(8, 8)
    model[1].weight.data.fill_(3e38)  # the norm itself overflows
    verdict = halfstep.blame(session, lambda: model(inputs).mean())
    assert (verdict.module, verdict.kind) == ("1", "overflow" if training else "weights")
    assert ("running_var" in str(verdict)) is not training


class Heavy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        with torch.no_grad():
            self.head.weight[2, 3] = 1e5

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def heavy(*edits):
    torch.manual_seed(0)
    model = Heavy()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plan = halfstep.level("O2", "fp16").edit(*edits)
    session = halfstep.initialize(model, optimizer, plan, on_failure="warn")

    def loss(number):
        generator = torch.Generator().manual_seed(number)
        inputs, labels = torch.randn(8, 16, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        return nn.functional.cross_entropy(model(inputs), labels)

    return optimizer, session, loss


def test_a_cure_that_only_just_passes_comes_behind_one_with_room():
    _, session, loss = heavy()
    verdict = halfstep.blame(session, lambda: loss(0))
    session.close()
    optimizer, session, loss = heavy(*verdict.cure)
    for number in range(40):
        optimizer.zero_grad()
        assert not backward_and_step(session, loss(number)).skipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_masks_that_are_added_are_named_and_not_to_be_scaled_down(dtype):
    model = nn.Linear(8, 8)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16")
    one, two = torch.zeros(4, 8, dtype=dtype), torch.zeros(4, 8, dtype=dtype)
    one[1], two[1] = torch.finfo(dtype).min, torch.finfo(dtype).min
    verdict = halfstep.blame(session, lambda: (model(torch.ones(4, 8)) + (one + two)).float().softmax(-1)[:, 0].mean())
    assert (verdict.operator, verdict.phase) == ("add", "forward")
    assert "combine masks as booleans" in verdict.advice


def test_weights_that_are_not_finite_name_what_spoils_them():
    model = nn.Linear(8, 4)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16")
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    verdict = halfstep.blame(session, lambda: model(torch.ones(4, 8)).mean())
    assert verdict.kind == "weights"
    assert "too high or NaN" in verdict.advice
    assert "eps is 0" in verdict.advice
    session.close()
