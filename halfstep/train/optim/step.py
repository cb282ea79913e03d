"""halfstep's own update of the optimizers in its table; the device decides whether a step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.sharded import is_sharded
from halfstep.torch_internals import mark_stepped, same_kinds
from halfstep.train.kernels.batch import (
    Alike,
    Batch,
    Code,
    Gradients,
    Layout,
    Scratch,
    as_real,
    in_layout_of,
    is_dense,
    resolved,
)
from halfstep.train.kernels.devices import addresses
from halfstep.train.optim.hooks import (
    check_gradients,
    has_hooks,
    named,
    run_post_hooks,
    run_pre_hooks,
    true_gradients,
    updated_by,
    widened,
)
from halfstep.train.optim.implementations import IMPLEMENTATIONS, Implementation, update
from halfstep.train.optim.laws import Group, Row, uncoded
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.moments import Moments
from halfstep.train.optim.optimizers import KERNELS, unsupported_options
from halfstep.train.processes.shards import like, local, part_of, spread

StateDict = dict[str, Any]


@dataclass
class Rows:
    """A batch of copies of the rows of a weight that a sparse gradient reaches."""

    batch: Batch
    tables: list[Tensor]  # what the rows were copied from: the weight, and its master or remainder if it has one
    index: Tensor

    def write_back(self) -> None:
        """Writes the updated rows back into the weight and its master."""
        for table, rows in zip(self.tables, [*self.batch.weights, *self.batch.extras], strict=True):
            table.index_copy_(0, self.index, rows)


@dataclass
class Dense:
    """A batch of parameters, and the places of their gradients among those of the step."""

    batch: Batch
    places: list[int]
    as_given: bool = True  # whether all gradients come in the memory order of their weights


class _Seen:
    """The tensors that batches were made from, to be recognised in the next step."""

    # The batches keep the memory of weights alive, so no others can have its addresses; `held` have the ids in the
    # signature.
    def __init__(self, signature: list[Any], optimizer: Optimizer, own: list[Tensor], grads: Gradients) -> None:
        values = list(_values(optimizer))  # with those that were made
        self._signature, self._held, self._memory = signature, [*updated_by(optimizer), *values], grads.memory
        self._states = [local(value) for value in values if isinstance(value, Tensor)]
        tensors = [*own, *self._states]
        self._starts, self._alike = addresses(tensors), same_kinds(tensors)

    def same(self, signature: list[Any], own: list[Tensor], grads: Gradients) -> bool:
        """Returns whether all tensors are of the kinds, and but for gradients in the memory, that were seen."""
        return (
            grads.memory is self._memory
            and signature == self._signature
            and self._alike([*own, *self._states]) == self._starts
        )


class OnePassStepper:
    """Updates an optimizer's parameters by `row` of halfstep's table, without the optimizer's `step` or a host sync.

    The optimizer's state has the names that its own `step` gives it, and is fp32. Step hooks find true fp32 gradients
    in `p.grad`, and the update uses those that pre-hooks leave there. They run on every step, even a skipped one,
    because only the device knows whether it is skipped.
    """

    syncs = False

    def __init__(  # noqa: PLR0913  # what an update needs
        self,
        optimizer: Optimizer,
        store: MasterStore,
        row: Row,
        implementations: Mapping[str, Implementation] = IMPLEMENTATIONS,
        name_of: Callable[[Parameter], str] | None = None,
        moments: Moments | None = None,
        emulates: Callable[[], bool] = lambda: False,
        scratch: Scratch | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._emulates = emulates
        self._moments = moments
        self._store = store
        self.row = row
        self._implementations = implementations
        self._name_of = name_of
        self._scratch = scratch or Scratch()
        self._sorted: list[tuple[list[Dense], list[Rows]]] = []  # of each group, as the last step left it
        self._alike = Alike()  # of gradients that hooks leave
        self._seen: _Seen | None = None  # the tensors in it
        self._unread = sorted(optimizer.defaults.keys() - {*row.reads, *KERNELS})

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
        """Makes initial state for parameters with a gradient."""
        params = [p for p in updated_by(self._optimizer) if p.grad is not None]
        self._sort(params, [resolved(part_of(p.grad, p)) for p in params if p.grad is not None])

    @torch.no_grad()
    def batches(self, params: Sequence[Parameter], grads: Sequence[Tensor]) -> list[tuple[Group, list[Dense]]]:
        """Returns, by group, the batches that a step from `grads` would update; makes missing state."""
        self._store.adopt_changed(params)
        found = self._sort(list(params), [widened(g).to_dense() if g.is_sparse else resolved(g) for g in grads])
        return list(zip(self._optimizer.param_groups, [dense for dense, _ in found], strict=True))

    def bytes(self) -> dict[str, int]:
        """Returns how many bytes the moments take that are not kept in fp32, by how they are."""
        return {} if self._moments is None else self._moments.bytes()

    def close(self) -> None:
        """Moves step counts to where torch keeps them: the CPU, unless the group is `fused` or `capturable`."""
        self._sorted, self._seen = [], None
        if self._moments is not None:
            self._moments.close(self.row.counts)
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
        self._check(params, grads)
        given = {id(p) for p in params}
        held = {id(p) for p in updated_by(self._optimizer) if p.grad is not None and id(p) not in given}
        with true_gradients(params, grads, factor):
            run_pre_hooks(optimizer)
            left = [p for p in updated_by(self._optimizer) if p.grad is not None and id(p) not in held]
            self._step(left, [resolved(part_of(p.grad, p)) for p in left if p.grad is not None], None, found)
            return run_post_hooks(optimizer)

    @torch.no_grad()
    def _step(self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor) -> None:
        self._store.adopt_changed(params)
        grads = grads if isinstance(grads, Gradients) else self._alike.of(grads)
        own = [p if type(p) is Parameter else local(p) for p in params]
        if self._seen is None or not self._seen.same(self._signature(), own, grads):
            self._seen = None
            self._sorted = self._sort(params, grads)
            if not any(rows for _, rows in self._sorted):  # sparse rows are new in each step
                self._seen = _Seen(self._signature(), self._optimizer, own, grads)
        else:
            for each in chain.from_iterable(dense for dense, _ in self._sorted):
                given = [grads[i] for i in each.places]
                each.batch.grads[:] = given if each.as_given else map(_paired, given, each.batch.weights)
        groups = self._optimizer.param_groups
        factors = self.row.factors(groups, grads, factor)
        for (dense, rows), group, of_group in zip(self._sorted, groups, factors, strict=True):
            self._update(dense, rows, group, of_group, found)
        self._store.note(params)
        mark_stepped(self._optimizer)  # or LR schedulers warn

    def _signature(self) -> list[Any]:
        """Returns what decides, beside what `_Seen` compares, how tensors are sorted into batches."""
        found: list[Any] = [*map(id, self._optimizer.state), *map(id, _values(self._optimizer))]
        for group in self._optimizer.param_groups:
            found += map(id, group["params"])
            found += (self.row.states(group), *map(group.get, self._unread))
            found += () if self._moments is None else self._codes(group).values()
        return found

    def _check(self, params: list[Parameter], grads: list[Tensor]) -> None:
        """Refuses gradients that the row does not support, and parameters of no group."""
        name = type(self._optimizer).__name__
        check_gradients(params, grads, self._name_of)
        for p, grad in zip(params, grads, strict=True):
            if grad.is_sparse and not self.row.sparse:
                raise SessionError(
                    f"the gradient of {named(p, self._name_of)} is sparse, and {name} takes no sparse gradients; use "
                    "SparseAdam or sparse=False"
                )
        if strange := {id(p) for p in params} - {id(p) for p in updated_by(self._optimizer)}:
            raise SessionError(
                f"{len(strange)} parameters to update are in no group of this {name}; add them with add_param_group()"
            )

    def _sort(self, params: list[Parameter], grads: list[Tensor]) -> list[tuple[list[Dense], list[Rows]]]:
        """Sorts the parameters of each group into batches and sparse rows; makes missing state, changes no value."""
        self._store.adopt_replaced(params)
        if ignored := unsupported_options(self._optimizer):
            raise SessionError(
                f"{type(self._optimizer).__name__} now has {', '.join(ignored)}, which halfstep's update of it does "
                "not support; set this back, or set it before halfstep.initialize: the optimizer's own step then runs"
            )
        if (
            self._moments is not None
            and self._moments.codes
            and any(uncoded(self.row, group) for group in self._optimizer.param_groups)
        ):
            raise SessionError(
                f"{type(self._optimizer).__name__} now has amsgrad, whose third average moments in bf16 or 8 bits do "
                'not have; set it back, or open the session with moments="full"'
            )
        self._check(params, grads)
        place_of = {id(p): i for i, p in enumerate(params) if p.numel()}
        groups = self._optimizer.param_groups
        members = [[(p, place_of[id(p)]) for p in group["params"] if id(p) in place_of] for group in groups]
        return [self._sort_group(group, of_group, grads) for group, of_group in zip(groups, members, strict=True)]

    def _sort_group(
        self, group: Group, members: list[tuple[Parameter, int]], grads: list[Tensor]
    ) -> tuple[list[Dense], list[Rows]]:
        dense: dict[tuple[Any, ...], Dense] = {}
        sparse: list[Rows] = []
        names = self.row.states(group)
        for p, place in members:
            grad = grads[place]
            layout = self._store.trained_layout(p, partial(named, p, self._name_of))
            weight = as_real(local(p).detach())
            extra = [self._store.extra(p)] if layout in ("copy", "split") else []
            kept = None if self._moments is None else self._moments.empty(p, layout == "low", self._codes(group))
            if grad.is_sparse:
                grad = widened(grad)
                alone = kept is None and not names and not group["weight_decay"]
                rows = touched_rows(layout, weight, extra, grad) if alone else None
                if rows is not None:
                    sparse.append(rows)
                    continue
                grad = grad.to_dense()
            key = (layout, p.device, weight.dtype, is_dense(weight), kept and kept.kind)
            if key not in dense:
                batch = Batch(layout, [], [], [], {name: [] for name in names}, whole=self.row.whole, kept=kept)
                dense[key] = Dense(batch, [])
            batch = dense[key].batch
            batch.weights.append(weight)
            if self.row.gathers:
                batch.owners.append(p.detach())
            batch.extras.extend(extra)
            batch.grads.append(_paired(grad, weight))
            dense[key].places.append(place)
            dense[key].as_given &= batch.grads[-1] is grad
            self._collect(p, batch, group)
        return list(dense.values()), sparse

    def _update(
        self, dense: list[Dense], sparse: list[Rows], group: Group, factor: Tensor | None, found: Tensor
    ) -> None:
        for batch in [*(each.batch for each in dense), *(rows.batch for rows in sparse)]:
            own, skip = factor, found
            if batch.device != found.device:
                own = None if factor is None else factor.to(batch.device, non_blocking=True)
                skip = found.to(batch.device, non_blocking=True)
            if self.row.gathers:
                batch.emulate = self._emulates()
            update(self.row, batch, group, own, skip, self._scratch, self._implementations)
        for each in dense:
            each.batch.grads[:] = each.batch.weights  # so that `zero_grad` can free their memory
        for rows in sparse:
            rows.write_back()

    def _codes(self, group: Group) -> dict[str, Code]:
        return dict(zip(self.row.states(group), self.row.codes(group), strict=False))

    def _collect(self, p: Parameter, batch: Batch, group: Group) -> None:
        """Adds the state of `p` to its batch."""
        kept, moments = batch.kept, self._moments
        if kept is None or moments is None:
            if batch.states or self.row.counts:
                self._collect_state(p, batch)
        elif kept.kind == "full":  # random bits alone
            kept.places.append(moments.place(p))
            self._collect_state(p, batch, counts=True)
        else:
            state, codes = self._optimizer.state[p], self._codes(group)
            if "step" not in state:
                moments.forget(p)
            given = Batch("low", [], [], [], {name: [] for name in codes if state.get(name) is not None})
            self._collect_state(p, given, counts=True)
            moments.add(p, batch, codes, given)
            # another dict, as that one is also in what torch's `state_dict` has returned
            self._optimizer.state[p] = {name: value for name, value in state.items() if name not in given.states}
            batch.steps.extend(given.steps)

    def _collect_state(self, p: Parameter, batch: Batch, *, counts: bool = False) -> None:
        """Adds the state of `p` to its batch, moved to the dtype, device and layout of its full weight."""
        state = self._optimizer.state[p]
        dtype = p.dtype if batch.layout == "full" else torch.float32
        own = local(p)
        for name, tensors in batch.states.items():
            tensor = state.get(name)
            if name in self.row.scalars:
                tensor = torch.zeros((), dtype=dtype, device=own.device) if tensor is None else tensor
                tensor = state[name] = tensor.to(own.device, dtype).reshape(())
            elif tensor is None:
                zeros = torch.full_like(own, self.row.start, dtype=dtype, requires_grad=False)
                tensor = state[name] = like(p, zeros)
            elif tensor.shape != p.shape:
                raise SessionError(
                    f"the state {name!r} of a parameter of shape {tuple(p.shape)} has shape {tuple(tensor.shape)}; "
                    "load an optimizer state of this model, or delete that state to start afresh"
                )
            else:
                if is_sharded(p) != is_sharded(tensor):
                    tensor = state[name] = spread(tensor, p)
                part = local(tensor)
                if part.dtype is not dtype or part.device != own.device or part.stride() != own.stride():
                    tensor = state[name] = like(p, in_layout_of(part.to(own.device, dtype), own))
            tensors.append(as_real(local(tensor).detach()))  # an alias keeps the memory, whatever `.data` is set to
        if self.row.counts or counts:
            batch.steps.append(_step_count(state, own.device).detach())


def _values(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(map(methodcaller("values"), optimizer.state.values()))


def touched_rows(layout: Layout, weight: Tensor, extra: list[Tensor], grad: Tensor) -> Rows | None:
    """Returns the rows of `weight` that the sparse `grad` reaches, or None if `grad` must be made dense."""
    # It must on devices other than the CPU, where the host would have to wait for the number of rows.
    if weight.device.type != "cpu" or grad.sparse_dim() != 1:
        return None
    merged = grad.detach().coalesce()
    index = merged.indices()[0]
    tables = [weight, *extra]
    weights, *extras = [table.index_select(0, index) for table in tables]
    return Rows(Batch(layout, [weights], extras, [merged.values()]), tables, index) if weights.numel() else None


def _paired(grad: Tensor, weight: Tensor) -> Tensor:
    """Returns a gradient in the memory order of its weight."""
    if grad.is_complex() or grad.requires_grad:
        grad = as_real(grad.detach())
    return in_layout_of(grad, weight)


def _step_count(state: StateDict, device: torch.device) -> Tensor:
    step = state.get("step")
    if step is None:
        step = state["step"] = torch.zeros((), dtype=torch.float32, device=device)  # a value from the host would wait
    elif not isinstance(step, Tensor):
        step = state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
    elif step.device != device or step.dtype is not torch.float32 or step.dim():
        step = state["step"] = step.to(device, torch.float32).reshape(())
    return step
