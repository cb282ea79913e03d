"""Every argument is used or refused, and after an error the model is as it was."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, LOW, OpChange, OpChanges, PlanError, Rule, Scaling, SessionError, SetupError
from halfstep.train.session.decide import _say
from tests.contracts.cases import Net, backward_and_step, batch, make, start
from tests.contracts.test_close import fingerprint

BAD = {
    "unknown level": ({"plan": "O4"}, PlanError, r"O4.*O0, O1, O2, O3"),
    "digit for letter": ({"plan": "02"}, PlanError, r"letter O"),
    "plan of a wrong type": ({"plan": 2}, PlanError, r"level .*Plan or the path"),
    "missing plan file": ({"plan": "nowhere.toml"}, PlanError, r"nowhere.toml"),
    "unknown format": ({"low": "fp12"}, halfstep.FormatError, r"fp12.*bf16"),
    "format nobody trains in": ({"low": "e4m3"}, PlanError, r"e4m3"),
    "fp32 as low": ({"low": torch.float32}, PlanError, r"fp32"),
    "master at O1": ({"plan": "O1", "master": "copy"}, PlanError, r"master"),
    "split for fp16": ({"plan": "O2", "low": "fp16", "master": "split"}, PlanError, r"split.*bf16"),
    "unknown master": ({"plan": "O2", "master": "both"}, PlanError, r"both.*'none', 'copy'"),
    "norms at O1": ({"plan": "O1", "norms": "full"}, PlanError, r"norms"),
    "low inputs at O0": ({"plan": "O0", "input": "low"}, PlanError, r"O0.*input 'keep'"),
    "unknown input": ({"plan": "O2", "input": "full"}, PlanError, r"full.*'keep', 'low'"),
    "unknown norms": ({"plan": "O2", "norms": "fp32"}, PlanError, r"norms"),
    "scale at O0": ({"plan": "O0", "loss_scale": 128.0}, PlanError, r"O0"),
    "master at O0": ({"plan": "O0", "master": "copy"}, PlanError, r"O0|master"),
    "rules at O0": ({"plan": "O0", "rules": (Rule("head", FULL),)}, PlanError, r"O0"),
    "emulation at O0": ({"plan": "O0", "emulate": True}, SetupError, r"O0"),
    "unknown scale": ({"loss_scale": "adaptive"}, PlanError, r"adaptive.*dynamic"),
    "negative scale": ({"loss_scale": -1.0}, PlanError, r"loss_scale is -1; expected a number"),
    "negative scale as text": ({"loss_scale": "-1"}, PlanError, r"loss_scale is -1; expected a number"),
    "NaN as scale": ({"loss_scale": float("nan")}, PlanError, r"loss_scale is nan; expected a number"),
    "format for plan": ({"plan": "bf16"}, PlanError, r"O0, O1, O2, O3; pass a format as low='bf16'"),
    "op that does not exist": ({"rules": (OpChange("deny", "matmuls"),)}, PlanError, r"matmuls.*did you mean 'matmul'"),
    "infinite scale": ({"loss_scale": float("inf")}, PlanError, r"inf"),
    "rule that matches nothing": ({"rules": (Rule("heads.*", FULL),)}, PlanError, r"heads.*nothing|matches no"),
    "rules that disagree": ({"rules": (Rule("head", FULL), Rule("he*", LOW))}, PlanError, r"head.*he\*|disagree"),
    "low weights at O1": ({"plan": "O1", "rules": (Rule("head", LOW),)}, PlanError, r"O1"),
    "tied weights in two formats": ({"plan": "O2", "rules": (Rule("tied", FULL),)}, PlanError, r"second|tied"),
    "unknown op": ({"ops": OpChanges(deny=("softmaxx",))}, PlanError, r"softmaxx.*softmax"),
    "op in two lists": ({"ops": {"allow": ["softmax"], "deny": ["softmax"]}}, PlanError, r"softmax"),
    "sink that cannot be called": ({"sinks": (3,)}, SetupError, r"sink"),
    "one sink not in a list": ({"sinks": print}, SetupError, r"list of functions"),
    "emulate as a tensor": ({"emulate": torch.ones(2)}, SetupError, r"emulate is tensor.*True, False"),
    "emulate of a wrong type": ({"emulate": "yes"}, SetupError, r"emulate is 'yes'"),
    "rule of a wrong type": ({"rules": ("head",)}, PlanError, r"Rule"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_keywords_name_what_came_and_what_is_allowed(case):
    keywords, error, message = BAD[case]
    model, opt = make()
    was = fingerprint(model, opt)
    with pytest.raises(error, match=r"(?s)" + message):
        halfstep.initialize(model, opt, **{"plan": "O2", "low": "bf16", **keywords})
    assert fingerprint(model, opt) == was


def refuse(error, message, model, opt, *args, **kwargs):
    was = fingerprint(model, opt) if isinstance(opt, torch.optim.Optimizer) and isinstance(model, nn.Module) else None
    with pytest.raises(error, match=r"(?s)" + message):
        halfstep.initialize(model, opt, *args, **kwargs)
    if was is not None:
        assert fingerprint(model, opt) == was


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_trainable_float8_parameters_are_named(name, dtype):
    model, opt = make()
    model.head.to(dtype)
    refuse(SetupError, r"head\.weight.*model\.float\(\)", model, opt, name, low="bf16")


def test_an_optimizer_of_another_model_is_refused():
    model, _ = make()
    _other, opt = make()
    refuse(SetupError, r"do not belong to the model", model, opt, "O2", low="bf16")


def test_a_wrong_model_or_optimizer_type_is_refused():
    model, opt = make()
    refuse(SetupError, r"model is of type OrderedDict; .* Module.*as in halfstep\.init", model.state_dict(), opt)
    refuse(SetupError, r"optimizer is of type Net; .* Optimizer, .*; pass the model first", model, model)
    refuse(SetupError, r"^model is of type AdamW; .* Module, .*; pass the model first, then the optimizer", opt, model)
    refuse(SetupError, r"optimizer is the class Adam; .*; pass an instance", model, torch.optim.Adam)
    refuse(SetupError, r"optimizer is of type generator; .*; parameters go to an optimizer", model, model.parameters())
    refuse(SetupError, r"empty", [], opt)
    refuse(SetupError, r"twice", [model, model], opt)
    refuse(SetupError, r"no parameters", nn.ReLU(), None)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_scripted_modules_are_refused_in_words(name):
    scripted, traced = torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    for model, where in ((scripted, r"'\(model\)'"), (nn.Sequential(nn.Linear(2, 2), traced), "'1'")):
        refuse(
            SetupError, rf"{where} is scripted.*pass the Python module.*torch\.compile", model, None, name, low="bf16"
        )


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["O2", "O3"])
def test_a_wrapped_model_is_refused_where_weights_change_format(name):
    model, _ = make()
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad])
    refuse(SetupError, r"DistributedDataParallel.*then wrap", wrapped, opt, name, low="bf16")


@pytest.mark.parametrize(("name", "low"), [("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")])
def test_lbfgs_is_refused_with_the_reason(name, low):
    model = nn.Linear(4, 4)
    refuse(SetupError, r"LBFGS.*closure", model, torch.optim.LBFGS(model.parameters()), name, low=low)


def test_lbfgs_works_where_no_scale_is_active():
    model = nn.Linear(8, 1)
    opt = torch.optim.LBFGS(model.parameters(), max_iter=5)
    x, y = batch(0)[0], batch(0)[0].sum(1, keepdim=True)
    session = halfstep.initialize(model, opt, "O1", low="bf16")

    def closure():
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        session.backward(loss)
        return loss.detach()

    first = float(opt.step(closure))
    assert float(opt.step(closure)) < first / 10
    with pytest.raises(SessionError, match="closure"):
        session.step()


def test_step_before_backward_is_an_error():
    model, _, session = start("O1", "bf16")
    with pytest.raises(SessionError, match=r"session\.backward"):
        session.step()
    backward_and_step(session, model(batch(0)[0]).sum())
    with pytest.raises(SessionError, match=r"session\.backward"):
        session.step()


def test_a_habitual_optimizer_step_is_an_error_that_names_session_step():
    model, opt, session = start("O2", "bf16")
    session.backward(model(batch(0)[0]).sum())
    with pytest.raises(SessionError, match=r"session\.step\(\)"):
        opt.step()


def test_bad_losses_are_refused():
    model, _, session = start("O1", "bf16")
    out = model(batch(0)[0])
    with pytest.raises(SessionError, match=r"shape \(16, 4\).*mean"):
        session.backward(out)
    with pytest.raises(SessionError, match=r"requires no gradient: .*; pass it as it was computed"):
        session.backward(out.sum().detach())
    with pytest.raises(SessionError, match="float"):
        session.backward(1.0)
    with pytest.raises(SessionError, match="complex"):
        session.backward(out.sum() * 1j)
    with pytest.raises(SessionError, match="float"):
        session.grad(1.0, out)
    with pytest.raises(SessionError, match="got an output that requires no gradient"):
        session.grad(out.sum().detach(), out)
    for wrong, words in ((3, "a int"), (None, "a NoneType"), (["w"], "a str"), (torch.ones(2), "requires no gradient")):
        with pytest.raises(SessionError, match=rf"got .*{words}.* as an input; pass tensors"):
            session.grad(out.sum(), wrong)
    with pytest.raises(SessionError, match=r"grad_outputs of types \['int'\]; pass a tensor"):
        session.grad(out.sum(), out, grad_outputs=3)
    with pytest.raises(SessionError, match=r"scaling\(\) expected .* got float; pass those"), session.scaling(1.0):
        pass
    with pytest.raises(SessionError, match="got 2 grad_outputs for 1 outputs"):
        session.grad(out.sum(), out, grad_outputs=[None, None])
    with pytest.raises(SessionError, match="loss_id"):
        session.backward(out.sum(), loss_id=-1)
    with pytest.raises(SessionError, match="loss_id"):
        session.backward(out.sum(), loss_id="generator")


def test_what_is_no_optimizer_is_not_added():
    model, opt, session = start("O1", "bf16")
    with pytest.raises(SetupError, match=r"optimizers is of type str; expected a torch Optimizer"):
        session.add_optimizers("adam")
    with pytest.raises(SetupError, match=r"in two optimizers"):
        session.add_optimizers(opt)
    session.add_optimizers([])
    backward_and_step(session, model(batch(0)[0]).sum())


def test_a_generator_of_inputs_is_differentiated():
    model, _, session = start("O1", "bf16")
    params = [p for p in model.parameters() if p.requires_grad]
    found = session.grad(model(batch(0)[0]).sum(), iter(params), allow_unused=True)
    assert len(found) == len(params)


def test_bad_steps_are_refused():
    model, _, session = start("O1", "bf16")
    session.backward(model(batch(0)[0]).sum())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SessionError, match="not one of this session's"):
        session.step(other)
    with pytest.raises(SessionError, match="closure"):
        session.step(lambda: None)
    for norm in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(SessionError, match="max_norm"):
            session.step(max_norm=norm)
    session.step()


def test_inference_sessions_do_not_train():
    model = Net()
    session = halfstep.initialize(model, None, "O2", low="bf16")
    out = model(batch(0)[0])
    with pytest.raises(SessionError, match="no optimizer"):
        session.backward(out.sum())
    with pytest.raises(SessionError, match="no optimizer"):
        session.step()


def test_an_fp16_loss_keeps_the_scale_below_the_largest_fp16():
    """The backward pass of an fp16 loss starts with the scale itself as an fp16 number: 65536 is inf there."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O1", low="fp16")
    record = backward_and_step(session, model(torch.randn(4, 4)).mean().half())
    assert not bool(record.skipped)
    assert float(record.scale) == 32768.0
    session.close()
    session = halfstep.initialize(model, opt, "O1", low="fp16", loss_scale=2.0**17)
    with pytest.raises(SessionError, match=r"131072.*loss\.float\(\)"):
        session.backward(model(torch.randn(4, 4)).mean().half())


def test_keywords_are_used():
    model, opt = make()
    seen = []
    session = halfstep.initialize(
        model,
        opt,
        "O2",
        low=torch.bfloat16,
        loss_scale=Scaling("static", init=8.0),
        norms="low",
        master="copy",
        rules=[Rule("head", FULL)],
        ops={"deny": ["softmax"]},
        emulate=False,
        sinks=[seen.append],
    )
    plan = session.plan
    assert (plan.low.name, plan.scale.init, plan.norms, plan.master) == ("bf16", 8.0, "low", "copy")
    assert plan.op_changes.deny == ("softmax",)
    assert model.layer_norm.weight.dtype is torch.bfloat16
    assert model.head.weight.dtype is torch.float32
    session.backward(model(batch(0)[0]).sum())
    record = session.step(opt)
    assert seen == [record]
    assert float(record.scale) == 8.0


def test_forwards_that_cannot_be_entered_are_refused():
    class Yields(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            yield self.layer(x)

    for name in ("O1", "O2"):
        for model in (Yields(), nn.Sequential(Yields())):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            refuse(SetupError, r"Yields.*generator.*return the values", model, optimizer, name, low="bf16")
    model = Yields()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0"):
        assert [out.shape for out in model(torch.ones(2, 4))] == [(2, 4)]
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    refuse(SetupError, r"0\.weight.*batch", model, None, "O2", low="bf16")


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_a_backward_that_did_not_happen_does_not_count(name):
    model, _, session = start(name, "bf16")
    loss = model(batch(0)[0]).sum()
    with pytest.raises(TypeError):
        session.backward(loss, no_such_argument=1)
    with pytest.raises(SessionError, match=r"session\.backward"):
        session.step()


@pytest.fixture
def nothing_said():
    _say.cache_clear()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "build", [type("MyRMSprop", (torch.optim.RMSprop,), {}), type("MyAdamW", (torch.optim.AdamW,), {})]
)
def test_an_optimizer_without_an_own_update_steps_on_copies_and_it_is_said_once(build, low, caplog):
    with caplog.at_level("WARNING", "halfstep"):
        for _ in range(2):
            model = nn.Linear(3, 3)
            session = halfstep.initialize(model, build(model.parameters()), "O2", low=low)
            for _ in range(2):
                backward_and_step(session, model(torch.ones(1, 3)).sum())
            assert session.plan.master == "copy"
            session.close()
    assert [f"no update of its own for {build.__name__}" in record.message for record in caplog.records] == [True]


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize(("name", "build"), [("O0", torch.optim.RMSprop), ("O1", torch.optim.RMSprop)])
def test_where_an_optimizers_own_step_costs_nothing_nothing_is_said(name, build, caplog):
    model = nn.Linear(3, 3)
    with caplog.at_level("WARNING", "halfstep"):
        halfstep.initialize(model, build(model.parameters()), name, low="bf16").close()
    assert not caplog.records


def test_status_names_the_gradients_of_a_skipped_step():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, "O2", low="bf16", on_failure="warn")
    session.backward(model(torch.ones(1, 3)).sum())
    model[1].bias.grad[1] = float("nan")
    session.step()
    assert session.status().nonfinite_gradients == ("1.bias",)
    assert "1.bias" in str(session.status())
    optimizer.zero_grad()
    backward_and_step(session, model(torch.ones(1, 3)).sum())
    assert session.status().nonfinite_gradients == ()
