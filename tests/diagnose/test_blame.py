"""What blame finds, leaves alone, and refuses."""

from __future__ import annotations

import collections
import itertools
import logging
import random
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import FULL, Rule, Scaling, SessionError
from halfstep.diagnose.cures import FULL_OUT
from tests.contracts.cases import differing, mixed_plans, snapshot, start, train
from tests.diagnose.faults.hosts import Attention, Cnn, Stacked, Transformer, images, rows, targets, words
from tests.diagnose.faults.plants import Gain, SqrtOfZero


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x):
        return x + torch.relu(self.fc(x) * self.gain) / self.gain


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


def tower(plan="O1", low="fp16", **options):
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = halfstep.initialize(model, optimizer, plan, low=low, **options)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    return model, optimizer, session, lambda: nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_a_forward_overflow_is_found_at_its_operation_and_line(plan):
    model, _, session, closure = tower(plan)
    model.blocks[1].gain = 1e6
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator, verdict.phase) == ("overflow", "blocks.1", "mul", "forward")
    assert verdict.where.startswith("test_blame.py:")
    assert verdict.where.endswith(" in forward")
    assert verdict.cure == (Rule("blocks.1", FULL),)
    assert verdict.call.operator == "mul"
    assert verdict.call.output_formats == ("float16",)
    session.close()


def test_a_scale_that_is_too_high_gets_a_lower_one():
    _, _, session, closure = tower(loss_scale=2.0**24)
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.phase) == ("scale too high", "backward")
    (edit,) = verdict.cure
    assert isinstance(edit, Scaling)
    assert edit.init < 2.0**24
    session.close()


@mixed_plans
def test_a_healthy_step_gets_no_verdict(name, low):
    _, _, session, closure = tower(name, low)
    assert halfstep.blame(session, closure) is None
    session.close()


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
    session.close()


@pytest.mark.parametrize(
    ("closure", "words"),
    [
        (lambda model, x: 1.0, "returned float, not the loss"),
        (lambda model, x: model(x), "shape"),
        (lambda model, x: model(x).mean().detach(), "needs no gradient"),
        (lambda model, x: model(x).mean().backward(), "NoneType"),
    ],
)
def test_a_closure_that_computes_no_loss_is_refused(closure, words):
    model, _, session, _ = tower()
    with pytest.raises(SessionError, match=words):
        halfstep.blame(session, lambda: closure(model, torch.randn(4, 8)))
    session.close()


def test_what_is_no_function_is_refused():
    _, _, session, closure = tower()
    with pytest.raises(SessionError, match="takes a function"):
        halfstep.blame(session, closure())
    session.close()


def test_a_closure_that_does_not_repeat_says_so_and_tries_nothing():
    model, _, session, _ = tower()
    batches = iter([torch.full((4, 8), torch.nan), *[torch.randn(4, 8)] * 9])
    verdict = halfstep.blame(session, lambda: model(next(batches)).square().mean())
    assert verdict.kind == "input data"
    assert "does not repeat" in verdict.evidence
    session.close()


def test_a_failure_that_the_closure_does_not_reproduce_gets_no_verdict_but_a_notice(caplog):
    model, optimizer, session, closure = tower("O2", "bf16")
    session.backward(model(torch.full((4, 8), torch.inf)).square().mean())
    session.step()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert halfstep.blame(session, closure) is None
    assert "the gradients of blocks.0.fc.weight, " in caplog.text
    assert "does not reproduce" in caplog.text
    optimizer.zero_grad()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert halfstep.blame(session, closure) is None
    assert "the last step was skipped, but the closure does not reproduce it" in caplog.text
    session.backward(closure())
    session.step()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert halfstep.blame(session, closure) is None
    assert caplog.text == ""
    session.close()


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_gradients_that_nobody_zeroed_are_told_from_a_failure_that_did_not_repeat(plan):
    model, optimizer, session, closure = tower(plan, "bf16")
    session.backward(model(torch.full((4, 8), torch.inf)).square().mean())
    session.step()
    session.backward(closure())
    session.step()
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.operator, verdict.cure) == ("stale gradients", "zero_grad", ())
    assert "optimizer.zero_grad()" in verdict.advice
    optimizer.zero_grad()
    session.backward(closure())
    assert not bool(session.step().skipped)
    session.close()


@pytest.mark.parametrize("style", ["fill", "where", "add"])
@pytest.mark.parametrize("mask", [-torch.inf, -1e9])
@pytest.mark.parametrize(("plan", "low"), [("O1", "fp16"), ("O2", "fp16"), ("O3", "bf16")])
def test_a_mask_that_leaves_each_row_an_entry_is_harmless(plan, low, mask, style):
    if style == "add" and mask == -torch.inf:
        pytest.skip("zero times -inf is NaN: that is no mask")
    if style == "fill" and mask == -1e9 and low == "fp16":
        mask = torch.finfo(torch.float16).min  # torch refuses to fill with what the format does not hold
    model = Transformer(nn.Identity(), Attention(mask=mask, style=style))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan, low=low)
    inputs, labels = words(), targets()
    assert halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels)) is None
    session.close()


def test_a_harmless_mask_does_not_hide_a_fault():
    model = Transformer(Gain(), Attention())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = words(), targets()
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.module, verdict.operator) == ("blocks.1.plant", "mul")
    session.close()


def test_what_overflows_without_reaching_the_loss_is_no_fault():
    model = Stacked(nn.Identity(), nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = rows(), targets()

    def closure():
        with session.autocast():
            unused = torch.exp(model.stem(inputs) * 1e3)
        assert not torch.isfinite(unused).all()
        return nn.functional.cross_entropy(model(inputs), labels)

    assert halfstep.blame(session, closure) is None
    session.close()


def test_a_target_that_is_not_finite_is_input_data():
    model = Stacked(nn.Identity(), nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16")
    inputs, wrong = rows(), torch.full((8, 4), torch.nan)
    verdict = halfstep.blame(session, lambda: nn.functional.mse_loss(model(inputs), wrong))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("input data", "mse_loss", ())
    assert "outside of the model's forward" in verdict.evidence
    session.close()


def test_one_of_two_models_is_named_as_in_its_rule_and_numbered():
    models = [Cnn(nn.Identity()), Stacked(Gain(), nn.Identity())]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = halfstep.initialize(models, optimizers, "O2", low="fp16")
    pictures, inputs, labels = images(), rows(), targets()
    verdict = halfstep.blame(
        session, lambda: nn.functional.cross_entropy(models[0](pictures) + models[1](inputs), labels)
    )
    assert verdict.module == verdict.call.module == "blocks.0"
    assert "in model 1, the first being 0" in verdict.evidence
    assert verdict.cure == (Rule("blocks.0", FULL),)
    session.close()


def test_sparse_gradients_are_looked_at():
    table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
    model = nn.Sequential(table, head)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    indices = torch.tensor([1, 2, 3])
    assert halfstep.blame(session, lambda: model(indices).square().mean()) is None
    with torch.no_grad():
        table.weight[2, 0] = torch.nan
    verdict = halfstep.blame(session, lambda: model(indices).square().mean())
    assert (verdict.kind, verdict.module, verdict.operator) == ("weights", "0", "embedding")
    session.close()


def test_a_gradient_penalty_at_too_high_a_scale_is_told_by_running_it_lower():
    model = Stacked(nn.Identity(), nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="fp16", loss_scale=2.0**20)
    inputs = rows().requires_grad_()

    def closure():
        (gradient,) = session.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    model.stem(inputs).sum().backward()
    held = inputs.grad.clone()
    verdict = halfstep.blame(session, closure)
    assert verdict.kind == "scale too high"
    assert torch.equal(inputs.grad, held)
    assert halfstep.blame(session, lambda: nn.functional.mse_loss(model(inputs), torch.zeros(8, 4)) * 1e-6) is None
    session.close()


def test_a_normal_skip_is_called_normal():
    model = Cnn(nn.Identity())
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, "O2", low="fp16", loss_scale=Scaling("dynamic", init=2.0**24))
    inputs, labels = images(), targets()
    session.backward(nn.functional.cross_entropy(model(inputs), labels))
    assert bool(session.step().skipped)
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert verdict.kind == "scale too high"
    assert "normal while a dynamic scale comes down" in verdict.advice
    session.close()


def test_a_closure_may_not_run_the_backward_pass_or_a_step():
    model, optimizer, session, closure = tower()
    before = snapshot(model, optimizer, session)
    with pytest.raises(SessionError, match="computes and returns the loss"):
        halfstep.blame(session, lambda: (session.backward(closure()), closure())[1])
    with pytest.raises(SessionError, match="computes and returns the loss"):
        halfstep.blame(session, lambda: (session.step(), closure())[1])
    with pytest.raises(SessionError, match="ran the backward pass"):
        halfstep.blame(session, lambda: (closure().backward(), closure())[1])
    assert differing(before, snapshot(model, optimizer, session)) == []
    session.backward(closure())
    session.step()
    session.close()


def test_an_error_of_the_closure_leaves_everything_as_it_was():
    model, optimizer, session, _ = tower()
    before = snapshot(model, optimizer, session)

    def closure():
        model(torch.randn(4, 8))
        raise KeyError("mine")

    with pytest.raises(KeyError):
        halfstep.blame(session, closure)
    assert differing(before, snapshot(model, optimizer, session)) == []
    session.close()


def test_a_model_that_cannot_be_copied_gets_a_verdict_whose_cure_was_not_tried():
    model = Cnn(Gain())
    model.extra = threading.Lock()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = images(), targets()
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert verdict.cure == (Rule("plant", FULL_OUT),)
    assert "not tried: the model cannot be copied" in verdict.advice
    session.close()


def test_without_low_numbers_nothing_is_to_be_edited():
    model = Cnn(nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O0")
    inputs, labels = images(), targets()
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs) / 0.0, labels))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "div", ())
    session.close()


def test_what_is_computed_in_low_by_the_code_itself_is_out_of_reach():
    model = Cnn(nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="fp16")
    inputs, labels = images(), targets()
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs).half() * 1e7, labels))
    assert (verdict.kind, verdict.cure) == ("overflow", ())
    assert "the code itself casts" in verdict.advice
    session.close()


def test_hooks_of_an_optimizer_in_the_backward_pass_do_not_run():
    model = Cnn(nn.Identity())
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    calls = []
    model.head.weight.register_post_accumulate_grad_hook(calls.append)
    inputs, labels = images(), targets()
    assert halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels)) is None
    assert calls == []
    nn.functional.cross_entropy(model(inputs), labels).backward()
    assert len(calls) == 1
    session.close()


def test_a_target_that_a_mask_excludes_is_no_empty_row():
    model = Stacked(nn.Identity(), nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16")
    inputs, labels = rows(), torch.zeros(8, dtype=torch.int64)
    excluded = torch.tensor([True, False, False, False])
    verdict = halfstep.blame(
        session, lambda: nn.functional.cross_entropy(model(inputs).masked_fill(excluded, -torch.inf), labels)
    )
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "cross_entropy", ())
    assert "a target that is masked has an infinite loss" in verdict.advice
    session.close()


def test_an_infinity_that_is_written_and_left_out_again_is_harmless():
    model = Stacked(nn.Identity(), nn.Identity())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16")
    inputs = rows()

    def closure():
        out = model(inputs)
        return torch.minimum(torch.full_like(out, torch.inf), out).square().mean()

    assert halfstep.blame(session, closure) is None
    session.close()


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 50])
def test_a_cure_that_ran_on_other_batches_is_not_claimed(bad, after):
    model, good, target = Centred(), torch.randn(8, 8), torch.randn(8, 4)
    failing = good.clone()
    failing[0] = 0
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    batches = iter([failing] * bad + [good] * after)
    verdict = halfstep.blame(session, lambda: nn.functional.mse_loss(model(next(batches)), target))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "div", ())
    assert "does not repeat" in verdict.evidence
    assert "tried:" not in verdict.advice
    session.close()


def test_a_closure_whose_batches_come_in_turn_does_not_repeat():
    model, good, target = Centred(), torch.randn(8, 8), torch.randn(8, 4)
    failing = good.clone()
    failing[0] = 0
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")
    batches = itertools.cycle([failing, failing, good, good])  # the run after the trials meets a failing one again
    verdict = halfstep.blame(session, lambda: nn.functional.mse_loss(model(next(batches)), target))
    assert verdict.cure == ()
    assert "does not repeat" in verdict.evidence
    session.close()


def test_a_model_that_fails_a_few_times_only_gets_no_tried_cure():
    model, inputs, calls = Cnn(nn.Identity()), images(), []
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")

    def closure():
        calls.append(1)
        return model(inputs).square().mean() / (0.0 if len(calls) <= 2 else 1.0)

    verdict = halfstep.blame(session, closure)
    assert verdict.cure == ()
    assert "does not repeat" in verdict.evidence
    session.close()


@pytest.mark.parametrize(("plan", "low"), [("O2", "bf16"), ("O1", "fp16")])
def test_a_hook_on_the_gradient_of_a_parameter_acts_in_trials_too(plan, low):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # no unit is ever on: the gradient is zero
    model[0].weight.register_hook(lambda grad: grad / grad.norm())
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan, low=low)
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "div", ())
    assert "in fp32 the same closure fails too" in verdict.evidence
    assert len(model[0].weight._backward_hooks) == 1
    session.close()


def test_blame_inside_its_own_closure_is_refused():
    _, _, session, closure = tower()
    with pytest.raises(SessionError, match="inside a closure that blame or check runs"):
        halfstep.blame(session, lambda: halfstep.blame(session, closure))
    assert halfstep.blame(session, closure) is None
    session.close()


def first_row(like):
    return (torch.arange(len(like)) == 0)[:, None].expand(like.shape)


class Shifted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.shift = shift
        self.bias = nn.Parameter(torch.full((8,), -300.0))

    def forward(self, x):
        return self.head(torch.softmax(self.shift(self.bias, self.fc(x)), -1))


@pytest.mark.parametrize(
    ("shift", "kind", "operator", "has_mask"),
    [
        (lambda bias, z: bias * 300 + z, "overflow", "mul", False),
        (lambda bias, z: (bias * 0 + 1) * -9e4 + z, "masked row", "softmax", True),
        (lambda bias, z: z + torch.full_like(z, -300.0) * 300, "masked row", "softmax", True),
        (lambda bias, z: torch.where(first_row(z), -9e4, z.float()).to(z.dtype), "masked row", "softmax", True),
    ],
)
def test_a_mask_is_written_not_computed_from_what_is_learned(shift, kind, operator, has_mask):
    model = Shifted(shift)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O3", low="fp16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.operator) == (kind, operator)
    assert ("mask" in verdict.evidence + verdict.advice) == has_mask
    session.close()


def test_uniform_gradients_below_zero_are_no_mask():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = halfstep.level("O2", "fp16").edit(Scaling("static", init=2.0**30))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan)
    inputs = torch.randn(8, 8)
    verdict = halfstep.blame(session, lambda: -model(inputs).mean())
    assert (verdict.kind, verdict.phase) == ("scale too high", "backward")
    assert "mask" not in verdict.evidence
    session.close()


class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) * 3e5 / 3e5


class Emptied(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        z = self.fc(x)
        return torch.softmax(z.masked_fill(first_row(z), -torch.inf), -1)


def test_of_two_faults_the_one_that_is_in_fp32_too_is_named():
    model = nn.Sequential(nn.Linear(8, 8), Loud(), Emptied(), nn.Linear(8, 4))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.module, verdict.operator, verdict.cure) == ("overflow", "1", "mul", ())
    assert "cast" not in verdict.advice
    assert "two faults" in verdict.advice
    assert "masked row of softmax in 2" in verdict.advice
    session.close()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, zero):
        ctx.zero = zero
        return z / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.zero, None


@pytest.mark.parametrize("zero", [0, 0.0])
@pytest.mark.parametrize(
    ("step", "phase"), [(lambda z, zero: z / zero, "forward"), (Halved.apply, "backward")], ids=["forward", "backward"]
)
def test_a_division_by_a_zero_of_any_kind_is_invalid(zero, step, phase):
    model = nn.Linear(8, 4)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(step(model(inputs), zero), labels))
    assert (verdict.kind, verdict.operator, verdict.phase) == ("invalid", "div", phase)
    assert "scale its inputs down" not in verdict.advice
    session.close()


@pytest.mark.parametrize(
    ("scaling", "cure"),
    [
        (Scaling("dynamic", init=64.0), Scaling("dynamic", init=2.0**-3, min=2.0**-3)),
        (Scaling("static", init=64.0), Scaling("static", init=2.0**-5)),
        (Scaling("static", init=1.0), Scaling("static", init=2.0**-5)),
        (Scaling("none"), Scaling("static", init=2.0**-5)),
    ],
)
def test_a_loss_scale_below_1_is_offered_where_it_passes(scaling, cure):
    model = nn.Linear(8, 4, bias=False)
    plan = halfstep.level("O2", "fp16").edit(scaling)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan)
    inputs = torch.full((1, 8), 1e-3)
    # the gradient of the loss: 65504 / 3e5 is above 1 / 8 only
    verdict = halfstep.blame(session, lambda: model(inputs).float().sum() * 3e5)
    assert (verdict.kind, verdict.cure) == ("scale too high", (cure,))
    assert "at 0.125 all gradients are finite" in verdict.evidence
    session.close()
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, plan.edit(cure))
    session.backward(model(inputs).float().sum() * 3e5)
    assert not session.step().skipped
    session.close()


def test_what_the_closure_does_not_reproduce_is_told_to_the_sinks(tmp_path):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.RunLog(tmp_path / "run.jsonl") as log:
        session = halfstep.initialize(model, optimizer, "O2", low="bf16", sinks=[log])
        session.backward(model(torch.full((4, 8), torch.inf)).square().mean())
        session.step()
        assert halfstep.blame(session, lambda: model(torch.ones(4, 8)).square().mean()) is None
        session.close()
    (event,) = halfstep.read_log(tmp_path / "run.jsonl").events
    assert event.record.code == "not reproduced"
    assert (
        "the gradients of weight, bias are not finite, but the closure does not reproduce it" in event.record.evidence
    )


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
        session.backward(nn.functional.cross_entropy(model(tokens), tokens))
        assert not session.step().skipped


def test_an_operation_of_the_loss_is_cured_by_an_edit_that_autocast_takes_up():
    model, inputs = nn.Linear(8, 4), torch.randn(8, 8)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")

    def closure():
        with session.autocast():
            return (model(inputs) @ torch.eye(4) * 300).pow(2).mean()

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "", "pow")
    assert verdict.cure[0] == halfstep.OpChange("deny", "pow")
    session.close()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), session.plan.edit(*verdict.cure))
    session.backward(closure())
    assert not session.step().skipped
    session.close()


def test_weights_that_the_loss_takes_as_they_are_stored_are_out_of_reach():
    model, inputs = nn.Linear(8, 4), torch.randn(8, 8)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    verdict = halfstep.blame(session, lambda: (model.weight * 1e6).square().mean() + model(inputs).mean())
    assert (verdict.kind, verdict.operator, verdict.cure) == ("overflow", "mul", ())
    assert "or uses weights as they are stored" in verdict.advice
    assert "with the models in fp32 the same closure fails too, in an operation that is fp16" in verdict.evidence
    session.close()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16", loss_scale=16.0)
    assert halfstep.blame(session, lambda: (model.weight.float() * 10).square().mean() + model(inputs).mean()) is None
    session.close()


class HandNorm(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x):
        x = x * self.gain
        return self.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


@pytest.mark.parametrize(("gain", "codes"), [(1e3, ["overflow absorbed"]), (10.0, [])])
def test_an_overflow_that_ends_in_zeros_is_noted(gain, codes, caplog):
    model, inputs = HandNorm(gain), torch.randn(8, 8, dtype=torch.float16)
    findings = []

    class Sink:
        def __call__(self, record):
            pass

        def record(self, record):
            findings.append(record)

    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3", low="fp16", sinks=[Sink()])
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert halfstep.blame(session, lambda: model(inputs).square().mean()) is None
    session.close()
    found = [finding for finding in findings if isinstance(finding, halfstep.records.Finding)]
    assert [finding.code for finding in found] == codes
    assert all(finding.severity == "warning" and "pow gives" in finding.evidence for finding in found)
    assert all(finding.cure == (halfstep.OpChange("deny", "pow"),) for finding in found)
    assert (caplog.text == "") is (not codes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of what torch.func.jvp imports
@pytest.mark.parametrize(
    "run",
    [
        lambda model, x, loss: loss(torch.vmap(model)(x)),
        lambda model, x, loss: torch.func.jvp(lambda y: loss(model(y)), (x,), (torch.ones_like(x),))[1],
        lambda model, x, loss: loss(torch.func.functional_call(model, dict(model.named_parameters()), (x,))),
    ],
    ids=["vmap", "jvp", "functional_call"],
)
def test_a_model_under_transforms_of_torch_func_gets_its_verdict(run):
    model, inputs, labels = Stacked(Gain(), nn.Identity()), rows(), targets()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    verdict = halfstep.blame(session, lambda: run(model, inputs, lambda out: nn.functional.cross_entropy(out, labels)))
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "blocks.0", "mul")
    assert verdict.cure == (Rule("blocks.0", FULL),)
    session.close()


class OwnSoftmax(nn.Module):
    """Attention's softmax by hand, behind a mask; `steep` makes its exponentials large."""

    def __init__(self, steep, mask=-torch.inf, add=False):
        super().__init__()
        self.fc, self.steep, self.mask, self.add = nn.Linear(8, 8), steep, mask, add

    def forward(self, x):
        scores, hidden = self.fc(x) * self.steep, torch.arange(8) > 5
        scores = scores + hidden.to(scores.dtype) * self.mask if self.add else scores.masked_fill(hidden, self.mask)
        shares = torch.exp(scores)
        return shares / shares.sum(-1, keepdim=True)


@pytest.mark.parametrize(("mask", "add"), [(-torch.inf, False), (-1e9, True)])
def test_an_overflow_behind_a_mask_is_told_from_what_the_mask_does(mask, add):
    model = nn.Sequential(nn.Linear(8, 8), OwnSoftmax(30.0, mask, add), nn.Linear(8, 4))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "1", "exp")
    assert verdict.cure == (halfstep.OpChange("deny", "exp"),)
    assert "fp16 ends at 65,504" in verdict.evidence
    assert "mask" not in verdict.advice
    session.close()


def test_an_overflow_behind_a_mask_that_no_format_holds_is_no_invalid_operation():
    model = nn.Sequential(nn.Linear(8, 8), OwnSoftmax(1e3), nn.Linear(8, 4))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("overflow", "exp", ())
    assert "too large for fp32 too" in verdict.advice
    session.close()


class Composited(nn.Module):
    """The logarithm of a product of numbers that are an eps: 0 in fp16, and as a product in fp32 too."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.log(torch.cumprod(self.fc(x) * 0 + 1e-10, -1))


def test_an_eps_that_cures_no_more_in_fp32_is_not_what_is_advised():
    model = nn.Sequential(Composited(), nn.Linear(8, 4))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "log", ())
    assert "as 1e-10 is 0 in fp16" in verdict.evidence
    assert "give 1e-6 or more" not in verdict.advice
    session.close()


class Inner(nn.Module):
    """A checkpoint of a function inside of a forward, whose gradients are large on their way."""

    def __init__(self, reentrant):
        super().__init__()
        self.fc, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x):
        def inner(x):
            return torch.tanh(self.fc(x) / 3e3) * 3e3

        return checkpoint(inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_that_a_checkpoint_runs_again_is_its_modules(reentrant):
    model = nn.Sequential(nn.Linear(8, 8), Inner(reentrant), nn.Linear(8, 4))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16", loss_scale=4096.0)
    inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.module, verdict.operator, verdict.kind) == ("1", "mul", "scale too high")
    assert verdict.where.endswith(" in inner")
    session.close()


def test_an_fp16_loss_is_scaled_as_in_training():
    model, inputs = nn.Linear(8, 4), torch.randn(8, 8)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")

    def closure():
        out = model(inputs)
        return out.square().mean().half()

    assert halfstep.blame(session, closure) is None  # at 32768, where session.backward begins with such a loss
    session.close()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16", loss_scale=2.0**17)
    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.operator) == ("scale too high", "to")
    assert verdict.where.endswith(" in closure")
    session.close()


def test_a_closure_whose_batches_are_taken_from_a_list_does_not_repeat():
    model, batches = Cnn(Gain()), [images()]
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    labels = targets()
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(batches.pop()), labels))
    assert (verdict.module, verdict.operator) == ("plant", "mul")
    assert "does not repeat" in verdict.evidence
    session.close()


def test_a_gradient_penalty_on_a_batch_that_is_gone_gets_a_verdict_all_the_same():
    model, batches = Stacked(nn.Identity(), nn.Identity()), [rows()]
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="fp16", loss_scale=2.0**20)

    def closure():
        inputs = batches.pop().requires_grad_()
        (gradient,) = session.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    assert "does not repeat" in halfstep.blame(session, closure).evidence
    session.close()


def test_code_that_asks_for_low_numbers_leaves_the_cure_untried():
    class Picky(Gain):
        def forward(self, x):
            assert x.dtype is torch.float16
            return super().forward(x)

    model, inputs, labels = Cnn(Picky()), images(), targets()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.module, verdict.operator) == ("plant", "mul")
    assert "not tried" in verdict.advice
    session.close()


def test_anomaly_mode_does_not_hide_what_is_looked_for():
    model, inputs, labels = Stacked(SqrtOfZero(), nn.Identity()), rows(), targets()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16")
    with torch.autograd.set_detect_anomaly(True):
        verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
        assert torch.is_anomaly_enabled()
    assert (verdict.kind, verdict.operator, verdict.phase) == ("invalid", "sqrt", "backward")
    session.close()


def test_a_closure_that_raises_for_its_numbers_gets_a_verdict():
    model, inputs, labels = Cnn(Gain()), images(), targets()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    categorical = torch.distributions.Categorical
    verdict = halfstep.blame(
        session,
        lambda: -categorical(logits=model(inputs), validate_args=True).log_prob(labels).mean(),  # dynamo turns it off
    )
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "plant", "mul")
    assert verdict.cure == (Rule("plant", FULL),)
    assert "the closure then raised ValueError" in verdict.evidence
    session.close()


class Bounded(nn.Module):
    def forward(self, x):
        return x + (x * 1e7).clamp(-1, 1)


def test_a_closure_that_raises_for_another_reason_raises_as_ever():
    model, inputs = Cnn(Bounded()), images()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")

    def closure():
        raise ValueError(f"mine, of {model(inputs)[0, 0]}")

    with pytest.raises(ValueError, match="mine"):
        halfstep.blame(session, closure)
    session.close()


class Remembering(nn.Module):
    """Keeps a mean of its outputs, and its last loss, in attributes that are no buffers."""

    def __init__(self, written):
        super().__init__()
        self.fc, self.written = nn.Linear(8, 8), written
        self.mean = torch.zeros(8)

    def forward(self, x):
        y = self.fc(x) * 1e6
        if self.written:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        else:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.loss = y.square().mean() / 1e12
        return (y - self.mean) / 1e6


@pytest.mark.parametrize("written", [True, False])
def test_a_state_that_a_model_keeps_in_an_attribute_is_as_before_in_each_run(written):
    model, inputs = nn.Sequential(Remembering(written), nn.Linear(8, 4)), torch.randn(8, 8)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")
    mean = model[0].mean
    verdict = halfstep.blame(session, lambda: model(inputs).square().mean() + model[0].loss)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "0", "mul")
    assert "tried: the closure's loss" in verdict.advice
    assert model[0].mean is mean
    assert torch.equal(mean, torch.zeros(8))
    assert not hasattr(model[0], "loss")
    session.close()


class Collecting(nn.Module):
    """Overflows in fp16, and leaves what it saw in lists and dicts, as routers leave their losses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.losses, self.counts, self.seen = [], {"calls": 0}, (set(), collections.deque(maxlen=3))

    def forward(self, x):
        out = self.linear(x) * 1e6
        self.losses.append(out.float().mean())
        self.counts["calls"] += 1
        self.seen[0].add(self.counts["calls"])
        self.seen[1].append(x)
        return out / 1e6


def test_what_a_model_collects_is_as_before_in_each_run():
    model, inputs = nn.Sequential(Collecting(), nn.Linear(8, 4)), torch.randn(8, 8)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="fp16")
    part = model[0]
    losses, kept = part.losses, torch.zeros(())
    losses.append(kept)

    def closure():
        loss = model(inputs).square().mean()
        assert len(part.losses) == 2  # also where a copy stands in for it
        return loss + part.losses[-1] / 1e6

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "0", "mul")
    assert "tried: the closure's loss" in verdict.advice
    assert part.losses is losses
    assert len(losses) == 1
    assert losses[0] is kept
    assert (part.counts, part.seen) == ({"calls": 0}, (set(), collections.deque()))
    session.close()


def test_a_state_outside_of_the_model_that_the_failure_spoils_does_not_repeat():
    model, inputs, held = Cnn(Gain()), images(), {"mean": torch.zeros(8, 4)}
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16")

    def closure():
        out = model(inputs)
        held["mean"] = 0.9 * held["mean"] + 0.1 * out.detach()
        return nn.functional.mse_loss(out, held["mean"])

    verdict = halfstep.blame(session, closure)
    assert (verdict.kind, verdict.module) == ("overflow", "plant")
    assert "does not repeat" in verdict.evidence
    assert "two faults" not in verdict.advice
    session.close()


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


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_the_models_own_code_is_cured_and_its_parts_stay_low(plan):
    model, inputs, labels = Mixture(), torch.randn(8, 8), torch.randint(8, (8,))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan, low="fp16", loss_scale=64.0)
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "", "mul")
    assert {rule.pattern: rule.policy.compute for rule in verdict.cure if isinstance(rule, Rule)} == {
        "": "full", "router": "low", "experts": "low",
    }  # fmt: skip
    session.close()
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), session.plan.edit(*verdict.cure))
    for _ in range(4):
        session.backward(nn.functional.cross_entropy(model(inputs), labels))
        assert not session.step().skipped
    session.close()


@pytest.mark.parametrize("diverged", [True, False])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_training_that_diverges_in_every_format_is_no_fault_of_the_format(plan, diverged):
    model, inputs, wanted = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(8, 8), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, plan, low="fp16", loss_scale=1.0)
    session.backward(nn.functional.mse_loss(model(inputs), wanted))
    session.step()
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
    session.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("low", "layout"), [("bf16", torch.strided), ("bf16", torch.jagged), ("fp16", torch.jagged)], ids=str
)
def test_nested_tensors_are_looked_into(low, layout):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=layout)
            return torch.cat(list((self.fc(nested) / 0.0).unbind()))

    model, inputs, labels = nn.Sequential(Nested(), nn.Linear(8, 4)), torch.randn(8, 8), torch.randint(4, (8,))
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low=low)
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(inputs), labels))
    assert (verdict.kind, verdict.module, verdict.operator) == ("invalid", "0", "div")
    session.close()


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
    session.close()


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
    skipped = []
    for number in range(40):
        optimizer.zero_grad()
        session.backward(loss(number))
        skipped.append(bool(session.step().skipped))
    assert sum(skipped) == 0
    session.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_masks_that_are_added_are_named_and_not_to_be_scaled_down(dtype):
    model = nn.Linear(8, 8)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16")
    one, two = torch.zeros(4, 8, dtype=dtype), torch.zeros(4, 8, dtype=dtype)
    one[1], two[1] = torch.finfo(dtype).min, torch.finfo(dtype).min
    verdict = halfstep.blame(session, lambda: (model(torch.ones(4, 8)) + (one + two)).float().softmax(-1)[:, 0].mean())
    assert (verdict.operator, verdict.phase) == ("add", "forward")
    assert "join masks as booleans" in verdict.advice
    session.close()


def test_zero_by_zero_reads_as_that():
    model = nn.Linear(8, 4)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16")
    nothing = torch.zeros(4, 4)
    verdict = halfstep.blame(session, lambda: (nothing / nothing + model(torch.ones(4, 8))).mean())
    assert verdict.evidence.startswith("div gave 16 NaN of 16 elements from 0/0")
    session.close()


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
