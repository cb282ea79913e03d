"""The check of precision names what a low format loses without an overflow, with an edit that cures it, and no more."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import FULL, Rule
from halfstep.explain.diagnose.rehearsal import Rehearsal
from halfstep.records import COMPARED
from tests.contracts.cases import differing, snapshot
from tests.diagnose.faults import quiet
from tests.diagnose.faults.hosts import CLASSES, WIDTH

LOST = "precision lost"
PLANTS = {
    name: each
    for name, each in vars(quiet).items()
    if inspect.isclass(each) and (hasattr(each, "function") or name in ("Schedule", "Splines", "Slope"))
}
KEPT = {"log_power", "inverse_square", "likelihood"}  # bf16 does them no harm, fp16 does
LONG = {"interest", "moving_average", "resonator", "discounted", "rotations", "oscillator", "newton", "polynomial"}
HOSTS = {
    "root": (quiet.Root, ""),
    "six layers": (quiet.Layers, "layers.0.plant"),
    "often": (quiet.Often, "plant"),
    "dict": (lambda plant: quiet.Returns(plant, lambda y: {"logits": y}), "plant"),
    "tuple": (lambda plant: quiet.Returns(plant, lambda y: (y, y.mean())), "plant"),
    "loss": (lambda plant: quiet.Returns(plant, lambda y: y.square().mean()), "plant"),
    "reentrant": (lambda plant: quiet.Checkpointed(plant, True), "layers.1.plant"),
    "checkpoint": (lambda plant: quiet.Checkpointed(plant, False), "layers.1.plant"),
}


def made(build):
    torch.manual_seed(1)
    return build()


def inputs():
    torch.manual_seed(2)
    return torch.randn(quiet.MANY, WIDTH), torch.randint(CLASSES, (quiet.MANY,))


def logits_of(found):
    return found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found


def loss_of(model, x, targets):
    found = logits_of(model(x))
    return F.cross_entropy(found.float(), targets) if found.dim() else found


def checked(build, name="O2", low="bf16", **options):
    """The findings on precision that are no note."""
    model, (x, targets) = made(build), inputs()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), name, low=low) as session:
        found = halfstep.check(session, lambda: loss_of(model, x, targets), **options)
    return [each for each in found if each.code == LOST and each.severity != "note"]


def output(build, plan):
    model, (x, _) = made(build), inputs()
    with halfstep.initialize(model, None, plan):
        return logits_of(model(x)).detach().double()


def off_by(build, plan):
    """How far outputs under a plan are from fp32, in their spread: counted here as the method says."""
    low, exact = output(build, plan), output(build, halfstep.level("O0", plan.low))
    if not exact.dim():
        return float((low - exact).abs() / exact.abs())
    return float((low - exact).square().mean().sqrt() / (exact - exact.mean(0)).square().mean().sqrt())


def is_named_and_cured(build, place, name="O2", low="bf16"):
    (found,) = checked(build, name, low)
    assert found.place.partition(",")[0] == place or (not place and found.place.startswith("(model)"))
    plan = halfstep.level(name, low)
    assert off_by(build, plan.edit(*found.cure)) < off_by(build, plan) / 3
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in sorted(PLANTS.keys() - KEPT)]
)
def test_a_plant_is_named_and_its_cure_cures(name):
    found = is_named_and_cured(lambda: quiet.sequential(PLANTS[name]), "1")
    assert found.cure[0] == Rule("1", found.cure[0].policy)


@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_the_format_does_not_harm_is_left_in_peace(name):
    assert checked(lambda: quiet.sequential(PLANTS[name])) == []


@pytest.mark.slow_but("log_returns-root", "spread-six layers", "hashed-often", "log_returns-loss", "spread-reentrant")
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["log_returns", "spread", "hashed"])
def test_wherever_it_stands(name, host):
    build, place = HOSTS[host]
    plant = PLANTS[name]
    if (name, host) == ("hashed", "six layers"):
        pytest.skip("the sum of six hashed layers is off by 5%")
    found = checked(lambda: build(plant))
    assert len(found) == 1
    named = found[0].place.partition(",")[0]
    assert named.startswith(place.replace("0", "")[:6]) if place else found[0].place.startswith("(model)")
    plan = halfstep.level("O2", "bf16")
    assert off_by(lambda: build(plant), plan.edit(*found[0].cure)) < off_by(lambda: build(plant), plan) / 3


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "fp16")])
def test_at_other_levels_and_formats(name, low):
    is_named_and_cured(lambda: quiet.sequential(quiet.spread), "1", name, low)


def test_two_plants_are_both_kept_full():
    build = lambda: quiet.Layers(quiet.spread, other=quiet.log_returns)  # noqa: E731
    (found,) = checked(build)
    assert off_by(build, halfstep.level("O2", "bf16").edit(*found.cure)) < 0.05


def zero_head(plant=nn.Tanh):
    model = quiet.sequential(plant)
    nn.init.zeros_(model[2].weight)
    return model


def integers(x):
    return x + (torch.arange(x.shape[-1]).to(x.dtype) % 7 - 3)  # exact in bf16


def widened(x):
    price = 400 + x.float()
    return (100 * torch.log(price / price.roll(1, -1))).to(x.dtype)


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


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


def told(closure, model, **options):
    """What one check says of precision, and how often it calls the closure."""
    calls = []
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="bf16") as session:
        found = halfstep.check(session, lambda: (calls.append(0), closure(model))[1], **options)
    return [each for each in found if "precision" in each.code], len(calls)


def test_a_healthy_model_costs_one_step_more_and_none_without():
    x, targets = inputs()
    found, calls = told(lambda model: loss_of(model, x, targets), made(HEALTHY["linear"]))
    assert [(each.severity, each.code) for each in found] == [("note", COMPARED)]
    assert calls == 2
    assert told(lambda model: loss_of(model, x, targets), made(HEALTHY["linear"]), precision=False) == ([], 1)


def test_a_plant_costs_at_most_twelve_steps():
    x, targets = inputs()
    assert told(lambda model: loss_of(model, x, targets), made(lambda: quiet.Root(quiet.spread)))[1] <= 12


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


def test_a_closure_without_a_model_is_compared_by_its_gradients():
    weight = nn.Parameter(torch.ones(3))
    model = nn.Linear(2, 2)
    found, _ = told(lambda model: weight.square().sum() + model.weight.sum(), model)
    assert [each.severity for each in found] == ["note"]


def test_a_model_that_does_not_repeat_in_fp32_is_no_fault_of_the_format():
    chance = torch.Generator().manual_seed(0)  # which nobody puts back
    noisy = Does(lambda x: x + torch.randn(x.shape, generator=chance))
    x, targets = inputs()
    found, _ = told(lambda model: loss_of(model, x, targets), quiet.sequential(lambda: noisy))
    assert [each.code for each in found] == [COMPARED]
    assert "does not repeat even in fp32" in found[0].advice


def test_a_model_that_cannot_be_copied_is_named():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Uncopied(WIDTH, CLASSES))
    x, targets = inputs()
    found, _ = told(lambda model: loss_of(model, x, targets), model)
    assert [each.code for each in found] == ["precision not compared"]
    assert "no copies" in found[0].evidence


def test_without_memory_for_a_copy_the_suspects_are_notes(monkeypatch):
    def under(self, plan):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Rehearsal, "under", under)
    x, targets = inputs()
    found, calls = told(lambda model: loss_of(model, x, targets), made(lambda: quiet.sequential(quiet.spread)))
    assert [(each.severity, each.code, each.place) for each in found] == [("note", LOST, "1")]
    assert found[0].advice == "there is no memory for a copy of the model on which to try an edit; try Rule('1', FULL)"
    assert calls == 2


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


def test_a_rule_names_a_class_where_all_its_modules_lose():
    (found,) = checked(lambda: quiet.Layers(quiet.spread))
    assert found.cure == (Rule("type:Spread", FULL),)
