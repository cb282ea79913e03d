"""What check finds in a traced step: each fault is named with its place, and its cure cures."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import FULL, OpChange, Rule, Scaling
from tests.contracts.cases import Same
from tests.preflight.planted import Does, Two, checked, loss_of, only, opened, product, steps


@dataclass(frozen=True)
class Row:
    """A planted function, and the fault that check must name in it; `code` None: nothing is to be found.

    `says` are parts of place, evidence and advice, `cure` what it must be. `trains` says what a step gives as it is,
    None where it raises; under the cure it gives a finite loss. `alone`: there is no other finding.
    """

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    code: str | None = None
    says: tuple[str, ...] = ()
    severity: str = "warning"
    plan: str = "O2"
    low: str = "fp16"
    trains: bool | None = None
    alone: bool = True
    cure: tuple[Any, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def check_row(row):
    model = Two(Does(row.function))
    found, plan = checked(model, row.plan, row.low, **row.options)
    if row.alone:
        assert [finding.code for finding in found] == ([] if row.code is None else [row.code])
    if row.code is None:
        return
    fault = next(finding for finding in found if finding.code == row.code)
    assert fault.severity == row.severity
    assert fault.place.startswith("planted, test_trace.py:")
    assert [words for words in row.says if words not in f"{fault.place}\n{fault.evidence}\n{fault.advice}"] == []
    if row.cure is not None:
        assert fault.cure == row.cure
    if row.trains is not None:
        assert steps(model, plan, **row.options) is row.trains
    if fault.cure:
        assert steps(model, plan.edit(*fault.cure), **row.options)


def parametrize(rows):
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in rows])


# constants


def zero_row(x):
    """The first row becomes zero, whose norm only eps keeps away from 0/0."""
    return torch.cat([x[:1] * 0, x[1:]])


def by_upper_bound(x):
    return x.clamp(-1.0, 1e-9)


def by_lower_bound(x):
    return x.clamp(1e-9, 1.0)


def vanishing(name, function, operator, value):
    return Row(name, function, "constant vanishes", (operator, value), trains=False, alone=False)


def plus(eps):
    """Divides by the size of a value plus an eps."""
    return lambda x: x / (x.abs() + eps)


EPS = [
    vanishing("add", lambda x: zero_row(x) / (zero_row(x).abs().sum(-1, keepdim=True) + 1e-8), "add", "1e-08"),
    vanishing("clamp", lambda x: zero_row(x) / zero_row(x).abs().clamp(min=1e-9), "clamp", "1e-09"),
    vanishing("normalize", lambda x: F.normalize(zero_row(x), dim=-1), "", "1e-12"),
    vanishing("masked_fill", lambda x: zero_row(x) / zero_row(x).masked_fill(zero_row(x) == 0, 1e-9), "masked_fill",
              "1e-09"),
    vanishing("where", lambda x: zero_row(x) / torch.where(zero_row(x) == 0, 1e-9, zero_row(x)), "", "1e-09"),
    vanishing("maximum", lambda x: zero_row(x) / torch.maximum(zero_row(x).abs(), torch.tensor(1e-9)), "maximum",
              "1e-09"),
    vanishing("new_tensor", lambda x: zero_row(x) / (zero_row(x).abs() + x.new_tensor(1e-8)), "made from", "1e-08"),
    vanishing("new_full", lambda x: zero_row(x) / (zero_row(x).abs() + x.new_full((), 1e-8)), "new_full", "1e-08"),
    vanishing("low tensor", lambda x: zero_row(x) / zero_row(x).abs().maximum(torch.tensor(data=[1e-8], dtype=x.dtype)),
              "a tensor of fp16 made from 1e-08", "1e-08"),
    *(vanishing(make.__name__, lambda x, make=make: zero_row(x) / (zero_row(x).abs() + make(1e-8, dtype=x.dtype)),
                "made from", "1e-08") for make in (torch.as_tensor, torch.asarray)),
    Row("a sum that begins at 0", lambda x: sum(x.unbind(), x.new_tensor(0.0)) + x.new_tensor([1.0, 1e-9] * 4)),
    Row("a tensor made from no number", torch.as_tensor),
    Row("new_tensor in bf16", lambda x: x / (x.abs() + x.new_tensor(1e-8)), low="bf16"),
    Row("bf16 has it", plus(1e-8), low="bf16"),
    Row("just above half the smallest subnormal", plus(2.0**-25 * 1.01)),
    Row("half the smallest subnormal", plus(2.0**-25), "constant vanishes"),
    Row("O0", plus(1e-8), plan="O0"),
    Row("in a tensor made inside", lambda x: x / (x.abs() + torch.tensor(1e-8)), "constant vanishes"),
    Row("in a tensor made outside", plus(torch.tensor(1e-8)), "constant vanishes"),
    Row("computed by the step", lambda x: x + x.float().square().mean() * 1e-9),
    Row("upper bound keeps nothing off zero", by_upper_bound),
    Row("lower bound does", by_lower_bound, "constant vanishes"),
    Row("in fp32", lambda x: x.float() / (x.float().abs() + 1e-8)),
    Row("in what a checkpoint runs again", lambda x: checkpoint(plus(1e-8), x, use_reentrant=False),
        "constant vanishes"),
    Row("in what a checkpoint runs again, reentrant", lambda x: checkpoint(plus(1e-8), x, use_reentrant=True),
        "constant vanishes"),
]  # fmt: skip


@parametrize(EPS)
def test_an_eps_that_vanishes_is_named_and_its_cure_cures(row):
    check_row(row)


def test_an_eps_in_a_norm_of_the_models_own_is_in_fp32():
    own = type("RMSNorm", (Does,), {})
    assert checked(Two(own(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8))))[0] == []


class Holds(nn.Module):
    def __init__(self, eps, use):
        super().__init__()
        self.register_buffer("eps", eps)
        self.use = use

    def forward(self, x):
        return x / (self.use(self.eps, x) + x.abs())


@pytest.mark.parametrize("shape", [(), (1,), (8,)])
def test_an_eps_in_a_buffer_that_a_cast_makes_0_is_named(shape):
    def found(value, low="fp16"):
        return checked(Two(Holds(torch.full(shape, value), lambda eps, x: eps.to(x.dtype))), low=low)[0]

    finding = only(found(1e-9))
    assert (finding.code, finding.place.split(",")[0]) == ("constant vanishes", "planted")
    assert "a cast to fp16 of 1e-09, which is 0 in fp16" in finding.evidence
    assert found(1e-9, "bf16") == found(1e-6) == []


HIDDEN = torch.tensor([0.0, -1e9] * 4)
FIRST_ROW = torch.arange(4).view(4, 1) == 0


def spread(value):
    """The softmax of values to which a mask is added that is `value` for the whole first row."""
    return lambda x: (x + FIRST_ROW.to(x.dtype) * value).softmax(-1)


def integers(value):
    return lambda x: x * torch.tensor([value, 1]).to(x.dtype).isfinite().all()


def beyond(name, function, *says, **options):
    return Row(name, function, "value beyond the format", says, **options)


MASKS = [
    beyond("refused by torch", lambda x: x.masked_fill(x < 0, -1e9).softmax(-1), "masked_fill", "torch.finfo",
           severity="error"),
    beyond("infinite in silence", lambda x: torch.where(FIRST_ROW, -1e9, x).softmax(-1),
           "-1e+09 becomes -inf in fp16", trains=False, alone=False),
    beyond("infinite in a product", spread(-1e9), "mul: -1e+09 becomes -inf in fp16", trains=False, alone=False),
    Row("a product in bf16", spread(-1e9), low="bf16"),
    beyond("infinite in a tensor", lambda x: (x + x.new_tensor([0.0, -1e9] * 4)).softmax(-1),
           "tensor: -1e+09 becomes -inf"),
    Row("written as infinite in a tensor", lambda x: (x + x.new_tensor([0.0, -torch.inf] * 4)).softmax(-1)),
    beyond("infinite in a cast", lambda x: (x + HIDDEN.to(x.dtype)).softmax(-1), "a cast to fp16: -1e+09 becomes -inf"),
    Row("a cast in bf16", lambda x: (x + HIDDEN.to(x.dtype)).softmax(-1), low="bf16"),
    Row("finfo.min", lambda x: (x + torch.finfo(x.dtype).min * (x < 0)).softmax(-1)),
    Row("written as infinite", lambda x: x.masked_fill(x < -5, -torch.inf)),
    Row("the largest value in a tensor", lambda x: x.minimum(x.new_tensor([65504.0]))),
    Row("a cast of integers that fit", integers(65504)),
    beyond("a cast of integers", integers(70_000), "a cast to fp16: 70000 becomes inf"),
]  # fmt: skip


@parametrize(MASKS)
def test_a_value_beyond_the_format_is_named_and_its_cure_cures(row):
    check_row(row)


def test_in_the_second_of_two_models_the_cure_names_the_module_as_rules_do():
    models = [nn.Linear(8, 8), Two(Does(lambda x: x / (x.abs() + 1e-8)))]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.0)

    def closure():
        return loss_of(lambda x: models[1](models[0](x)))

    with halfstep.initialize(models, optimizer, "O2", low="fp16") as session:
        found = only(halfstep.check(session, closure, precision=False))
        cured = session.plan.edit(*found.cure)
    assert found.place.startswith("planted, ")
    assert found.evidence.endswith("; in model 1 (the first is 0)")
    with halfstep.initialize(models, optimizer, cured) as session:
        assert halfstep.check(session, closure, precision=False) == ()


# operations that fail


@torch.library.custom_op("halfstep_test::fused_scale", mutates_args=())
def fused_scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    if x.dtype != by.dtype:
        raise RuntimeError("fused_scale: x and by must have one dtype")
    return x * by


fused_scale.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("halfstep_test::scale_in_place", mutates_args=("x",))
def scale_in_place(x: torch.Tensor, by: torch.Tensor) -> None:
    if x.dtype != by.dtype:
        raise RuntimeError("scale_in_place: x and by must have one dtype")
    x.mul_(by)


def scaled_in_place(x):
    x = x.clone()
    scale_in_place(x, torch.ones(8))
    return x


def added_product(x):
    return (torch.zeros(4, 8) + 0).addmm_(x, x[:1].expand(8, 8))


class Bad(Same):
    @staticmethod
    def backward(ctx, grad):
        if grad.dtype != torch.float32:
            raise TypeError("fp32 gradients alone")
        return grad


def picky(x):
    if x.dtype != torch.float32:
        raise TypeError("fp32 alone")
    return x


def broken(x):
    raise ValueError("always")


def histogram(x):
    return x * torch.histogram(x.detach(), torch.linspace(-1, 1, 8)).hist.sum()


def scaled(x):
    return fused_scale(x, torch.ones(8))


def mixed(name, function, *says, **options):
    return Row(name, function, "mixed formats", says, "error", **options)


def bce(x):
    return F.binary_cross_entropy(torch.sigmoid(x), torch.ones(4, 8).to(x.dtype))


FAILING = [
    mixed("histogram", histogram, "should have the same dtype"),
    mixed("custom operator", scaled, "fused_scale", "float16, float32", cure=(Rule("planted", FULL),)),
    mixed("in place", added_product, "addmm (forward) of float32, bfloat16, bfloat16 raises RuntimeError", low="bf16"),
    Row("Python error", picky, "step fails",
        (f"test_trace.py:{picky.__code__.co_firstlineno + 2} in picky", "TypeError: fp32 alone"), "error",
        cure=(Rule("planted", FULL),)),
    Row("in every format", broken, "step fails", ("it fails in fp32 as well, so the format is not the cause",), "error",
        cure=()),
    Row("backward", Bad.apply, "step fails", ("in backward", "fp32 gradients alone"), "error"),
    Row("BCE at O1", bce, "BCE on low inputs", (), "error", "O1", "bf16",
        cure=(OpChange("deny", "binary_cross_entropy"),)),
    Row("BCE at O2", bce, "BCE on low inputs", (), "error", "O2", "bf16",
        cure=(OpChange("deny", "binary_cross_entropy"),)),
]  # fmt: skip


@pytest.mark.slow_but("histogram", "backward")
@parametrize(FAILING)
def test_what_fails_is_named_and_its_cure_cures(row):
    check_row(row)


class Divides(nn.Module):
    def forward(self, x):
        return x // 3  # has no derivative


def test_what_has_no_derivative_is_at_its_own_line_not_at_one_of_pythons_modules():
    model = nn.Sequential(nn.Linear(8, 8), Divides(), nn.Linear(8, 4))
    (error,) = halfstep.check(opened(model), lambda: loss_of(model))
    assert "derivative for aten::floor_divide is not implemented" in error.evidence
    assert error.place == f"1, test_trace.py:{Divides.forward.__code__.co_firstlineno + 1} in forward"


RIGHT = torch.ones(8, 8)


@pytest.mark.slow_but("O2-bf16-False")
@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_operators_fail_in_the_check_as_they_do_in_a_step(plan, low, emulate):
    shared = {"plan": plan, "low": low, "options": {"emulate": emulate}}
    check_row(mixed("custom", scaled, "fused_scale (forward) of ", **shared))
    check_row(mixed("custom in place", scaled_in_place, "scale_in_place (forward) of ", **shared))
    check_row(mixed("in place", added_product, "addmm (forward) of ", **shared))
    check_row(Row("autocast makes one format of two", lambda x: product(x, RIGHT), **shared))


def test_a_failure_of_the_low_format_that_no_edit_cures_says_so():
    model = Two(nn.Linear(8, 8))
    session = opened(model)

    def closure():
        with session.autocast():
            if torch.is_autocast_enabled("cpu"):
                raise ValueError("not under autocast")
        return loss_of(model)

    error = next(finding for finding in halfstep.check(session, closure) if finding.severity == "error")
    assert error.cure == ()
    assert "no edit of the plan was found" in error.advice


def test_no_edit_is_named_for_a_failure_that_does_not_come_twice():
    calls = iter(range(9))

    def first(x):
        if next(calls) == 0:
            raise ValueError("a bad batch")
        return x

    error = only(checked(Two(Does(first)))[0])
    assert error.cure == ()
    assert error.advice.startswith("a second call of the closure did not fail")


def test_a_model_that_cannot_be_copied_is_not_said_to_fail_in_fp32():
    model = Two(Does(scaled))
    model.kept = threading.Lock()
    error = only(checked(model)[0])
    assert error.cure == ()
    assert "because a copy of the model cannot be made or run: TypeError: cannot pickle" in error.advice


def test_what_a_forward_left_in_an_attribute_does_not_keep_an_edit_from_being_tried():
    model = Two(Does(scaled))
    model.kept = model.first(torch.ones(1, 8))  # no leaf, which torch itself does not copy
    assert only(checked(model)[0]).cure == (Rule("planted", FULL),)


@pytest.mark.parametrize("count", [1, 2])
def test_a_closure_that_runs_out_of_batches_is_not_said_to_fail_in_fp32(count):
    model, batches = Two(Does(scaled)), iter([torch.ones(4, 8)] * count)
    error = only(halfstep.check(opened(model), lambda: model(next(batches)).sum(), precision=False))
    assert error.cure == ()
    assert error.advice.startswith("the closure ran out of batches")


# numbers that are not finite


def test_a_loss_that_is_not_finite_is_an_error_that_names_blame():
    found, _ = checked(Two(Does(lambda x: torch.log(x * 0 - 1))))
    assert (only(found).code, "blame" in only(found).advice) == ("not finite", True)


def test_a_constant_scale_that_is_too_high_is_named_and_a_dynamic_one_is_not():
    found, _ = checked(Two(nn.Linear(8, 8)), loss_scale=2.0**30)
    assert only(found).code == "gradients not finite"
    assert only(found).cure == (Scaling("dynamic"),)
    assert checked(Two(nn.Linear(8, 8)), loss_scale=Scaling("dynamic", init=2.0**24))[0] == []


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize(("factor", "floor", "count"), [(1e4, 1.0, 0), (1e6, 1.0, 1), (1e6, 2.0**-10, 0)])
def test_gradients_that_overflow_at_the_floor_of_a_dynamic_scale_are_an_error(plan, factor, floor, count):
    model = Two(nn.Linear(8, 8))
    with opened(model, plan, loss_scale=Scaling("dynamic", min=floor)) as session:
        found = halfstep.check(session, lambda: loss_of(model) * factor * 10, precision=False)
    bad = [finding for finding in found if finding.code == "gradients not finite"]
    assert [finding.severity for finding in bad] == ["error"] * count
    assert all(f"even at the lowest loss scale, {floor:g}:" in finding.evidence for finding in bad)


@pytest.mark.parametrize("scale", ["none", 1.0, 1024.0])
def test_gradients_that_no_loss_scale_cures_are_offered_no_other_scale(scale):
    """The square root's derivative at 0 is infinite."""
    found, _ = checked(Two(Does(lambda x: torch.sqrt(x.float() * 0))), loss_scale=scale)
    one = next(finding for finding in found if finding.code == "gradients not finite")
    assert f"at the constant loss scale {1 if scale == 'none' else scale:g}" in one.evidence
    assert "dynamic" not in one.advice
    assert one.cure == ()


@pytest.mark.parametrize(("norm", "codes"), [(1.0, []), (0.0, ["not finite"])])
def test_a_gradient_penalty_that_a_falling_loss_scale_cures_is_no_error(norm, codes):
    model, inputs = Two(nn.Linear(8, 1)), torch.ones(4, 8, requires_grad=True)
    with opened(model) as session:

        def closure():
            (grad,) = session.grad(model(inputs).sum() * 1e3, inputs, create_graph=True)
            return (grad.norm() / norm - 1) ** 2

        found = halfstep.check(session, closure, precision=False)
    assert [each.code for each in found if each.severity == "error"] == codes


class CosineHead(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x / (x.abs().amax(-1, keepdim=True) + 1e-8)) @ self.weight.t()


def test_the_edit_of_a_constant_fits_a_weight_that_two_modules_share():
    table = nn.Embedding(16, 8)
    model = nn.Sequential(table, nn.LayerNorm(8), CosineHead(table.weight))
    with opened(model) as session:
        vanishing = only(halfstep.check(session, lambda: model(torch.arange(16)).float().mean(), precision=False))
        assert vanishing.cure == (Rule("2", FULL), Rule("0", FULL))
        with opened(model, session.plan.edit(*vanishing.cure)) as cured:
            assert halfstep.check(cured, lambda: model(torch.arange(16)).float().mean(), precision=False) == ()


def test_an_fp16_loss_is_traced_at_a_scale_that_it_takes():
    model = Two(nn.Identity())
    found = halfstep.check(opened(model, loss_scale=65536.0), lambda: loss_of(model).half() * 1e-3, precision=False)
    assert [finding.code for finding in found if finding.severity != "note"] == ["scale too high"]


class Nested(nn.Module):
    def __init__(self, layout, factor):
        super().__init__()
        self.fc, self.layout, self.factor = nn.Linear(8, 8), layout, factor

    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=self.layout)
        narrow = (nested * self.factor).to(torch.float16).float()
        return self.fc(narrow / self.factor).to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(("factor", "codes"), [(1.0, []), (1e6, ["not finite", "value beyond the format"])])
def test_nested_tensors_are_looked_into(factor, codes, layout):
    found, _ = checked(Nested(layout, factor), "O1", "bf16")
    assert [finding.code for finding in found] == codes
