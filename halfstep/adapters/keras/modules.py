"""Makes the layers of a Keras model visible to torch, and so to a session, as modules; for the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from halfstep.adapters.keras.backend import BACKEND, keras
from halfstep.adapters.keras.policies import layers_of, named_children, own_variables
from halfstep.errors import SetupError
from halfstep.torch_internals import buffers_of


def as_modules(model: keras.Model) -> Any:
    """Makes torch find each layer of a built model as a module, under the layer's Keras name; returns the model.

    Keras itself registers a layer as a module only if the layer is an attribute of another layer, and it registers
    running statistics as parameters. After this call, running statistics are buffers, which a skipped step leaves
    unchanged. `halfstep.initialize`, `check`, `blame` and `whatif` use the same layer names as `apply_plan`, and rules
    match these names. The model can be copied, so that cures can be tried on a copy. Weights, `state_dict` and what
    Keras saves are not affected. Call it after `model.to(device)`; idempotent.

    Raises:
        SetupError: Keras runs on another backend, or the model is not built.
    """
    if BACKEND != "torch":
        raise SetupError(
            f"as_modules works only on Keras's torch backend, but the backend is {BACKEND}; use LossScaleOptimizer and "
            "StepLog instead, or choose torch before importing keras: os.environ['KERAS_BACKEND'] = 'torch'"
        )
    if not isinstance(model, keras.Model):
        raise SetupError(f"{model!r:.80} is not a Keras model; pass a keras.Model")
    unbuilt = next((layer.name for layer in reversed(_layers(model)) if not layer.built), None)
    if unbuilt is not None:
        raise SetupError(f"layer {unbuilt!r} of {model.name!r} is not built; call the model on a batch first: model(x)")
    for layer in _layers(model):
        vars(layer).update({name: partial(method, layer) for name, method in _METHODS.items()})
        held = layer.torch_params
        frozen = {id(v) for each in _layers(layer) if not each.trainable for v in each.weights}  # for a time
        for variable in layer.variables:  # those that are not trained, such as running statistics, become buffers
            if not variable.trainable and id(variable) not in frozen and variable.path in held:
                held.register_buffer(variable.path, held.pop(variable.path))
    vars(model)["__deepcopy__"] = partial(_deep_copy, model)
    return model


@contextmanager
def seen_as_modules(model: keras.Model) -> Iterator[None]:
    """Applies `as_modules` to a model within the context, then restores what Keras registered."""
    if "named_modules" in vars(model):
        yield
        return
    made = [(layer.torch_params, [*layer.torch_params]) for layer in _layers(model)]
    as_modules(model)
    try:
        yield
    finally:
        del vars(model)["__deepcopy__"]
        for layer in _layers(model):
            for name in _METHODS:
                del vars(layer)[name]
        for held, paths in made:
            for path in paths:
                held[path] = held.pop(path) if path in held else buffers_of(held).pop(path)


def _layers(model: keras.Model) -> list[Any]:
    return [layer for _, layer in layers_of(model)]


def _named_children(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Replaces torch's `named_children`: yields layers by their Keras names, then modules that are not layers."""
    # The sublayers yield these variables anyway, and the dict would let a rule on one sublayer match the variables of
    # the others.
    below = named_children(layer)
    yield from below
    for name, module in nn.Module.named_children(layer):
        shared = below and isinstance(module, nn.ParameterDict) and not own_variables(layer)
        if not isinstance(module, keras.layers.Layer) and not shared:
            yield name, module


def _named_modules(
    layer: Any, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    memo = set() if memo is None else memo
    if layer in memo:
        return
    if remove_duplicate:
        memo.add(layer)
    yield prefix, layer
    for name, module in _named_children(layer):
        path = f"{prefix}.{name}".removeprefix(".")
        walk = partial(_named_modules, module) if isinstance(module, keras.layers.Layer) else module.named_modules
        yield from walk(memo, path, remove_duplicate)


def _named(
    of_torch: Callable[..., Iterator[tuple[str, Any]]],
    layer: Any,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) pairs as `of_torch` does, but names a variable by its layer's path and its own name."""
    # `of_torch` is torch's own `named_parameters` or `named_buffers`.
    names = {id(v.value): f"{path}.{v.name}" for path, each in layers_of(layer) for v in own_variables(each)}
    for name, tensor in of_torch(layer, prefix, recurse, remove_duplicate):
        known = names.get(id(tensor))
        yield name if known is None else ".".join(filter(None, (prefix, known.removeprefix(".")))), tensor


def _deep_copy(layer: Any, memo: dict[int, Any]) -> Any:
    """Copies a model, for `copy.deepcopy`: makes a new model from its configuration, and copies the weights to it."""
    # Copying by pickling would work only for classes that are registered with Keras.
    twin = keras.models.clone_model(layer)
    for copied, own in zip(_layers(twin), _layers(layer), strict=True):
        copied.name = own.name  # a layer inside of another would get a new one
    for variable, own in zip(twin.variables, layer.variables, strict=True):
        variable.assign(memo.get(id(own.value), own.value).detach())
        variable.trainable = own.trainable
    memo[id(layer)] = twin
    return as_modules(twin)


_METHODS: dict[str, Callable[..., Any]] = {
    "named_children": _named_children,
    "named_modules": _named_modules,
    "named_parameters": partial(_named, nn.Module.named_parameters),
    "named_buffers": partial(_named, nn.Module.named_buffers),
}
