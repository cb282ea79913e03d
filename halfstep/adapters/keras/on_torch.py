"""The torch backend of Keras, on which `blame` finds the operation that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfstep.adapters.keras.backend import Backend, Run, keras
from halfstep.adapters.keras.modules import seen_as_modules
from halfstep.errors import HalfstepError
from halfstep.explain.diagnose.blame import blame
from halfstep.initialize import initialize
from halfstep.records import Verdict


class _Torch(Backend):
    @torch.no_grad()
    def apply_where_finite(
        self, optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]
    ) -> None:
        super().apply_where_finite(optimizer, found, grads, norm, variables)

    def gradients(self, run: Run, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        tapped: list[torch.Tensor] = []

        def tap(tensor: torch.Tensor) -> torch.Tensor:
            tapped.append(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().clone().requires_grad_())
            return tapped[-1]

        with torch.enable_grad():
            with keras.StatelessScope(collect_losses=True):
                loss = run(tap)
            found = torch.autograd.grad(loss, [*tapped, *(v.value for v in variables)], allow_unused=True)
        return list(found[: len(tapped)]), list(found[len(tapped) :])

    def hand_out_batches(self, model: Any, take: Callable[[Any], None]) -> None:
        step = model.train_function

        def train_function(data: Any) -> Any:
            batches = list(data)
            take(batches[-1])
            return step(batches)

        model.train_function = train_function

    def blame_step(self, model: Any, loss: Callable[[], Any]) -> Verdict | None:
        try:
            with seen_as_modules(model), initialize(model, plan="O0") as session:
                return blame(session, loss)
        except HalfstepError:
            return None


HERE = _Torch()
