"""The actions of the op table, as functions for torch's dispatcher that run one call of an aten overload.

A function gets the dispatcher's key set and the call's arguments. Most cast the arguments and run the op with autocast
off, so that the parts of a composite op are not cast again (`OpSite.excluded`); others leave it on (`OpSite.below`).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OpError
from halfstep.formats import CASTABLE, is_low
from halfstep.machine import WideBackward
from halfstep.plan.optable import CARRIED, REFUSED, Action, overload_name
from halfstep.torch_internals import (
    FLEX_ATTENTION,
    DispatchKey,
    OpOverload,
    call_by_key,
    direct_call,
    forced_keys,
    has_kernel_for,
    kernels_in_python,
    keys_excluded_here,
    keys_included_here,
    keyset_after,
    mode_stack,
    redispatch_of,
    schema_of,
    set_key_excluded,
)
from halfstep.train.cast.probabilities import carrying, probability, widen

Act = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_STATISTICS = ("batch_norm", "instance_norm")
# These ops take a low input with fp32 parameters and compute in fp32, in 0.4 of the time that they take with two casts.
_MIXED_ON_CPU = ("group_norm",)
# These add up the gradients of their parameters in the format of their input, whatever theirs is.
_LOW_SUMS_ON_CPU = ("layer_norm", "native_layer_norm")
# None of these ops' parts has a row, except parts that run in the formats that the row of the whole has chosen.
_WHOLE = ("layer_norm", "native_layer_norm", "group_norm", "batch_norm")
_TRACING = DispatchKey.PythonDispatcher
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)
_COMPOSITE, _IN_PARTS = DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd
# A method for each format: `to` takes 1.5 us longer to read its arguments.
_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
}
# These ops refuse low tensors, whatever their `dtype` says.
_DTYPE_IN_VAIN = ("linalg_matrix_norm",)


def is_composite(name: str) -> bool:
    """Tells whether an overload is made of other ops, to which autocast applies in turn."""
    return bool(has_kernel_for(f"aten::{name}", _COMPOSITE.name))


class OpSite:
    """One aten overload on one device type, whose kernel has the dispatch key `place`, by default that of autocast."""

    in_one = False  # whether a recurrent layer is one operation, to which autocast does not apply inside

    def __init__(self, overload: OpOverload, device_type: str, place: Any = None) -> None:
        schema = schema_of(overload)
        self.overload = overload
        self.overload_name = overload_name(schema)
        self.device_type = device_type
        self.name: str = schema.name.removeprefix("aten::")
        self.arguments = [argument.name for argument in schema.arguments]
        self.key = getattr(DispatchKey, f"Autocast{device_type.upper()}")
        self.place = self.key if place is None else place
        self._after = keyset_after(self.key)
        self.plain = self.direct = _fastest_call(overload)
        self._redispatch = redispatch_of(overload)
        types = [str(argument.type) for argument in schema.arguments]
        self._tensors = [i for i, kind in enumerate(types) if kind == "Tensor"]
        self._holding = [i for i, kind in enumerate(types) if "Tensor" in kind]  # also lists and optional ones
        self._composite = is_composite(self.overload_name)
        self.is_here: Callable[[Tensor], bool] = operator.attrgetter(f"is_{device_type}")

    def below(self, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the op itself without casts; autocast stays on for its parts."""
        given = len(args)
        for i in self._tensors:
            if i < given and isinstance(args[i], _NUMBERS):
                return self._below_undispatched(keyset, args, kwargs)
        if keyset.has(_TRACING):
            return self._below_undispatched(keyset, args, kwargs)
        return self._redispatch(keyset & self._after, *args, **kwargs)

    def _below_undispatched(self, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does what `below` does in traced code, and where a call, as `x * 2.0`, has a number in place of a tensor."""
        # A redispatch takes no such number. In traced code it would skip decompositions that are written in Python, and
        # the tracing dispatcher starts again from all keys, so a key set without autocast would have no effect.
        if not self._composite:
            return self.excluded(keyset, args, kwargs)
        decompose = kernels_in_python(self.overload).get(_COMPOSITE) if keyset.has(_TRACING) else None
        if decompose is not None:
            return decompose(*args, **kwargs)
        return call_by_key(self.overload)(_COMPOSITE, *args, **kwargs)

    def excluded(self, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the op and all its parts without autocast; the key set is not read."""
        set_key_excluded(self.key, True)  # faster than torch's guard
        set_key_excluded(self.place, True)
        try:
            return self.direct(*args, **kwargs)
        finally:
            set_key_excluded(self.place, False)  # as it was, or this kernel would not run
            set_key_excluded(self.key, False)

    def passed(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Makes a call in which ops run as if halfstep had no kernels at this place."""
        set_key_excluded(self.place, True)
        try:
            return call(*args, **kwargs)
        finally:
            set_key_excluded(self.place, False)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns a value, or a list of them, with fp32, bf16 and fp16 tensors on this device type cast to `dtype`."""
        if isinstance(value, Tensor):
            given = value.dtype
            if given is not dtype and given in CASTABLE and self.is_here(value):
                return _CASTS[dtype](value)
        elif isinstance(value, (list, tuple)):
            return [self.cast(item, dtype) for item in value]
        return value

    def cast_all(
        self, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns args and kwargs with fp32, bf16 and fp16 tensors on this device type cast to `dtype`."""
        cast, given, changed = self.cast, len(args), list(args)
        for i in self._holding:
            if i < given and getattr(changed[i], "dtype", None) is not dtype:
                changed[i] = cast(changed[i], dtype)
        return changed, {k: cast(v, dtype) for k, v in kwargs.items()} if kwargs else kwargs

    def dtypes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> set[torch.dtype]:
        """Returns the dtypes of the fp32, bf16 and fp16 tensors among the arguments on this device type."""
        given = len(args)
        values = [args[i] for i in self._holding if i < given]
        values += kwargs.values()
        found: set[torch.dtype] = set()
        for value in values:  # and what lists among them hold
            if isinstance(value, Tensor):
                if value.dtype in CASTABLE and self.is_here(value):
                    found.add(value.dtype)
            elif isinstance(value, (list, tuple)):
                values += value
        return found


def _fastest_call(overload: OpOverload) -> Callable[..., Any]:
    """Returns the function by which Python calls an overload in the shortest time."""
    # That is the function of torch's own bindings if there is one; it reads its arguments faster than a call of the
    # overload does.
    schema = schema_of(overload)
    found = getattr(torch, schema.name.removeprefix("aten::"), None)
    takes_all = all(str(argument.type) != "List[Optional[Tensor]]" for argument in schema.arguments)
    return found if takes_all and isinstance(found, BuiltinFunctionType) else direct_call(overload)


def make_act(site: OpSite, action: Action) -> Act:
    """Returns the function of (key set, args, kwargs) that runs a call of one overload as `action` says."""
    if site.name in _STATISTICS and action not in ("pass", "infer"):
        return _statistics(site, action)
    act = _MAKERS[action](site)
    return carrying(site, act) if site.overload_name in CARRIED else act


def _low(site: OpSite) -> Act:
    if site.name in RECURRENT and not site.in_one:
        return _recurrent(site)
    device_type = site.device_type

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return site.excluded(keyset, *site.cast_all(args, kwargs, torch.get_autocast_dtype(device_type)))

    return act


def _product(site: OpSite) -> Act:
    low, below = _low(site), site.below
    return lambda keyset, args, kwargs: (low if contracts(args[0]) else below)(keyset, args, kwargs)


@cache
def contracts(equation: str) -> bool:
    """Tells whether an einsum sums products: over an index that two operands share and that its result lacks."""
    given, arrow, kept = equation.replace(" ", "").replace("...", ".").partition("->")
    shared = {i for one, other in combinations(given.split(","), 2) for i in one if i in other}
    return not shared.issubset(kept if arrow else ".")


def _recurrent(site: OpSite) -> Act:
    """Returns a function that runs an RNN with its sequences and states cast to low."""
    # Sequences are cast here because in fp16 on a CPU, an fp32 sequence would select a oneDNN kernel that the CPU may
    # not have. On CUDA, torch's autocast casts the arguments of a cuDNN RNN to fp16 whatever the region's format
    # (ATen/cudnn/AutocastRNN.cpp), so for bf16 all arguments are cast here.
    weights = next(i for i, name in enumerate(site.arguments) if name in ("params", "w_ih"))
    device_type = site.device_type
    by_cudnn = device_type == "cuda" and not site.name.endswith("_cell")

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        low = torch.get_autocast_dtype(device_type)
        if by_cudnn and low is not torch.float16:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # cast weights are no one chunk of memory, and cuDNN warns each time
                return site.excluded(keyset, *site.cast_all(args, kwargs, low))
        return site.below(keyset, (*(site.cast(a, low) for a in args[:weights]), *args[weights:]), kwargs)

    return act


def _full(site: OpSite) -> Act:
    if "dtype" in site.arguments and site.name not in _DTYPE_IN_VAIN:
        return _full_by_dtype(site)
    return lambda keyset, args, kwargs: site.excluded(keyset, *site.cast_all(args, kwargs, torch.float32))


def _full_of_logits(site: OpSite) -> Act:
    """Returns a function that computes in fp32 from what a sigmoid was given: a low one is 1 from small logits on."""
    full = _full(site)

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return full(keyset, args if torch.compiler.is_dynamo_compiling() else (widen(args[0]), *args[1:]), kwargs)

    return act


def _full_by_dtype(site: OpSite) -> Act:
    """Returns a function that makes an op compute in fp32 by its argument `dtype`, without a copy of its input."""
    position = site.arguments.index("dtype")

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0]
        if is_low(given.dtype) and len(args) <= position and kwargs.get("dtype") is None and site.is_here(given):
            kwargs["dtype"] = torch.float32
        return site.excluded(keyset, args, kwargs)

    return act


def _promote(site: OpSite) -> Act:
    into_first = site.name.endswith("_")

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(site.dtypes(args, kwargs)) > 1:
            widest = args[0].dtype if into_first else torch.float32
            args, kwargs = site.cast_all(args, kwargs, widest)  # type: ignore[assignment]
        return site.excluded(keyset, args, kwargs)

    return act


def _norm(site: OpSite) -> Act:
    """Returns a function that runs a norm in fp32 if its parameters and its input have different formats."""
    # On a CPU some norms run in fp32 even if the formats agree, because torch would sum the gradients of low
    # parameters in the low format.
    on_cpu = site.device_type == "cpu"
    mixed, low_sums = on_cpu and site.name in _MIXED_ON_CPU, on_cpu and site.name in _LOW_SUMS_ON_CPU
    first = site.arguments.index("weight")
    parameters = slice(first, first + 2 if "bias" in site.arguments else first + 1)
    run = site.excluded if site.name in _WHOLE else site.below

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0].dtype
        own = [p.dtype for p in args[parameters] if p is not None]
        low = is_low(given)
        if mixed and low and len(own) == len(args[parameters]):
            wide, named = site.cast_all(args, kwargs, torch.float32)
            return run(keyset, (args[0], *wide[1:]), named)
        widens = low and own.count(torch.float32) == len(own) > 0 and not kwargs and site.is_here(args[0])
        if not widens and not (low and low_sums and own) and len(site.dtypes(args, kwargs)) <= 1:
            return run(keyset, args, kwargs)
        cast = ((args[0].float(), *args[1:]), kwargs) if widens else site.cast_all(args, kwargs, torch.float32)
        out = site.excluded(keyset, *cast)
        if isinstance(out, Tensor):
            return site.cast(out, given)
        return (site.cast(out[0], given), *out[1:])  # native_layer_norm; its statistics stay fp32

    return act


def _statistics(site: OpSite, action: Action) -> Act:
    """Returns a function that runs a norm with running statistics; `action` decides how its input is cast."""
    # The statistics are never cast, because the norm writes them in place.
    weights = [site.arguments.index(name) for name in ("weight", "bias")]
    running = site.arguments.index("running_mean")
    device_type = site.device_type
    run = site.excluded if site.name in _WHOLE else site.below

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast = list(args)
        if action != "norm":
            cast[0] = site.cast(args[0], torch.get_autocast_dtype(device_type) if action == "low" else torch.float32)
        mean = cast[running]
        if mean is not None and mean.dtype in CASTABLE:
            wide = mean.dtype
        elif len(site.dtypes(cast[: running + 2], {})) > 1:
            wide = torch.float32 if mean is None else mean.dtype
        else:
            return run(keyset, tuple(cast), kwargs)
        for i in weights:
            cast[i] = site.cast(cast[i], wide)
        return run(keyset, tuple(cast), kwargs)

    return act


def _refuse(site: OpSite) -> Act:
    instead, full = REFUSED.get(site.name, ""), _full(site)

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_low(args[0].dtype) and site.is_here(args[0]):
            raise OpError(
                f"{site.name} got {args[0].dtype} probabilities inside a halfstep region: in low precision a sigmoid "
                f"rounds to 0 or 1, whose logarithm is infinite; use {instead} on the logits, or pass "
                f"ops={{'deny': ['{site.name}']}}, which computes it in fp32 from what the sigmoid was given"
            )
        return full(keyset, args, kwargs)

    return act


def _gather(site: OpSite) -> Act:
    """Returns a function for ops that read rows of a low weight, such as embedding: gradients are summed in fp32."""
    # The backward pass then sums the gradients of a row in fp32. torch's CPU kernels for low weights add them one by
    # one in the low format, where for example a bf16 sum of ones stops at 256. Ops with sparse gradients run as
    # written, because the optimizer's step sums these gradients. Ops that index an activation run as written too,
    # because they seldom read a row twice.
    sparse = site.arguments.index("sparse") if "sparse" in site.arguments else None
    weighted = site.name == "embedding_bag"  # by the samples

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = args[0]
        is_sparse = sparse is not None and (args[sparse] if len(args) > sparse else kwargs.get("sparse", False))
        if weighted and len(site.dtypes(args, kwargs)) > 1:
            # no cast of the weight where its gradient is sparse, which torch cannot cast back
            return site.excluded(keyset, *site.cast_all(args, kwargs, weight.dtype if is_sparse else torch.float32))
        if not is_low(weight.dtype) or not weight.requires_grad or (sparse is None and not weight.is_leaf):
            return site.below(keyset, args, kwargs)
        if is_sparse or not site.is_here(weight):
            return site.below(keyset, args, kwargs)
        (_, *rest), kwargs = site.cast_all(args, kwargs, torch.float32)
        out = site.excluded(keyset, (weight.float(), *rest), kwargs)
        low = _CASTS[weight.dtype]
        return low(out) if isinstance(out, Tensor) else (low(out[0]), *out[1:])

    return act


_MAKERS: dict[Action, Callable[[OpSite], Act]] = {
    "low": _low,
    "product": _product,
    "full": _full,
    "promote": _promote,
    "norm": _norm,
    "gather": _gather,
    "refuse": _refuse,
    "logits": _full_of_logits,
    "pass": lambda site: site.below,
    "infer": lambda site: site.excluded,
    "probability": probability,
    "carry": lambda site: site.excluded,
}


def wide_attention(stock: Any, limits: Callable[[], WideBackward]) -> Callable[..., Any]:
    """Returns a kernel for the backward pass of CPU attention, which computes in fp32 if that is faster."""
    # Inputs and results keep the formats of the op table, as with a product that accumulates in fp32. The forward pass
    # stays low: torch's kernel for it is faster in low precision, and one in fp32 would keep more memory for the
    # backward pass. The kernel acts only in the backward passes of open sessions, and calls torch's own, `stock`.

    def kernel(keyset: Any, grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Sequence[Tensor]:
        low = query.dtype
        if not is_low(low) or not goes_wide(limits(), query.size(-1), max(query.size(-2), key.size(-2))):
            found: Sequence[Tensor] = stock.call_boxed(keyset, grad, query, key, *rest, **kwargs)
            return found
        args = [_widened(value) for value in (grad, query, key, *rest)]
        wide = stock.call_boxed(keyset, *args, **{name: _widened(value) for name, value in kwargs.items()})
        return tuple(g.to(low) for g in wide)

    return kernel


class _Called:
    flex_attention = False  # in this process, inside of a session's region


def called_flex_attention() -> bool:
    """Tells whether a model has called flex_attention, which keeps all scores in memory where it is not compiled."""
    return _Called.flex_attention


def flex_attention(place: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs torch's flex_attention; where a mode of halfstep's is on, as the operations that it is made of."""
    # Torch's own gradient traces the score function with numbers that nobody has set, which a mode would see.
    _Called.flex_attention, device_type = True, query.device.type
    with forced_keys(keys_included_here().remove(place), keys_excluded_here()):
        if not any(getattr(mode, "sees_parts", False) for mode in mode_stack()):
            return FLEX_ATTENTION(query, key, value, *args, **kwargs)  # its own kernel for autocast casts
        low = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query.dtype
        with torch.autocast(device_type, enabled=False):
            return kernels_in_python(FLEX_ATTENTION)[_IN_PARTS](
                *(t.to(low) for t in (query, key, value)), *args, **kwargs
            )


def goes_wide(limits: WideBackward, width: int, length: int) -> bool:
    """Returns whether attention of this head width and longest side runs its backward pass in fp32, by these limits."""
    return length <= next((longest for widest, longest in limits if width <= widest), -1)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and is_low(value.dtype) else value
