"""The check before training: each fault is named with its place, each cure cures, healthy runs are left in peace."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import FULL, LOW, OpChange, Rule, Scaling
from halfstep.diagnose.cures import FULL_OUT
from halfstep.errors import SessionError
from halfstep.machine import DeviceFacts
from halfstep.preflight.check import Part, Setup, _shapes
from halfstep.workloads.char_lm import CharLM
from halfstep.workloads.cifar_resnet import CifarResNet
from halfstep.workloads.imdb_lstm import ImdbLSTM
from halfstep.workloads.regression import Regression
from tests.contracts.cases import PLANS, batch, differing, make, snapshot
from tests.models.zoo import TASKS


class Two(nn.Module):
    """A linear layer, and after it whatever a test plants, in a module of its own."""

    def __init__(self, planted):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.planted = planted

    def forward(self, x):
        return self.planted(self.first(x))


class Does(nn.Module):
    """A module that does what a function says."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def checked(model, plan="O2", low="fp16", *, trace=True, optimizer=None, **options):
    """Returns the findings above a note of a session over the model, and what a step under their cures does."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, plan, low=low, **options) as session:
        found = halfstep.check(session, (lambda: loss_of(model)) if trace else None)
        return [finding for finding in found if finding.severity != "note"], session.plan


def loss_of(model):
    return model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()


def steps(model, plan, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with halfstep.initialize(model, optimizer, plan, **options) as session:
        loss = loss_of(model)
        session.backward(loss)
        session.step()
        return bool(torch.isfinite(loss))


def only(findings):
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


# constants


def zero_row(x):
    """The first row becomes zero, whose norm only eps keeps away from 0/0."""
    return torch.cat([x[:1] * 0, x[1:]])


PLANTED = {
    "add": (lambda x: zero_row(x) / (zero_row(x).abs().sum(-1, keepdim=True) + 1e-8), "add", "1e-08"),
    "clamp": (lambda x: zero_row(x) / zero_row(x).abs().clamp(min=1e-9), "clamp", "1e-09"),
    "normalize": (lambda x: F.normalize(zero_row(x), dim=-1), "clamp_min|normalize", "1e-12"),
    "masked_fill": (lambda x: zero_row(x) / zero_row(x).masked_fill(zero_row(x) == 0, 1e-9), "masked_fill", "1e-09"),
    "where": (lambda x: zero_row(x) / torch.where(zero_row(x) == 0, 1e-9, zero_row(x)), "where|scalar_tensor", "1e-09"),
    "maximum": (lambda x: zero_row(x) / torch.maximum(zero_row(x).abs(), torch.tensor(1e-9)), "maximum", "1e-09"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_an_eps_that_vanishes_is_named_and_its_cure_cures(fault):
    function, operator, value = PLANTED[fault]
    model = Two(Does(function))
    found, plan = checked(model)
    vanishing = next(finding for finding in found if finding.code == "constant vanishes")
    assert vanishing.place.startswith("planted, test_check.py:")
    assert vanishing.severity == "warning"
    assert value in vanishing.evidence
    assert any(name in vanishing.evidence for name in operator.split("|"))
    assert not steps(model, plan)
    assert steps(model, plan.edit(*vanishing.cure))


def test_an_eps_that_the_format_has_is_no_finding():
    for plan, low, eps in (("O2", "bf16", 1e-8), ("O2", "fp16", 2.0**-25 * 1.01), ("O0", "fp16", 1e-8)):
        assert checked(Two(Does(lambda x, eps=eps: x / (x.abs() + eps))), plan, low)[0] == []


@pytest.mark.parametrize("inside", [True, False])
def test_a_constant_in_a_tensor_counts_as_well(inside):
    outside = torch.tensor(1e-8)
    found, _ = checked(Two(Does(lambda x: x / (x.abs() + (torch.tensor(1e-8) if inside else outside)))))
    assert only(found).code == "constant vanishes"
    computed, _ = checked(Two(Does(lambda x: x + x.float().square().mean() * 1e-9)))
    assert computed == [], "a value that the step computes is no constant"


def test_the_upper_bound_of_a_clamp_keeps_nothing_off_zero():
    assert checked(Two(Does(lambda x: x.clamp(-1.0, 1e-9))))[0] == []
    assert [f.code for f in checked(Two(Does(lambda x: x.clamp(1e-9, 1.0))))[0]] == ["constant vanishes"]


def test_the_boundary_is_half_the_smallest_subnormal():
    found, _ = checked(Two(Does(lambda x: x / (x.abs() + 2.0**-25))))
    assert only(found).code == "constant vanishes"


def test_an_eps_in_fp32_is_no_finding():
    assert checked(Two(Does(lambda x: x.float() / (x.float().abs() + 1e-8))))[0] == []
    own = type("RMSNorm", (Does,), {})  # a norm of the model's own, which the plan computes in fp32
    assert checked(Two(own(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8))))[0] == []


def test_a_mask_that_torch_refuses_in_fp16_is_an_error_with_a_cure():
    model = Two(Does(lambda x: x.masked_fill(x < 0, -1e9).softmax(-1)))
    found, plan = checked(model)
    error = only(found)
    assert (error.severity, error.code) == ("error", "value beyond the format")
    assert error.place.startswith("planted, test_check.py:")
    assert "masked_fill" in error.evidence
    assert "torch.finfo" in error.advice
    assert steps(model, plan.edit(*error.cure))


def test_a_mask_that_becomes_infinite_in_silence_is_a_warning():
    masked = torch.arange(4).view(4, 1) == 0  # the whole first row
    model = Two(Does(lambda x: torch.where(masked, -1e9, x).softmax(-1)))
    found, plan = checked(model)
    silent = next(finding for finding in found if finding.severity == "warning")
    assert silent.code == "value beyond the format"
    assert "-1e+09 becomes -inf in fp16" in silent.evidence
    assert not steps(model, plan)
    assert steps(model, plan.edit(*silent.cure))


def test_a_mask_that_a_product_makes_infinite_is_a_warning():
    keep = torch.tensor([[0.0]] + 3 * [[1.0]])
    model = Two(Does(lambda x: (x + (1.0 - keep.to(x.dtype)) * -1e9).softmax(-1)))
    found, plan = checked(model)
    silent = next(finding for finding in found if finding.severity == "warning")
    assert "mul: -1e+09 becomes -inf in fp16" in silent.evidence
    assert not steps(model, plan)
    assert steps(model, plan.edit(*silent.cure))
    assert checked(model, low="bf16")[0] == []


def test_a_cast_of_integers_that_overflows_is_a_warning():
    found, _ = checked(Two(Does(lambda x: x * torch.tensor([65504, 1]).to(x.dtype).sum().isfinite())))
    assert found == []
    found, _ = checked(Two(Does(lambda x: x * torch.tensor([70_000, 1]).to(x.dtype).isfinite().all())))
    assert "a cast to fp16: 70000 becomes inf" in only(found).evidence


def test_in_the_second_of_two_models_the_cure_names_the_module_as_rules_do():
    torch.manual_seed(0)
    models = [nn.Linear(8, 8), Two(Does(lambda x: x / (x.abs() + 1e-8)))]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.0)

    def closure():
        return loss_of(lambda x: models[1](models[0](x)))

    with halfstep.initialize(models, optimizer, "O2", low="fp16") as session:
        found = only(halfstep.check(session, closure))
        cured = session.plan.edit(*found.cure)
    assert found.place.startswith("planted, ")
    assert found.evidence.endswith("; in model 1, the first being 0")
    with halfstep.initialize(models, optimizer, cured) as session:
        assert halfstep.check(session, closure) == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_found_once_and_in_its_module(reentrant):
    function = lambda x: x / (x.abs() + 1e-8)  # noqa: E731
    model = Two(Does(lambda x: checkpoint(function, x, use_reentrant=reentrant)))
    assert only(checked(model)[0]).place.startswith("planted, ")


def test_a_cast_that_overflows_is_a_warning():
    mask = torch.tensor([0.0, -1e9] * 4)
    found, _ = checked(Two(Does(lambda x: (x + mask.to(x.dtype)).softmax(-1))))
    assert "a cast to fp16: -1e+09 becomes -inf" in only(found).evidence
    assert checked(Two(Does(lambda x: (x + mask.to(x.dtype)).softmax(-1))), low="bf16")[0] == []
    assert checked(Two(Does(lambda x: (x + torch.finfo(x.dtype).min * (x < 0)).softmax(-1))))[0] == []


def test_infinite_constants_are_the_users_own():
    assert checked(Two(Does(lambda x: x.masked_fill(x < 0, -torch.inf).softmax(-1).sum())), trace=False)[0] == []
    found, _ = checked(Two(Does(lambda x: x.masked_fill(x < -5, -torch.inf))))
    assert found == []


# fp32 streams


class Stream(nn.Module):
    """A transformer whose stream gets `wide` added: what it is given, or a buffer."""

    def __init__(self, add):
        super().__init__()
        self.first, self.add = nn.Linear(8, 8), add
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.register_buffer("pe", torch.randn(4, 8))

    def forward(self, x):
        h = self.add(self, self.first(x), x)
        for block in self.blocks:
            h = block(h)
        return h


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda self, h, x: h + x, "an input is added here"),
        (lambda self, h, x: h + self.pe[None, :], "the buffer 'pe' is added here"),
        (lambda self, h, x: h + self.pe.sin() * 2, "the buffer 'pe' is added here"),
        (lambda self, h, x: torch.cat([h, x], 1), "an input meets low values in cat here"),
        (lambda self, h, x: h + x.to(h.dtype) + self.pe.to(h.dtype), None),
        (lambda self, h, x: h, None),
    ],
)
def test_what_makes_a_stream_fp32_is_named_with_its_line(add, what):
    model = Stream(add)
    for level, low in (("O2", "bf16"), ("O3", "bf16"), ("O1", "bf16")):
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, low=low) as session:
            found = halfstep.check(session, lambda: model(torch.randn(2, 4, 8)).square().mean())
        if what is None or level == "O1":  # where weights are fp32 streams are
            assert found == ()
        else:
            note = only(found)
            assert (note.severity, note.code) == ("note", "fp32 stream")
            assert note.place.startswith("(model), test_check.py:")
            assert note.evidence.startswith("blocks see an fp32 stream because ")
            assert what in note.evidence
            assert ("input='low'" in note.advice) == ("input" in what)


def test_low_inputs_make_no_fp32_stream():
    model = Stream(lambda self, h, x: h + x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, "O2", low="bf16", input="low") as session:
        assert halfstep.check(session, lambda: model(torch.randn(2, 4, 8)).square().mean()) == ()


# operations that fail


def test_an_operation_of_mixed_formats_is_named_and_a_cure_was_tried():
    edges = torch.linspace(-1, 1, 8)
    model = Two(Does(lambda x: x * torch.histogram(x.detach(), edges).hist.sum()))
    found, plan = checked(model)
    error = only(found)
    assert error.severity == "error"
    assert error.place.startswith("planted, test_check.py:")
    assert "should have the same dtype" in error.evidence
    assert steps(model, plan.edit(*error.cure))


@torch.library.custom_op("halfstep_test::fused_scale", mutates_args=())
def fused_scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    if x.dtype != by.dtype:
        raise RuntimeError("fused_scale: x and by must have one dtype")
    return x * by


fused_scale.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None)


def test_a_custom_operator_that_takes_one_format_is_named_and_its_module_kept_full():
    by = torch.ones(8)
    model = Two(Does(lambda x: fused_scale(x, by)))
    found, plan = checked(model)
    error = only(found)
    assert (error.severity, error.code) == ("error", "mixed formats")
    assert "fused_scale" in error.evidence
    assert "float16, float32" in error.evidence
    assert error.cure == (Rule("planted", FULL),)
    assert steps(model, plan.edit(*error.cure))


@torch.library.custom_op("halfstep_test::scale_in_place", mutates_args=("x",))
def scale_in_place(x: torch.Tensor, by: torch.Tensor) -> None:
    if x.dtype != by.dtype:
        raise RuntimeError("scale_in_place: x and by must have one dtype")
    x.mul_(by)


@torch.library.custom_op("halfstep_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)  # of two formats, unless autocast is on


product.register_autograd(
    lambda ctx, grad: (torch.mm(grad.to(ctx.right.dtype), ctx.right.t()).to(grad.dtype), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "right", inputs[1]),
)


def scaled_in_place(x):
    x = x.clone()
    scale_in_place(x, torch.ones(8))
    return x


def added_product(x):
    return (torch.zeros(4, 8) + 0).addmm_(x, x[:1].expand(8, 8))


FAILING = {
    "fused_scale": lambda x: fused_scale(x, torch.ones(8)),
    "scale_in_place": scaled_in_place,
    "addmm": added_product,
}


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_operators_fail_in_the_check_as_they_do_in_a_step(plan, low, emulate):
    for operator, function in FAILING.items():
        found, edited = checked(Two(Does(function)), plan, low, emulate=emulate)
        error = only(found)
        assert (error.severity, error.code) == ("error", "mixed formats")
        assert error.evidence.startswith(f"{operator} (forward) of ")
        assert error.place.startswith("planted, test_check.py:")
        assert steps(Two(Does(function)), edited.edit(*error.cure), emulate=emulate)
    right = torch.randn(8, 8)
    model = Two(Does(lambda x: product(x, right)))  # autocast makes one format of two
    found, edited = checked(model, plan, low, emulate=emulate)
    assert found == []
    assert steps(model, edited, emulate=emulate)


def test_an_in_place_operation_that_fails_is_named():
    store = torch.zeros(4, 8)
    model = Two(Does(lambda x: (store + 0).addmm_(x, x[:1].expand(8, 8))))
    found, plan = checked(model, low="bf16")
    error = only(found)
    assert (error.severity, error.code) == ("error", "mixed formats")
    assert error.evidence.startswith("addmm (forward) of float32, bfloat16, bfloat16 raises RuntimeError")
    assert steps(model, plan.edit(*error.cure))


def test_a_python_error_is_named_by_its_line():
    def picky(x):
        if x.dtype != torch.float32:
            raise TypeError("fp32 alone")
        return x

    model = Two(Does(picky))
    found, plan = checked(model)
    error = only(found)
    assert error.code == "step fails"
    assert error.place == f"planted, test_check.py:{picky.__code__.co_firstlineno + 2} in picky"
    assert "TypeError: fp32 alone" in error.evidence
    assert error.cure == (Rule("planted", FULL),)
    assert steps(model, plan.edit(*error.cure))


def test_a_failure_that_no_edit_cures_says_so():
    def broken(x):
        raise ValueError("always")

    error = only(checked(Two(Does(broken)))[0])
    assert error.cure == ()
    assert "it fails in fp32 as well, so no format is the reason" in error.advice


def test_a_failure_of_the_low_format_that_no_edit_cures_says_so():
    model = Two(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:

        def closure():
            with session.autocast():
                if (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16:
                    raise ValueError("fp16 is not wanted here")
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
    reference = torch.zeros(8)
    model = Two(Does(lambda x: fused_scale(x, reference)))
    model.kept = threading.Lock()
    error = only(checked(model)[0])
    assert error.cure == ()
    assert "no edit could be tried, as the model cannot be copied: TypeError: cannot pickle" in error.advice


def test_what_a_forward_left_in_an_attribute_does_not_keep_an_edit_from_being_tried():
    reference = torch.zeros(8)
    model = Two(Does(lambda x: fused_scale(x, reference)))
    model.kept = model.first(torch.ones(1, 8))  # no leaf, which torch itself does not copy
    assert only(checked(model)[0]).cure == (Rule("planted", FULL),)


@pytest.mark.parametrize("count", [1, 2])
def test_a_closure_that_runs_out_of_batches_is_not_said_to_fail_in_fp32(count):
    batches, reference = iter([torch.ones(4, 8)] * count), torch.zeros(8)
    model = Two(Does(lambda x: fused_scale(x, reference)))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O2", low="fp16") as session:
        error = only(halfstep.check(session, lambda: model(next(batches)).sum()))
    assert error.cure == ()
    assert error.advice.startswith("the closure ran out of batches")


def test_a_backward_that_fails_is_named():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if grad.dtype != torch.float32:
                raise TypeError("fp32 gradients alone")
            return grad

    model = Two(Does(Bad.apply))
    found, plan = checked(model)
    error = only(found)
    assert "backward" in error.evidence
    assert "fp32 gradients alone" in error.evidence
    assert error.place.startswith("planted, test_check.py:")
    assert error.place.endswith("in backward")
    assert steps(model, plan.edit(*error.cure))


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_bce_on_low_inputs_is_an_error_with_a_cure(plan):
    ones = torch.ones(4, 8)
    model = Two(Does(lambda x: F.binary_cross_entropy(torch.sigmoid(x), ones.to(x.dtype))))
    found, edited = checked(model, plan, "bf16")
    error = only(found)
    assert (error.severity, error.code) == ("error", "BCE on low inputs")
    assert error.place.startswith("planted, ")
    assert error.cure == (OpChange("deny", "binary_cross_entropy"),)
    assert steps(model, edited.edit(*error.cure))


def test_bce_in_the_model_is_a_warning_without_a_trace():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.criterion = nn.Linear(8, 1), nn.BCELoss()

    found, _ = checked(Whole(), trace=False)
    assert only(found).place == "criterion"


# what is read


def test_parameters_that_were_cast_inside_the_session_are_errors():
    model = Two(nn.Linear(8, 8))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="fp16") as session:
        assert halfstep.check(session) == ()
        model.planted.half()
        codes = {finding.place: (finding.severity, finding.code) for finding in halfstep.check(session)}
        assert codes == dict.fromkeys(("planted.weight", "planted.bias"), ("error", "parameter format"))
        model.planted.float()


@pytest.mark.parametrize(("dtype", "severity"), [(torch.float16, "error"), (torch.bfloat16, "warning")])
def test_low_parameters_at_o0_are_named(dtype, severity):
    model = Two(nn.Linear(8, 8).to(dtype))
    found, _ = checked(model, "O0", trace=False)
    assert {(f.place, f.severity) for f in found} == {("planted.weight", severity), ("planted.bias", severity)}


def test_gradients_that_a_scaler_refuses_are_named_before_it_does():
    model = Two(nn.Linear(8, 8))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:
        error = halfstep.check(session, scaler=scaler)[0]
        assert (error.severity, error.code, error.place) == ("error", "refused gradients", "first.weight")
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            scaler.unscale_(optimizer)
        own = halfstep.check(session, scaler=halfstep.GradScaler("cpu"))
        assert [finding.code for finding in own] == ["two scalers"]
        assert halfstep.check(session, scaler=torch.amp.GradScaler("cpu", enabled=False)) == ()


class Buffered(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("inv_freq", torch.ones(4), "rotary frequencies stored low"),
        ("running_loss", torch.ones(4), "running statistics stored low"),
        ("mask", torch.full((4,), -1e9), "mask stored low"),
    ],
)
def test_buffers_that_should_stay_full_are_named_where_a_rule_casts_them(name, value, code):
    model = Two(Buffered(**{name: value}))
    rule = Rule("planted", LOW, buffers="low")
    found, plan = checked(model, rules=[rule])
    assert (only(found).place, only(found).code) == (f"planted.{name}", code)
    assert only(found).cure == (Rule("planted", LOW, "keep"),)
    kept, _ = checked(Two(Buffered(**{name: value})), plan.edit(*only(found).cure))
    assert kept == []
    unnamed, _ = checked(Two(Buffered(other=torch.ones(4))), rules=[rule])
    assert unnamed == [], "a note"


def test_running_statistics_stored_low_are_named_and_the_cure_resolves():
    model = Two(nn.BatchNorm1d(8))
    found, plan = checked(model, rules=[Rule("planted", LOW, buffers="low")])
    assert {finding.place for finding in found} == {"planted.running_mean", "planted.running_var"}
    assert checked(Two(nn.BatchNorm1d(8)), plan.edit(*found[0].cure))[0] == []


@pytest.mark.parametrize(
    ("value", "noted"),
    [(-65504.0, False), (-65505.0, True), (torch.finfo(torch.float32).min, True), (-torch.inf, False)],
)
def test_a_mask_is_beyond_the_format_up_to_where_it_is_infinite_itself(value, noted):
    model = Two(Buffered(mask=torch.tensor([0.0, value])))
    with halfstep.initialize(model, None, "O2", low="fp16") as session:
        assert [f.code for f in halfstep.check(session)] == ["mask beyond the format"] * noted


def test_a_mask_that_stays_full_is_a_note():
    model = Two(Buffered(mask=torch.full((4,), -1e9)))
    with halfstep.initialize(model, None, "O2", low="fp16") as session:
        assert [(f.severity, f.code) for f in halfstep.check(session)] == [("note", "mask beyond the format")]


@pytest.mark.parametrize(
    ("optimizer", "eps", "count"), [("RMSprop", 1e-8, 1), ("RMSprop", 1e-6, 0), ("AdamW", 1e-8, 1)]
)
def test_an_eps_that_vanishes_in_low_optimizer_state_is_named(optimizer, eps, count):
    model = Two(nn.Linear(8, 8)).half()
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, eps=eps)
    found, _ = checked(model, "O0", trace=False, optimizer=optimizer)
    assert [finding.code for finding in found if finding.place == type(optimizer).__name__] == ["eps vanishes"] * count
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert model.first.weight.isnan().any() == bool(count)


@pytest.mark.parametrize("plan", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", ["RMSprop", "Adagrad", "NAdam"])
def test_the_state_of_every_optimizer_is_full_and_keeps_its_eps(plan, optimizer):
    model = Two(nn.Linear(8, 8))
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    assert checked(model, plan, trace=False, optimizer=optimizer)[0] == []
    with halfstep.initialize(model, optimizer, plan, low="fp16") as session:
        session.backward(loss_of(model) * 0)
        session.step()
        assert session.status().nonfinite_parameters == ()


def test_an_eps_of_a_module_is_a_note_where_no_step_is_traced():
    model = Two(Does(lambda x: x))
    model.planted.eps = 1e-8
    with halfstep.initialize(model, None, "O2", low="fp16") as session:
        assert [(f.severity, f.place) for f in halfstep.check(session)] == [("note", "planted.eps")]
    model.planted.eps = 1e-6
    with halfstep.initialize(model, None, "O2", low="fp16") as session:
        assert halfstep.check(session) == ()


def test_weights_that_are_not_finite_are_an_error():
    model = Two(nn.Linear(8, 8))
    with torch.no_grad():
        model.planted.weight[0, 0] = torch.inf
    for plan in ("O1", "O2"):
        found, _ = checked(model, plan, trace=False)
        assert (only(found).place, only(found).code) == ("planted.weight", "non-finite weights")


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize(
    ("fill", "code"),
    [
        (lambda weight: weight[0].fill_(1e5), "weights beyond the format"),
        (lambda weight: weight[0].fill_(-65504.0), None),
        (lambda weight: weight.fill_(1e-9), "weights vanish"),
        (lambda weight: weight.fill_(2.0**-24), None),
        (lambda weight: weight[:4].fill_(1e-9), None),  # the half of them
        (lambda weight: weight.fill_(0.0), None),
    ],
)
def test_weights_that_the_low_format_does_not_hold_get_a_rule_that_keeps_them(plan, fill, code):
    model = Two(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        fill(model.planted.weight)
    found, plan_ = checked(model, plan, trace=False)
    assert [finding.code for finding in found] == ([] if code is None else [code])
    if code is not None:
        assert found[0].place == "planted.weight"
        assert found[0].cure == (Rule("planted", FULL_OUT),)
        assert "load" not in found[0].advice
        assert checked(model, plan_.edit(*found[0].cure), None, trace=False)[0] == []
    assert checked(model, plan, "bf16", trace=False)[0] == []


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


def test_a_loss_that_is_not_finite_is_an_error_that_names_blame():
    found, _ = checked(Two(Does(lambda x: torch.log(x * 0 - 1))))
    assert (only(found).code, "blame" in only(found).advice) == ("not finite", True)


def test_a_constant_scale_that_is_too_high_is_named_and_a_dynamic_one_is_not():
    found, _ = checked(Two(nn.Linear(8, 8)), loss_scale=2.0**30)
    assert only(found).code == "gradients not finite"
    assert only(found).cure == (Scaling("dynamic"),)
    assert checked(Two(nn.Linear(8, 8)), loss_scale=Scaling("dynamic", init=2.0**24))[0] == []


def test_an_fp16_loss_is_traced_at_a_scale_that_it_takes():
    model = Two(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, "O2", low="fp16", loss_scale=65536.0) as session:
        found = halfstep.check(session, lambda: loss_of(model).half() * 1e-3)
    assert [finding.code for finding in found if finding.severity != "note"] == ["scale too high"]


def test_fp16_without_a_scale_is_a_note():
    model = Two(nn.Linear(8, 8))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3", low="fp16") as session:
        assert [(f.severity, f.code) for f in halfstep.check(session)] == [("note", "no loss scale")]


def test_sizes_that_tensor_cores_pad_are_a_note_on_a_device_that_has_them(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 65))
    plan = halfstep.level("O2", "fp16")
    assignment = halfstep.resolve(plan, model)
    parts = tuple(Part(f.name, m, f) for (_, m), f in zip(model.named_modules(), assignment.modules, strict=True))
    setup = Setup(plan, parts, (), torch.device("cuda"), traced=False, scaler=None)
    monkeypatch.setattr("halfstep.preflight.check.read_facts", lambda device: DeviceFacts("cuda", capability=(8, 0)))
    assert [(f.severity, f.evidence) for f in _shapes(setup)] == [
        ("note", "sizes that are no multiple of 8: 1 (65, 16)")
    ]
    monkeypatch.setattr("halfstep.preflight.check.read_facts", lambda device: DeviceFacts("cuda", capability=(6, 0)))
    assert list(_shapes(setup)) == []


# peace


class Unread(ImdbLSTM):
    """imdb_lstm on random words, so that it needs no data."""

    def build(self, seed):
        from halfstep.workloads.imdb_lstm import SentimentLSTM

        torch.manual_seed(seed)
        return SentimentLSTM(100, embedding=16, hidden=16)

    def batches(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(100, (8, 20), generator=generator), torch.randint(2, (8,), generator=generator).float()


class Unseen(CifarResNet):
    """cifar_resnet on noise."""

    def batches(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(8, 3, 32, 32, generator=generator), torch.randint(10, (8,), generator=generator)


QUICK = [
    CharLM(d=32, layers=1, heads=2, length=16, batch=4),
    Unseen(width=4),
    Unread(),
    Regression(d_in=16, d_out=8),
]


def above_notes(job, plan, low):
    model = job.build(0)
    batches, optimizer = job.batches(0), job.optimizer(model, fused=True)

    def closure():
        inputs, targets = next(batches)
        return job.loss(model(inputs), targets)

    with halfstep.initialize(model, optimizer, plan, low=low) as session:
        return [str(finding) for finding in halfstep.check(session, closure) if finding.severity != "note"]


@pytest.mark.parametrize(("plan", "low"), PLANS, ids=["-".join(p) for p in PLANS])
@pytest.mark.parametrize("job", QUICK, ids=lambda job: type(job).__bases__[0].__name__ + job.name)
def test_healthy_workloads_are_left_in_peace(job, plan, low):
    assert above_notes(job, plan, low) == []


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("name", TASKS)
def test_six_common_models_are_left_in_peace(name, plan):
    task = TASKS[name]
    model, (examples,) = task.build(), task.batches(1)
    with halfstep.initialize(model, task.optimizer(model.parameters()), plan, low="fp16") as session:
        found = halfstep.check(session, lambda: task.loss(model, examples))
    assert [str(finding) for finding in found if finding.severity != "note"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "low"), PLANS, ids=["-".join(p) for p in PLANS])
@pytest.mark.parametrize("name", ["char_lm", "cifar_resnet", "imdb_lstm", "regression"])
def test_healthy_workloads_in_full_size_are_left_in_peace(name, plan, low, data_dir):
    from halfstep.workloads.load import load_workload

    folders = {"cifar_resnet": "cifar10", "imdb_lstm": "imdb"}
    job = load_workload(name, data=data_dir / folders[name] if name in folders else None)
    assert above_notes(job, plan, low) == []


@pytest.mark.parametrize(("plan", "low"), PLANS, ids=["-".join(p) for p in PLANS])
def test_nothing_is_left_behind(plan, low):
    model, optimizer = make()
    session = halfstep.initialize(model, optimizer, plan, low=low)
    for step in range(2):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        session.backward(F.mse_loss(model(inputs), targets))
        if step == 0:
            session.step()
    before, gradients, state = snapshot(model, optimizer, session), [p.grad for p in model.parameters()], None
    values = [None if g is None else g.clone() for g in gradients]
    state = torch.get_rng_state()

    def closure():
        inputs, targets = batch(5)
        return F.mse_loss(model(F.dropout(inputs)), targets)

    halfstep.check(session, closure)
    assert differing(before, snapshot(model, optimizer, session)) == []
    assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(a is None or torch.equal(a, g) for a, g in zip(values, gradients, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    session.step()
    session.close()


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_what_is_not_in_the_session_are_left_alone(fails):
    reference, other, inputs = torch.zeros(8), nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    model = Two(Does(lambda x: fused_scale(x, reference) if fails else x))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="fp16") as session:
        for leaf in (*other.parameters(), inputs):
            leaf.grad = torch.ones_like(leaf)
        found = halfstep.check(session, lambda: model(other(inputs)).square().mean())
        assert [finding.cure for finding in found] == [(Rule("planted", FULL),)] * fails
    assert all(bool((leaf.grad == 1).all()) for leaf in (*other.parameters(), inputs))


def test_a_probe_does_not_see_the_traced_step():
    def seen(checking):
        model, optimizer = make()
        with halfstep.initialize(model, optimizer, "O2", low="bf16") as session:
            probe = session.observe(every=1)
            inputs, targets = batch(0)
            if checking:
                halfstep.check(session, lambda: F.mse_loss(model(inputs), targets))
            session.backward(F.mse_loss(model(inputs), targets))
            session.step()
            return probe.flush()

    assert seen(True) == seen(False)


def test_a_closure_that_steps_is_refused():
    model = Two(nn.Linear(8, 8))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16") as session:
        with pytest.raises(SessionError):
            halfstep.check(session, lambda: session.backward(loss_of(model)))
        assert session.status().steps == 0


def test_sparse_gradients_are_checked_as_well():
    table = nn.Embedding(10, 8, sparse=True)
    with halfstep.initialize(table, torch.optim.SGD(table.parameters(), lr=0.1), "O2", low="fp16") as session:
        assert halfstep.check(session, lambda: table(torch.arange(3)).square().mean()) == ()


def test_findings_go_to_the_sinks_of_the_session():
    class Sink:
        def __init__(self):
            self.told = []

        def __call__(self, record):
            pass

        def record(self, record):
            self.told.append(record)

    model, sink = Two(nn.Linear(8, 8)), Sink()
    with halfstep.initialize(model, None, "O3", low="fp16", sinks=[sink]) as session:
        model.planted.eps = 1e-8
        found = halfstep.check(session)
        assert [r for r in sink.told if isinstance(r, halfstep.Finding)] == list(found)


def test_the_gravest_comes_first():
    model = Two(Buffered(mask=torch.full((4,), -1e9), inv_freq=torch.ones(4).half()))
    model.planted.function = lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x))
    model.planted.__class__.forward = lambda self, x: self.function(self.layer(x))
    try:
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="fp16") as session:
            found = halfstep.check(session, lambda: loss_of(model))
    finally:
        Buffered.forward = lambda self, x: self.layer(x)
    assert [finding.severity for finding in found] == ["error", "warning", "note"]


# bad input


def test_what_cannot_be_checked_is_a_clear_error():
    model = Two(nn.Linear(8, 8))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    with pytest.raises(SessionError, match="takes a function that returns the loss, not Tensor"):
        halfstep.check(session, loss_of(model))
    with pytest.raises(SessionError, match="the closure returned NoneType"):
        halfstep.check(session, lambda: None)
    with pytest.raises(SessionError, match="ran the backward pass"):
        halfstep.check(session, lambda: (lambda loss: (loss.backward(), loss)[1])(loss_of(model)))
    with pytest.raises(SessionError, match="scaler is a int"):
        halfstep.check(session, lambda: loss_of(model), scaler=3)
    with pytest.raises(SessionError, match="takes an open session, not Two"):
        halfstep.check(model)
    with pytest.raises(SessionError, match="closure for blame or check"):
        halfstep.check(session, lambda: session.backward(loss_of(model)))
    session.close()
    with pytest.raises(SessionError, match="not a closed session"):
        halfstep.check(session)


def test_a_model_without_numbers_is_a_clear_error():
    model = nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, "O0") as session, pytest.raises(SessionError, match="meta device"):
        halfstep.check(session)


def test_a_session_for_inference_is_checked_as_well():
    model = Two(Does(lambda x: x / (x.abs() + 1e-8)))
    with halfstep.initialize(model, None, "O2", low="fp16") as session:
        assert "constant vanishes" in {f.code for f in halfstep.check(session, lambda: loss_of(model))}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(("factor", "codes"), [(1.0, []), (1e6, ["not finite", "value beyond the format"])])
def test_nested_tensors_are_looked_into(factor, codes, layout):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=layout)
            narrow = (nested * factor).to(torch.float16).float()
            return self.fc(narrow / factor).to_padded_tensor(0.0)

    model = Nested()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O1", low="bf16") as session:
        found = halfstep.check(session, lambda: model(torch.ones(8, 8)).float().square().mean())
    assert [finding.code for finding in found if finding.severity != "note"] == codes
