"""Ops get the same dtypes inside torch's own modules, checkpointing and torch.compile as in plain code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.machine import AMX_FP16, AVX2, AVX512_BF16
from tests.contracts.cases import mixed_plans

WATCHED = {
    "softmax",
    "_softmax",
    "layer_norm",
    "native_layer_norm",
    "linear",
    "addmm",
    "mm",
    "bmm",
    "exp",
    "_log_softmax",
}


class Dtypes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the output dtype of each watched aten op."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in WATCHED:
            first = out[0] if isinstance(out, tuple) else out
            self.seen.setdefault(name, set()).add(first.dtype)
        return out


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = x * 1.0  # no leaf: autocast keeps the casts of leaves
        return torch.softmax(self.inner(x) @ x.transpose(-1, -2), -1) @ x + nn.functional.layer_norm(x, (8,))


class Checkpointed(Plain):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def session_on(model, name, low, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return halfstep.initialize(model, torch.optim.SGD(parameters, lr=0.01), name, low=low, **options)


def gradients(model, session, x):
    x = x.clone().requires_grad_()
    session.backward(model(x).square().mean())
    session.unscale_()
    scale = session.status().scales[0]
    return [x.grad / scale, *(p.grad.clone() for p in model.parameters())]


@mixed_plans
def test_softmax_inside_multihead_attention_runs_as_in_plain_code(name, low):
    model = nn.MultiheadAttention(8, 2, batch_first=True)

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x):
            return self.attention(x, x, x, need_weights=True)[0]

    outer = Call()
    session = session_on(outer, name, low)
    with Dtypes() as mode:
        outer(torch.randn(2, 5, 8))
    stored = session.plan.low.dtype
    assert mode.seen["_softmax"] == {torch.float32 if name == "O1" else stored}
    session.close()


@mixed_plans
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_computes_low_products_also_in_evaluation(name, low, training):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    session = session_on(model, name, low, emulate=False)
    with torch.set_grad_enabled(training), Dtypes() as mode:
        out = model(torch.randn(2, 5, 8))
    assert out.dtype is torch.float32
    products = mode.seen.get("addmm", set()) | mode.seen.get("mm", set()) | mode.seen.get("linear", set())
    assert products == {session.plan.low.dtype}
    if name == "O1":
        assert mode.seen["native_layer_norm"] == {torch.float32}
    session.close()


@mixed_plans
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_low_and_train(name, low, kind):
    torch.manual_seed(0)
    model = kind(8, 8, batch_first=True)
    inside = []

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = model

        def forward(self, x):
            out = self.recurrent(x)[0]
            inside.append(out.dtype)
            return out

    outer = Call()
    session = session_on(outer, name, low)
    x = torch.randn(2, 5, 8)
    got = gradients(outer, session, x)
    assert inside == [session.plan.low.dtype]
    session.close()
    x = x.clone().requires_grad_()
    outer.zero_grad()
    outer(x).square().mean().backward()
    for a, b in zip(got, [x.grad, *(p.grad for p in outer.parameters())], strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.01)
    outer.zero_grad()


@mixed_plans
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients_bit_for_bit(name, low, reentrant):
    results = []
    for make in (Plain, lambda: Checkpointed(reentrant)):
        torch.manual_seed(0)
        model = make()
        session = session_on(model, name, low)
        results.append(gradients(model, session, torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))))
        session.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16")])
@pytest.mark.parametrize("when", ["after", "before", "submodule", "in place"])
@pytest.mark.slow_but("before-O2", "in place-O1")
def test_compiled_models_compute_as_eager_ones(name, low, when, on_processor):
    on_processor(AVX512_BF16)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = Plain()
    session = session_on(plain, name, low)
    want = gradients(plain, session, x)
    session.close()

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Plain()
    compiled = model if when == "submodule" else None
    if when == "before":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x)
    if when == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
        compiled = model
    session = session_on(compiled if when == "before" else model, name, low)
    if when == "after":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if when == "submodule":
        step = torch.compile(lambda x: model(x) * 1.0, backend="aot_eager", fullgraph=True)
        session.backward(step(x := x.clone().requires_grad_()).square().mean())
        session.unscale_()
        got = [x.grad, *(p.grad for p in model.parameters())]
    else:
        got = gradients(compiled, session, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    session.close()


@mixed_plans
def test_a_no_grad_pass_before_the_training_pass_loses_no_gradient(name, low):
    results = []
    for warm in (False, True):
        torch.manual_seed(0)
        model = Plain()
        session = session_on(model, name, low)
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
        with session.autocast():
            if warm:
                with torch.no_grad():
                    model(x)
            results.append(gradients(model, session, x))
        session.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert a.any()


class NoMixing(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails where an op mixes floating dtypes; norm kernels take fp32 weights, casts and copies are for it."""

    ALLOWED = ("norm", "_to_copy", "copy_", "where", "isfinite", "lerp")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        floating = {t.dtype for t in tensors if t.is_floating_point() and t.dim() > 0}
        if len(floating) > 1 and not any(word in func.__name__ for word in self.ALLOWED):
            raise AssertionError(f"{func.__name__} mixes {sorted(map(str, floating))}")
        return func(*args, **(kwargs or {}))


@mixed_plans
def test_no_op_of_a_model_mixes_floating_dtypes(name, low):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 8),
        nn.GELU(),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )
    session = session_on(model, name, low)
    with NoMixing():
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
        session.backward(loss)
    session.step()
    session.close()


@pytest.mark.parametrize("row", [AMX_FP16, AVX2], ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.slow_but("O2-x86 AVX2")
def test_an_emulated_model_compiles_whole(name, row, on_processor):
    on_processor(row)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Plain()
    session = session_on(model, name, "fp16")
    x = torch.randn(3, 5, 8)
    want = model(x)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
    session.close()


class Residual(nn.Module):
    """Adds what went through norms kept full, torch's and its own, to the low stream beside it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norms = nn.ModuleList([nn.LayerNorm(8), OwnNorm()])
        self.rows = nn.Embedding(4, 8)

    def forward(self, x, ids):
        x = self.layers[0](x) + self.rows(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)) + norm(x)
        return x


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O2", "O3"])  # at O1 the table widens what norms give
def test_the_residual_stream_of_low_weights_stays_low(name, low):
    torch.manual_seed(0)
    model = Residual()
    session = session_on(model, name, low, loss_scale=128.0)
    with NoMixing():
        loss = model(torch.randn(3, 8), torch.tensor([0, 1, 1])).square().mean()
        session.backward(loss)
    assert not bool(session.step().skipped)
    session.close()


class Large(torch.autograd.Function):
    """Asks for more memory than there is, in its forward or its backward pass."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return x.new_empty(2**50) if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(2**50) if ctx.where == "backward" else grad, None


class Asking(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.inner, self.where = nn.Linear(4, 4), where

    def forward(self, x):
        return Large.apply(self.inner(x), self.where)


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_names_the_copies_of_emulated_products(where, emulate):
    model = Asking(where)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="bf16", emulate=emulate)
    with pytest.raises(RuntimeError, match="allocate memory") as failed:
        session.backward(model(torch.randn(2, 4)).square().mean())
    said = (
        "products in bf16 are emulated here, with fp32 copies of their operands: use a smaller batch, or pass emulate=F"
    )
    assert str(failed.value).count(said) == int(emulate)
    session.close()


def test_another_error_stays_as_it_was():
    model = Asking("nowhere")
    session = halfstep.initialize(model, None, "O2", low="bf16", emulate=True)
    with pytest.raises(RuntimeError) as failed:
        model(torch.randn(2, 5))
    assert "emulated" not in str(failed.value)
    session.close()
