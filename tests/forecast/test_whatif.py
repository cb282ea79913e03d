"""What-if: exact rounding of fp32 steps, told apart by what the plan stores low, and equal to what a low run does."""

from __future__ import annotations

import copy
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from benchmarks.whatif import ALLOWED, compare
from halfstep import FULL, Rule, Scaling
from halfstep.errors import FormatError, PlanError, SessionError, SetupError
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM
from halfstep.lab.workloads.load import Regression
from tests.contracts.cases import batch, make, snapshot
from tests.contracts.test_training import train_faint
from tests.preflight.test_absorbed import classifier, trained


class Weigh(nn.Module):
    """Its weight's gradient is its input, the gradient of its output 1."""

    def __init__(self, weights):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weights))

    def forward(self, x):
        return x * self.weight


def row_of(found, kind, fmt="fp16", module=""):
    return next(row for row in found.rows if (row.module, row.kind, row.format) == (module, kind, fmt))


def weighed(inputs, weights=None, formats=("fp16",), **options):
    model = Weigh(weights or [1.0] * len(inputs))
    return halfstep.whatif(lambda: model(torch.tensor(inputs)).sum(), model, formats, steps=1, **options)


def test_shares_of_gradients_by_hand_on_both_sides_of_each_boundary():
    tie, above = 2.0**-25, 2.0**-25 * (1 + 2.0**-7)  # exact in bf16
    row = row_of(weighed([tie, above, 2.0**-26, 0.0, 65536.0, 1.0], loss_scale=1.0), "weight_grad")
    assert row.lost == 2 / 5
    assert row.saturated == 1 / 6
    assert row.stats.amax == 65536.0


def test_one_format_is_enough_and_one_named_twice_counts_once():
    assert weighed([1.0], formats="fp16").formats == ("fp16",)
    assert weighed([1.0], formats=(torch.float16, "fp16", halfstep.BF16)).formats == ("fp16", "bf16")


def test_a_loss_scale_moves_gradients_but_not_weights_and_activations():
    found = weighed([2.0**-26, 1.0], [2.0**-26, 1.0], loss_scale=4.0)
    assert row_of(found, "weight_grad").lost == 0.0
    assert row_of(found, "weight_grad").scale == 4.0
    assert row_of(found, "weight").lost == 0.5
    assert row_of(found, "weight").scale == 1.0
    assert row_of(found, "activation").lost == 0.5


def test_signal_to_noise_by_hand():
    """1 + 2**-11 lies halfway between 1 and the next fp16 value and rounds to 1: the error is 2**-11."""
    value = 1 + 2.0**-11
    found = weighed([1.0], [value], formats=("fp16", "tf32"))
    expected = 20 * math.log10(value / 2.0**-11)
    assert row_of(found, "weight").snr_db == pytest.approx(expected)
    assert row_of(found, "weight", "tf32").snr_db == pytest.approx(expected)
    assert row_of(weighed([1.0], [1.0]), "weight").snr_db == math.inf


def test_e4m3_saturates_where_fp16_does_not():
    found = weighed([1.0, 1.0], [500.0, 448.0], formats=("fp16", "e4m3"))
    assert row_of(found, "weight", "e4m3").saturated == 0.5
    assert "e4m3: safe loss scales" in str(found)
    assert "one static scale for all tensors is assumed" in str(found)
    assert row_of(found, "weight").saturated == 0.0


def test_what_is_lost_above_does_not_come_back_below():
    """1024 gradients of 2**-26 add up to 2**-16, which fp16 has; but each of them is lost before."""

    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Weigh([1.0]), Weigh([1.0] * 1024)

        def forward(self, x):
            return self.second(self.first(x).expand(1024))

    model = Spread()
    plan = dataclasses.replace(halfstep.level("O2", "fp16"), input="low")  # fp32 inputs would make all of it fp32
    found = halfstep.whatif(
        lambda: model(torch.ones(1)).sum() * 2.0**-26, model, ("fp16",), steps=1, loss_scale=1.0, plan=plan
    )
    assert row_of(found, "weight_grad", module="first").stats.amax == 2.0**-16
    assert row_of(found, "weight_grad", module="first").lost == 1.0


def test_scales_follow_the_rule_of_the_largest_gradient():
    scales = weighed([4.0, 0.5]).scale("fp16")
    assert scales.largest == 65504 / 4
    assert scales.largest_gradient == 4.0
    assert scales.recommended == 128.0  # the power of two below 65504 / 4 / 64
    assert scales.settles == (8192.0, 8192.0)
    assert scales.edit == Scaling("static", init=128.0)


@pytest.mark.parametrize(("later", "recommended"), [(4.0, 512.0), (127.0, 512.0), (128.0, 4.0), (256.0, 2.0)])
def test_gradients_larger_than_the_scouted_one_lower_the_recommended_scale_that_they_do_not_fit(later, recommended):
    model, inputs = Weigh([1.0]), iter([[1.0], [later], [1.0]])  # 65504 / 128 is less than 512, which suits the first
    found = halfstep.whatif(lambda: model(torch.tensor(next(inputs))).sum(), model, ("fp16",), steps=1)
    assert found.scale("fp16").recommended == recommended


class Faded(nn.Module):
    """Its last operation shrinks gradients a thousandfold: the largest one is at no module's output that is low."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x) * 2.0**-10


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_a_gradient_between_modules_limits_the_scale_as_well(plan):
    model = Faded()

    def closure():
        return nn.functional.mse_loss(model(torch.ones(8, 4)), torch.ones(8, 1), reduction="sum")

    scales = halfstep.whatif(closure, model, ("fp16",), plan=plan).scale("fp16")
    below = 2.0 ** math.floor(math.log2(scales.largest))
    for scale, skipped in ((scales.recommended, 0), (below, 0), (2 * below, 1)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with halfstep.initialize(model, optimizer, plan, low="fp16", loss_scale=scale) as session:
            session.backward(closure())
            session.step()
            assert session.status().skipped == skipped


class ReturnsLoss(nn.Module):
    """As Hugging Face models do; `loss` computes it of logits and labels."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(16, 8), loss

    def forward(self, x, y):
        return self.loss(self.layer(x), y)


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_the_gradient_of_a_full_loss_inside_forward_is_full(plan):
    torch.manual_seed(0)
    model, x, y = ReturnsLoss(nn.functional.cross_entropy), torch.randn(32, 16), torch.arange(32) % 8
    found = halfstep.whatif(lambda: model(x, y), model, ("fp16",), steps=1, plan=plan, loss_scale=2.0**17)
    (row,) = (row for row in found.rows if (row.module, row.kind) == ("", "activation_grad"))
    assert (row.low, row.saturated) == (False, 0.0)
    assert found.stay_full["fp16"] == ()
    assert found.scale("fp16").largest > 2.0**17
    with halfstep.initialize(
        model, torch.optim.SGD(model.parameters()), plan, low="fp16", loss_scale=2.0**17
    ) as session:
        assert halfstep.blame(session, lambda: model(x, y)) is None
        session.backward(model(x, y))
        assert not bool(session.step().skipped)


def test_the_gradient_of_a_low_loss_inside_forward_saturates_and_limits_the_scale():
    torch.manual_seed(0)
    model = ReturnsLoss(lambda logits, y: (logits - y[:, None]).pow(2).mean())
    x, y = torch.randn(32, 16), torch.zeros(32).bfloat16()
    found = halfstep.whatif(lambda: model(x, y), model, ("fp16",), steps=1, loss_scale=2.0**17)
    (row,) = (row for row in found.rows if (row.module, row.kind) == ("", "activation_grad"))
    assert (row.low, row.saturated) == (True, 1.0)
    assert found.scale("fp16").recommended <= 32768.0
    y = y.half()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters()), "O2", low="fp16") as session:
        assert (
            halfstep.blame(session, lambda: model(x, y)) is None
        )  # before the first step, at 32768, to which a low loss limits
        session.backward(model(x, y))
        record = session.step()
        assert (bool(record.skipped), float(record.scale)) == (False, 32768.0)


def test_the_loss_scale_of_the_plan_does_not_move_what_is_recommended():
    gradients = [2.0**-20, 2.0**-22]
    scaled = halfstep.level("O2", "fp16").edit(Scaling("static", init=1024.0))
    assert weighed(gradients, plan=scaled).scales == weighed(gradients).scales


def test_a_dynamic_scale_settles_between_the_limits_of_the_steps():
    model, inputs = Weigh([1.0]), iter([[1.0], [4.0], [1.0], [64.0]])  # the last is for the forward in fp16
    found = halfstep.whatif(lambda: model(torch.tensor(next(inputs))).sum(), model, ("fp16",), steps=2)
    assert found.scale("fp16").settles == (8192.0, 32768.0)


def test_gradients_that_grow_beyond_the_scale_are_judged_at_one_that_they_fit():
    inputs, model = iter([*3 * [[1.0, 2.0**-10]], [30000.0, 300.0], [1.0, 1.0]]), Weigh([1.0, 1.0])
    found = halfstep.whatif(lambda: model(torch.tensor(next(inputs))).sum(), model, ("fp16",), steps=3)
    row, scale = row_of(found, "weight_grad"), found.scale("fp16")
    assert row.scale <= scale.largest < 4
    assert (row.lost, row.saturated, found.stay_full["fp16"]) == (0.0, 0.0, ())
    assert row.snr_db > 60  # of the last step alone, whose values fp16 holds exactly or to 11 bits


@pytest.mark.parametrize(("offset", "stays"), [(0.0, False), (300.0, True)])
def test_the_signal_of_an_activation_is_what_varies_about_its_mean(offset, stays):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    nn.init.constant_(model[0].bias, offset)  # bf16 has numbers 2 apart there, and outputs vary by 1
    x = torch.randn(64, 8)
    found = halfstep.whatif(lambda: model(x).square().mean(), model, ("bf16",), steps=1)
    assert [each.place for each in found.stay_full["bf16"]] == ["0"] * stays


def test_bf16_needs_no_scale():
    scales = weighed([4.0, 0.5], formats=("bf16",)).scale("bf16")
    assert scales.recommended == 1.0
    assert scales.edit == Scaling("none")


def test_the_smallest_safe_scale_keeps_20_db_and_half_of_it_does_not():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(10_000, generator=generator) * 2.0**-30
    smallest = weighed(gradients.tolist()).scale("fp16").smallest
    for scale, enough in ((smallest, True), (smallest / 4, False)):
        rounded = (gradients * scale).half().float() / scale
        noise = (rounded - gradients).square().sum() / gradients.square().sum()
        assert (noise < 0.01) == enough


def test_what_the_plan_keeps_full_is_told_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def closure():
        return model(torch.ones(2, 4)).square().mean() * 2.0**-40

    found = halfstep.whatif(closure, model, ("fp16",), steps=1, loss_scale=1.0)
    assert row_of(found, "weight", module="0").low
    assert not row_of(found, "weight", module="1").low
    assert not row_of(found, "weight_grad", module="1").low
    ruled = halfstep.level("O2", "fp16").edit(Rule("0", FULL))
    assert not row_of(halfstep.whatif(closure, model, ("fp16",), steps=1, plan=ruled), "weight", module="0").low


def test_what_computes_in_fp64_is_not_low():
    model = nn.ModuleDict({"low": nn.Linear(4, 4), "wide": nn.Linear(4, 4).double()})
    nn.init.ones_(model["wide"].weight)

    def closure():
        return model["wide"](model["low"](torch.ones(2, 4)).double()).mean()  # whose gradients bf16 has

    rows = halfstep.whatif(closure, model, ("fp16",), steps=1).rows
    assert {row.low for row in rows if row.module == "wide"} == {False}
    assert any(row.low for row in rows if row.module == "low")


def test_tensors_inside_an_output_are_seen_whatever_holds_them():
    @dataclasses.dataclass
    class Held:
        hidden: torch.Tensor

    class Holding(nn.Linear):
        def forward(self, x):
            return Held(super().forward(x) * 2)

    model = Holding(4, 4)
    rows = halfstep.whatif(lambda: model(torch.ones(2, 4)).hidden.sum(), model, ("fp16",), steps=1).rows
    assert {row.kind for row in rows} == {"weight", "activation", "activation_grad", "weight_grad"}


def test_a_learning_rate_in_a_tensor_stays_the_tensor_that_its_owner_writes_to():
    model, lr = Weigh([1.0]), torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def closure():
        lr.mul_(0.5)
        return model(torch.ones(1)).sum()

    halfstep.whatif(closure, model, ("fp16",), steps=2, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


@pytest.mark.parametrize("train", [True, False])
def test_nothing_is_left_behind(train):
    model, optimizer = make()
    inputs, targets = batch(0)
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    before, gradients = copy.deepcopy(snapshot(model, optimizer)), [p.grad for p in model.parameters()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    steps = iter(range(10))

    def closure():
        torch.rand(1), np.random.rand(), random.random()
        inputs, targets = batch(next(steps))
        return nn.functional.mse_loss(model(inputs), targets)

    halfstep.whatif(closure, model, optimizer=optimizer if train else None)
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(a, after[k]) if isinstance(a, torch.Tensor) else a == after[k] for k, a in before.items())
    assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert next(steps) == 5, "one step to see what is low, three, and a forward in fp16"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_of_other_models_and_of_inputs_are_left_alone():
    generator, critic, inputs = nn.Linear(4, 4), nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)

    def closure():
        return critic(generator(inputs)).square().mean()

    closure().backward()
    leaves = [*generator.parameters(), inputs]
    before = [(leaf.grad, leaf.grad.clone()) for leaf in leaves]
    halfstep.whatif(closure, critic)
    assert all(leaf.grad is held and torch.equal(held, was) for leaf, (held, was) in zip(leaves, before, strict=True))


def test_a_format_that_was_not_predicted_is_a_clear_error():
    found = weighed([1.0])
    assert found.scale(torch.float16) is found.scale(halfstep.FP16) is found.scale("fp16")
    assert found.edits(halfstep.FP16) == found.edits("fp16")
    for ask in (found.scale, found.edits):
        with pytest.raises(FormatError, match="e4m3 was not predicted, only fp16"):
            ask("e4m3")
        with pytest.raises(FormatError, match="unknown format 'fp17'"):
            ask("fp17")


def test_an_optimizer_makes_the_steps_training_steps():
    model, seen = Weigh([1.0]), []

    def closure():
        seen.append(float(model.weight.detach()))
        return model(torch.ones(1)).sum()

    halfstep.whatif(closure, model, ("fp16",), steps=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    assert seen == [1.0, 1.0, 0.75, 0.5]


class Loud(nn.Module):
    """Values beyond 65,504 between its second and its third layer."""

    def __init__(self):
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.loud.weight, 3e4)
        nn.init.constant_(self.first.weight, 1.0)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.last(self.norm(self.loud(self.first(x))))


def test_a_module_whose_values_overflow_should_stay_full_and_the_edits_cure_it():
    model = Loud()

    def closure():
        return model(torch.ones(2, 4)).square().mean()

    found = halfstep.whatif(closure, model, ("fp16", "bf16"), steps=1)
    assert [finding.place for finding in found.stay_full["fp16"]] == ["loud"]
    assert "100.0% of the elements overflow" in found.stay_full["fp16"][0].evidence
    assert found.stay_full["bf16"] == ()
    plan = halfstep.level("O2", "fp16")
    for edits, finite in (((), False), (found.edits("fp16"), True)):
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan.edit(*edits)):
            assert bool(torch.isfinite(closure())) == finite


class Scores(nn.Module):
    """Products beyond 65,504 between its own operations, and an output of ordinary size."""

    def __init__(self, size):
        super().__init__()
        self.value, self.size = nn.Linear(4, 4), size

    def forward(self, x):
        scores = (x * self.size) @ (x * self.size).transpose(-1, -2)
        return (scores / self.size**2).softmax(-1) @ self.value(x)


@pytest.mark.parametrize(("size", "bad"), [(100.0, False), (200.0, True)])
def test_a_module_with_a_product_that_overflows_inside_should_stay_full_and_the_edits_cure_it(size, bad):
    model = nn.Sequential(nn.Identity(), Scores(size), nn.Linear(4, 1))

    def closure():
        return model(torch.ones(3, 4)).square().mean()

    found = halfstep.whatif(closure, model, ("fp16", "bf16"), steps=1)
    assert [finding.place for finding in found.stay_full["fp16"]] == ["1"] * bad
    assert found.stay_full["bf16"] == ()
    if bad:
        assert (
            "a product in it reaches 1.6e+05, beyond 65504, the maximum of fp16" in found.stay_full["fp16"][0].evidence
        )
    plan = halfstep.level("O2", "fp16")
    for edits, finite in (((), not bad), (found.edits("fp16"), True)):
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan.edit(*edits)):
            assert bool(torch.isfinite(closure())) == finite


def test_a_mask_that_is_added_to_a_product_is_no_overflow_of_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(4, 4)

        def forward(self, x):
            mask = torch.full((1, 3, 3), -1e9).triu(1)
            return torch.baddbmm(mask, x[None], x[None].transpose(1, 2)).softmax(-1)[0] @ self.value(x)

    model = nn.Sequential(nn.Identity(), Masked(), nn.Linear(4, 1))
    found = halfstep.whatif(lambda: model(torch.ones(3, 4)).square().mean(), model, "fp16", steps=1)
    assert found.stay_full["fp16"] == ()


def test_a_tied_module_and_a_borrowed_one_get_rules_that_resolve():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight
            self.attention = nn.MultiheadAttention(4, 1)
            nn.init.constant_(self.attention.out_proj.weight, 1e-9)

        def forward(self, x):
            return self.attention(x, x, self.two(self.one(x)) * 1e-9)[0]

    model = Tied()
    found = halfstep.whatif(lambda: model(torch.ones(3, 4)).sum() * 1e-20, model, ("fp16",), steps=1)
    cures = {finding.place: finding.cure for finding in found.stay_full["fp16"]}
    assert [rule.pattern for rule in cures["attention.out_proj"]] == ["attention"]
    resolved = halfstep.resolve(halfstep.level("O2", "fp16").edit(*found.edits("fp16")), model)
    assert resolved.of("attention").compute == halfstep.FP32


def test_the_recommended_scale_trains_where_scale_1_does_not():
    from tests.contracts.test_training import FAINT, Faint

    torch.manual_seed(0)
    model = Faint()

    def closure():
        inputs = batch(0)[0]
        return nn.functional.mse_loss(model(inputs), inputs[:, :1]) / FAINT

    scales = halfstep.whatif(closure, model).scale("fp16")
    assert scales.smallest > 1
    first, unscaled = train_faint("O2", loss_scale=1.0)
    _, constant = train_faint("O2", loss_scale=scales.recommended)
    assert unscaled == first
    assert constant < 0.25 * first


SMALL = [
    (CharLM(d=64, layers=2, heads=2, length=32, batch=8), "fp16", "O2", None),
    (CharLM(d=64, layers=2, heads=2, length=32, batch=8), "fp16", "O1", 1.0),
    (CharLM(d=64, layers=2, heads=2, length=32, batch=8), "bf16", "O1", None),
    (Regression(d_in=256, d_out=64), "fp16", "O2", 1.0),
    (Regression(d_in=256, d_out=64), "bf16", "O2", None),
]


@pytest.mark.slow_but("O1-1.0", "bf16-O2")
@pytest.mark.parametrize(("job", "low", "plan", "scale"), SMALL, ids=lambda value: getattr(value, "name", str(value)))
def test_predictions_hold_in_the_low_run(job, low, plan, scale):
    compared = compare(job, low, plan, scale=scale, steps=2)
    assert compared.compared > 8
    assert compared.most <= ALLOWED
    if scale is not None:
        assert compared.lost > 0, "a comparison in which nothing is lost shows nothing"


@pytest.mark.slow_but("regression")
@pytest.mark.parametrize("job", [SMALL[0][0], SMALL[3][0]], ids=lambda job: job.name)
def test_predictions_hold_where_a_scale_is_too_high(job):
    compared = compare(job, "fp16", "O2", scale=2.0**27, steps=1)
    assert compared.skipped == 1
    assert max(difference.really_saturated for difference in compared.differences) > 0.1
    assert compared.most <= ALLOWED


@pytest.mark.slow_but("regression")
@pytest.mark.parametrize("job", [SMALL[0][0], SMALL[3][0]], ids=lambda job: job.name)
def test_the_largest_safe_scale_is_where_steps_begin_to_be_skipped(job):
    largest = compare(job, "fp16", "O2", steps=1).largest
    below = 2.0 ** math.floor(math.log2(largest))
    assert compare(job, "fp16", "O2", scale=below, steps=1).skipped == 0
    assert compare(job, "fp16", "O2", scale=4 * below, steps=1).skipped == 1


def test_predictions_hold_through_the_steps_of_a_recurrent_layer():
    """Where values fall below the format step by step, rounding keeps many of them at the smallest one."""

    class Short(ImdbLSTM):
        def build(self, seed):
            torch.manual_seed(seed)
            return Recurrent()

        def batches(self, seed):
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield torch.randint(50, (16, 100), generator=generator), torch.rand(16, generator=generator).round()

    compared = compare(Short(), "fp16", "O2", scale=1.0, steps=1)
    lost = next(d for d in compared.differences if (d.module, d.kind) == ("words", "activation_grad"))
    assert lost.really_lost > 0.1
    assert compared.most <= ALLOWED


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 1)
        with torch.no_grad():
            self.rnn.bias_ih_l0[16:32] = 2.0  # the forget gate: a gradient falls by an eighth a step

    def forward(self, ids):
        return torch.sigmoid(self.out(self.rnn(self.words(ids))[1][0][-1])).squeeze(-1)


def test_checkpoints_and_compiled_modules_are_counted_once():
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self, how):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 8)
            self.how = how
            if how == "compiled":
                self.inner.compile(backend="eager")

        def forward(self, x):
            if self.how in (True, False):
                return checkpoint(self.inner, x, use_reentrant=self.how)
            return self.inner(x)

    def rows(how):
        model = Deep(how)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        return halfstep.whatif(lambda: model(inputs).square().sum(), model, ("fp16",), steps=1).rows

    plain = rows("plain")
    assert {(row.kind, row.stats.count) for row in plain} == {
        ("weight", 72),
        ("activation", 32),
        ("activation_grad", 32),
        ("weight_grad", 72),
    }
    for how in (True, False, "compiled"):
        assert rows(how) == plain


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        return x


def backwarded(loss):
    loss.backward(retain_graph=True)
    return loss


MODEL = Weigh([1.0])
ONE = torch.ones(1)


OTHER = torch.optim.SGD([torch.ones(1)], lr=0.1)
LBFGS = torch.optim.LBFGS(MODEL.parameters())


@pytest.mark.parametrize(
    ("model", "closure", "options", "error", "message"),
    [
        (MODEL, lambda: 1.0, {}, SessionError, "the closure returned float"),
        (MODEL, lambda: MODEL(torch.ones(2)), {}, SessionError, "not one real number"),
        (MODEL, lambda: MODEL(ONE).detach().sum(), {}, SessionError, "requires no gradient"),
        (MODEL, lambda: MODEL(ONE).sum().backward(), {}, SessionError, "the closure returned NoneType"),
        (MODEL, lambda: backwarded(MODEL(ONE).sum()), {}, SessionError, "ran the backward pass"),
        (MODEL, lambda: MODEL(ONE * torch.inf).sum(), {}, SessionError, "the loss of step 1 is inf even in fp32"),
        (MODEL, lambda: MODEL(ONE).sum() * math.nan, {}, SessionError, "the loss of step 1 is nan even in fp32"),
        (MODEL, lambda: MODEL(ONE).sum() * 0, {}, SessionError, "has a nonzero gradient: all gradients are zero"),
        (MODEL, lambda: MODEL(ONE).sum(), {"formats": ("fp17",)}, FormatError, "unknown format 'fp17'"),
        (MODEL, lambda: MODEL(ONE).sum(), {"formats": ()}, FormatError, "other than fp32"),
        (MODEL, lambda: MODEL(ONE).sum(), {"formats": ("fp32",)}, FormatError, "other than fp32"),
        (MODEL, lambda: MODEL(ONE).sum(), {"formats": 3}, FormatError, "3"),
        (MODEL, lambda batch: MODEL(batch).sum(), {}, SessionError, "calls the closure without arguments"),
        (MODEL, None, {}, SessionError, "takes a function that returns the loss, not NoneType"),
        (MODEL, lambda: MODEL(ONE).sum(), {"optimizer": 3}, SetupError, "optimizer"),
        (MODEL, lambda: MODEL(ONE).sum(), {"optimizer": OTHER}, SetupError, "do not belong to the model"),
        (MODEL, lambda: MODEL(ONE).sum(), {"optimizer": [OTHER]}, SetupError, "is of type list; pass one torch.optim"),
        (MODEL, lambda: MODEL(ONE).sum(), {"optimizer": LBFGS}, SetupError, "calls the closure several times"),
        (MODEL, lambda: MODEL(ONE).sum(), {"steps": 0}, SetupError, "steps is 0"),
        (MODEL, lambda: MODEL(ONE).sum(), {"plan": "O0"}, PlanError, "stores nothing low"),
        (MODEL, lambda: MODEL(ONE).sum(), {"loss_scale": 0}, PlanError, "loss_scale is 0; expected a number"),
        (Integers(), lambda: ONE, {}, SetupError, "no floating-point parameters"),
        (nn.ReLU(), lambda: ONE, {}, SetupError, "no parameters|no floating-point parameters"),
        ("model", lambda: ONE, {}, SetupError, "must be a Module"),
        (nn.Linear(1, 1).half(), lambda: ONE, {}, SetupError, "already in low precision"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_a_clear_error(model, closure, options, error, message):
    with pytest.raises(error, match=message):
        halfstep.whatif(closure, model, **options)
    assert MODEL.weight.grad is None
    assert MODEL.weight.dtype is torch.float32


def test_a_backward_pass_that_cannot_run_twice_is_a_clear_error():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x
            return x * x

        @staticmethod
        def backward(ctx, grad):
            kept = ctx.kept
            del ctx.kept
            return 2 * kept * grad

    model = nn.Linear(4, 4)
    with pytest.raises(SessionError, match=r"cannot run twice over one forward.*AttributeError"):
        halfstep.whatif(lambda: Once.apply(model(torch.ones(1, 4))).sum(), model)
    assert model.weight.grad is None


def test_a_step_that_fails_under_the_plan_is_a_finding_and_the_cured_plan_is_predicted():
    class Judged(nn.Linear):
        def forward(self, x):
            return nn.functional.binary_cross_entropy(torch.sigmoid(super().forward(x)), torch.ones(4, 2).to(x.dtype))

    model = Judged(8, 2)

    def closure():
        return model(torch.ones(4, 8))

    cure = halfstep.OpChange("deny", "binary_cross_entropy")
    found = halfstep.whatif(closure, model, ("fp16",))
    assert model.weight.dtype is torch.float32
    failed, *_ = found.stay_full["fp16"]
    assert (failed.code, failed.cure) == ("BCE on low inputs", (cure,))
    again = halfstep.whatif(closure, model, ("fp16",), plan=halfstep.level("O2", "fp16").edit(cure))
    assert found.scales == again.scales
    assert found.stay_full["fp16"][1:] == again.stay_full["fp16"]


def test_a_step_that_fails_in_fp32_too_is_a_clear_error():
    def closure():
        raise ValueError(f"no batch for {model(torch.ones(4, 8)).sum()}")

    model = nn.Linear(8, 2)
    with pytest.raises(SessionError, match=r"a step under O2 in bf16 fails; .*halfstep\.check.*ValueError: no batch"):
        halfstep.whatif(closure, model, ("fp16",))


def test_a_model_in_a_session_is_refused_and_stays_in_it():
    model = nn.Linear(4, 4)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16") as session:
        with pytest.raises(SetupError, match="call whatif before initialize"):
            halfstep.whatif(lambda: model(torch.ones(1, 4)).sum(), model)
        assert not session.closed
    halfstep.whatif(lambda: model(torch.ones(1, 4)).sum(), model)


def test_a_closure_that_runs_out_of_batches_is_told_how_many_it_needs():
    for fmt, count in (("bf16", 2), ("fp16", 3)):
        batches = iter([ONE] * count)
        with pytest.raises(SessionError, match=f"ran out of batches: what-if calls it {count + 1} times for steps=2"):
            halfstep.whatif(lambda given=batches: MODEL(next(given)).sum(), MODEL, (fmt,), steps=2)
        batches = iter([ONE] * (count + 1))
        halfstep.whatif(lambda given=batches: MODEL(next(given)).sum(), MODEL, (fmt,), steps=2)


def test_an_overflow_that_would_be_absorbed_is_predicted_with_its_two_operations_and_the_cure_trains():
    model, loss = classifier()
    found = halfstep.whatif(loss, model, ("fp16", "bf16"), steps=2, optimizer=torch.optim.AdamW(model.parameters()))
    (finding,) = [each for each in found.stay_full["fp16"] if each.code == "overflow absorbed"]
    assert finding.place.startswith("norm, test_absorbed.py:")
    assert finding.evidence.startswith("mul gives ")
    assert "rsqrt turns that into 0, where fp32 has " in finding.evidence
    assert [each for each in found.stay_full["bf16"] if each.code == "overflow absorbed"] == []
    rules = {edit.pattern: edit for edit in found.edits("fp16") if isinstance(edit, Rule)}
    assert rules["norm"].policy.compute == "full"
    assert trained(halfstep.level("O2", "fp16").edit(*found.edits("fp16"))) == pytest.approx(trained("O0"), abs=0.1)


class OwnNorm(nn.Module):
    """An RMS norm in the model's own forward, which no rule could keep full without the whole model."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(16, 64), nn.Linear(64, 5)
        self.stem.weight.data.mul_(300)

    def forward(self, x):
        y = self.stem(x)
        return self.head(y * torch.rsqrt(torch.mul(y, y).mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize(("factor", "codes"), [(1e6, ["not finite"]), (1.0, [])])
def test_a_loss_that_is_not_finite_in_fp16_is_told_if_nothing_else_explains_it(factor, codes):
    model = nn.Sequential(nn.Linear(8, 8), Gain(factor), nn.Linear(8, 4))
    inputs = torch.ones(4, 8)
    found = halfstep.whatif(lambda: model(inputs).square().mean(), model).stay_full["fp16"]
    assert [each.code for each in found] == codes
    assert all("halfstep.blame" in each.advice for each in found)


class Gain(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor / self.factor


def test_an_absorbed_overflow_in_the_models_own_forward_gets_the_edit_that_denies_its_operation():
    torch.manual_seed(0)
    model, x = OwnNorm(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = halfstep.whatif(lambda: model(x).square().mean(), model, ("fp16",), optimizer=optimizer)
    (finding,) = [each for each in found.stay_full["fp16"] if each.code == "overflow absorbed"]
    assert finding.cure == (halfstep.OpChange("deny", "mul"),)
    assert "plan.edit(OpChange('deny', 'mul'))" in finding.advice
    assert finding.cure[0] in found.edits("fp16")
    with halfstep.initialize(model, optimizer, halfstep.level("O2", "fp16").edit(*finding.cure)) as session:
        codes = [each.code for each in halfstep.check(session, lambda: model(x).square().mean())]
    assert "overflow absorbed" not in codes


def test_a_forward_that_fails_in_fp16_alone_is_said():
    model = nn.Linear(4, 4)

    def loss():
        out = model(torch.ones(2, 4))
        if any(p.dtype is torch.float16 for p in model.parameters()):
            raise ValueError("planted")
        return out.sum()

    (finding,) = [each for each in halfstep.whatif(loss, model, ("fp16",)).stay_full["fp16"]]
    assert (finding.code, finding.severity) == ("step fails", "warning")
    assert "in fp16 raises ValueError: planted" in finding.evidence
