"""The accumulator against gradients in fp32: whatever the order of backwards, scales and zero_grad, they are equal."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.edits import Scaling
from halfstep.train.processes.collectives import NOT_FINITE
from halfstep.train.scale.accumulator import GradientAccumulator
from halfstep.train.scale.scaling import make_scale
from tests.contracts.cases import Refuses
from tests.scale.reads import global_norm
from tests.scale.sync import NoSync

CPU = torch.device("cpu")
LOW = [torch.bfloat16, torch.float16]


class Twin:
    """Two weights with an accumulator, and what autograd alone makes of the same losses in fp32.

    `backward(loss_id, x)` takes the loss sum(w * x), whose gradient is x; `shape` of the weights is (2,).
    """

    def __init__(self, dtype=torch.float32, *, full_accumulate=True, scalings=None):
        self.weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
        self.wanted = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        scalings = scalings or [Scaling("dynamic", init=1024.0), Scaling("dynamic", init=64.0)]
        self.scales = [make_scale(scaling, CPU) for scaling in scalings]
        self.accumulator = GradientAccumulator(lambda: self.weights, full_accumulate)

    def play(self, story):
        """Does what a story says: names of methods below, each with its arguments."""
        for name, *args in story:
            getattr(self, name)(*args)
        return self

    def backward(self, loss_id, x, which=(0, 1), not_finite=None):
        scale = self.scales[loss_id]
        not_finite = None if not_finite is None else torch.tensor(not_finite)
        self.accumulator.before_backward(loss_id, scale.value)
        loss = sum((self.weights[i] * torch.tensor(x).to(self.weights[i].dtype)).sum().float() for i in which)
        (loss * scale.value).backward()
        self.accumulator.after_backward(
            loss_id, scale.value, {NOT_FINITE: not_finite} if not_finite is not None else None
        )
        sum((self.wanted[i] * torch.tensor(x)).sum() for i in which).backward()

    def reach_nothing(self, loss_id):
        """A backward pass of a loss that is not finite and reaches no parameter."""
        self.accumulator.before_backward(loss_id, self.scales[loss_id].value)
        self.accumulator.after_backward(loss_id, self.scales[loss_id].value, {NOT_FINITE: torch.tensor(True)})

    def fail(self, loss_id):
        """A backward pass that raises."""
        scale = self.scales[loss_id]
        self.accumulator.before_backward(loss_id, scale.value)
        with pytest.raises(ValueError, match="no"):
            (Refuses.apply(self.weights[0]).sum() * scale.value).backward()
        self.accumulator.undo_backward()

    def unscale(self):
        self.accumulator.unscale_()

    def limit(self, loss_id, value):
        self.scales[loss_id].limit(value)

    def halve(self):
        for weight in (*self.weights, *self.wanted):
            weight.grad.mul_(0.5)

    def fill(self, value):
        for weight in (*self.weights, *self.wanted):
            weight.grad = torch.full((2,), value, dtype=weight.dtype)

    def clip(self):
        nn.utils.clip_grad_value_(self.weights, 1.0)

    def zero_grad(self, set_to_none):
        torch.optim.SGD(self.weights).zero_grad(set_to_none=set_to_none)
        torch.optim.SGD(self.wanted).zero_grad(set_to_none=set_to_none)

    def expect(self, skipped, overflowed):
        """Ends a step and asserts whether it is skipped and which losses overflowed."""
        assert self.step() == (skipped, overflowed)

    def step(self):
        """Ends a step as a session does; returns whether it is skipped and which losses overflowed."""
        collected = self.accumulator.collect()
        _, found = global_norm(collected.grads)
        flags = collected.overflowed(found)
        self.accumulator.consumed()
        for loss, flag in flags.items():
            self.scales[loss].update(flag)
        noted = collected.found is not None and bool(collected.found)
        return bool(found) or noted, {loss: bool(flag) for loss, flag in flags.items()}

    def true(self):
        """The true gradients that a step would use, weight by weight."""
        collected = self.accumulator.collect()
        found = {p: g.float() * collected.inverse for p, g in zip(collected.params, collected.grads, strict=True)}
        return [found[w].tolist() if w in found else None for w in self.weights]

    def check(self):
        wanted = [None if w.grad is None else w.grad.tolist() for w in self.wanted]
        assert str(self.true()) == str(wanted)  # as text, so that nan equals nan


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view, lambda t: torch._neg_view(t.conj())])
def test_gradients_are_collected_and_unscaled_as_they_are_and_not_as_their_memory_is(view):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    scale = make_scale(Scaling("static", init=8.0), CPU)
    accumulator = GradientAccumulator(lambda: [weight], full_accumulate=True)
    accumulator.before_backward(0, scale.value)
    weight.grad = view(torch.tensor([8 + 16j, -8j]))
    wanted = weight.grad.clone()
    accumulator.after_backward(0, scale.value)
    (grad,) = accumulator.collect().grads
    assert (grad.is_conj(), grad.is_neg()) == (False, False)
    assert torch.equal(grad, wanted)
    accumulator.unscale_()
    assert torch.equal(weight.grad, wanted / 8)


# Numbers are eighths, so that every sum is exact in every format and equality is bit-equality.
ONE, TWO = ("backward", 0, [1.0, 2.0]), ("backward", 0, [0.5, 0.25])
OTHER = ("backward", 1, [0.5, 0.25])  # another loss
GROWING = [Scaling("dynamic", init=64.0, growth_interval=1)]
SUMS = {
    "one backward": [("backward", 0, [0.5, -3.0])],
    "accumulation": [("backward", 0, [x, -x]) for x in (0.5, 0.25, 3.0)],
    "two losses with scales of their own": [ONE, OTHER, ("backward", 0, [4.0, 0.125])],
    "losses that reach different weights": [(*ONE, [0]), (*OTHER, [1])],
    "a scale that changed between two backwards": [ONE, ("limit", 0, 16.0), TWO],
    "unscale, then another backward": [ONE, ("unscale",), TWO],
    "gradients that the caller changed": [ONE, ("unscale",), ("halve",), OTHER],
    "stale gradients under another loss": [ONE, ("step",), OTHER],
    "stale true gradients": [ONE, ("unscale",), ("step",), TWO],
    "zero_grad without a step": [ONE, ("unscale",), ("zero_grad", True), OTHER],
    "gradients from before the accumulator": [("fill", 3.0), ONE],
    "backward that raises under another scale": [ONE, ("fail", 1)],
    "backward that raises under another scale, then another": [ONE, ("fail", 1), OTHER],
    "backward that raises under the same scale": [ONE, ("fail", 0)],
    "backward that raises as the first": [("fail", 0), OTHER],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
class TestSum:
    @pytest.mark.parametrize("story", SUMS.values(), ids=SUMS)
    def test_is_that_of_fp32(self, dtype, story):
        Twin(dtype).play(story).check()

    def test_unscale_gives_true_fp32_gradients_and_is_idempotent(self, dtype):
        twin = Twin(dtype).play([ONE, ("unscale",), ("unscale",)])
        assert twin.weights[1].grad.tolist() == [1.0, 2.0]
        assert twin.weights[1].grad.dtype == torch.float32
        assert twin.accumulator.collect().inverse.item() == 1
        twin.play([TWO])
        assert twin.weights[0].grad.tolist() == [1.5, 2.25]  # true again, as the caller left them

    @pytest.mark.parametrize("between", [[("zero_grad", True)], [("zero_grad", False)], []])
    def test_next_step_after_growth_and_of_stale_gradients(self, dtype, between):
        twin = Twin(dtype, scalings=GROWING)
        for x in (1.0, 0.5, 0.125):
            twin.play([*between, ("backward", 0, [x, -x]), ("check",), ("expect", False, {0: False})])

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_next_step_after_an_overflow(self, dtype, set_to_none):
        twin = Twin(dtype).play([("backward", 0, [math.inf, 1.0]), ("expect", True, {0: True})])
        assert twin.scales[0].value.item() == 512
        twin.play([("zero_grad", set_to_none), TWO, ("check",), ("expect", False, {0: False})])

    def test_stale_gradients_are_rescaled_in_place(self, dtype):
        twin = Twin(dtype, scalings=GROWING).play([ONE, ("unscale",)])
        held = twin.weights[0].grad
        twin.play([("step",), TWO])
        assert twin.weights[0].grad is held
        assert held.tolist() == [1.5 * 128, 2.25 * 128]

    def test_a_parameter_that_is_added_later(self, dtype):
        twin = Twin(dtype).play([ONE])
        for weights in (twin.weights, twin.wanted):
            weights.append(nn.Parameter(torch.ones_like(weights[0])))
        twin.play([(*OTHER, [0, 1, 2]), ("check",)])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("second", [0, 1], ids=["same loss", "another loss"])
def test_a_second_pass_sums_the_uses_of_a_weight_in_fp32(dtype, second):
    """As of a tied weight; between the passes user code may assign a gradient in the weight's own format."""
    twin, (small, large) = Twin(dtype), (2.0**-9 if dtype is torch.bfloat16 else 2.0**-12, 1.0)
    twin.play([("backward", 0, [1.0, 1.0], [0])])
    scale = twin.scales[second].value
    twin.accumulator.before_backward(second, scale)
    used = [twin.weights[0] * torch.tensor(x, dtype=dtype) for x in (large, small)]
    (sum(each.sum().float() for each in used) * scale).backward()
    twin.accumulator.after_backward(second, scale)
    twin.accumulator.unscale_()
    assert twin.weights[0].grad.tolist() == [2.0 + small] * 2
    twin.weights[0].grad = torch.ones(2, dtype=dtype)
    assert twin.weights[0].grad.dtype is dtype


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
            twin.accumulator.unscale_()
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
    @pytest.mark.parametrize(
        ("story", "full_accumulate", "wide"),
        [
            ([ONE], True, False),
            ([ONE, ONE], True, True),
            ([ONE, ONE], False, False),  # the plan keeps low sums
            ([ONE, OTHER, ("step",), ("zero_grad", True), ONE], True, False),
        ],
    )
    def test_is_fp32_for_sums(self, dtype, story, full_accumulate, wide):
        twin = Twin(dtype, full_accumulate=full_accumulate).play([*story, ("check",)])
        assert twin.weights[0].grad.dtype == (torch.float32 if wide else dtype)
        assert wide or twin.weights[0].grad_dtype in (dtype, None)

    def test_sums_go_on_past_what_the_low_format_can_count(self, dtype):
        Twin(dtype, scalings=[Scaling("static", init=16.0)]).play([("backward", 0, [1.0, 0.125])] * 600).check()

    def test_close_leaves_true_gradients_and_the_format_of_new_ones_as_it_was(self, dtype):
        twin = Twin(dtype).play([ONE, ONE])
        twin.accumulator.close()
        assert twin.weights[0].grad.tolist() == [2.0, 4.0]
        twin.zero_grad(True)
        twin.accumulator.close()
        assert twin.weights[0].grad_dtype in (dtype, None)
        weight = twin.weights[0]
        weight.data = weight.data.double()  # as a later model.double() does
        weight.sum().backward()
        assert weight.grad.dtype is torch.float64


FINE, INFINITE, NAN = [1.0, 1.0], [math.inf, 1.0], [math.nan, 1.0]
BOTH = (0, 1)
OVERFLOWS = {
    "in the first of two losses": [
        ("backward", 0, INFINITE), ("backward", 1, FINE), ("expect", True, {0: True, 1: False}),
    ],
    "in the second of two losses": [
        ("backward", 0, FINE), ("backward", 1, NAN), ("expect", True, {0: False, 1: True}),
    ],
    "in one of several accumulated": [
        ("backward", 0, FINE), ("backward", 0, INFINITE), ("backward", 0, FINE), ("expect", True, {0: True}),
    ],
    "that the caller clips away is remembered": [
        ("backward", 0, INFINITE), ("unscale",), ("clip",), ("expect", True, {0: True}),
    ],
    "of the loss alone, as no gradients tell": [("backward", 0, FINE, BOTH, True), ("expect", True, {0: False})],
    "of the first of several accumulated losses alone": [
        ("backward", 0, FINE, BOTH, True), ("backward", 0, FINE, BOTH, False), ("expect", True, {0: False}),
    ],
    "not of a finite loss": [("backward", 0, FINE, BOTH, False), ("expect", False, {0: False})],
    "of a loss that reaches no parameter does not count": [
        ("reach_nothing", 0), ("backward", 1, FINE, BOTH, False), ("expect", False, {1: False}),
    ],
    "of a loss that reaches nothing leaves what another loss held": [
        ("backward", 1, FINE), ("reach_nothing", 0), ("expect", False, {1: False, 0: False}),
    ],
    "is settled by its step": [
        ("backward", 0, FINE, BOTH, True), ("expect", True, {0: False}),
        ("backward", 0, FINE, BOTH, False), ("expect", False, {0: False}),
    ],
}  # fmt: skip


class TestOverflow:
    @pytest.mark.parametrize("story", OVERFLOWS.values(), ids=OVERFLOWS)
    def test_is_laid_to_its_loss(self, story):
        Twin().play(story)

    def test_by_the_scale_alone(self):
        # 3 * 1024 * 64 is beyond fp16, 3 * 64 is not: the scale of loss 0 is to blame, and only it backs off.
        twin = Twin(torch.float16, scalings=[Scaling("dynamic", init=65536.0), Scaling("dynamic", init=64.0)])
        twin.play([("backward", 0, [3.0, 1.0]), ("backward", 1, [3.0, 1.0]), ("expect", True, {0: True, 1: False})])
        assert [scale.value.item() for scale in twin.scales] == [32768, 64]

    def test_made_by_the_caller_skips_but_blames_no_scale(self):
        twin = Twin().play([ONE, ("unscale",)])
        twin.weights[0].grad.fill_(math.nan)
        twin.expect(True, {0: False})

    def test_losses_that_share_one_scale_are_added_in_place_and_blamed_together(self):
        twin = Twin(scalings=[Scaling("static", init=64.0)])
        twin.scales = [twin.scales[0]] * 2
        twin.play([("backward", 0, INFINITE), ("backward", 1, FINE)])
        assert twin.accumulator.collect().inverse.item() == 1 / 64
        twin.expect(True, {0: True, 1: True})

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("loss_id", [0, 1])
    @pytest.mark.parametrize("between", [[], [("unscale",)]])
    def test_that_the_caller_dropped_by_zero_grad_is_forgotten(self, set_to_none, loss_id, between):
        twin = Twin().play([("backward", 0, INFINITE, BOTH, True), *between, ("zero_grad", set_to_none)])
        skipped, overflowed = twin.play([("backward", loss_id, FINE, BOTH, False)]).step()
        assert not skipped
        assert not any(overflowed.values())


class TestCollect:
    def test_leaves_out_parameters_without_a_gradient(self):
        twin = Twin().play([(*ONE, [1])])
        collected = twin.accumulator.collect()
        assert [p is twin.weights[1] for p in collected.params] == [True]
        assert collected.grads[0] is twin.weights[1].grad

    def test_has_the_scale_of_the_backward_not_of_later(self):
        twin = Twin().play([ONE])
        twin.scales[0].update(torch.tensor(True))
        assert twin.accumulator.collect().scale.item() == 1024
        assert twin.accumulator.collect().inverse.item() == 1 / 1024

    def test_has_the_scale_of_the_last_of_several_losses(self):
        twin = Twin().play([ONE, OTHER])
        twin.scales[1].update(torch.tensor(True))
        assert twin.accumulator.collect().scale.item() == 64
        assert twin.accumulator.collect().inverse.item() == 1

    def test_inverse_of_a_scale_that_is_no_power_of_two(self):
        twin = Twin(scalings=[Scaling("static", init=1000.0)]).play([ONE])
        assert twin.accumulator.collect().inverse.item() == torch.tensor(1 / 1000, dtype=torch.float64).float().item()

    def test_a_parameter_listed_twice_counts_once(self):
        twin = Twin()
        twin.weights.append(twin.weights[0])
        twin.play([ONE, ("unscale",)])
        assert twin.weights[0].grad.tolist() == [1.0, 2.0]
        assert len(twin.accumulator.collect().params) == 2

    def test_of_nothing_is_empty_and_clean(self):
        collected = Twin().accumulator.collect()
        assert (collected.params, collected.grads, collected.losses) == ([], [], ())
        assert not collected.found

    def test_names_the_losses_whose_backward_did_not_raise(self):
        assert Twin().play([ONE, ("fail", 1)]).accumulator.collect().losses == (0,)
        assert Twin().play([("fail", 0), OTHER]).accumulator.collect().losses == (1,)
        assert Twin().play([("fail", 0)]).accumulator.collect().params == []


class TestKindsOfGradients:
    def run(self, param, loss, *, ids=(0, 0, 1)):
        """Three backwards of `loss(param)` under two scales; returns the true gradient and autograd's own."""
        wide = torch.float32 if param.dtype in LOW else param.dtype
        reference = nn.Parameter(param.detach().to(wide))
        scales = [make_scale(Scaling("static", init=init), CPU) for init in (1024.0, 64.0)]
        accumulator = GradientAccumulator(lambda: [param], True)
        for loss_id in ids:
            accumulator.before_backward(loss_id, scales[loss_id].value)
            (loss(param) * scales[loss_id].value).backward()
            accumulator.after_backward(loss_id, scales[loss_id].value)
            loss(reference).backward()
        accumulator.unscale_()
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
        sparse = itertools.cycle([True, True, False, False])  # a backward and its reference, in turn
        got, wanted = self.run(nn.Parameter(torch.ones(5, 2)), lambda w: embedding_loss(w, next(sparse)), ids=(0, 1, 0))
        assert torch.equal(got, wanted)

    @pytest.mark.parametrize(
        ("value", "loss"),
        [
            (torch.full((2,), 0.1, dtype=torch.float64), lambda w: (w * w).sum()),
            (torch.tensor([1 + 2j]), lambda w: (w * w.conj()).real.sum()),
        ],
    )
    def test_float64_and_complex_stay_so(self, value, loss):
        got, wanted = self.run(nn.Parameter(value), loss)
        assert got.dtype == value.dtype
        assert torch.equal(got, wanted)

    @pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
    def test_a_gradient_with_a_graph_keeps_it(self):
        weight = nn.Parameter(torch.tensor([3.0]))
        scale = make_scale(Scaling("static", init=4.0), CPU).value
        accumulator = GradientAccumulator(lambda: [weight], True)
        accumulator.before_backward(0, scale)
        (weight.pow(3).sum() * scale).backward(create_graph=True)
        accumulator.after_backward(0, scale)
        accumulator.unscale_()
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
        twin.backward(1, [1.0, 1.0], not_finite=False)
        twin.accumulator.unscale_()
        twin.zero_grad(False)
        twin.backward(0, [1.0, 1.0])
        collected = twin.accumulator.collect()
        _, found = global_norm(collected.grads)
        collected.overflowed(found)
        twin.accumulator.consumed()
        twin.scales[0].update(found)
        twin.backward(0, [1.0, 1.0])
        twin.accumulator.close()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gradients_that_are_reduced_are_made_in_the_format_of_their_buckets_again(dtype):
    """After `unscale_` they are fp32; those that an LSTM makes for low weights would stay so."""
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    accumulator = GradientAccumulator(lambda: [weight], True, reduced=lambda: True)
    one = torch.ones(())
    for unscaled in (True, False):
        accumulator.before_backward(0, one)
        assert weight.grad is None or weight.grad.dtype is dtype
        weight.sum().float().backward()
        assert weight.grad.dtype is dtype
        assert weight.grad_dtype is dtype
        accumulator.after_backward(0, one)
        if unscaled:
            accumulator.unscale_()
            assert weight.grad.dtype is torch.float32
    assert weight.grad.tolist() == [2.0, 2.0]
