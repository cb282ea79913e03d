"""The layers of a Keras model as modules that torch, and so a session of halfstep, finds; of the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from halfstep.adapters.keras.installed import BACKEND, keras
from halfstep.adapters.keras.policies import layers_of, named_children, own_variables
from halfstep.errors import SetupError
from halfstep.torch_internals import buffers_of


def as_modules(model: keras.Model) -> Any:
    """Has torch find each layer of a built model as a module, under Keras's name of it; returns the model.

    Keras registers a layer as a module only where it is an attribute of another, and running statistics as parameters.
    Afterwards `halfstep.initialize`, `check`, `blame` and `whatif` name layers as `apply_plan` does, rules find them,
    copies can be made, on which cures are tried, and statistics are buffers, which a skipped step leaves as they were.
    Weights, `state_dict`, and what Keras saves stay as they are. Call it after `model.to(device)`; idempotent.

    Raises:
        SetupError: Keras runs on another backend, or the model is not built.
    """
    if BACKEND != "torch":
        raise SetupError(
            f"layers are modules of torch only on the torch backend, and this is {BACKEND}; use LossScaleOptimizer and "
            "StepLog here, or choose torch before the import of keras: os.environ['KERAS_BACKEND'] = 'torch'"
        )
    if not isinstance(model, keras.Model):
        raise SetupError(f"{model!r:.80} is not a Keras model; give a keras.Model")
    unbuilt = next((layer.name for layer in reversed(_layers(model)) if not layer.built), None)
    if unbuilt is not None:
        raise SetupError(f"layer {unbuilt!r} of {model.name!r} is not built; call the model on a batch first: model(x)")
    for layer in _layers(model):
        vars(layer).update({name: partial(method, layer) for name, method in _METHODS.items()})
        _make_buffers(layer)
    vars(model)["__deepcopy__"] = partial(_deep_copy, model)
    return model


@contextmanager
def seen_as_modules(model: keras.Model) -> Iterator[None]:
    """Does so for a while, and puts back what Keras has made."""
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


def _make_buffers(layer: Any) -> None:
    """Makes variables buffers that Keras holds as parameters and that no gradient is ever to change."""
    held = layer.torch_params
    frozen = {id(v) for each in _layers(layer) if not each.trainable for v in each.weights}  # for a time
    for variable in layer.variables:
        if not variable.trainable and id(variable) not in frozen and variable.path in held:
            held.register_buffer(variable.path, held.pop(variable.path))


def _named_children(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Replaces torch's: the layers below by their own names, then what is no layer, such as the variables.

    Where all of these belong to layers below, which have them too, rules on one layer would meet those of the others.
    """
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
    """Gives variables the names of their layers."""
    names = {id(v.value): f"{path}.{v.name}" for path, each in layers_of(layer) for v in own_variables(each)}
    for name, tensor in of_torch(layer, prefix, recurse, remove_duplicate):
        known = names.get(id(tensor))
        yield name if known is None else ".".join(filter(None, (prefix, known.removeprefix(".")))), tensor


def _deep_copy(layer: Any, memo: dict[int, Any]) -> Any:
    """Copies a model by its configuration: Keras's trackers cannot be copied, and pickling needs registered classes."""
    twin = keras.models.clone_model(layer)
    for copied, own in zip(_layers(twin), _layers(layer), strict=True):
        copied.name = own.name  # a layer inside of another would get a new one
    for variable, own in zip(twin.variables, layer.variables, strict=True):
        value = memo.get(id(own.value), own.value)
        variable.assign(value.detach())
        variable.trainable = own.trainable
    memo[id(layer)] = twin
    return as_modules(twin)


_METHODS: dict[str, Callable[..., Any]] = {
    "named_children": _named_children,
    "named_modules": _named_modules,
    "named_parameters": partial(_named, nn.Module.named_parameters),
    "named_buffers": partial(_named, nn.Module.named_buffers),
}
