"""The state of a session that must be the same in all processes that train its models."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.sharded import is_sharded
from halfstep.train.optim.masters import MasterStore
from halfstep.train.processes.collectives import told_by_all
from halfstep.train.scale.scales import LossScales
from halfstep.train.session.parts import updated_by


@dataclass(frozen=True, eq=False)
class SharedState:
    """State of a session that must be the same in all processes; `hand_on` calls `replaced` once it is."""

    plan: Plan
    store: MasterStore
    scales: LossScales
    optimizers: Callable[[], Sequence[Optimizer]]
    name_of: Callable[[nn.Parameter], str]
    replaced: Callable[[], None]

    def compare(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> tuple[str, list[Any]]:
        """Checks that all processes have the same plan and parameters; returns a word that all know, and all scales."""
        lines = [f"the plan's {key} = {value!r}" for key, value in to_dict(self.plan).items()]
        for p in parameters:
            placed = f"{p.dtype} and placed as {p.placements}" if is_sharded(p) else str(p.dtype)
            lines.append(f"{self.name_of(p)} of shape {tuple(p.shape)} stored as {placed}")
        found = told_by_all((lines, self.scales.state_dict(), secrets.token_hex(8)), group)
        first = found[0][0]
        for rank, (theirs, *_) in enumerate(found):
            differing = [pair for pair in zip(theirs, first, strict=False) if pair[0] != pair[1]]
            if len(theirs) != len(first):
                differing.append((f"{len(theirs)} entries", f"{len(first)}"))
            if differing:
                raise SessionError(
                    f"what is trained differs between processes: process {rank} has {differing[0][0]}, process 0 has "
                    f"{differing[0][1]}; use the same model, optimizer and plan in all processes"
                )
        return found[0][2], [scales for _, scales, _ in found]

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the weights that have a master or a remainder, each followed by its master or remainder."""
        stored = [p for p in parameters if self.store.keeps(p)]
        return [tensor for p in stored for tensor in (p, self.store.extra(p))]

    @torch.no_grad()
    def hand_on(
        self,
        parameters: Sequence[nn.Parameter],
        scales: Any,
        group: dist.ProcessGroup,
        source: int,
        *,
        sent_again: bool,
    ) -> None:
        """Copies the state of these parameters, and the `scales`, of process `source` to all others, bit for bit."""
        # Pass `sent_again` if DistributedDataParallel will write the same weights once more, so that its write does
        # not count as a change of the weights.
        for tensor in self.held(parameters):
            bits = tensor.detach()
            if bits.dtype is torch.int16:  # which no backend sends
                bits = bits.view(torch.bfloat16)
            sent = bits.contiguous()
            dist.broadcast(sent, group=group, group_src=source)
            if sent.data_ptr() != bits.data_ptr():
                bits.copy_(sent)
        self.store.note(parameters, writes_to_come=int(sent_again))
        if scales != self.scales.state_dict():
            self.scales.load_state_dict(scales)
        self.replaced()
        self._hand_on_moments(parameters, group, source)

    def _hand_on_moments(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, source: int) -> None:
        """Copies optimizer states of these parameters, and the options of their param groups, from `source` to all."""
        is_source = dist.get_rank(group) == source
        every = [each for optimizer in self.optimizers() for each in optimizer.param_groups]
        groups = [each for each in every if not {*map(id, parameters)}.isdisjoint(map(id, each["params"]))]
        own: dict[int, dict[str, Any]] = {}
        for optimizer in self.optimizers() if is_source else ():
            states = optimizer.state_dict()["state"]
            own |= {id(p): states.get(index, {}) for index, p in enumerate(updated_by(optimizer))}
        shapes = [{name: _to_announce(each, p) for name, each in own.get(id(p), {}).items()} for p in parameters]
        options = [{name: value for name, value in each.items() if name != "params"} for each in groups]
        sent: list[Any] = [(shapes, options) if is_source else None]
        dist.broadcast_object_list(sent, group=group, group_src=source)
        shapes, options = sent[0]
        for state, p in zip(shapes, parameters, strict=True):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_meta:
                    new = torch.empty_like(value, device=p.device, memory_format=torch.contiguous_format)
                    state[name] = own[id(p)][name].contiguous() if is_source else new
                    dist.broadcast(state[name], group=group, group_src=source)
        if not is_source:
            self._take_moments(dict(zip(map(id, parameters), shapes, strict=True)))
        for each, values in zip(groups, options if not is_source else (), strict=False):
            for name, value in values.items():
                if isinstance(each.get(name), Tensor) and isinstance(value, Tensor):
                    each[name].copy_(value)  # a schedule may hold it
                else:
                    each[name] = value

    def _take_moments(self, theirs: Mapping[int, dict[str, Any]]) -> None:
        for optimizer in self.optimizers():
            saved, updated = optimizer.state_dict(), updated_by(optimizer)
            new = {i: theirs[id(p)] for i, p in enumerate(updated) if id(p) in theirs}
            state = {i: each for i, each in (saved["state"] | new).items() if each}
            if new and (saved["state"] or state):
                optimizer.load_state_dict({**saved, "state": state})


def _to_announce(value: Any, parameter: nn.Parameter) -> Any:
    """Returns what to send first of a value of an optimizer state: of a tensor that follows, its shape and dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to("meta") if value.dim() and value.device == parameter.device else value.cpu()
