"""What a session shares with the other processes that train its models: what it holds, and what is found in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim.masters import MasterStore
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.processes import LOSSES, Findings, Replicas
from halfstep.scale.ledger import Collected
from halfstep.scale.norm import Reading
from halfstep.scale.scales import LossScales
from halfstep.session.parts import Flags, Part


@dataclass(frozen=True, eq=False)
class SharedState:
    """What a session holds that is to be the same in all processes; `replaced` is called after it was written."""

    plan: Plan
    store: MasterStore
    scales: LossScales
    name_of: Callable[[nn.Parameter], str]
    replaced: Callable[[], None]

    def described(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Returns the plan, one entry per line, and the parameters."""
        plan = [f"the plan's {key} = {value!r}" for key, value in to_dict(self.plan).items()]
        return [*plan, *(f"{self.name_of(p)} of shape {tuple(p.shape)} stored as {p.dtype}" for p in parameters)]

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the stored weights that have a master or a remainder, and these."""
        stored = [] if self.store.kind == "none" else [p for p in parameters if p in self.store]
        return [tensor for p in stored for tensor in (p, self.store.extra(p))]

    def state(self) -> Any:
        """Returns the loss scales."""
        return self.scales.state_dict()

    def adopt(self, state: Any, parameters: Sequence[nn.Parameter], *, sent_again: bool) -> None:
        """Takes over loss scales, and the weights as they now are."""
        self.store.note(parameters, writes_to_come=int(sent_again))
        if state != self.scales.state_dict():
            self.scales.load_state_dict(state)
        self.replaced()


@dataclass(eq=False)
class Agreed:
    """What decides on a step: the same in all processes that train together.

    `flags` has for the parameters of each part whether their gradients are not finite, `processes` for each process
    whether one of its losses overflowed (None in one process alone), and `stops` whether it wants all to stop.
    """

    collected: list[Collected]
    readings: list[Reading]
    norm: Tensor
    flags: list[Flags]
    processes: Tensor | None = None
    stops: Tensor | None = None


def agree(
    replicas: Replicas,
    parts: Sequence[Part],
    collected: list[Collected],
    readings: list[Reading],
    norm: Tensor,
    *,
    stop: bool,
) -> Agreed:
    """Returns what the processes that train together found in a step.

    `stop` tells them that this one wants all to stop.
    """
    params = [part.ledger.parameters() for part in parts]
    gradients = [
        _of_all(own, held.params, reading.flags) for own, held, reading in zip(params, collected, readings, strict=True)
    ]
    losses = _losses(collected, norm.device)
    here = replicas.is_own(norm.device)
    stops = here if stop else torch.zeros_like(here)
    own = Findings(norm, torch.cat(gradients), losses, here & losses.any(), stops)
    found = replicas.agree(own, [p for each in params for p in each])
    flags = list(zip(params, torch.split(found.gradients, list(map(len, params))), strict=True))
    return Agreed(
        [_with(held, found.losses) for held in collected],
        [Reading(reading.norm, bad.any(), bad) for reading, (_, bad) in zip(readings, flags, strict=True)],
        found.norm,
        flags,
        found.processes,
        found.stops,
    )


def _of_all(parameters: Sequence[nn.Parameter], present: Sequence[nn.Parameter], flags: Tensor) -> Tensor:
    """Returns a flag for each parameter from those of the ones that are present, in the same order."""
    if len(present) == len(parameters):
        return flags
    known = dict(zip(map(id, present), flags.unbind(), strict=True))
    clean = torch.zeros((), dtype=torch.bool, device=flags.device)
    return torch.stack([known.get(id(p), clean) for p in parameters])


def _losses(collected: Sequence[Collected], device: torch.device) -> Tensor:
    """Returns a flag for each loss that is known to have overflowed, by its place in the sum."""
    flags = [torch.zeros((), dtype=torch.bool, device=device)] * LOSSES
    for held in collected:
        for loss_id, flag in held.flags.items():
            flags[_place(loss_id)] = flags[_place(loss_id)] | flag.to(device, non_blocking=True)
    return torch.stack(flags)


def _with(held: Collected, losses: Tensor) -> Collected:
    """Returns what is held with the flags that all processes have noted for its losses."""
    return replace(held, found=losses.any(), flags={loss_id: losses[_place(loss_id)] for loss_id in held.losses})


def _place(loss_id: int) -> int:
    return min(loss_id, LOSSES - 1)
