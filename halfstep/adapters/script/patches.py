"""The patches of torch that `halfstep run` applies while a script runs, each with a function that undoes it."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler as AnyGradScaler  # torch's own, on which all others are built
from torch.optim import Optimizer

from halfstep.adapters import torch_amp
from halfstep.adapters.apex import amp
from halfstep.adapters.apex.install import install as install_apex
from halfstep.adapters.apex.install import uninstall as uninstall_apex
from halfstep.adapters.script.conversion import Conversion
from halfstep.formats import Format
from halfstep.initialize import initialize
from halfstep.torch_internals import (
    FOLDER,
    called_from_above,
    frames_of,
    in_backward,
    in_functorch,
    is_compiling_here,
    scripts_builtins,
)
from halfstep.train.cast.ops import autocast
from halfstep.train.session.open import open_session
from halfstep.train.session.session import Session

try:
    import safetensors.torch as safetensors
except ImportError:
    safetensors = None

HALFSTEP = str(Path(torch_amp.__file__).parents[1]) + os.sep
ADAPTERS = Path(torch_amp.__file__).parent  # those of trainers open sessions that scripts ask for
APEX = inspect.getfile(amp)
MAKERS = (torch_amp.__file__, inspect.getfile(autocast))  # through which a script makes a drop-in autocast


LOW = (torch.bfloat16, torch.float16)
DENSE = (torch.Tensor, nn.Parameter)  # and what is not is not stored low by halfstep
HOLDERS = (list, tuple, dict, Iterator)  # of tensors
READS = ("numpy", "tolist", "__dlpack__", "__reduce_ex__")  # of a weight's memory
COPIES = ("clone", "to", "cpu", "cuda", "float", "double", "__deepcopy__")
WRITES = (  # into their first argument
    *((torch.Tensor, name) for name in ("copy_", "lerp_", "add_", "__setitem__")),
    *((torch, name) for name in ("_foreach_copy_", "_foreach_lerp_")),
)
COMPARES = ("eq", "ne", "__eq__", "__ne__", "sub", "__sub__", "equal", "allclose", "isclose", "lerp")
TAKES = (  # copies of the weights among the arguments
    *((torch.Tensor, name) for name in (*COMPARES, "matmul", "__matmul__", "mm")),
    *((torch, name) for name in ("equal", "allclose")),  # torch.compile breaks a graph at both; at no other patch
    (nn.utils, "parameters_to_vector"),
    *((safetensors, name) for name in ("save", "save_file") if safetensors is not None),
)
EXPORTS = (  # what writes a model as a program, with the formats that it finds
    (torch.onnx, "export"),
    (torch.export, "export"),
    (torch.jit, "trace"),
    (torch.jit, "script"),
)


def install(listener: Conversion, apex_low: Format | str) -> Callable[[], None]:
    """Patches torch to call `listener`, and apex with the format `apex_low`; returns a function that undoes this."""
    full: tuple[Any, ...] = (  # what gives the script its weights in fp32
        *((torch.Tensor, name, lambda read: _reads_full(read, listener)) for name in READS),
        *((torch.Tensor, name, lambda copy: _copies_full(copy, listener)) for name in COPIES),
        *((owner, name, lambda run: _takes_full(run, listener, 1)) for owner, name in WRITES),
        *((owner, name, lambda run: _takes_full(run, listener, 0)) for owner, name in TAKES),
    )
    with ExitStack() as stack:
        stack.callback(torch_amp.install())
        stack.callback(_put(amp, "initialize", lambda run: _before_apex_amp(run, listener)))
        install_apex(apex_low)
        stack.callback(uninstall_apex)
        for owner, name, make in (
            (autocast, "on_made", _then(functools.partial(_autocast_made, listener))),
            (AnyGradScaler, "__init__", _then(functools.partial(_scaler_made, listener))),
            (Session, "__init__", _then(functools.partial(_session_made, listener))),
            (Optimizer, "__init__", _then(listener.built)),  # in a subclass, the rest of its __init__ is to come
            (Optimizer, "__setstate__", _then(functools.partial(listener.built, copied=True))),  # or loads a state
            (torch.autograd, "backward", lambda run: _backward(run, listener)),
            (torch.autograd, "grad", lambda run: _grad(run, listener)),
            *((owner, name, lambda run: _on_plain_models(run, listener)) for owner, name in EXPORTS),
            *(full if listener.stores_low else ()),  # else no call of a tensor takes longer
        ):
            stack.callback(_put(owner, name, make))
        return stack.pop_all().close


def _put(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    before = getattr(owner, name)
    own = name in vars(owner)
    after = make(before)
    if id(before) in (known := scripts_builtins()):
        known[id(after)] = known[id(before)]  # for torch.jit.script
    setattr(owner, name, after)

    def put_back() -> None:
        known.pop(id(after), None)
        setattr(owner, name, before) if own else delattr(owner, name)

    return put_back


def _then(told: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Returns a patch of a method, which then calls `told` with the object."""

    def patch(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            told(self)

        return method

    return patch


def _autocast_made(listener: Conversion, region: autocast) -> None:
    if region.enabled and not _is_ours(sys._getframe(2)):  # that makes it
        listener.uses("torch.amp's autocast")


def _scaler_made(listener: Conversion, scaler: AnyGradScaler) -> None:
    if scaler.is_enabled():
        listener.uses("torch.amp's GradScaler")


def _before_apex_amp(run: Any, listener: Conversion) -> Any:
    @functools.wraps(run)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if inspect.signature(run).bind(*args, **kwargs).arguments.get("enabled", True):
            listener.uses("apex.amp")  # here, since it refuses models that are low already
        return run(*args, **kwargs)

    return initialize


def _session_made(listener: Conversion, session: Session) -> None:
    ours = open_session.__code__, initialize.__code__, inspect.unwrap(initialize).__code__
    makers = (each.f_code for each in frames_of(sys._getframe(2)))  # that make the session
    file = next((code.co_filename for code in makers if code not in ours), "")
    if file == APEX:
        listener.opened(session, "apex.amp")
    elif not file.startswith(HALFSTEP) or Path(file).parent == ADAPTERS:  # else the listener's own, or of a trial
        listener.opened(session, "a halfstep session")


def _is_ours(frame: FrameType | None) -> bool:
    """Returns whether torch (for example in checkpointing) or halfstep created an autocast object, not the script."""
    files = (each.f_code.co_filename for each in frames_of(frame))
    return next((file for file in files if file not in MAKERS), "").startswith((FOLDER, HALFSTEP))


def _is_nested() -> bool:
    """Returns whether torch itself runs a pass: inside another one, in a transform of torch.func, to trace it."""
    return in_backward() or in_functorch() is not None or is_compiling_here()


class _Full(torch.autograd.Function):
    """A copy of a weight's fp32 value, with the gradient of the low weight."""

    @staticmethod
    def forward(ctx: Any, low: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        return full.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].to(torch.float32)


def _reads_full(read: Any, listener: Conversion) -> Any:
    @functools.wraps(read)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        full = listener.full_value(self) if _may_be_weight(self) else None
        if full is None and read.__name__ == "__reduce_ex__":
            listener.look_at_saved(self)
        return read(self if full is None else full, *args, **kwargs)

    return method


def _copies_full(copy: Any, listener: Conversion) -> Any:
    @functools.wraps(copy)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = copy(self, *args, **kwargs)
        if self.dtype not in LOW or torch.compiler.is_compiling() or _is_ours(sys._getframe(1)):
            return out  # so does torch where it moves a model
        full = _copied(self, listener)
        if full is self or out.data_ptr() == self.data_ptr():
            return out
        if copy.__name__ == "__deepcopy__":
            args[0][id(self)] = full  # the memo
            return full
        return copy(full, *args, **kwargs)

    return method


def _takes_full(run: Any, listener: Conversion, written: int) -> Any:
    """Returns a patch that gives `run` the weights among its arguments in fp32, and keeps what it writes into them."""

    def full(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return _copied(given, listener)
        if isinstance(given, dict):
            return {key: full(value) for key, value in given.items()}
        made = tuple if isinstance(given, tuple) else list
        return made(map(full, given)) if isinstance(given, HOLDERS) else given

    @functools.wraps(run)
    def take(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(map(_may_be_low, (*args, *kwargs.values()))):
            return run(*args, **kwargs)
        caller = sys._getframe(1)
        if not listener.lends_full() or caller.f_code.co_filename.startswith(HALFSTEP):
            return run(*args, **kwargs)
        into = [t for each in args[:written] for t in ([each] if isinstance(each, torch.Tensor) else each)]
        low = [t for t in into if t.dtype in LOW]
        refused = torch.is_grad_enabled() and any(t.requires_grad and t.is_leaf for t in low)
        if low and (refused or _is_ours(caller) or all(listener.full_value(t) is None for t in low)):
            return run(*args, **kwargs)  # ours is also torch, where it loads a state
        with listener.writing_full(into) as values:
            first = [values] if args[:written] and isinstance(args[0], HOLDERS) else values
            out = run(*first, *map(full, args[written:]), **full(kwargs))
        return args[0] if into and isinstance(out, torch.Tensor) else out

    return take


def _may_be_low(given: Any) -> bool:
    return given.dtype in LOW if isinstance(given, torch.Tensor) else isinstance(given, HOLDERS)


def _copied(t: torch.Tensor, listener: Conversion) -> torch.Tensor:
    """Returns a copy of the fp32 value of a low weight outside of forwards and passes; else the tensor itself."""
    full = listener.full_value(t) if listener.lends_full() and _may_be_weight(t) else None
    return t if full is None else _Full.apply(t, full)  # type: ignore[no-untyped-call]


def _may_be_weight(t: torch.Tensor) -> bool:
    return t.dtype in LOW and type(t) in DENSE and t.layout is torch.strided


def _on_plain_models(run: Any, listener: Conversion) -> Any:
    @functools.wraps(run)
    def export(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values(), None)[0]
        if run.__name__ == "script" and not isinstance(given, nn.Module):  # most often as a decorator
            return run(*args, **(called_from_above(kwargs) if isinstance(given, type) else kwargs))
        with listener.paused():
            program = run(*args, **kwargs)
        gc.collect()  # of modules around the model that torch made, in cycles
        listener.programs.update([program] if isinstance(program, nn.Module) else [])
        return program

    return export


def _backward(run: Any, listener: Conversion) -> Any:
    @functools.wraps(run)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if _is_nested():  # of a reentrant checkpoint: what comes in is scaled already
            run(tensors, grad_tensors, *args, **kwargs)
        else:
            named = dict(zip(("retain_graph", "create_graph", "grad_variables", "inputs"), args, strict=False))
            listener.backward(run, tensors, grad_tensors, {**named, **kwargs})

    return backward


def _grad(run: Any, listener: Conversion) -> Any:
    @functools.wraps(run)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")
        if _is_nested():
            return run(outputs, inputs, *args, **kwargs)
        return listener.grad(run, outputs, inputs, {**dict(zip(names, args, strict=False)), **kwargs})

    return grad
