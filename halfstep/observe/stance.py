"""Running compiled models uncompiled for a while, so that module hooks fire.

torch.compile traces the hooks that exist when it compiles and ignores later ones. Its stance decides for the whole
process, so this is the one place that holds state of the process: how many ask for eager code just now.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

_holders: list[object] = []
_stance = ExitStack()


def run_uncompiled() -> Callable[[], None]:
    """Makes compiled code run as it was written until the returned function is called; several may ask at a time.

    Nothing is compiled anew afterwards: what was compiled is used again.
    """
    if not _holders:
        stance = torch.compiler.set_stance("force_eager")  # takes effect at once, and remembers the stance before
        _stance.push(stance.__exit__)
    holder = object()
    _holders.append(holder)

    def release() -> None:
        if holder in _holders:
            _holders.remove(holder)
            if not _holders:
                _stance.pop_all().close()

    return release
