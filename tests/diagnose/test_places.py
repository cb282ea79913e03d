"""What verdicts call a place, a phase and a divisor, and what they do not offer an edit for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from halfstep import NumericsError

PLANS = pytest.mark.parametrize("plan", ["O1", "O2"])
ONES = torch.ones(4, 8)


def session_of(model, plan, **options):
    return halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan, low="fp16", **options)


def blamed(model, plan, loss, **options):
    with session_of(model, plan, **options) as session:
        return halfstep.blame(session, loss)


class Repeats(nn.Module):
    """Multiplies by a gain again and again, in one line."""

    def __init__(self, gain, times):
        super().__init__()
        self.layer, self.head, self.times = nn.Linear(8, 8, bias=False), nn.Linear(8, 1), times
        self.layer.weight.data.copy_(torch.eye(8) * gain)

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return self.head(x)


class NoSelf(Repeats):
    """Multiplies in a method that calls the module something else than self."""

    def forward(this, x):
        for _ in range(this.times):
            x = this.layer(x) * 3
        return this.head(x)


class Powers(Repeats):
    """Takes the fourth power twice."""

    def forward(self, x):
        x = self.layer(x)
        for _ in range(2):
            x = x**4
        return self.head(x)


class Keeps(nn.Module):
    """Reads its weight through a function that a copy of it shares."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = lambda: self.layer.weight

    def forward(self, x):
        return x @ self.weight().to(x.dtype) * 1e6


class Merged(nn.Module):
    """A linear layer whose weight its caller computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 4e4))

    def forward(self, x, weight):
        return nn.functional.linear(x, weight)


@PLANS
@pytest.mark.slow_but("O2")
def test_a_recurrence_that_explodes_in_fp32_too_gets_advice_and_no_edit(plan):
    torch.manual_seed(0)
    model = Repeats(1.5, 100)  # 1.5**100 is 4e17, which fp32 has
    verdict = blamed(model, plan, lambda: model(ONES).float().mean())
    assert (verdict.kind, verdict.operator, verdict.module, verdict.cure) == ("overflow", "linear", "layer", ())
    assert "runs 100 times" in verdict.advice
    assert "plan.edit" not in verdict.advice


@PLANS
@pytest.mark.slow_but("few runs")
@pytest.mark.parametrize(("gain", "times"), [(3.0, 50), (10.0, 7), (20.0, 40)], ids=["loss", "few runs", "itself"])
def test_what_a_recurrence_that_explodes_makes_overflow_in_fp32_is_no_second_fault(plan, gain, times):
    # in fp32, of which the largest is 3.4e38: (3**50)**2 is 5e47; (10**7)**2 is 1e14; 20**40 is 1e52
    torch.manual_seed(0)
    model = Repeats(gain, times)
    verdict = blamed(model, plan, lambda: model(ONES).float().square().mean())
    assert (verdict.kind, verdict.operator, verdict.module, verdict.cure) == ("overflow", "linear", "layer", ())
    assert f"runs {times} times" in verdict.advice
    assert "two faults" not in verdict.advice


@PLANS
@pytest.mark.parametrize("times", [50, 90], ids=["loss", "itself"])
@pytest.mark.slow_but("loss-O1")
def test_a_recurrence_is_known_whatever_its_method_calls_the_module(plan, times):
    # in fp32: (3**50)**2 is 5e47; 3**90 is 9e42
    torch.manual_seed(0)
    model = NoSelf(1.0, times)
    verdict = blamed(model, plan, lambda: model(ONES).float().square().mean())
    assert (verdict.kind, verdict.operator, verdict.outside, verdict.cure) == ("overflow", "mul", False, ())
    assert f"runs {times} times" in verdict.advice
    assert "two faults" not in verdict.advice


def test_a_result_that_fp32_has_is_not_called_too_large_for_it():
    model = Powers(300.0, 2)  # 300**4 is 8.1e9; 300**16 is 4e39
    verdict = blamed(model, "O2", lambda: model(ONES).float().mean())
    assert "exceeds fp16's maximum" in verdict.evidence
    assert "a later result of pow is too large even for fp32" in verdict.advice


def test_what_copies_do_not_change_is_not_said_to_fail_in_fp32():
    torch.manual_seed(0)
    model = Keeps()

    def loss():
        return model(ONES).float().square().mean()

    verdict = blamed(model, "O2", loss, on_failure="warn")
    assert (verdict.kind, verdict.operator, verdict.cure) == ("overflow", "mul", (halfstep.Rule("", halfstep.FULL),))
    assert "fp32" not in verdict.evidence
    assert "not tried: edits are tried on copies of the models" in verdict.advice
    assert blamed(model, halfstep.level("O2", "fp16").edit(*verdict.cure), loss) is None


def test_one_layer_on_many_inputs_is_no_recurrence():
    model = nn.Linear(8, 8)
    model.weight.data.fill_(1e5)
    verdict = blamed(model, "O1", lambda: sum(model(ONES).float().square().mean() for _ in range(9)))
    assert verdict.kind == "overflow"
    assert "run to run" not in verdict.advice


@PLANS
@pytest.mark.parametrize("times", [2, 12])
def test_one_that_only_just_leaves_fp16_gets_an_edit(plan, times):
    torch.manual_seed(0)
    model = Repeats(2e5 ** (1 / times), times)  # ends at 200,000
    verdict = blamed(model, plan, lambda: model(ONES).float().mean())
    assert verdict.kind == "overflow"
    assert verdict.cure != ()


@PLANS
def test_code_outside_of_every_module_is_called_that(plan):
    model, spoiled = nn.Linear(8, 8), ONES * torch.nan
    with session_of(model, plan) as session:
        verdict = halfstep.blame(session, lambda: torch.log(model(ONES).float().mean() * 0))
        of_model = halfstep.blame(session, lambda: model(spoiled).float().mean())
    assert str(verdict).startswith("invalid: log in code outside the model, test_places.py:")
    assert (verdict.module, verdict.outside, of_model.outside) == ("", True, False)
    assert str(of_model).startswith("input data: linear in the model itself, test_places.py:")


@PLANS
def test_class_weights_of_the_closure_are_outside_of_the_model(plan):
    model, counts = nn.Linear(8, 8), torch.tensor([0.0] + 7 * [1.0])
    weights, targets = 1 / counts, torch.tensor([0, 1, 2, 0])
    verdict = blamed(model, plan, lambda: nn.functional.cross_entropy(model(ONES), targets, weight=weights))
    assert str(verdict).startswith("input data: cross_entropy in code outside the model, test_places.py:")


@PLANS
def test_the_first_place_is_that_in_the_weight(plan):
    model = nn.Linear(8, 5)
    model.weight.data[2, 3] = 1e5 if plan == "O2" else torch.inf  # stored in fp16 it is infinite
    verdict = blamed(model, plan, lambda: (model(ONES) + ONES.to(model.weight.dtype) @ model.weight.t()).mean())
    assert "parameter weight holds 1 inf in 40 elements, first at [2, 3]" in verdict.evidence


@PLANS
def test_the_first_place_in_a_transposed_input_is_not_told(plan):
    model, x = nn.Linear(8, 5), torch.ones(8, 4)
    x[5, 1] = torch.nan
    straight = x.t().contiguous()
    with session_of(model, plan) as session:
        verdict = halfstep.blame(session, lambda: model(x.t()).float().mean())
        of_straight = halfstep.blame(session, lambda: model(straight).float().mean())
    assert "1 NaN in 32 elements" in verdict.evidence
    assert "first at" not in verdict.evidence
    assert "first at [1, 5]" in of_straight.evidence


def test_weights_that_the_closure_takes_from_the_model_cannot_be_tried():
    model = Merged()
    verdict = blamed(model, "O1", lambda: model(ONES, model.weight * 3).float().mean())
    assert "not tried: no gradient reached the copies of the session's models" in verdict.advice


def of_gradients(model):
    for p in model.parameters():
        p.grad.mul_(1 / (p.grad * 0).norm())


def by_all(model):
    norm = sum((p.grad.float() ** 2).sum() for p in model.parameters()).sqrt() * 0
    with torch.no_grad():
        for p in model.parameters():
            p.grad = p.grad / norm


def times_infinity(model):
    for p in model.parameters():
        p.grad.mul_(torch.inf)


@PLANS
@pytest.mark.parametrize("clip", [of_gradients, by_all, times_infinity])
def test_an_own_clip_is_after_the_backward_pass(plan, clip):
    model = nn.Linear(8, 8)
    with session_of(model, plan, loss_scale=1.0) as session:

        def train():
            for _ in range(24):
                model.zero_grad()
                session.backward(model(ONES).float().mean())
                session.unscale_()
                clip(model)
                session.step()

        with pytest.raises(NumericsError) as caught:
            train()
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.phase, verdict.cure, verdict.outside) == ("invalid", "after backward", (), True)
    assert ", after the backward pass" in str(verdict)
    # no closure can contain it, and no mask is in it
    assert verdict.advice == (
        f"the gradients were finite until the code between the backward pass and the step, {verdict.where}, changed "
        f"them: check what it passes to {verdict.operator}"
    )
    assert f" in {clip.__name__}" in verdict.where


def divided(gradient):
    return gradient / (gradient * 0).norm()


class Hooked(nn.Module):
    """A linear layer with a hook on the gradient of its result: one of a method, its own, or one defined elsewhere."""

    def __init__(self, register):
        super().__init__()
        self.layer, self.register = nn.Linear(8, 8), register

    def own(self, gradient):
        return divided(gradient)

    def forward(self, x):
        y = self.layer(x)
        if self.register == "lambda":
            y.register_hook(lambda gradient: divided(gradient))
        elif self.register == "method":
            y.register_hook(self.own)
        elif self.register == "function":
            y.register_hook(divided)
        return y


@PLANS
@pytest.mark.parametrize("register", ["lambda", "method", "function"])
def test_a_hook_of_a_model_is_in_it(plan, register):
    torch.manual_seed(0)
    model = nn.Sequential(Hooked(register), nn.Linear(8, 8))
    verdict = blamed(model, plan, lambda: model(ONES).float().square().mean())
    inside = "0" if register == "method" else "0.layer"
    assert (verdict.operator, verdict.module, verdict.outside, verdict.phase) == ("div", inside, False, "backward")


@PLANS
@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_a_hook_of_the_closure_is_in_the_model_whose_gradient_it_gets(plan, low):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))

    def closure():
        y = model(ONES)
        y.register_hook(lambda gradient: gradient / (gradient * 0).norm())
        return y.square().mean()

    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, low=low) as session:
        verdict = halfstep.blame(session, closure)
    assert (verdict.operator, verdict.module, verdict.outside, verdict.cure) == ("div", "", False, ())
    assert " in <lambda>, backward pass" in str(verdict)
    assert "two faults" not in verdict.advice
    assert verdict.advice == (
        "no format helps: div, called on a gradient, is not finite here; keep its inputs in its domain with an "
        "eps or a clamp"
    )


@PLANS
def test_a_function_of_the_script_that_the_closure_makes_a_hook_is_in_the_model(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))

    def closure():
        y = model(ONES)
        y.register_hook(divided)
        return y.float().square().mean()

    verdict = blamed(model, plan, closure)
    assert (verdict.operator, verdict.module, verdict.outside, verdict.cure) == ("div", "", False, ())
    assert " in divided" in verdict.where


def one_element(gradient):
    gradient = gradient.clone()
    gradient[0, 0] = torch.inf
    return gradient


def where_positive(gradient):
    gradient = gradient.clone()
    gradient[gradient > 0] = torch.inf
    return gradient


BROUGHT_IN = [  # with the operators that the releases of torch call
    (one_element, ("copy", "fill"), "inf"),
    (where_positive, ("index_put", "masked_fill"), "inf"),
    (lambda gradient: gradient + gradient.new_tensor(torch.inf), ("add",), "inf"),
    (lambda gradient: gradient * torch.tensor(torch.inf), ("mul",), "inf"),
    (lambda gradient: gradient * torch.tensor(-torch.inf), ("mul",), "-inf"),
    (lambda gradient: gradient * torch.tensor(torch.nan), ("mul",), "NaN"),
]


def with_backward(rule):
    """Returns a network with a module in it, "1.1", whose backward is a rule."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return rule(gradient)

    class Does(nn.Module):
        def forward(self, x):
            return Custom.apply(x)

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), Does()), nn.Linear(16, 2))


@PLANS
@pytest.mark.parametrize(("rule", "operators", "number"), BROUGHT_IN)
def test_a_number_that_a_custom_backward_brings_in_is_its_own(plan, rule, operators, number):
    model = with_backward(rule)
    verdict = blamed(model, plan, lambda: model(ONES).float().square().mean())
    assert (verdict.kind, verdict.module, verdict.phase) == ("invalid", "1.1", "backward")
    assert verdict.operator in operators
    assert verdict.where.startswith("test_places.py:")
    assert verdict.advice == f"the code passes {number} to {verdict.operator}: check where it comes from"


SOME = [torch.inf, 1.0, -torch.inf, *(13 * [1.0])]
OUTSIDE = "the backward of Custom computes these values outside of torch, or sets them: check what it does here"
SEVERAL = [
    (lambda gradient: gradient * torch.tensor(SOME), "mul", "1 inf and 1 -inf in 16 elements"),
    (lambda gradient: gradient * gradient.new_tensor(SOME), "mul", "1 inf and 1 -inf in 16 elements"),
    (
        lambda gradient: torch.from_numpy(gradient.float().numpy() * SOME).to(gradient.dtype),
        "to",
        "in 64 elements: check where",
    ),
    (lambda gradient: gradient.new_tensor([SOME] * 4), "Custom", OUTSIDE),
]


@PLANS
@pytest.mark.parametrize(("rule", "operator", "words"), SEVERAL, ids=["tensor", "new_tensor", "numpy", "whole"])
def test_what_a_custom_backward_makes_out_of_sight_is_no_data(plan, rule, operator, words):
    model = with_backward(rule)
    verdict = blamed(model, plan, lambda: model(ONES).float().mean())
    assert (verdict.kind, verdict.operator, verdict.module, verdict.phase) == ("invalid", operator, "1.1", "backward")
    assert verdict.where.startswith("test_places.py:")
    assert words in verdict.advice
    assert "two faults" not in verdict.advice


def test_data_that_a_custom_backward_reads_is_data():
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weights):
            ctx.save_for_backward(weights)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    model, weights = nn.Linear(8, 8), torch.ones(8)
    weights[3] = torch.inf
    verdict = blamed(model, "O2", lambda: Weighted.apply(model(ONES), weights).float().mean())
    assert (verdict.kind, verdict.operator) == ("input data", "mul")


class Weighs(nn.Module):
    """A linear layer whose result is weighed by a buffer, made from counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("weights", 1 / torch.arange(8.0))

    def forward(self, x):
        return self.layer(x) * self.weights


@PLANS
def test_a_buffer_that_is_not_finite_is_no_weight_that_a_step_spoiled(plan):
    model = Weighs()
    verdict = blamed(model, plan, lambda: model(ONES).float().mean())
    assert (verdict.kind, verdict.cure) == ("weights", ())
    assert "use 0 where a count is 0" in verdict.advice
    assert "learning rate" not in verdict.advice


def test_a_gradient_penalty_is_forward():
    model = nn.Linear(8, 8)

    def loss():
        x = ONES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        return (gradient.norm() * 0).log()

    verdict = blamed(model, "O2", loss)
    assert (verdict.operator, verdict.phase) == ("log", "forward")


@pytest.mark.parametrize(
    ("divide", "words"),
    [
        (lambda y, d: y / d, "the divisor is 0 in 8 of 32 elements"),
        (lambda y, d: y / d[:1, :1], "the divisor is 0 in 1 of 1 element"),
        (lambda y, d: y.div_(d), "the divisor is 0 in 8 of 32 elements"),
        (lambda y, d: y * (1 / d), "the divisor is 0 in 8 of 32 elements"),
        (lambda y, d: y * 0 / (d * 0), "from 0/0; the divisor is 0 in 32 of 32 elements"),
        (lambda y, d: (y * 0).div_(d * 0), "from 0/0; the divisor is 0 in 32 of 32 elements"),
        (lambda y, d: y * 0 / 0.0, "from 0/0"),
        (lambda y, d: (y * 0).div_(0.0), "from 0/0"),
    ],
    ids=["all", "one", "in place", "reciprocal", "0/0", "0/0 in place", "0/0.0", "0/0.0 in place"],
)
def test_a_division_by_zero_says_how_often(divide, words):
    model, divisor = nn.Linear(8, 8), torch.ones(4, 8)
    divisor[:2, :4] = 0
    verdict = blamed(model, "O2", lambda: divide(model(ONES).float(), divisor).mean())
    assert verdict.kind == "invalid"
    assert words in verdict.evidence


def test_a_division_of_large_by_small_has_no_zero_in_it():
    model = nn.Linear(8, 8)
    verdict = blamed(model, "O2", lambda: ((model(ONES) + 1e4).half() / 1e-3).float().mean())
    assert (verdict.kind, verdict.operator) == ("overflow", "div")
    assert "the divisor" not in verdict.evidence
