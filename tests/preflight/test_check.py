"""The check before training, of what needs no step: weights, buffers, optimizers, sizes; and what it refuses."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep import LOW, Rule
from halfstep.errors import SessionError
from halfstep.explain.diagnose.cures import FULL_OUT
from tests.contracts.cases import backward_and_step
from tests.preflight.planted import Does, Two, checked, loss_of, notes, only, opened


def test_parameters_that_were_cast_inside_the_session_are_errors():
    model = Two(nn.Linear(8, 8))
    session = opened(model, "O1")
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
    model, scaler = Two(nn.Linear(8, 8)), torch.amp.GradScaler("cpu")
    session = opened(model)
    error = halfstep.check(session, scaler=scaler)[0]
    assert (error.severity, error.code, error.place) == ("error", "refused gradients", "first.weight")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        scaler.unscale_(session.optimizers[0])
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
def test_a_mask_is_beyond_the_format_up_to_where_it_is_infinite_itself_and_a_note(value, noted):
    model = Two(Buffered(mask=torch.tensor([0.0, value])))
    assert notes(model) == [("note", "mask beyond the format", "planted.mask")] * noted


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
        backward_and_step(session, loss_of(model) * 0)
        assert session.status().nonfinite_parameters == ()


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_weights_that_are_not_finite_are_an_error(plan):
    model = Two(nn.Linear(8, 8))
    model.planted.weight.data[0, 0] = torch.inf
    found, _ = checked(model, plan, trace=False)
    assert (only(found).place, only(found).code) == ("planted.weight", "non-finite weights")


def filled(fill):
    """Returns a model with a layer whose weight is filled by a function."""
    model = Two(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        nn.init.constant_(model.planted.weight, 0.5)
        fill(model.planted.weight)
    return model


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("fill", "code"),
    [
        (lambda weight: weight[0].fill_(1e5), "weights beyond the format"),
        (lambda weight: weight[0].fill_(-65504.0), None),
        (lambda weight: weight.fill_(1e-9), "weights vanish"),
        (lambda weight: weight.fill_(2.0**-24), None),
        (lambda weight: weight[0].fill_(1e-9), "weights vanish"),  # 8 of 64
        (lambda weight: weight[0, :6].fill_(1e-9), None),
        (lambda weight: weight[1:].fill_(0.0), None),
        (lambda weight: weight.fill_(0.0), None),
    ],
)
def test_weights_that_the_low_format_does_not_hold_get_a_rule_that_keeps_them(plan, fill, code):
    model = filled(fill)
    found, plan_ = checked(model, plan, trace=False)
    assert [finding.code for finding in found] == ([] if code is None else [code])
    if code is not None:
        assert found[0].place == "planted.weight"
        assert found[0].cure == (Rule("planted", FULL_OUT),)
        assert ("load the weights again" in found[0].advice) == (plan == "O3")
    model = filled(fill)  # at O3 the first session has rounded the weights
    assert checked(model, plan_.edit(*(found[0].cure if found else ())), None, trace=False)[0] == []
    assert checked(filled(fill), plan, "bf16", trace=False)[0] == []


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
def test_the_share_of_a_weight_that_vanishes_is_told(plan):
    found, _ = checked(filled(lambda weight: weight[:3].fill_(1e-9)), plan, trace=False)
    assert only(found).evidence.endswith("6e-08: planted.weight (38%)")


def test_at_o3_what_has_become_of_the_weights_since_counts():
    model = filled(lambda weight: weight.fill_(1e-9))
    with opened(model, "O3") as session:
        codes = [finding.code for finding in halfstep.check(session)]
        with torch.no_grad():
            model.planted.weight.fill_(0.5)
        assert "weights vanish" in codes
        assert "weights vanish" not in [finding.code for finding in halfstep.check(session)]
        model.load_state_dict(model.state_dict() | {"planted.weight": torch.full((8, 8), 1e5)})
        assert "weights beyond the format" in [finding.code for finding in halfstep.check(session)]


INITS = {
    "normal": lambda weight: nn.init.normal_(weight, std=1e-5),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "sparse": lambda weight: nn.init.sparse_(weight, 0.9),
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "layer scale": lambda weight: nn.init.constant_(weight, 1e-6),
    "xavier": nn.init.xavier_uniform_,
    "zeros but one": lambda weight: weight.zero_()[0].fill_(1.0),
}


@pytest.mark.parametrize("plan", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", INITS)
def test_healthy_initializations_are_left_in_peace(name, plan):
    assert checked(filled(INITS[name]), plan, trace=False)[0] == []


class Calls(nn.Module):
    """A module whose forward calls a function with its weight, or with another module."""

    def __init__(self, function, own):
        super().__init__()
        self.function, self.own = function, own

    def forward(self, x):
        return self.function(self.own, x)


def attention(own, x):
    return own(x, x, x)[0]


@pytest.mark.slow_but("weights vanish-own parameter-O1", "None-ConvTranspose1d-O1")
@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize(
    ("name", "make", "function"),
    [
        ("weight_hh_l0", lambda: nn.LSTM(8, 8), lambda own, x: own(x[None])[0]),
        ("in_proj_weight", lambda: nn.MultiheadAttention(8, 2), attention),
        ("weight", lambda: nn.ConvTranspose1d(4, 2, 3), lambda own, x: own(x[None])),
        ("", lambda: nn.Parameter(torch.randn(3, 8)), lambda own, x: nn.functional.linear(x, own)),
    ],
    ids=["LSTM", "MultiheadAttention", "ConvTranspose1d", "own parameter"],
)
@pytest.mark.parametrize(("value", "code"), [(1e-9, "weights vanish"), (1e5, "weights beyond the format"), (0.5, None)])
def test_every_weight_that_a_step_rounds_is_looked_at(plan, name, make, function, value, code):
    model = Two(Calls(function, make()))
    weight = getattr(model.planted.own, name) if name else model.planted.own
    with torch.no_grad():
        weight.fill_(value) if value == 1e-9 else weight.view(-1)[0].fill_(value)
    found, plan_ = checked(model, plan)

    def of(findings):
        return [finding for finding in findings if finding.code not in ("not finite", "gradients not finite")]

    of_weights = of(found)
    assert [finding.code for finding in of_weights] == ([] if code is None else [code])
    if code is not None:
        assert of_weights[0].place == f"planted.own.{name}".removesuffix(".")
        assert "mask" not in of_weights[0].advice
        assert of(checked(model, plan_.edit(*of_weights[0].cure), None)[0]) == []


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize(("value", "codes"), [(1e-8, ["weights vanish"]), (1e-4, [])])
def test_an_eps_in_a_parameter_is_looked_at(plan, value, codes):
    model = Two(Calls(lambda own, x: x / (x.abs() + own), nn.Parameter(torch.tensor(value))))
    assert [finding.code for finding in checked(model, plan)[0]] == codes


@pytest.mark.parametrize(
    "function", [lambda own, x: x.float() * own, lambda own, x: x.float() / (x.float().abs() + own[0])]
)
def test_a_weight_that_computes_in_fp32_is_not_looked_at(function):
    model = Two(Calls(function, nn.Parameter(torch.full((8,), 1e-9))))
    assert checked(model, "O1")[0] == []


def test_fp16_without_a_scale_is_a_note():
    session = opened(Two(nn.Linear(8, 8)), "O3")
    assert [(f.severity, f.code) for f in halfstep.check(session)] == [("note", "no loss scale")]


def test_findings_go_to_the_sinks_of_the_session(tmp_path):
    model = Two(Buffered(mask=torch.tensor([0.0, -1e9])))
    with halfstep.RunLog(tmp_path / "log") as log:
        found = halfstep.check(halfstep.initialize(model, None, "O2", low="fp16", sinks=[log]))
    assert len(found) == 1
    assert [event.record for event in halfstep.read_log(tmp_path / "log").events] == list(found)


def bce(x):
    return nn.functional.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x))


def test_the_gravest_comes_first():
    model = Two(Does(bce))
    model.planted.register_buffer("mask", torch.full((4,), -1e9))
    model.planted.register_buffer("inv_freq", torch.ones(4).half())
    found = halfstep.check(opened(model, "O1"), lambda: loss_of(model), precision=False)
    assert [finding.severity for finding in found] == ["error", "warning", "note"]


def test_what_cannot_be_checked_is_a_clear_error():
    model = Two(nn.Linear(8, 8))
    session = opened(model)
    with pytest.raises(SessionError, match="scaler is of type int"):
        halfstep.check(session, scaler=3)
    with pytest.raises(SessionError, match="takes an open session, not Two"):
        halfstep.check(model)
    with pytest.raises(SessionError, match="meta device"):
        halfstep.check(opened(nn.Linear(8, 8, device="meta"), "O0"))


def test_a_session_for_inference_is_checked_as_well():
    model = Two(Does(lambda x: x / (x.abs() + 1e-8)))
    session = halfstep.initialize(model, None, "O2", low="fp16")
    assert "constant vanishes" in {f.code for f in halfstep.check(session, lambda: loss_of(model))}
