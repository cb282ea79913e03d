"""Which operations are slow in a low format: each op's CPU time in bf16 and fp16 over its time in fp32.

    python benchmarks/op_sweep.py [--only WORD] [--all] [--json FILE]

Times torch's own kernels on one thread, forward and backward by themselves: products, attention, recurrent layers and
the rest of what networks are made of, in halfstep's op table and beyond it (but for linear algebra and Fourier
transforms, most of which have no low kernel). In turns, the least CPU time
of up to 15 calls of each format counts. Prints the operations that take more than 1.5 times fp32's time in a format
(`--all`: every one), and those that have no kernel for it. Takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.machine import read_machine

SLOW = 1.5
CALLS, SECONDS = 15, 0.4  # of one format and direction at most
LOWS = {"bf16": torch.bfloat16, "fp16": torch.float16}

Made = tuple[Callable[..., Any], list[Tensor]]
"""A function and its floating-point operands; all but those that do not require gradients get one."""


@dataclass(frozen=True)
class Row:
    """The times of an operation in a format and direction over those in fp32; `error` if there is no kernel."""

    kind: str
    op: str
    direction: str
    fp32_ms: float | None
    bf16: float | None
    fp16: float | None
    errors: dict[str, str]

    @property
    def is_slow(self) -> bool:
        """Whether a low format is slow, or has no kernel."""
        return bool(self.errors) or any(ratio is not None and ratio > SLOW for ratio in (self.bf16, self.fp16))


def normal(*shape: int, grad: bool = True) -> Tensor:
    """Returns normally distributed fp32 values; the same in each call order."""
    return torch.randn(shape).requires_grad_(grad)


def products() -> Iterator[tuple[str, Made]]:
    """Yields matrix products, by name."""
    yield "mm", (torch.mm, [normal(256, 256), normal(256, 256)])
    yield "linear", (F.linear, [normal(256, 256), normal(256, 256), normal(256)])
    yield "linear, 64 wide, 16 rows", (F.linear, [normal(16, 64), normal(64, 64), normal(64)])
    yield "matmul, 3-d", (torch.matmul, [normal(8, 64, 128), normal(8, 128, 64)])
    yield "addmm", (torch.addmm, [normal(128, 128), normal(128, 256), normal(256, 128)])
    yield "bmm", (torch.bmm, [normal(8, 64, 128), normal(8, 128, 64)])
    yield "baddbmm", (torch.baddbmm, [normal(8, 64, 64), normal(8, 64, 128), normal(8, 128, 64)])
    yield "addbmm", (torch.addbmm, [normal(64, 64), normal(8, 64, 128), normal(8, 128, 64)])
    yield "mv", (torch.mv, [normal(512, 512), normal(512)])
    yield "addmv", (torch.addmv, [normal(512), normal(512, 512), normal(512)])
    yield "addr", (torch.addr, [normal(512, 512), normal(512), normal(512)])
    yield "dot", (torch.dot, [normal(2**16), normal(2**16)])
    yield "outer", (torch.outer, [normal(512), normal(512)])
    yield "inner", (torch.inner, [normal(64, 256), normal(64, 256)])
    yield "einsum", (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [normal(8, 64, 128), normal(8, 128, 64)])
    yield "tensordot", (lambda a, b: torch.tensordot(a, b, 1), [normal(128, 128), normal(128, 128)])
    yield (
        "multi_dot",
        (lambda *each: torch.linalg.multi_dot(each), [normal(64, 128), normal(128, 128), normal(128, 64)]),
    )
    yield "linalg.vecdot", (torch.linalg.vecdot, [normal(256, 256), normal(256, 256)])
    yield "bilinear", (F.bilinear, [normal(32, 32), normal(32, 32), normal(16, 32, 32), normal(16)])
    yield "matrix_power", (lambda a: torch.linalg.matrix_power(a, 3), [normal(128, 128)])
    ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
    if hasattr(F, "grouped_mm"):
        grouped = lambda a, b: F.grouped_mm(a, b, offs=ends)  # noqa: E731
        yield "grouped_mm", (grouped, [normal(256, 128), normal(4, 128, 64)])


def convolutions() -> Iterator[tuple[str, Made]]:
    """Yields convolutions, by name."""
    yield "conv1d", (lambda x, w: F.conv1d(x, w, padding=1), [normal(4, 64, 128), normal(64, 64, 3)])
    yield "conv2d", (lambda x, w: F.conv2d(x, w, padding=1), [normal(2, 32, 28, 28), normal(32, 32, 3, 3)])
    yield "conv2d, 1 x 1", (F.conv2d, [normal(2, 64, 28, 28), normal(64, 64, 1, 1)])
    yield "conv2d, depthwise", (
        lambda x, w: F.conv2d(x, w, padding=1, groups=64), [normal(2, 64, 28, 28), normal(64, 1, 3, 3)]
    )  # fmt: skip
    yield "conv2d, 4 groups", (
        lambda x, w: F.conv2d(x, w, padding=1, groups=4), [normal(2, 64, 28, 28), normal(64, 16, 3, 3)]
    )  # fmt: skip
    yield "conv2d, dilated", (
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2), [normal(2, 32, 28, 28), normal(32, 32, 3, 3)]
    )  # fmt: skip
    yield "conv3d", (lambda x, w: F.conv3d(x, w, padding=1), [normal(1, 8, 8, 16, 16), normal(16, 8, 3, 3, 3)])
    yield "conv_tbc", (torch.conv_tbc, [normal(64, 4, 64), normal(3, 64, 64), normal(64)])
    yield "conv_transpose1d", (F.conv_transpose1d, [normal(4, 64, 64), normal(64, 64, 3)])
    yield "conv_transpose2d", (F.conv_transpose2d, [normal(2, 32, 14, 14), normal(32, 32, 3, 3)])
    yield "conv_transpose3d", (F.conv_transpose3d, [normal(1, 8, 6, 8, 8), normal(8, 8, 3, 3, 3)])
    yield "unfold", (lambda x: F.unfold(x, 3), [normal(2, 16, 28, 28)])
    yield "fold", (lambda x: F.fold(x, (28, 28), 3), [normal(2, 144, 676)])


def attentions() -> Iterator[tuple[str, Made]]:
    """Yields attention, by name."""
    for length in (64, 256):
        operands = [normal(2, 4, length, 32) for _ in range(3)]
        yield f"attention, length {length}", (F.scaled_dot_product_attention, operands)
        causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        yield f"attention, causal, length {length}", (causal, operands)
    mask = torch.randn(256, 256)
    masked = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))  # noqa: E731
    yield "attention, mask, length 256", (masked, [normal(2, 4, 256, 32) for _ in range(3)])


def layers() -> Iterator[tuple[str, Made]]:
    """Yields recurrent layers and cells, by name."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield kind.__name__, of_module(kind(64, 64, batch_first=True), normal(8, 16, 64))
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield kind.__name__, of_module(kind(64, 64), normal(64, 64))
    yield "LSTM, 2 layers, both directions", of_module(nn.LSTM(64, 64, 2, bidirectional=True), normal(8, 16, 64))


def of_module(module: nn.Module, *inputs: Tensor) -> Made:
    """Returns a module as a function of its inputs and its parameters."""
    names = [name for name, _ in module.named_parameters()]

    def call(*operands: Tensor) -> Any:
        given, values = operands[: len(inputs)], operands[len(inputs) :]
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), given)

    return call, [*inputs, *module.parameters()]


def lookups() -> Iterator[tuple[str, Made]]:
    """Yields embeddings, gathers and scatters, by name."""
    ids = torch.randint(0, 1000, (8, 64))
    yield "embedding", (lambda w: F.embedding(ids, w), [normal(1000, 64)])
    yield "embedding, padding", (lambda w: F.embedding(ids, w, padding_idx=0), [normal(1000, 64)])
    for mode in ("sum", "mean", "max"):
        yield f"embedding_bag, {mode}", (lambda w, mode=mode: F.embedding_bag(ids, w, mode=mode), [normal(1000, 64)])
    rows, cells = torch.randint(0, 256, (512,)), torch.randint(0, 256, (512, 256))
    yield "index_select", (lambda x: x.index_select(0, rows), [normal(256, 256)])
    yield "x[rows]", (lambda x: x[rows], [normal(256, 256)])
    yield "gather", (lambda x: x.gather(0, cells), [normal(256, 256)])
    yield "scatter_add", (lambda x, y: x.scatter_add(0, cells, y), [normal(256, 256), normal(512, 256)])
    yield "index_add", (lambda x, y: x.index_add(0, rows, y), [normal(256, 256), normal(512, 256)])
    yield "index_put, accumulated", (
        lambda x, y: x.index_put((rows,), y, accumulate=True), [normal(256, 256), normal(512, 256)]
    )  # fmt: skip
    yield "scatter_reduce, mean", (
        lambda x, y: x.scatter_reduce(0, cells, y, "mean"), [normal(256, 256), normal(512, 256)]
    )  # fmt: skip
    yield "index_copy", (lambda x, y: x.index_copy(0, torch.arange(256), y), [normal(256, 256), normal(256, 256)])
    mask = torch.rand(256, 256) < 0.5
    yield "masked_fill", (lambda x: x.masked_fill(mask, 0.0), [normal(256, 256)])
    yield "masked_select", (lambda x: x.masked_select(mask), [normal(256, 256)])
    yield "where", (lambda x, y: torch.where(mask, x, y), [normal(256, 256), normal(256, 256)])


def pools() -> Iterator[tuple[str, Made]]:
    """Yields pooling, resizing and padding, by name."""
    image, line, volume = (2, 32, 28, 28), (4, 64, 128), (1, 8, 8, 16, 16)
    yield "max_pool1d", (lambda x: F.max_pool1d(x, 2), [normal(*line)])
    yield "max_pool2d", (lambda x: F.max_pool2d(x, 2), [normal(*image)])
    yield "max_pool3d", (lambda x: F.max_pool3d(x, 2), [normal(*volume)])
    yield "avg_pool1d", (lambda x: F.avg_pool1d(x, 2), [normal(*line)])
    yield "avg_pool2d", (lambda x: F.avg_pool2d(x, 2), [normal(*image)])
    yield "avg_pool3d", (lambda x: F.avg_pool3d(x, 2), [normal(*volume)])
    yield "adaptive_avg_pool2d to 1", (lambda x: F.adaptive_avg_pool2d(x, 1), [normal(*image)])
    yield "adaptive_avg_pool2d to 7", (lambda x: F.adaptive_avg_pool2d(x, 7), [normal(*image)])
    yield "adaptive_max_pool2d", (lambda x: F.adaptive_max_pool2d(x, 7), [normal(*image)])
    yield "lp_pool2d", (lambda x: F.lp_pool2d(x, 2, 2), [normal(*image)])
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        yield (
            f"interpolate, {mode}",
            (lambda x, mode=mode: F.interpolate(x, size=(40, 40), mode=mode), [normal(*image)]),
        )
    yield "interpolate, linear", (lambda x: F.interpolate(x, size=200, mode="linear"), [normal(*line)])
    yield "interpolate, trilinear", (lambda x: F.interpolate(x, size=(10, 20, 20), mode="trilinear"), [normal(*volume)])
    smooth = lambda x: F.interpolate(x, size=(20, 20), mode="bilinear", antialias=True)  # noqa: E731
    yield "interpolate, antialiased", (smooth, [normal(*image)])
    grid = torch.rand(2, 28, 28, 2) * 2 - 1
    yield "grid_sample", (lambda x: F.grid_sample(x, grid.to(x.dtype), align_corners=False), [normal(*image)])
    yield "pixel_shuffle", (lambda x: F.pixel_shuffle(x, 2), [normal(*image)])
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield f"pad, {mode}", (lambda x, mode=mode: F.pad(x, (2, 2, 2, 2), mode=mode), [normal(*image)])


def norms() -> Iterator[tuple[str, Made]]:
    """Yields norms and softmax, by name."""
    rows, image = (256, 256), (4, 32, 28, 28)
    yield "layer_norm", (lambda x, w, b: F.layer_norm(x, (256,), w, b), [normal(*rows), normal(256), normal(256)])
    yield "rms_norm", (lambda x, w: F.rms_norm(x, (256,), w), [normal(*rows), normal(256)])
    yield "group_norm", (lambda x, w, b: F.group_norm(x, 8, w, b), [normal(*image), normal(32), normal(32)])
    yield "batch_norm", (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [normal(*image), normal(32), normal(32)]
    )  # fmt: skip
    yield "instance_norm", (lambda x: F.instance_norm(x), [normal(*image)])
    yield "local_response_norm", (lambda x: F.local_response_norm(x, 2), [normal(*image)])
    yield "normalize", (F.normalize, [normal(*rows)])
    yield "softmax", (lambda x: x.softmax(-1), [normal(*rows)])
    yield "softmax, first dimension", (lambda x: x.softmax(0), [normal(*rows)])
    yield "log_softmax", (lambda x: x.log_softmax(-1), [normal(*rows)])
    yield "logsumexp", (lambda x: x.logsumexp(-1), [normal(*rows)])


def reductions() -> Iterator[tuple[str, Made]]:
    """Yields reductions, scans and sorts, by name."""
    rows = (256, 256)
    for name in ("sum", "mean", "amax", "amin", "prod", "var", "std", "norm", "median", "max", "min"):
        yield f"{name}, whole", (lambda x, name=name: getattr(torch, name)(x), [normal(*rows)])
    for name in ("sum", "mean", "amax", "prod", "var", "std", "norm", "max", "median", "argmax", "cumsum", "cumprod"):
        yield f"{name}, rows", (lambda x, name=name: first(getattr(torch, name)(x, dim=-1)), [normal(*rows)])
    yield "sum, columns", (lambda x: x.sum(0), [normal(*rows)])
    yield "cummax", (lambda x: x.cummax(-1)[0], [normal(*rows)])
    yield "logcumsumexp", (lambda x: x.logcumsumexp(-1), [normal(*rows)])
    yield "sort", (lambda x: x.sort(-1)[0], [normal(*rows)])
    yield "topk", (lambda x: x.topk(8, -1)[0], [normal(*rows)])
    yield "kthvalue", (lambda x: x.kthvalue(8, -1)[0], [normal(*rows)])
    yield "unique", (lambda x: x.detach().unique(), [normal(*rows, grad=False)])
    yield "cdist", (torch.cdist, [normal(64, 64), normal(64, 64)])
    yield "pdist", (F.pdist, [normal(64, 64)])
    yield "cosine_similarity", (lambda a, b: F.cosine_similarity(a, b, -1), [normal(*rows), normal(*rows)])
    yield "searchsorted", (
        lambda a, b: torch.searchsorted(a.sort()[0], b), [normal(256, grad=False), normal(2**14, grad=False)]
    )  # fmt: skip
    yield "multinomial", (lambda x: torch.multinomial(x.abs(), 8), [normal(*rows, grad=False)])
    yield "histc", (lambda x: torch.histc(x, 16), [normal(*rows, grad=False)])


def first(result: Any) -> Tensor:
    """Returns the values of a reduction that returns indices too."""
    return result if isinstance(result, Tensor) else result[0]


def losses() -> Iterator[tuple[str, Made]]:
    """Yields losses, by name."""
    rows, classes = (256, 256), torch.randint(0, 256, (256,))
    yield "cross_entropy", (lambda x: F.cross_entropy(x, classes), [normal(*rows)])
    yield "nll_loss", (lambda x: F.nll_loss(x, classes), [normal(*rows)])
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div"):
        call = getattr(F, name)
        yield name, (lambda x, y, call=call: call(x, y, reduction="sum"), [normal(*rows), normal(*rows, grad=False)])
    lengths, targets = torch.full((4,), 64), torch.randint(1, 32, (4, 16))
    yield "ctc_loss", (
        lambda x: F.ctc_loss(x.log_softmax(-1), targets, lengths, torch.full((4,), 16)), [normal(64, 4, 32)]
    )  # fmt: skip


def elementwise() -> Iterator[tuple[str, Made]]:
    """Yields activations, arithmetic, copies and random numbers, by name."""
    size = (256, 512)
    unary = (
        "relu gelu silu sigmoid tanh softplus elu selu celu mish hardswish hardsigmoid hardtanh leaky_relu logsigmoid "
        "relu6 softsign hardshrink softshrink glu tanhshrink"
    )
    for name in unary.split():
        yield name, (getattr(F, name, None) or getattr(torch, name), [normal(*size)])
    more = "exp expm1 sin cos tan tanh erf abs neg sqrt rsqrt reciprocal log log1p square floor sign"
    for name in more.split():
        yield name, (lambda x, name=name: getattr(torch, name)(x), [normal(*size).detach().abs_().requires_grad_()])
    yield "prelu", (F.prelu, [normal(64, 32, 64), normal(32)])
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "atan2", "fmod", "pow"):
        positive = [normal(*size).detach().abs_().add_(0.1).requires_grad_() for _ in range(2)]
        yield name, (lambda x, y, name=name: getattr(torch, name)(x, y), positive)
    for exponent in (2, 3, 0.5, -1, 1.5):
        yield f"pow {exponent}", (
            lambda x, e=exponent: x**e, [normal(*size).detach().abs_().add_(0.1).requires_grad_()]
        )  # fmt: skip
    yield "addcmul", (torch.addcmul, [normal(*size) for _ in range(3)])
    yield "addcdiv", (torch.addcdiv, [normal(*size).detach().abs_().add_(1).requires_grad_() for _ in range(3)])
    yield "lerp", (lambda a, b: torch.lerp(a, b, 0.25), [normal(*size), normal(*size)])
    yield "clamp", (lambda x: x.clamp(-1, 1), [normal(*size)])
    yield "cat", (lambda a, b: torch.cat((a, b)), [normal(*size), normal(*size)])
    yield "stack", (lambda a, b: torch.stack((a, b)), [normal(*size), normal(*size)])
    yield "transposed copy", (lambda x: x.t().contiguous(), [normal(*size)])
    yield "clone", (torch.clone, [normal(*size)])
    yield "flip", (lambda x: x.flip(1), [normal(*size)])
    yield "roll", (lambda x: x.roll(3, 1), [normal(*size)])
    yield "tril", (torch.tril, [normal(*size)])
    yield "repeat_interleave", (lambda x: x.repeat_interleave(2, 0), [normal(*size)])
    yield "dropout", (lambda x: F.dropout(x, 0.1), [normal(*size)])
    yield "normal_", (lambda x: x.normal_(), [normal(*size, grad=False)])
    yield "uniform_", (lambda x: x.uniform_(), [normal(*size, grad=False)])
    yield "bernoulli_", (lambda x: x.bernoulli_(0.5), [normal(*size, grad=False)])


KINDS: dict[str, Callable[[], Iterator[tuple[str, Made]]]] = {
    "product": products,
    "convolution": convolutions,
    "attention": attentions,
    "recurrent layer": layers,
    "lookup": lookups,
    "pooling and resizing": pools,
    "norm and softmax": norms,
    "reduction": reductions,
    "loss": losses,
    "elementwise": elementwise,
}


def measure(kind: str, op: str, made: Made) -> Iterator[Row]:
    """Yields an operation's row forward and, if it has gradients, its row backward."""
    call, operands = made
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    errors: dict[str, dict[str, str]] = {"forward": {}, "backward": {}}
    for name, dtype in ({"fp32": torch.float32} | LOWS).items():
        leaves = [each.detach().to(dtype).clone().requires_grad_(each.requires_grad) for each in operands]
        for direction, prepared in (("forward", forward), ("backward", backward)):
            try:
                run = prepared(call, leaves)
                if run is None:
                    continue
                run()
                calls[direction][name] = run
            except (RuntimeError, NotImplementedError) as error:
                errors[direction][name] = str(error).splitlines()[0][:120]
    for direction, runs in calls.items():
        if "fp32" not in runs:
            continue
        least = in_turns(runs)
        ratios = {name: least[name] / least["fp32"] for name in runs}
        yield Row(
            kind, op, direction, 1e3 * least["fp32"], ratios.get("bf16"), ratios.get("fp16"), errors[direction]
        )  # fmt: skip


def forward(call: Callable[..., Any], leaves: list[Tensor]) -> Callable[[], object]:
    """Returns a function that runs the operation without gradients."""
    held = [leaf.detach() for leaf in leaves]

    def run() -> object:
        with torch.no_grad():
            return call(*held)

    return run


def backward(call: Callable[..., Any], leaves: list[Tensor]) -> Callable[[], object] | None:
    """Returns a function that runs the operation's backward pass; None if it has none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    out = call(*leaves) if wanted else None
    while isinstance(out, (tuple, list)):
        out = out[0]
    if out is None or not out.requires_grad:
        return None
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)


def in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the least CPU seconds of one call of each function."""
    least, spent = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, 0.0)
    for _ in range(CALLS):
        for name, run in runs.items():
            if spent[name] < SECONDS:
                start = process_time()
                run()
                took = process_time() - start
                least[name], spent[name] = min(least[name], took), spent[name] + took
    return least


def main() -> int:
    """Times what is asked for, prints the table and writes the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of kinds or operations to time")
    parser.add_argument("--all", action="store_true", help="also print what is not slow")
    parser.add_argument("--json", type=Path, help="a file for all rows")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for kind, cases in KINDS.items():
        for op, made in cases():
            if asked.only in kind or asked.only in op:
                rows += measure(kind, op, made)
                print(f"\r{len(rows)} measured", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    table = Table("kind", "operation", "direction", "fp32 ms", "bf16", "fp16")
    for row in rows:
        if row.is_slow or asked.all:
            cells = (said(row, low) for low in LOWS)
            table.add_row(row.kind, row.op, row.direction, f"{row.fp32_ms:.3f}", *cells)
    Console().print(table)
    if asked.json is not None:
        found = {
            "command": shlex.join(["python", "benchmarks/op_sweep.py", *sys.argv[1:]]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": [asdict(row) for row in rows],
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def said(row: Row, low: str) -> str:
    """Returns the ratio of a format as text, or the error of the operation in it."""
    ratio = getattr(row, low)
    return row.errors.get(low, "") if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    sys.exit(main())
