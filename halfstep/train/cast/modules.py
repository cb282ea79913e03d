"""What a session does to modules: marks them, casts values at their boundaries, keeps checkpoints in fp32."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from traceback import walk_stack
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from halfstep.errors import StateError
from halfstep.formats import CASTABLE, Format, is_low
from halfstep.torch_internals import buffers_of, compiled_inside, metadata_of, parameters_of, state_dict_hooks_of
from halfstep.train.cast.copies import CheckpointHook
from halfstep.train.cast.gate import Values
from halfstep.train.cast.tree import cast_floats, first_float_dtype

Undo = Callable[[], None]
_ASSIGN = "assign_to_params_buffers"  # torch's mark of `load_state_dict(assign=True)` in the metadata of a state
_FRAMES_OF_A_CALL = 11  # between torch's function and what the gate of a module calls
CastOut = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The owner of each module; its `__dict__` is no place for that, as it is copied and pickled, at O0 by user classes."""


def inputs_to(dtype: torch.dtype) -> Values:
    """Returns a function that casts the floating tensors of (args, kwargs) to `dtype`, except float64 and complex."""
    return compiled_inside(lambda args, kwargs: (cast_floats(args, dtype), kwargs and cast_floats(kwargs, dtype)))


def outputs_to(output: Format | Literal["input"]) -> CastOut:
    """Returns a function of (output, args, kwargs) that returns the output cast to a format."""
    if isinstance(output, Format):
        dtype = output.dtype
        return compiled_inside(lambda out, args, kwargs: cast_floats(out, dtype))

    def as_input(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = first_float_dtype(args, kwargs)
        return out if found is None else cast_floats(out, found)

    return compiled_inside(as_input)


class Values32(Protocol):
    """The fp32 values of parameters that are stored low."""

    def __contains__(self, parameter: object) -> bool:
        pass

    def full(self, parameter: nn.Parameter) -> Tensor:
        pass

    def load(self, parameter: nn.Parameter, entry: Tensor) -> Tensor:
        """Takes an entry of a state dict as a parameter's fp32 value; returns the low tensor to store."""

    def loaded(self, parameter: nn.Parameter) -> None:
        """Called after the tensor from `load` was copied into the parameter; the fp32 value stays as `load` set it."""


Given = dict[int, tuple[str, weakref.ref[Tensor]]]
"""For each parameter, by id: its name in the state dict that last got its fp32 value, and that tensor."""


def keep_checkpoints_full(module: nn.Module, values: Values32, given: Given) -> Undo:
    """Makes `state_dict` of one module (not its children) return fp32 values, and `load_state_dict` accept them."""
    # The modules of a model share one `given`, so that tied weights are one tensor in a state dict, as in torch.
    taken: list[nn.Parameter] = []

    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in _kept(module, values):
            if prefix + name in state:
                tied, last = given.get(id(parameter), ("", None))  # of a tied parameter, under another name
                known = None if last is None else last()
                fresh = known is None or state.get(tied) is not known
                value: Tensor = values.full(parameter).detach() if fresh else state[tied]
                state[prefix + name] = value
                given[id(parameter)] = prefix + name, weakref.ref(value)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _check_entries(module, state, prefix, values)
        taken[:] = [p for name, p in _kept(module, values) if _adopt(state, prefix + name, p, values)]

    def settle(module: nn.Module, incompatible_keys: Any) -> None:
        for parameter in taken:
            values.loaded(parameter)
        taken.clear()

    handles = [
        module.register_state_dict_post_hook(CheckpointHook(give)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(CheckpointHook(take)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(CheckpointHook(settle)),  # type: ignore[no-untyped-call]
    ]
    saving = state_dict_hooks_of(module)[0]
    saving.move_to_end(handles[0].id, last=False)  # the user's hooks may copy what they find, under other names

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _adopt(state: dict[str, Any], name: str, parameter: nn.Parameter, values: Values32) -> bool:
    """Takes an entry of a state dict as a parameter's fp32 value, and leaves the low tensor that torch then loads."""
    entry = state.get(name)
    if entry is not None and parameter.dim() == 0 and entry.shape == (1,):
        entry = entry[0]  # as torch takes it, for the sake of old files
    if entry is None or entry.shape != parameter.shape:  # torch reports the mismatch
        return False
    state[name] = values.load(parameter, entry)
    return True


def _check_entries(module: nn.Module, state: dict[str, Any], prefix: str, values: Values32) -> None:
    """Raises a StateError if an entry for a parameter of `module`, or of a module below it, holds no readable value."""
    # torch loads module by module.
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        if name not in state or parameter not in values:
            continue
        entry = state[name]
        if not isinstance(entry, Tensor) or entry.layout is not torch.strided or entry.is_meta or entry.is_quantized:
            raise StateError(
                f"the entry {name!r} of the state dict is {_described(entry)}; expected a dense tensor with plain "
                "storage"
            )


def _described(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return f"not a tensor but {'None' if entry is None else 'of type ' + type(entry).__name__}"
    kind = "meta" if entry.is_meta else "quantized" if entry.is_quantized else str(entry.layout).removeprefix("torch.")
    return f"a {kind} tensor"


def holds_state(module: nn.Module) -> bool:
    """Tells whether there are parameters or buffers in a module or below it."""
    return any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors)


def keep_parameters(module: nn.Module) -> Undo:
    """Makes `load_state_dict(assign=True)` of one module raise a StateError before it changes anything."""
    # A load with `assign=True` would replace the Parameters that the optimizer updates.

    def refuse(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if module not in _OWNERS or not metadata.get(_ASSIGN, False):
            return
        for entry in (metadata, *metadata_of(state).values()):
            entry.pop(_ASSIGN, None)  # torch leaves it in the caller's dict, where it outlives the call
        raise StateError(
            "load_state_dict(assign=True) would replace the Parameters that the optimizer updates; load without "
            "assign, or before halfstep.initialize. If this call did not pass assign=True, an earlier load left that "
            "flag in the state dict; it is removed now: load again"
        )

    return module.register_load_state_dict_pre_hook(CheckpointHook(refuse)).remove  # type: ignore[no-any-return, no-untyped-call]


def _kept(module: nn.Module, values: Values32) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) for a module's own parameters in `values`, also if a parametrization now holds them."""
    lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    owners = [("", module), *((f"parametrizations.{name}.", each) for name, each in lists.items())]
    found = [(prefix + name, p) for prefix, owner in owners for name, p in parameters_of(owner).items()]
    return [(name, p) for name, p in found if p is not None and p in values]


def bake(
    module: nn.Module,
    full: Callable[[nn.Parameter], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives a list of parametrizations the fp32 values of its weights if `remove_parametrizations` calls it."""
    # What it computes becomes the weight, which the session stores low again at its next step.
    frames = islice(walk_stack(sys._getframe(1)), _FRAMES_OF_A_CALL)
    if any(frame.f_code is parametrize.remove_parametrizations.__code__ for frame, _ in frames):
        for p in parameters_of(module).values():
            if p is not None and is_low(p.dtype):
                p.data = full(p).clone()
    return args, kwargs


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> Undo:
    """Casts a module's own floating buffers to `dtype`; returns a function that casts them back to their old dtypes."""
    before = {name: b.dtype for name, b in buffers_of(module).items() if b is not None and b.dtype is not dtype}
    changed = {name: old for name, old in before.items() if old in CASTABLE}
    for name in changed:
        buffers_of(module)[name] = buffers_of(module)[name].to(dtype)  # type: ignore[union-attr]

    def undo() -> None:
        for name, old in changed.items():
            buffer = buffers_of(module).get(name)
            if buffer is not None:
                buffers_of(module)[name] = buffer.to(old)

    return undo


def keep_buffers_full(module: nn.Module, dtype: torch.dtype) -> Undo:
    """Does what `cast_buffers` does, but state dicts have the buffers in their old dtypes."""
    before = {name: b.dtype for name, b in buffers_of(module).items() if b is not None}
    put_back = cast_buffers(module, dtype)

    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, old in before.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype is dtype is not old:
                state[prefix + name] = value.to(old)

    handle = module.register_state_dict_post_hook(CheckpointHook(give))  # type: ignore[no-untyped-call]

    def undo() -> None:
        handle.remove()
        put_back()

    return undo


def mark(modules: Iterable[nn.Module], owner: object) -> Callable[[], None]:
    """Marks modules as belonging to `owner`; returns a function that removes the marks."""
    marked, sign = list(modules), weakref.ref(owner)
    _OWNERS.update((module, sign) for module in marked)

    def undo() -> None:
        for module in marked:
            if _OWNERS.get(module) is sign:
                del _OWNERS[module]

    return undo


def owners(modules: Iterable[nn.Module]) -> list[object]:
    """Returns the owners that `mark` has given to modules, each owner once."""
    signs = [sign for module in modules if (sign := _OWNERS.get(module)) is not None]
    return list({id(owner): owner for sign in signs if (owner := sign()) is not None}.values())


def all_owners() -> list[object]:
    """Returns every owner that some module has now, each once."""
    return owners(list(_OWNERS))
