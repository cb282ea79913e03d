"""The table of optimizers that halfstep updates itself: one row each.

To add an optimizer, in three files:

1. `halfstep/optim/NAME.py`: its options, a subclass of `kernels.batch.Options` with the names of its `states` and the
   `numbers` that its kernels take; `options(group)`, which reads them from a param group; and `eager`, its law, which
   yields the new weight and the new states of each parameter (`halfstep.optim.eager.Law`). With these the optimizer
   works on every device, for weights of every layout, with skipped steps, `observe` and checkpoints. For its `step`
   without a session, call `halfstep.optim.own_step`. Where an option that `options` does not read differs from its
   default, the optimizer's own `step` runs.
2. A row in `TABLE` below, by the exact class of the optimizer, since a subclass may compute something else. A subclass
   that differs only in its constructor can share the row: it sets its class attribute `updates_as` to the row's class.
3. For speed on a CPU, a struct in `halfstep/kernels/optimizers.h`, listed in `find_optimizer`, and its name in the row.
   It must give the same bits as the law. A Triton kernel for CUDA can follow (`halfstep/kernels/triton.py`); until
   then the law runs there.

CONTRIBUTING.md says how it is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep.kernels.batch import Options
from halfstep.optim import adam, lamb, lion, novograd, sgd
from halfstep.optim.eager import Law
from halfstep.optim.fused import Kernel


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """How halfstep updates the parameters of one class of optimizers: its update rule, and faster kernels for it.

    `options` reads a param group, and `eager` is the rule in plain tensor operations. `native` and `triton` name
    compiled kernels, and `compiled` says whether these support the options. `fused` returns torch's own kernel if that
    supports the options. `counts`: the optimizer counts its updates. `whole`: an update needs whole weights, for
    example their norms. `sparse`: sparse gradients are supported.
    """

    options: Callable[[Mapping[str, Any]], Options]  # reads a param group as it is now; schedulers change them
    eager: Law
    native: str | None = None  # the name of its struct in kernels/optimizers.h
    triton: str | None = None  # the name of its kernel in kernels/triton.py
    compiled: Callable[[Any], bool] = lambda options: True  # whether these two know what the options ask for
    fused: Callable[[Any], Kernel | None] = lambda options: None  # torch's own kernel, for options that it knows
    counts: bool = False  # its state has a "step" for each parameter
    whole: bool = False  # it needs all elements of a weight at once, as for its norm (LAMB, NovoGrad)
    sparse: bool = False  # it takes sparse gradients

    def __post_init__(self) -> None:
        if self.whole and (self.native or self.triton):
            raise ValueError(
                "an optimizer row has whole=True and names a compiled loop (native or triton), but these loops see "
                "weights only in blocks: leave native and triton out"
            )

    def native_of(self, options: Any) -> str | None:
        """Returns the name of the compiled loop that computes the update with these options, or None."""
        return self.native if self.compiled(options) else None

    def triton_of(self, options: Any) -> str | None:
        """Returns the name of the Triton kernel that computes the update with these options, or None."""
        return self.triton if self.compiled(options) else None


_ADAM = OptimizerRow(
    options=adam.options,
    eager=adam.eager,
    native="adam",
    triton="adam",
    compiled=attrgetter("corrected"),  # as these loops always do
    fused=adam.fused,
    counts=True,
)

TABLE: dict[type[Optimizer], OptimizerRow] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    SGD: OptimizerRow(
        options=sgd.options,
        eager=sgd.eager,
        native="sgd",
        triton="sgd",
        fused=sgd.fused,
        sparse=True,
    ),
    lion.Lion: OptimizerRow(options=lion.options, eager=lion.eager, native="lion"),
    lamb.Lamb: OptimizerRow(options=lamb.options, eager=lamb.eager, counts=True, whole=True),
    novograd.NovoGrad: OptimizerRow(options=novograd.options, eager=novograd.eager, counts=True, whole=True),
}

KERNELS = {"foreach", "fused", "capturable"}  # options of torch that choose how its own step computes, not what


def has_row(cls: type[Optimizer]) -> bool:
    """Returns whether halfstep updates optimizers of `cls` by a row of its table, if their options permit."""
    return any_row_of(cls) is not None


def any_row_of(cls: type[Optimizer]) -> OptimizerRow | None:
    """Returns the row of a class of optimizers, whatever their options; None if it has none."""
    return TABLE.get(_class_of_row(cls))


def row_of(optimizer: Optimizer) -> OptimizerRow | None:
    """Returns the row of `optimizer`; None if it has none, or has options that only its own `step` supports."""
    return None if unsupported_options(optimizer) else TABLE.get(_class_of_row(type(optimizer)))


def unsupported_options(optimizer: Optimizer) -> list[str]:
    """Returns the options of an optimizer that only its own `step` supports, as "name=value"; empty if it has no row.

    These are options that its row does not read, unless they have the default value or only choose a kernel, and
    options other than the learning rate whose value is a tensor.
    """
    cls, found = _class_of_row(type(optimizer)), []
    if cls not in TABLE:
        return []
    parameters = inspect.signature(cls).parameters
    for group in optimizer.param_groups:
        read = _Read(group)
        TABLE[cls].options(read)
        for name in optimizer.defaults.keys() & group.keys() - KERNELS:
            value = group[name]
            if any(isinstance(each, Tensor) for each in (value if isinstance(value, tuple | list) else [value])):
                supported = name == "lr"
            else:
                supported = name in read.names or (name in parameters and value == parameters[name].default)
            if not supported:
                found.append(f"{name}={value!r}")
    return sorted({*found})


class _Read(dict[str, Any]):
    """A param group that notes in `names` which of its options are read."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__(group)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _class_of_row(cls: type[Optimizer]) -> type[Optimizer]:
    named: type[Optimizer] = vars(cls).get("updates_as", cls)  # not inherited: a subclass of it may compute otherwise
    return named
