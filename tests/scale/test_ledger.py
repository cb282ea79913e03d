"""The ledger against gradients in fp32: whatever the order of backwards, scales and zero_grad, they are equal."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.edits import Scaling
from halfstep.scale.ledger import GradientLedger
from halfstep.scale.scaling import make_scale
from tests.scale.reads import global_norm
from tests.scale.sync import NoSync

CPU = torch.device("cpu")
LOW = [torch.bfloat16, torch.float16]


class Twin:
    """Two weights with a ledger, and what autograd alone makes of the same losses in fp32.

    `backward(loss_id, x)` takes the loss sum(w * x), whose gradient is x; `shape` of the weights is (2,).
    """

    def __init__(self, dtype=torch.float32, *, full_accumulate=True, scalings=None):
        self.weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
        self.wanted = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        scalings = scalings or [Scaling("dynamic", init=1024.0), Scaling("dynamic", init=64.0)]
        self.scales = [make_scale(scaling, CPU) for scaling in scalings]
        self.ledger = GradientLedger(lambda: self.weights, full_accumulate)

    def backward(self, loss_id, x, *, which=(0, 1), not_finite=None):
        scale = self.scales[loss_id]
        self.ledger.before_backward(loss_id, scale.value)
        loss = sum((self.weights[i] * torch.tensor(x).to(self.weights[i].dtype)).sum().float() for i in which)
        (loss * scale.value).backward()
        self.ledger.after_backward(loss_id, scale.value, not_finite)
        sum((self.wanted[i] * torch.tensor(x)).sum() for i in which).backward()

    def zero_grad(self, set_to_none):
        torch.optim.SGD(self.weights).zero_grad(set_to_none=set_to_none)
        torch.optim.SGD(self.wanted).zero_grad(set_to_none=set_to_none)

    def step(self):
        """Ends a step as a session does; returns whether it is skipped and which losses overflowed."""
        collected = self.ledger.collect()
        _, found = global_norm(collected.grads)
        flags = collected.overflowed(found)
        self.ledger.consumed()
        for loss, flag in flags.items():
            self.scales[loss].update(flag)
        noted = collected.found is not None and bool(collected.found)
        return bool(found) or noted, {loss: bool(flag) for loss, flag in flags.items()}

    def true(self):
        """The true gradients that a step would use, weight by weight."""
        collected = self.ledger.collect()
        found = {p: g.float() * collected.inverse for p, g in zip(collected.params, collected.grads, strict=True)}
        return [found[w].tolist() if w in found else None for w in self.weights]

    def check(self):
        wanted = [None if w.grad is None else w.grad.tolist() for w in self.wanted]
        assert str(self.true()) == str(wanted)  # as text, so that nan equals nan


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view, lambda t: torch._neg_view(t.conj())])
def test_gradients_are_collected_and_unscaled_as_they_are_and_not_as_their_memory_is(view):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    scale = make_scale(Scaling("static", init=8.0), CPU)
    ledger = GradientLedger(lambda: [weight], full_accumulate=True)
    ledger.before_backward(0, scale.value)
    weight.grad = view(torch.tensor([8 + 16j, -8j]))
    wanted = weight.grad.clone()
    ledger.after_backward(0, scale.value)
    (grad,) = ledger.collect().grads
    assert (grad.is_conj(), grad.is_neg()) == (False, False)
    assert torch.equal(grad, wanted)
    ledger.unscale_()
    assert torch.equal(weight.grad, wanted / 8)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
class TestSum:
    """Numbers are eighths, so that every sum is exact in every format and equality is bit-equality."""

    def test_one_backward(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [0.5, -3.0])
        twin.check()

    def test_accumulation(self, dtype):
        twin = Twin(dtype)
        for x in (0.5, 0.25, 3.0):
            twin.backward(0, [x, -x])
        twin.check()

    def test_two_losses_with_scales_of_their_own(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.backward(1, [0.5, 0.25])
        twin.backward(0, [4.0, 0.125])
        twin.check()

    def test_losses_that_reach_different_weights(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0], which=[0])
        twin.backward(1, [0.5, 0.25], which=[1])
        twin.check()

    def test_a_scale_that_changed_between_two_backwards(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.scales[0].limit(16.0)
        twin.backward(0, [0.5, 0.25])
        twin.check()

    def test_unscale_then_another_backward(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        twin.backward(0, [0.5, 0.25])
        twin.check()
        assert twin.weights[0].grad.tolist() == [1.5, 2.25]  # true again, as the caller left them

    def test_unscale_gives_true_fp32_gradients_and_twice_is_once(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        twin.ledger.unscale_()
        assert twin.weights[1].grad.tolist() == [1.0, 2.0]
        assert twin.weights[1].grad.dtype == torch.float32
        assert twin.ledger.collect().inverse.item() == 1

    def test_changed_gradients_are_used_as_they_are(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        for weight in (*twin.weights, *twin.wanted):
            weight.grad.mul_(0.5)
        twin.backward(1, [1.0, 1.0])
        twin.check()

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_next_step_after_growth(self, dtype, set_to_none):
        twin = Twin(dtype, scalings=[Scaling("dynamic", init=64.0, growth_interval=1)])
        for x in (1.0, 0.5, 0.125):
            twin.zero_grad(set_to_none)
            twin.backward(0, [x, -x])
            twin.check()
            assert twin.step() == (False, {0: False})

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_next_step_after_an_overflow(self, dtype, set_to_none):
        twin = Twin(dtype)
        twin.backward(0, [math.inf, 1.0])
        assert twin.step() == (True, {0: True})
        assert twin.scales[0].value.item() == 512
        twin.zero_grad(set_to_none)
        twin.backward(0, [1.0, 0.5])
        twin.check()
        assert twin.step() == (False, {0: False})

    def test_stale_gradients_are_added_to_as_in_fp32(self, dtype):
        twin = Twin(dtype, scalings=[Scaling("dynamic", init=64.0, growth_interval=1)])
        for x in (1.0, 0.5, 0.125):
            twin.backward(0, [x, -x])
            twin.check()
            twin.step()

    def test_stale_gradients_under_another_loss(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.step()
        twin.backward(1, [0.5, 0.25])
        twin.check()

    def test_stale_gradients_are_rescaled_in_place(self, dtype):
        twin = Twin(dtype, scalings=[Scaling("dynamic", init=64.0, growth_interval=1)])
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        held = twin.weights[0].grad
        twin.step()
        twin.backward(0, [0.5, 0.25])
        assert twin.weights[0].grad is held
        assert held.tolist() == [1.5 * 128, 2.25 * 128]

    def test_stale_true_gradients(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        twin.step()
        twin.backward(0, [0.5, 0.25])
        twin.check()

    def test_zero_grad_without_a_step(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        twin.zero_grad(True)
        twin.backward(1, [0.5, 0.25])
        twin.check()

    def test_gradients_from_before_the_ledger(self, dtype):
        twin = Twin(dtype)
        for weight in (*twin.weights, *twin.wanted):
            weight.grad = torch.full((2,), 3.0, dtype=weight.dtype)
        twin.backward(0, [1.0, 2.0])
        twin.check()

    def test_a_parameter_that_is_added_later(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        for weights in (twin.weights, twin.wanted):
            weights.append(nn.Parameter(torch.ones_like(weights[0])))
        twin.backward(1, [0.5, 0.25], which=[0, 1, 2])
        twin.check()


# One step of a random story: (what, loss, number). Numbers are eighths; 99 stands for infinity.
events = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 1), st.integers(-16, 16)),
    st.tuples(st.just("backward"), st.integers(0, 1), st.sampled_from([1, 2, 3, 99])),
    st.tuples(st.just("unscale"), st.just(0), st.just(0)),
    st.tuples(st.just("limit"), st.integers(0, 1), st.sampled_from([512, 128, 32])),
    st.tuples(st.just("zero"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
)


@settings(max_examples=300)
@given(st.sampled_from([torch.float32, *LOW]), st.booleans(), st.lists(events, max_size=14))
def test_any_story_ends_with_the_gradients_of_fp32(dtype, full_accumulate, story):
    scalings = [Scaling("dynamic", init=1024.0, growth_interval=1, max=4096.0), Scaling("dynamic", init=64.0, max=64.0)]
    twin = Twin(dtype, full_accumulate=full_accumulate, scalings=scalings)
    pending = False  # a backward came after the last zero_grad and step
    for what, which, number in story:
        if what == "backward":
            x = math.inf if number == 99 else number / 8
            twin.backward(which, [x, -2.0], which=[[0, 1], [0], [1]][number % 3])
            pending = True
        elif what == "unscale":
            twin.ledger.unscale_()
        elif what == "limit":
            twin.scales[which].limit(float(number))
        elif what == "zero":
            twin.zero_grad(bool(which))
            pending = False
        elif pending:
            finite = all(w.grad is None or bool(torch.isfinite(w.grad).all()) for w in twin.wanted)
            twin.check()
            skipped, overflowed = twin.step()
            assert skipped == (not finite)
            assert skipped or not any(overflowed.values())
            pending = False
    twin.check()


@pytest.mark.parametrize("dtype", LOW)
class TestFormatOfHeldGradients:
    def grad(self, twin):
        return twin.weights[0].grad.dtype

    def test_the_first_backward_leaves_low_gradients(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 1.0])
        assert self.grad(twin) == dtype

    def test_the_second_holds_them_in_fp32(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 1.0])
        twin.backward(0, [1.0, 1.0])
        assert self.grad(twin) == torch.float32

    def test_unless_the_plan_keeps_low_sums(self, dtype):
        twin = Twin(dtype, full_accumulate=False)
        twin.backward(0, [1.0, 1.0])
        twin.backward(0, [1.0, 1.0])
        assert self.grad(twin) == dtype
        twin.check()

    def test_sums_go_on_past_what_the_low_format_can_count(self, dtype):
        twin = Twin(dtype, scalings=[Scaling("static", init=16.0)])
        for _ in range(600):
            twin.backward(0, [1.0, 0.125])
        twin.check()

    def test_the_next_step_is_low_again_after_zero_grad(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 1.0])
        twin.backward(1, [1.0, 1.0])
        twin.step()
        twin.zero_grad(True)
        twin.backward(0, [1.0, 1.0])
        assert self.grad(twin) == dtype
        assert twin.weights[0].grad_dtype in (dtype, None)

    def test_close_leaves_true_gradients_and_the_format_of_new_ones_as_it_was(self, dtype):
        twin = Twin(dtype)
        twin.backward(0, [1.0, 2.0])
        twin.backward(0, [1.0, 2.0])
        twin.ledger.close()
        assert twin.weights[0].grad.tolist() == [2.0, 4.0]
        twin.zero_grad(True)
        twin.ledger.close()
        assert twin.weights[0].grad_dtype in (dtype, None)


class TestOverflow:
    def test_in_the_first_of_two_losses(self):
        twin = Twin()
        twin.backward(0, [math.inf, 1.0])
        twin.backward(1, [1.0, 1.0])
        assert twin.step() == (True, {0: True, 1: False})

    def test_in_the_second_of_two_losses(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0])
        twin.backward(1, [math.nan, 1.0])
        assert twin.step() == (True, {0: False, 1: True})

    def test_by_the_scale_alone(self):
        # 3 * 1024 * 64 is beyond fp16, 3 * 64 is not: the scale of loss 0 is to blame, and only it backs off.
        twin = Twin(torch.float16, scalings=[Scaling("dynamic", init=65536.0), Scaling("dynamic", init=64.0)])
        twin.backward(0, [3.0, 1.0])
        twin.backward(1, [3.0, 1.0])
        assert twin.step() == (True, {0: True, 1: False})
        assert [scale.value.item() for scale in twin.scales] == [32768, 64]

    def test_in_one_of_several_accumulated(self):
        twin = Twin()
        for x in (1.0, math.inf, 1.0):
            twin.backward(0, [x, 1.0])
        assert twin.step() == (True, {0: True})

    def test_is_remembered_when_the_caller_clips_it_away(self):
        twin = Twin()
        twin.backward(0, [math.inf, 1.0])
        twin.ledger.unscale_()
        nn.utils.clip_grad_value_(twin.weights, 1.0)
        assert twin.step() == (True, {0: True})

    def test_made_by_the_caller_skips_but_blames_no_scale(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0])
        twin.ledger.unscale_()
        twin.weights[0].grad.fill_(math.nan)
        assert twin.step() == (True, {0: False})

    def test_losses_that_share_one_scale_are_added_in_place_and_blamed_together(self):
        twin = Twin(scalings=[Scaling("static", init=64.0)])
        twin.scales = [twin.scales[0]] * 2
        twin.backward(0, [math.inf, 1.0])
        twin.backward(1, [1.0, 1.0])
        assert twin.ledger.collect().inverse.item() == 1 / 64
        assert twin.step() == (True, {0: True, 1: True})

    @pytest.mark.parametrize("not_finite", [True, False])
    def test_of_the_loss_alone(self, not_finite):
        twin = Twin()
        twin.backward(0, [1.0, 1.0], not_finite=torch.tensor(not_finite))
        assert twin.step() == (not_finite, {0: not_finite})

    def test_of_a_loss_that_reaches_no_parameter_does_not_count(self):
        twin = Twin()
        twin.ledger.before_backward(0, twin.scales[0].value)
        twin.ledger.after_backward(0, twin.scales[0].value, torch.tensor(True))
        twin.backward(1, [1.0, 1.0], not_finite=torch.tensor(False))
        assert twin.step() == (False, {1: False})

    def test_of_a_loss_that_reaches_nothing_leaves_what_another_loss_held(self):
        twin = Twin()
        twin.backward(1, [1.0, 1.0])
        twin.ledger.before_backward(0, twin.scales[0].value)
        twin.ledger.after_backward(0, twin.scales[0].value, torch.tensor(True))
        assert twin.step() == (False, {1: False, 0: False})

    def test_is_settled_by_its_step(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0], not_finite=torch.tensor(True))
        assert twin.step() == (True, {0: True})
        twin.backward(0, [1.0, 1.0], not_finite=torch.tensor(False))
        assert twin.step() == (False, {0: False})

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("loss_id", [0, 1])
    @pytest.mark.parametrize("unscale", [True, False])
    def test_that_the_caller_dropped_by_zero_grad_is_forgotten(self, set_to_none, loss_id, unscale):
        twin = Twin()
        twin.backward(0, [math.inf, 1.0], not_finite=torch.tensor(True))
        if unscale:
            twin.ledger.unscale_()
        twin.zero_grad(set_to_none)
        twin.backward(loss_id, [1.0, 1.0], not_finite=torch.tensor(False))
        skipped, overflowed = twin.step()
        assert not skipped
        assert not any(overflowed.values())


class TestCollect:
    def test_leaves_out_parameters_without_a_gradient(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0], which=[1])
        collected = twin.ledger.collect()
        assert [p is twin.weights[1] for p in collected.params] == [True]
        assert collected.grads[0] is twin.weights[1].grad

    def test_has_the_scale_of_the_backward_not_of_later(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0])
        twin.scales[0].update(torch.tensor(True))
        assert twin.ledger.collect().scale.item() == 1024
        assert twin.ledger.collect().inverse.item() == 1 / 1024

    def test_has_the_scale_of_the_last_of_several_losses(self):
        twin = Twin()
        twin.backward(0, [1.0, 1.0])
        twin.backward(1, [1.0, 1.0])
        twin.scales[1].update(torch.tensor(True))
        assert twin.ledger.collect().scale.item() == 64
        assert twin.ledger.collect().inverse.item() == 1

    def test_inverse_of_a_scale_that_is_no_power_of_two(self):
        twin = Twin(scalings=[Scaling("static", init=1000.0)])
        twin.backward(0, [1.0, 1.0])
        assert twin.ledger.collect().inverse.item() == torch.tensor(1 / 1000, dtype=torch.float64).float().item()

    def test_a_parameter_listed_twice_counts_once(self):
        twin = Twin()
        twin.weights.append(twin.weights[0])
        twin.backward(0, [1.0, 2.0])
        twin.ledger.unscale_()
        assert twin.weights[0].grad.tolist() == [1.0, 2.0]
        assert len(twin.ledger.collect().params) == 2

    def test_of_nothing_is_empty_and_clean(self):
        collected = Twin().ledger.collect()
        assert (collected.params, collected.grads, collected.losses) == ([], [], ())
        assert not collected.found


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no")


class TestBackwardThatRaises:
    def fail(self, twin, loss_id):
        scale = twin.scales[loss_id]
        twin.ledger.before_backward(loss_id, scale.value)
        with pytest.raises(ValueError, match="no"):
            (Refuses.apply(twin.weights[0]).sum() * scale.value).backward()
        twin.ledger.undo_backward()

    def test_under_another_scale_gives_back_what_was_held(self):
        twin = Twin()
        twin.backward(0, [1.0, 2.0])
        self.fail(twin, 1)
        twin.check()
        assert twin.ledger.collect().losses == (0,)

    def test_and_goes_on_adding(self):
        twin = Twin()
        twin.backward(0, [1.0, 2.0])
        self.fail(twin, 1)
        twin.backward(1, [0.5, 0.5])
        twin.check()

    def test_under_the_same_scale_keeps_what_was_held(self):
        twin = Twin()
        twin.backward(0, [1.0, 2.0])
        self.fail(twin, 0)
        twin.check()

    def test_as_the_first_leaves_nothing(self):
        twin = Twin()
        self.fail(twin, 0)
        assert twin.ledger.collect().params == []
        twin.backward(1, [1.0, 1.0])
        twin.check()
        assert twin.ledger.collect().losses == (1,)


class TestKindsOfGradients:
    def run(self, param, loss, *, ids=(0, 0, 1)):
        """Three backwards of `loss(param)` under two scales; returns the true gradient and autograd's own."""
        wide = torch.float32 if param.dtype in LOW else param.dtype
        reference = nn.Parameter(param.detach().to(wide))
        scales = [make_scale(Scaling("static", init=init), CPU) for init in (1024.0, 64.0)]
        ledger = GradientLedger(lambda: [param], True)
        for loss_id in ids:
            ledger.before_backward(loss_id, scales[loss_id].value)
            (loss(param) * scales[loss_id].value).backward()
            ledger.after_backward(loss_id, scales[loss_id].value)
            loss(reference).backward()
        ledger.unscale_()
        return param.grad, reference.grad

    @pytest.mark.parametrize("ids", [(0,), (0, 0), (0, 1), (0, 0, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, *LOW])
    def test_sparse(self, dtype, ids):
        weight = nn.Parameter(torch.ones(5, 2, dtype=dtype))
        rows = torch.tensor([1, 1, 4])
        got, wanted = self.run(weight, lambda w: nn.functional.embedding(rows, w, sparse=True).sum().float(), ids=ids)
        assert got.is_sparse
        assert got.dtype == torch.float32
        assert torch.equal(got.to_dense(), wanted.to_dense())

    def test_sparse_and_dense_of_a_tied_weight(self):
        weight = nn.Parameter(torch.ones(5, 2))
        scales = [make_scale(Scaling("static", init=init), CPU) for init in (1024.0, 64.0)]
        reference = nn.Parameter(torch.ones(5, 2))
        ledger = GradientLedger(lambda: [weight], True)
        for loss_id, sparse in enumerate([True, False, True]):
            scale = scales[loss_id % 2].value
            ledger.before_backward(loss_id, scale)
            (embedding_loss(weight, sparse) * scale).backward()
            ledger.after_backward(loss_id, scale)
            embedding_loss(reference, sparse).backward()
        assert torch.equal(weight.grad, reference.grad)

    def test_float64_stays_float64(self):
        got, wanted = self.run(nn.Parameter(torch.full((2,), 0.1, dtype=torch.float64)), lambda w: (w * w).sum())
        assert got.dtype == torch.float64
        assert torch.equal(got, wanted)

    def test_complex_stays_complex(self):
        got, wanted = self.run(nn.Parameter(torch.tensor([1 + 2j])), lambda w: (w * w.conj()).real.sum())
        assert got.dtype == torch.complex64
        assert torch.equal(got, wanted)

    @pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
    def test_a_gradient_with_a_graph_keeps_it(self):
        weight = nn.Parameter(torch.tensor([3.0]))
        scale = make_scale(Scaling("static", init=4.0), CPU).value
        ledger = GradientLedger(lambda: [weight], True)
        ledger.before_backward(0, scale)
        (weight.pow(3).sum() * scale).backward(create_graph=True)
        ledger.after_backward(0, scale)
        ledger.unscale_()
        assert weight.grad.item() == 27
        (second,) = torch.autograd.grad(weight.grad, weight)
        assert second.item() == 18
        weight.grad = None  # breaks the cycle


def embedding_loss(weight, sparse):
    if sparse:
        return nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True).sum()
    return (weight * 0.5).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_syncs(dtype):
    twin = Twin(dtype)
    with NoSync():
        twin.backward(0, [1.0, 1.0])
        twin.backward(0, [1.0, 1.0])
        twin.backward(1, [1.0, 1.0], not_finite=torch.tensor(False))
        twin.ledger.unscale_()
        twin.zero_grad(False)
        twin.backward(0, [1.0, 1.0])
        collected = twin.ledger.collect()
        _, found = global_norm(collected.grads)
        collected.overflowed(found)
        twin.ledger.consumed()
        twin.scales[0].update(found)
        twin.backward(0, [1.0, 1.0])
        twin.ledger.close()


def test_no_gradient_is_kept_alive_by_the_ledger():
    twin = Twin()
    twin.backward(0, [1.0, 1.0])
    twin.backward(1, [1.0, 1.0])
    twin.step()
    twin.zero_grad(True)
    holders = [vars(twin.ledger)[name] for name in ("_stash", "_mark", "_scale", "_source", "_flags")]
    assert all(tensor.numel() == 1 for holder in holders for tensor in tensors_in(holder))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []
