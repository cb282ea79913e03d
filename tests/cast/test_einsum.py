"""An einsum runs low only if it sums products, which its equation says; any other runs as its parts do."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.formats import as_format
from halfstep.plan.levels import level
from halfstep.plan.optable import effective
from halfstep.train.cast.ops import OpEngine
from tests.cast.engines import opened

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {"i": 3, "j": 4, "k": 5, "b": 2}


def operands(equation, dtype=FP32):
    """Random operands for an equation; an ellipsis is one dimension of size 2."""
    torch.manual_seed(0)
    letters = [one.replace("...", "b").strip() for one in equation.partition("->")[0].split(",")]
    return [torch.rand([SHAPES[i] for i in one.replace(" ", "")], dtype=FP32).to(dtype) for one in letters]


PRODUCTS = [
    "ij,jk->ik",
    "ij,jk",
    "bij,bjk->bik",
    "bi,bi->b",
    "i,i->",
    "ij,j->i",
    "ij,ij->",
    "...i,...i",
    "...ij,...jk->...ik",
    "...i,...j->ij",
    " ij , jk -> ik ",
    "i,j,ij->",
    "bi,j,bi->bj",
]
OTHERS = [
    "i,j->ij",
    "i,j",
    "bi,bj->bij",
    "bi,bi->bi",
    "...i,...j->...ij",
    "...i,j",
    " i , j -> i j ",
    "i,j,k->ijk",
    "bi,i,bi->bi",
    "ij->ji",
    "ii->i",
    "ii",
    "ij->i",
    "ij,k->ik",
    "i,j->",
    "bi,bj->b",
]


@pytest.fixture(scope="module", params=[False, True], ids=["native", "emulated"])
def engines(request):
    made = {
        (name, low): OpEngine(effective(level(name, as_format(low))), low, "cpu", emulate=request.param)
        for name in ("O1", "O2")
        for low in (BF16, FP16)
    }
    for engine in made.values():
        engine.open()
    yield made
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("table", ["O1", "O2"])
@pytest.mark.parametrize("equation", PRODUCTS)
def test_an_einsum_that_sums_products_runs_low(engines, equation, table):
    with engines[table, BF16].region():
        assert torch.einsum(equation, *operands(equation)).dtype is BF16


@pytest.mark.parametrize("table", ["O1", "O2"])
@pytest.mark.parametrize("equation", OTHERS)
def test_any_other_einsum_runs_as_its_inputs_are_and_sums_as_sums_do(engines, equation, table):
    given = operands(equation)
    for low in (BF16, FP16):
        with engines[table, low].region():
            found = torch.einsum(equation, *given)
            kept = torch.einsum(equation, *operands(equation, low)).dtype
            summed = torch.ones(2, dtype=low).sum().dtype  # fp32 at O1
        assert found.dtype is FP32
        assert torch.equal(found, torch.einsum(equation, *given))
        letters, arrow, result = equation.partition("->")
        sums = equation == "ii" or (arrow and not set(filter(str.isalpha, letters)) <= set(result))
        assert kept is (summed if sums else low)


def test_gradients_of_an_outer_product_are_those_of_fp32(engines):
    a, b = (t.requires_grad_() for t in operands("i,j->ij"))
    with engines["O1", BF16].region():
        out = torch.einsum("i,j->ij", a, b)
    found = torch.autograd.grad(out.sin().sum(), (a, b))
    assert all(map(torch.equal, found, torch.autograd.grad(torch.outer(a, b).sin().sum(), (a, b))))


def test_sublists_are_equations_too(engines):
    a, b = operands("i,j->ij")
    with engines["O1", BF16].region():
        assert torch.einsum(a, [0], b, [1], [0, 1]).dtype is FP32
        assert torch.einsum(a, [..., 0], b, [..., 1], [..., 0, 1]).dtype is FP32
        assert torch.einsum(a, [0], a, [0], []).dtype is BF16
        assert torch.einsum("i,j->ij", [a, b]).dtype is FP32


def test_mixed_inputs_of_an_outer_product_give_the_widest(engines):
    a, b = operands("i,j->ij")
    with engines["O2", BF16].region():
        assert torch.einsum("i,j->ij", a.bfloat16(), b).dtype is FP32


def test_vmap_and_an_equation_that_is_none(engines):
    a, b = operands("bi,bj->bij")
    with engines["O1", BF16].region():
        assert torch.equal(
            torch.func.vmap(lambda a, b: torch.einsum("i,j->ij", a, b))(a, b), a[:, :, None] * b[:, None]
        )
        with pytest.raises(RuntimeError, match="einsum"):
            torch.einsum("i,j->->", a[0], b[0])


@pytest.mark.parametrize(("change", "expected"), [("allow", BF16), ("deny", FP32), ("infer", BF16)])
def test_an_edit_of_einsum_holds_for_every_equation(change, expected):
    a, b = operands("i,j->ij", FP32 if change == "allow" else BF16)
    with opened("O1", **{change: ("einsum",)}) as engine, engine.region():
        assert torch.einsum("i,j->ij", a, b).dtype is expected


class Rotary(nn.Module):
    """Angles at high positions by an outer product, and scores by a product, both einsums."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv", 10000 ** (-torch.arange(8) / 8))
        self.f = nn.Linear(16, 16)

    def forward(self, x):
        x = self.f(x)
        angles = torch.einsum("i,j->ij", torch.arange(3000, 3000 + x.shape[0]).float(), self.inv)
        u, v = x.chunk(2, -1)
        turned = torch.cat([u * angles.cos() - v * angles.sin(), u * angles.sin() + v * angles.cos()], -1)
        return torch.einsum("ik,jk->ij", turned, turned)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("name", ["O1", "O2"])
def test_rotary_angles_stay_exact_in_a_model(name, emulate, compiled):
    model, x = Rotary(), torch.randn(32, 16)
    exact = model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with halfstep.initialize(model, optimizer, name, low="bf16", emulate=emulate) as session:
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = run(x)
        session.backward(out.float().square().mean())
        session.step()
    assert torch.equal(out, out.bfloat16().float())  # of the product
    assert (out.float() - exact).norm() < 0.02 * exact.norm()  # by 22% of its spread with angles in bf16
