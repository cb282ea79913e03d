"""Finds custom backwards (`torch.autograd.Function`), which can bring in numbers that no recorded op computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep.observe.locator import storage_of
from halfstep.torch_internals import is_users_function, leaf_of, running_node, saved_by, sequence_number, without_modes


class Customs:
    """Finds the custom autograd node, if any, from which the running node of a backward pass got its gradient."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[str, int]] = {}

    def know(self, root: Any) -> None:
        """Registers the graph below `root`, the first node of a backward pass."""
        seen, waiting = {_key(root)}, [root]
        while waiting:
            node: Any = waiting.pop()
            following = [each for each, _ in node.next_functions if each is not None]
            if is_users_function(node):
                name = str(node.name()).removesuffix("Backward")
                self._before.update((_key(each), (name, sequence_number(node))) for each in following)
            waiting += [each for each in following if _key(each) not in seen]
            seen.update(map(_key, following))

    def before_running(self) -> tuple[str, int] | None:
        """Returns (name, sequence number) of the custom node that the running node got its gradient from, or None."""
        return self._before.get(_key(running_node()))


def is_brought_in(tensor: Tensor) -> bool:
    """Tells whether the running node of a backward pass reads a tensor that it did not save in the forward pass."""
    node = running_node()
    with without_modes():
        saved = None if node is None else saved_by(node)
        return saved is not None and storage_of(tensor) not in {storage_of(each) for each in saved}


def _key(node: Any) -> tuple[int, int]:
    leaf = leaf_of(node)
    return (sequence_number(node), 0) if leaf is None else (0, id(leaf))
