"""Finds the public torch name of an operation, which differs from its names in the dispatcher."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

import torch
from torch import nn

# name in aten of the part that computes -> the function that users call
PUBLIC: Mapping[str, str] = {
    "_safe_softmax": "softmax",
    "_to_copy": "to",
    "lift_fresh": "tensor",
    "mm": "matmul",
    "bmm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "_addmm_activation": "linear",
    "linear_backward": "linear",  # of layers with a recipe
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm",
    "native_dropout": "dropout",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "mkldnn_rnn_layer": "lstm",
    "_cudnn_rnn": "lstm",
    "miopen_rnn": "lstm",
    "_unsafe_index": "index",
    "_index_put_impl": "index_put",
    "_native_multi_head_attention": "multi_head_attention_forward",
    "linalg_vector_norm": "norm",
    "_weight_norm_interface": "weight_norm",
    "_cdist_forward": "cdist",
    "_pdist_forward": "pdist",
    "_prelu_kernel": "prelu",
    "_trilinear": "bilinear",
    "_fft_r2c": "fft",
    "_fft_c2c": "fft",
    "_fft_c2r": "fft",
}
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm", "cudnn_batch_norm", "_batch_norm", "miopen_batch_norm")
_PARTS_OF_LINEAR = ("addmm", "mm", "bmm", "baddbmm", "add", "_to_copy", "_addmm_activation", "mul", "sum")
_CELLS = ((nn.LSTMCell, "lstm_cell"), (nn.GRUCell, "gru_cell"), (nn.RNNCell, "rnn_tanh_cell"))
_WHOLES = (
    ({"linalg_vector_norm", "clamp_min_"}, "cosine_similarity"),
    ({"_linalg_slogdet", "where"}, "logdet"),
)
_MOVES = ("_to_copy", "t", "view", "expand", "transpose", "unsqueeze", "clone", "copy_", "reshape", "_unsafe_view")


def public_name(aten: str, *, call: Collection[str] = (), function: str = "", module: nn.Module | None = None) -> str:
    """Returns the torch function that users call to run `aten`, as `module` calls it inside of torch's `function`.

    >>> public_name("addmm", call=["t", "addmm"]), public_name("_softmax")  # `call`: the operations of one C++ call
    ('linear', 'softmax')
    """
    cell = next((name for kind, name in _CELLS if isinstance(module, kind)), "")
    recurrent = module.mode.lower() if isinstance(module, nn.RNNBase) else cell
    if recurrent:
        return recurrent.replace("tanh", str(getattr(module, "nonlinearity", "tanh")))
    if function == "cross_entropy" or {"nll_loss_forward", "_log_softmax"} <= set(call):
        return "cross_entropy"
    if function and _is_torch_op(function):
        return function
    if "t" in call and not {"addmm", "mm", "bmm"}.isdisjoint(call) and aten in _PARTS_OF_LINEAR:
        return "linear"
    if aten in ("_to_copy", "_linalg_check_errors"):  # a part of something else
        aten = next((name for name in call if name not in (*_MOVES, aten)), aten).removesuffix("_ex")
    if aten.startswith(_BATCH_NORMS):
        return "batch_norm"
    if aten.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    for parts, whole in _WHOLES:
        if parts <= set(call):
            return whole
    return PUBLIC.get(aten, aten.strip("_") if _is_torch_op(aten.strip("_")) else aten.rstrip("_"))


def of_node(node: str) -> str:
    """Returns the dispatcher's name of a backward node's operation: "log_softmax" for "LogSoftmaxBackward0"."""
    name = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@functools.cache
def is_backward_of(node: str, aten: str) -> bool:
    """Tells whether an autograd node is the backward of an operation, as "SoftmaxBackward0" of "_softmax"."""
    return of_node(node).replace("_", "") == aten.replace("_", "")


def _is_torch_op(name: str) -> bool:
    return not name.startswith("_") and hasattr(torch.ops.aten, name)
