"""The op table: which torch op runs low, full or with its widest input; the same on every device.

Its rows come from torch's autocast lists (ATen/autocast_mode.h and autocast_mode.cpp): all rows of the list for CUDA,
and those ops of the list for CPU that have no low kernel. Ops that whole models need, but that torch's lists lack, are
rows of halfstep's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from halfstep.edits import OpChanges, OpList
from halfstep.errors import PlanError
from halfstep.plan.plan import Plan
from halfstep.torch_internals import FunctionSchema, all_op_names, has_kernel, has_kernel_for, schemas_of_op

Action = Literal[
    "low", "product", "full", "promote", "norm", "gather", "refuse", "logits", "pass", "infer", "probability", "carry"
]
"""What happens to an overload: "pass" runs it as written, its parts by their own rows; "infer" runs both as written.

So do "probability" and "carry", which also keep how to compute the result in fp32, in case it leaves the model.
"logits" is "full", but computes a low sigmoid again, in fp32 from what it was given.
"product" is "low" for an einsum that sums products, and "pass" for any other, such as an outer product.
"""

Source = Literal["torch", "halfstep"]


@dataclass(frozen=True)
class ListedOp:
    """One op of the table: its aten overloads, its category, why it is listed, and by whom (torch or halfstep)."""

    op: str
    overloads: tuple[str, ...]
    category: OpList
    why: str
    source: Source


# Each row: source, category, why, overloads.
_TABLE: tuple[tuple[Source, OpList, str, str], ...] = (
    (
        "torch",
        "allow",
        "convolution",
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input convolution _convolution _convolution.deprecated "
        "cudnn_convolution cudnn_convolution_transpose",
    ),
    (
        "torch",
        "allow",
        "matrix product",
        "linear matmul mm bmm mv addmm addmv addr addbmm baddbmm einsum chain_matmul linalg_multi_dot linalg_vecdot "
        "_addmm_activation",
    ),
    (
        "torch",
        "allow",
        "attention",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention",
    ),
    (
        "torch",
        "allow",
        "recurrent",
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer",
    ),
    ("halfstep", "allow", "recurrent", "lstm.input lstm.data gru.input gru.data"),
    ("halfstep", "allow", "recurrent", "rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data"),
    ("torch", "allow", "activation", "prelu"),
    ("torch", "deny", "exponential", "exp expm1 cosh sinh pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar"),
    ("torch", "deny", "exponential", "softmax.int log_softmax.int softplus"),
    ("torch", "deny", "logarithm", "log log10 log1p log2"),
    ("torch", "deny", "steep", "acos asin tan erfinv reciprocal rsqrt"),
    ("torch", "deny", "reduction", "sum sum.dim_IntList prod prod.dim_int cumsum cumprod"),
    ("torch", "deny", "reduction", "norm.Scalar norm.ScalarOpt_dim linalg_vector_norm frobenius_norm.dim renorm"),
    ("torch", "deny", "normalisation", "layer_norm native_layer_norm group_norm rms_norm"),
    ("torch", "deny", "distance", "dist cosine_similarity"),
    (
        "torch",
        "deny",
        "loss",
        "nll_loss nll_loss2d cross_entropy_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss "
        "binary_cross_entropy_with_logits soft_margin_loss hinge_embedding_loss margin_ranking_loss "
        "cosine_embedding_loss triplet_margin_loss logsumexp",
    ),
    (
        "torch",
        "deny",
        "resampling",
        "upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d "
        "upsample_nearest3d.vec _upsample_nearest_exact1d _upsample_nearest_exact1d.vec _upsample_nearest_exact2d "
        "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d _upsample_nearest_exact3d.vec upsample_linear1d "
        "upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_trilinear3d "
        "upsample_trilinear3d.vec upsample_bicubic2d upsample_bicubic2d.vec",
    ),
    (
        "torch",
        "deny",
        "no low kernel",
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 "
        "fft_irfftn fft_hfft fft_ihfft stft stft.center polar view_as_complex "
        "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals "
        "linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
        "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor "
        "linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve "
        "cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse qr svd triangular_solve "
        "_lu_with_info "
        "linalg_matrix_norm linalg_matrix_norm.str_ord nuclear_norm nuclear_norm.dim cdist pdist multi_margin_loss "
        "multilabel_margin_loss multilabel_margin_loss_forward _upsample_bilinear2d_aa "
        "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec "
        "quantile quantile.scalar nanquantile nanquantile.scalar ctc_loss.IntList ctc_loss.Tensor avg_pool3d",
    ),
    (
        "halfstep",
        "deny",
        "no low kernel",
        "fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn complex "
        "linalg_det linalg_slogdet det slogdet logdet linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve "
        "linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_matrix_power matrix_power linalg_solve_ex "
        "linalg_solve_triangular linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor "
        "linalg_pinv.rcond_tensor matrix_exp linalg_matrix_exp",
    ),
    (
        "torch",
        "promote",
        "formats must agree",
        "addcdiv addcmul atan2 bilinear cross dot vdot tensordot grid_sampler index_put scatter_add index_copy",
    ),
    (
        "halfstep",
        "promote",
        "formats must agree",
        "linalg_cross inner lerp.Scalar lerp.Tensor heaviside meshgrid meshgrid.indexing embedding_bag "
        "embedding_bag.padding_idx searchsorted.Tensor bucketize.Tensor index_add index_reduce scatter.src "
        "scatter.reduce scatter_reduce.two masked_scatter put isclose _sparse_mm _weight_norm",
    ),
    (
        "halfstep",
        "promote",
        "takes the format written into",
        "index_put_ index_add_ index_copy_ index_reduce_ scatter_.src scatter_.reduce scatter_add_ scatter_reduce_.two "
        "masked_scatter_ put_",
    ),
    ("halfstep", "infer", "takes wider parameters", "batch_norm instance_norm"),
)


def _registered(overload: str, key: str | None = None) -> bool:
    name = f"aten::{overload}"
    try:
        return bool(has_kernel(name) if key is None else has_kernel_for(name, key))
    except RuntimeError:  # this torch has no such op, or no such device
        return False


def _build_rows() -> tuple[ListedOp, ...]:
    rows: dict[str, ListedOp] = {}
    for source, category, why, words in _TABLE:
        for overload in filter(_registered, words.split()):  # each release of torch has other ops
            op = overload.partition(".")[0]
            earlier = rows[op].overloads if op in rows else ()
            rows[op] = ListedOp(op, (*earlier, overload), category, why, source)
    return tuple(rows.values())


ROWS: tuple[ListedOp, ...] = _build_rows()
"""The op table, one row per op; an op without a row runs as written."""

NORMS = ("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm")
"""Overloads that compute in fp32 and return the format of their input if low weights come with another format."""

REFUSED: Mapping[str, str] = {"binary_cross_entropy": "binary_cross_entropy_with_logits"}
"""Ops refused on low inputs, and the op to use instead: a low sigmoid rounds to 0 or 1, whose logarithm is infinite."""

LOSSES = (
    "torch.nn.functional:gaussian_nll_loss",
    "torch.nn.functional:multilabel_soft_margin_loss",
    "torch.nn.functional:triplet_margin_with_distance_loss",
)
"""Losses that are Python functions made of several ops, which have no row; they run full at every level, as others."""

_CPU_ONLY = (
    "cat stack trace adaptive_avg_pool3d adaptive_max_pool3d max_pool3d max_unpool2d max_unpool3d "
    "fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d fake_quantize_per_tensor_affine grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback"
)
AS_WRITTEN = tuple(_CPU_ONLY.split())
"""Overloads that torch's list for CPU runs full or promotes, but the table runs as written, as on CUDA."""

BY_CALL: Mapping[str, Action] = {"einsum": "product"}
"""Ops that torch's list for CUDA casts in every call, but the table decides by call; an outer product sums nothing."""

GATHERS = ("embedding", "embedding_bag", "embedding_bag.padding_idx", "index.Tensor")
"""Overloads whose backward on a CPU sums low gradients one by one in the low format, so that sums stop growing."""

PROBABILITIES = ("sigmoid", "sigmoid_", "softmax.int", "log_softmax.int")
"""Overloads whose low results are computed in fp32 where they leave the model, since code outside takes logarithms."""

PICKING = ("sort", "sort.stable", "topk", "max.dim", "min.dim")
"""Overloads that return elements of a tensor along a dimension, and their indices."""

CARRIED = (
    *("cat", "stack", "clone", "index.Tensor", "index_select", "gather", "masked_select", "flip", "roll", "repeat"),
    *("rot90", "constant_pad_nd", "where.self", "masked_fill.Scalar", "masked_fill.Tensor", "scatter.src"),
    *PICKING,
)
"""Overloads that only move elements, so that those of a probability leave the model in fp32 as the whole of it does."""

_STOCK_DIFFERS: Mapping[tuple[str, str], Action] = {
    ("cpu", "grid_sampler"): "full",
    ("cpu", "binary_cross_entropy"): "full",
    # torch's row asks for an fp32 result of a low input, which these refuse.
    ("cuda", "linalg_matrix_norm"): "pass",
    ("cuda", "linalg_matrix_norm.str_ord"): "pass",
}
_BY_CATEGORY: Mapping[OpList, Action] = {"allow": "low", "deny": "full", "promote": "promote", "infer": "pass"}
# Losses are full inside the model too: one of 4.18 is 4.22 in bf16.
_FULL_AT_LOW_WEIGHTS = ("no low kernel", "loss")

# Kernels whose names are not the public name of the op.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("cross_entropy_loss",),
    "grid_sample": ("grid_sampler",),
    "norm": ("norm", "linalg_vector_norm"),
    "linalg_norm": ("linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"),
}
_NAMESPACES = (
    *((name, "") for name in ("torch.nn.functional.", "nn.functional.", "F.", "torch.Tensor.", "Tensor.")),
    *((name, "") for name in ("torch.", "aten.")),
    *((f"{name}.", f"{name}_") for name in ("linalg", "fft", "special")),
)


@cache
def stock_action(overload: str, device_type: str) -> Action | None:
    """Returns what torch's own autocast does to an overload on a device; None if it leaves the op as written."""
    if not _registered(overload, f"Autocast{device_type.upper()}"):
        return None
    if overload in REFUSED:
        return _STOCK_DIFFERS.get((device_type, overload), "refuse")
    if overload in AS_WRITTEN:
        return "promote" if overload in ("cat", "stack") else "full"
    listed = next((_BY_CATEGORY[row.category] for row in ROWS if overload in row.overloads), None)
    return _STOCK_DIFFERS.get((device_type, overload), listed)


def device_note(row: ListedOp, device_type: str) -> str:
    """Returns what casts the overloads of a row on a device at O1: "torch", "halfstep" or "torch, halfstep"."""
    own = [stock_action(o, device_type) == BY_CALL.get(row.op, _BY_CATEGORY[row.category]) for o in row.overloads]
    return "torch" if all(own) else "torch, halfstep" if any(own) else "halfstep"


def effective(plan: Plan) -> Mapping[str, Action]:
    """Returns the plan's action for each aten overload and "module:function" that does not run as written."""
    if plan.ops == "none":
        return {}
    actions: dict[str, Action] = {}
    for row in ROWS:
        action = BY_CALL.get(row.op, _BY_CATEGORY[row.category])
        if plan.param == "low" and action == "full" and row.why not in _FULL_AT_LOW_WEIGHTS:
            action = "pass"
        for overload in row.overloads:
            actions[overload] = "norm" if plan.param == "low" and overload in NORMS else action
    if plan.param == "low":
        actions.update((overload, "gather") for overload in GATHERS)
    actions.update((overload, "pass") for overload in AS_WRITTEN)
    actions.update((overload, "refuse") for overload in REFUSED)
    for category, op in plan.op_changes.listed():
        if op in REFUSED and category != "deny":
            raise PlanError(
                f"op {op!r} in {category}: it takes the logarithm of a sigmoid, which in low precision may be -inf; "
                f"use {REFUSED[op]}, or deny it, so that it computes in fp32"
            )
        overloads = (op,) if ":" in op else find(op)
        action = "infer" if category == "infer" else "logits" if op in REFUSED else _BY_CATEGORY[category]
        actions.update((overload, action) for overload in overloads)
    for action, names in (("probability", PROBABILITIES), ("carry", CARRIED)):
        actions.update((name, action) for name in names if actions.get(name, "pass") == "pass")
    return actions


def find(public_name: str) -> tuple[str, ...]:
    """Returns the aten overloads of a public torch function that can be cast: ("softmax.int",) for "softmax"."""
    name = public_name
    for prefix, instead in _NAMESPACES:
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    every = [schema for packet in _ALIASES.get(name, (name,)) for schema in schemas_of_op(f"aten::{packet}")]
    # with kernels, and without the variants that write into `out`
    schemas = [s for s in every if _registered(overload_name(s)) and not any(a.is_out for a in s.arguments)]
    if not schemas:
        raise PlanError(_unknown(public_name, name))
    found = tuple(overload_name(schema) for schema in schemas if not _obstacle(schema))
    if not found:
        raise PlanError(f"op {public_name!r} cannot be cast: {_obstacle(schemas[0])}")
    return found


def check_op_changes(changes: OpChanges) -> None:
    """Refuses names that are no op, cannot be cast or are in two lists; leaves functions ("module:function") alone."""
    listed: dict[str, tuple[str, str]] = {}
    for category, op in changes.listed():
        for overload in () if ":" in op else find(op):
            name, where = listed.setdefault(overload, (op, category))
            if where != category:
                raise PlanError(
                    f"op {op!r} in {category} and {name!r} in {where} are both {overload!r}; list each op only once"
                )


def overload_name(schema: FunctionSchema) -> str:
    """Returns the name of an overload as the op table has it, such as "softmax.int"."""
    name: str = schema.name.removeprefix("aten::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def _obstacle(schema: FunctionSchema) -> str:
    name = schema.name.removeprefix("aten::")
    if "Dimname" in str(schema):
        return "it takes named tensors"
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return "it takes no tensor"
    if schema.is_mutable:
        other = name.rstrip("_")
        instead = f"; name and call {other!r} instead" if hasattr(torch.Tensor, other) else ""
        return f"it writes into its first argument, whose format cannot change{instead}"
    if any(result.alias_info is not None for result in schema.returns):
        return "it returns a view of its argument, and a cast would make it a copy"
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return "it returns no tensor"
    return ""


def _unknown(public_name: str, name: str) -> str:
    for module, path in (
        (torch.nn.functional, "torch.nn.functional"),
        (torch, "torch"),
        (torch.linalg, "torch.linalg"),
    ):
        short = name.removeprefix("linalg_") if module is torch.linalg else name
        if callable(getattr(module, short, None)):
            return (
                f'op {public_name!r} is a Python function made of several ops; name it "{path}:{short}", '
                "or the ops that it calls"
            )
    known = {op.partition(".")[0] for op in all_op_names() if op.startswith("aten::")}
    public = sorted(op.removeprefix("aten::") for op in known if not op.startswith("aten::_"))
    near = difflib.get_close_matches(name.lower(), public, n=3)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return (
        f"op {public_name!r} is not a torch op{hint}; use the name of a torch function, such as 'softmax', "
        'or "module:function" for a Python function'
    )
