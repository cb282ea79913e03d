"""Regions under torch.compile: traced whole, the same dtypes and values, and graphs that serve no other table."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.train.cast import opregistry
from halfstep.train.cast.opregistry import MARKERS, REGISTRY, Table
from tests.cast.engines import make_engine, opened

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # which the compiler hides by filters
]  # of torch's own, inside the compiler


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Rows of all kinds, composites with decompositions of the compiler's, and ops that run as written."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        attended, weights = self.attention(h, h, h)
        y = self.linear(x + attended)
        resampled = F.interpolate(y, scale_factor=2), F.interpolate(y[None], size=(3, 3), mode="bilinear")
        sums = torch.logsumexp(y, -1), y.sum(), y.norm(), torch.softmax(y, -1), y**2
        mixed = torch.addcmul(y, y, y.float()), y.float().index_add(0, torch.tensor([0, 1]), y)
        return (*resampled, *sums, *mixed, weights, F.pad(y, (1, 1), "reflect"), F.mse_loss(y, y.float()))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


MODULES = {
    "block": (Block, True),
    "checkpointed": (Checkpointed, True),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), True),
    "lstm": (lambda: nn.LSTM(16, 4, batch_first=True), False),  # dynamo breaks its graph at recurrent modules
    "gru": (lambda: nn.GRU(16, 4, batch_first=True), False),
}


def outputs(out):
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def backward(engine, out, module):
    with engine.backward():
        sum(t.float().pow(2).sum() for t in out).backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return gradients


@pytest.mark.parametrize(("kind", "table"), [*((kind, "O1") for kind in MODULES), ("block", "O2")])
@pytest.mark.slow_but("checkpointed-O1", "lstm")
def test_a_traced_region_gives_the_eager_dtypes_and_values(kind, table):
    make, whole = MODULES[kind]
    module, x = make(), torch.rand(2, 5, 16)

    def inside(x):
        with engine.region():
            return module(x)

    with opened(table) as engine:
        eager = outputs(inside(x))
        wanted = backward(engine, eager, module)
        traced = outputs(torch.compile(inside, backend="aot_eager", fullgraph=whole)(x))
        found = backward(engine, traced, module)
        with engine.region():
            around = outputs(torch.compile(module, backend="aot_eager", fullgraph=whole)(x))
    for a, b, c in zip(eager, traced, around, strict=True):
        assert a.dtype == b.dtype == c.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * a.abs().max().item())


@pytest.mark.slow
def test_inductor_gives_the_dtypes_of_the_table():
    module, x = Block(), torch.rand(2, 5, 16)
    # No graph from the disk: torch's key for them (2.13) leaves out ATEN_CPU_CAPABILITY. Loops that a process wrote for
    # AVX512, 16 floats at a time, are then compiled for AVX2, and half of what they write is left as it was.
    options = {"fx_graph_cache": False}
    with opened() as engine, engine.region():
        expected = outputs(module(x))
        found = outputs(torch.compile(module, fullgraph=True, options=options)(x))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * max(1.0, b.abs().max().item()))


def softmax_of_linear():
    module = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: torch.softmax(module(x), -1), backend="aot_eager", fullgraph=True)
    return compiled, torch.rand(2, 4)


def test_one_compiled_function_serves_regions_plain_autocast_and_neither():
    compiled, x = softmax_of_linear()
    with opened("O1") as first, opened("O2") as second:
        for _ in range(2):
            with first.region():
                assert compiled(x).dtype == FP32
            with torch.autocast("cpu", dtype=BF16):
                assert compiled(x).dtype == BF16
            with second.region():
                assert compiled(x).dtype == BF16
            with first.region(enabled=False):
                assert compiled(x).dtype == FP32
            token = first.read()
            first.enter(token)
            assert compiled(x).dtype == FP32
            first.leave(token)
            assert compiled(x).dtype == FP32
    with torch.autocast("cpu", dtype=BF16):
        assert compiled(x).dtype == BF16


def test_a_graph_that_runs_as_written_meets_the_kernels_in_a_thread_that_entered_no_region():
    found = []

    def work():
        with opened("O1") as engine:

            def function(x):
                with engine.region():
                    return torch.exp(x)

            compiled = torch.compile(function, backend="eager", fullgraph=True)
            found.extend(compiled(torch.ones(2, dtype=BF16)).dtype for _ in range(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [FP32, FP32]


def test_nested_regions_of_two_engines_are_traced_whole():
    with opened("O1") as first, opened("O2") as second:

        def nested(x):
            with first.region():
                outer = torch.exp(x)
                with second.region():
                    inner = torch.exp(x)
                with first.region(enabled=False):
                    stored = torch.exp(x)
            return outer, inner, stored

        out = torch.compile(nested, backend="aot_eager", fullgraph=True)(torch.rand(3).to(BF16))
    assert [t.dtype for t in out] == [FP32, BF16, BF16]


@pytest.mark.slow
def test_a_graph_compiled_for_a_table_does_not_serve_the_next_one_with_its_marker():
    compiled, x = softmax_of_linear()
    names = ("gelu", "silu", "mish", "celu", "selu", "elu")
    for name in names:  # more tables, one after the other, than there are markers
        with opened(allow=("softmax",), deny=(name,)) as engine, engine.region():
            assert compiled(x).dtype == BF16
    for name in names:
        with opened(deny=(name,)) as engine, engine.region():
            assert compiled(x).dtype == FP32


def test_a_table_gets_its_marker_again():
    first = make_engine(deny=("gelu",))
    first.open()
    marker = first._marker
    first.close()
    with opened(deny=("silu",)) as other:
        first.open()
        assert first._marker == marker != other._marker
        first.close()


def test_caches_on_disk_know_the_table(monkeypatch):
    before = torch.compiler.config.cache_key_tag
    tags = set()
    for name in ("O1", "O2"):
        with opened(name):
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 2
    assert before not in tags
    with opened() as engine:
        assert engine._table.digest() in torch.compiler.config.cache_key_tag
    table = Table("cpu", frozenset({("exp", "full"), ("linear", "low")}))
    assert table.digest() == Table("cpu", frozenset({("linear", "low"), ("exp", "full")})).digest()
    assert table.digest() != Table("cpu", frozenset({("exp", "low"), ("linear", "low")})).digest()
    before = table.digest()
    monkeypatch.setattr(opregistry, "__version__", "9")  # whose kernels may cast otherwise
    assert table.digest() != before


def test_caches_on_disk_know_the_table_in_every_thread():
    import threading

    tags = []
    with opened():
        thread = threading.Thread(target=lambda: tags.append(torch.compiler.config.cache_key_tag))
        thread.start()
        thread.join()
        assert tags == [torch.compiler.config.cache_key_tag]


CHILD = """
import sys, torch
from tests.cast.engines import opened
from torch._dynamo.utils import counters
compiled, x = torch.compile(lambda x: torch.softmax(x.mm(x), -1)), torch.rand(4, 4)
table = sys.argv[1]
if table == "plain":
    with torch.autocast("cpu", dtype=torch.bfloat16): out = compiled(x)
else:
    changes = dict(allow=("softmax",)) if table == "changed" else {}
    with opened("O1", **changes) as engine, engine.region(): out = compiled(x)
print(str(out.dtype), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_process_takes_no_graph_of_another_table_from_the_cache_on_disk(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    results = []
    for table in ("plain", "O1", "changed", "O1", "changed", "plain"):
        command = [sys.executable, "-c", CHILD, table]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(done.stdout.strip())
    low, full = "torch.bfloat16", "torch.float32"
    assert results == [f"{low} 0", f"{full} 0", f"{low} 0", f"{full} 1", f"{low} 1", f"{low} 1"]


def test_markers_are_of_devices_that_this_process_has_no_tensors_of():
    assert not {"cpu", "cuda"} & set(MARKERS)
    assert not REGISTRY._slots


class Interrupted(nn.Module):
    """Breaks its graph between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(self.norm(x))


def graphs_of(model, region):
    """Returns how many graphs torch.compile makes of a model that is called in `region()`, in two training steps."""
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with region():
            out = compiled(torch.rand(2, 8))
        out.float().sum().backward()
    return len(made)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads where a graph breaks
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [Interrupted, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))])
def test_a_compiled_model_has_as_many_graphs_as_under_torch_amp(make, level):
    model = make()
    expected = graphs_of(model, lambda: torch.autocast("cpu", BF16))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters()), level, low="bf16", emulate=False)
    assert graphs_of(model, nullcontext) == expected
    session.close()
