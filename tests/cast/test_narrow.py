"""Layers that multiply by a recipe in sessions: which they are, their three products, what is lost, and what broke."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import Policy, Rule
from halfstep.errors import HalfstepError
from halfstep.explain.report.gather import MEASURES, gather
from halfstep.explain.report.log import shares_of
from halfstep.machine import AVX2, AVX512_BF16
from halfstep.plan.plan import multiple_of
from halfstep.torch_internals import parameters_of
from halfstep.train.cast import narrow
from halfstep.train.cast.casting import Casting
from halfstep.train.cast.narrow import PRODUCTS
from halfstep.train.cast.recipes import RECIPES, Coded, Rounded
from tests.cast.laws import product_of
from tests.cast.test_recipes import SCALED

EIGHT = Policy("low", "low", "low", products="recipe")
LOW_PRODUCTS = Policy("low", "low", "low", products="low")
BASE = "base", "weight"


def made(norm=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64) if norm else nn.Identity(), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 16),
    )  # fmt: skip


def opened(model, products="fp8-row", level="O2", **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, halfstep.initialize(model, optimizer, level, low="bf16", products=products, **options)


def batch(step, rows=10):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, session, steps, *, call=None, shares=1):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for share in range(shares):
            loss = (call or model)(batch(1000 * share + step)).square().mean()
            session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def trained(model, products="fp8-row", steps=3, **options):
    optimizer, session = opened(model, products, **options)
    return train(model, optimizer, session, range(steps)), session, optimizer


class Layer(nn.Module):
    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.call = nn.Linear(64, 32), nn.Linear(32, 16), call
        self.layer.forward = lambda x: call(x, self.layer.weight, self.layer.bias)

    def forward(self, x):
        return self.head(self.layer(x))


CALLS = {
    "linear": F.linear,
    "matmul": lambda x, w, b: x @ w.t() + b,
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w.t()).unflatten(0, x.shape[:2]) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()).unflatten(0, x.shape[:2]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("products", RECIPES)
@pytest.mark.parametrize("processor", [AVX2, AVX512_BF16], ids=lambda each: each.name)
def test_the_three_products_of_a_layer_are_those_of_the_recipe(products, call, processor, on_processor):
    """Each operand is rounded along its own summed dimension, from the tensor as it came."""
    on_processor(processor)
    model, units = Layer(CALLS[call]), "fp32" if processor is AVX2 else "bf16"
    _, session = opened(model, products, level="O1")
    x, g = torch.randn(3, 7, 64, requires_grad=True), torch.randn(3, 7, 16)
    out = model.layer(x)
    seen = out.detach()
    hooked = []
    out.register_hook(hooked.append)
    (model.head(out).float() * g).sum().backward()
    rows, grad = x.detach().flatten(0, 1), hooked[0].flatten(0, 1).bfloat16()
    layers = session._casting.layers
    weight, bias = model.layer.weight.detach(), model.layer.bias.detach()
    recipe, pad = RECIPES[products], -len(rows) % multiple_of(products)
    seeds = [torch.tensor(number) for number in range(3)]
    operands = {
        "output": (rows, weight),
        "grad_input": (grad, weight.t()),
        "grad_weight": tuple(F.pad(t.t(), (0, pad)) for t in (grad, rows)),
    }
    if not any(cast.stochastic for cast in recipe.casts.values()):  # whose seeds have the layer in them
        expected = {
            name: product_of(recipe, name, *operands[name], units=units, seed=seed)
            for name, seed in zip(PRODUCTS, seeds, strict=True)
        }
        plain = expected["output"].view(3, 7, 32).float()
        assert torch.allclose(seen.float(), plain + bias, rtol=2.0**-6, atol=2.0**-8)
        assert torch.equal(x.grad.flatten(0, 1), expected["grad_input"].float())
        assert torch.equal(model.layer.weight.grad, expected["grad_weight"].float())
    assert {(each.product, each.operand) for each in layers.losses()} == {
        ("output", "input"), ("output", "weight"), ("grad_input", "gradient"), ("grad_input", "weight"),
        ("grad_weight", "gradient"), ("grad_weight", "input"),
    }  # fmt: skip
    session.close()


@SCALED
@pytest.mark.parametrize("products", ["fp8", "fp8-row"])
def test_a_devices_own_units_train_as_their_emulation_does(products, monkeypatch):
    """A CPU has the products of these recipes, with sums in fp32."""
    found = []
    for units in ("own", "fp32"):
        monkeypatch.setattr(Casting, "_units", lambda self, emulate, units=units: units)
        model = made()
        losses, session, _ = trained(model, products)
        held = {type(each[2]) for each in session._casting.layers._held.values()}
        assert held <= ({Coded} if units == "own" else {Rounded})
        found.append((losses, session.status().lost, [p.clone() for p in model.state_dict().values()]))
        session.close()
    assert found[0][:2] == found[1][:2]
    assert all(map(torch.equal, found[0][2], found[1][2]))


def test_gradients_are_those_of_the_dequantised_operands():
    """With operands that the formats hold exactly, all three products are exact."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-3, 4, p.shape).float())
    truth = copy.deepcopy(model).double()
    _, session = opened(model, "fp8", level="O1", rules=[Rule("1", replace(EIGHT, param="full"))])
    x = torch.randint(-2, 3, (16, 32)).float().requires_grad_()
    y = x.detach().double().requires_grad_()
    model[0](x).sum().backward()
    truth[0](y).sum().backward()
    assert torch.equal(x.grad.double(), y.grad)
    assert torch.equal(model[0].weight.grad.double(), truth[0].weight.grad)
    session.close()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("products", ["fp8", "nvfp4"])
def test_checkpoints_repeat_the_same_bits(products, reentrant):
    def model():
        net = made()
        return net, lambda x: net[5](checkpoint(net[:5], x.requires_grad_(), use_reentrant=reentrant))

    plain = trained(made(), products)[0]
    net, _ = model()

    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net[5](checkpoint(self.net[:5], x.requires_grad_(), use_reentrant=reentrant))

    assert trained(Checked(), products)[0] == plain


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_compiled_models_have_no_break_and_the_same_first_loss():
    torch.compiler.reset()
    eager = trained(made(norm=False), "fp8", level="O1")[0]
    model = made(norm=False)
    optimizer, session = opened(model, "fp8", level="O1")
    compiled = train(model, optimizer, session, range(3), call=torch.compile(model, fullgraph=True))
    assert compiled == pytest.approx(eager, rel=2e-2)
    counts = {(each.layer, each.product): each.elements for each in session.status().lost if each.operand != "weight"}
    assert counts["0", "output"] == 3 * 10 * 32
    session.close()


def test_a_weight_is_rounded_once_until_it_changes():
    model = made()
    optimizer, session = opened(model)
    train(model, optimizer, session, range(2), shares=3)
    found = {(each.product, each.operand): each.elements for each in session.status().lost if each.layer == "3"}
    assert found["output", "weight"] == found["grad_input", "weight"] == 2 * 64 * 64
    assert found["output", "input"] == 2 * 3 * 10 * 64


class Adapted(nn.Module):
    """A frozen layer beside the two of an adapter, as of LoRA."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(32, 32).requires_grad_(requires_grad=False), nn.Linear(32, 16)
        self.down, self.up = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return self.head(self.base(x.requires_grad_()) + self.up(self.down(x)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_frozen_weight_is_rounded_once_a_step_and_kept_no_longer(level):
    model = Adapted()
    optimizer, session = opened(model, level=level)
    train(model, optimizer, session, range(2), shares=3)
    found = {each.product: each.elements for each in session.status().lost if (each.layer, each.operand) == BASE}
    assert found == {"output": 2 * 32 * 32, "grad_input": 2 * 32 * 32}
    held, layers = [], session._casting.layers
    for step in range(20):  # with other memory in each, as of an average of weights, and no step
        model.base.weight.data = model.base.weight.data.clone()
        session.backward(model(batch(step)).square().mean())
        held.append(len(layers._held))
    assert held == [6] * 20
    with torch.no_grad():  # in which averages are swapped for weights through `data`, which counts as no version
        before = model(batch(0))
        model.base.weight.data.mul_(-1.0)
        assert not torch.equal(model(batch(0)), before)
    before = model(batch(0))
    with session.full_weights():
        model.base.weight.data.mul_(3.0)
        assert not torch.equal(model(batch(0)), before)
    session.close()
    assert layers._held == {}


def test_layers_are_looked_through_once_for_two_sessions_a_part_of_a_weight_and_a_copy(monkeypatch):
    """Each look at all layers for each call of each made a second session of 300 layers five times as slow."""
    looked = []
    monkeypatch.setattr(narrow, "parameters_of", lambda module: looked.append(module) or parameters_of(module))
    models = made(), nn.Sequential(Linears(SEVERAL["in parts"]), nn.Linear(32, 16))
    opened_ones = [opened(model, level="O1") for model in models]
    copied, found = copy.deepcopy(models[0]), []
    for step in range(3):
        for model, (optimizer, session) in zip(models, opened_ones, strict=True):
            train(model, optimizer, session, [step])
        found.append(len(looked))
    for _ in range(2):
        copied(batch(0))
        found.append(len(looked))
    assert found[0] == found[1] == found[2] < found[3] == found[4]
    for _, session in opened_ones:
        session.close()


def test_of_parts_of_a_frozen_weight_and_in_inference_nothing_is_kept():
    model = nn.Sequential(
        Linears(lambda x, w, _: torch.cat([F.linear(x, w[i : i + 16]) for i in (0, 8)], -1)), nn.Linear(32, 16)
    )
    model[0].requires_grad_(requires_grad=False)
    _, session = opened(model, level="O1")
    model(batch(0))
    assert session._casting.layers._held == {}
    with torch.inference_mode():
        model(batch(0))
    assert session._casting.layers._held == {}
    session.close()


def test_of_weights_that_a_forward_computes_and_of_copies_nothing_is_kept():
    model = made()
    weight_norm(model[3])
    _, session = opened(model)
    held = []
    for step in range(3):
        session.backward(model(batch(step)).square().mean())
        held.append(len(session._casting.layers._held))
    assert held == [1] * 3
    counted = session.status().lost
    copy.deepcopy(model[0])(batch(0))
    assert session.status().lost == counted
    assert sum(each.elements for each in counted if each.layer == "3") == 3 * (2 * 64 * 64 + 4 * 10 * 64)
    session.close()


def test_code_may_write_into_the_output():
    model = made(norm=False)
    expected = trained(copy.deepcopy(model), steps=2)[0]
    model[4] = nn.ReLU(inplace=True)
    assert trained(model, steps=2)[0] == expected


class Linears(nn.Module):
    """A layer with several weights in one memory, or with two forms of one weight."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.call, both = call, torch.randn(2, 32, 32)
        self.first, self.second = (nn.Parameter(each) for each in both.unbind())

    def forward(self, x):
        return self.call(x, self.first, self.second)


SEVERAL = {
    "in one memory": lambda x, first, second: F.linear(F.linear(x, first), second),
    "in two forms": lambda x, first, _: F.linear(F.linear(x, first), first.t()),
    "in parts": lambda x, first, _: torch.cat([F.linear(x, each) for each in first.split(16)], -1),
}


@pytest.mark.parametrize("call", SEVERAL.values(), ids=SEVERAL)
def test_weights_that_share_memory_are_kept_apart_and_counted_once(call):
    model = nn.Sequential(Linears(call), nn.Linear(32, 16))
    _, session = opened(model, "fp8-row", level="O1")
    x = torch.randn(16, 32)
    with torch.no_grad():  # which keeps nothing
        fresh = model(x)
    before = {each.operand: each.elements for each in session.status().lost if each.product == "output"}
    for _ in range(2):
        assert torch.equal(model(x), fresh)
    after = {each.operand: each.elements for each in session.status().lost if each.product == "output"}
    assert after == {"input": 3 * before["input"], "weight": 2 * before["weight"]}
    assert before["weight"] == (1 if call is SEVERAL["in parts"] else 2) * 32 * 32
    session.close()


def test_a_weight_that_code_writes_is_rounded_anew():
    model = made()
    _, session = opened(model, level="O1")
    before = model(batch(0)).detach()
    with torch.no_grad():
        model[3].weight.mul_(3.0)
    assert not torch.equal(model(batch(0)).detach(), before)
    session.close()


def test_a_resume_and_the_end_are_exact():
    model = made()
    optimizer, session = opened(model, "nvfp4")
    train(model, optimizer, session, range(2))
    states = copy.deepcopy([each.state_dict() for each in (model, optimizer, session)])
    expected = train(model, optimizer, session, range(2, 4))
    other = made()
    again, resumed = opened(other, "nvfp4")
    for each, state in zip((other, again, resumed), states, strict=True):
        each.load_state_dict(state)
    assert train(other, again, resumed, range(2, 4)) == expected
    weights = other.state_dict()
    resumed.close()
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
    assert all(p.dtype is torch.float32 for p in other.parameters())


@pytest.mark.parametrize("rows", [0, 1, 5, 16])
@pytest.mark.parametrize("products", RECIPES)
def test_no_more_is_lost_than_there_is(products, rows):
    """nvfp4 transforms 16 rows at a time, also where a batch has fewer."""
    model = made()
    _, session = opened(model, products)
    session.backward(model(batch(0, rows)).sum())
    lost = session.status().lost
    assert all(each.flushed + each.saturated <= each.elements for each in lost)
    assert {each.elements for each in lost if (each.layer, each.product, each.operand) == ("0", "output", "input")} == (
        {32 * rows} - {0}
    )
    session.close()


def test_random_bits_differ_from_step_to_step_and_come_back_with_a_resume():
    def gradient(session, model):
        model.zero_grad()
        session.backward(model(batch(0)).square().mean())
        return model[0].weight.grad.clone()

    model = made()
    optimizer, session = opened(model, "nvfp4", level="O1")
    optimizer.param_groups[0]["lr"] = 0.0
    found = []
    for _ in range(3):
        found.append(gradient(session, model))
        session.step()
    assert not torch.equal(found[0], found[1])
    state = session.state_dict()
    session.close()
    optimizer, resumed = opened(model, "nvfp4", level="O1")
    optimizer.param_groups[0]["lr"] = 0.0
    assert torch.equal(gradient(resumed, model), found[0])
    resumed.step()
    resumed.load_state_dict({**state, "steps": 2})
    assert torch.equal(gradient(resumed, model), found[2])
    resumed._casting.layers.step -= 1  # as a replay of a CUDA graph, which runs nothing on the host, changes it
    assert torch.equal(gradient(resumed, model), found[1])
    resumed.close()


def test_a_session_that_is_dropped_frees_its_layers():
    model = made()
    optimizer, session = opened(model)
    layers = weakref.ref(session._casting.layers)
    train(model, optimizer, session, range(1))
    del session, model, optimizer
    gc.collect()
    assert layers() is None


def test_sessions_that_nobody_closed_make_room_for_those_of_other_recipes():
    gc.disable()
    try:
        for products in ("plan", *RECIPES) * 2:
            model = made()
            optimizer, session = opened(model, products)
            train(model, optimizer, session, range(1))
    finally:
        gc.enable()
    session.close()


def test_layers_that_stay_low_are_listed_with_why():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.up, self.odd = nn.Embedding(32, 32), nn.Linear(32, 64), nn.Linear(64, 20)
            self.down, self.head, self.last = nn.Linear(20, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 16)
            self.head.weight = self.embed.weight

    session = halfstep.initialize(Tied(), None, "O2", low="bf16", products="fp8-mx")
    assert session.status().products == {
        "fp8-mx": ("up",),
        "bf16: 20 x 64 is no multiple of 32": ("odd",),
        "bf16: 32 x 20 is no multiple of 32": ("down",),
        "bf16: tied to 'embed'": ("head",),
        "bf16: 16 x 32 is no multiple of 32": ("last",),
    }
    session.close()
    rules = [Rule("last", EIGHT), Rule("up", LOW_PRODUCTS)]
    session = halfstep.initialize(Tied(), None, "O2", low="bf16", products="fp8", rules=rules)
    assert session.status().products["fp8"] == ("last",)
    assert "products: bf16: rule 'up' in up; " in str(session.status())
    session.close()
    for name in RECIPES:
        assert RECIPES[name].multiple == multiple_of(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": "fp16"}, "results in bf16, but low is fp16; use low='bf16'"),
        ({"plan": "O0"}, "everything runs as written; use O1 or O2"),
        ({"plan": "O3"}, "keeps bf16 weights without masters; use O1 or O2"),
        ({"products": "fp9"}, "did you mean 'fp8'"),
        ({"products": "mxfp8"}, "products is 'mxfp8'; expected one of .* pass products='fp8-mx'"),
        ({"products": "fp8_rowwise"}, "pass products='fp8-row'"),
        ({"products": "float8_e4m3fn"}, "pass products='fp8'"),
        ({"low": "e4m3"}, "keep low='bf16' and pass products='fp8'"),
        ({"low": "fp8"}, "expected one of bf16, fp16 or .* in 8 bits keep low='bf16' and pass products='fp8'"),
        ({"low": "MXFP8"}, "expected one of bf16, fp16 or .* products in 8 bits .* pass products='fp8-mx'"),
        ({"low": "e2m1"}, "expected one of bf16, fp16 or .* products in 4 bits .* pass products='nvfp4'"),
        ({"low": "float8_e4m3fn"}, "pass products='fp8'"),
        ({"low": torch.float8_e4m3fn}, "use bf16 or fp16; .* pass products='fp8'"),
        ({"low": torch.float4_e2m1fn_x2}, "pass products='nvfp4'"),
        ({"plan": "fp8-row"}, "expected one of O0, O1, O2, O3; .* pass products='fp8-row'"),
        ({"rules": [Rule("1", LOW_PRODUCTS)]}, "matches no linear layer"),
        ({"products": "plan", "rules": [Rule("0", EIGHT)]}, "products is 'plan', which has none"),
    ],
)
def test_what_has_no_products_in_8_bits_is_one_sentence(options, message):
    given = {"plan": "O2", "low": "bf16", "products": "fp8", **options}
    with pytest.raises(HalfstepError, match=message):
        halfstep.initialize(made(), None, **given)


def test_a_layer_that_runs_in_fp32_by_the_models_own_autocast_is_named_by_the_status():
    class Off(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self[1](self[0](x).float())
            return self[2](x)

    model = Off(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    optimizer, session = opened(model, "fp8", level="O1")
    assert "no products" not in str(session.status())
    train(model, optimizer, session, range(1))
    assert "no products counted in 0, 1: not called, in fp32" in str(session.status())
    session.close()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_without_such_a_layer_is_refused_with_why_for_each():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 16))
    with pytest.raises(halfstep.SetupError, match=r"0 is in bf16: 7 x 5 is no multiple of 16; 1 is in bf16: 16 x 7"):
        halfstep.initialize(model, None, "O2", low="bf16", products="fp8")
    with pytest.raises(halfstep.SetupError, match=r"16 x 16 is no multiple of 32\. Leave products out(\n|$)"):
        halfstep.initialize(nn.Linear(16, 16), None, "O2", low="bf16", products="fp8-mx")
    with pytest.raises(
        halfstep.SetupError, match=r"0 is in bf16: 0 x 32 is no .*: the last Linear\. .* a rule ask for it"
    ):
        halfstep.initialize(nn.Sequential(nn.Linear(32, 0), nn.Linear(32, 16)), None, "O2", low="bf16", products="fp8")
    with pytest.raises(halfstep.SetupError, match=r"the model is in float64: no plan casts its weight"):
        halfstep.initialize(nn.Linear(32, 32).double(), None, "O2", low="bf16", products="fp8")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow_but("False")
def test_rows_of_a_jagged_tensor_are_those_of_a_matrix(compiled):
    parts, found = [batch(step, rows) for step, rows in enumerate((5, 3, 9))], []
    for x in (torch.cat(parts), torch.nested.nested_tensor(parts, layout=torch.jagged)):
        model = made()
        _, session = opened(model, rules=[Rule("5", EIGHT)])  # emulated products of nested tensors do not compile
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled and x.is_nested else model
        out = called(x)
        session.backward((out.values() if x.is_nested else out).float().square().mean())
        found.append((out.values() if x.is_nested else out, session.status().lost, model[0].weight.grad))
        session.close()
    assert all(map(torch.equal, found[0][::2], found[1][::2]))
    assert found[0][1] == found[1][1] != ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_another_layout_are_refused():
    model = made()
    _, session = opened(model)
    with pytest.raises(halfstep.OpError, match="nested tensors whose rows are jagged in dimension 1"):
        model(torch.nested.nested_tensor([batch(0), batch(1)]))
    session.close()


def test_gradients_of_gradients_are_refused():
    model = made()
    _, session = opened(model, "fp8")
    (gradient,) = torch.autograd.grad(model(x := batch(0).requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(halfstep.OpError, match="no gradients of gradients"):
        session.backward(gradient.square().sum())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jvp(torch.func.vmap(f), (x,), (x,)),
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    ],
    ids=["jvp", "of vmap", "grad"],
)
def test_derivatives_by_transforms_are_refused(derive):
    model = made(norm=False)
    _, session = opened(model, level="O1")
    with pytest.raises(halfstep.errors.OpError, match=r"no derivatives by torch\.func"):
        derive(model, batch(0))
    assert torch.func.vmap(model)(batch(0).view(2, 5, -1)).shape[:2] == (2, 5)
    session.close()


@pytest.mark.parametrize("products", RECIPES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_operand_that_is_not_finite_skips_the_step_and_is_counted(products, value):
    model = made()
    optimizer, session = opened(model, products)
    before = copy.deepcopy(model.state_dict())
    x = batch(0)
    x[3, 5] = value
    session.backward(model(x).square().mean())
    assert bool(session.step().skipped)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    first = next(each for each in session.status().lost if each.nonfinite)
    assert (first.layer, first.product, first.operand, first.nonfinite) == ("0", "output", "input", 1)
    train(model, optimizer, session, range(1))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_probe_counts_what_each_operand_lost_in_its_steps(tmp_path):
    model = made()
    log = halfstep.RunLog(tmp_path / "run.jsonl")
    optimizer, session = opened(model, "nvfp4", sinks=[log])
    train(model, optimizer, session, range(1))
    before = session.status().lost
    with session.observe(every=100, modules=["0", "5"]) as probe:
        train(model, optimizer, session, range(1, 3))
        seen = [each for each in probe.flush() if each.kind == "operand"]
    lost = session.status().lost
    first = [each for each in lost if each.layer == "0"]
    assert [(each.step, each.module, each.name) for each in seen] == [
        (2, "0", f"{each.product}.{each.operand}") for each in first
    ]
    for one, now, then in zip(seen, first, before, strict=False):
        shares = shares_of(one, halfstep.BF16)
        assert one.stats.count == then.elements == (now.elements - then.elements) // 2
        assert one.stats.zeros == one.stats.nans == 0
        assert 0 < shares[f"lost/operand/0.{one.name}"] * one.stats.count <= now.flushed - then.flushed
        assert 0 <= shares[f"saturated/operand/0.{one.name}"] * one.stats.count <= now.saturated - then.saturated
    session.close()
    log.close()
    sums = gather(halfstep.read_log(tmp_path / "run.jsonl").observations(), [2], halfstep.BF16).kinds["operand"]
    counted = dict(zip(MEASURES, sums.shares[1, 0], strict=True))
    assert sums.modules[1:] == ["0"]
    assert counted["lost"] == sum(each.stats.exponents[125] for each in seen) > 0
    assert counted["saturated"] == sum(each.stats.exponents[129] for each in seen)
    assert counted["count"] == sum(each.stats.count for each in seen)


def test_a_column_of_outliers_is_flushed_by_one_scale_a_tensor_and_told():
    """A planted column, 1e5 times the others: what is left of them lies below e4m3's smallest value."""

    class Kept(list):
        def __call__(self, record):
            pass

        def record(self, record):
            self.append(record)

    shares = {}
    for products in ("fp8", "fp8-row", "fp8-mx"):
        kept = Kept()
        model = made(norm=False)
        optimizer, session = opened(model, products, sinks=[kept])
        optimizer.zero_grad()
        x = batch(0, rows=64)
        x[:1] *= 1e6
        session.backward(model(x).square().mean())
        lost = next(e for e in session.status().lost if (e.layer, e.product, e.operand) == ("0", "output", "input"))
        shares[products] = lost.share
        session.close()
        told = next(each for each in kept if isinstance(each, halfstep.Finding))  # grad_weight sums over the rows
        assert (told.code, told.cure[0].policy.products) == ("products lost", "low")
        assert ("products='fp8-row'" in told.advice) is (products == "fp8")
    assert shares["fp8"] > 0.9
    assert shares["fp8-row"] < 1e-3 > shares["fp8-mx"]


def test_a_sink_that_raises_at_the_end_leaves_an_ordinary_model():
    class Raises:
        def __call__(self, record):
            pass

        def record(self, record):
            if isinstance(record, halfstep.Finding):
                raise OSError("full")

    model = made(norm=False)
    _, session = opened(model, "nvfp4", sinks=[Raises()])
    session.backward(model(batch(0)).square().mean())
    with pytest.raises(OSError, match="full"):
        session.close()
    assert all(type(each) in (nn.Sequential, nn.Linear, nn.GELU, nn.ReLU, nn.Identity) for each in model.modules())


@pytest.mark.parametrize(("small", "product"), [(1.0, "output"), (1e-38, "grad_input")])
def test_blame_names_the_layer_and_the_product_that_overflows(small, product):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight.fill_(small)
        model[1].weight.fill_(3e38)
    _, session = opened(model, "fp8-row", level="O1")
    verdict = halfstep.blame(session, lambda: 1e3 * model(torch.ones(4, 16)).sum())
    assert (verdict.module, verdict.operator) == ("1", "linear")
    assert f"linear ({product} by fp8-row, whose operands are finite) gave" in verdict.evidence
    session.close()


class Masked(nn.Module):
    """One row is -inf, and nothing of it reaches the loss, but one scale for the tensor makes all of it NaN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        h = self.first(x)
        return self.last(self.frozen(torch.cat([h[:9], torch.full_like(h[:1], -torch.inf)]))[:9])


@pytest.mark.slow_but("True")
@pytest.mark.parametrize(("level", "alone"), [("O1", False), ("O2", False), ("O2", True)])
def test_blame_names_the_operand_and_tries_the_products_of_the_layer_in_bf16(level, alone):
    """Also those of the only layer that multiplies by the recipe."""
    model, others = Masked(), [Rule("first", LOW_PRODUCTS)]
    optimizer, session = opened(model, "fp8", level=level, rules=others if alone else [])
    verdict = halfstep.blame(session, lambda: model(batch(0)).square().mean())
    assert "linear (output by fp8, whose input is not finite) gave 320 NaN" in verdict.evidence
    assert verdict.cure == (Rule("frozen", replace(LOW_PRODUCTS, param="full" if level == "O1" else "low")),)
    assert "tried: the closure's loss is then" in verdict.advice
    plan = session.plan.edit(*verdict.cure)
    session.close()
    session = halfstep.initialize(model, optimizer, plan)
    session.backward(model(batch(0)).square().mean())
    assert not bool(session.step().skipped)
    assert session.status().products.get("fp8", ()) == (() if alone else ("first",))
    session.close()


def test_blame_says_which_product_the_input_data_spoil():
    model = made()
    _, session = opened(model, "fp8")
    x = batch(0)
    x[3, 5] = torch.nan
    verdict = halfstep.blame(session, lambda: model(x).square().mean())
    assert "it spoils output by fp8, whose input is not finite" in verdict.evidence
    session.close()
