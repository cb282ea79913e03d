"""In which format code inside a plan reads weights: the low form of fp32 weights, and weights that FSDP2 gathered.

A frozen position table must not turn all that is computed from it into fp32, but user code that writes such a weight
(prototypes, centres: averages, which stand still in bf16) must meet the fp32 weight itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.edits import TYPE_PREFIX
from halfstep.errors import SetupError
from halfstep.formats import FP32, is_low
from halfstep.plan.levels import LEVELS
from halfstep.plan.matching import norm_kind
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import ModuleFormats
from halfstep.sharded import fsdp_modules, is_sharded
from halfstep.torch_internals import (
    is_sharding,
    own_parameter,
    parameters_of,
    policy_of,
    summed_twice,
    tree_map_only,
    without_subclasses,
)
from halfstep.train.cast.ops import Switch
from halfstep.validate import named

# torch's own forwards of these modules cast what they compute with, or return the format of their input.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CASTING = (nn.Linear, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.PReLU)
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


def read_low(module: nn.Module, formats: ModuleFormats) -> frozenset[str]:
    """Returns the names of a module's weights that its code reads low although they stay in fp32."""
    if not formats.kept or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return frozenset()
    by_torch = type(module).forward.__module__.startswith("torch.nn.modules.")
    if by_torch and (isinstance(module, _CASTING) or norm_kind(module) == "torch"):
        return frozenset()
    return frozenset(formats.kept)


class LowForm(Tensor):
    """The low form of an fp32 weight; what writes into it, or asks for its `data`, gets the weight itself."""

    weight: Tensor
    wrote: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` with the weights if it writes into one, else with their low forms."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        with without_subclasses():
            if written:
                for each in written:
                    each.wrote()
                args, kwargs = tree_map_only(LowForm, lambda each: each.weight, (tuple(args), kwargs))
                return func(*args, **kwargs)
            out = func(*args, **kwargs)
            read = args[0] if args and isinstance(args[0], LowForm) else None
            if read is None or type(out) is not Tensor:
                return out
            if out.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
                return out
            return low_form(out, func(read.weight, *args[1:], **kwargs), read.wrote)  # a view, which may be written


def low_form(low: Tensor, weight: Tensor, wrote: Callable[[], None]) -> LowForm:
    """Returns `low` as the low form of `weight`; `wrote` is called when code writes into it."""
    form: LowForm = low.as_subclass(LowForm)
    form.weight, form.wrote = weight, wrote
    return form


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[LowForm]:
    """Returns the low forms that a call would write into, or whose memory it would hand out."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")  # such as __iadd__
    if in_place or operator or func in _DATA or name == "__setitem__":
        first = args[0] if args else None
        places = first if isinstance(first, (list, tuple)) else [first]
    else:
        out = kwargs.get("out")
        places = out if isinstance(out, (list, tuple)) else [out]
    return [each for each in places if isinstance(each, LowForm)]


def attributes(base: type[nn.Module], names: frozenset[str], inside: Switch) -> dict[str, Any]:
    """Returns the attributes of a class above `base` whose instances read some weights low: a property for each."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in names and isinstance(value, nn.Parameter) and inside.is_inside():
            gate: Any = self._halfstep_gate
            if gate is not None:
                gate.written.add(name)
            value = nn.Parameter(value.detach().float(), value.requires_grad) if value.dtype is inside.low else value
        base.__setattr__(self, name, value)

    return {"__setattr__": set_attribute, **{name: _property(name, inside) for name in names}}


def _property(name: str, inside: Switch) -> property:
    def read(self: nn.Module) -> Any:
        weight = own_parameter(self, name)
        if weight is None:  # torch's own way goes on where this raises: it may be a buffer now
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not inside.is_inside():
            return weight
        gate: Any = self._halfstep_gate
        if gate is None or weight.dtype is not torch.float32 or not gate.reads_low(self, name, weight):
            return weight
        low = weight.to(inside.low)
        return (
            low if torch.compiler.is_compiling() else low_form(low, weight, functools.partial(gate.written.add, name))
        )

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(read, write, delete)


def noting_grad_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that notes on the module's gate whether gradients were on when it began."""

    @functools.wraps(forward)
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate: Any = self._halfstep_gate
        if gate is None:
            return forward(self, *args, **kwargs)
        before, gate.began_with_grad = gate.began_with_grad, torch.is_grad_enabled()
        try:
            return forward(self, *args, **kwargs)
        finally:
            gate.began_with_grad = before

    return noted


# ---- sharded models: FSDP2 gathers all weights low, the plan wants some in fp32

_LOG = logging.getLogger("halfstep")
Undo = Callable[[], None]
# Whose products cast the weights anyway: to widen them first would give the same values.
_WIDE_ANYWAY = (nn.Linear, nn.Bilinear, *CONVOLUTIONS, nn.RNNBase, nn.MultiheadAttention)


def read_as_planned(roots: Sequence[nn.Module], pairs: Iterable[tuple[nn.Module, ModuleFormats]], plan: Plan) -> Undo:
    """Casts the gathered weights of sharded modules to the plan's formats in each forward; returns how to undo it.

    Raises:
        SetupError: an `mp_policy` contradicts the plan. The hooks raise it too, if the dtype of a weight in a forward
            contradicts the plan. The message names the module or the parameter, and the line to write.
    """
    # FSDP2 gathers weights in low precision. Those that the plan stores in fp32 are cast back, with rounded values;
    # modules whose own operations would cast them again, such as nn.Linear, use the low ones. Weights that are sharded
    # but not gathered (tensor parallel) are rounded if the plan stores them low.
    fsdp = [each for each in fsdp_modules(roots) if isinstance(each, nn.Module)]
    for each in fsdp:
        _check_policy(each, plan, is_root=any(each is root for root in roots))
    gathered = {id(module): policy_of(each).param_dtype for each in fsdp for module in each.modules()}
    twice = {id(module) for each in fsdp for module in summed_twice(each)}
    rounded: list[str] = []
    with ExitStack() as stack:
        for module, formats in pairs:
            names = [name for name, p in parameters_of(module).items() if is_sharded(p)]
            if names and formats.compute is not None:
                reading = _Reading(module, formats, plan, names, gathered=id(module) in gathered)
                reading.sums_full = id(module) in twice
                stack.callback(reading.attach())
                if formats.compute is FP32 and formats.reason.startswith("rule") and is_low(gathered.get(id(module))):
                    rounded.append(formats.name)
        if rounded:
            _LOG.warning(
                "%s: a rule says fp32, but FSDP2 gathers the weights in %s, which rounds them; for exact ones call "
                'fully_shard([...], mp_policy=halfstep.fsdp_policy("O0")) with these modules before all others',
                named(rounded),
                plan.low,
            )
        return stack.pop_all().close


class _Reading:
    """Replaces weights of one module by weights in another format while its forward runs."""

    def __init__(
        self, module: nn.Module, formats: ModuleFormats, plan: Plan, names: Sequence[str], *, gathered: bool
    ) -> None:
        self._module, self._formats, self._plan = module, formats, plan
        self._names, self._gathered = names, gathered
        self._low = plan.low.dtype
        stores_full = formats.param is None or formats.param is FP32
        self._casts = formats.compute is not FP32 and isinstance(module, _WIDE_ANYWAY)  # and so reads the weights low
        self._widens = stores_full and not self._casts
        self._to = torch.float32 if self._widens else None if stores_full else self._low
        self._replaced: list[dict[str, Tensor]] = []  # by each forward that runs
        self._summed: list[nn.Parameter] = []
        self.sums_full = False  # whether gradients are made fp32, in which FSDP2 then sums them

    def attach(self) -> Undo:
        handles = [
            self._module.register_forward_pre_hook(self._before),
            self._module.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for p in self._summed:
                p.grad_dtype = p.dtype

        return undo

    def __deepcopy__(self, memo: Any) -> _Reading:
        return self  # whose hooks do nothing in a copy of the module: nothing arrives there

    def _before(self, module: nn.Module, args: Any) -> None:
        if module is not self._module:
            return
        own: Any = parameters_of(module)
        arrived = {name: p for name in self._names if (p := own[name]) is not None and p.is_floating_point()}
        for name, p in arrived.items():
            self._check(name, p)
            if self.sums_full and p.requires_grad and p.grad_dtype is self._low:
                p.grad_dtype = torch.float32
                self._summed.append(p)
        to = self._to
        cast = {name: p.to(to) for name, p in arrived.items() if to is not None and p.dtype is not to}
        self._replaced.append({name: arrived[name] for name in cast})
        own.update(cast)

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        if module is self._module and self._replaced:  # else what failed came before
            own: Any = parameters_of(module)
            own.update(self._replaced.pop())

    def _check(self, name: str, p: Tensor) -> None:
        full_is_right = not self._gathered or self._widens
        if p.dtype is self._low or (p.dtype is torch.float32 and full_is_right):
            return
        name = f"{self._formats.name}.{name}" if self._formats.name else name
        kind = next(cls.__name__ for cls in type(self._module).__mro__ if not is_sharding(cls))
        pattern = self._formats.name if self._casts else f"{TYPE_PREFIX}{kind}"
        exact = f'halfstep.Rule("{pattern}", halfstep.FULL)'
        also = f"; to keep it exact in a group of its own, pass rules=[{exact}] to halfstep.initialize"
        raise SetupError(
            f"the parameter {name!r} is {p.dtype} in the forward pass, but {self._plan.name} reads it as {self._low}: "
            f"the mp_policy passed to fully_shard contradicts the plan; write {line_to_shard(self._plan)}"
            f"{also if p.dtype is torch.float32 else ''}"
        )


def _check_policy(module: Any, plan: Plan, *, is_root: bool) -> None:
    """Raises a SetupError if the casts that a module's `mp_policy` asks FSDP2 to make contradict the plan."""
    policy = policy_of(module)
    given = policy.param_dtype if policy.cast_forward_inputs else None
    for option, what, to, full in (
        ("cast_forward_inputs=True", "inputs", given, plan.ops == "none"),
        ("output_dtype", "outputs", policy.output_dtype, is_root and plan.output == "full"),
    ):
        if to is not None and not (to is FP32.dtype and full):  # fp32 already
            raise SetupError(
                f"the mp_policy passed to fully_shard for {type(module).__name__} contradicts {plan.name}: its "
                f"{option} casts {what} to {to}, but the plan decides how they are cast; write {line_to_shard(plan)}"
            )


def line_to_shard(plan: Plan) -> str:
    """Returns the call of `fully_shard` that fits a plan, as text for an error message."""
    first = f'"{plan.name}"' if plan.name in LEVELS else "plan"
    return f'fully_shard(module, mp_policy=halfstep.fsdp_policy({first}, low="{plan.low.name}")) for all of the model'
