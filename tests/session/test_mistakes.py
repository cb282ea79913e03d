"""What users often do wrong after other libraries, or while they experiment, and the words that they get."""

import dataclasses
import gc
import json
import logging
import operator
import re
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import prune

import halfstep
from halfstep.adapters.apex import amp
from halfstep.explain.report.live import LiveLine
from halfstep.explain.report.run import read_log
from halfstep.initialize import check_adapted
from halfstep.train.optim.implementations import IMPLEMENTATIONS
from halfstep.train.session.parts import Replacements

OLD = Path(__file__).parents[1] / "data/3338c92"


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(session, model, x=None):
    session.optimizers[0].zero_grad()
    session.backward(model(torch.ones(3, 8) if x is None else x).square().mean())
    session.step()


def opened(level="O2", low="bf16"):
    model, optimizer = make()
    session = halfstep.initialize(model, optimizer, level, low=low)
    step(session, model)
    return model, optimizer, session


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("change", [lambda m: m.append(nn.Linear(4, 4)), lambda m: m.__setitem__(2, nn.Linear(16, 2))])
def test_a_module_that_no_optimizer_updates_is_named_once(level, change, caplog):
    model, _, session = opened(level)
    change(model)
    model.other = nn.Identity()  # has nothing to train
    elsewhere = nn.Sequential(nn.Linear(2, 2))
    for _ in range(2):
        step(session, model)
    (said,) = [each.message for each in caplog.records if "was put into the model" in each.message]
    assert f"{len(model) - 2 if len(model) > 4 else 2} (Linear)" in said
    assert "optimizer.add_param_group" in said
    assert elsewhere[0].weight.grad is None


PUT_IN = {
    "1 (Linear)": lambda m, made: m.insert(1, nn.Linear(16, 16)),
    "2 (Linear)": lambda m, made: m.insert(2, made),
    "9 (Linear)": lambda m, made: m._modules.update({"9": nn.Linear(4, 4)}),
    "0.gain (Parameter)": lambda m, made: setattr(m[0], "gain", nn.Parameter(torch.ones(()))),
    "0.gains.1 (Parameter)": lambda m, made: m[0].gains.append(nn.Parameter(torch.ones(()))),
    "": lambda m, made: m.insert(1, made.requires_grad_(False)),
}


@pytest.mark.parametrize(("level", "low"), [("O0", "bf16"), ("O1", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
@pytest.mark.parametrize("name", PUT_IN)
def test_what_is_put_in_past_the_hook_of_modules_is_named_once_and_the_advice_trains_it(level, low, name, caplog):
    model, made = make()[0], nn.Linear(16, 16)
    model[0].gains = nn.ParameterList([nn.Parameter(torch.ones(()))])
    model[0].register_forward_hook(lambda own, _, out: out * getattr(own, "gain", 1) * own.gains[0] * own.gains[-1])
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), level, low=low)
    step(session, model)
    known = set(map(id, model.parameters()))
    PUT_IN[name](model, made)
    new = {p: p.detach().clone() for p in model.parameters() if id(p) not in known and p.requires_grad}
    for _ in range(3):
        step(session, model)
    said = [each.message for each in caplog.records if "was put into the model" in each.message]
    assert len(said) == bool(name)
    assert all(f"({name}): pass its parameters to optimizer.add_param_group" in each for each in said)
    session.optimizers[0].add_param_group({"params": list(new)})
    step(session, model)
    assert not any(torch.equal(p, before) for p, before in new.items())


def test_parameters_that_come_anew_in_each_step_are_named_once_and_not_kept(caplog):
    model, _, session = opened("O1")
    model[0].register_forward_hook(lambda own, _, out: out + model.delta)
    made = []
    for _ in range(3):
        model.delta, model.idle = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        made += map(weakref.ref, (model.delta, model.idle))
        step(session, model)
    gc.collect()
    assert sum(p() is not None for p in made) == 2
    assert [each.message.count("(delta (Parameter))") for each in caplog.records if "put into" in each.message] == [1]


def test_no_model_is_looked_through_for_modules_that_are_made_elsewhere(monkeypatch):
    model, _, session = opened()
    looked = []
    monkeypatch.setattr(Replacements, "_find_added", lambda self: looked.append(self))
    nn.Sequential(nn.Linear(2, 2))
    step(session, model)
    assert looked == []


def test_a_module_that_is_added_with_its_parameters_is_not_named(caplog):
    model, optimizer, session = opened()
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[3].parameters()})
    step(session, model)
    assert "was put into the model" not in caplog.text


def test_a_replaced_parameter_is_called_that():
    model, _, session = opened()
    model[2].weight = nn.Parameter(torch.ones(4, 16))
    with pytest.raises(halfstep.SessionError, match=r"2\.weight.*a module was replaced.*initialize again after that"):
        step(session, model)


def test_check_calls_a_replaced_module_that():
    model, _, session = opened("O2")
    model[2] = nn.Linear(16, 2)
    found = halfstep.check(session, lambda: model(torch.ones(3, 8)).float().square().mean())
    assert "a module was replaced" in next(each.advice for each in found if each.code == "parameter format")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_check_names_parameters_that_the_model_has_no_more(level):
    model, _, session = opened(level)
    assert not [each for each in halfstep.check(session) if each.severity == "error"]
    model[2] = nn.Linear(16, 2)
    error = next(each for each in halfstep.check(session) if each.code == "replaced parameters")
    assert "AdamW\n  seen: updates 2 parameters that the model lacks, the first of shape (4, 16)" in str(error)
    model[2] = nn.Sequential(nn.Linear(16, 2))
    with pytest.raises(halfstep.SessionError, match="5 modules instead of 4: a module was replaced after initialize"):
        halfstep.check(session)


@pytest.mark.parametrize(("level", "rules"), [("O1", []), ("O2", []), ("O1", [halfstep.Rule("0", halfstep.FULL)])])
def test_a_batch_that_no_plan_casts_is_named(level, rules):
    for layer, shape in ((nn.Linear(8, 2), (3, 8)), (nn.Conv1d(8, 2, 1), (3, 8, 1))):
        model = nn.Sequential(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with halfstep.initialize(model, optimizer, level, low="bf16", rules=rules):
            for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
                with pytest.raises(RuntimeError, match=rf"given a {dtype} tensor.*pass x\.float\(\)"):
                    model(torch.ones(shape, dtype=dtype))


class Does(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8), does

    def forward(self, x):
        return self.does(self.layer, x)


ONES = torch.ones(8, 8)
NORMS = [nn.BatchNorm1d, nn.LayerNorm, lambda n: nn.GroupNorm(2, n), lambda n: nn.InstanceNorm1d(n, affine=True)]
MEETS = [
    *(
        (nn.Sequential(norm(8), nn.Linear(8, 8)), torch.ones(8, 8, 8, dtype=dtype), rf"given a {dtype} .*pass x\.float")
        for norm in NORMS
        for dtype in (torch.float64, torch.int64, torch.bool)
    ),
    (Does(lambda own, x: own(x)), ONES.to(torch.complex64), r"given a torch.complex64 .*pass x\.real or \.abs"),
    (nn.Linear(8, 8), ONES.short(), r"given a torch.int16 .*pass x\.float"),
    (nn.BatchNorm1d(8), ONES.to(torch.complex64), r"given a torch.complex64 .*pass x\.real"),
    (Does(lambda own, x: own(x)), ONES.long(), "given a torch.int64 .*where forward needs integers"),
    (Does(lambda own, x: own(x + ONES.double())), ONES, r"a torch.float64 tensor that forward made.*call \.float"),
    (
        Does(lambda own, x: F.scaled_dot_product_attention(*[own(x.float())[None, None]] * 3, ONES.double()) * x),
        ONES.bool(),
        r"to be bool or float.*a torch.float64 tensor that forward made",
    ),
    (Does(lambda own, x: (x > 0) @ own(x)), ONES, r"a torch.bool tensor that forward made.*call \.float"),
]


def test_words_of_ones_own_about_formats_stay_as_they_are():
    def refuses(layer, keep):
        raise RuntimeError("lengths of float features and bool mask did not match")

    model = Does(refuses)
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    with pytest.raises(RuntimeError, match=r"^lengths of float features and bool mask did not match$"):
        model(ONES.bool())


@pytest.mark.slow_but("O1-bf16")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_format_that_no_plan_casts_is_named_with_where_it_came_from(level, low):
    for model, x, said in MEETS:
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, low=low):
            with pytest.raises(RuntimeError, match=said):
                model(x)
            if ".abs" in said or ".*pass" in said:
                model(x.abs() if x.is_complex() else x.float())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_in_float64_is_named_not_its_batch(level, before):
    model = nn.Sequential(nn.Linear(8, 2)).double() if before else nn.Sequential(nn.Linear(8, 2))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, low="bf16"):
        with pytest.raises(
            RuntimeError, match=r"torch\.float64 \(model\.double.*such as x\.float\(\): call model\.float"
        ):
            model.double()(torch.ones(3, 8))
        model.float()


def test_ids_are_not_blamed_for_formats_that_meet_inside():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.table = nn.Embedding(8, 4), torch.ones(4, 4)

        def forward(self, ids):
            with torch.autocast("cpu", enabled=False):
                return self.embed(ids).bfloat16() @ self.table

    model = Model()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    with pytest.raises(RuntimeError) as raised:
        model(torch.arange(4))
    assert "pass x.float()" not in str(raised.value)
    assert "halfstep.check(session, closure)" in str(raised.value)
    session.close()


PLAN = halfstep.level("O1", "bf16")
NEAREST = {
    "opt_level": lambda given: halfstep.initialize(*make(), **given),
    "momnets": lambda given: halfstep.initialize(*make(), **given),
    "loss_scales": lambda given: halfstep.initialize(*make(), **given),
    "level": lambda given: halfstep.initialize(*make(), **given),
    "dtype": lambda given: halfstep.initialize(*make(), **given),
    "keep_batchnorm_fp32": lambda given: halfstep.initialize(*make(), **given),
    "precision": lambda given: halfstep.initialize(*make(), **given),
    "clip": lambda given: opened()[2].step(**given),
    "xyz": lambda given: halfstep.initialize(*make(), **given),
    "evry": lambda given: opened()[2].observe(**given),
    "maxnorm": lambda given: opened()[2].step(**given),
    "loss_idx": lambda given: opened()[2].backward(torch.ones((), requires_grad=True), **given),
    "presicion": lambda given: halfstep.check(opened()[2], **given),
    "prodcts": lambda given: halfstep.whatif(lambda: None, make()[0], **given),
    "lossid": lambda given: halfstep.blame(opened()[2], lambda: None, **given),
    "lw": lambda given: halfstep.fsdp_policy("O1", **given),
    "ops_changes": lambda given: dataclasses.replace(PLAN, **given),
    "norm": lambda given: halfstep.Plan("own", "bf16", "full", "table", **given),
    "outpt": lambda given: halfstep.Policy("low", "low", **given),
    "lists": lambda given: halfstep.OpChange("deny", "exp", **given),
    "louw": lambda given: halfstep.level("O2", **given),
    "closur": lambda given: halfstep.inspect(opened()[2], **given),
    "min_scal": lambda given: halfstep.GradScaler("cpu", **given),
    "betta": lambda given: halfstep.Lion([], **given),
    "opt_levl": lambda given: amp.initialize(*make(), **given),
    "cast_model_type": lambda given: halfstep.initialize(*make(), **given),
    "num_losses": lambda given: halfstep.initialize(*make(), **given),
    "clipnorm": lambda given: halfstep.initialize(*make(), **given),
    "lvl": lambda given: halfstep.check(opened()[2], **given),
    "loss": lambda given: halfstep.whatif(model=make()[0], **given),
    "computes": lambda given: halfstep.Rule("head", **given),
    "allows": lambda given: halfstep.OpChanges(**given),
    "grad_output": lambda given: opened()[2].grad([], [], **given),
    "lows": lambda given: halfstep.load_plan("plan.toml", **given),
    "samples": lambda given: halfstep.measure(torch.ones(2), **given),
    "repeat": lambda given: halfstep.inspect(opened()[2], **given),
    "buffer": lambda given: halfstep.Rule("head", halfstep.FULL, **given),
    "pth": lambda given: halfstep.RunLog(**given),
    "enable": lambda given: halfstep.autocast("cpu", **given),
    "grow_interval": lambda given: halfstep.Scaling("dynamic", **given),
    "stepping": check_adapted,  # which adapters set themselves
    "loss_scal": check_adapted,
}
SAID = {
    "cast_model_type": "did you mean 'low'",
    "num_losses": r"initialize\(\) has no keyword .* mean session\.backward\(loss_id=\.\.\.\)\?; it has model",
    "clipnorm": r"did you mean session\.step\(max_norm=\.\.\.\)\?",
    "lvl": r"check\(\) has no keyword 'lvl'; did you mean halfstep\.initialize\(plan=\.\.\.\)\?",
    "loss": "did you mean 'closure'",
    "computes": r"did you mean halfstep\.Policy\(compute=\.\.\.\)\?",
    "repeat": r"inspect\(\) has no keyword 'repeat'; it has session, closure",
    "opt_level": "which is apex's: session = halfstep.initialize",
    "level": "did you mean 'plan'",
    "dtype": "did you mean 'low'",
    "precision": "did you mean 'low'",
    "clip": "did you mean 'max_norm'",
    "keep_batchnorm_fp32": "did you mean 'norms'",
    "xyz": "it has model, optimizer, plan",
    "stepping": "an adapter's initialize.. has no keyword 'stepping'.*it has low, loss_scale",
    "momnets": "did you mean 'moments'.; it has model, ",
    "maxnorm": r"step\(\) has no keyword 'maxnorm'; did you mean 'max_norm'.; it has optimizer, max_norm",
}


@pytest.mark.parametrize("keyword", NEAREST)
def test_an_unknown_keyword_names_the_nearest(keyword):
    with pytest.raises(TypeError, match=SAID.get(keyword, f"has no keyword '{keyword}'; did you mean '")):
        NEAREST[keyword]({keyword: "O1"})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m, o: halfstep.initialize(m, o, "O1", "bf16"),
            r"initialize\(\) takes model, optimizer, plan by .*: low,",
        ),
        (
            lambda m, o: halfstep.Rule("0", halfstep.FULL, "keep", "low", 1),
            r"pattern, policy, buffers, input by position",
        ),
        (
            lambda m, o: halfstep.initialize(m, o).step(o, 1.0),
            r"step\(\) takes optimizer by position, .* name: max_norm",
        ),
        (lambda m, o: LiveLine(4.0), r"LiveLine\(\) takes nothing by position, .* name: console, per_second"),
    ],
)
def test_values_that_need_a_name_get_theirs(call, said):
    with pytest.raises(TypeError, match=said):
        call(*make())


def test_check_compares_precision_or_not():
    with pytest.raises(halfstep.SessionError, match=r"precision is 'yes'; pass True .* or False"):
        halfstep.check(opened()[2], lambda: None, precision="yes")


def test_unpacking_a_session_says_what_initialize_returns():
    with pytest.raises(TypeError, match=r"returns one Session, not model and optimizer.*session = halfstep"):
        _, _ = halfstep.initialize(*make(), "O1", low="bf16")


WORDS = {
    "initialize": "init_scale: loss_scale=halfstep.Scaling('dynamic', init=2)?, max_loss_scale: max=2)?, op: 'ops'?, "
    "opt: 'optimizer'?, optim_bits: moments='8bit'?, optim_level: 'plan'?, compile: torch.compile(model)?, "
    "fp8: products=, growth_interval: growth_interval=2)?, callbacks: 'sinks'?, use_amp: plan='O0'",
    "Scaling": "growth_factor: 'growth'?, initial_scale: 'init'?, interval: 'growth_interval'?",
    "GradScaler": "init: 'init_scale'?, growth: 'growth_factor'?, max_loss_scale: 'max_scale'?",
    "GradScaler.update": "scale: 'new_scale'?",
    "Policy": "weight: 'param'?",
    "Rule": "format: 'policy'?, module: 'pattern'?",
    "whatif": "format: 'formats'?",
    "load_plan": "file: 'path'?",
    "Session.observe": "names: 'modules'?, kind: 'tensors'?",
    "Session.add_optimizers": "optimizer: 'optimizers'?",
}
ROWS = [(function, *row.split(": ")) for function, rows in WORDS.items() for row in re.split(r", (?=\w+: )", rows)]


@pytest.mark.parametrize(("function", "word", "meant"), ROWS)
def test_a_word_of_another_library_is_answered_with_ours(function, word, meant):
    with pytest.raises(TypeError, match=rf"has no keyword '{word}'; did you mean .*{re.escape(meant)}"):
        operator.attrgetter(function)(halfstep)(**{word: 2})


USES = {
    "returns one Session, not model and optimizer": [lambda s: s.train(), lambda s: s.fc1, lambda s: s[0]],
    r"session\.backward\(loss\)": [lambda s: s.scale(None)],
    "did you mean 'add_optimizers'": [lambda s: s.add_optimizer(None)],
    "takes no optimizer": [lambda s: s.unscale_(None)],
}


@pytest.mark.parametrize(("use", "said"), [(use, said) for said, uses in USES.items() for use in uses])
def test_a_session_that_is_used_as_the_model_or_as_a_scaler_says_what_to_do(use, said):
    with pytest.raises((AttributeError, TypeError), match=said):
        use(opened()[2])


def test_a_session_lacks_what_it_has_words_for_and_keeps_the_error_of_a_property():
    session = opened()[2]
    assert not hasattr(session, "eval")
    session.forget()
    with pytest.raises(AttributeError, match="'_parts'"):
        session.optimizers  # noqa: B018


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_a_model_that_is_cast_after_initialize_was_not_frozen(cast):
    model, _, session = opened("O1")
    getattr(model, cast)()
    with pytest.raises(halfstep.SessionError, match=r"was cast to torch\..*float16 after halfstep\.initialize"):
        step(session, model)


def test_a_state_error_names_the_entries_that_differ():
    plan = halfstep.level("O1", "fp16")
    rule = halfstep.Rule("0", halfstep.FULL)
    state = halfstep.initialize(*make(), plan.edit(rule, halfstep.Scaling("static", init=8.0))).state_dict()
    with pytest.raises(halfstep.StateError) as error:
        halfstep.initialize(*make(), plan).load_state_dict(state)
    differ = str(error.value).split("differ: ")[1]
    assert "rules has {'pattern': '0', " in differ
    assert "only in the state; scale.kind is 'static' in the state, 'dynamic' here" in differ
    assert "growth_interval" not in differ


def test_a_session_state_names_what_it_lacks_and_what_is_unknown():
    session = opened("O2")[2]
    state = session.state_dict() | {"scale": 8.0}
    del state["steps"]
    for wrong, said in (
        (state, "has no 'steps' and the unknown 'scale'; pass what"),
        ([8.0], r"is \[8\.0\] of type list"),
    ):
        with pytest.raises(halfstep.StateError, match=f"the session state {said}"):
            session.load_state_dict(wrong)


def test_a_format_that_was_chosen_is_information(caplog):
    with caplog.at_level(logging.INFO, "halfstep"):
        halfstep.initialize(*make(), "O1")
    levels = {each.levelno for each in caplog.records if "low is not set; using" in each.message}
    assert levels == {logging.INFO if "in hardware" in caplog.text else logging.WARNING}


@pytest.mark.parametrize("name", ["O0 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16"])
@pytest.mark.parametrize(
    "also", [{}, {"input": None}, {"rules": [{"pattern": "0", "policy": "full", "buffers": "keep"}]}]
)
def test_session_states_of_the_first_version_load(name, also):
    state = json.loads((OLD / "sessions.json").read_text())[name]
    state["plan"] |= also
    level, low = name.split()
    rules = [halfstep.Rule("0", halfstep.FULL)] if "rules" in also else ()
    if rules and level == "O0":
        pytest.skip("O0 has no rules")
    session = halfstep.initialize(*make(), level, low=low, rules=rules)
    session.load_state_dict(state)
    assert session.status().steps == 3


def test_notebooks_show_what_is_printed():
    _, _, session = opened()
    assert "Session(O2, low=bf16, steps=1)\nO2 in bf16: 1 steps, 0 skipped" in session._repr_html_()
    assert session.status()._repr_html_() == f'<pre style="white-space: pre-wrap">{session.status()}</pre>'
    session.close()
    assert "Session(O2, low=bf16, steps=1, closed)</pre>" in session._repr_html_()


def test_plans_and_logs_of_the_first_version_are_read():
    assert halfstep.load_plan(OLD / "plan.toml") == halfstep.level("O2", "fp16")
    run = read_log(OLD / "run.jsonl")
    (event,) = run.events
    assert event.record.cure == ()
    assert event.record.advice.endswith("; edits: OpChange(list='deny', op='exp')")
    assert not any("cannot be read" in note for note in run.notes)


def test_a_session_that_is_collected_while_a_model_is_built_ends_no_construction():
    opened("O1")
    collected = []

    def collect(*_):
        if not collected:
            collected.append(gc.collect())

    last = register_module_module_registration_hook  # if `collect` were, torch would not look at its hooks again
    with register_module_module_registration_hook(collect), last(lambda *_: None):
        assert len(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == 2
    assert collected


@pytest.mark.parametrize("steps_itself", [False, True])
@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_what_pruning_bakes_in_is_kept_exactly(level, low, steps_itself):
    model, optimizer = make()
    if steps_itself:  # by torch's own code, on fp32 copies
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, level, low=low)
    for _ in range(4):
        step(session, model)
    prune.l1_unstructured(model[0], "weight", 0.5)
    step(session, model)
    expected = model.state_dict()["0.weight_orig"] * model[0].weight_mask
    prune.remove(model[0], "weight")
    assert torch.equal(model.state_dict()["0.weight"], expected)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(session, model)
    session.close()
    assert torch.equal(model[0].weight, expected)


@pytest.mark.parametrize("write", ["data", "prune"])
@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
@pytest.mark.parametrize("without", [[], ["native"], ["native", "fused"]])
def test_zeros_written_past_the_masters_stay_numbers(write, level, low, without, request):
    order = patch.dict(IMPLEMENTATIONS)
    order.start()
    request.addfinalizer(order.stop)
    for name in without:  # as where there are no compiled loops
        del IMPLEMENTATIONS[name]
    model, optimizer, session = opened(level, low)
    for _ in range(3):  # until the remainders of split masters have both signs
        step(session, model)
    if write == "data":
        mask = torch.rand_like(model[0].weight) > 0.5
        model[0].weight.data.mul_(mask)
    else:
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.remove(model[0], "weight")
        optimizer.param_groups[0]["params"] = list(model.parameters())
    before = model.state_dict()["0.weight"]
    assert (before.abs() < 1e-30).float().mean() > 0.3
    step(session, model)
    assert not bool(session.last_step().skipped)
    assert all(p.isfinite().all() for p in model.state_dict().values())
