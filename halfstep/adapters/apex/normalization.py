"""`apex.normalization`: torch's layer and RMS norms with apex's signatures, as modules and as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine",
]  # fmt: skip

Shape = int | Sequence[int]


class _Fused(nn.Module):
    """A norm with apex's arguments; `memory_efficient`, which saves memory in apex, has no effect."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """torch's LayerNorm with apex's arguments."""


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """torch's RMSNorm with apex's arguments and default `eps`."""


class _Mixed(_Fused):
    """A norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} does not support elementwise_affine=False, since its outputs have the dtype of its weights; "
                f"use {name.removeprefix('Mixed')}"
            )


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """A layer norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """An RMS norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps or 0.0)


def _normalized(
    norm: Callable[..., Tensor], mixed: bool, input: Tensor, shape: Shape, weights: Sequence[Tensor | None], eps: float
) -> Tensor:
    """Computes a norm in the wider dtype of input and weight; returns it in that of the weight if `mixed`."""
    own = input.dtype if weights[0] is None else weights[0].dtype
    wide = torch.promote_types(input.dtype, own)
    sizes = [shape] if isinstance(shape, int) else list(shape)
    out = norm(input.to(wide), sizes, *(None if weight is None else weight.to(wide) for weight in weights), eps)
    return out.to(own if mixed else input.dtype)


def _layer_norm(
    mixed: bool, input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return _normalized(functional.layer_norm, mixed, input, normalized_shape, (weight, bias), eps)


def _rms_norm(
    mixed: bool, input: Tensor, weight: Tensor | None, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return _normalized(functional.rms_norm, mixed, input, normalized_shape, (weight,), eps)


# In the dtype of the input, and in that of the weight.
fused_layer_norm_affine, mixed_dtype_fused_layer_norm_affine = partial(_layer_norm, False), partial(_layer_norm, True)
fused_rms_norm_affine, mixed_dtype_fused_rms_norm_affine = partial(_rms_norm, False), partial(_rms_norm, True)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of the input, without weight and bias."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Returns the RMS norm of the input, without a weight."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS norm of the input, times the weight unless `weight` is None, in the dtype of the input."""
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)
