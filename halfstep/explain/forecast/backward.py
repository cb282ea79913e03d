"""Watches products and gradients; predicts what low formats and recipes of 8 and 4 bits would lose of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from halfstep.explain.diagnose.rehearsal import compute_loss
from halfstep.explain.tape.locator import Locator
from halfstep.formats import FP32, TF32, Format, round_nearest, saturate
from halfstep.modes import OpMode, run_uncompiled
from halfstep.plan.compatibility import check_some_products
from halfstep.plan.matching import first_device, uncompiled, unwrap
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import resolve
from halfstep.records import Finding, Foreseen
from halfstep.torch_internals import (
    NO_BACKWARD,
    backward_task,
    next_sequence_number,
    running_node,
    schema_of,
    sequence_number,
    tree_map_only,
    version_of,
    without_modes,
)
from halfstep.train.cast.narrow import (
    OPERANDS,
    READERS,
    How,
    Layers,
    Operands,
    fits,
    rows_of,
)
from halfstep.train.cast.narrow import (
    PRODUCTS as OF_LAYERS,
)
from halfstep.train.cast.products import PRODUCTS
from halfstep.train.cast.recipes import RECIPES, Product, Rounded, multiply, rotated
from halfstep.train.probe.hooks import dense, readable, tensors_in
from halfstep.train.probe.rows import owned
from halfstep.train.scale.loss import graph_nodes

_PRODUCTS = {schema_of(op).name for op in PRODUCTS}  # names on every device; attention is matched by the prefix below
_ATTENTION = "aten::_scaled_dot_product"


class TensorName(NamedTuple):
    """Identifies a tensor: its module's dotted name, one of `records.TENSOR_KINDS`, and its name within that kind."""

    module: str
    kind: str
    name: str


See = Callable[[TensorName, Tensor], Tensor | None]
"""Called with each tensor; if it returns one for an `activation_grad`, the backward pass continues with that."""


def step(model: nn.Module, closure: Callable[[], Any], see: See, *, backward: Callable[[Tensor], None]) -> Tensor:
    """Runs the closure, then `backward(loss)`; passes every tensor to `see` and returns the detached loss."""
    with watching(model, see):
        loss = compute_loss(closure, list(model.parameters()))
        backward(loss)
    show_weight_grads(model, see)
    return loss.detach()


@contextmanager
def watching(model: nn.Module, see: See) -> Iterator[None]:
    """Passes to `see` the weights at once, then each module's output and, in the backward pass, its gradient."""
    # Compiled code runs eagerly meanwhile, because torch.compile would leave out the hooks.
    for place, parameter in parameters(model):
        see(place, parameter.detach())
    seen: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
    with ExitStack() as undo:
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(_hook(uncompiled(name), see, seen, undo)).remove)
        undo.callback(run_uncompiled())
        yield


def show_weight_grads(model: nn.Module, see: See) -> None:
    """Passes the gradients that the parameters hold to `see`."""
    for place, parameter in parameters(model):
        if parameter.grad is not None:
            see(place._replace(kind="weight_grad"), dense(parameter.grad))


def _hook(
    module: str, see: See, seen: WeakValueDictionary[tuple[int, int], Tensor], undo: ExitStack
) -> Callable[..., None]:
    def look(_: nn.Module, args: Any, output: Any) -> None:
        again = backward_task() != NO_BACKWARD
        for name, leaf in tensors_in(output):
            if not leaf.is_floating_point():
                continue
            version = 0 if leaf.is_inference() else version_of(leaf)  # in-place modules return what they got
            if seen.get((id(leaf), version)) is leaf:
                continue
            seen[id(leaf), version] = leaf
            if not again:
                see(TensorName(module, "activation", name), leaf.detach())
            if leaf.requires_grad:
                place = TensorName(module, "activation_grad", name)
                handle = leaf.register_hook(  # type: ignore[no-untyped-call]
                    lambda g, place=place: see(place, g.detach()) if g.layout is torch.strided else None
                )
                undo.callback(handle.remove)

    return look


def parameters(model: nn.Module) -> Iterator[tuple[TensorName, nn.Parameter]]:
    """Yields each floating-point parameter once, with the first module that has it."""
    for parameter, module, name in owned(dict(model.named_modules())).values():
        if parameter.is_floating_point():
            yield TensorName(uncompiled(module), "weight", name), parameter


@dataclass(frozen=True)
class Nodes:
    """The autograd nodes that a forward made, as ranges of their sequence numbers."""

    model: list[range] = field(default_factory=list)  # of the whole model
    full: list[range] = field(default_factory=list)  # of modules that compute full, and of recurrent layers


@contextmanager
def noting_nodes(model: nn.Module, full: Collection[str]) -> Iterator[Nodes]:
    """Yields the nodes that forwards inside the `with` make; `full` names the modules that compute full."""
    # Meanwhile recurrent layers compute step by step, because oneDNN's kernel is one operation for all steps.
    nodes = Nodes()
    layers = [module for module in model.modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))]
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if module in layers or uncompiled(name) in full:
                _note(module, nodes.full, undo)
        _note(model, nodes.model, undo)
        if layers and all(p.device.type == "cpu" for layer in layers for p in layer.parameters()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of its own TF32 switch here
                undo.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield nodes


def _note(module: nn.Module, into: list[range], undo: ExitStack) -> None:
    starts: list[int] = []
    undo.callback(
        module.register_forward_pre_hook(lambda *_: starts.append(next_sequence_number()), prepend=True).remove
    )
    undo.callback(
        module.register_forward_hook(lambda *_: into.append(range(starts.pop(), next_sequence_number()))).remove
    )


@contextmanager
def watching_gradients(loss: Tensor, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Passes to `see` each gradient that reaches an autograd node of the loss in a backward pass inside the `with`."""

    def show(grads: Sequence[Tensor | None]) -> None:
        for grad in grads:
            if grad is not None and grad.layout is torch.strided:
                see(grad.detach())

    with ExitStack() as undo:
        for node in graph_nodes([loss]):
            undo.callback(node.register_prehook(show).remove)
        yield


class ProductsSeen(OpMode):
    """A mode that calls `see(name, result)` for each fp32 product, with the name of the module that computes it."""

    def __init__(self, model: nn.Module, see: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._locator = Locator([model])
        self._see = see

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.compute(func, args, kwargs)
        if _is_product(func) and schema_of(func).name != "aten::baddbmm":  # baddbmm may have added a mask
            module = self._locator.here().module
            if module is not None and isinstance(result, Tensor) and result.dtype is torch.float32:
                self._see(module, result.detach())
        return result


def _is_product(func: Any) -> bool:
    name: str = schema_of(func).name
    return name in _PRODUCTS or name.startswith(_ATTENTION)


class RoundedBackward(OpMode):
    """A mode that rounds products of the backward pass to a format, except in recurrent layers, which compute full."""

    def __init__(self, nodes: Nodes, fmt: Format) -> None:
        super().__init__()
        self.fmt = fmt
        self._nodes = nodes

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.compute(func, args, kwargs)
        node = running_node()
        if node is None or not _is_product(func):
            return result
        number = sequence_number(node)
        if any(number in each for each in self._nodes.full) or not any(number in each for each in self._nodes.model):
            return result
        return tree_map_only(Tensor, lambda t: self._round(func, t), result)

    def _round(self, func: Any, t: Tensor) -> Tensor:
        if t.dtype is not torch.float32:
            return t
        if any(returned.alias_info is not None for returned in schema_of(func).returns):
            return t.copy_(rounded(t, self.fmt)) if schema_of(func).is_mutable else t
        return rounded(t, self.fmt)


def rounded(values: Tensor, fmt: Format) -> Tensor:
    """Returns an fp32 tensor as `round_nearest` rounds it, by torch's own cast, which is many times faster."""
    if fmt is TF32:  # no dtype is TF32
        return round_nearest(values, fmt)
    if not fmt.has_inf:  # else some releases turn values beyond the format into NaN
        values = saturate(values, fmt)
    return values.to(fmt.dtype).float()


# ---- what the casts of recipes of 8 and 4 bits lose of the operands that linear layers have in fp32
_CALLS: Mapping[Any, Callable[..., Any]] = {
    getattr(at, name): read
    for name, read in {**READERS, "__matmul__": READERS["matmul"]}.items()
    for at in (torch, Tensor, functional)
    if hasattr(at, name)
}
_ATTENTION_FUNCTION = functional.multi_head_attention_forward
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
        self._squares = torch.zeros((len(own), len(OF_LAYERS), 3, 2), dtype=torch.float64, device=device)

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
        at = self._squares[number, OF_LAYERS.index(product)]
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
            layer, product = self._layers.names.index(loss.layer), OF_LAYERS.index(cast(Product, loss.product))
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
        if func is _ATTENTION_FUNCTION:  # inside of which torch passes no call on
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
