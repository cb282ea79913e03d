"""The check of precision names what a low format loses without an overflow, with an edit that cures it, and no more."""

import inspect
import math
import re
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import FULL, OpChange, Rule
from halfstep.explain.diagnose.rehearsal import Rehearsal
from halfstep.explain.preflight.precision import Damage, StepResult, damage_of
from halfstep.records import COMPARED
from tests.contracts.cases import Same, differing, snapshot
from tests.diagnose.faults import quiet
from tests.diagnose.faults.hosts import CLASSES, WIDTH, Cnn, Lstm, Transformer, images, sequences, words
from tests.preflight.planted import Does

LOST = "precision lost"
PLANTS = {
    name: each
    for name, each in vars(quiet).items()
    if inspect.isclass(each) and (hasattr(each, "function") or name in ("Schedule", "Splines", "Slope"))
}
KEPT = {"log_power", "inverse_square", "likelihood"}  # bf16 does them no harm, fp16 does
LONG = {"interest", "moving_average", "resonator", "discounted", "rotations", "oscillator", "newton", "polynomial"}
HOSTS = {  # what builds it, and the places that may be named
    "root": (quiet.Root, r"\(model\), quiet\.py:\d+ in \w+"),
    "six layers": (quiet.Layers, r"layers\.\d\.plant, .*"),
    "often": (quiet.Often, "plant, .*"),
    "dict": (lambda plant: quiet.Returns(plant, lambda y: {"logits": y}), "plant, .*"),
    "tuple": (lambda plant: quiet.Returns(plant, lambda y: (y, y.mean())), "plant, .*"),
    "loss": (lambda plant: quiet.Returns(plant, lambda y: y.square().mean()), "plant, .*"),
    "reentrant": (lambda plant: quiet.Checkpointed(plant, True), r"layers\.1\.plant, .*"),
    "checkpoint": (lambda plant: quiet.Checkpointed(plant, False), r"layers\.1\.plant, .*"),
    "lstm": (lambda plant: Lstm(plant(), features=True), "plant, .*"),
    "transformer": (lambda plant: Transformer(plant()), r"blocks\.1\.plant, .*"),
    "cnn": (lambda plant: Cnn(plant()), "plant, .*"),
}
GIVEN = {"lstm": sequences, "transformer": words, "cnn": images}


def made(build):
    torch.manual_seed(1)
    return build()


def rows(count=quiet.MANY):
    return torch.randn(count, WIDTH)


def inputs(given=rows):
    torch.manual_seed(2)
    x = given()
    return x, torch.randint(CLASSES, x.shape[:1])


def logits_of(found):
    return found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found


def loss_of(model, x, targets):
    found = logits_of(model(x))
    return F.cross_entropy(found.float(), targets) if found.dim() else found


def checked(build, name="O2", low="bf16", given=rows):
    """The findings on precision that are no note."""
    model, (x, targets) = made(build), inputs(given)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), name, low=low) as session:
        found = halfstep.check(session, lambda: loss_of(model, x, targets))
    return [each for each in found if each.code == LOST and each.severity != "note"]


def output(build, plan, given=rows):
    model, (x, _) = made(build), inputs(given)
    with halfstep.initialize(model, None, plan):
        return logits_of(model(x)).detach().double()


def off_by(build, plan, given=rows):
    """How far outputs under a plan are from fp32, in their spread: counted here as the method says."""
    low, exact = output(build, plan, given), output(build, halfstep.level("O0", plan.low), given)
    if not exact.dim():
        return float((low - exact).abs() / exact.abs())
    return float((low - exact).square().mean().sqrt() / (exact - exact.mean(0)).square().mean().sqrt())


def is_named_and_cured(build, place, name="O2", low="bf16", given=rows):
    (found,) = checked(build, name, low, given)
    assert re.fullmatch(place, found.place), found
    plan = halfstep.level(name, low)
    assert off_by(build, plan.edit(*found.cure), given) < off_by(build, plan, given) / 3
    return found


@pytest.mark.slow_but("hour", "margins", "pixels", "ranks", "returns", "spread", "cents", "surprise", "td_error")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in sorted(PLANTS.keys() - KEPT)]
)
def test_a_plant_is_named_and_its_cure_cures(name):
    found = is_named_and_cured(lambda: quiet.sequential(PLANTS[name]), rf"1, quiet\.py:\d+ in ({name}|forward)")
    assert found.cure == (Rule("1", FULL),)


@pytest.mark.slow_but("log_power")
@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_the_format_does_not_harm_is_left_in_peace(name):
    build = lambda: quiet.sequential(PLANTS[name])  # noqa: E731
    assert checked(build) == []
    found = is_named_and_cured(build, rf"1, quiet\.py:\d+ in {name}", low="fp16")
    assert "makes values that fp16 has only every 5.96e-08" in found.evidence


@pytest.mark.slow_but("log_returns-transformer", "hashed-lstm")
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["log_returns", "spread", "hashed"])
def test_wherever_it_stands(name, host):
    make, place = HOSTS[host]
    build, given = (lambda: make(PLANTS[name])), GIVEN.get(host, rows)
    if (name, host) == ("log_returns", "transformer"):  # 5% of what the model returns
        assert checked(build, given=given) == []
    else:
        is_named_and_cured(build, place, given=given)


def guarded(x):
    return quiet.spread.function(x.clamp_min(1e-9))  # which fp16 has not: another finding in the same module


@pytest.mark.parametrize(
    ("plant", "name", "low"),
    [(quiet.spread, "O1", "bf16"), (quiet.spread, "O1", "fp16"), (lambda: Does(guarded), "O2", "fp16")],
)
def test_at_other_levels_and_formats(plant, name, low):
    is_named_and_cured(lambda: quiet.sequential(plant), "1, .* in spread", name, low)


@pytest.mark.slow_but("spread")
@pytest.mark.parametrize("other", ["spread", "hashed"])
def test_two_plants_are_both_kept_full(other):
    build = lambda: quiet.Layers(PLANTS[other], other=quiet.log_returns)  # noqa: E731
    (found,) = checked(build)
    assert found.cure == tuple(Rule(f"type:{kind}", FULL) for kind in sorted(["LogReturns", other.title()]))
    assert off_by(build, halfstep.level("O2", "bf16").edit(*found.cure)) < 0.05


class Own(nn.Module):
    """A model whose own code is a function of it and of what its first layer returns."""

    def __init__(self, function, plant=None):
        super().__init__()
        self.stem, self.function, self.plant = nn.Linear(WIDTH, WIDTH), function, plant
        self.spread, self.head = quiet.spread(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.function(self, self.stem(x)))


class Casts(nn.Linear):
    def forward(self, x, dtype):
        return super().forward(x.to(dtype) * torch.cos((1000 + torch.arange(WIDTH)).to(dtype)))


ODD = {  # the model's own code, a plant, and the place
    "choices": (lambda own, y: y.gather(-1, own.plant(y)), lambda: Does(lambda x: (600 + x).argsort(-1)), "plant"),
    "casts": (lambda own, y: torch.sin((y * 100 + 4000).to(own.head.weight.dtype) - 4000), nn.Identity, r"\(model\)"),
    "written": (lambda own, y: (own.plant(y), 400 * y)[1], lambda: Does(lambda x: x.add_(400).log_().sub_(6)), "plant"),
    "flat": (lambda own, y: y * own.plant(y)[:, None], lambda: Does(lambda x: ((x + 300) - 300)[:, 0]), "plant"),
    "a format given": (lambda own, y: own.plant(y, y.dtype), lambda: Casts(WIDTH, WIDTH), "plant"),  # no rule fits it
}  # fmt: skip


@pytest.mark.slow_but("choices", "a format given")
@pytest.mark.parametrize("name", ODD)
def test_odd_forms_are_named_and_cured(name):
    own, plant, place = ODD[name]
    is_named_and_cured(lambda: Own(own, plant()), rf"{place}, test_precision\.py:\d+ in (<lambda>|forward)")


def test_a_module_below_the_limit_is_named_where_the_model_is_above():
    given = lambda: torch.randn(quiet.MANY, 3, 6, 6)  # noqa: E731
    is_named_and_cured(lambda: Cnn(quiet.log_returns()), "plant, .* in log_returns", "O1", "fp16", given)


@pytest.mark.parametrize(("compared", "gradient"), [(1, 0.0), (2, None)])
def test_a_trial_with_values_that_are_not_finite_is_no_cure(compared, gradient):
    damage = Damage(1.0, 1.0, 2)
    assert damage.is_cured_by(Damage(0.0, 0.0, 2))
    assert not damage.is_cured_by(Damage(0.0, gradient, compared))


def zero_head(plant=nn.Tanh):
    model = quiet.sequential(plant)
    nn.init.zeros_(model[2].weight)
    return model


def integers(x):
    return x + (torch.arange(x.shape[-1]).to(x.dtype) % 7 - 3)  # exact in bf16


def widened(x):
    price = 400 + x.float()
    return (100 * torch.log(price / price.roll(1, -1))).to(x.dtype)


HEALTHY = {
    "linear": lambda: quiet.sequential(nn.Identity),
    "zero head": zero_head,
    "offset": lambda: quiet.sequential(lambda: Does(lambda x: x + 1)),
    "integers": lambda: quiet.sequential(lambda: Does(integers)),
    "in fp32 by the user": lambda: quiet.sequential(lambda: Does(widened)),
    "norm": lambda: quiet.sequential(lambda: nn.LayerNorm(WIDTH)),
    "batch norm": lambda: quiet.sequential(lambda: nn.BatchNorm1d(WIDTH)),
    "dropout": lambda: quiet.sequential(lambda: nn.Dropout(0.5)),
    "dead": lambda: quiet.sequential(lambda: Does(lambda x: (x - 100).relu())),
    "softmax": lambda: quiet.sequential(lambda: nn.Softmax(-1)),
    "constant": lambda: quiet.sequential(lambda: Does(lambda x: x * 0 + 3)),
    "short sum": lambda: quiet.sequential(lambda: Does(lambda x: x.cumsum(-1) / 4)),
    "layers": lambda: quiet.Layers(nn.Identity),
}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_left_in_peace(name, low):
    assert checked(HEALTHY[name], "O2", low) == []


def told(closure, model, low="bf16", **options):
    """What one check says of precision, and how often it calls the closure."""
    calls = []
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low=low) as session:
        found = halfstep.check(session, lambda: (calls.append(0), closure(model))[1], **options)
    return [each for each in found if "precision" in each.code], len(calls)


@pytest.mark.parametrize("count", [1, quiet.MANY])
def test_a_healthy_model_costs_one_step_more_and_none_without(count):
    x, targets = inputs(lambda: rows(count))
    found, calls = told(lambda model: loss_of(model, x, targets), nn.Linear(WIDTH, WIDTH))
    assert [(each.severity, each.code) for each in found] == [("note", COMPARED)]
    assert "the model's outputs are off by 0." in found[0].evidence
    assert calls == 2
    assert told(lambda model: loss_of(model, x, targets), nn.Linear(WIDTH, WIDTH), precision=False) == ([], 1)


def test_a_plant_costs_at_most_twelve_steps():
    x, targets = inputs()
    assert told(lambda model: loss_of(model, x, targets), made(lambda: quiet.Root(quiet.spread)))[1] <= 12


class Backward(Same):  # as far off as those of BatchNorm in a batch of 4
    @staticmethod
    def backward(ctx, grad):
        return grad if grad.dtype is torch.float32 else grad * 2


class Little(Backward):  # as near a minimum
    @staticmethod
    def backward(ctx, grad):
        return grad if grad.dtype is torch.float32 else grad * 1.5


class WithLoss(nn.Module):  # as in transformers
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, targets):
        logits = self.net(x)
        return ((logits + 300) - (F.one_hot(targets, CLASSES) + 300)).square().mean(), logits


GRADIENTS = {  # the model, the code of what is found, and the edit
    "loss": (WithLoss, LOST, (OpChange("deny", "add"),)),
    "own": (lambda: quiet.sequential(lambda: Does(Backward.apply)), LOST, None),
    "own, little": (lambda: quiet.sequential(lambda: Does(Little.apply)), COMPARED, ()),
    "in a part": (lambda: quiet.Layers(lambda: Does(Backward.apply)), COMPARED, ()),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_alone_cost_two_trials(name):
    build, code, cure = GRADIENTS[name]
    x, targets = inputs()
    loss = (lambda model: model(x, targets)[0]) if name == "loss" else lambda model: loss_of(model, x, targets)
    (found,), calls = told(loss, made(build))
    assert found.code == code
    assert cure is None or found.cure == cure
    assert "outputs are off by 0." in found.evidence
    assert found.evidence.startswith("add " if name == "loss" else "the model" if code == LOST else "against")
    assert calls <= (5 if code == COMPARED else 7)  # fp32, modules again, operations, a trial; one more, fp32 again


def test_a_loss_of_differences_that_magnifies_the_rounding_of_outputs_is_named_with_the_plan_that_cures_it():
    x, net = torch.rand(64, 2), nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    curved = lambda model: (((model(x + 0.02) - 2 * model(x) + model(x - 0.02)) / 4e-4 - 1) ** 2).mean()  # noqa: E731
    (found,), calls = told(curved, net)
    assert (found.code, found.cure) == (LOST, (Rule("", FULL),))
    assert "; the loss is " in found.evidence
    assert found.advice.endswith("gradients by under 0.1%; no smaller edit that was tried divides this by 3")
    assert calls <= 7


def test_an_operation_that_loses_little_of_outputs_whose_differences_a_loss_takes_is_named():
    torch.manual_seed(1)
    x, levels = torch.randn(16, 32, 4), 800 * torch.rand(16, 1, 1)
    net = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1), Does(lambda x: x + levels.to(x.dtype)))
    changes = lambda model: ((model(x).float().diff(dim=1) - x[:, 1:, :1]) ** 2).mean()  # noqa: E731
    (found,), _ = told(changes, nn.Sequential(net))
    assert (found.code, found.cure) == (LOST, (OpChange("deny", "add"),))
    assert found.place.startswith("0.3, test_precision.py:")
    assert found.evidence.startswith("add computes with values up to ")


def test_a_layer_that_rounds_what_a_module_gives_in_fp32_is_kept_with_it():
    torch.manual_seed(1)
    x, targets = torch.randn(8, 1500, 16), torch.randint(CLASSES, (8, 1500))
    averages = Does(lambda x: (x.abs() + 1).cumsum(1) / torch.ones_like(x).cumsum(1))  # which differ little by place
    model = nn.Sequential(nn.Linear(16, 16), averages, nn.Linear(16, CLASSES))
    (found,), _ = told(lambda model: F.cross_entropy(model(x).float().flatten(0, 1), targets.flatten()), model)
    assert (found.code, [rule.pattern for rule in found.cure]) == (LOST, ["1", "2"])
    assert "likewise 2" in found.evidence


def test_gradients_of_a_minimum_are_no_fault():
    x, net = torch.randn(64, 8), nn.Linear(8, 1)
    with torch.no_grad():
        y = x.sum(1, keepdim=True) + torch.randn(64, 1)
        exact = torch.linalg.lstsq(torch.cat([x, torch.ones(64, 1)], 1), y).solution
        net.weight.copy_(exact[:8].t())
        net.bias.copy_(exact[8])
    (found,), _ = told(lambda model: (model(x) - y).square().mean(), net)
    assert found.code == COMPARED
    assert "near a minimum" in found.advice


def test_the_second_of_two_models_is_named():
    first, second = nn.Linear(WIDTH, WIDTH), made(lambda: quiet.Root(quiet.spread))
    x, targets = inputs()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    with halfstep.initialize([first, second], optimizer, "O2", low="bf16") as session:
        found = halfstep.check(session, lambda: loss_of(second, x + 0 * first(x), targets))
    (lost,) = [each for each in found if each.code == LOST]
    assert lost.evidence.endswith("in model 1 (the first is 0)")


def test_a_constant_that_vanishes_on_the_same_line_hides_no_loss():
    build = lambda: quiet.sequential(lambda: Does(lambda x: 100 * ((2000 + x) / (2000 - x) + 1e-8).log()))  # noqa: E731
    (x, targets), model = inputs(), made(build)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="fp16") as session:
        found = halfstep.check(session, lambda: loss_of(model, x, targets))
    assert {each.code for each in found} >= {"constant vanishes", LOST}
    assert len({each.place for each in found}) == 1


class AbsorbsAndRounds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.last(h / torch.sqrt((h * 400) * (h * 400) + 1) + (3000 + h) - 3000)


def test_an_absorbed_overflow_on_the_same_line_hides_no_loss_that_its_edit_leaves():
    (x, targets), model = inputs(), made(AbsorbsAndRounds)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="fp16") as session:
        found = {each.code: each for each in halfstep.check(session, lambda: loss_of(model, x, targets))}
    assert found["overflow absorbed"].place == found[LOST].place
    assert found["overflow absorbed"].cure != found[LOST].cure


def test_a_model_that_amplifies_what_is_rounded_everywhere_is_named_without_an_edit():
    sines = [nn.Linear(WIDTH, WIDTH), Does(lambda x: 30 * x), Does(torch.sin)]
    x, targets = inputs()
    model = made(lambda: nn.Sequential(*sines, nn.Linear(WIDTH, WIDTH), *sines[1:], nn.Linear(WIDTH, CLASSES)))
    found, calls = told(lambda model: loss_of(model, x, targets), model)
    assert [(each.code, each.cure) for each in found] == [(LOST, ())]
    assert re.fullmatch(r"\d, planted\.py:\d+ in forward", found[0].place)
    assert found[0].evidence.startswith("sin ")
    assert calls <= 12


class FreesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.full_like(x, 300.0)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.kept
        del ctx.kept
        return grad * kept


def test_a_backward_pass_that_runs_once_is_not_asked_for_twice():
    x, targets = inputs()
    model = made(lambda: quiet.sequential(lambda: Does(FreesWhatItSaved.apply)))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="fp16") as session:
        found = halfstep.check(session, lambda: 1e3 * loss_of(model, x, targets))
    said = {each.code: each for each in found}
    assert "a lower loss scale was not tried" in said["gradients not finite"].evidence
    assert COMPARED in said or LOST in said or "precision not compared" in said


def test_gradients_that_overflow_at_the_first_scales_are_compared_at_lower_ones():
    x, targets = inputs()
    model = made(lambda: quiet.sequential(lambda: Does(lambda x: ((x * 1e-2) * 300) * 300 / 900)))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="fp16") as session:
        found = halfstep.check(session, lambda: 1e4 * loss_of(model, x, targets))
    (note,) = [each for each in found if each.code == COMPARED]
    assert re.search(r"gradients by (under )?[\d.]+%$", note.evidence)


def test_gradients_that_overflow_are_not_said_to_be_right():
    x, targets = inputs()
    model = made(lambda: quiet.sequential(lambda: Does(lambda x: ((x * 1e-2) * 300) * 300 / 900)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:
        found = halfstep.check(session, lambda: 1e7 * loss_of(model, x, targets))
    (note,) = [each for each in found if each.code == COMPARED]
    assert note.evidence.endswith("gradients overflow")
    assert note.advice.startswith("gradients were not compared")


def test_another_batch_in_each_call_is_said():
    batches = iter(torch.randn(9, 8, WIDTH))
    found, _ = told(lambda model: model(next(batches)).square().mean(), quiet.sequential(nn.Tanh))
    assert [each.code for each in found] == ["precision not compared"]
    assert "takes another batch each time" in found[0].evidence


def test_batches_that_run_out_are_said():
    batches = iter([inputs()])
    found, _ = told(lambda model: loss_of(model, *next(batches)), quiet.sequential(nn.Tanh))
    assert [each.code for each in found] == ["precision not compared"]
    assert "ran out of batches" in found[0].evidence


def test_a_closure_that_does_not_call_the_model_is_not_compared():
    weight = nn.Parameter(torch.ones(3))
    for closure in (lambda model: weight.square().sum(), lambda model: weight.sum() + model.weight.sum()):
        found, _ = told(closure, nn.Linear(2, 2))
        assert [each.code for each in found] == ["precision not compared"]
        assert "returns nothing that can be compared" in found[0].evidence


def test_a_module_that_returns_its_loss_is_named_with_a_rule():
    class Loss(nn.Module):
        def forward(self, y, targets):
            return (((y + 300.0) - 300.0) - targets).square().mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)), Loss()

        def forward(self, x, targets):
            return self.loss(self.net(x), targets)

    torch.manual_seed(0)
    x, targets = torch.randn(64, 32), torch.zeros(64, 16)
    found, _ = told(lambda model: model(x, targets), Model())
    assert [(each.code, each.cure) for each in found] == [(LOST, (Rule("loss", FULL),))]
    assert found[0].place.startswith("loss, ")


class Alternates:  # a state of the model's that nobody puts back
    __slots__ = ("runs",)

    def __call__(self, x):
        self.runs = not getattr(self, "runs", False)
        return x * (1 + 3 * self.runs)


@pytest.mark.parametrize("period", [0, 2, 3, "hidden", "first", "an object's"])
def test_a_model_that_does_not_repeat_is_no_fault_of_the_format(period):
    chance, runs, factor = torch.Generator().manual_seed(0), count(), [1.0]  # which nobody puts back
    does = {
        0: lambda x: x + torch.randn(x.shape, generator=chance),
        "hidden": lambda x: x * (1 + 3 * (next(runs) % 2)),
        "first": lambda x: x * (1 + 3 * (next(runs) > 0)),
        "an object's": Alternates(),
    }
    noisy = Does(does.get(period, lambda x: x * factor[0]))
    x, targets = inputs()

    def loss(model):
        if period in (2, 3):
            factor[0] = 4.0 * bool(next(runs) % period)
        return loss_of(model, x, targets)

    found, calls = told(loss, quiet.sequential(lambda: noisy))
    assert [each.code for each in found] == ["precision not compared"]
    assert "does not repeat: from one run to the next" in found[0].evidence
    assert calls <= 12


def test_a_model_that_cannot_be_copied_is_named():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Uncopied(WIDTH, CLASSES))
    x, targets = inputs()
    found, _ = told(lambda model: loss_of(model, x, targets), model)
    assert [each.code for each in found] == ["precision not compared"]
    assert "no copies" in found[0].evidence


def test_nothing_of_the_users_changes():
    class Counts(quiet.log_returns):
        def __init__(self):
            super().__init__()
            self.calls, self.own = 0, torch.Generator().manual_seed(3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.seen += 1
            return super().forward(x) + 0.01 * torch.randn(x.shape, generator=self.own)

    model, (x, targets) = made(lambda: quiet.sequential(Counts)), inputs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with halfstep.initialize(model, optimizer, "O2", low="bf16") as session:
        for _ in range(2):
            session.backward(loss_of(model, x, targets))
            session.step()
        session.backward(loss_of(model, x, targets))
        before, gradients = snapshot(model, optimizer, session), [p.grad.clone() for p in model.parameters()]
        own, chance = model[1].own.get_state(), torch.get_rng_state()
        twice = [halfstep.check(session, lambda: loss_of(model, x, targets)) for _ in range(2)]
        assert LOST in [each.code for each in twice[0]]
        assert twice[0] == twice[1]
        assert differing(before, snapshot(model, optimizer, session)) == []
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert torch.equal(own, model[1].own.get_state())
        assert torch.equal(chance, torch.get_rng_state())
        assert (model[1].calls, float(model[1].seen)) == (3, 3.0)


def turned(x):
    return x * torch.cos(1000 + torch.arange(WIDTH).to(x.dtype))


def test_the_operation_its_line_and_both_values_are_named():
    (found,) = checked(lambda: quiet.sequential(lambda: Does(turned)))
    line = inspect.getsourcelines(turned)[1] + 1
    assert found.place == f"1, test_precision.py:{line} in turned"
    assert "which bf16 has only every 4, and gives 1000 in place of 1002" in found.evidence


def looked_up(x):
    table, column = torch.sin(torch.arange(1024.0) / 2).to(x.dtype), 0.05 * x + 0.8
    grid = torch.stack([column, column * 0], -1)[None]
    return F.grid_sample(table.view(1, 1, 1, -1), grid, align_corners=False)[0, 0]


def test_an_operation_that_makes_a_small_error_large_is_said_to():
    found = is_named_and_cured(lambda: quiet.sequential(lambda: Does(looked_up)), "1, .* in looked_up")
    assert found.evidence.startswith("grid_sampler_2d makes large errors of small ones in its inputs, and gives ")


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (list.pop, "IndexError: pop from empty list"),
        (lambda queue: [queue.pop() for _ in queue[:]], "ValueError: it returned 0 values, not 1"),
    ],
)
def test_calls_that_cannot_be_made_again_are_named(take, why):
    queue, (x, targets) = [], inputs()

    def forward(own, y):
        queue.append(own.spread(y))
        taken = own.plant(y)
        return taken if torch.is_tensor(taken) else taken[0]

    model = made(lambda: Own(forward, Does(lambda x: take(queue))))
    found, _ = told(lambda model: loss_of(model, x, targets), model)
    assert [(each.code, each.place) for each in found][1:] == [("precision not compared", "(model)")]
    assert found[0].place.startswith("spread, ")
    assert found[1].evidence == f"calls that could not be made again in fp32: plant ({why})"


def test_an_object_that_a_module_writes_to_is_written_once():
    class Keeps(nn.Module):
        def forward(self, x, cache):
            cache.seen.append(x)
            return quiet.spread.function(x)

    def forward(own, y):
        cache = SimpleNamespace(seen=[])
        y = own.plant(y, cache)
        assert len(cache.seen) == 1
        return y

    is_named_and_cured(lambda: Own(forward, Keeps()), "plant, .* in spread")


def test_both_values_are_those_of_the_worst_call():
    class Shifts(nn.Module):
        def forward(self, x, far):
            return x + far - far

    add = lambda own, y: own.plant(y, 100.0) + own.plant(y, 300.0) + own.plant(y, 100.0)  # noqa: E731
    found = is_named_and_cured(lambda: Own(add, Shifts()), "plant, .* in forward")
    pairs = re.findall(r"(\S+) in place of ([\d.-]+\d)", found.evidence)
    (low, exact), (returned, exactly) = [(float(low), float(exact)) for low, exact in pairs]
    assert 290 < low < 310
    assert abs(low - exact) == pytest.approx(abs(returned - exactly), abs=0.01)
    assert abs(low - exact) > 0.5  # 0.25 at most in the other calls


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])  # whose squares are 0 or infinite in fp32
def test_gradients_of_any_size_are_compared_in_their_norm(size):
    exact, low = torch.tensor([3.0, 4.0]) * size, torch.tensor([3.0, 4.5]) * size
    damage = damage_of(StepResult([], [low * 8, None], 8.0), StepResult([], [exact * 2, exact], 2.0))
    assert damage.gradient == pytest.approx(0.1, rel=1e-5)


def test_without_memory_for_a_copy_the_suspects_are_notes(monkeypatch):
    def under(self, plan):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Rehearsal, "under", under)
    x, targets = inputs()
    found, calls = told(lambda model: loss_of(model, x, targets), made(lambda: quiet.sequential(quiet.spread)))
    assert [(each.severity, each.code, each.place) for each in found] == [("note", LOST, "1")]
    assert found[0].advice == "there is no memory for a copy of the model on which to try an edit; try Rule('1', FULL)"
    assert calls == 2


@pytest.mark.slow_but("1000000000.0", "10000.0")
@pytest.mark.parametrize("how", [-math.inf, -1e9, -100.0, 1e4, "min"])
def test_a_mask_in_what_a_model_returns_hides_no_loss_and_is_none(how):
    masked = torch.rand(quiet.MANY, WIDTH) < 0.3

    class Masked(nn.Module):
        def __init__(self, loses):
            super().__init__()
            self.plant = Does((lambda x: x + 200 - (x + 200).mean(-1, keepdim=True)) if loses else torch.tanh)
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.plant)

        def forward(self, x):
            scores = self.net(x)
            return scores.masked_fill(masked, torch.finfo(scores.dtype).min if how == "min" else how)

    x = rows()
    loss = lambda model: model(x).float().softmax(-1).square().mean()  # noqa: E731
    for loses, low, code in ((True, "bf16", LOST), (False, "bf16", COMPARED), (False, "fp16", COMPARED)):
        if low == "fp16" and how in (-1e9, 1e4):
            continue
        (found,), _ = told(loss, made(lambda loses=loses: Masked(loses)), low=low)
        assert found.code == code, found


class Attends(nn.Module):
    """Takes another branch where both arguments are one."""

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context, mark):
        return x + (self.own if context is x and mark is MARK else self.other)(context)


MARK = object()


def test_a_module_that_asks_whether_its_arguments_are_one_is_no_suspect():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.attends, self.head = nn.Linear(WIDTH, WIDTH), Attends(), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.stem(x)
            x = 100 * torch.log((400 + self.attends(x, x, MARK)) / (400 + x.roll(1, -1)))
            return self.head(x)

    x, targets = inputs()
    (found,), _ = told(lambda model: loss_of(model, x, targets), made(Model))
    assert found.code == LOST
    assert found.place.startswith("(model), test_precision.py:")
    assert "likewise" not in found.evidence


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (
            lambda x: x[:8] * x.new_zeros(8).index_add(0, torch.arange(4000) % 8, x.new_ones(4000))[:, None] / 500,
            "index_add adds terms that are too small for a sum of 256, where bf16 has values 2 apart",
        ),
        (lambda x: 100 * (1.001 - torch.tanh(x + 3.5)), "tanh makes values up to 1, which bf16 has only every 0.00781"),
    ],
)
def test_what_an_operation_does_is_said_of_its_sum_or_its_result(operation, words):
    x = torch.randn(4000, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Does(operation), nn.Linear(WIDTH, CLASSES))
    (found,), _ = told(lambda model: model(x).square().mean(), made(lambda: model))
    assert found.evidence.startswith(words)
