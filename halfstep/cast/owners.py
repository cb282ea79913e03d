"""The session that a module belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The owner of each module; its `__dict__` is no place for that, as it is copied and pickled, at O0 by user classes."""


def mark(modules: Iterable[nn.Module], owner: object) -> Callable[[], None]:
    """Marks modules as belonging to `owner`; returns a function that removes the marks."""
    marked, sign = list(modules), weakref.ref(owner)
    _OWNERS.update((module, sign) for module in marked)

    def undo() -> None:
        for module in marked:
            if _OWNERS.get(module) is sign:
                del _OWNERS[module]

    return undo


def is_marked(module: nn.Module) -> bool:
    """Tells whether `mark` has given a module an owner; copies of the module have none."""
    return module in _OWNERS


def owners(modules: Iterable[nn.Module]) -> list[object]:
    """Returns the owners that `mark` has given to modules, each owner once."""
    signs = [sign for module in modules if (sign := _OWNERS.get(module)) is not None]
    return list({id(owner): owner for sign in signs if (owner := sign()) is not None}.values())


def all_owners() -> list[object]:
    """Returns every owner that some module has now, each once."""
    return owners(list(_OWNERS))
