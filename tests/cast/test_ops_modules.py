"""Inside torch's own modules, and when checkpoints compute again: ops get the dtypes that plain code would get."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cast.engines import Record, opened

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOWS = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
TABLES = pytest.mark.parametrize("table", ["O1", "O2"])
CELLS = {
    "lstm": (nn.LSTM, (2, 5, 4), dict(num_layers=2, bidirectional=True, batch_first=True)),
    "gru": (nn.GRU, (2, 5, 4), dict(num_layers=2, bidirectional=True, batch_first=True)),
    "rnn": (nn.RNN, (2, 5, 4), dict(nonlinearity="relu")),
    "lstm cell": (nn.LSTMCell, (2, 4), {}),
    "gru cell": (nn.GRUCell, (2, 4), {}),
    "rnn cell": (nn.RNNCell, (2, 4), {}),
}


def stored(module, table, low):
    """Stores parameters as the level does: low at O2, but for norms."""
    for child in module.modules() if table == "O2" else ():
        if not isinstance(child, nn.LayerNorm):
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    child._parameters[name] = nn.Parameter(parameter.detach().to(low))
    return module


def dtypes(record):
    found = {}
    for op, dtype in record.ran:
        found.setdefault(op, set()).add(dtype)
    return found


@LOWS
@TABLES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_multihead_attention_with_weights_runs_its_softmax_by_the_table(table, low, training):
    module = stored(nn.MultiheadAttention(16, 2, batch_first=True), table, low).train(training)
    x = torch.rand(2, 5, 16, requires_grad=training)
    record = Record("mm", "softmax")
    with opened(table, low) as engine, torch.set_grad_enabled(training), record, engine.region():
        out, weights = module(x, x, x)
    softmax = FP32 if table == "O1" else low
    assert dtypes(record) == {"mm": {low}, "bmm": {low}, "addmm": {low}, "_softmax": {softmax}}
    assert (out.dtype, weights.dtype) == (low, softmax)
    if training:
        out.float().sum().backward()
        assert {p.grad.dtype for p in module.parameters()} == {FP32 if table == "O1" else low}


@LOWS
@TABLES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_transformer_layer_runs_by_the_table_in_training_and_evaluation(table, low, training):
    module = stored(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), table, low).train(training)
    x = torch.rand(2, 5, 16)
    record = Record("mm", "attention", "norm", "_transformer_encoder_layer_fwd")
    with opened(table, low) as engine, torch.set_grad_enabled(training), record, engine.region():
        out = module(x if table == "O1" else x.to(low))
    found = dtypes(record)
    assert {dtype for op, held in found.items() if "norm" not in op for dtype in held} == {low}
    assert "_transformer_encoder_layer_fwd" not in found
    assert "addmm" in found
    assert out.dtype == (FP32 if table == "O1" else low)


@LOWS
@TABLES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_modules_are_low_throughout(kind, training, table, low):
    make, shape, options = CELLS[kind]
    module = stored(make(4, 3, **options), table, low).train(training)
    reference = copy.deepcopy(module).float()
    x = torch.rand(*shape)
    record = Record("mm", "rnn", "sigmoid", "tanh", "relu")
    with opened(table, low) as engine, torch.set_grad_enabled(training), record, engine.region():
        out = module(x)
    tensors = [
        t
        for part in (out if isinstance(out, tuple) else (out,))
        for t in (part if isinstance(part, tuple) else (part,))
    ]
    assert {t.dtype for t in tensors} == {low}
    assert {dtype for held in dtypes(record).values() for dtype in held} == {low}
    expected = reference(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(tensors[0].float(), expected, rtol=0.02, atol=0.02)
    if training:
        tensors[0].float().sum().backward()
        expected.sum().backward()
        for found, wanted in zip(module.parameters(), reference.parameters(), strict=True):
            assert found.grad.dtype == found.dtype
            torch.testing.assert_close(found.grad.float(), wanted.grad, rtol=0.1, atol=0.1)


@LOWS
def test_packed_sequences_and_states_in_fp32_run_low(low):
    module, x = nn.LSTM(4, 3), torch.rand(5, 2, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    with opened(low=low) as engine, engine.region():
        out, (h, c) = module(packed, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)))
    assert (out.data.dtype, h.dtype, c.dtype) == (low, low, low)


def test_a_loop_over_cells_casts_each_weight_once():
    cell, steps = nn.LSTMCell(4, 3), 5
    with opened() as engine, Record("_to_copy") as record, engine.region():
        state = None
        for x in torch.rand(steps, 2, 4):
            state = cell(x, state)
    weights_and_biases, first_states = 4, 2
    assert len(record.ran) <= weights_and_biases + steps + first_states


class Block(nn.Module):
    """Rows of all kinds: GEMM, recurrent, norm, exponential, reduction, in-place promotion."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        h = torch.softmax(self.norm(self.linear(x)), -1) * torch.exp(x)
        h = h.index_add(1, torch.tensor([0]), self.linear(x)[:, :1])
        return self.gru(h)[0] + h.sum(-1, keepdim=True)


@TABLES
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_in_the_same_dtypes(table, reentrant):
    block = stored(Block(), table, BF16)
    x = torch.rand(2, 3, 8).to(FP32 if table == "O1" else BF16).requires_grad_()
    words = ("mm", "softmax", "norm", "exp", "index_add", "sum", "sigmoid", "tanh")
    with opened(table) as engine:
        with Record(*words) as forward, engine.region():
            plain = block(x)
        with engine.backward():
            plain.float().pow(2).sum().backward()
        expected = [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]
        x.grad = None
        block.zero_grad()
        with engine.region():
            out = checkpoint(block, x, use_reentrant=reentrant)
        with Record(*words) as again, engine.backward():
            out.float().pow(2).sum().backward()
    recomputed = [entry for entry in again.ran if "backward" not in entry[0]]
    assert set(forward.ran) <= set(recomputed)
    for found, wanted in zip([x.grad, *(p.grad for p in block.parameters())], expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_a_backward_region_ends_and_leaves_autocast_alone():
    with opened("O1") as engine, opened("O2") as other:
        with other.region(), engine.backward():
            assert torch.is_autocast_enabled(engine._marker)
            assert not torch.is_autocast_enabled(other._marker)
        with (
            engine.region(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):  # as a checkpoint does
            torch.exp(torch.rand(2))
        with engine.backward():
            assert not torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", dtype=BF16):  # likewise
                assert torch.exp(torch.rand(2).to(BF16)).dtype == FP32
        with torch.autocast("cpu", dtype=BF16):
            assert torch.exp(torch.rand(2).to(BF16)).dtype == BF16


@pytest.mark.parametrize("given", [torch.rand(2, 4), torch.rand(2, 4).to(BF16), torch.rand(2, 4).to(FP16)])
def test_low_weights_take_inputs_of_any_format_at_o2(given):
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    stored(module, "O2", BF16)
    with opened("O2") as engine, engine.region():
        out = module(given)
        assert F.scaled_dot_product_attention(given, given.float(), out.new_ones(2, 4)).dtype == BF16
    assert out.dtype == BF16


def test_batch_norm_whose_weights_are_low_and_statistics_full_trains_at_o3():
    module = nn.BatchNorm2d(2)
    for name in ("weight", "bias"):
        module._parameters[name] = nn.Parameter(module._parameters[name].detach().to(BF16))
    for given in (BF16, FP32):
        x = torch.rand(3, 2, 4, 4).to(given)
        with opened("O3") as engine, engine.region():
            out = module(x)
        assert out.dtype == given
        assert module.running_mean.dtype == FP32
        out.float().pow(2).sum().backward()
    assert module.num_batches_tracked == 2
    assert not torch.equal(module.running_mean, torch.zeros(2))
