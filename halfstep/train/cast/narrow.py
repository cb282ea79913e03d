"""Linear layers whose products run by a recipe of 8 or 4 bits, as operations that torch.compile traces.

Each of a layer's three products rounds its operands along the dimension that it sums over, from the tensors as they
came. The operations here are opaque to torch: below them no cast of a plan, no gradient and no compiler acts. They find
the layer by its weight, for what is held and counted of it: by the memory of the weight, since compiled code passes no
names, and FSDP2 puts other tensors in the place of parameters.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from halfstep.edits import Policy, Rule, spell
from halfstep.errors import OpError
from halfstep.formats import CASTABLE
from halfstep.later import Later
from halfstep.plan.plan import Plan
from halfstep.records import OPERAND, Finding, Observation, ProductLoss, TensorStats
from halfstep.sharded import is_sharded
from halfstep.torch_internals import (
    StorageWeakRef,
    group_named,
    jagged_of,
    parameters_of,
    storage_identity,
    transforms_differentiate,
    uncompiled,
    version_of,
    viewed,
)
from halfstep.train.cast.opkernels import Act, OpSite
from halfstep.train.cast.recipes import (
    RECIPES,
    Coded,
    Operand,
    Product,
    Rounded,
    Units,
    code_operand,
    multiply,
    multiply_coded,
    round_operand,
)
from halfstep.train.processes.shards import Part, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Place = tuple[Product, Operand]
Operands = Rounded | Coded
TELLS = 0.02  # of an operand: a layer that lost more is told when the session ends
MULTIPLIES = "mps"
"""The device type whose autocast bit is on in a layer that multiplies by a recipe; plans with op tables refuse it."""
PRODUCTS: tuple[Product, ...] = ("output", "grad_input", "grad_weight")
OPERANDS = {"output": ("input", "weight"), "grad_input": ("gradient", "weight"), "grad_weight": ("gradient", "input")}
# By the features of a layer that tensor parallelism splits, the dimension that this splits of each operand: 0 for rows,
# 1 for what the product sums over.
SPLITS: dict[str, dict[Place, int]] = {
    "": {},
    "out": {("output", "b"): 0, ("grad_input", "a"): 1, ("grad_input", "b"): 1, ("grad_weight", "a"): 0},
    "in": {("output", "a"): 1, ("output", "b"): 1, ("grad_input", "b"): 0, ("grad_weight", "b"): 0},
}
SPLIT = (
    "products={recipe!r} in tensor parallel layers needs ColwiseParallel or RowwiseParallel on a mesh of one "
    "dimension, and in each process a multiple of {step} rows or columns of the weight; here a weight of {shape} is "
    "{placed}, and its input {given}. Keep such layers in the low format with Rule(name, Policy('low', 'low', 'low', "
    "products='low')), or leave products out"
)
TWICE = (
    "products in 8 or 4 bits have gradients, but no gradients of gradients: keep layers that a penalty goes through in "
    "the low format with Rule(name, Policy(param, 'low', 'low', products='low')), or leave products out"
)

FUNCTIONAL = (
    "products in 8 or 4 bits have no derivatives by torch.func (grad, vjp, jvp): use session.backward, keep the layers "
    "in the low format with Rule(name, Policy(param, 'low', 'low', products='low')), or leave products out"
)

NESTED = (
    "layers that multiply in 8 or 4 bits take nested tensors whose rows are jagged in dimension 1: pass "
    "torch.nested.nested_tensor(parts, layout=torch.jagged), or keep the layer in the low format with "
    "Rule(name, Policy(param, 'low', 'low', products='low'))"
)


class How(NamedTuple):
    """How a layer multiplies: by a recipe, in units, and what tensor parallelism splits: features, and the group."""

    recipe: str
    units: Units
    split: str = ""

    def part(self, place: Place) -> Part | None:
        """Returns which part of an operand this process has; None if it has all."""
        features, _, group = self.split.partition(" ")
        dim = SPLITS[features].get(place)
        return None if dim is None else Part(group_named(group), dim)


class Layers:
    """The layers of one session that multiply by a recipe: their rounded weights until the next step, and counts.

    `counts` (layers, products, operands, 3) are those of `round_operand`, on the device; `seen` the number of elements.
    `step` seeds random bits: the number of steps made, on the device, so that replays of a CUDA graph count theirs.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        named = dict(layers)
        self.names, self._modules = tuple(named), list(named.values())
        self.counts = torch.zeros((len(named), len(PRODUCTS), 2, 3), dtype=torch.int64, device=device)
        self.seen: Counter[tuple[int, int, int]] = Counter()
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        # What the others multiply by is made for a forward: a rounded copy that stays would undo the sharding.
        self._whole = [not any(map(is_sharded, each.parameters(recurse=False))) for each in self._modules]
        self._held: dict[tuple[Any, Product], tuple[int, Any, Operands]] = {}  # by a weight's memory and its form
        self._both: set[int] = set()  # layers whose inputs need gradients
        # By a weight's memory, with its size; 0: it is computed; -1: it is a part of one, or no layer's.
        self._at: dict[tuple[int, int], tuple[int | None, Any, int]] = {}

    def find(self, weight: Tensor, within: nn.Module | None = None) -> int | None:
        """Returns the number of the layer that has a weight, or uses it if it is `within` one; None if none does.

        A parameter that no layer has is that of a copy.
        """
        key = _memory(weight)
        found = self._at.get(key)
        if found is None or found[1].expired():
            self._held = {of: each for of, each in self._held.items() if not each[1].expired()}
            held = {at: each for at, each in self._at.items() if not each[1].expired()}  # the backward pass reads them
            self._at = held | {
                _memory(own): (number, StorageWeakRef(own.untyped_storage()), own.numel())  # type: ignore[no-untyped-call]
                for number, module in enumerate(self._modules)
                for each in (module, *module.children())
                for p in parameters_of(each).values()
                if p is not None and p.dim() == 2
                for own in [local(p)]
            }
            found = self._at.get(key)
            if found is None:
                memory, number = StorageWeakRef(weight.untyped_storage()), None  # type: ignore[no-untyped-call]
                for (storage, start), each in self._at.items():
                    if storage == key[0] and start <= key[1] < start + each[2]:  # a part of a weight
                        number = each[0]
                self._at[key] = found = number, memory, -1
        within = within or HERE.layer
        if found[0] is None and within in self._modules and not isinstance(viewed(weight), nn.Parameter):
            self._at[key] = found = self._modules.index(within), found[1], 0
        return found[0]

    def knows(self, weight: Tensor) -> bool:
        """Tells whether `find` had this weight before, so that sessions do not look through all of their layers."""
        return self._at.get(_memory(weight), (None,))[0] is not None

    def losses(self) -> tuple[ProductLoss, ...]:
        """Returns what was lost so far; waits for the device."""
        return self._losses(self.counts.tolist(), self.seen)

    def _losses(self, counts: list[Any], seen: Counter[tuple[int, int, int]]) -> tuple[ProductLoss, ...]:
        return tuple(
            ProductLoss(self.names[i], PRODUCTS[j], OPERANDS[PRODUCTS[j]][k], seen[i, j, k], *counts[i][j][k])
            for i, j, k in sorted(+seen)  # that are not 0
        )

    def watched(self, modules: Container[str]) -> Callable[[int], Callable[[], list[Observation]]]:
        """Counts from now on; the result, called with a step, copies that to the host, and what it returns reads it."""
        counts, seen = self.counts.clone(), self.seen.copy()

        def end(step: int) -> Callable[[], list[Observation]]:
            later, before, after = Later([self.counts - counts]), seen, self.seen.copy()

            def read() -> list[Observation]:
                lost = self._losses(later.read()[0].tolist(), after - before)
                named = ((each, f"{each.product}.{each.operand}") for each in lost if each.layer in modules)
                return [
                    Observation(step, each.layer, OPERAND, name, "fp32", 1.0, TensorStats.of_operand(each))
                    for each, name in named
                ]

            return read

        return end

    def findings(self, plan: Plan) -> Iterator[Finding]:
        """Yields a warning for each of the layers that lost most, if they lost much; waits for the device."""
        losses = sorted(self.losses(), key=lambda each: each.flushed + each.saturated, reverse=True)
        for each in {each.layer: each for each in reversed(losses) if each.share > TELLS}.values():
            rule = Rule(each.layer, Policy(plan.param, "low", "low", products="low"))
            other = "" if plan.products != "fp8" else ", or take products='fp8-row', which has a scale for each row"
            advice = f"if the loss is worse than without products: {spell((rule,))}{other}"
            yield Finding("warning", "products lost", each.layer, f"{plan.products}: {each}", advice, (rule,))

    def weights_changed(self) -> None:
        """Drops the rounded weights, and which memory is no layer's: it may become one's."""
        self._held.clear()
        self._at = {at: each for at, each in self._at.items() if each[0] is not None}

    def round(self, number: int, how: How, places: Sequence[Place], x: Tensor) -> list[Operands]:
        """Rounds an operand of a layer's product, and for a second place its transpose, and counts what that loses."""
        recipe, counts, parts = RECIPES[how.recipe], [], [how.part(place) for place in places]
        for place, (size, summed) in zip(places, (x.shape, x.shape[::-1]), strict=False):
            at = number, PRODUCTS.index(place[0]), "ab".index(place[1])
            filled_up = -summed % recipe.multiple if recipe.casts[place].rotated else 0  # rotated values, not zeros
            self.seen[at] += size * (summed + filled_up)
            counts.append(self.counts[at])
        multiple = recipe.multiple
        if how.units == "own":
            return list(code_operand(x, recipe.casts[places[0]], multiple=multiple, counts=counts, parts=parts))
        rounded: list[Operands] = []
        for place, each, lost, part in zip(places, (x, x.t()), counts, parts, strict=False):
            cast, short = recipe.casts[place], -each.shape[1] % multiple
            filled = pad(each, (0, short)) if short else each  # what a product sums over
            seed = self.step * 8192 + (number * 4 + PRODUCTS.index(place[0])) if cast.stochastic else None
            rounded.append(round_operand(filled, cast, counts=lost, seed=seed, part=part))
        return rounded

    def weight(self, number: int, how: How, product: Product, weight: Tensor, w: Tensor, *, keep: bool) -> Operands:
        """Returns `w`, a layer's `weight` as an operand, rounded; with `keep` this is done once until it changes."""
        own: Place = (product, "b")
        memory = _memory(weight)
        size = self._at[memory][2] if memory in self._at else -1
        passing = size == 0 or (size != weight.numel() and not weight.requires_grad)  # others each time
        if not keep or passing or not self._whole[number] or weight.is_inference():
            return self.round(number, how, [own], w)[0]
        form, version = (*memory, weight.shape, weight.stride()), version_of(weight)
        held = self._held.get((form, product))
        if held is None or held[0] != version:
            places = [own]
            if product == "grad_input":
                self._both.add(number)
            elif how.units == "own" and number in self._both:  # one read of the weight for both
                places.append(("grad_input", "b"))
            rounded = self.round(number, how, places, w)
            kept = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]  # nothing else gets it
            self._held |= {(form, place[0]): (version, kept, r) for place, r in zip(places, rounded, strict=True)}
            return rounded[0]
        return held[2]


class _Here(threading.local):
    layer: nn.Module | None = None  # whose forward the thread runs


HERE = _Here()


def _memory(weight: Tensor) -> tuple[int, int]:
    return storage_identity(weight.untyped_storage()), int(weight.storage_offset())


Find = Callable[[Tensor], tuple[Layers, int] | None]


def define_products(find: Find) -> torch.library.Library:
    """Returns a library with the operations of such layers; `find` returns the session's layers and a weight's."""
    library = torch.library.Library("halfstep", "FRAGMENT")  # type: ignore[no-untyped-call]

    def layer_of(w: Tensor) -> tuple[Layers, int]:
        return find(w) or (Layers([("", nn.Module())], w.device), 0)  # which counts for nobody

    def output(x: Tensor, w: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        (layers, number), how, keep = layer_of(w), How(*given[:-1]), given[-1]
        a = layers.round(number, how, [("output", "a")], rows_of(x))[0]
        b = layers.weight(number, how, "output", w, w, keep=keep)
        low = None if bias is None else bias.bfloat16()
        # As `data` it is no view, which code could not write into.
        return _multiply(a, b, how, "output", low).view(*x.shape[:-1], w.shape[0]).data

    def gradients(g: Tensor, x: Tensor | None, w: Tensor, needs_x: bool, *given: Any) -> tuple[Tensor, Tensor]:
        (layers, number), how, keep = layer_of(w), How(*given[:-1]), given[-1]
        gx = gw = g.new_empty(0, dtype=torch.bfloat16)
        both: list[Place] = [("grad_input", "a"), ("grad_weight", "a")]
        rows = rows_of(g)
        rounded = layers.round(number, how, both[not needs_x : 1 + (x is not None)], rows if needs_x else rows.t())
        if needs_x:
            b = layers.weight(number, how, "grad_input", w, w.t(), keep=keep)
            gx = _multiply(rounded[0], b, how, "grad_input").view(*g.shape[:-1], w.shape[1])
        if x is not None:
            b = layers.round(number, how, [("grad_weight", "b")], rows_of(x).t())[0]
            gw = _multiply(rounded[-1], b, how, "grad_weight")
        return gx, gw

    how = "str recipe, str units, str split, bool keep)"  # blame says the names of arguments and results
    for name, arguments, run, fake in (
        (
            "linear",
            f"Tensor input, Tensor weight, Tensor? bias, {how} -> Tensor output",
            output,
            lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0]), dtype=torch.bfloat16),
        ),
        (
            "linear_backward",
            f"Tensor gradient, Tensor? input, Tensor weight, bool needs_x, {how} -> "
            "(Tensor grad_input, Tensor grad_weight)",
            gradients,
            _fake_gradients,
        ),
    ):
        library.define(f"{name}({arguments}")  # type: ignore[no-untyped-call]
        library.impl(name, uncompiled(_without_autocast(run)), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"halfstep::{name}", fake, lib=library)
        backward, setup = (_backward, _save) if name == "linear" else (_refuse, None)
        torch.library.register_autograd(f"halfstep::{name}", backward, setup_context=setup, lib=library)
    return library


def rows_of(x: Tensor) -> Tensor:
    """Returns an operand that is summed over its last dimension as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def call(x: Tensor, *rest: Any) -> Any:
        kind = x.device.type
        was_on = torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, False)
        try:
            return run(x, *rest)
        finally:
            torch.set_autocast_enabled(kind, was_on)

    return call


def _multiply(a: Any, b: Any, how: How, product: Product, bias: Tensor | None = None) -> Tensor:
    """Multiplies, and adds up in fp32 what the processes have that share what a product sums over; then rounds."""
    part = how.part((product, "a"))
    group = part.group if part is not None and part.dim == 1 else None
    added = bias if group is None else None
    if isinstance(a, Coded):
        out = multiply_coded(a, b, bias=added, fast=product == "output")
    else:
        out = multiply(a, b, units=how.units if group is None else "fp32", bias=added, wide=group is not None)
    if group is None:
        return out
    total = out.float()
    dist.all_reduce(total, group=group)
    return (total if bias is None else total + bias).bfloat16()


def _fake_gradients(g: Tensor, x: Tensor | None, w: Tensor, needs_x: bool, *_: Any) -> tuple[Tensor, Tensor]:
    shapes = (*g.shape[:-1], w.shape[1]) if needs_x else (0,), (0,) if x is None else w.shape
    first, second = (g.new_empty(shape, dtype=torch.bfloat16) for shape in shapes)
    return first, second


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, bias, *ctx.how = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
    ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (x, w), ops, needed = ctx.saved_tensors, torch.ops.halfstep, ctx.needs_input_grad
    dtypes = ctx.dtypes
    gx = gw = None
    if needed[0] or needed[1]:
        gx, gw = ops.linear_backward(g, x, w, needed[0], *ctx.how)
        gx, gw = gx.to(dtypes[0]) if needed[0] else None, gw.to(dtypes[1]) if needed[1] else None
    gb = rows_of(g).sum(0, dtype=torch.float32).to(dtypes[2]) if needed[2] else None
    return gx, gw, gb, None, None, None, None


def _refuse(*_: Any) -> None:
    raise OpError(TWICE)


def make_narrow(site: OpSite, plain: Act, recipe: str, units: Units) -> Act:
    """Returns the function that runs a call of a product by a recipe in a layer that does, and else as `plain` does."""
    read, is_on, multiple = READERS[site.name], torch.is_autocast_enabled, RECIPES[recipe].multiple

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_on(MULTIPLIES):
            given = read(*args, **kwargs)
            if given is not None and given[0].is_nested:
                return _of_jagged(act, keyset, args, kwargs)
            if given is not None and fits(multiple, *given) and all(map(site.is_here, given[:2])):
                x, w, bias = given
                if transforms_differentiate():  # of an operation like these torch gives jvp zeros
                    raise OpError(FUNCTIONAL)
                keep = torch.is_grad_enabled()  # without, code swaps weights in ways that no version counts
                if is_sharded(w):  # FSDP2 gathers its shards before
                    return _multiply_parts(x, w, bias, recipe, units, keep)
                return torch.ops.halfstep.linear(x, w, bias, recipe, units, "", keep)
        return plain(keyset, args, kwargs)

    return act


def _of_jagged(act: Act, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a product of a jagged tensor as that of all its rows, which are one matrix."""
    x, *rest = args
    rows = x.values() if x.layout is torch.jagged else x
    if rows.is_nested or rows.shape[1:] != x.shape[2:]:
        raise OpError(NESTED)
    out = act(keyset, (rows, *rest), kwargs)
    return jagged_of(out, x.offsets(), x.lengths())


def _multiply_parts(x: Tensor, w: DTensor, bias: Tensor | None, recipe: str, units: Units, keep: bool) -> Tensor:
    """Multiplies the parts that this process has of a tensor parallel layer, and of its input if that is split too."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    given: Any = (x, w, bias)
    mesh, every, last, law = w.device_mesh, Replicate(), Shard(x.dim() - 1), RECIPES[recipe]
    step = max(law.multiple, *(size or 1 for cast in law.casts.values() for size in cast.block))
    for dim, features, takes, adds, gives in ((0, "out", every, Shard(0), last), (1, "in", last, every, every)):
        placed = [(w, Shard(dim)), (x, takes), *([] if bias is None else [(bias, adds)])]
        fit = all(is_sharded(t) and t.device_mesh == mesh and t.placements == (at,) for t, at in placed)
        if fit and w.shape[dim] % (step * mesh.size()) == 0:
            own = [None if t is None else t.to_local() for t in given]
            out = torch.ops.halfstep.linear(*own, recipe, units, f"{features} {mesh.get_group().group_name}", keep)
            return DTensor.from_local(out, mesh, [gives], run_check=False)
    shape = " x ".join(map(str, w.shape))
    whole = x.placements if is_sharded(x) else "a plain tensor"
    raise OpError(SPLIT.format(recipe=recipe, step=step, shape=shape, placed=w.placements, given=whole))


def fits(multiple: int, x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Tells whether a product is one that recipes round, and not one of another kind in the same layer's code."""
    return (
        w.dim() == 2
        and all(size % multiple == 0 < size for size in w.shape)
        and all(t.dtype in CASTABLE and not t.is_nested for t in (x, w))
        and (bias is None or bias.dim() == 1)
        and x.shape[-1] == w.shape[1]
    )


def _read_product(x: Tensor, w: Tensor) -> Any:
    return (x, w.t(), None) if w.dim() == 2 and x.dim() > 1 else None


READERS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w, bias=None: (x, w, bias),
    "mm": _read_product,
    "matmul": _read_product,
    "addmm": lambda bias, x, w, *, beta=1, alpha=1: (x, w.t(), bias) if beta == alpha == 1 else None,
}
NARROW = frozenset(READERS)
"""Names of the aten operations that run by a recipe in layers."""
