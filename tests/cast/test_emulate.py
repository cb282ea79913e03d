"""Emulated products against fp32 computation rounded once, bit by bit; and what the mode leaves as it was."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from halfstep.formats import BF16, FP16
from halfstep.modes import uncompiled
from halfstep.train.cast.products import PRODUCTS, Emulation

aten = torch.ops.aten
Function = Callable[..., Tensor]


class Recorder(TorchDispatchMode):
    """Notes the operations that reach torch, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, tuple(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))

    def dtypes(self, func: Any) -> set[torch.dtype]:
        return {dtype for name, dtypes in self.seen if name is func for dtype in dtypes}


@pytest.fixture(autouse=True)
def _nothing_is_left_on() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert stance() == "default"


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def low(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


PRODUCT_CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 70), (70, 9)]),
    "mm of transposed": (lambda a, b: a.t() @ b.t(), [(70, 5), (9, 70)]),
    "mm of a slice": (lambda a, b: a[:, ::2] @ b, [(5, 140), (70, 9)]),
    "addmm": (torch.addmm, [(5, 9), (5, 70), (70, 9)]),
    "addbmm": (torch.addbmm, [(5, 9), (3, 5, 70), (3, 70, 9)]),
    "bmm": (torch.bmm, [(3, 5, 70), (3, 70, 9)]),
    "baddbmm": (torch.baddbmm, [(3, 5, 9), (3, 5, 70), (3, 70, 9)]),
    "mv": (torch.mv, [(5, 70), (70,)]),
    "addmv": (torch.addmv, [(5,), (5, 70), (70,)]),
    "dot": (torch.dot, [(70,), (70,)]),
    "vdot": (torch.vdot, [(70,), (70,)]),
    "matmul": (torch.matmul, [(2, 3, 5, 70), (70, 9)]),
    "einsum": (lambda a, b: torch.einsum("bid,bjd->bij", a, b), [(2, 5, 70), (2, 9, 70)]),
    "linear": (F.linear, [(4, 5, 70), (9, 70)]),
    "bilinear": (F.bilinear, [(5, 7), (5, 8), (9, 7, 8)]),
    "conv1d": (F.conv1d, [(2, 3, 11), (4, 3, 3)]),
    "conv2d": (F.conv2d, [(2, 3, 11, 11), (4, 3, 3, 3)]),
    "conv2d strided in groups": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2),
        [(2, 4, 11, 11), (4, 2, 3, 3)],
    ),
    "conv2d channels last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, dilation=2),
        [(2, 3, 11, 11), (4, 3, 3, 3)],
    ),
    "conv3d": (F.conv3d, [(2, 3, 7, 7, 7), (4, 3, 3, 3, 3)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 3, 11), (3, 4, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 3, 7, 7), (3, 4, 3, 3)]),
    "conv_transpose3d": (F.conv_transpose3d, [(2, 3, 5, 5, 5), (3, 4, 3, 3, 3)]),
}


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", PRODUCT_CASES)
def test_a_product_is_fp32_rounded_once(name: str, fmt: Any) -> None:
    function, shapes = PRODUCT_CASES[name]
    inputs = [low(*shape, dtype=fmt.dtype).requires_grad_() for shape in shapes]
    wide = [t.detach().float().requires_grad_() for t in inputs]
    with Emulation(fmt):
        result = function(*inputs)
        grad = torch.randn(result.shape).to(fmt.dtype)
        grads = torch.autograd.grad(result, inputs, grad)
    expected = function(*wide)
    expected_grads = torch.autograd.grad(expected, wide, grad.float())
    assert same_bits(result, expected.to(fmt.dtype))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert same_bits(ours, theirs.to(fmt.dtype))


def test_a_linear_layer_with_bias_is_fp32_rounded_once() -> None:
    layer, wide = nn.Linear(70, 9).half(), nn.Linear(70, 9)
    wide.load_state_dict(layer.state_dict())
    x = low(4, 5, 70)
    with Emulation(FP16):
        out = layer(x)
        out.backward(torch.ones_like(out))
    expected = wide(x.float())
    expected.backward(torch.ones_like(expected))
    assert same_bits(out, expected.half())
    assert same_bits(layer.weight.grad, wide.weight.grad.half())
    assert same_bits(layer.bias.grad, wide.bias.grad.half())


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_fp32_rounded_once(causal: bool) -> None:
    q, k, v = (low(2, 2, 33, 16).requires_grad_() for _ in range(3))
    grad = low(2, 2, 33, 16)
    with Emulation(FP16):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    wide = [t.detach().float() for t in (q, k, v)]
    expected, sums = aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal)
    expected_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.float(), *wide, expected.half().float(), sums, 0.0, causal
    )
    assert same_bits(out, expected.half())
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert same_bits(ours, theirs.half())


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.float32, torch.bool])
def test_attention_takes_every_mask_that_torch_takes(mask_dtype: torch.dtype) -> None:
    q, k, v = (low(2, 2, 33, 16).requires_grad_() for _ in range(3))
    mask = torch.ones(33, 33).tril().bool() if mask_dtype is torch.bool else torch.randn(33, 33).to(mask_dtype)
    with Emulation(FP16):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.float().square().sum().backward()
    wide_mask = mask if mask_dtype is torch.bool else mask.float()
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=wide_mask)
    assert same_bits(out, expected.half())
    assert q.grad.dtype is torch.float16


def test_attention_written_out_multiplies_in_fp32() -> None:
    q, k, v = (low(1, 2, 9, 16) for _ in range(3))
    recorder = Recorder()
    with recorder, Emulation(FP16), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert recorder.dtypes(aten.bmm.default) == {torch.float32}


def test_the_sum_is_kept_wider_than_the_format() -> None:
    # fp16 has steps of 2 above 2048: each 1 added alone would be rounded away, all four together are not
    a = torch.tensor([[2048.0, 1, 1, 1, 1]], dtype=torch.float16)
    with Emulation(FP16):
        assert (a @ torch.ones(5, 1, dtype=torch.float16)).item() == 2052


@pytest.mark.parametrize(("addend", "expected"), [(15.0, 65504.0), (16.0, float("inf"))])
def test_a_result_overflows_where_fp16_does(addend: float, expected: float) -> None:
    # 65520 lies half way between 65504, the largest fp16 number, and 65536: a tie, which is rounded to inf
    a = torch.tensor([[65504.0, addend]], dtype=torch.float16)
    with Emulation(FP16):
        assert (a @ torch.ones(2, 1, dtype=torch.float16)).item() == expected


def test_a_gradient_overflows_in_the_backward_pass() -> None:
    x = torch.full((1, 1), 300.0, dtype=torch.float16, requires_grad=True)
    w = torch.full((1, 1), 300.0, dtype=torch.float16, requires_grad=True)
    with Emulation(FP16):
        (x @ w).backward(torch.full((1, 1), 300.0, dtype=torch.float16))
    assert x.grad.item() == float("inf")


INFERRED = {
    **{name: PRODUCT_CASES[name] for name in ("linear", "matmul", "einsum", "conv2d", "conv_transpose2d", "bmm")},
    "bilinear": PRODUCT_CASES["bilinear"],
    "linear with bias": (F.linear, [(4, 5, 70), (9, 70), (9,)]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q), [(1, 2, 9, 16)]),
}


@pytest.mark.parametrize("name", INFERRED)
def test_inference_mode_gives_the_bits_of_training(name: str) -> None:
    function, shapes = INFERRED[name]
    inputs = [low(*shape) for shape in shapes]
    with Emulation(FP16):
        expected = function(*inputs)
        with torch.inference_mode():
            assert same_bits(function(*inputs).clone(), expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_inference_mode_lets_autocast_reach_inside_recurrent_layers(kind: Any) -> None:
    layer, x = kind(4, 6), low(3, 2, 4)
    start = torch.zeros(1, 2, 6, dtype=torch.float16)
    recorder = Recorder()
    with torch.inference_mode(), torch.autocast("cpu", torch.float16), recorder, Emulation(FP16):
        out, _ = layer(x, start)
    assert out.dtype is torch.float16
    assert recorder.dtypes(aten.addmm.default) == {torch.float32}


def test_inference_mode_keeps_an_operation_full_that_autocast_made_full() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 9)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16), Emulation(FP16):
        product = torch.linalg.multi_dot([a, b, b.T])
    assert product.dtype is torch.float32
    assert torch.equal(product, torch.linalg.multi_dot([a, b, b.T]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_other_formats_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    recorder = Recorder()
    with recorder, Emulation(FP16):
        F.linear(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype))
        F.conv1d(torch.ones(1, 1, 5, dtype=dtype), torch.ones(1, 1, 3, dtype=dtype))
    assert recorder.dtypes(aten.mm.default) == {dtype}
    assert recorder.dtypes(aten.convolution.default) == {dtype}


def test_operations_other_than_products_stay_low() -> None:
    x = low(4, 8)
    recorder = Recorder()
    with recorder, Emulation(FP16):
        F.layer_norm(F.gelu(x).softmax(-1) + x, (8,)).sum()
    assert {dtype for _, dtypes in recorder.seen for dtype in dtypes} == {torch.float16}


@pytest.mark.parametrize("exponent", [2, 3])
def test_squares_and_cubes_have_the_bits_of_the_fp16_kernel(exponent: int) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    expected = every.pow(exponent)
    recorder = Recorder()
    with recorder, Emulation(FP16):
        powers = every.pow(exponent)
    nan = expected.isnan()
    assert torch.equal(nan, powers.isnan())
    assert same_bits(powers[~nan], expected[~nan])
    assert recorder.dtypes(aten.pow.Tensor_Scalar) == {torch.float32}


@pytest.mark.parametrize(("fmt", "exponent"), [(FP16, 0.5), (FP16, 4), (BF16, 2), (BF16, 3)])
def test_other_powers_pass(fmt: Any, exponent: float) -> None:
    recorder = Recorder()
    with recorder, Emulation(fmt):
        low(4, dtype=fmt.dtype).pow(exponent)
    assert recorder.dtypes(aten.pow.Tensor_Scalar) == {fmt.dtype}


def test_mixed_formats_are_refused_as_torch_refuses_them() -> None:
    with Emulation(FP16), pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(low(2, 2), torch.ones(2, 2))


def test_a_sparse_operand_is_multiplied_in_fp32() -> None:
    a, b = low(5, 7), low(7, 9)
    with Emulation(FP16):
        result = a.to_sparse() @ b
    assert same_bits(result, (a.float().to_sparse() @ b.float()).half())


def test_recurrent_cells_and_layers_train() -> None:
    cell, layer = nn.LSTMCell(4, 6).half(), nn.GRU(4, 6).half()
    x = low(3, 2, 4)
    recorder = Recorder()
    with recorder, Emulation(FP16):
        (cell(x[0])[0].float().sum() + layer(x)[0].float().sum()).backward()
    assert recorder.dtypes(aten.addmm.default) | recorder.dtypes(aten.mm.default) == {torch.float32}
    assert cell.weight_hh.grad.dtype is torch.float16


def test_second_derivatives_are_emulated() -> None:
    x, w = low(1, 2, 9).requires_grad_(), low(3, 2, 3).requires_grad_()
    recorder = Recorder()
    with recorder, Emulation(FP16):
        (grad,) = torch.autograd.grad(F.conv1d(x, w).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert recorder.dtypes(aten.convolution.default) | recorder.dtypes(aten.convolution_backward.default) == {
        torch.float32
    }
    assert w.grad.dtype is torch.float16


def test_autocast_to_fp16_is_emulated_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    recorder = Recorder()
    with recorder, Emulation(FP16):
        with torch.autocast("cpu", torch.float16):
            out = model(torch.randn(3, 8))
        out.float().sum().backward()
    assert out.dtype is torch.float16
    for product in (aten.mm.default, aten.addmm.default):
        assert recorder.dtypes(product) == {torch.float32}
    assert model[0].weight.grad.dtype is torch.float32


def test_the_same_mode_may_be_entered_inside_itself() -> None:
    a, b = low(5, 70), low(70, 9)
    mode = Emulation(FP16)
    with mode, mode:
        with Emulation(FP16), Emulation(BF16):
            result = a @ b
        assert same_bits(a @ b, result)
    assert same_bits(result, (a.float() @ b.float()).half())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_mode_on(error: type[BaseException]) -> None:
    with pytest.raises(error), uncompiled(Emulation(FP16), Emulation(FP16)):
        raise error
    assert _get_current_dispatch_mode_stack() == []
    assert stance() == "default"


def test_an_error_of_an_operation_leaves_no_mode_on() -> None:
    with pytest.raises(RuntimeError), Emulation(FP16), torch.inference_mode():
        F.linear(low(2, 3), low(4, 5))


def test_the_callers_stance_comes_back() -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        with uncompiled(Emulation(FP16)):
            assert stance() == "force_eager"
        assert stance() == "eager_on_recompile"


def test_compiled_code_runs_eager_inside() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda a, b: a @ b, backend=backend, fullgraph=True)
    a, b = low(5, 70), low(70, 9)
    with uncompiled(Emulation(FP16)):
        assert same_bits(compiled(a, b), (a.float() @ b.float()).half())
    assert graphs == []
    compiled(a, b)
    assert len(graphs) == 1


def test_a_mode_is_on_in_its_own_thread_only() -> None:
    stacks: list[Any] = []
    with Emulation(FP16):
        thread = threading.Thread(target=lambda: stacks.append(list(_get_current_dispatch_mode_stack())))
        thread.start()
        thread.join()
    assert stacks == [[]]


def test_one_mode_serves_threads_that_leave_in_any_order() -> None:
    mode, a, b = Emulation(FP16), low(5, 70), low(70, 9)
    second_is_in, first_is_out = threading.Event(), threading.Event()
    results: list[Tensor] = []
    stances: list[str] = []

    def second() -> None:
        with uncompiled(mode):
            second_is_in.set()
            first_is_out.wait()
            stances.append(stance())
            results.append(a @ b)

    thread = threading.Thread(target=second)
    with uncompiled(mode):
        thread.start()
        second_is_in.wait()
        results.append(a @ b)
    first_is_out.set()
    thread.join()
    assert stances == ["force_eager"]
    assert stance() == "default"
    assert all(same_bits(r, (a.float() @ b.float()).half()) for r in results)


def test_every_product_has_a_case() -> None:
    covered = Recorder()
    with covered:
        for function, shapes in PRODUCT_CASES.values():
            inputs = [torch.randn(*shape).requires_grad_() for shape in shapes]
            function(*inputs).sum().backward()
        q = torch.randn(1, 1, 4, 4).requires_grad_()
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    uncovered = PRODUCTS - {func for func, _ in covered.seen}
    assert uncovered == {aten._addmm_activation.default, aten.conv_tbc.default}


@torch.library.custom_op("halfstep_emulation::product", mutates_args=())
def custom_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)  # of two formats, unless autocast is on


LIBRARY = torch.library.Library("halfstep_emulation", "FRAGMENT")
LIBRARY.define("parts(Tensor a, Tensor b) -> Tensor")
LIBRARY.impl("parts", lambda a, b: torch.mm(a, b), "CompositeImplicitAutograd")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["product", "parts"])
def test_a_custom_operation_has_autocast_inside_as_without_emulation(name: str, inference: bool) -> None:
    operation = getattr(torch.ops.halfstep_emulation, name)
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    for left in (a.half(), a):
        with Emulation(FP16), torch.autocast("cpu", torch.float16), torch.inference_mode(inference):
            found = operation(left, b)
        assert found.dtype is torch.float16
    with Emulation(FP16), pytest.raises(RuntimeError, match="dtype"):
        operation(a.half(), b)
