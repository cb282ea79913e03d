"""Which session has a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Who has a module; not in its `__dict__`, which is copied and pickled at O0 too, where its class is the user's."""


def mark(modules: Iterable[nn.Module], owner: object) -> Callable[[], None]:
    """Marks modules as the owner's and returns the undo."""
    marked, sign = list(modules), weakref.ref(owner)
    _OWNERS.update((module, sign) for module in marked)

    def undo() -> None:
        for module in marked:
            if _OWNERS.get(module) is sign:
                del _OWNERS[module]

    return undo


def is_marked(module: nn.Module) -> bool:
    """Tells whether a module has an owner; its copies have none."""
    return module in _OWNERS


def owners(modules: Iterable[nn.Module]) -> list[object]:
    """Returns whose mark modules bear, each once."""
    signs = [sign for module in modules if (sign := _OWNERS.get(module)) is not None]
    return list({id(owner): owner for sign in signs if (owner := sign()) is not None}.values())
