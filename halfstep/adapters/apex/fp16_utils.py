"""`apex.fp16_utils`: functions that cast networks and copy masters; also exports LossScaler and FP16_Optimizer.

Functions that cast to fp16 in apex take a `dtype` here, so that they can also cast to bf16.
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
    """A module that casts its input to fp16, or to another `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input cast to `dtype`."""
        return input.to(self.dtype)


class FP16Model(nn.Module):
    """Casts a network to fp16 or another `dtype`, and casts the floating-point inputs of each call too.

    Batch norms with `affine=True` are not cast, and so stay in fp32. Unlike in apex, masks and token ids are not cast,
    and keyword arguments are allowed.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=dtype)
        self.dtype = dtype

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Casts the floating-point inputs and returns the output of the network."""
        return self.network(
            *(self._cast(value) for value in inputs), **{name: self._cast(value) for name, value in kwargs.items()}
        )

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def BN_convert_float(module: nn.Module) -> nn.Module:  # apex's name
    """Casts batch norms with `affine=True` in `module` to fp32, running statistics included; returns `module`."""
    for each in module.modules():
        if isinstance(each, BatchNormBase) and each.affine:
            each.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters and buffers of `module` itself, not of its submodules, to `dtype`."""
    for p in module.parameters(recurse=False):
        if p.is_floating_point():
            p.data = p.data.to(dtype)
            if p.grad is not None:
                p.grad = p.grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a network to `dtype` in place, except batch norms with `affine=True`; returns the network."""
    for module in network.modules():
        if isinstance(module, BatchNormBase) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def network_to_half(network: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Casts a network to fp16 or `dtype`, except batch norms with `affine=True`, which become fp32.

    Returns an nn.Sequential of two modules: the first casts the input, and the second is the network.
    """
    return nn.Sequential(tofp16(dtype), BN_convert_float(network.to(dtype)))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """Returns two lists: a model's trainable parameters, and their fp32 masters.

    With `flat_master` the second list has one 1-D master, which joins the values of all parameters.

    Raises:
        SetupError: with `flat_master`, the parameters have several dtypes or devices, or there are none.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        masters = [Parameter(p.detach().clone().float()) for p in params]
    else:
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            raise SetupError(
                "flat_master=True expects parameters of one dtype on one device, got "
                f"{len(kinds)} combinations of dtype and device; cast all parameters alike (batch norms kept in fp32 "
                "differ from the rest), or pass flat_master=False"
            )
        masters = [Parameter(torch.cat([p.detach().reshape(-1) for p in params]).float())]
    for master in masters:
        master.grad = torch.zeros_like(master)
    return params, masters


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Parameter], master_params: Sequence[Parameter], flat_master: bool = False
) -> None:
    """Copies gradients from model parameters to masters, without unscaling them.

    If a parameter has no gradient, the `grad` of its master becomes None. With `flat_master`, the parameter's part of
    the flat master's `grad` becomes 0.
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
    """Copies the values of the masters to the model parameters, rounded to the dtype of each parameter.

    With `flat_master`, `master_params` has one 1-D master for all parameters, as `prep_param_lists` makes it.
    """
    if flat_master:
        parts = torch.split(master_params[0], [p.numel() for p in model_params])
        for p, part in zip(model_params, parts, strict=True):
            p.copy_(part.view_as(p))
        return
    _require_pairs(model_params, master_params)
    for p, master in zip(model_params, master_params, strict=True):
        p.copy_(master)


def to_python_float(t: Any) -> float:
    """Returns a number, or the first element of a tensor or list, as a float; waits for the device."""
    if isinstance(t, Tensor):
        return float(t.reshape(-1)[0])
    return float(t[0] if isinstance(t, Sequence) else t)


def _require_pairs(model_params: Sequence[Parameter], master_params: Sequence[Parameter]) -> None:
    shapes = [tuple(p.shape) for p in model_params], [tuple(p.shape) for p in master_params]
    if shapes[0] != shapes[1]:
        raise SetupError(
            f"the masters do not have the shapes of the parameters ({len(model_params)} parameters, "
            f"{len(master_params)} masters); pass the two lists that prep_param_lists returned, with the same "
            "flat_master"
        )
