"""Records the calls of a model's layers: the arguments and the outputs of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfstep.adapters.keras.backend import keras
from halfstep.adapters.keras.policies import layers_of

# They call the layers in them while a loop is compiled, where there are no numbers to look at.
_OPAQUE = (keras.layers.RNN, keras.layers.TimeDistributed)
Original = Callable[..., Any]


@dataclass(eq=False)
class Call:
    """One recorded call of a layer."""

    path: str
    layer: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    parent: Call | None = None  # the call of the layer around it
    outputs: Any = None
    is_leaf: bool = True  # False if it has called other layers
    gives: Literal["outputs", "losses", "casts"] = "outputs"  # added losses and casts of inputs are calls too

    @property
    def given(self) -> Any:
        return self.args, self.kwargs


Around = Callable[[Call, Original], Any]


def as_it_is(call: Call, original: Original) -> Any:
    """Returns the result of `original`, the layer's own `call`, on the arguments of a recorded call."""
    return original(*call.args, **(call.kwargs or {}))


@contextmanager
def watched(model: keras.Model, around: Around = as_it_is) -> Iterator[list[Call]]:
    """Within the context, makes every call of a layer in the model run as `around(call, original)`."""
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


@contextmanager
def in_fp32(layer: Any) -> Iterator[None]:
    """Within the context, makes a layer and every layer inside it compute in fp32; weights keep their stored format."""
    held = [(each, each._dtype_policy) for each in layer._flatten_layers() if computes_low(each)]
    for each, _ in held:
        policy = keras.DTypePolicy("float32")
        policy._variable_dtype = each.variable_dtype  # by which Keras decides whether to cast weights
        vars(each)["_dtype_policy"] = policy
    try:
        yield
    finally:
        for each, policy in held:
            vars(each)["_dtype_policy"] = policy


def computes_low(layer: Any) -> bool:
    """Returns whether a layer itself computes in fp16 or bf16."""
    return layer.compute_dtype in ("float16", "bfloat16")
