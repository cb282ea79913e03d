"""halfstep's own update of the optimizers in its table; the device decides whether a step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.kernels.batch import Batch, Options, Scratch, as_real, in_layout_of, is_dense, resolved
from halfstep.optim.batch_cache import BatchCache
from halfstep.optim.clip import group_factors
from halfstep.optim.gradients import true_gradients
from halfstep.optim.hooks import has_hooks, run_post_hooks, run_pre_hooks
from halfstep.optim.implementations import IMPLEMENTATIONS, Implementation, update
from halfstep.optim.masters import MasterStore
from halfstep.optim.sparse import SparseRows, touched_rows, widened
from halfstep.optim.table import OptimizerRow, unsupported_options
from halfstep.processes.shards import like, local, part_of, spread
from halfstep.sharded import is_sharded, is_wrapped
from halfstep.torch_internals import mark_stepped

StateDict = dict[str, Any]
Member = tuple[Parameter, Tensor]  # a parameter and its gradient


class OnePassStepper:
    """Updates an optimizer's parameters by `row` of halfstep's table, without the optimizer's `step` or a host sync.

    The optimizer's state has the same names as with its own `step`, and is fp32 for low-precision weights. As in torch,
    `optimizer.state_dict()` has no state for a parameter that no update has reached, even after skipped steps. The
    exception is state that `prepare` made: `state_dict()` includes it until the next step.

    Step hooks find true fp32 gradients in `p.grad`, and the update uses the gradients that pre-hooks leave there. Hooks
    run on every step, even a skipped one, because only the device knows whether it is skipped.
    """

    syncs = False

    def __init__(
        self,
        optimizer: Optimizer,
        store: MasterStore,
        row: OptimizerRow,
        implementations: Mapping[str, Implementation] = IMPLEMENTATIONS,
        name_of: Callable[[Parameter], str] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._row = row
        self._implementations = implementations
        self._name_of = name_of
        self._scratch = Scratch()
        self._fresh: dict[Tensor, tuple[Tensor, Tensor]] = {}  # first state and its flag: 1 until an update
        self._cache: BatchCache | None = None
        self._prepared = False  # since the last step
        self._hook = optimizer.register_state_dict_post_hook(self._without_unreached_state)

    def step(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        """Updates `params` from `grads` times `factor`; changes nothing if `found` is true."""
        if has_hooks(self._optimizer):
            return self._step_with_hooks(params, grads, factor, found)
        self._step(params, grads, factor, found)
        return None

    @torch.no_grad()
    def prepare(self) -> None:
        """Makes initial state for parameters with a gradient; `state_dict()` includes it until the next step."""
        optimizer = self._optimizer
        params = [p for p in self._members() if p.grad is not None]
        grads = [resolved(part_of(p.grad, p)) for p in params if p.grad is not None]
        self._sorted(params, grads, [self._row.options(group) for group in optimizer.param_groups])
        self._prepared = True

    def close(self) -> None:
        """Removes the hook on `optimizer.state_dict` and the state that no update has reached."""
        # Moves step counts to where torch keeps them: to the CPU, unless the param group is `fused` or `capturable`.
        self._hook.remove()
        self._cache = None
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

    def _step_with_hooks(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        optimizer = self._optimizer
        self._by_group(params, grads)
        given = {id(p) for p in params}
        held = {id(p) for p in self._members() if p.grad is not None and id(p) not in given}
        with true_gradients(params, grads, factor):
            run_pre_hooks(optimizer)
            left = [p for p in self._members() if p.grad is not None and id(p) not in held]
            self._step(left, [resolved(part_of(p.grad, p)) for p in left if p.grad is not None], None, found)
            return run_post_hooks(optimizer)

    @torch.no_grad()
    def _step(self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor) -> None:
        optimizer = self._optimizer
        all_options = [self._row.options(group) for group in optimizer.param_groups]
        self._store.adopt_changed(params)
        self._prepared = False
        cache = self._cache
        if cache is None or not cache.take(params, grads, all_options, optimizer):
            cache = self._cache = self._sorted(params, grads, all_options)
        factors = group_factors(all_options, grads, factor)
        for options, (batches, rows), of_group in zip(all_options, cache.groups, factors, strict=True):
            self._update(options, batches, rows, of_group, found)
        if cache.lasting:
            cache.release()
        else:
            self._cache = None
        self._store.note(params)
        mark_stepped(optimizer)  # or LR schedulers warn

    def _sorted(self, params: list[Parameter], grads: list[Tensor], all_options: list[Options]) -> BatchCache:
        """Sorts parameters and gradients into batches and sparse rows, and makes the state that is missing."""
        if ignored := unsupported_options(self._optimizer):
            raise SessionError(
                f"{type(self._optimizer).__name__} now has {', '.join(ignored)}, which halfstep's update of it does "
                "not support; set this back, or set it before halfstep.initialize: the optimizer's own step then runs"
            )
        cache = BatchCache()
        for options, members in zip(all_options, self._by_group(params, grads), strict=True):
            self._gather(options, members, cache)
        cache.complete(params, all_options, self._optimizer)
        return cache

    def _members(self) -> list[Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _by_group(self, params: list[Parameter], grads: list[Tensor]) -> list[list[Member]]:
        """Returns a list of (parameter, gradient) for each param group; refuses bad gradients."""
        name = type(self._optimizer).__name__
        check_gradients(params, grads, self._name_of)
        for p, grad in zip(params, grads, strict=True):
            if grad.is_sparse and not self._row.sparse:
                raise SessionError(
                    f"the gradient of {named(p, self._name_of)} is sparse, and {name} takes no sparse gradients; use "
                    "SparseAdam or sparse=False"
                )
        given = {id(p): grad for p, grad in zip(params, grads, strict=True)}
        groups = self._optimizer.param_groups
        members = [[(p, given.pop(id(p))) for p in group["params"] if id(p) in given] for group in groups]
        if given:
            raise SessionError(
                f"{len(given)} parameters to update are in no group of this {name}; add them with add_param_group()"
            )
        return [[member for member in rows if member[0].numel()] for rows in members]

    def _gather(self, options: Options, members: list[Member], cache: BatchCache) -> None:
        """Adds the parameters of a group to `cache`, in dense batches and sparse rows; changes no value."""
        dense: dict[tuple[Any, ...], Batch] = {}
        sparse: list[SparseRows] = []
        for p, grad in members:
            layout = self._store.trained_layout(p, partial(named, p, self._name_of))
            weight = as_real(local(p).detach())
            extra = [self._store.extra(p)] if layout in ("copy", "split") else []
            if grad.is_sparse:
                grad = widened(grad)
                rows = touched_rows(layout, weight, extra, grad, options)
                if rows is not None:
                    sparse.append(rows)
                    continue
                grad = grad.to_dense()
            key = (layout, p.device, weight.dtype, is_dense(weight))
            batch = dense.get(key)
            if batch is None:
                batch = dense[key] = Batch(
                    layout, [], [], [], {name: [] for name in options.states}, whole=self._row.whole
                )
            batch.weights.append(weight)
            batch.extras.extend(extra)
            batch.grads.append(in_layout_of(as_real(grad.detach()), weight))
            if options.states or self._row.counts:
                self._collect_state(p, batch, options)
            cache.place(p, batch, self._optimizer.state.get(p))
        cache.groups.append((list(dense.values()), sparse))

    def _update(
        self, options: Options, dense: list[Batch], sparse: list[SparseRows], factor: Tensor | None, found: Tensor
    ) -> None:
        for batch in [*dense, *(rows.batch for rows in sparse)] if sparse else dense:
            local, skip = factor, found
            if batch.device != found.device:
                local = None if factor is None else factor.to(batch.device, non_blocking=True)
                skip = found.to(batch.device, non_blocking=True)
            update(self._row, batch, options, local, skip, self._scratch, self._implementations)
        for rows in sparse:
            rows.write_back()

    def _collect_state(self, p: Parameter, batch: Batch, options: Options) -> None:
        state = self._optimizer.state[p]
        dtype = p.dtype if batch.layout == "full" else torch.float32
        own = local(p)
        shape, stride, device, new = p.shape, own.stride(), own.device, False
        for name, tensors in batch.states.items():
            tensor = state.get(name)
            if name in options.scalars:
                if tensor is None:
                    new, tensor = True, torch.zeros((), dtype=dtype, device=device)
                tensor = state[name] = tensor.to(device, dtype).reshape(())
            elif tensor is None:
                new = True
                tensor = state[name] = like(p, torch.zeros_like(own, dtype=dtype, requires_grad=False))
            elif tensor.shape != shape:
                raise SessionError(
                    f"the state {name!r} of a parameter of shape {tuple(shape)} has shape {tuple(tensor.shape)}; "
                    "load an optimizer state of this model, or delete that state to start afresh"
                )
            else:
                if is_sharded(p) != is_sharded(tensor):
                    tensor = state[name] = spread(tensor, p)
                part = local(tensor)
                if part.dtype is not dtype or part.device != device or part.stride() != stride:
                    tensor = state[name] = like(p, in_layout_of(part.to(device, dtype), own))
            tensors.append(as_real(local(tensor)))
        if self._row.counts:
            batch.steps.append(_step_count(state, device))
        else:
            batch.fresh.append(self._fresh_flag(p, state[options.states[0]], new))

    def _fresh_flag(self, p: Parameter, first: Tensor, new: bool) -> Tensor:
        held = self._fresh.get(p)
        if held is None or held[0] is not first:  # a state that was loaded has seen an update
            held = self._fresh[p] = (first, torch.full((), float(new), dtype=torch.float32, device=p.device))
        return held[1]

    def fresh(self, p: Tensor) -> Tensor | None:
        """Returns a flag (0-dim fp32), 1 until an update has changed the state of `p`; None if there is no flag."""
        first, flag = self._fresh.get(p, (None, None))
        return flag if any(value is first for value in self._optimizer.state[p].values()) else None

    def _unreached(self) -> list[Parameter]:
        """Returns the parameters whose state no update has reached; reads flags on the host, once per device."""
        flags: dict[torch.device, list[tuple[Any, Tensor]]] = {}
        for p, state in self._optimizer.state.items():
            step = state.get("step")
            flag = step == 0 if isinstance(step, Tensor) else self.fresh(p)
            if flag is None:
                continue
            flags.setdefault(flag.device, []).append((p, flag.bool()))
        unreached: list[Parameter] = []
        for rows in flags.values():
            values = torch.stack([flag for _, flag in rows]).tolist()
            unreached += [p for (p, _), value in zip(rows, values, strict=True) if value]
        return unreached

    def _without_unreached_state(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        if self._prepared:
            return state_dict
        unreached = set(self._unreached())
        indices = {i for i, p in enumerate(self._members()) if p in unreached}
        state = {key: value for key, value in state_dict["state"].items() if key not in indices}
        return {**state_dict, "state": state}


def check_gradients(
    params: list[Parameter], grads: list[Tensor], name_of: Callable[[Parameter], str] | None = None
) -> None:
    """Refuses gradients that do not fit their parameters."""
    for p, grad in zip(params, grads, strict=True):
        if type(grad) is not Tensor and is_wrapped(grad):
            raise SessionError(_wrapped(grad, p, named(p, name_of)))
        own = local(p)
        if grad.shape != own.shape or grad.device != own.device:
            raise SessionError(
                f"the gradient of {named(p, name_of)} has shape {tuple(grad.shape)} on {grad.device}, but the "
                f"parameter has {tuple(p.shape)} on {p.device}; call zero_grad() after you reshape or move a parameter"
            )


def _wrapped(grad: Tensor, p: Parameter, name: str) -> str:
    """Returns the error message for a gradient of a tensor subclass that is not stored as `p` is, such as a DTensor."""
    if is_sharded(grad) and is_sharded(p):
        return (
            f"the gradient of {name} is placed over the processes as {grad.placements}, but the parameter as "
            f"{p.placements}; set p.grad = p.grad.redistribute(p.device_mesh, p.placements) before session.step()"
        )
    return (
        f"the gradient of {name} is of type {type(grad).__name__}, which has no plain "
        "storage; set p.grad to a plain tensor (.to_local(), .full_tensor())"
    )


def named(p: Parameter, name_of: Callable[[Parameter], str] | None) -> str:
    """Returns how an error message calls `p`: "the parameter 'NAME'", or "a parameter" if `name_of` is None."""
    return "a parameter" if name_of is None else f"the parameter {name_of(p)!r}"


def _step_count(state: StateDict, device: torch.device) -> Tensor:
    step = state.get("step")
    if step is None:
        step = state["step"] = torch.zeros((), dtype=torch.float32, device=device)  # a value from the host would wait
    elif not isinstance(step, Tensor):
        step = state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
    elif step.device != device or step.dtype is not torch.float32 or step.dim():
        step = state["step"] = step.to(device, torch.float32).reshape(())
    return step
