"""The rows of the op table on CUDA: the dtypes and values of casts by hand, and markers in autograd's own threads."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from halfstep.formats import as_format
from halfstep.plan.levels import level
from halfstep.plan.optable import NORMS, ROWS, effective
from halfstep.train.cast.ops import OpEngine
from tests.cast.op_samples import ALLOW, DENY, IN_PLACE, PROMOTE
from tests.cast.test_ops_rows import Tensors, run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LOWS = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
DEVICE = "cuda"


@pytest.fixture
def opened():
    engines = []

    def open_engine(name, low):
        engines.append(OpEngine(effective(level(name, as_format(low))), low, DEVICE))
        engines[-1].open()
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def on_device(sample):
    """Returns the sample with its tensors moved to the GPU; the leaves, and so their gradients, stay where they are."""

    def call(op, tensors):
        def moved(*args, **kwargs):
            args, kwargs = _pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), (args, kwargs))
            return op(*args, **kwargs)

        return sample(moved, tensors)

    return call


def assert_rows(samples, engine, cases, by_hand):
    """Compares each sample with casts by hand; a sample that CUDA cannot run by hand must not run otherwise."""
    wrong = []
    for name, sample in samples.items():
        for dtypes in cases:
            try:
                out, wanted = run(name, on_device(sample), Tensors(*dtypes, by_hand=by_hand(name, dtypes)))
            except (RuntimeError, NotImplementedError):
                continue
            found, gradients = run(name, on_device(sample), Tensors(*dtypes), engine.region())
            same = [a.dtype == b.dtype for a, b in zip(found, out, strict=True)]
            same += [(a is None) == (b is None) for a, b in zip(gradients, wanted, strict=True)]
            if not all(same):
                wrong.append((name, dtypes, [t.dtype for t in found], [t.dtype for t in out]))
    assert wrong == []


@LOWS
@pytest.mark.parametrize("table", ["O1", "O2"])
def test_allow_rows(opened, table, low):
    assert_rows(ALLOW, opened(table, low), [(FP32,), (BF16,), (FP16,), (FP64,)], lambda name, dtypes: low)


def test_deny_rows(opened):
    assert_rows(DENY, opened("O1", BF16), [(FP32,), (BF16,), (FP16,), (FP64,)], lambda name, dtypes: FP32)


def test_deny_rows_at_o2(opened):
    full = {overload for row in ROWS if row.why == "no low kernel" for overload in row.overloads}
    full |= {overload for row in ROWS if row.why == "loss" for overload in row.overloads}
    cases = [(FP32,), (BF16,), (FP16,), (FP64,)]
    samples = {name: sample for name, sample in DENY.items() if name not in NORMS}
    assert_rows(samples, opened("O2", BF16), cases, lambda name, dtypes: FP32 if name in full else None)


def test_promote_rows(opened):
    cases = [(BF16,), (FP16,), (FP32,), (BF16, FP32), (FP32, BF16), (FP16, BF16)]
    assert_rows(PROMOTE, opened("O1", BF16), cases, lambda name, dtypes: dtypes[0] if len(dtypes) == 1 else FP32)


def test_rows_in_place(opened):
    assert_rows(IN_PLACE, opened("O1", BF16), [(BF16,), (BF16, FP32), (FP32, BF16)], lambda name, dtypes: dtypes[0])


@pytest.mark.silicon
@LOWS
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_run_in_the_low_format(opened, make, low):
    module, engine = make(8, 4, num_layers=2, bidirectional=True).to(DEVICE), opened("O1", low)
    with engine.region():
        out, _ = module(torch.rand(5, 2, 8, device=DEVICE))
    assert out.dtype == low
    out.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {FP32}


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm", "native_layer_norm"])
def test_norms_take_wider_parameters_at_o2(opened, name):
    engine = opened("O2", BF16)
    for given, weights in ((BF16, FP32), (FP32, BF16)):
        found, _ = run(name, on_device(DENY[name]), Tensors(given, weights, weights), engine.region())
        expected, _ = run(name, on_device(DENY[name]), Tensors(given, weights, weights, by_hand=FP32))
        assert found[0].dtype == given
        torch.testing.assert_close(found[0].float(), expected[0], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_by_the_table_in_the_threads_of_autograd(opened, reentrant):
    seen, engine = [], opened("O1", BF16)
    linear = nn.Linear(8, 8, device=DEVICE)

    def block(x):
        h = torch.exp(linear(x))
        seen.append(h.dtype)
        return h * h  # whose gradient needs all that comes before

    x = torch.rand(2, 8, device=DEVICE, requires_grad=True)
    with engine.region():
        out = checkpoint(block, x, use_reentrant=reentrant)
    with engine.backward():
        out.sum().backward()
    assert seen == [FP32, FP32]
