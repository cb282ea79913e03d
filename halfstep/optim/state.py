"""Optimizer state that comes back from a checkpoint with the bits it was saved with, also for low weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.optim.masters import is_low

StateDict = dict[str, Any]


def exact_state_loading(optimizer: Optimizer) -> Callable[[], None]:
    """Makes `optimizer.load_state_dict` keep fp32 state fp32 and copy what it loads; returns the undo.

    torch casts state to the dtype of the parameter, so a low weight would lose the bits of its moments, and it shares
    the tensors of the loaded dict, which a later step would overwrite. Low state of a low weight becomes fp32.
    """
    loading: list[StateDict] = []

    def keep(_: Optimizer, state_dict: StateDict) -> None:
        loading[:] = [state_dict]

    def put_back(_: Optimizer) -> None:
        saved = loading.pop()
        members = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        if len(members) != len(indices):  # a hook registered later gave torch another dict
            return
        for p, index in zip(members, indices, strict=True):
            if p in optimizer.state and index in saved["state"]:
                optimizer.state[p] = _exact(optimizer.state[p], saved["state"][index], is_low(p))

    handles = [
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(put_back),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _exact(loaded: Any, saved: Any, low: bool) -> Any:
    """Returns copies of the `loaded` tensors, for a `low` weight with the bits of the `saved` ones, in fp32."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved.get(key), low) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_exact(one, other, low) for one, other in zip(loaded, saved, strict=True))
    if not isinstance(loaded, Tensor):
        return loaded
    if low and isinstance(saved, Tensor) and saved.is_floating_point() and saved.shape == loaded.shape:
        return saved.detach().to(loaded.device, torch.float32, copy=True)
    return loaded.clone()
