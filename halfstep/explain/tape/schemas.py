"""Reads from an operation's schema what it does with its arguments, and finds its public name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.torch_internals import schema_of

T = TypeVar("T")
_OVERWRITING = tuple(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")
)
_TRAINING = ("training", "train", "use_input_stats", "update")  # whichever an operation has; without a flag it trains
_UNINITIALISED = tuple(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
)


def aten_name(func: Any, args: Sequence[Any]) -> str:
    """Returns the dispatcher's name of an operation; for a convolution, a name with its dimensions, such as conv2d."""
    name: str = schema_of(func).name.rpartition("::")[2]
    if name == "convolution":
        return f"conv{'_transpose' if args[6] else ''}{args[1].dim() - 2}d"
    return name


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors among the arguments or results of an operation, which nests them in no other containers."""
    return leaves_of(tree, Tensor)


def leaves_of(tree: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Returns the leaves of a type likewise; torch's trees take several times as long."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found: list[T] = []
    for each in tree:
        if isinstance(each, kind):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            found += leaves_of(each, kind)
    return found


def is_view(func: Any) -> bool:
    """Tells whether an operation only returns a view."""
    return bool(func.is_view) and not schema_of(func).is_mutable


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments that an operation writes to."""
    if not schema_of(func).is_mutable:
        return []
    named = _named(func, args, kwargs)
    into = [each.name for each in schema_of(func).arguments if each.alias_info is not None and each.alias_info.is_write]
    return tensors_of([named.get(name) for name in into])


def overwritten(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments whose elements an operation replaces without reading them."""
    if schema_of(func).name in _OVERWRITING:
        into: Any = args[:1]
    else:
        named = _named(func, args, kwargs)
        into = [named.get(each.name) for each in schema_of(func).arguments if each.is_out]
    given = [id(tensor) for tensor in tensors_of((args, kwargs))]
    return [tensor for tensor in tensors_of(into) if given.count(id(tensor)) == 1]


def is_unread(func: Any, given: tuple[Sequence[Any], Mapping[str, Any]], tensor: Tensor) -> bool:
    """Tells whether the values of a tensor argument have no effect on an operation's output."""
    args, kwargs = given
    if any(tensor is each for each in overwritten(func, args, kwargs)):
        return True
    named = _named(func, args, kwargs)
    training = all(named.get(flag, True) for flag in _TRAINING)
    return training and any(named.get(name) is tensor for name in ("running_mean", "running_var"))


def is_collective(func: Any) -> bool:
    """Tells whether an operation receives values from other processes; it may still be running after the call."""
    return func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def is_uninitialised(func: Any) -> bool:
    """Tells whether an operation returns uninitialized memory."""
    return schema_of(func).name in _UNINITIALISED


def by_recipe(func: Any, args: Sequence[Any], outputs: Sequence[Tensor], bad: Callable[[Tensor], object]) -> str:
    """Returns which products of a layer with a recipe are `bad`, and which operands; "" of any other operation."""
    recipe = _named(func, args, {}).get("recipe") if func.namespace == "halfstep" else None
    if recipe is None:
        return ""
    products = [each.name for each, out in zip(schema_of(func).returns, outputs, strict=False) if bad(out)]
    operands = [name for name, t in _named(func, args, {}).items() if isinstance(t, Tensor) and bad(t)]
    whose = f"whose {' and '.join(operands)} {'is' if len(operands) == 1 else 'are'} not finite"
    return f"{' and '.join(products)} by {recipe}, {whose if operands else 'whose operands are finite'}"


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((each.name for each in schema_of(func).arguments), args, strict=False)) | dict(kwargs)


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
