"""`apex.normalization`: torch's layer and RMS norms with apex's signatures, as modules and as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """torch's LayerNorm with apex's arguments."""


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """torch's RMSNorm with apex's arguments and default `eps`."""


class _Mixed(_Fused):
    """A norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} does not support elementwise_affine=False, since its outputs have the dtype of its weights; "
                f"use {name.removeprefix('Mixed')}"
            )
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """A layer norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """An RMS norm whose outputs have the dtype of its weights, whatever the dtype of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps or 0.0)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of the input, without weight and bias."""
    return functional.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the layer norm of the input, with weight and bias, in the dtype of the input."""
    return _normalized(functional.layer_norm, input, (weight, bias), normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the layer norm of the input, with weight and bias, in the dtype of the weight."""
    return _normalized(functional.layer_norm, input, (weight, bias), normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Returns the RMS norm of the input, without a weight."""
    return functional.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the RMS norm of the input, times the weight, in the dtype of the input."""
    return _normalized(functional.rms_norm, input, (weight,), normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the RMS norm of the input, times the weight, in the dtype of the weight."""
    return _normalized(functional.rms_norm, input, (weight,), normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS norm of the input, times the weight unless `weight` is None, in the dtype of the input."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _normalized(
    norm: Callable[..., Tensor],
    input: Tensor,
    weights: Sequence[Tensor],
    normalized_shape: Shape,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Returns `norm` of the input, cast to `dtype`; `weights` are its weight and, for a layer norm, its bias."""
    if input.dtype is weights[0].dtype:
        out = norm(input, _shape(normalized_shape), *weights, eps)
    else:
        wide = torch.promote_types(input.dtype, weights[0].dtype)
        out = norm(input.to(wide), _shape(normalized_shape), *(weight.to(wide) for weight in weights), eps)
    return out.to(dtype)


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
