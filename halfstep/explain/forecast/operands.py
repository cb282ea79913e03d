"""Predicts what the scaled casts of recipes of 8 and 4 bits lose, from the operands that linear layers have in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from halfstep.explain.tape.locator import Locator
from halfstep.formats import FP32
from halfstep.plan.matching import first_device, unwrap
from halfstep.plan.plan import Plan
from halfstep.plan.products import check_some_products
from halfstep.plan.resolve import resolve
from halfstep.records import Finding, Foreseen
from halfstep.torch_internals import without_modes
from halfstep.train.cast.narrow import (
    OPERANDS,
    PRODUCTS,
    READERS,
    How,
    Layers,
    Operands,
    fits,
    rows_of,
)
from halfstep.train.cast.recipes import RECIPES, Product, Rounded, multiply, rotated
from halfstep.train.probe.hooks import readable

_CALLS: Mapping[Any, Callable[..., Any]] = {
    getattr(at, name): read
    for name, read in {**READERS, "__matmul__": READERS["matmul"]}.items()
    for at in (torch, Tensor, functional)
    if hasattr(at, name)
}
_ATTENTION = functional.multi_head_attention_forward
_NAMES = ("input", "weight", "bias", "mat1", "mat2", "other")  # of their arguments, in order


Quietly = Callable[..., None]
"""Calls a function with a tensor while nothing looks at what is computed."""


class Recast:
    """What the casts of a plan's recipe do to the operands of the layers that multiply by it, summed on the device."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        assignment = resolve(plan, model)
        check_some_products(assignment)
        each = zip(assignment.names(), unwrap(model).modules(), assignment.modules, strict=True)
        own = {name: (module, f.param) for name, module, f in each if f.products == plan.products}
        layers = zip(assignment.names(), assignment.modules, strict=True)
        self._recipes = {name: f.products == plan.products for name, f in layers if f.products is not None}
        self.recipe, self._plan, device = plan.products, plan, first_device([model])
        self._how = How(self.recipe, "fp32")
        self._low = [param is not None and param is not FP32 for _, param in own.values()]  # whose weights are
        self._own = {name: module for name, (module, _) in own.items()}
        self._layers = Layers(self._own.items(), device)
        # Of each layer and product the squares of both operands and of the result, and those of their errors.
        self._squares = torch.zeros((len(own), len(PRODUCTS), 3, 2), dtype=torch.float64, device=device)

    def runs(self, module: str | None) -> bool:
        """Tells whether the forward of a module multiplies by the recipe."""
        while module and module not in self._recipes:
            module = module.rpartition(".")[0]
        return module is not None and self._recipes.get(module, False)

    def look(
        self, module: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, quietly: Quietly
    ) -> None:
        """Rounds the operands of a call in `module` if a layer makes it, and those of its gradients when these come."""
        plain = all(readable(t) is t for t in (x, weight))
        found = plain and fits(RECIPES[self.recipe].multiple, x, weight, bias)
        number = self._layers.find(weight, self._own.get(module or "")) if found else None
        if number is None:
            return
        rows, w, needed = rows_of(x.detach()), weight.detach(), (x.requires_grad, weight.requires_grad)
        w = w.bfloat16() if self._low[number] else w
        held = partial(self._layers.weight, number, self._how, keep=torch.is_grad_enabled())
        self._add(number, "output", rows, w, held("output", weight, w))

        def look_back(grad: Tensor) -> None:
            g = rows_of(grad).bfloat16()  # as the result is
            if needed[0]:
                self._add(number, "grad_input", g, w.t(), held("grad_input", weight, w.t()))
            if needed[1]:
                self._add(number, "grad_weight", g.t(), rows.t())

        if out.requires_grad:
            out.register_hook(partial(quietly, look_back))  # type: ignore[no-untyped-call]

    def _add(self, number: int, product: Product, a: Tensor, b: Tensor, held: Operands | None = None) -> None:
        (left,) = self._layers.round(number, self._how, [(product, "a")], a)
        right = held or self._layers.round(number, self._how, [(product, "b")], b)[0]
        assert isinstance(left, Rounded)
        assert isinstance(right, Rounded)
        at = self._squares[number, PRODUCTS.index(product)]
        turn = rotated if RECIPES[self.recipe].casts[product, "a"].rotated else Tensor.float
        a, b = (turn(pad(t, (0, -t.shape[1] % RECIPES[self.recipe].multiple))) for t in (a, b))
        pairs = (left.values, a), (right.values, b), (multiply(left, right, units="fp32").float(), a @ b.t())
        for sums, (found, exact) in zip(at, pairs, strict=True):
            sums += torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in (exact, found - exact)]) ** 2

    def end_step(self) -> None:
        """Counts the step, and drops the rounded weights."""
        self._layers.step += 1
        self._layers.weights_changed()

    def read(self) -> tuple[list[Foreseen], tuple[Finding, ...]]:
        """Returns what is lost, and findings on the layers that lose much; waits for the device."""
        off = [
            [[math.sqrt(noise / signal) if signal else 0.0 for signal, noise in three] for three in products]
            for products in self._squares.tolist()
        ]
        found: list[Foreseen] = []
        for loss in self._layers.losses():
            layer, product = self._layers.names.index(loss.layer), PRODUCTS.index(cast(Product, loss.product))
            shares = off[layer][product]
            found.append(Foreseen(self.recipe, loss, shares[OPERANDS[loss.product].index(loss.operand)], shares[2]))
        return found, tuple(self._layers.findings(self._plan))


class CallsSeen(TorchFunctionMode):
    """A mode that passes each call of a linear layer's product to `recasts`, and its gradients until `end_step`."""

    def __init__(self, recasts: Sequence[Recast], model: nn.Module) -> None:
        super().__init__()
        self._recasts = recasts
        self._locator = Locator([model])
        self._on = True

    def end_step(self) -> None:
        """Looks at no further gradients, and ends the step of what looked."""
        self._on = False
        for recast in self._recasts:
            recast.end_step()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function, and passes on what it was given if it is such a product."""
        named = {} if kwargs is None else kwargs
        if func is _ATTENTION:  # inside of which torch passes no call on
            linear = functional.linear
            functional.linear = lambda *given, **options: self.__torch_function__(linear, (), given, options)
            try:
                return func(*args, **named)
            finally:
                functional.linear = linear
        result = func(*args, **named)
        read = _CALLS.get(func) if self._on and "out" not in named else None
        if read is not None:
            rest = {name: value for name, value in named.items() if name not in _NAMES}
            given = read(*args, *(named[name] for name in _NAMES if name in named), **rest)
            module = None if given is None else self._locator.here().module
            for recast in self._recasts:
                if recast.runs(module):
                    self._quietly(partial(recast.look, module), *given, result, self._quietly)
        return result

    def _quietly(self, look: Callable[..., None], *given: Any) -> None:
        """Looks, unless the step has ended, and meanwhile at nothing that this computes; nor does a mode."""
        if self._on:
            self._on = False
            with without_modes(), torch.autocast(given[0].device.type, enabled=False):
                look(*given)
            self._on = True
