"""A planted fault: where it is, how it is run, what a verdict must say of it, and what mends it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.diagnose.faults.hosts import words

FORWARD, BACKWARD, SCALE = "forward", "backward", "scale too high"
HARMLESS = "harmless mask"


def nothing(model: nn.Module) -> None:
    """Breaks, or mends, nothing."""


@dataclass(frozen=True)
class Fault:
    """A model that fails, and the verdict that it must get.

    `model` builds it, `breaks` spoils it, `inputs` gives its batch, `spoils` spoils that, `loss` is what it is trained
    on. `expect` is module, operator, phase, kind; None: it is healthy, and no verdict is right. `edit` says that an
    edit of the plan cures it; `advice` is a part of what is said else, and `mends` does to the model what it says.
    Bad data and bad weights need none: the words are to clean the batch and to load what was before. `compiled` is the
    backend of torch.compile, `stale` steps twice without `zero_grad` before, the first time from an infinite loss.
    """

    name: str
    host: str
    model: Callable[[], nn.Module]
    plan: str
    low: str
    expect: tuple[str, str, str, str] | None
    edit: bool = True
    advice: str = ""
    mends: Callable[[Any], None] | None = None
    breaks: Callable[[Any], None] = nothing
    inputs: Callable[[], torch.Tensor] = words
    spoils: Callable[[torch.Tensor], torch.Tensor] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    compiled: str = ""
    stale: bool = False

    @property
    def kind(self) -> str:
        """The kind of the verdict, or that it is a mask that does no harm."""
        return HARMLESS if self.expect is None else self.expect[3]


def write(path: str, value: float) -> Callable[[nn.Module], None]:
    """Returns what writes a value into the first element of a parameter or buffer."""

    def spoil(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(owner), name).view(-1)[0] = value

    return spoil


def grow(path: str, factor: float, rows: int | None = None) -> Callable[[nn.Module], None]:
    """Returns what multiplies the first rows of a parameter, or all of it."""

    def spoil(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(owner), name)[:rows].mul_(factor)

    return spoil


def both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    """Returns what breaks twice."""

    def spoil(model: nn.Module) -> None:
        one(model)
        other(model)

    return spoil


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what puts a value into the first element of a batch."""

    def spoil(inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone()
        inputs.view(-1)[0] = value
        return inputs

    return spoil


def set_at(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Returns what changes an attribute of a module of a model."""

    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change
