"""`apex.fp16_utils`: networks cast by hand, masters kept by hand, and the loss scalers and optimizer that go with them.

Functions that made fp16 in apex take a `dtype` here, so that a loop can go to bf16 by one argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from halfstep.adapters.apex.fp16_optimizer import FP16_Optimizer
from halfstep.adapters.apex.loss_scaler import DynamicLossScaler, LossScaler
from halfstep.errors import SetupError
from halfstep.torch_internals import BatchNormBase

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):  # apex's name
    """Casts its input to fp16, or to another `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input in the dtype."""
        return input.to(self.dtype)


class FP16Model(nn.Module):
    """Runs a network in fp16, or another `dtype`, but its affine batch norms in fp32; floating inputs are cast.

    Mended: apex cast all inputs and took no keywords; masks and token ids stay here as they are.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=dtype)
        self.dtype = dtype

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns what the network returns."""
        return self.network(
            *(self._cast(value) for value in inputs), **{name: self._cast(value) for name, value in kwargs.items()}
        )

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def BN_convert_float(module: nn.Module) -> nn.Module:  # apex's name
    """Makes the affine batch norms in `module` fp32, with their statistics, and returns it."""
    for each in module.modules():
        if isinstance(each, BatchNormBase) and each.affine:
            each.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating parameters and buffers of `module` itself, not of those inside it."""
    for p in module.parameters(recurse=False):
        if p.is_floating_point():
            p.data = p.data.to(dtype)
            if p.grad is not None:
                p.grad = p.grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a network but for its affine batch norms, and returns it."""
    for module in network.modules():
        if isinstance(module, BatchNormBase) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def network_to_half(network: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Returns the network in fp16, or another `dtype`, behind a cast of its input; affine batch norms stay fp32."""
    return nn.Sequential(tofp16(dtype), BN_convert_float(network.to(dtype)))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """Returns the trained parameters of a model and fp32 masters of them, in a list of one if `flat_master`.

    Raises:
        SetupError: the parameters cannot lie in one flat master: they are of several dtypes or devices, or none.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        masters = [Parameter(p.detach().clone().float()) for p in params]
    else:
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            raise SetupError(
                f"flat_master=True with parameters of {len(kinds)} kinds of dtype and device; give a model of one kind "
                "(batch norms that were kept in fp32 are another), or flat_master=False"
            )
        masters = [Parameter(torch.cat([p.detach().reshape(-1) for p in params]).float())]
    for master in masters:
        master.grad = torch.zeros_like(master)
    return params, masters


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Parameter], master_params: Sequence[Parameter], flat_master: bool = False
) -> None:
    """Copies the gradients of the model to its masters, as they are, scaled or not; a missing one is missing there too.

    In a flat master a missing gradient is 0.
    """
    if flat_master:
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = torch.cat([grad.reshape(-1) for grad in flat]).to(master_params[0].dtype)
        return
    _require_pairs(model_params, master_params)
    for p, master in zip(model_params, master_params, strict=True):
        master.grad = None if p.grad is None else p.grad.detach().to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Parameter], master_params: Sequence[Parameter], flat_master: bool = False
) -> None:
    """Copies the values of the masters to the model, rounded to its dtypes."""
    if flat_master:
        parts = torch.split(master_params[0], [p.numel() for p in model_params])
        for p, part in zip(model_params, parts, strict=True):
            p.copy_(part.view_as(p))
        return
    _require_pairs(model_params, master_params)
    for p, master in zip(model_params, master_params, strict=True):
        p.copy_(master)


def to_python_float(t: Any) -> float:
    """Returns a number, or the first element of a tensor or list, as a float; reads the device."""
    if isinstance(t, Tensor):
        return float(t.reshape(-1)[0])
    return float(t[0] if isinstance(t, Sequence) else t)


def _require_pairs(model_params: Sequence[Parameter], master_params: Sequence[Parameter]) -> None:
    shapes = [tuple(p.shape) for p in model_params], [tuple(p.shape) for p in master_params]
    if shapes[0] != shapes[1]:
        raise SetupError(
            f"{len(model_params)} parameters come with {len(master_params)} masters of other shapes; give the two "
            "lists that prep_param_lists returned, and flat_master as it was given there"
        )
