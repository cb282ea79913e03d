"""Which layer of a Keras model makes the first value that is not finite, found by one more run of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from halfstep.adapters.keras.backend import blame_step, gradients
from halfstep.adapters.keras.installed import keras
from halfstep.adapters.keras.policies import layers_of
from halfstep.edits import FULL, Rule, Scaling
from halfstep.records import Kind, Verdict

ops, tree = keras.ops, keras.tree
# They call the layers in them while a loop is compiled, where there are no numbers to look at.
OPAQUE = (keras.layers.RNN, keras.layers.TimeDistributed)
Around = Callable[["_Call", Callable[..., Any]], Any]


@dataclass(eq=False)
class _Call:
    """One call of a layer; `parent` is the call that made it. Tensors are lists of the floating ones.

    `arriving` and `leaving` are the places, among all tapped tensors, of its outputs and its inputs.
    """

    path: str
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: _Call | None = None
    outputs: Any = None
    has_children: bool = False
    arriving: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)


def find_broken(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    scale: float = 1.0,
    loss: Callable[[Any, Any], Any] | None = None,
) -> Verdict | None:
    """Returns which layer makes the first output, or gradient, that is not finite; None where all are finite.

    The batch is run once more, layer by layer, as in training; `scale` is the loss scale of the failing step, and
    `loss` the function of `y` and the model's output where the model is not compiled. Weights, statistics and random
    states stay as they are. What happens inside the loop of a recurrent layer is told of that layer.
    """

    def total(outputs: Any) -> Any:
        if loss is not None:
            return loss(y, outputs)
        return model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)

    x, y = (tree.map_structure(ops.convert_to_tensor, each) for each in (x, y))
    calls: list[_Call] = []
    with keras.StatelessScope(), _watched(model, calls, _as_it_is):
        value = total(model(x, training=True))
    return _in_forward(calls) or _in_loss(value, y) or _in_backward(model, x, total, scale)


def find_cause(model: keras.Model, x: Any, y: Any, sample_weight: Any, *, scale: float) -> Verdict | None:
    """Returns what `find_broken` does of a compiled model; on torch with the operation that `blame` names.

    A layer that `blame` names is taken where it lies inside of the other: a cast between two layers is the next one's.
    """

    def loss() -> Any:
        with keras.StatelessScope():
            outputs = model(x, training=True)
            return scale * model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)

    found, named = find_broken(model, x, y, sample_weight, scale=scale), blame_step(model, loss)
    if found is None or named is None:
        return found or named
    seen = named.evidence.partition("; ")[0]  # what follows is about plans, which Keras's layers do not run under
    inside = f"{named.module}.".startswith(f"{found.module}.") or not found.module
    return replace(
        found,
        module=named.module if inside else found.module,
        operator=named.operator,
        where=named.where,
        call=named.call,
        evidence=f"{seen}; {found.evidence}",
    )


def _in_forward(calls: Sequence[_Call]) -> Verdict | None:
    broken = next((call for call in calls if not _finite(call.outputs)), None)
    while broken is not None and not _finite((broken.args, broken.kwargs)):
        if broken.parent is None:
            taking = next(call for call in calls if not call.has_children and not _finite((call.args, call.kwargs)))
            given = _figures((taking.args, taking.kwargs))
            return _say(taking, "forward", Kind.INPUT_DATA, f"its input has {given}", "look at this batch of the data")
        broken = broken.parent
    if broken is None:
        return None
    seen = f"inputs have {_figures((broken.args, broken.kwargs))}, outputs {_figures(broken.outputs)}"
    spoiled = [v.path for v in broken.layer.weights if not _finite(v.value)]
    if spoiled:
        advice = "load weights that are finite: an earlier step wrote these, or they came so"
        return _say(broken, "forward", Kind.WEIGHTS, f"{', '.join(spoiled)} are not finite", advice)
    if broken.layer.compute_dtype != "float32" and _finite_in_fp32(broken):
        cure = Rule(broken.path, FULL)
        advice = f"compute it in fp32: apply_plan(model, plan.edit({cure!r})), or dtype='float32' for the layer"
        return _say(broken, "forward", Kind.OVERFLOW, f"{seen}; in fp32 they are finite", advice, cure)
    advice = "look at divisions, logarithms and roots in this layer: what it computes is not finite in fp32 either"
    return _say(broken, "forward", Kind.INVALID, seen, advice)


def _in_loss(value: Any, y: Any) -> Verdict | None:
    if _finite(value):
        return None
    at = _Call("", None, (), {})
    if not _finite(y):
        return _say(at, "forward", Kind.INPUT_DATA, f"the targets have {_figures(y)}", "look at this batch of the data")
    advice = "look at divisions, logarithms and roots in the loss: what the model returned is finite"
    return _say(at, "forward", Kind.INVALID, f"the loss is {_figures(value)}", advice)


def _in_backward(model: keras.Model, x: Any, total: Callable[[Any], Any], scale: float) -> Verdict | None:
    broken, seen = _first_in_backward(model, x, total, scale)
    if broken is None:
        return None
    if scale > 1.0 and _first_in_backward(model, x, total, 1.0)[0] is None:
        low = scale
        while low > 1.0 and _first_in_backward(model, x, total, low)[0] is not None:
            low /= 4.0
        cure = Scaling("dynamic", init=low)
        advice = f"let the scale back off, or begin at {low:g}: LossScaleOptimizer(optimizer, {cure!r})"
        return _say(broken, "backward", Kind.SCALE_TOO_HIGH, f"{seen} at a loss scale of {scale:g}", advice, cure)
    advice = "look at roots, powers and divisions in it, whose derivatives have poles, or compute it in fp32"
    return _say(broken, "backward", Kind.INVALID, seen, advice)


def _first_in_backward(
    model: keras.Model, x: Any, total: Callable[[Any], Any], scale: float
) -> tuple[_Call | None, str]:
    calls: list[_Call] = []

    def run(tap: Callable[[Any], Any]) -> Any:
        calls.clear()
        tapped = 0

        def numbered(places: list[int]) -> Callable[[Any], Any]:
            def number(tensor: Any) -> Any:
                nonlocal tapped
                if not _is_floating(tensor):
                    return tensor
                places.append(tapped)
                tapped += 1
                return tap(tensor)

            return number

        def around(call: _Call, original: Callable[..., Any]) -> Any:
            args, kwargs = tree.map_structure(numbered(call.leaving), (call.args, call.kwargs))
            return tree.map_structure(numbered(call.arriving), original(*args, **kwargs))

        with _watched(model, calls, around):
            return ops.cast(total(model(x, training=True)), "float32") * scale

    variables = model.trainable_variables
    of_tapped, of_variables = gradients(run, variables)
    by_variable = {id(v): g for v, g in zip(variables, of_variables, strict=True)}
    for call in reversed(calls):
        if call.has_children:
            continue
        arriving = [of_tapped[place] for place in call.arriving]
        if not _finite(arriving):
            inside = call.parent is not None and not isinstance(call.parent.layer, keras.Model)
            named = call.parent if inside else call
            return (
                named,
                f"the gradient that arrives at the output of {call.path or 'the model'} has {_figures(arriving)}",
            )
        leaving = [of_tapped[place] for place in call.leaving] + [by_variable.get(id(v)) for v in call.layer.weights]
        if not _finite(leaving):
            return call, f"arriving gradients have {_figures(arriving)}, those it gives {_figures(leaving)}"
    outer = next((c for c in calls if not _finite([by_variable.get(id(v)) for v in c.layer.weights])), None)
    return outer, "a gradient of its weights is not finite"


def _as_it_is(call: _Call, original: Callable[..., Any]) -> Any:
    return original(*call.args, **call.kwargs)


@contextmanager
def _watched(model: keras.Model, calls: list[_Call], around: Around) -> Iterator[None]:
    """Has every call of a layer made by `around`, and noted in the order in which calls return."""
    stack: list[_Call] = []

    def watch(path: str, layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = _Call(path, layer, args, kwargs, stack[-1] if stack else None)
            if made.parent is not None:
                made.parent.has_children = True
            stack.append(made)
            try:
                made.outputs = around(made, original)
            finally:
                stack.pop()
            calls.append(made)
            return made.outputs

        return call

    layers = [(path, layer) for path, layer in layers_of(model, opaque=OPAQUE)]
    for path, layer in layers:
        vars(layer)["call"] = watch(path, layer, layer.call)
    try:
        yield
    finally:
        for _, layer in layers:
            del vars(layer)["call"]


def _finite_in_fp32(call: _Call) -> bool:
    """Returns whether the outputs of a call are finite where the layer computes in fp32."""
    held = call.layer._dtype_policy
    call.layer._dtype_policy = keras.DTypePolicy("float32")
    try:
        with keras.StatelessScope():
            return _finite(call.layer(*call.args, **call.kwargs))
    finally:
        call.layer._dtype_policy = held


def _is_floating(value: Any) -> bool:
    return keras.utils.is_keras_tensor(value) is False and hasattr(value, "dtype") and "float" in str(value.dtype)


def _floating(values: Any) -> list[np.ndarray[Any, Any]]:
    found = [each for each in tree.flatten(values) if _is_floating(each)]
    return [np.asarray(ops.convert_to_numpy(ops.cast(each, "float32"))) for each in found]


def _finite(values: Any) -> bool:
    return all(bool(np.isfinite(each).all()) for each in _floating(values))


def _figures(values: Any) -> str:
    """Returns how large the finite numbers are, and how many are not."""
    found = _floating(values)
    numbers = np.concatenate([each.ravel() for each in found]) if found else np.zeros(0)
    finite = np.isfinite(numbers)
    largest = np.abs(numbers[finite]).max() if finite.any() else 0.0
    infinite = int(np.isinf(numbers).sum())
    words = [f"magnitudes up to {largest:.4g}"]
    words += [f"{infinite} infinite"] * bool(infinite)
    words += [f"{int(np.isnan(numbers).sum())} NaN"] * bool(np.isnan(numbers).any())
    return ", ".join(words)


def _say(call: _Call, phase: str, kind: Kind, evidence: str, advice: str, *cure: Rule | Scaling) -> Verdict:
    operator = "the loss" if call.layer is None else type(call.layer).__name__
    return Verdict(call.path, operator, phase, kind, None, cure, evidence, advice, outside=call.layer is None)
