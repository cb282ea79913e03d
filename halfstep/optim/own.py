"""halfstep's own update of Adam, AdamW and SGD under torch's state names, predicated on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from halfstep.errors import SessionError
from halfstep.optim.batch import Adam, Batch, Options, Scratch, Sgd, in_layout_of, is_dense
from halfstep.optim.hooks import run_post_hooks, run_pre_hooks
from halfstep.optim.masters import MasterStore
from halfstep.optim.update import update

StateDict = dict[str, Any]


class OwnStepper:
    """Updates the parameters of a torch Adam, AdamW or SGD without its `step`, and without a host read.

    State has torch's names and is fp32 for low weights. A parameter that no update has reached has no state in
    `optimizer.state_dict()`, as in torch, also after skipped steps.
    """

    predicated = True
    syncs = False

    def __init__(self, optimizer: Optimizer, store: MasterStore) -> None:
        self._optimizer = optimizer
        self._store = store
        self._scratch = Scratch()
        self._fresh: dict[Parameter, tuple[Tensor, Tensor]] = {}  # first momentum and its flag: 1 until an update
        self._hook = optimizer.register_state_dict_post_hook(self._without_fresh_state)

    def step(self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor) -> None:
        """Updates `params` from `grads` times `factor`; where `found` is true nothing changes."""
        optimizer = self._optimizer
        given = {p: grad for p, grad in zip(params, grads, strict=True) if p.numel()}
        self._check(given)
        run_pre_hooks(optimizer)
        self._store.adopt_changed(given)
        for group in optimizer.param_groups:
            options = options_of(optimizer, group)
            for batch in self._batches([p for p in group["params"] if p in given], given, options):
                device = batch.device
                local = None if factor is None else factor.to(device, non_blocking=True)
                update(batch, options, local, found.to(device, non_blocking=True), self._scratch)
        for p in given:
            if p in self._store:
                self._store.note(p)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or LR schedulers warn
        run_post_hooks(optimizer)

    def close(self) -> None:
        """Takes the hook off, drops state that no update has reached and puts step counts where torch has them."""
        self._hook.remove()
        for p in self._unreached():
            del self._optimizer.state[p]
        self._fresh.clear()
        for group in self._optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                continue
            for p in group["params"]:
                step = self._optimizer.state.get(p, {}).get("step")
                if isinstance(step, Tensor):
                    self._optimizer.state[p]["step"] = step.cpu()

    def _check(self, given: Mapping[Parameter, Tensor]) -> None:
        members = {p for group in self._optimizer.param_groups for p in group["params"]}
        name = type(self._optimizer).__name__
        if not given.keys() <= members:
            raise SessionError(f"{len(given.keys() - members)} parameters to update are in no group of this {name}")
        if not isinstance(self._optimizer, SGD) and any(grad.is_sparse for grad in given.values()):
            raise SessionError(f"{name} takes no sparse gradients; use SparseAdam or sparse=False")

    def _batches(self, params: list[Parameter], given: Mapping[Parameter, Tensor], options: Options) -> list[Batch]:
        """Returns `params` in batches of what is stored alike."""
        batches: dict[tuple[Any, ...], Batch] = {}
        for p in params:
            layout = self._store.layout(p)
            weight = _real(p.detach())
            key = (layout, p.device, weight.dtype, is_dense(weight))
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Batch(layout, [], [], [], {name: [] for name in state_names(options)})
            batch.weights.append(weight)
            if layout in ("copy", "split"):
                batch.extras.append(in_layout_of(self._store.extra(p), weight))
            grad = given[p]
            batch.grads.append(in_layout_of(_real(grad.to_dense() if grad.is_sparse else grad.detach()), weight))
            self._collect_state(p, batch, options)
        return list(batches.values())

    def _collect_state(self, p: Parameter, batch: Batch, options: Options) -> None:
        if not batch.states:
            return
        state = self._optimizer.state[p]
        new = not state
        dtype = p.dtype if batch.layout == "full" else torch.float32
        for name, tensors in batch.states.items():
            tensor = state.get(name)
            if tensor is None:
                tensor = torch.zeros_like(p, dtype=dtype, requires_grad=False)
                new = True
            elif tensor.dtype is not dtype or tensor.device != p.device or tensor.stride() != p.stride():
                tensor = in_layout_of(tensor.to(p.device, dtype), p)
            state[name] = tensor
            tensors.append(_real(tensor))
        if isinstance(options, Adam):
            batch.steps.append(self._step_count(p, state))
        else:
            batch.fresh.append(self._fresh_flag(p, state["momentum_buffer"], new))

    def _step_count(self, p: Parameter, state: StateDict) -> Tensor:
        step = state.get("step")
        if not isinstance(step, Tensor) or step.device != p.device or step.dtype is not torch.float32:
            step = torch.as_tensor(0.0 if step is None else step, dtype=torch.float32, device=p.device)
            state["step"] = step
        return step

    def _fresh_flag(self, p: Parameter, buffer: Tensor, new: bool) -> Tensor:
        held = self._fresh.get(p)
        if held is None or held[0] is not buffer:  # also where a state was loaded: its momentum is of some update
            held = self._fresh[p] = (buffer, torch.full((), float(new), device=p.device))
        return held[1]

    def _unreached(self) -> list[Parameter]:
        """Returns the parameters whose state no update has reached; reads the flags on the host, once a device."""
        flags: dict[torch.device, list[tuple[Parameter, Tensor]]] = {}
        for p, state in self._optimizer.state.items():
            if not isinstance(p, Parameter):
                continue
            if isinstance(state.get("step"), Tensor):
                flags.setdefault(state["step"].device, []).append((p, state["step"] == 0))
            elif p in self._fresh and self._fresh[p][0] is state.get("momentum_buffer"):
                flags.setdefault(p.device, []).append((p, self._fresh[p][1] == 1))
        found = []
        for rows in flags.values():
            unreached = torch.stack([flag for _, flag in rows]).tolist()
            found += [p for (p, _), is_unreached in zip(rows, unreached, strict=True) if is_unreached]
        return found

    def _without_fresh_state(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        unreached = set(self._unreached())
        order = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        indices = {i for i, p in enumerate(order) if p in unreached}
        state = {key: value for key, value in state_dict["state"].items() if key not in indices}
        return {**state_dict, "state": state}


def options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Options:
    """Returns the options of a param group as they are now; schedulers change them between steps."""
    if isinstance(optimizer, SGD):
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return Sgd(**{name: group[name] for name in names})
    beta1, beta2 = group["betas"]
    decoupled = bool(group["decoupled_weight_decay"])
    shared = {name: group[name] for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    return Adam(beta1=beta1, beta2=beta2, decoupled=decoupled, **shared)


def state_names(options: Options) -> tuple[str, ...]:
    """Returns torch's names of the state tensors that have the shape of the weight."""
    if isinstance(options, Sgd):
        return ("momentum_buffer",) if options.momentum else ()
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options.amsgrad else ("exp_avg", "exp_avg_sq")


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t
