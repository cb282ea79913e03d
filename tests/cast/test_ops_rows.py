"""Every row of the op table on a CPU, forward and backward, at every floating dtype in, against casts by hand."""

import contextlib

import pytest
import torch

from halfstep.formats import as_format
from halfstep.plan.levels import level
from halfstep.plan.optable import ROWS, effective
from halfstep.train.cast.opregistry import find_overload
from halfstep.train.cast.ops import OpEngine
from tests.cast.op_samples import ALLOW, DENY, IN_PLACE, INFER, PROMOTE, UNREACHABLE

# deprecated ops say so, rnns in other formats than their weights too
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (FP32, BF16, FP16, FP64)
IDS = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP64: "fp64"}
# torch.linalg.lstsq is not deterministic in its last bit; an rnn's weight gradients are summed in the region in another
# order than by hand, because torch.autocast casts their weights at each step
TOLERANCE = {
    "linalg_lstsq": (1e-5, 1e-5),
    **{name: (0.02, 0.02) for name in ALLOW if name.startswith(("lstm", "gru", "rnn"))},
}


class Tensors:
    """Makes the leaves of one call in the dtypes given, in turn; `by_hand` casts what a region would cast."""

    def __init__(self, *dtypes, by_hand=None):
        self.dtypes, self.by_hand = dtypes, by_hand
        self.dtype = by_hand if by_hand is not None and FP64 not in dtypes else dtypes[0]
        self.leaves = []
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        given = isinstance(shape[0], torch.Tensor)
        value = shape[0].clone() if given else torch.rand(*shape, generator=self.generator) + 0.1
        leaf = value.to(self.dtypes[len(self.leaves) % len(self.dtypes)]).requires_grad_()
        self.leaves.append(leaf)
        return leaf if self.by_hand is None or leaf.dtype == FP64 else leaf.to(self.by_hand)


def run(name, sample, tensors, region=None):
    """Returns the tensors that the op gives, and the gradients of its leaves."""
    with region if region is not None else contextlib.nullcontext():
        out = sample(find_overload(name), tensors)
    out = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    differentiable = [t for t in out if t.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    return out, [leaf.grad for leaf in tensors.leaves]


def assert_same(name, case, found, expected):
    rtol, atol = TOLERANCE.get(name, (0.0, 0.0))
    for kind, left, right in zip(("output", "gradient"), found, expected, strict=True):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert (a is None) == (b is None), (kind, case)
            if a is not None:
                assert a.dtype == b.dtype, (kind, case)
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=f"{kind} for {case}")


@pytest.fixture(scope="module")
def engines():
    opened = {}
    for name in ("O1", "O2"):
        for low in (BF16, FP16):
            opened[name, low] = OpEngine(effective(level(name, as_format(low))), low, "cpu")
            opened[name, low].open()
    yield opened
    for engine in opened.values():
        engine.close()


def test_every_overload_of_the_table_has_a_sample():
    named = {overload for row in ROWS for overload in row.overloads}
    assert {*ALLOW, *DENY, *PROMOTE, *IN_PLACE, *INFER} == named - UNREACHABLE


@pytest.mark.parametrize("low", [BF16, FP16], ids=IDS.get)
@pytest.mark.parametrize("name", ALLOW)
def test_an_allow_row_computes_in_the_low_format(engines, name, low):
    for dtype in DTYPES:
        found = run(name, ALLOW[name], Tensors(dtype), engines["O1", low].region())
        assert_same(name, dtype, found, run(name, ALLOW[name], Tensors(dtype, by_hand=low)))


@pytest.mark.parametrize("name", ALLOW)
def test_an_allow_row_computes_in_the_low_format_at_o2(engines, name):
    for dtype in (FP32, BF16):
        found = run(name, ALLOW[name], Tensors(dtype), engines["O2", BF16].region())
        assert_same(name, dtype, found, run(name, ALLOW[name], Tensors(dtype, by_hand=BF16)))


@pytest.mark.parametrize("name", DENY)
def test_a_deny_row_computes_in_fp32(engines, name):
    for dtype in DTYPES:
        found = run(name, DENY[name], Tensors(dtype), engines["O1", BF16].region())
        assert_same(name, dtype, found, run(name, DENY[name], Tensors(dtype, by_hand=FP32)))


@pytest.mark.parametrize("row", [row for row in ROWS if row.category == "deny"], ids=lambda row: row.op)
def test_a_deny_row_runs_as_stored_at_o2_unless_it_is_a_loss_or_has_no_low_kernel(engines, row):
    by_hand = FP32 if row.why in ("loss", "no low kernel") else None
    for name in set(row.overloads) - {"layer_norm", "native_layer_norm", "group_norm"}:
        for dtype in DTYPES:
            found = run(name, DENY[name], Tensors(dtype), engines["O2", BF16].region())
            assert_same(name, dtype, found, run(name, DENY[name], Tensors(dtype, by_hand=by_hand)))


@pytest.mark.parametrize("name", ["layer_norm", "native_layer_norm", "group_norm"])
def test_a_norm_computes_in_fp32_at_o2_and_returns_the_format_of_its_input(engines, name):
    """torch's CPU kernels would add up the gradients of low parameters in the low format."""
    for dtype in DTYPES:
        (out, *_), gradients = run(name, DENY[name], Tensors(dtype), engines["O2", BF16].region())
        (expected, *_), wanted = run(name, DENY[name], Tensors(dtype, by_hand=FP32))
        torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("table", ["O1", "O2"])
@pytest.mark.parametrize("name", PROMOTE)
def test_a_promote_row_computes_in_the_widest_format_given(engines, name, table):
    for dtypes in ((BF16,), (FP16,), (FP32,), (FP64,), (BF16, FP32), (FP32, BF16), (FP16, BF16)):
        found = run(name, PROMOTE[name], Tensors(*dtypes), engines[table, BF16].region())
        widest = dtypes[0] if len(dtypes) == 1 else FP32
        assert_same(name, dtypes, found, run(name, PROMOTE[name], Tensors(*dtypes, by_hand=widest)))


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_takes_the_format_of_its_place(engines, name):
    for dtypes in ((BF16,), (FP32,), (FP64,), (BF16, FP32), (FP32, BF16), (FP32, FP16)):
        found = run(name, IN_PLACE[name], Tensors(*dtypes), engines["O1", BF16].region())
        assert_same(name, dtypes, found, run(name, IN_PLACE[name], Tensors(*dtypes, by_hand=dtypes[0])))


@pytest.mark.parametrize("table", ["O1", "O2"])
@pytest.mark.parametrize("name", INFER)
def test_a_norm_with_running_statistics_returns_the_format_of_its_input(engines, name, table):
    """Weights may be wider than the input, and at O2, where a plan may store them low, narrower."""
    pairs = [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64)] + [(FP32, BF16)] * (table == "O2")
    for given, weights in pairs:
        found, _ = run(name, INFER[name], Tensors(given, weights, weights), engines[table, BF16].region())
        wide = FP64 if given == FP64 else FP32
        expected, _ = run(name, INFER[name], Tensors(given, weights, weights, by_hand=wide))
        assert found[0].dtype == given
        torch.testing.assert_close(found[0].to(wide), expected[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm", "native_layer_norm"])
def test_a_norm_at_o2_computes_in_fp32_where_formats_differ(engines, name):
    for given, weights in ((BF16, FP32), (FP32, BF16), (FP16, FP32)):
        found, gradients = run(name, DENY[name], Tensors(given, weights, weights), engines["O2", BF16].region())
        expected, wanted = run(name, DENY[name], Tensors(given, weights, weights, by_hand=FP32))
        assert found[0].dtype == given
        torch.testing.assert_close(found[0].float(), expected[0], rtol=2**-8, atol=2**-8)
        assert [g.dtype for g in gradients] == [g.dtype for g in wanted]
        torch.testing.assert_close(gradients, wanted, rtol=0.02, atol=0.02)
