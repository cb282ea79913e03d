"""Finds the layer of a Keras model that makes the first non-finite value, by running a batch again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from halfstep.adapters.keras.backend import backend, keras
from halfstep.adapters.keras.policies import layers_of
from halfstep.edits import FULL, Rule, Scaling
from halfstep.errors import SetupError
from halfstep.kinds import Kind
from halfstep.records import Verdict

ops, tree = keras.ops, keras.tree


def find_broken(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    scale: float = 1.0,
    loss: Callable[[Any, Any], Any] | None = None,
) -> Verdict | None:
    """Returns which layer first makes the loss or a gradient non-finite; None if the loss and all gradients are finite.

    Runs the batch again layer by layer, as in training. `scale` is the loss scale of the failing step. If the model is
    not compiled, pass `loss`, a function of `y` and the model's output. Losses that layers add are included. Weights,
    statistics and random states are not changed. A failure inside the loop of a recurrent layer is reported for that
    layer. An overflow in the cast of an input is reported for the layer that casts it.

    Raises:
        SetupError: the model has no loss, and none was passed.
    """
    x, y = tree.map_structure(lambda each: None if each is None else ops.convert_to_tensor(each), (x, y))

    def run() -> Any:
        if loss is None:
            return loss_of_batch(model, x, y, sample_weight)
        return loss(y, model(x, training=True)) + sum(ops.cast(each, "float32") for each in model.losses)

    with keras.StatelessScope(collect_losses=True), watched(model) as calls:
        value = run()
    found = _in_forward(calls)
    if not _finite(value):
        return found or _in_loss(value, y)
    backward = _in_backward(model, run, scale)
    # The loss is finite: infinities that a layer means, as those of a mask, came to nothing.
    return found if backward and found and found.kind is not Kind.INVALID else backward


def loss_of_batch(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> Any:
    """Returns the loss of a batch as `fit` computes it; call it in a StatelessScope that collects losses."""
    outputs = model(x, training=True)
    own = type(model).compute_loss is not keras.Model.compute_loss
    if not own and model.loss is None and not model.losses:  # of which Keras makes zero on JAX
        raise SetupError(
            f"model {model.name!r} has no loss that halfstep can compute; set compile(loss=...), or use add_loss or "
            "compute_loss, since a loss that train_step computes itself cannot be computed outside of train_step"
        )
    return model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def find_cause(model: keras.Model, x: Any, y: Any, sample_weight: Any, *, scale: float) -> Verdict | None:
    """Returns the verdict of `find_broken` on a compiled model; on torch with the operation that `blame` finds."""
    # A cast between two layers counts as part of the second in `find_broken`, of the first in `blame`: the layer is
    # from `blame` only if it is inside that of `find_broken`.

    def loss() -> Any:
        with keras.StatelessScope(collect_losses=True):
            return scale * loss_of_batch(model, x, y, sample_weight)

    found = find_broken(model, x, y, sample_weight, scale=scale)
    named = backend().blame_step(model, loss)
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


def _in_forward(calls: Sequence[Call], *, masks: bool = False) -> Verdict | None:
    passes = partial(_finite, masks=masks)
    broken = next((call for call in calls if not passes(call.outputs)), None)
    while broken is not None and not passes(broken.given):
        if broken.parent is None:
            taking = next(call for call in calls if call.is_leaf and call.gives != "casts" and not passes(call.given))
            given = _figures(taking.given)
            return _say(taking, "forward", Kind.INPUT_DATA, f"its input has {given}", "look at this batch of the data")
        broken = broken.parent
    if broken is None:
        return None
    found = _of_call(broken)
    if masks or found.kind is not Kind.INVALID or not _finite(broken.outputs, masks=True):
        return found
    other = _in_forward(calls, masks=True)  # a mask may be meant, and something else be wrong
    return other if other is not None and other.kind is not Kind.INVALID else found


def _of_call(broken: Call) -> Verdict:
    """Returns the verdict on a call whose inputs are finite, but whose outputs are not."""
    cure = Rule(broken.path, FULL)
    if broken.gives == "casts":
        low = keras.backend.standardize_dtype(broken.outputs.dtype)
        seen = f"its input has {_figures(broken.given)}, which overflow in the cast to {low}"
        return _say(broken, "forward", Kind.OVERFLOW, seen, f"{_wide(cure)}; or scale down its input", cure)
    seen = f"inputs have {_figures(broken.given)}, {broken.gives} have {_figures(broken.outputs)}"
    spoiled = [v.path for v in broken.layer.weights if not _finite(v.value)]
    if spoiled:
        advice = "load weights that are finite: these were written by an earlier step, or loaded as they are"
        return _say(broken, "forward", Kind.WEIGHTS, f"weights that are not finite: {', '.join(spoiled)}", advice)
    advice = "look at divisions, logarithms and roots in this layer"
    cured = _cured_in_fp32(broken.layer, lambda: _gives_finite(broken))
    if cured:
        return _say(
            broken, "forward", Kind.OVERFLOW, f"{seen}; in fp32 the {broken.gives} are finite", _wide(cure), cure
        )
    if cured is False:
        advice += ": its results are not finite in fp32 either"
    return _say(broken, "forward", Kind.INVALID, seen, advice)


def _gives_finite(call: Call) -> bool:
    with keras.StatelessScope(collect_losses=True) as scope:
        outputs = call.layer(*call.args, **call.kwargs | {"training": True})
        return _finite((outputs, scope.losses))


def _in_loss(value: Any, y: Any) -> Verdict | None:
    if not _finite(y):
        return _say(
            _LOSS, "forward", Kind.INPUT_DATA, f"the targets have {_figures(y)}", "look at this batch of the data"
        )
    advice = "look at divisions, logarithms and roots in the loss: the outputs of the model are finite"
    return _say(_LOSS, "forward", Kind.INVALID, f"the loss has {_figures(value)}", advice)


def _in_backward(model: keras.Model, run: Callable[[], Any], scale: float) -> Verdict | None:
    found = _first_in_backward(model, run, scale)
    if found is None:
        return None
    unscaled = _first_in_backward(model, run, 1.0) if scale > 1.0 else found
    if unscaled is None:
        low = scale
        while low > 1.0 and _first_in_backward(model, run, low) is not None:
            low /= 4.0
        cure = Scaling("dynamic", init=low)
        advice = f"let the scale back off, or start it at {low:g}: LossScaleOptimizer(optimizer, {cure!r})"
        seen = f"{found.seen} at a loss scale of {scale:g}"
        return _say(found.at, "backward", Kind.SCALE_TOO_HIGH, seen, advice, cure)
    if _cured_in_fp32(model, lambda: _first_in_backward(model, run, 1.0) is None):
        full = Rule(unscaled.at.path, FULL)
        seen = f"{unscaled.seen}; in fp32 all gradients are finite"
        return _say(unscaled.at, "backward", Kind.OVERFLOW, seen, _wide(full), full)
    advice = "look at its roots, powers and divisions, whose derivatives have poles, or compute it in fp32"
    return _say(unscaled.maker, "backward", Kind.INVALID, unscaled.seen, advice)


@dataclass(frozen=True)
class _Gradient:
    """The first non-finite gradient of a backward pass."""

    at: Call  # where it appears
    maker: Call  # whose code computes it
    seen: str  # in words


def _first_in_backward(model: keras.Model, run: Callable[[], Any], scale: float) -> _Gradient | None:
    arriving: list[Call] = []  # calls whose ends lie in one place, where gradients are not finite
    arrived: dict[Call, Sequence[Any]] = {}
    for call, is_end, found in _backward(model, run, scale):
        if is_end:
            arrived[call] = found
        if is_end and not _finite(found):
            arriving.append(call)
        elif arriving:
            break
        elif not _finite(found):
            seen = f"incoming gradients have {_figures(arrived[call])}, outgoing gradients have {_figures(found)}"
            return _Gradient(call, call, seen)
    if not arriving:
        return None
    inner, outer = arriving[-1], arriving[0].parent
    seen = f"the gradient that arrives at the output of {inner.path or 'the model'} has {_figures(arrived[inner])}"
    if outer is not None and not isinstance(outer.layer, keras.Model):
        return _Gradient(outer, outer, seen)
    at = next((call for call in arriving if not isinstance(call.layer, keras.Model)), inner)
    return _Gradient(at, outer or _LOSS, seen)


def _backward(model: keras.Model, run: Callable[[], Any], scale: float) -> Iterator[tuple[Call, bool, Sequence[Any]]]:
    """Yields (call, is_end, gradients) twice for each layer call, in the order of the backward pass."""
    marks: list[tuple[Call, bool, list[int]]] = []  # which tapped tensors lie there

    def tapped_run(tap: Callable[[Any], Any]) -> Any:
        marks.clear()
        places = count()

        def mark(call: Call, is_end: bool, values: Any) -> Any:
            floating = [each for each in tree.flatten(values) if _is_floating(each)]
            marks.append((call, is_end, [next(places) for _ in floating]))
            return tree.map_structure(lambda each: tap(each) if _is_floating(each) else each, values)

        def around(call: Call, original: Original) -> Any:
            args, kwargs = mark(call, False, call.given)
            return mark(call, True, original(*args, **kwargs))

        with watched(model, around):
            return ops.cast(run(), "float32") * scale

    of_tapped, of_variables = backend().gradients(tapped_run, model.trainable_variables)
    by_variable = {id(v): g for v, g in zip(model.trainable_variables, of_variables, strict=True)}
    for call, is_end, places in reversed(marks):
        of_weights = [] if is_end else [by_variable.get(id(v)) for v in call.layer.weights]
        yield call, is_end, [of_tapped[place] for place in places] + of_weights


def _cured_in_fp32(layer: Any, run: Callable[[], bool]) -> bool | None:
    """Returns the result of `run`, called while a layer and all layers inside it compute in fp32."""
    low = [each for each in layer._flatten_layers() if each.compute_dtype in ("float16", "bfloat16")]
    held = [each._dtype_policy for each in low]
    for each in low:
        policy = keras.DTypePolicy("float32")
        policy._variable_dtype = each.variable_dtype  # by which Keras decides whether to cast weights
        vars(each)["_dtype_policy"] = policy
    try:
        return bool(low) and run()
    except Exception:  # of code that was never run so; the verdict goes without
        return None
    finally:
        for each, policy in zip(low, held, strict=True):
            vars(each)["_dtype_policy"] = policy


def _wide(cure: Rule) -> str:
    return f"compute it in fp32: apply_plan(model, plan.edit({cure!r})), or dtype='float32' for the layer"


def _say(call: Call, phase: str, kind: Kind, evidence: str, advice: str, *cure: Rule | Scaling) -> Verdict:
    operator = "the loss" if call.layer is None else type(call.layer).__name__
    return Verdict(call.path, operator, phase, kind, None, cure, evidence, advice, outside=call.layer is None)


def _is_floating(value: Any) -> bool:
    return keras.utils.is_keras_tensor(value) is False and hasattr(value, "dtype") and "float" in str(value.dtype)


def _finite(values: Any, *, masks: bool = False) -> bool:
    """Returns whether all floating-point numbers are finite or, with `masks`, minus infinity."""
    return all(bool((each < np.inf if masks else np.isfinite(each)).all()) for each in _floating(values))


def _figures(values: Any) -> str:
    """Describes the numbers in tensors as text: the largest finite magnitude, and how many are infinite or NaN."""
    numbers = np.concatenate([each.ravel() for each in _floating(values)] or [np.zeros(0)])
    largest = np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)
    counts = {"infinite": np.isinf(numbers).sum(), "NaN": np.isnan(numbers).sum()}
    return ", ".join([f"magnitudes up to {largest:.4g}", *(f"{n} {what}" for what, n in counts.items() if n)])


def _floating(values: Any) -> list[np.ndarray[Any, Any]]:
    found = [each for each in tree.flatten(values) if _is_floating(each)]
    return [np.asarray(ops.convert_to_numpy(ops.cast(each, "float32"))) for each in found]


# ---- calls of layers

# They call the layers in them while a loop is compiled, where there are no numbers to look at.
_OPAQUE = (keras.layers.RNN, keras.layers.TimeDistributed)
Original = Callable[..., Any]


@dataclass(eq=False)
class Call:
    """One recorded call of a layer."""

    path: str
    layer: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    parent: Call | None = None  # the call of the layer around it
    outputs: Any = None
    is_leaf: bool = True  # False if it has called other layers
    gives: Literal["outputs", "losses", "casts"] = "outputs"  # added losses and casts of inputs are calls too

    @property
    def given(self) -> Any:
        return self.args, self.kwargs


@contextmanager
def watched(
    model: keras.Model,
    around: Callable[[Call, Original], Any] = lambda call, original: original(*call.args, **call.kwargs),
) -> Iterator[list[Call]]:
    """Within the context, makes every call of a layer run as `around(call, original)`, where that is its own `call`."""
    calls: list[Call] = []
    stack: list[Call] = []

    def watch(path: str, layer: Any) -> dict[str, Any]:
        policy = copy.copy(layer._dtype_policy)  # others may have it too
        latest: Call | None = None
        original_call, add_loss, convert = layer.call, layer.add_loss, policy.convert_input

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal latest
            made = latest = Call(path, layer, args, kwargs, stack[-1] if stack else None)
            if made.parent is not None:
                made.parent.is_leaf = False
            stack.append(made)
            try:
                made.outputs = around(made, original_call)
            finally:
                stack.pop()
            calls.append(made)
            return made.outputs

        def add(loss: Any) -> None:
            add_loss(loss)
            if latest is not None:
                calls.append(replace(latest, outputs=loss, gives="losses"))

        def convert_input(value: Any, autocast: bool, dtype: Any) -> Any:
            cast = convert(value, autocast, dtype)
            if cast is not value:
                parent = stack[-1] if stack else None
                calls.append(Call(path, layer, (value,), parent=parent, outputs=cast, gives="casts"))
            return cast

        policy.convert_input = convert_input
        return {"call": call, "add_loss": add, "_dtype_policy": policy}

    layers = list(layers_of(model, opaque=_OPAQUE))
    held = [layer._dtype_policy for _, layer in layers]
    for path, layer in layers:
        vars(layer).update(watch(path, layer))
    try:
        yield calls
    finally:
        for (_, layer), policy in zip(layers, held, strict=True):
            del vars(layer)["call"], vars(layer)["add_loss"]
            vars(layer)["_dtype_policy"] = policy


_LOSS = Call("", None)
