"""Puts a stand-in for `apex` into `sys.modules`, so that scripts written for apex run, and removes it again."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from halfstep.adapters.apex import gone
from halfstep.adapters.apex.state import STATE
from halfstep.formats import FP16, LOW_FORMATS, Format, as_format
from halfstep.train.session.session import Session
from halfstep.validate import one_of

_HERE = "halfstep.adapters.apex"

MODULES = MappingProxyType(
    {
        "apex": (),
        "apex.amp": ("amp", "functions", "state"),
        "apex.amp._amp_state": ("state",),
        "apex.amp.amp": ("functions",),
        "apex.amp.frontend": ("amp",),
        "apex.amp.handle": ("amp", "functions"),
        **{
            f"apex.{file}{leaf}": (file,)
            for file, leaves in (
                ("parallel", ("", ".distributed", ".sync_batchnorm", ".optimized_sync_batchnorm")),
                ("optimizers", ("", *(f".fused_{kind}" for kind in ("adam", "sgd", "lamb", "novograd", "adagrad")))),
                ("normalization", ("", ".fused_layer_norm")),
            )
            for leaf in leaves
        },
        **dict.fromkeys(gone.MODULES, ("gone",)),
    }
)
"""Modules that scripts import, parents first, each with the files of this package whose `__all__` it exports."""

_UNDO = ExitStack()


def install(low: Format | torch.dtype | str | None = None) -> None:
    """Makes `import apex` and `from apex import amp` work: halfstep supplies the modules.

    If apex itself is installed, only missing modules and names are added. `low` is fp16 or bf16; None means fp16, as in
    apex. At O1, `low` is the format in which allowed ops run. At O2 and O3 it is the format of the weights, unless a
    script passes `cast_model_type`. Each call first calls `uninstall`, which removes what an earlier call added and
    closes the open sessions.

    Raises:
        FormatError: the format is unknown.
        PlanError: the format is neither fp16 nor bf16.
    """
    fmt = FP16 if low is None else as_format(low, LOW_FORMATS)
    one_of("low, the format of the stand-in for apex,", fmt.name, tuple(each.name for each in LOW_FORMATS))
    uninstall()
    STATE._low = fmt.dtype
    made: set[str] = set()
    for name, files in MODULES.items():
        ours = [importlib.import_module(f"{_HERE}.{file}") for file in files]
        _put(name, {each: getattr(module, each) for module in ours for each in module.__all__}, made)


def sessions() -> list[Session]:
    """Returns the sessions that calls of `amp.initialize` opened and that are still open."""
    return [trained.session for trained in STATE.sessions()]


def uninstall() -> None:
    """Removes what `install` added, and closes the sessions of `amp.initialize`; models keep their trained weights."""
    _UNDO.close()
    STATE.reset()


def _put(name: str, names: dict[str, Any], made: set[str]) -> None:
    """Adds `names`, a dict of names and values, to the module `name`."""
    parent, _, leaf = name.rpartition(".")
    module = None
    if parent not in made:
        with suppress(Exception):  # of what cannot be imported
            module = importlib.import_module(name)
    if module is None:
        module = sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
        made.add(name)
        _UNDO.callback(_delete, sys.modules, name, module)
    for each, value in names.items():
        _add(module, each, value, made)
    if name in made:
        vars(module)["__getattr__"] = partial(gone.refuse, name)
    if parent and name not in gone.MODULES:
        _add(sys.modules[parent], leaf, module, made)  # a parent may export another thing of that name, which stays


def _add(module: ModuleType, name: str, value: Any, made: set[str]) -> None:
    if not hasattr(module, name):
        setattr(module, name, value)
        if module.__name__ not in made:  # what was made keeps its names for whoever has imported it
            _UNDO.callback(_delete, vars(module), name, value)


def _delete(held: dict[str, Any], name: str, value: Any) -> None:
    if held.get(name) is value:  # else the script has put its own in place
        del held[name]
