"""Which modules normalise, so that a plan can keep them full: torch's classes by type, a model's own by name."""

from __future__ import annotations

import re
from typing import Literal

from torch import nn

from halfstep.torch_internals import BatchNormBase, parameters_of

NormKind = Literal["torch", "own"]

_TORCH_NORMS = (BatchNormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NAMED_NORM = re.compile(r".*Norm(\d+d?)?")  # T5LayerNorm, LlamaRMSNorm, FrozenBatchNorm2d, GroupNorm32


def norm_kind(module: nn.Module) -> NormKind | None:
    """Returns "torch" or "own", depending on whose code normalises in the module; None if the module is not a norm.

    "torch" means torch's own kernels, which take low inputs with fp32 weights. "own" means the model's own code, in
    which low and fp32 values would mix. A norm is "own" if its class is named like a norm or is a subclass of one of
    torch's norms, and its forward is not torch's. A class that contains other layers with weights (PreNorm with its
    attention) is not a norm itself, but its parts may be.

    >>> norm_kind(nn.GroupNorm(1, 4))
    'torch'
    """
    by_torch = isinstance(module, _TORCH_NORMS)
    named = _NAMED_NORM.fullmatch(type(module).__name__) is not None
    if (named or by_torch) and not _runs_torch_forward(module) and not _holds_layers(module):
        return "own"
    return "torch" if by_torch else None


def has_running_stats(module: nn.Module) -> bool:
    """Returns whether a batch or instance norm has running statistics as well as weights."""
    return isinstance(module, BatchNormBase) and bool(module.affine) and module.running_mean is not None


def _runs_torch_forward(module: nn.Module) -> bool:
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return isinstance(module, _TORCH_NORMS) and owner.__module__.startswith("torch.nn.modules.")


def _holds_layers(module: nn.Module) -> bool:
    below = (each for each in module.modules() if each is not module and not isinstance(each, _TORCH_NORMS))
    return any(p is not None for each in below for p in parameters_of(each).values())
