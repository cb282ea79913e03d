"""Says once what a training loop does wrong with gradients that carry the loss scale."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.nn import Parameter

from halfstep.torch_internals import hooks_of, post_accumulate_hooks_of
from halfstep.train.scale.accumulator import Collected

_LOG = logging.getLogger("halfstep")
_LIMITS = ("clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_", "clip_grad_norm_", "clip_grad_value_")
_INSTEAD = "Clip by session.step(max_norm=...), or call session.unscale_() before your code limits gradients"
_HOOK = (
    "a hook on the gradient of %s calls %s, but gradients carry the loss scale in the backward pass: scaled values are "
    f"limited, and updates become too small. Remove the hook. {_INSTEAD}"
)
_CHANGE = (
    "the gradient of %s was changed between session.backward and session.step, while it carried the loss scale: a "
    "limit, as of clip_grad_norm_, then acts on scaled values, and what a plain loss.backward() adds is too small (a "
    f"mask or a factor is harmless). {_INSTEAD}, and pass each loss to session.backward"
)


class Habits:
    """Looks once at the hooks of all parameters, and at each step whether other code has changed a scaled gradient."""

    def __init__(self, name_of: Callable[[Parameter], str]) -> None:
        self._name_of = name_of
        self._knows_hooks = self._knows_changes = False

    def look_at_hooks(self, params: Iterable[Parameter]) -> None:
        """Warns of a hook that limits gradients, at the first backward pass."""
        if not self._knows_hooks:
            self._knows_hooks = True
            limits = ((self._name_of(p), name) for p in params for name in _names_in_hooks(p) if name in _LIMITS)
            for limit in islice(limits, 1):
                _LOG.warning(_HOOK, *limit)

    def look_at_changes(self, held: Iterable[Collected]) -> None:
        """Warns of the first gradient that has changed since the backward pass that left it scaled."""
        for p in [each.changed for each in held if each.changed is not None and not self._knows_changes][:1]:
            self._knows_changes = True
            _LOG.warning(_CHANGE, self._name_of(p))


def _names_in_hooks(p: Parameter) -> Iterator[str]:
    """Yields the names that the code of a parameter's hooks uses; of a builtin its own name."""
    for hook in (*(hooks_of(p) or {}).values(), *(post_accumulate_hooks_of(p) or {}).values()):
        function: Any = getattr(hook, "func", hook)  # of a functools.partial
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        yield from (getattr(function, "__name__", ""),) if code is None else code.co_names
