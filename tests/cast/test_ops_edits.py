"""What a user changes in the op table, on rows with a kernel of torch's and without one, and on ops that are no row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.errors import OpError
from tests.cast.engines import opened

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def x(dtype=FP32):
    return torch.full((2, 3), 0.3, dtype=dtype)


CALLS = {
    "linear": lambda t: F.linear(t, t),  # torch's CPU list runs it low
    "mse_loss": lambda t: F.mse_loss(t, t),  # full
    "cat": lambda t: torch.cat([t, t]),  # as its inputs
    "softmax": lambda t: torch.softmax(t, -1),  # not in torch's CPU list
    "gelu": F.gelu,  # in no list
    "layer_norm": lambda t: F.layer_norm(t, (3,)),
    "lstm_cell": lambda t: torch.lstm_cell(t, (t, t), *(t.new_ones(12, 3) for _ in range(2)))[0],
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(t, t, t),
}
OUTCOME = {"allow": (BF16, BF16, BF16), "deny": (FP32, FP32, FP32), "infer": (FP32, BF16, FP16)}
TABLES = pytest.mark.parametrize("table", ["O1", "O2"])


@TABLES
@pytest.mark.parametrize("change", OUTCOME)
@pytest.mark.parametrize("op", CALLS)
def test_a_change_decides_the_format_at_every_level(op, change, table):
    with opened(table, **{change: (op,)}) as engine, engine.region():
        for given, expected in zip((FP32, BF16, FP16), OUTCOME[change], strict=True):
            assert CALLS[op](x(given)).dtype == expected, given
        assert CALLS[op](x(FP64)).dtype == FP64


@TABLES
def test_an_op_that_infers_computes_as_written_inside_too(table):
    """A product that follows its inputs is no low product of casts: it is fp32's own."""
    a, b = torch.rand(8, 8), torch.rand(8, 8)
    expected = a @ b
    with opened(table, infer=("matmul", "linear")) as engine, engine.region():
        assert torch.equal(a @ b, expected)
        assert torch.equal(F.linear(a, b.T), expected)
        assert (a @ b).dtype == FP32
        assert (a.to(BF16) @ b.to(BF16)).dtype == BF16


@TABLES
@pytest.mark.parametrize("op", ["add", "mul", "where", "cat"])
def test_a_promoted_op_takes_the_widest_format(op, table):
    call = {
        "add": torch.add,
        "mul": torch.mul,
        "where": lambda a, b: torch.where(a > b, a, b),
        "cat": lambda a, b: torch.cat([a, b]),
    }[op]
    with opened(table, promote=(op,)) as engine, engine.region():
        assert call(x(BF16), x(BF16)).dtype == BF16
        assert call(x(BF16), x(FP32)).dtype == FP32
        assert call(x(FP16), x(BF16)).dtype == FP32


@TABLES
def test_a_denied_linear_is_bit_equal_to_fp32_with_its_gradients(table):
    module, given = nn.Linear(8, 8), torch.rand(4, 8)
    expected = module(given)
    expected.sum().backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with opened(table, deny=("linear",)) as engine, engine.region():
        found = module(given)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), wanted, strict=True))


def test_an_op_denied_on_one_engine_stays_low_on_another():
    with opened(deny=("linear",)) as first, opened() as second:
        with first.region():
            assert CALLS["linear"](x()).dtype == FP32
        with second.region():
            assert CALLS["linear"](x()).dtype == BF16
        with torch.autocast("cpu", dtype=BF16):
            assert CALLS["linear"](x()).dtype == BF16


def test_a_denied_binary_cross_entropy_computes_in_fp32():
    with opened(deny=("binary_cross_entropy",)) as engine, engine.region():
        assert F.binary_cross_entropy(x(BF16), x(BF16)).dtype == FP32
    with opened() as engine, engine.region(), pytest.raises(OpError):
        F.binary_cross_entropy(x(BF16), x(BF16))


@TABLES
@pytest.mark.parametrize(("change", "given", "expected"), [("allow", FP32, BF16), ("deny", BF16, FP32)])
def test_a_changed_batch_norm_keeps_its_running_statistics_in_place(table, change, given, expected):
    module = nn.BatchNorm1d(3)
    with opened(table, **{change: ("batch_norm",)}) as engine, engine.region():
        out = module(torch.rand(4, 3).to(given))
    assert out.dtype == expected
    assert module.running_mean.dtype == FP32
    assert not torch.equal(module.running_mean, torch.zeros(3))


@TABLES
def test_an_op_inside_a_denied_composite_is_not_cast_again(table):
    """einsum is made of bmm; denied, its products are fp32."""
    a = torch.rand(2, 3, 4)
    with opened(table, deny=("einsum",)) as engine, engine.region():
        found = torch.einsum("bij,bkj->bik", a, a)
    assert torch.equal(found, torch.einsum("bij,bkj->bik", a, a))


NUMBERS = {  # an op is Python's operator or a name of torch's that is made of one
    "mul": lambda t: t * 2.0,
    "rsub": lambda t: 1 - t,
    "div": lambda t: 2.0 / t,
    "multiply": lambda t: torch.multiply(t, 2.0),
    "divide": lambda t: torch.divide(t, 2.0, rounding_mode="floor"),
    "0-dim": lambda t: t.sum() * 2.0,
    "of integers": lambda t: (t > 0).long() * 2.5,
    "complex": lambda t: (t.float() if hasattr(torch, "bcomplex32") else t) * 2j,  # which a CPU cannot multiply
}


@pytest.mark.parametrize("op", ["mul", "add", "sub", "div", "multiply"])
@pytest.mark.parametrize("call", NUMBERS)
def test_an_edited_op_takes_numbers_as_before_outside_of_its_session(call, op):
    """Torch gives a kernel in Python the number of `t * 2.0` as it is, where the op's schema has a tensor."""

    def results():
        with torch.autocast("cpu", torch.bfloat16):
            by_torch = NUMBERS[call](x(BF16))
        with opened("O2") as other, other.region():
            return [by_torch, NUMBERS[call](x()), NUMBERS[call](x(BF16))]

    expected = results()
    with opened("O1", deny=(op,)):
        found = results()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_number_leaves_the_parts_of_a_composite_op_to_the_other_session():
    with opened("O1", deny=("multiply",)), opened("O1", deny=("mul",)) as other, other.region():
        assert torch.multiply(x(BF16), 2.0).dtype == FP32  # it calls mul
        assert torch.multiply(x(BF16), x(BF16)).dtype == FP32
