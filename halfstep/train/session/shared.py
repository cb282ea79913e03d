"""The state of a session that must be the same in all processes that train its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.sharded import is_sharded
from halfstep.train.optim.masters import MasterStore
from halfstep.train.scale.scales import LossScales
from halfstep.train.session.parts import updated_by


@dataclass(frozen=True, eq=False)
class SharedState:
    """State of a session that must be the same in all processes; `adopt` calls `replaced` at its end."""

    plan: Plan
    store: MasterStore
    scales: LossScales
    optimizers: Callable[[], Sequence[Optimizer]]
    name_of: Callable[[nn.Parameter], str]
    replaced: Callable[[], None]

    def described(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Returns a description of the plan, one entry per line, and of the parameters, one per line."""
        plan = [f"the plan's {key} = {value!r}" for key, value in to_dict(self.plan).items()]
        return [*plan, *(f"{self.name_of(p)} of shape {tuple(p.shape)} stored as {_described(p)}" for p in parameters)]

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the weights that have a master or a remainder, each followed by its master or remainder."""
        stored = [p for p in parameters if self.store.keeps(p)]
        return [tensor for p in stored for tensor in (p, self.store.extra(p))]

    def moments(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Returns the optimizer state of each of these parameters; empty for a parameter without state."""
        states: dict[int, dict[str, Any]] = {}
        for optimizer in self.optimizers():
            own = optimizer.state_dict()["state"]
            states |= {id(p): own.get(index, {}) for index, p in enumerate(updated_by(optimizer))}
        return [dict(states.get(id(p), {})) for p in parameters]

    def take_moments(self, parameters: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]) -> None:
        """Loads another process's optimizer states of these parameters into the session's optimizers."""
        theirs = dict(zip(map(id, parameters), states, strict=True))
        for optimizer in self.optimizers():
            updated = updated_by(optimizer)
            if theirs.keys().isdisjoint(map(id, updated)):
                continue
            saved = optimizer.state_dict()
            own = saved["state"]
            merged = {index: theirs.get(id(p), own.get(index, {})) for index, p in enumerate(updated)}
            saved["state"] = {index: state for index, state in merged.items() if state}
            if own or saved["state"]:
                optimizer.load_state_dict(saved)

    def options(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Returns the options of each param group (such as the learning rate) that has any of these parameters."""
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self._groups(parameters)
        ]

    def take_options(self, parameters: Sequence[nn.Parameter], options: Sequence[dict[str, Any]]) -> None:
        """Writes another process's `options` into the param groups here that have any of these parameters."""
        for group, theirs in zip(self._groups(parameters), options, strict=False):
            for name, value in theirs.items():
                own = group.get(name)
                if isinstance(own, Tensor) and isinstance(value, Tensor):
                    own.copy_(value)  # a schedule may hold it
                else:
                    group[name] = value

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        wanted = set(map(id, parameters))
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        return [group for group in groups if not wanted.isdisjoint(map(id, group["params"]))]

    def adopt(self, scales: Any, parameters: Sequence[nn.Parameter], *, sent_again: bool) -> None:
        """Loads another process's loss scales after its weights; if these come again, it is no change of them."""
        self.store.note(parameters, writes_to_come=int(sent_again))
        if scales != self.scales.state_dict():
            self.scales.load_state_dict(scales)
        self.replaced()


def _described(p: nn.Parameter) -> str:
    return f"{p.dtype} and placed as {p.placements}" if is_sharded(p) else str(p.dtype)
