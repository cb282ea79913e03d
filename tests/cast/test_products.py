"""Products that the op engine's kernels emulate, against those of the dispatch mode, bit by bit; and what they keep."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from halfstep.formats import BF16, FP16, Format
from halfstep.plan.levels import level
from halfstep.plan.optable import effective
from halfstep.train.cast import products
from halfstep.train.cast.ops import OpEngine
from halfstep.train.cast.products import EMULATED, KEEP_LOW_FROM, Emulation
from tests.cast.test_emulate import PRODUCT_CASES, same_bits

Function = Callable[..., Tensor]
MASK = torch.ones(33, 33).tril().bool()
CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    **PRODUCT_CASES,
    "linear with bias": (F.linear, [(4, 5, 70), (9, 70), (9,)]),
    "linear with gaps and bias": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), [(4, 5, 70), (9, 70), (9,)]),
    "large linear": (F.linear, [(4, 50, 170), (190, 170), (190,)]),
    "large matmul of slices": (lambda x: x[..., :64] @ x[..., 64:128].transpose(-1, -2), [(2, 3, 80, 192)]),
    "large conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), [(4, 8, 32, 32), (16, 8, 3, 3), (16,)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 3, 33, 16)] * 3),
    "attention with a mask": (lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=MASK), [(2, 3, 33, 16)]),
    "attention of groups": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 1, enable_gqa=True),
        [(2, 4, 33, 16), (2, 2, 33, 16)],
    ),
    "square": (torch.square, [(4, 5)]),
    "cube": (lambda x: x**3, [(4, 5)]),
    "einsum of three": (lambda a, b, c: torch.einsum("bi,ij,jk->bk", a, b, c), [(4, 5), (5, 6), (6, 7)]),
}
# Sums in between, which the mode rounds, are part of the fp32 operation; flash attention has no second derivative.
NO_SECOND = ("mv", "addmv", "bilinear", "einsum of three", "attention", "attention with a mask", "attention of groups")


@contextmanager
def emulating(fmt: Format, name: str = "O2") -> Iterator[OpEngine]:
    engine = OpEngine(effective(level(name, fmt)), fmt.dtype, "cpu", emulate=True)
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


def operands(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_mode(case: str, fmt: Format, name: str) -> None:
    if name == "O1" and case in ("square", "cube"):
        pytest.skip("O1 computes powers in fp32")
    function, shapes = CASES[case]
    inputs, twice = operands(shapes, fmt.dtype), case not in NO_SECOND
    with emulating(fmt, name) as engine, engine.region():
        out = function(*inputs)
    grad = torch.randn(out.shape).to(fmt.dtype)
    grads = torch.autograd.grad(out, inputs, grad, create_graph=twice)
    with Emulation(fmt):
        expected = function(*inputs)
        expected_grads = torch.autograd.grad(expected, inputs, grad, create_graph=twice)
    for ours, theirs in zip([out, *grads], [expected, *expected_grads], strict=True):
        assert same_bits(ours, theirs)
    if twice:
        second = torch.autograd.grad(sum(g.float().square().sum() for g in grads), inputs, allow_unused=True)
        with Emulation(fmt):
            loss = sum(g.float().square().sum() for g in expected_grads)
            expected_second = torch.autograd.grad(loss, inputs, allow_unused=True)
        for ours, theirs in zip(second, expected_second, strict=True):
            assert theirs is None or same_bits(ours, theirs)


@pytest.mark.parametrize("case", ["linear with bias", "large linear", "large conv2d", "attention", "bmm"])
def test_fp32_operands_are_rounded_once_and_get_rounded_gradients(case: str) -> None:
    function, shapes = CASES[case]
    inputs = [torch.randn(*shape).requires_grad_() for shape in shapes]
    with emulating(BF16, "O1") as engine, engine.region():
        out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, grad := torch.randn(out.shape).bfloat16())
    low = [t.detach().bfloat16().requires_grad_() for t in inputs]
    with Emulation(BF16):
        expected = function(*low)
        expected_grads = torch.autograd.grad(expected, low, grad)
    assert same_bits(out, expected)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert ours.dtype is torch.float32
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("size", [KEEP_LOW_FROM - 1, KEEP_LOW_FROM])
def test_large_operands_are_kept_low_for_the_backward_pass(size: int) -> None:
    x = torch.randn(size, 1).bfloat16().requires_grad_()
    w = torch.randn(1, 1).bfloat16().requires_grad_()
    with emulating(BF16) as engine, engine.region():
        out = F.linear(x, w)
    kept: list[Tensor] = [t for t in saved_by(out) if t.numel() == size]
    assert [t.dtype for t in kept] == (
        [] if size >= KEEP_LOW_FROM else [torch.float32]
    )  # kept low, torch only hands out fp32 again
    out.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, x.detach().float().sum().bfloat16().view(1, 1))


def saved_by(out: Tensor) -> list[Tensor]:
    nodes, found = [out.grad_fn], []
    while nodes:
        node: Any = nodes.pop()
        raw = (getattr(node, name) for name in dir(node) if name.startswith("_raw_saved"))
        found += [s.data for s in raw if isinstance(getattr(s, "data", None), Tensor)]
        nodes += [n for n, _ in node.next_functions if n is not None]
    return found


def test_what_is_kept_is_the_operands_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands([(512, 256), (256, 256)], torch.bfloat16)
    packed, own = [], products._pack
    monkeypatch.setattr(products, "_pack", lambda *args: packed.append(own(*args)[0]) or own(*args))
    with emulating(BF16) as engine, engine.region():
        F.linear(x, w)
    assert {t.untyped_storage().data_ptr() for t in packed} == {t.untyped_storage().data_ptr() for t in (x, w)}


def test_hooks_of_another_such_as_a_checkpoints_see_what_a_product_saves() -> None:
    x, w = operands([(512, 256), (256, 256)], torch.bfloat16)
    seen: list[int] = []
    with emulating(BF16) as engine, engine.region(), saved_tensors_hooks(lambda t: seen.append(t.numel()), len):
        F.linear(x, w)
    assert sorted(seen) == sorted([x.numel(), w.numel()])


def test_an_operand_whose_memory_was_freed_before_the_backward_pass_is_an_error() -> None:
    x, w = operands([(300, 100), (200, 100)], torch.bfloat16)
    with emulating(BF16) as engine, engine.region():
        out = F.linear(x, w)
    w.untyped_storage().resize_(0)
    with pytest.raises(
        RuntimeError, match=r"shape \[100, 200\] of an emulated product was freed before a backward pass"
    ):
        out.sum().backward()


def test_an_operand_that_is_written_into_before_the_backward_pass_is_an_error_as_in_torch() -> None:
    x, w = operands([(300, 100), (100, 100)], torch.bfloat16)
    with emulating(BF16) as engine, engine.region():
        out = F.linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["large linear", "large conv2d", "attention"])
def test_checkpoints_give_the_same_bits(case: str, reentrant: bool) -> None:
    function, shapes = CASES[case]
    inputs = operands(shapes, torch.bfloat16)
    with emulating(BF16) as engine, engine.region():
        expected = function(*inputs)
        out = checkpoint(function, *inputs, use_reentrant=reentrant)
        grads = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
        out.backward(torch.ones_like(out))
    assert same_bits(out, expected)
    for t, grad in zip(inputs, grads, strict=True):
        assert t.grad is not None
        assert same_bits(t.grad, grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap's, of attention
@pytest.mark.parametrize("case", ["large linear", "conv2d", "matmul", "attention"])
def test_functions_of_torch_func_go_through(case: str) -> None:
    function, shapes = CASES[case]
    first, *rest = [t.detach().requires_grad_(at == 0) for at, t in enumerate(operands(shapes, torch.bfloat16))]
    with emulating(BF16) as engine, engine.region():
        found = torch.func.grad(lambda t: function(t, *rest).float().sum())(first.detach())
        (expected,) = torch.autograd.grad(function(first, *rest).float().sum(), first)
        stacked = torch.func.vmap(lambda t: function(t, *rest))(torch.stack([first.detach(), first.detach() * 2]))
        plain = function(first.detach(), *rest)
    assert stacked.dtype is torch.bfloat16
    torch.testing.assert_close(stacked[0], plain, rtol=2**-7, atol=2**-4)  # vmap takes composite operations apart
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-5)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch's, of its own flags
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_one_fp32_operation(kind: Any, fmt: Format) -> None:
    layer, x = kind(12, 10, 2, bidirectional=True).to(fmt.dtype), torch.randn(7, 3, 12).to(fmt.dtype).requires_grad_()
    wide, wide_x = kind(12, 10, 2, bidirectional=True), x.detach().float().requires_grad_()
    wide.load_state_dict(layer.state_dict())
    with emulating(fmt) as engine, engine.region():
        out, state = layer(x)
    out.float().square().sum().backward()
    expected, expected_state = wide(wide_x)
    expected.to(fmt.dtype).float().square().sum().backward()
    assert same_bits(out, expected.to(fmt.dtype))
    for ours, theirs in zip(*([s] if isinstance(s, Tensor) else s for s in (state, expected_state)), strict=True):
        assert same_bits(ours, theirs.to(fmt.dtype))
    for ours, theirs in zip([x, *layer.parameters()], [wide_x, *wide.parameters()], strict=True):
        assert same_bits(ours.grad, theirs.grad.to(fmt.dtype))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own
@pytest.mark.slow
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_compiled_code_has_the_bits_of_eager_code(fmt: Format) -> None:
    """Compiled code leaves out a rounding that is followed by a cast back, unless it is arithmetic."""
    torch.compiler.reset()
    w, b, x = torch.randn(40, 40, requires_grad=True), torch.randn(40), torch.randn(33, 40)

    def function(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, w, b).relu(), w)

    with emulating(fmt, "O1") as engine:

        def run(function: Function) -> tuple[Tensor, Tensor]:
            with engine.region():
                out = function(x)
            return out, torch.autograd.grad(out.float().square().sum() * 1e-3, w)[0]

        for ours, theirs in zip(run(torch.compile(function, fullgraph=True)), run(function), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_compiled_code_keeps_low_operands_for_its_backward_pass(fmt: Format) -> None:
    torch.compiler.reset()
    x, w = operands([(24, 16), (16, 16)], fmt.dtype)

    @torch.compile(backend="aot_eager_decomp_partition", fullgraph=True)  # which keeps what Inductor keeps
    def function(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).relu(), w)

    with emulating(fmt) as engine, engine.region():
        out = function(x)
    node: Any = out.grad_fn
    assert {t.dtype for t in node.saved_tensors if t.is_floating_point()} == {fmt.dtype}


TRANSFORMS: dict[str, Function] = {
    "vmap": lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x),
    "jvp": lambda x, w: torch.func.jvp(lambda x: F.linear(x, w).tanh(), (x,), (torch.ones_like(x),))[1],
    "grad": lambda x, w: torch.func.grad(lambda x: F.linear(x, w).tanh().sum())(x),
}


@pytest.mark.filterwarnings("ignore")  # torch's compiler's own
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled_transforms_of_torch_func_compute_as_eager_ones(name: str) -> None:
    torch.compiler.reset()
    x, w = torch.randn(6, 16), torch.randn(8, 16, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for function in (TRANSFORMS[name], torch.compile(TRANSFORMS[name], backend="aot_eager", fullgraph=True)):
        with emulating(BF16, "O1") as engine:
            with engine.region():
                out = function(x, w)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), w)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * float(theirs.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_overflow_in_compiled_code_is_that_of_the_format() -> None:
    torch.compiler.reset()
    with emulating(FP16, "O1") as engine, engine.region():
        out = torch.compile(lambda x: (x @ x).float() * 1e-6, fullgraph=True)(torch.full((4, 4), 300.0))
    assert out.isinf().all()


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_a_grouped_product_is_fp32_rounded_once(fmt: Format) -> None:
    x, w = operands([(32, 16), (2, 16, 8)], fmt.dtype)
    with emulating(fmt) as engine, engine.region():
        out = F.grouped_mm(x, w, offs=torch.tensor([16, 32], dtype=torch.int32))
    expected = torch.cat([x[:16].float() @ w[0].float(), x[16:].float() @ w[1].float()])
    assert same_bits(out, expected.to(fmt.dtype))
    grads = torch.autograd.grad(out.float().sum(), (x, w))
    expected_grads = torch.autograd.grad(expected.to(fmt.dtype).float().sum(), (x, w))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert same_bits(ours, theirs)


def test_every_emulated_operation_exists() -> None:
    assert {name for name in EMULATED if not hasattr(torch.ops.aten, name)} == set()


ACTIVATIONS = ("silu", "mish", "gelu", "elu", "celu", "selu", "softplus", "hardswish", "logsigmoid", "softsign", "glu")


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_mode_leaves_what_is_no_product_to_its_kernel(name: str, fmt: Format) -> None:
    (x,) = operands([(64, 32)], fmt.dtype)

    def run() -> tuple[Tensor, Tensor]:
        out = getattr(F, name)(x)
        return out, torch.autograd.grad(out, x, torch.linspace(-3, 3, out.numel()).to(fmt.dtype).view(out.shape))[0]

    native = run()
    with Emulation(fmt):
        assert all(map(same_bits, run(), native))


def test_code_outside_of_the_region_is_native() -> None:
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    expected = a @ b
    with emulating(BF16):
        assert same_bits(a @ b, expected)
