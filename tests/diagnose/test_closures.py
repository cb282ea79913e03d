"""Closures that do not repeat, keep states, raise, or do what a closure must not."""

import collections
import itertools
import threading
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, OpChange, Rule, SessionError
from halfstep.explain.diagnose.cures import FULL_OUT
from tests.contracts.cases import backward_and_step, differing, snapshot
from tests.diagnose.closures import LABELS, cross_entropy, opened, tower, verdict_on
from tests.diagnose.faults.hosts import Cnn, Stacked, rows
from tests.diagnose.faults.plants import Gain


def parameters_alone(model, x):
    return 1.0


def no_scalar(model, x):
    return model(x)


def no_gradient(model, x):
    return model(x).mean().detach()


def backward(model, x):
    return model(x).mean().backward()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (parameters_alone, "returned float, not the loss"),
        (no_scalar, "shape"),
        (no_gradient, "requires no gradient"),
        (backward, "NoneType"),
    ],
)
def test_a_closure_that_computes_no_loss_is_refused(loss, words):
    with pytest.raises(SessionError, match=words):
        verdict_on(nn.Linear(8, 4), loss=loss)


@pytest.mark.parametrize("ask", [halfstep.blame, halfstep.check, halfstep.inspect])
def test_what_is_no_function_without_arguments_is_refused(ask):
    _, _, session, closure = tower()
    with pytest.raises(SessionError, match=r"takes a function .* not Tensor; pass a function without arguments"):
        ask(session, closure())
    words = rf"{ask.__name__}\(\) calls the closure without arguments, but it is missing .*'batch'; pass a function"
    with pytest.raises(SessionError, match=words):
        ask(session, lambda batch: batch.sum())


def test_a_function_whose_arguments_have_defaults_is_a_closure():
    _, _, session, closure = tower()
    assert halfstep.blame(session, lambda loss=closure: loss()) is None


def test_a_closure_that_does_not_repeat_says_so_and_tries_nothing():
    model, _, session, _ = tower()
    batches = iter([torch.full((4, 8), torch.nan), *[torch.randn(4, 8)] * 9])
    verdict = halfstep.blame(session, lambda: model(next(batches)).square().mean())
    assert verdict.kind == "input data"
    assert "does not repeat" in verdict.evidence


def test_a_failure_that_the_closure_does_not_reproduce_gets_no_verdict_but_a_notice(caplog):
    model, optimizer, session, closure = tower("O2", "bf16")
    backward_and_step(session, model(torch.full((4, 8), torch.inf)).square().mean())
    assert halfstep.blame(session, closure) is None
    assert "the gradients of blocks.0.fc.weight, " in caplog.text
    assert "does not reproduce" in caplog.text
    optimizer.zero_grad()
    caplog.clear()
    assert halfstep.blame(session, closure) is None
    assert "the last step was skipped, but the closure does not reproduce this" in caplog.text
    backward_and_step(session, closure())
    caplog.clear()
    assert halfstep.blame(session, closure) is None
    assert caplog.text == ""


def test_a_closure_may_not_run_the_backward_pass_or_a_step():
    model, optimizer, session, closure = tower()
    before = snapshot(model, optimizer, session)
    with pytest.raises(SessionError, match="must only compute and return the loss"):
        halfstep.blame(session, lambda: (session.backward(closure()), closure())[1])
    with pytest.raises(SessionError, match="must only compute and return the loss"):
        halfstep.blame(session, lambda: (session.step(), closure())[1])
    with pytest.raises(SessionError, match="ran the backward pass"):
        halfstep.blame(session, lambda: (closure().backward(), closure())[1])
    assert differing(before, snapshot(model, optimizer, session)) == []
    backward_and_step(session, closure())


def test_an_error_of_the_closure_leaves_everything_as_it_was():
    model, optimizer, session, _ = tower()
    before = snapshot(model, optimizer, session)

    def closure():
        model(torch.randn(4, 8))
        raise KeyError("mine")

    with pytest.raises(KeyError):
        halfstep.blame(session, closure)
    assert differing(before, snapshot(model, optimizer, session)) == []


def test_a_model_that_cannot_be_copied_gets_a_verdict_whose_cure_was_not_tried():
    model = Cnn(Gain())
    model.extra = threading.Lock()
    verdict = verdict_on(model)
    assert verdict.cure == (Rule("plant", FULL_OUT),)
    assert "not tried: a copy of the model cannot be made or run" in verdict.advice


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(x / x.norm(dim=-1, keepdim=True))


GOOD, ZEROS = torch.eye(8), torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("low", "batches"),
    [
        *(("fp16", [ZEROS] * bad + [GOOD] * after) for bad in (1, 2, 3) for after in (0, 50)),
        ("bf16", itertools.cycle([ZEROS, ZEROS, GOOD, GOOD])),  # the run after the trials meets a failing one again
    ],
)
def test_a_cure_that_ran_on_other_batches_is_not_claimed(low, batches):
    turns = iter(batches)
    verdict = verdict_on(Centred(), low=low, loss=lambda model, _: model(next(turns)).square().mean())
    assert (verdict.kind, verdict.operator, verdict.cure) == ("invalid", "div", ())
    assert "does not repeat" in verdict.evidence
    assert "tried:" not in verdict.advice


def penalty(session, model, inputs):
    (gradient,) = session.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().mean()


def test_a_gradient_penalty_at_too_high_a_scale_is_told_by_running_it_lower():
    model, inputs = Stacked(nn.Identity(), nn.Identity()), rows().requires_grad_()
    session = opened(model, "O1", loss_scale=2.0**20)
    model.stem(inputs).sum().backward()
    held = inputs.grad.clone()
    verdict = halfstep.blame(session, lambda: penalty(session, model, inputs))
    assert verdict.kind == "scale too high"
    assert torch.equal(inputs.grad, held)
    assert halfstep.blame(session, lambda: model(inputs).square().mean() * 1e-6) is None


def test_a_gradient_penalty_on_a_batch_that_is_gone_gets_a_verdict_all_the_same():
    model, batches = Stacked(nn.Identity(), nn.Identity()), [rows()]
    session = opened(model, "O1", loss_scale=2.0**20)
    verdict = halfstep.blame(session, lambda: penalty(session, model, batches.pop().requires_grad_()))
    assert "does not repeat" in verdict.evidence


def test_what_the_closure_does_not_reproduce_is_told_to_the_sinks(tmp_path):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.RunLog(tmp_path / "run.jsonl") as log:
        session = halfstep.initialize(model, optimizer, "O2", low="bf16", sinks=[log])
        backward_and_step(session, model(torch.full((4, 8), torch.inf)).square().mean())
        assert halfstep.blame(session, lambda: model(torch.ones(4, 8)).square().mean()) is None
        session.close()
    (event,) = halfstep.read_log(tmp_path / "run.jsonl").events
    assert event.record.code == "not reproduced"
    assert (
        "the gradients of weight, bias are not finite, but the closure does not reproduce this" in event.record.evidence
    )


class Picky(Gain):
    def forward(self, x):
        assert x.dtype is torch.float16
        return super().forward(x)


def test_code_that_asks_for_low_numbers_leaves_the_cure_untried():
    verdict = verdict_on(Cnn(Picky()))
    assert (verdict.module, verdict.operator) == ("plant", "mul")
    assert "not tried" in verdict.advice


def test_a_closure_that_raises_for_its_numbers_gets_a_verdict():
    def loss(model, inputs):  # dynamo turns the validation off
        return -torch.distributions.Categorical(logits=model(inputs), validate_args=True).log_prob(LABELS).mean()

    verdict = verdict_on(Cnn(Gain()), loss=loss)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "plant", "mul")
    assert verdict.cure == (Rule("plant", FULL),)
    assert "the closure then raised ValueError" in verdict.evidence


class Bounded(nn.Module):
    def forward(self, x):
        return x + (x * 1e7).clamp(-1, 1)


def test_a_closure_that_raises_for_another_reason_raises_as_ever():
    def loss(model, inputs):
        raise ValueError(f"mine, of {model(inputs)[0, 0]}")

    with pytest.raises(ValueError, match="mine"):
        verdict_on(Cnn(Bounded()), loss=loss)


def test_an_error_that_does_not_come_again_is_raised():
    calls = itertools.count()

    def loss(model, inputs):
        if next(calls) == 0:
            raise ValueError(f"once, of {model(inputs)[0, 0]}")
        return cross_entropy(model, inputs)

    with pytest.raises(ValueError, match="once"):
        verdict_on(Cnn(nn.Identity()), loss=loss)


class Factored(nn.Module):
    """Factors a product of low rank, which its rounding makes indefinite."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(16, 8)

    def forward(self, x):
        z = self.f(x)
        factor = torch.linalg.cholesky((z @ z.T).float() + 1e-4 * torch.eye(16))
        return factor.diagonal().log().sum() * -1e-3


class Policy(nn.Module):
    """Its scales are 0 in fp16 alone, which torch.distributions refuses."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x):
        scale = torch.exp(self.log_std(x) * 0.1 - 18)
        return torch.distributions.Normal(self.mean(x), scale, validate_args=True).mean.square().mean()


class Split(nn.Module):
    """A module rounds what another one refuses."""

    class Product(nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            return z @ z.T

    def __init__(self):
        super().__init__()
        self.product = self.Product(16, 8)

    def forward(self, x):
        return torch.linalg.cholesky(self.product(x).float() + 1e-4 * torch.eye(16)).diagonal().log().sum() * -1e-3


@pytest.mark.parametrize(
    ("make", "low", "within", "operator", "cure"),
    [
        (Factored, "bf16", False, "matmul", (OpChange("deny", "matmul"),)),
        (Factored, "bf16", True, "linalg_cholesky", (Rule("0", FULL),)),
        (Policy, "fp16", False, "exp", (OpChange("deny", "exp"),)),
        (Policy, "fp16", True, "exp", (Rule("0", FULL),)),
        (Split, "bf16", False, "linalg_cholesky", (Rule("product", FULL),)),
    ],
)
def test_an_error_that_low_numbers_lead_to_gets_a_verdict_with_an_edit_that_was_tried(
    make, low, within, operator, cure
):
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, 16)
    model = nn.Sequential(model) if within else model
    session = opened(model, "O2", low)
    before = snapshot(model, session.optimizers[0], session)
    verdict = halfstep.blame(session, lambda: model(x))
    assert (verdict.kind, verdict.module, verdict.operator) == ("error", "0" if within else "", operator)
    assert "test_closures.py" in verdict.where
    assert verdict.cure == cure
    assert "the closure raised " in verdict.evidence
    assert "tried: the closure's loss is then" in verdict.advice
    assert differing(before, snapshot(model, session.optimizers[0], session)) == []
    (error,) = (found for found in halfstep.check(session, lambda: model(x)) if found.severity == "error")
    assert error.cure == cure
    session = halfstep.initialize(model, session.optimizers[0], session.plan.edit(*verdict.cure))
    assert not backward_and_step(session, model(x)).skipped


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
    model = nn.Sequential(Remembering(written), nn.Linear(8, 4))
    mean = model[0].mean
    verdict = verdict_on(model, loss=lambda _, inputs: model(inputs).square().mean() + model[0].loss)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "0", "mul")
    assert "tried: the closure's loss" in verdict.advice
    assert model[0].mean is mean
    assert torch.equal(mean, torch.zeros(8))
    assert not hasattr(model[0], "loss")


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
    model = nn.Sequential(Collecting(), nn.Linear(8, 4))
    part = model[0]
    losses, kept = part.losses, torch.zeros(())
    losses.append(kept)

    def loss(_, inputs):
        loss = model(inputs).square().mean()
        assert len(part.losses) == 2  # also where a copy stands in for it
        return loss + part.losses[-1] / 1e6

    verdict = verdict_on(model, "O1", loss=loss)
    assert (verdict.kind, verdict.module, verdict.operator) == ("overflow", "0", "mul")
    assert "tried: the closure's loss" in verdict.advice
    assert part.losses is losses
    assert [value is kept for value in losses] == [True]
    assert (part.counts, part.seen) == ({"calls": 0}, (set(), collections.deque()))


def grow(held):
    held.n += 1
    held.sum[0] += 1


def increment(held):
    held[0] += 1


@pytest.mark.parametrize(
    ("held", "change", "read"),
    [
        (np.zeros(2), increment, np.ndarray.tolist),
        ([np.zeros(2)], lambda held: increment(held[0]), lambda held: held[0].tolist()),
        (array("d", [0]), increment, array.tolist),
        (bytearray(1), increment, bytes),
        ([SimpleNamespace(n=0, sum=np.zeros(1))], lambda held: grow(held[0]), repr),
        (np.random.RandomState(0), lambda held: held.normal(), lambda held: repr(held.get_state())),
        ([np.random.RandomState(0)], lambda held: held[0].rand(), lambda held: repr(held[0].get_state())),
        (np.random.default_rng(0), lambda held: held.normal(), lambda held: repr(held.bit_generator.state)),
        (np.random.PCG64(0), lambda held: held.random_raw(), lambda held: repr(held.state)),
        (np.random.SeedSequence(0), lambda held: None, repr),  # which has no state that could be put back
    ],
)
def test_what_an_object_of_a_module_holds_is_as_before(held, change, read):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].held, before = held, str(read(held))

    def loss(factor=1.0):
        change(held)
        return model(torch.ones(4, 8)).square().mean() * factor

    session = halfstep.initialize(model, torch.optim.SGD(model.parameters()), "O1")
    halfstep.check(session, loss)
    assert str(read(held)) == before
    assert halfstep.blame(session, lambda: loss(float("nan"))) is not None
    assert str(read(held)) == before
    session.close()
    halfstep.whatif(loss, model)
    assert str(read(held)) == before


def test_a_state_outside_of_the_model_that_the_failure_spoils_does_not_repeat():
    held = {"mean": torch.zeros(8, 4)}

    def loss(model, inputs):
        out = model(inputs)
        held["mean"] = 0.9 * held["mean"] + 0.1 * out.detach()
        return nn.functional.mse_loss(out, held["mean"])

    verdict = verdict_on(Cnn(Gain()), loss=loss)
    assert (verdict.kind, verdict.module) == ("overflow", "plant")
    assert "does not repeat" in verdict.evidence
    assert "two faults" not in verdict.advice
