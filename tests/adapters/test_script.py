"""`halfstep run`: scripts with no mixed precision in them, as people write them, trained under a plan."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import halfstep
from halfstep.adapters.apex import install, uninstall
from halfstep.errors import SetupError
from halfstep.machine import AVX512_BF16
from tests.adapters.scripts_in_process import converted, differing, flat, plainly, writes

SCRIPTS = Path(__file__).parent / "scripts"
STYLES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "conftest")
LEVELS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


def by_hand(style, *changes):
    """Returns the text of a script, converted as its author would."""
    text = (SCRIPTS / f"{style}.py").read_text(encoding="utf-8")
    for old, new in (
        ("import torch\n", "import torch\nimport halfstep\n"),
        *changes,
        ("loss.backward()", "session.backward(loss); session.unscale_()"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.slow_but("gan", "resume", "anew", "by_hand", "closures")
def test_at_o0_a_script_is_bit_identical_to_python(style, tmp_path):
    found, ran = converted(SCRIPTS / f"{style}.py", tmp_path / "ours.pt", "O0")
    assert differing(found, plainly(SCRIPTS / f"{style}.py", tmp_path / "python.pt")) == []
    assert ran.trained.level == "O0"
    assert ran.trained.steps > 0 or style == "by_hand"


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.slow_but("by_hand-O1-fp16", "by_hand-O2-bf16", "clipping-O1-fp16", "closures-O2-bf16", "guarded-O1-fp16")
def test_a_script_trains_close_to_fp32_and_writes_fp32(style, level, low, tmp_path):
    path = SCRIPTS / f"{style}.py"
    if style == "by_hand" and level != "O1":
        with pytest.raises(SetupError, match="trains Sequential without an optimizer"):
            converted(path, tmp_path / "ours.pt", level, low)
        return
    found, ran = converted(path, tmp_path / "ours.pt", level, low)
    plain = plainly(path, tmp_path / "python.pt")
    assert (ran.trained.level, ran.trained.low, ran.brings) == (level, low, None)
    assert ran.trained.steps > 0
    assert differing(found["losses"], plain["losses"]) != []  # something ran low
    ours = dict(flat(found))
    for name, value in flat(plain):
        if not name.startswith(".optimizer") and not ran.trained.skipped:  # a first fp16 scale may be too high
            torch.testing.assert_close(torch.as_tensor(ours[name]), torch.as_tensor(value), rtol=0.1, atol=0.1)
    low_formats = (torch.bfloat16, torch.float16)
    assert not any(isinstance(value, torch.Tensor) and value.dtype in low_formats for value in ours.values())


OPENED = 'session = halfstep.initialize(model, optimizer, "{level}", low="{low}")\n'
CONVERSIONS = {
    "clipping": [
        ("losses = []\nhidden", OPENED + "losses = []\nhidden"),
        ("    optimizer.step()", "    session.step()"),
    ],
    "accumulation": [
        ("losses = []\n", OPENED + "losses = []\n"),
        ("        optimizer.step()", "        session.step()"),
    ],
    "guarded": [  # a reentrant checkpoint, whose inner pass is scaled already, and torch.autograd.grad
        ("    losses = []\n", "    global session\n    " + OPENED + "    losses = []\n"),
        ("torch.autograd.grad(model", "session.grad(model"),
        ("        optimizer.step()", "        session.step()"),
    ],
    "schedulers": [("losses = []\n", OPENED + "losses = []\n"), ("    optimizer.step()", "    session.step()")],
}

MORE_CONVERSIONS = {  # that cast as those above at the other levels
    "trainer_class": [
        ("        self.history = []\n", "        global session\n        " + OPENED + "        self.history = []\n"),
        ("        self.optimizer.step()", "        session.step()"),
    ],
    "closures": [
        ("    step = make_step", "    global session\n    " + OPENED + "    step = make_step"),
        ('state["opt"].step(closure).item()', "closure().item(), session.step()"),
        ("step(torch.randn(16, 6), torch.randn(16, 1))", "step(torch.randn(16, 6), torch.randn(16, 1))[0]"),
    ],
    "ema": [("losses = []\n", OPENED + "losses = []\n"), ("    opt.step()", "    session.step()")],
    "resume": [
        ("    start, losses = 0", "    " + OPENED + "    start, losses = 0"),
        ("        optimizer.step()", "        session.step()"),
    ],
    "workers": [
        ("    losses = []\n", "    " + OPENED + "    losses = []\n"),
        ("            optimizer.step()", "            session.step()"),
    ],
}
NAMES = {  # of model and optimizer
    "trainer_class": ("self.model", "self.optimizer"),
    "closures": ('state["net"]', 'state["opt"]'),
    "ema": ("model", "opt"),
}


@pytest.mark.parametrize(
    ("style", "level", "low"),
    [(style, *each) for style in CONVERSIONS for each in LEVELS]
    + [(style, "O1", "bf16") for style in MORE_CONVERSIONS]
    + [("closures", "O2", low) for low in ("bf16", "fp16")],  # whose first step begins before there is a session
)
@pytest.mark.slow_but("accumulation-O1-bf16", "guarded-O1-bf16", "schedulers-O1-bf16", "closures-O2-fp16")
def test_a_script_equals_its_hand_converted_form_bit_for_bit(style, level, low, tmp_path):
    model, optimizer = NAMES.get(style, ("model", "optimizer"))
    chosen = {**CONVERSIONS, **MORE_CONVERSIONS}[style]
    changes = [
        (old, new.replace("model, optimizer,", f"{model}, {optimizer},").format(level=level, low=low))
        for old, new in chosen
    ]
    hand = plainly(writes(tmp_path, by_hand(style, *changes)), tmp_path / "hand.pt")
    found, _ = converted(SCRIPTS / f"{style}.py", tmp_path / "ours.pt", level, low)
    assert differing(found, hand) == []
    assert differing(found, plainly(SCRIPTS / f"{style}.py", tmp_path / "python.pt")) != []


@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "fp16")])
def test_two_models_and_weights_written_through_data_equal_their_hand_converted_form(level, low, tmp_path):
    opened = f'session = halfstep.initialize([generator, discriminator], [optimizer_G, optimizer_D], "{level}", '
    text = "import halfstep\n" + (SCRIPTS / "gan.py").read_text(encoding="utf-8")
    for old, new in (
        ("losses = []\n", f'{opened}low="{low}")\nlosses = []\n'),
        ("loss_D.backward()", "session.backward(loss_D)\n    session.unscale_()"),
        ("loss_G.backward()", "session.backward(loss_G)\n        session.unscale_()"),
        ("optimizer_D.step()", "session.step(optimizer_D)"),
        ("optimizer_G.step()", "session.step(optimizer_G)"),
        ("    losses.append(loss_D.item())", "    session.adopt_weights()\n    losses.append(loss_D.item())"),
    ):
        assert old in text
        text = text.replace(old, new)
    text += "\nsession.close()\n"
    hand = plainly(writes(tmp_path, text), tmp_path / "hand.pt")
    found, _ = converted(SCRIPTS / "gan.py", tmp_path / "ours.pt", level, low)
    assert differing(found, hand) == []


SAM = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.0)
before = model.weight.detach().clone()
x = torch.randn(8, 4)
for _ in range(2):  # as sharpness-aware minimization does: the second pass is at other weights than the step
    (model(x).square().mean() / 1024).backward()
    old = model.weight.data.clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    optimizer.zero_grad()
    (model(x).square().mean() / 1024).backward()
    model.weight.data = old
    optimizer.step()
torch.save({{"change": model.state_dict()["weight"] - before}}, sys.argv[1])
"""


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_weights_written_between_the_backward_pass_and_the_step_are_those_that_it_updates(low, optimizer, tmp_path):
    found, ran = converted(writes(tmp_path, SAM.format(optimizer=optimizer)), tmp_path / "out.pt", "O2", low)
    assert found["change"].abs().max() < 0.01  # it was 2
    assert ran.trained.steps == 2


def test_copies_and_pickles_have_what_a_script_wrote_through_data(tmp_path):
    text = """
import copy, io, sys, torch
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
model.weight.data.fill_(0.25)
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
pickled = torch.load(file, weights_only=False)
torch.save([copy.deepcopy(model).weight, pickled.weight], sys.argv[1])
"""
    copied, _ = converted(writes(tmp_path, text), tmp_path / "out.pt", "O2", "fp16")
    assert [weight.tolist() for weight in copied] == [[[0.25] * 4]] * 2


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_steps_of_an_optimizer_with_a_closure_are_counted(level, tmp_path):
    text = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
x, y = torch.randn(8, 4), torch.randn(8, 1)
losses = []
def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss
for _ in range(4):
    losses.append(optimizer.step(closure).item())
torch.save({"losses": losses}, sys.argv[1])
"""
    found, ran = converted(writes(tmp_path, text), tmp_path / "out.pt", level, "bf16")
    assert ran.trained.steps == 4
    assert found["losses"][3] < found["losses"][0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_leaf_has_a_true_gradient_whoever_trains_it(level, tmp_path):
    text = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
x = torch.ones(1, 4, requires_grad=True)
other = torch.ones((), requires_grad=True)
(model(x).sum() * 1e-3 * other).backward()
(2 * other).backward()
grads = {name: p.grad for name, p in model.named_parameters()}
torch.save({"grads": grads, "x": x.grad, "other": other.grad}, sys.argv[1])
"""
    path = writes(tmp_path, text)
    found, ran = converted(path, tmp_path / "ours.pt", level, "fp16")
    plain = plainly(path, tmp_path / "python.pt")
    assert ran.trained.level == level
    assert found["other"] == pytest.approx(plain["other"].item(), rel=1e-3)
    for name, value in flat(plain):
        torch.testing.assert_close(dict(flat(found))[name].float(), value, rtol=0.01, atol=1e-5)


def test_an_optimizer_that_comes_later_has_the_session_go_on_with_its_counts(tmp_path):
    _, ran = converted(SCRIPTS / "anew.py", tmp_path / "ours.pt", "O2", "bf16")
    assert ran.trained.steps == 6


@pytest.mark.parametrize("step", ["closure", "closure=closure"])
def test_a_first_step_with_a_closure_is_skipped_where_its_gradients_overflow(step, tmp_path):
    text = f"""
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 100.0)).sum()
    loss.backward()
    return loss
before = model.weight.detach().clone()
loss = optimizer.step({step})
torch.save({{"before": before, "after": model.state_dict()["weight"], "loss": loss.item()}}, sys.argv[1])
"""
    found, ran = converted(writes(tmp_path, text), tmp_path / "out.pt", "O1", "fp16")
    assert torch.equal(found["before"], found["after"])
    assert (ran.trained.steps, ran.trained.skipped) == (1, 1)


@pytest.mark.parametrize(("level", "works"), [("O1", True), ("O2", False)])
def test_an_optimizer_whose_parameters_a_newer_one_has_is_refused_where_its_step_would_do_damage(
    level, works, tmp_path
):
    text = """
import sys, torch
model = torch.nn.Linear(4, 1)
old = torch.optim.SGD(model.parameters(), lr=0.1)
new = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
new.step()
old.step()
torch.save({}, sys.argv[1])
"""
    path = writes(tmp_path, text)
    if works:
        converted(path, tmp_path / "out.pt", level, "bf16")
    else:
        with pytest.raises(RuntimeError, match="shares parameters with a newer optimizer"):
            converted(path, tmp_path / "out.pt", level, "bf16")


OWN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled={enabled})
model(torch.randn(3, 4))  # before the script says what it does
with torch.autocast("cpu", dtype=torch.bfloat16, enabled={enabled}):
    loss = model(torch.ones(3, 4)).square().mean()
scaler.scale(loss).backward()
scaled = model.weight.grad.clone()
scaler.step(optimizer)
scaler.update()
torch.save({{"model": model.state_dict(), "scaled": scaled}}, sys.argv[1])
"""


def test_a_script_with_torch_amp_of_its_own_runs_as_it_is_and_nothing_is_scaled_twice(tmp_path):
    path = writes(tmp_path, OWN.format(enabled=True))
    found, ran = converted(path, tmp_path / "ours.pt", "O2", "fp16")
    assert ran.brings == "torch.amp's GradScaler"
    assert ran.trained is None
    assert differing(found, plainly(path, tmp_path / "python.pt")) == []


def test_torch_amp_that_a_script_switches_off_is_none(tmp_path):
    found, ran = converted(writes(tmp_path, OWN.format(enabled=False)), tmp_path / "ours.pt", "O1", "fp16")
    assert (ran.brings, ran.trained.steps) == (None, 1)
    assert found["scaled"].abs().max() < 10  # true gradients


def test_a_script_that_opens_a_session_gets_no_other(tmp_path):
    text = """
import sys, torch, halfstep
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with halfstep.initialize(model, optimizer, "O2", low="bf16") as session:
    session.backward(model(torch.ones(3, 4)).square().mean())
    session.step()
torch.save({}, sys.argv[1])
"""
    _, ran = converted(writes(tmp_path, text), tmp_path / "out.pt")
    assert (ran.brings, ran.trained.level, ran.trained.steps) == ("a halfstep session", "O2", 1)


@pytest.mark.parametrize(
    ("file", "counts"), [("adapters/accelerate.py", True), ("explain/diagnose/rehearsal.py", False)]
)
def test_a_session_that_the_adapter_of_a_trainer_opens_is_the_scripts(file, counts, tmp_path):
    text = f"""
import sys, torch, halfstep
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
code = "def prepare(): return halfstep.initialize(model, optimizer, 'O2', low='bf16', stepping='optimizer')"
exec(compile(code, {str(Path(halfstep.__file__).parent / file)!r}, "exec"))
session = prepare()
session.backward(model(torch.ones(3, 4)).square().mean())
optimizer.step()
torch.save({{}}, sys.argv[1])
"""
    _, ran = converted(writes(tmp_path, text), tmp_path / "out.pt")
    if counts:
        assert (ran.brings, ran.trained.level, ran.trained.steps) == ("a halfstep session", "O2", 1)
    else:
        assert ran.trained is None


APEX_AMP = """
import sys, torch
from apex import amp
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for x in (torch.ones(3, 4), torch.full((3, 4), float("inf"))):
    out = model(x)
    with amp.scale_loss(out.square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({{"model": model.state_dict(), "low": str((model.weight @ torch.ones(4)).dtype)}}, sys.argv[1])
"""


@pytest.mark.parametrize("before", ["", "model(torch.ones(3, 4)).mean().backward()"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_script_with_apex_amp_runs_on_the_stand_in_alone(low, before, tmp_path, caplog):
    path = writes(tmp_path, APEX_AMP.format(before=before))
    found, ran = converted(path, tmp_path / "ours.pt", "O2", low)
    assert (ran.brings, ran.trained.level, ran.trained.low) == ("apex.amp", "O1", low)
    assert (ran.trained.steps, ran.trained.skipped) == (2, 1)
    assert "uses apex.amp" in caplog.text
    assert f"halfstep run ignores the level or plan; the low format {low} is" in caplog.text
    install(low)
    try:
        assert differing(found, plainly(path, tmp_path / "python.pt")) == []
    finally:
        uninstall()


def test_a_script_from_before_apexs_initialize_ends_in_words(tmp_path):
    path = writes(tmp_path, "from apex.fp16_utils import FP16_Optimizer")
    with pytest.raises(ImportError, match=r"halfstep\.initialize\(model, optimizer\) replaces it"):
        converted(path, tmp_path / "ours.pt", None, None)


def test_what_a_script_with_torch_amp_does_not_use_is_told_once(tmp_path, caplog):
    path = writes(tmp_path, OWN.format(enabled=True))
    converted(path, tmp_path / "ours.pt", None, None)
    assert "halfstep run ignores" not in caplog.text
    converted(path, tmp_path / "ours.pt", "O2", "fp16")
    assert caplog.text.count("halfstep run ignores the level or plan and the low format") == 1
    converted(path, tmp_path / "ours.pt", None, None, moments="8bit")
    assert "halfstep run ignores the moments" in caplog.text


def test_the_session_of_a_script_keeps_moments_as_asked(tmp_path):
    made = "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.RMSprop(model.parameters())\n"
    path = writes(tmp_path, f"{made}model(torch.ones(2))")
    with pytest.raises(halfstep.SetupError, match="moments='8bit' does not work with RMSprop"):
        converted(path, tmp_path / "ours.pt", "O2", "bf16", moments="8bit")


COMPILED = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = compiled(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
"""


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow
def test_a_compiled_model_equals_its_hand_converted_form(level, tmp_path, on_processor):
    on_processor(AVX512_BF16)
    text = COMPILED
    for old, new in (
        ("import sys", "import halfstep, sys"),
        ("compiled = ", f'session = halfstep.initialize(model, optimizer, "{level}", low="bf16")\ncompiled = '),
        ("loss.backward()", "session.backward(loss); session.unscale_()"),
        ("optimizer.step()", "session.step()"),
    ):
        text = text.replace(old, new)
    torch.compiler.reset()
    hand = plainly(writes(tmp_path, text, "hand.py"), tmp_path / "hand.pt")
    found, ran = converted(writes(tmp_path, COMPILED), tmp_path / "ours.pt", level, "bf16")
    assert differing(found, hand) == []
    assert ran.trained.steps == 3


def test_a_model_that_the_garbage_collector_was_told_to_forget_is_found(tmp_path):
    text = (SCRIPTS / "schedulers.py").read_text(encoding="utf-8")
    text = text.replace("losses = []\n", "import gc\ngc.freeze()\nlosses = []\n")
    _, ran = converted(writes(tmp_path, text), tmp_path / "ours.pt", "O1", "bf16")
    assert ran.trained.steps == 8


def test_hand_made_updates_get_true_gradients_and_none_from_a_bad_batch(tmp_path):
    text = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
before = model.weight.detach().clone()
model(torch.full((1, 4), float("inf"))).sum().backward()
bad = model.weight.grad.clone()
model.zero_grad()
(model(torch.full((1, 4), 0.5)).sum() / 2).backward()
torch.save({"bad": bad, "good": model.weight.grad}, sys.argv[1])
"""
    found, ran = converted(writes(tmp_path, text), tmp_path / "out.pt", "O1", "fp16")
    assert torch.equal(found["bad"], torch.zeros(1, 4))
    assert torch.equal(found["good"], torch.full((1, 4), 0.25))
    assert (ran.trained.skipped, ran.trained.bad_losses) == (1, 1)


def test_a_wrapped_model_is_trained_at_o1_and_refused_at_o2(tmp_path, process_group):
    text = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
torch.save({"model": model.state_dict()}, sys.argv[1])
del model, optimizer
"""
    path = writes(tmp_path, text)
    found, ran = converted(path, tmp_path / "out.pt", "O1", "bf16")
    assert ran.trained.steps == 2
    plain = plainly(path, tmp_path / "python.pt")
    assert differing(found, plain) != []
    with pytest.raises(SetupError, match="Linear is already wrapped in DistributedDataParallel at its first forward"):
        converted(path, tmp_path / "out.pt", "O2", "bf16")


def everything():
    """Returns what each attribute is of torch's modules and classes, of the drop-ins and of the user's modules.

    Not of dynamo's modules, which are counters and caches that it makes anew as it likes.
    """
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ("torch", "apex", "users") and not name.startswith("torch._dynamo")
    }
    classes = {
        id(value): value
        for module in modules.values()
        for value in list(vars(module).values())
        if issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch"
    }
    owners = modules | {f"{cls.__module__}.{cls.__qualname__} {number}": cls for number, cls in classes.items()}
    owners |= {f"ours {cls.__qualname__}": cls for cls in (halfstep.autocast, halfstep.GradScaler, halfstep.Session)}
    return {name: dict(vars(owner)) for name, owner in owners.items()}


USERS = """
import torch
from torch import autocast
from torch.amp import GradScaler
from torch.autograd import backward, grad
class Net(torch.nn.Linear):
    pass
"""


@pytest.mark.parametrize("ending", ["", "raise KeyError(1)"])
def test_everything_is_put_back_object_by_object(ending, tmp_path, monkeypatch):
    text = """
import sys, torch, users
model = users.Net(4, 2)
before = (type(model), dict(vars(model)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
users.kept += [model, optimizer, *before]
assert torch.autocast is not users.autocast and torch.autograd.backward is not users.backward
model(torch.ones(3, 4)).square().mean().backward()
assert type(model) is not users.Net and "step" in vars(optimizer)
optimizer.step()
torch.save({}, sys.argv[1])
"""
    writes(tmp_path, USERS, "users.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    users = importlib.import_module("users")
    monkeypatch.setitem(sys.modules, "users", users)
    users.kept = []
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # torch wraps the step of a class when it is first used
    path = writes(tmp_path, text + ending)
    before, path_before, argv, main = everything(), list(sys.path), sys.argv, sys.modules["__main__"]
    assert sum(map(len, before.values())) > 20000
    try:
        converted(path, tmp_path / "out.pt", "O2", "bf16")  # emulated fp16 has torch.compile's stance made anew
    except KeyError:
        assert ending
    after = everything()
    counts = {"__warningregistry__", "next_id"}  # torch's and python's own: of warnings given, of hooks registered
    changed = [
        (owner, name)
        for owner, attributes in before.items()
        for name, value in attributes.items()
        if name not in counts and after[owner].get(name) is not value
    ]
    assert changed == []
    assert "apex" not in sys.modules
    assert (sys.path, sys.argv, sys.modules["__main__"]) == (path_before, argv, main)
    model, optimizer, kind, own = users.kept
    assert type(model) is kind is users.Net
    assert vars(model).keys() == own.keys()
    assert all(vars(model)["_parameters"][name] is p for name, p in own["_parameters"].items())
    fresh = vars(torch.optim.SGD(model.parameters(), lr=0.1)).keys()
    assert vars(optimizer).keys() - {"_step_count", "_opt_called"} == fresh
