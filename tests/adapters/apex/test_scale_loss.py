"""`amp.scale_loss`: what it gives, what it leaves in `p.grad`, and which steps are skipped."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.errors import SessionError
from tests.adapters.apex.cases import LEVELS, loss_of, same, sgd, small, values, vectors

MIXED = LEVELS[1:]


def opened(amp, level, **settings):
    model = small()
    return amp.initialize(model, sgd(model), opt_level=level, **{"verbosity": 0, **settings})


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [128.0, "128.0", "dynamic"])
def test_it_gives_the_loss_in_fp32_times_the_scale_and_leaves_true_gradients(amp, level, scale):
    model, optimizer = opened(amp, level, loss_scale=scale)
    factor = 2.0**16 if scale == "dynamic" else 128.0
    loss = loss_of(model, vectors())
    with amp.scale_loss(loss, optimizer, model=model) as scaled:
        assert scaled.dtype is torch.float32
        assert torch.equal(scaled, loss * factor)
        scaled.backward()
        held = [p.grad.float().clone() for p in model.parameters()]
    for own, inside in zip(gradients(model), held, strict=True):
        assert torch.equal(own * factor, inside)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_low_loss_is_scaled_in_fp32(amp, low, level, shape):
    model, optimizer = opened(amp, level, cast_model_outputs=low)
    with amp.scale_loss(model(vectors()[0]).pow(2).mean().to(low).reshape(shape), optimizer) as scaled:
        assert scaled.dtype is torch.float32
        scaled.backward()
    assert all(torch.isfinite(grad).all() for grad in gradients(model))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", MIXED)
def test_a_step_on_gradients_that_are_not_finite_is_skipped_at_a_static_scale_too(amp, level, scale, bad, capsys):
    model, optimizer = opened(amp, level, loss_scale=scale, verbosity=1)
    capsys.readouterr()
    before, (inputs, targets) = values(model), vectors()
    with amp.scale_loss(loss_of(model, (inputs * bad, targets)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    said = capsys.readouterr().out
    assert same(before, values(model))
    expected = "reducing loss scale to 32768.0" if scale == "dynamic" else "keeping loss scale 128.0"
    assert said == f"Gradient overflow.  Skipping step, loss scaler 0 {expected}\n"
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not same(before, values(model))
    assert capsys.readouterr().out == ""


def test_verbosity_0_prints_nothing(amp, capsys):
    model, optimizer = opened(amp, "O1", verbosity=0)
    with amp.scale_loss(loss_of(model, vectors()) * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15


def test_the_scale_stops_at_its_floor_and_is_never_zero(amp):
    model, optimizer = opened(amp, "O1", min_loss_scale=2.0**15)
    for _ in range(3):
        with amp.scale_loss(loss_of(model, vectors()) * float("nan"), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


def test_the_scale_grows_after_2000_clean_steps(amp):
    model, optimizer = opened(amp, "O1")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 1998}})
    for expected in (256.0, 512.0):
        with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp._amp_state.loss_scalers[0].loss_scale() == expected


@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_gradients_are_the_sum_also_under_different_scales(amp, level):
    model, optimizer = opened(amp, level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale = 64.0
    sums = None
    for seed, loss_id in ((1, 0), (2, 1)):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, vectors(seed)), optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        sums = gradients(model) if sums is None else [a + b for a, b in zip(sums, gradients(model), strict=True)]
    optimizer.zero_grad()
    for seed, loss_id in ((1, 0), (2, 1)):
        with amp.scale_loss(loss_of(model, vectors(seed)), optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    assert all(torch.equal(own, both) for own, both in zip(gradients(model), sums, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale_leaves_scaled_gradients_until_the_last_pass(amp, level):
    model, optimizer = opened(amp, level, loss_scale=64.0)
    other, other_optimizer = opened(amp, level, loss_scale=64.0)
    for seed in (1, 2):
        with amp.scale_loss(loss_of(model, vectors(seed)), optimizer, delay_unscale=seed == 1) as scaled:
            scaled.backward()
        with amp.scale_loss(loss_of(other, vectors(seed)), other_optimizer) as scaled:
            scaled.backward()
        if seed == 1:
            pairs = zip(gradients(model), gradients(other), strict=True)
            assert all(torch.equal(own.float(), theirs * 64.0) for own, theirs in pairs)
    for own, theirs in zip(gradients(model), gradients(other), strict=True):
        assert torch.allclose(own, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", MIXED)
def test_a_step_after_delayed_unscaling_alone_is_a_right_one(amp, level):
    pairs = [opened(amp, level) for _ in range(2)]
    for (model, optimizer), delay in zip(pairs, (True, False), strict=True):
        with amp.scale_loss(loss_of(model, vectors()), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
        optimizer.step()
    for a, b in zip(values(pairs[0][0]).values(), values(pairs[1][0]).values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", MIXED)
def test_delay_overflow_check_still_skips_and_lowers_the_scale(amp, level):
    model, optimizer = opened(amp, level, loss_scale="dynamic")
    before = values(model)
    loss = loss_of(model, vectors()) * float("inf")
    with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    optimizer.step()
    assert same(before, values(model))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_come_as_one_a_list_or_a_tuple(amp, level):
    models = [small(0), small(1)]
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], opt_level=level, verbosity=0)
    expected = None
    for given in (optimizers, tuple(optimizers)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(sum(loss_of(m, vectors()) for m in models), given) as scaled:
            scaled.backward()
        found = [grad for m in models for grad in gradients(m)]
        assert expected is None or all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        expected = found


def test_a_wrapper_around_an_optimizer_is_looked_into(amp):
    class Wrapper:
        """Steps another optimizer, as LARC does."""

        def __init__(self, optim):
            self.optim = optim

        def step(self):
            self.optim.step()

    model = small()
    wrapper = Wrapper(sgd(model))
    model, returned = amp.initialize(model, wrapper, opt_level="O2", verbosity=0)
    assert returned is wrapper
    before = values(model)
    with amp.scale_loss(loss_of(model, vectors()), wrapper) as scaled:
        scaled.backward()
    wrapper.step()
    assert not same(before, values(model))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_with_a_closure_works(amp, level):
    pairs = [opened(amp, level) for _ in range(2)]
    (model, optimizer), (other, other_optimizer) = pairs

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, vectors())
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    returned = optimizer.step(closure)
    loss = loss_of(other, vectors())
    with amp.scale_loss(loss, other_optimizer) as scaled:
        scaled.backward()
    other_optimizer.step()
    assert torch.equal(returned, loss)
    assert same(values(model), values(other))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_takes_set_to_none(amp, level, to_none):
    model, optimizer = opened(amp, level)
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    optimizer.zero_grad(set_to_none=to_none)
    found = gradients(model)
    assert all(grad is None if to_none else not grad.any() for grad in found)


@pytest.mark.parametrize("level", LEVELS)
def test_master_params_are_the_models_own_and_clip_as_always(amp, level):
    model, optimizer = opened(amp, level)
    before = list(amp.master_params(optimizer))
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    after = list(amp.master_params(optimizer))
    assert all(a is b is p for a, b, p in zip(before, after, model.parameters(), strict=True))
    expected = torch.linalg.vector_norm(torch.stack([grad.float().norm() for grad in gradients(model)]))
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    torch.testing.assert_close(norm, expected)
    clipped = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in gradients(model)]))
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-4, atol=0)


def test_the_order_of_calls_is_explained(amp):
    model = small()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="has not been initialized"), amp.scale_loss(torch.ones(()), optimizer):
        pass
    model, optimizer = amp.initialize(model, optimizer, num_losses=2, verbosity=0)
    loss = loss_of(model, vectors())
    for loss_id in (2, "1"):
        expected = f"loss_id is {loss_id!r}, but amp.initialize .* num_losses=2; pass a loss_id from 0 to 1"
        with pytest.raises(IndexError, match=expected), amp.scale_loss(loss, optimizer, loss_id=loss_id):
            pass
    for wrong in (3.0, [loss]):
        with pytest.raises(TypeError, match="pass the loss tensor"), amp.scale_loss(wrong, optimizer):
            pass
    with pytest.raises(RuntimeError, match="SGD, but expects optimizers that"), amp.scale_loss(loss, sgd(model)):
        pass
    with pytest.raises(RuntimeError, match="no optimizer"), amp.scale_loss(loss, []):
        pass


@pytest.mark.parametrize("level", MIXED)
def test_an_error_inside_leaves_gradients_and_scale(amp, level):
    model, optimizer = opened(amp, level)
    with contextlib.suppress(KeyError), amp.scale_loss(loss_of(model, vectors()), optimizer):
        raise KeyError
    assert gradients(model) == [None] * 4
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (1.0 if level == "O3" else 2.0**16)


def test_a_model_for_inference_scales_nothing(amp):
    model = amp.initialize(small(), opt_level="O2", verbosity=0)
    assert model(vectors()[0]).dtype is torch.float32
    with pytest.raises((RuntimeError, SessionError)), amp.scale_loss(loss_of(model, vectors()), []):
        pass


def test_training_goes_on_where_every_step_is_skipped_and_the_log_says_why(amp, caplog):
    model, optimizer = opened(amp, "O1")
    before, (inputs, targets) = values(model), vectors()
    for _ in range(60):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, (inputs * float("nan"), targets)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert same(before, values(model))
    assert "was skipped like those before it" in caplog.text
