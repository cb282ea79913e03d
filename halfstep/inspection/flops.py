"""Counts an operation's FLOPs from its shapes: torch's formulas, and the formulas that torch lacks on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halfstep.torch_internals import FLASH_ATTENTION_CPU, FLASH_ATTENTION_CPU_BACKWARD, schema_of

_RNN, _RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the FLOPs of a call that computes products, such as a convolution or attention; 0 for any other call."""
    # Attention is counted as if nothing were masked, as in torch's formula.
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count  # it brings Triton

    if func is FLASH_ATTENTION_CPU:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))  # type: ignore[no-untyped-call]
    if func is FLASH_ATTENTION_CPU_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))  # type: ignore[no-untyped-call]
    if func is _RNN:
        return _recurrent(args[0].shape, args[1].shape, args[2].shape)
    if func is _RNN_BACKWARD:  # gradients of inputs and of weights, each a product of the same size
        return 2 * _recurrent(args[0].shape, args[1].shape, args[2].shape)
    packet = getattr(getattr(torch.ops, func.namespace), schema_of(func).name.rpartition("::")[2])
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _recurrent(given: Sequence[int], weight: Sequence[int], recurrent: Sequence[int]) -> int:
    """Returns the FLOPs of a recurrent layer, from the shapes of its input, input weight and recurrent weight."""
    steps, batch = given[0], given[1]
    return 2 * steps * batch * (weight[0] * weight[1] + recurrent[0] * recurrent[1])
