"""What-if for recipes of products: the losses of scaled casts from one fp32 pass, beside those of a real run."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import HalfstepError
from halfstep.train.cast.narrow import OPERANDS
from halfstep.train.cast.recipes import RECIPES
from tests.cast.laws import product_of

CALLS = {
    "linear": lambda layer, x: F.linear(x, bias=layer.bias, weight=layer.weight),
    "matmul": lambda layer, x: x @ layer.weight.t() + layer.bias,
    "addmm": lambda layer, x: torch.addmm(layer.bias, x, layer.weight.t()),
}


class Masked(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * (self.weight > 0), self.bias)


class Net(nn.Module):
    """`first` multiplies in a function of its own; the weight of `second` is also used outside of its forward."""

    def __init__(self, reentrant=None, call="linear"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        if call == "computed":
            weight_norm(self.second)
        elif call == "masked":
            self.second = Masked(64, 64)
        else:
            self.first.forward = lambda x: CALLS[call](self.first, x)
        self.reentrant = reentrant

    def body(self, x):
        h = F.leaky_relu(self.second(F.leaky_relu(self.first(x))))
        return h + 0 * F.linear(h.detach(), self.second.weight.detach())

    def forward(self, x):
        return self.last(
            self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        )


def spread():
    """Values over so many orders of magnitude that every recipe flushes some."""
    generator = torch.Generator().manual_seed(0)
    values, sizes = (torch.randn(40, 32, generator=generator) for _ in range(2))
    return (values * torch.exp(4 * sizes)).requires_grad_()


def predicted(model, x, products=RECIPES, **options):
    return halfstep.whatif(lambda: model(x).square().mean(), model, ("fp16",), steps=1, products=products, **options)


@pytest.mark.slow_but("O2-True", "masked")
@pytest.mark.parametrize(
    ("plan", "reentrant", "call"),
    [
        ("O1", None, "linear"),
        ("O2", None, "matmul"),
        ("O1", True, "addmm"),
        ("O2", False, "linear"),
        ("O2", True, "computed"),
        ("O1", False, "masked"),
    ],
)
def test_what_is_lost_is_what_a_run_with_the_recipe_loses(plan, reentrant, call):
    """Exactly where both have the same operands, near it where the run's come from rounded ones."""
    x = spread()
    recipes = ("fp8", "nvfp4") if reentrant is not None else RECIPES
    found = predicted(Net(reentrant, call), x, recipes, plan=plan)
    for recipe in recipes:
        model = Net(reentrant, call)
        optimizer = torch.optim.SGD(model.parameters())
        with halfstep.initialize(model, optimizer, plan, low="bf16", products=recipe) as session:
            session.backward(model(x).square().mean())
            lost = session.status().lost
        assert {each.layer for each in lost} == {"first", "second"}
        mine = [row.loss for row in found.products if row.recipe == recipe]
        assert [(a.layer, a.product, a.operand, a.elements) for a in mine] == [
            (a.layer, a.product, a.operand, a.elements) for a in lost
        ]
        for here, there in zip(mine, lost, strict=True):
            if there.operand == "weight" or (there.layer, there.operand) == ("first", "input"):
                assert here == there
            assert here.share == pytest.approx(there.share, abs=0.04)
        assert any(each.flushed for each in lost)


class Crossing(nn.Module):
    """Attention to something else, whose packed weight torch splits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.last = nn.MultiheadAttention(32, 2), nn.Linear(32, 16)

    def forward(self, x):
        return self.last(self.attention(x[:16], x, x)[0])


def test_attention_is_predicted_as_a_run_counts_it():
    x = spread()
    found = predicted(Crossing(), x, "fp8", plan="O1").products
    model = Crossing()
    optimizer = torch.optim.SGD(model.parameters())
    with halfstep.initialize(model, optimizer, "O1", low="bf16", products="fp8") as session:
        session.backward(model(x).square().mean())
        lost = session.status().lost
    assert [row.loss.elements for row in found] == [each.elements for each in lost]
    assert found[0].loss.layer == "attention"
    assert found[0].loss.elements == (16 + 40 + 40 + 16) * 32
    assert found[1].loss == lost[1]
    assert lost[1].elements == 4 * 32 * 32


def test_errors_are_those_of_the_rounded_operands():
    x, model = spread().detach(), Net()
    found = {(row.recipe, row.loss.product, row.loss.operand): row for row in predicted(model, x).products[::-1]}
    for name, recipe in RECIPES.items():
        exact = x.double() @ model.first.weight.detach().double().t()
        rounded = product_of(recipe, "output", x, model.first.weight.detach().bfloat16(), units="fp32")
        off = float((rounded.double() - exact).norm() / exact.norm())
        assert found[name, "output", "input"].product_error == pytest.approx(off, rel=0.02)
        assert all(0 < row.error < 0.2 for key, row in found.items() if key[0] == name)
    assert found["fp8", "grad_weight", "gradient"].error > 1.5 * found["fp8-row", "grad_weight", "gradient"].error


def test_the_rest_of_a_prediction_is_unchanged_and_layers_that_lose_much_have_a_cure():
    x = spread()
    plain, found = predicted(Net(), x, ()), predicted(Net(), x, ("nvfp4", "fp8"))
    assert plain.products == ()
    stay = {name: each for name, each in found.stay_full.items() if name not in RECIPES}
    assert dataclasses.replace(found, products=(), stay_full=stay) == plain
    assert [finding.cure[0].policy.products for finding in found.stay_full["nvfp4"]] == ["low", "low"]
    assert {row.loss.operand for row in found.products} == set(OPERANDS["output"] + OPERANDS["grad_weight"])
    assert "products nvfp4: at worst" in found._repr_html_()
    assert "became 0" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"products": "fp9"}, "did you mean 'fp8'"),
        ({"products": None}, "products is None of type NoneType; expected a tuple of recipes, such as 'fp8'"),
        ({"products": ("fp8", "plan")}, "products has 'plan', which keeps .* low format; name recipes only"),
        ({"products": "fp8", "plan": "O3"}, "use O1 or O2"),
        ({"products": ["fp8", "fp8-mx"], "width": 16}, "products='fp8-mx' reaches no layer"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(options, message):
    width = options.pop("width", 5)
    model = nn.Sequential(nn.Linear(width, 16), nn.Linear(16, 1))
    with pytest.raises(HalfstepError, match=message):
        predicted(model, torch.ones(2, width), **options)
