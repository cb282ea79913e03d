"""Loops that keep their own `optimizer.step()`: true gradients in `p.grad`, steps skipped where they must be."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfstep
from halfstep.errors import SessionError, SetupError
from halfstep.torch_internals import GLOBAL_STEP_PRE_HOOKS
from halfstep.train.optim.hooks import has_hooks

SETTINGS = [("O0", "bf16"), *((level, low) for level in ("O1", "O2", "O3") for low in ("bf16", "fp16"))]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer_of(model, name="AdamW"):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)


def opened(level, low, stepping="optimizer", name="AdamW", **settings):
    model = network()
    optimizer = optimizer_of(model, name)
    return model, optimizer, halfstep.initialize(model, optimizer, level, low=low, stepping=stepping, **settings)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_loop_of_its_own_trains_as_one_that_unscales_clips_and_calls_the_session(level, low, name):
    model, optimizer, session = opened(level, low, name=name)
    other, other_optimizer, other_session = opened(level, low, "session", name)
    for first, second in zip(batches()[::2], batches()[1::2], strict=True):
        optimizer.zero_grad()
        other_optimizer.zero_grad()
        for batch in (first, second):
            session.backward(loss_of(model, batch) / 2)
            other_session.backward(loss_of(other, batch) / 2)
            other_session.unscale_()  # so that both add up true gradients
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        other_session.step()
    assert same(weights(model), weights(other))
    assert session.status().steps == 3


@pytest.mark.parametrize(("level", "low"), SETTINGS[1:])
def test_gradients_are_true_ones_in_fp32_after_each_backward_pass(level, low):
    model, _, session = opened(level, low, loss_scale=1024.0)
    plain = copy.deepcopy(model)  # fp32 values of the weights
    session.backward(loss_of(model, batches()[0]))
    loss_of(plain, batches()[0]).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        assert torch.allclose(ours.grad, theirs.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(("level", "low"), SETTINGS[1:])
def test_a_step_on_a_bad_batch_is_skipped_and_the_next_one_is_not(level, low, value):
    model, optimizer, session = opened(level, low)
    inputs, targets = batches()[0]
    session.backward(loss_of(model, (inputs.clone().fill_(value), targets)))
    before = weights(model)
    optimizer.step()
    assert same(before, weights(model))
    assert session.status().skipped == 1
    optimizer.zero_grad()
    session.backward(loss_of(model, batches()[1]))
    optimizer.step()
    assert not same(before, weights(model))


def test_what_the_loop_writes_to_the_gradients_is_what_the_optimizer_gets():
    model, optimizer, session = opened("O2", "fp16", name="SGD")
    session.backward(loss_of(model, batches()[0]))
    before = weights(model)
    for p in model.parameters():
        p.grad.fill_(1.0)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] - 0.01)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_closure_is_called_first_and_its_loss_returned(level):
    model, optimizer, session = opened(level, "bf16")
    other, other_optimizer, other_session = opened(level, "bf16")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batches()[0])
        session.backward(loss)
        return loss

    with torch.no_grad():  # torch's optimizers run a closure with gradients on, too
        returned = optimizer.step(closure)
    loss = loss_of(other, batches()[0])
    other_session.backward(loss)
    other_optimizer.step()
    assert torch.equal(returned, loss)
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_pass_that_the_caller_makes_is_the_sessions(level):
    model, optimizer, session = opened(level, "fp16")
    other, other_optimizer, other_session = opened(level, "fp16")
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        with session.scaling(loss) as scale:
            (loss * scale).backward()
        optimizer.step()
        other_optimizer.zero_grad()
        other_session.backward(loss_of(other, batch))
        other_optimizer.step()
    assert same(weights(model), weights(other))
    assert session.state_dict() == other_session.state_dict()


def test_gradients_of_several_passes_may_stay_scaled_until_the_last():
    model, optimizer, session = opened("O1", "fp16", loss_scale=1024.0)
    other, other_optimizer, other_session = opened("O1", "fp16", loss_scale=1024.0)
    for batch, last in zip(batches()[:2], (False, True), strict=True):
        loss = loss_of(model, batch)
        with session.scaling(loss, unscale=last) as scale:
            (loss * scale).backward()
        other_session.backward(loss_of(other, batch))
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        if not last:
            assert all(torch.equal(p.grad, q.grad * 1024.0) for p, q in pairs)
        else:  # the sums are rounded at another place
            assert all(torch.allclose(p.grad, q.grad, rtol=1e-5) for p, q in pairs)
    optimizer.step()
    other_optimizer.step()


def test_an_error_in_such_a_pass_leaves_the_gradients_and_counts_no_loss():
    model, optimizer, session = opened("O1", "fp16")
    session.backward(loss_of(model, batches()[0]))
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(KeyError), session.scaling(loss_of(model, batches()[1])):
        raise KeyError
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.step()
    assert session.status().skipped == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_step_each_in_its_own_turn_as_in_a_gan(level):
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (maker, judge)]
    session = halfstep.initialize([maker, judge], optimizers, level, low="fp16", stepping="optimizer")
    noise = torch.randn(8, 4)
    for _ in range(3):
        judge.zero_grad()
        session.backward(judge(torch.ones(8, 4)).mean())
        session.backward(-judge(maker(noise).detach()).mean())
        optimizers[1].step()
        judged = weights(judge)
        maker.zero_grad()
        made = weights(maker)
        session.backward(judge(maker(noise)).mean())
        optimizers[0].step()
        assert same(judged, weights(judge))
        assert not same(made, weights(maker))
    assert session.status().steps == 6


def test_a_scheduler_made_before_or_after_sees_the_steps(recwarn):
    model = network()
    optimizer = optimizer_of(model)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16", stepping="optimizer")
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    session.backward(loss_of(model, batches()[0]))
    optimizer.step()
    early.step()
    late.step()
    assert not recwarn.list
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.25


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_without_gradients_changes_nothing_and_a_second_one_uses_those_that_lie_there(level):
    model, optimizer, session = opened(level, "bf16", name="SGD")
    plain = network()
    plain_optimizer = optimizer_of(plain, "SGD")
    before = weights(model)
    optimizer.step()
    assert same(before, weights(model))
    session.backward(loss_of(model, batches()[0]))
    for p, own in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = own.grad.clone()
    for _ in range(2):
        optimizer.step()
        plain_optimizer.step()
    if level != "O2":
        for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)
    assert not same(before, weights(model))


def test_step_hooks_fire_once_and_see_true_gradients():
    model, optimizer, session = opened("O2", "fp16")
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.dtype))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    session.backward(loss_of(model, batches()[0]))
    optimizer.step()
    assert seen == [torch.float32, "after"]


def test_a_closed_session_gives_the_optimizer_its_step_back():
    model, optimizer, session = opened("O2", "fp16")
    session.backward(loss_of(model, batches()[0]))
    session.close()
    assert "step" not in vars(optimizer)
    before = weights(model)
    optimizer.step()
    assert not same(before, weights(model))


def test_bad_input():
    model = network()
    with pytest.raises(SetupError, match="stepping is 'own'; expected 'session'"):
        halfstep.initialize(model, optimizer_of(model), "O1", low="bf16", stepping="own")
    session = halfstep.initialize(model, None, "O1", low="bf16", stepping="optimizer")
    with pytest.raises(SessionError, match="no optimizer"), session.scaling(torch.ones((), requires_grad=True)):
        pass


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_gradients_of_an_lstm_have_the_dtype_of_low_weights_in_every_pass_and_in_a_second_session(low):
    """Its backward pass makes fp32 ones, which torch casts only where a parameter's gradient has a dtype."""
    model = nn.LSTM(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        session = halfstep.initialize(model, optimizer, "O2", low=low)
        for _ in range(3):
            optimizer.zero_grad()
            session.backward(model(torch.ones(3, 2, 4))[0].square().mean())
            assert {p.grad.dtype for p in model.parameters()} == {session.plan.low.dtype}
            session.unscale_()
            session.step()
        session.close()
        optimizer.zero_grad()


@pytest.mark.parametrize("tool", [halfstep.blame, halfstep.check])
def test_a_step_inside_a_closure_that_blame_or_check_runs_is_refused(tool):
    model, optimizer, session = opened("O2", "bf16")
    before = weights(model)

    def closure():
        optimizer.step()
        return loss_of(model, batches()[0])

    with pytest.raises(SessionError, match="closure"):
        tool(session, closure)
    assert same(weights(model), before)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("stepping", ["session", "optimizer"])
def test_an_optimizer_that_the_session_was_not_given_does_not_step_what_it_stores_low(level, stepping):
    model, optimizer, session = opened(level, "bf16", stepping)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    session.backward(loss_of(model, batches()[0]))
    session.unscale_()
    before = weights(model)
    with pytest.raises(SessionError, match=r"SGD is not an optimizer of this session, but would step 0\.weight, which"):
        other.step()
    assert same(weights(model), before)
    elsewhere = nn.Linear(2, 2)
    elsewhere(torch.ones(2)).sum().backward()
    torch.optim.SGD(elsewhere.parameters(), lr=1.0).step()
    optimizer.step() if stepping == "optimizer" else session.step()
    assert session.status().steps == 1
    session.close()
    other.step()
    assert not same(weights(model), before)


def test_at_o1_weights_are_fp32_and_any_optimizer_may_step_them():
    model, _, session = opened("O1", "bf16")
    before = weights(model)
    session.backward(loss_of(model, batches()[0]))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not same(weights(model), before)


def test_what_looks_at_steps_is_no_hook_that_updates_would_have_to_run():
    _, optimizer, session = opened("O2", "bf16")
    assert len(GLOBAL_STEP_PRE_HOOKS)
    assert not has_hooks(optimizer)
    session.close()


def test_a_session_that_nobody_closed_looks_at_no_step_once_it_is_gone():
    opened("O2", "bf16")[2].close()  # which takes away what earlier tests left
    held = len(GLOBAL_STEP_PRE_HOOKS)
    model, optimizer, session = opened("O2", "bf16")
    assert len(GLOBAL_STEP_PRE_HOOKS) == held + 1
    del model, optimizer, session
    gc.collect()
    _, _, session = opened("O2", "bf16")
    assert len(GLOBAL_STEP_PRE_HOOKS) == held + 1
    session.close()
    assert len(GLOBAL_STEP_PRE_HOOKS) == held


def test_a_session_that_is_collected_while_an_optimizer_runs_its_hooks_breaks_no_step():
    model, optimizer, session = opened("O2", "bf16")
    model.itself = [model, optimizer, session]
    del model, optimizer, session
    hooks = [lambda *_: gc.collect() and None, lambda *_: None]
    handles = [register_optimizer_step_pre_hook(each) for each in hooks]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    try:
        other.step()
    finally:
        for handle in handles:
            handle.remove()
