"""Every private name of torch that halfstep stands on, and nothing else: a new torch release is checked here.

A name that this torch lacks ends `import halfstep` with one error that lists all of them. A few things can change
their meaning and keep their name; `missing(run=True)` tries those in miniature, which the tests do and an import
does not. So the absence of each name below is loud; "tried" marks those whose change would be silent otherwise.

Functions of torch's are bound as they are, attributes as `attrgetter`s: on hot paths neither costs a call in Python.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import fields
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

WORKS_WITH = "2.11 to 2.13"
"""The releases of torch that halfstep's tests were run with."""

_NAMES: list[str] = []


def _find(path: str) -> Any:
    """Returns what a dotted path names; of a class also an attribute that its instances are declared to have.

    Raises:
        AttributeError: there is no such thing.
    """
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    known = first
    for name in rest:
        known = f"{known}.{name}"
        if hasattr(found, name):
            found = getattr(found, name)
        elif inspect.ismodule(found):
            try:
                found = importlib.import_module(known)
            except ImportError as error:
                raise AttributeError(known) from error
        elif name in getattr(found, "__annotations__", {}):
            return None
        else:
            raise AttributeError(known)
    return found


def _name(path: str) -> Any:
    """Returns what a dotted path names and has `missing` look for it; None where it is not there."""
    _NAMES.append(path)
    try:
        return _find(path)
    except AttributeError:
        return None  # no module of halfstep ever sees it: the import ends below


def _attribute(path: str) -> Any:
    """Returns a function that reads an attribute of an object of a class, such as "torch.Tensor._version"."""
    _name(path)
    return operator.attrgetter(path.rpartition(".")[2])


def _method(path: str) -> Any:
    """Returns a function that calls a method without arguments of an object of a class."""
    _name(path)
    return operator.methodcaller(path.rpartition(".")[2])


# Classes, which mypy has to know as such.
if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._C import FunctionSchema as FunctionSchema
    from torch._ops import OpOverload as OpOverload
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNormBase = _NormBase
else:
    DispatchKey = _name("torch._C.DispatchKey")
    FunctionSchema = _name("torch._C.FunctionSchema")
    OpOverload = _name("torch._ops.OpOverload")  # an operation as a dispatch mode and the op registry see it
    BatchNormBase = _name("torch.nn.modules.batchnorm._NormBase")  # of batch and instance norms
    TorchDispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode")  # sees every operation

# The dispatcher: the rows of the op table are kernels for autocast's keys.
DispatchKeySet: Any = _name("torch._C.DispatchKeySet")
keyset_after: Callable[[Any], Any] = _name("torch._C._dispatch_keyset_full_after")  # the keys below one
excluded_keys: Callable[[Any], AbstractContextManager[Any]] = _name("torch._C._ExcludeDispatchKeyGuard")
forced_keys: Callable[[Any, Any], AbstractContextManager[Any]] = _name("torch._C._ForceDispatchKeyGuard")
keys_included_here: Callable[[], Any] = _name("torch._C._dispatch_tls_local_include_set")
keys_excluded_here: Callable[[], Any] = _name("torch._C._dispatch_tls_local_exclude_set")
parsed_key: Callable[[str], Any] = _name("torch._C._dispatch_key_parse")
has_kernel: Callable[[str], bool] = _name("torch._C._dispatch_has_kernel")  # for any key; asked first
has_kernel_for: Callable[[str, Any], bool] = _name("torch._C._dispatch_has_kernel_for_dispatch_key")
all_op_names: Callable[[], list[str]] = _name("torch._C._dispatch_get_all_op_names")  # for "did you mean"
schemas_of_op: Callable[[str], list[FunctionSchema]] = _name("torch._C._jit_get_schemas_for_operator")
take_kernels_out: Callable[[Any], None] = _method("torch.library.Library._destroy")

# Operations.
schema_of: Callable[[Any], Any] = _attribute("torch.ops.aten.mm.default._schema")
direct_call: Callable[[Any], Callable[..., Any]] = _attribute("torch.ops.aten.mm.default._op")  # past torch's Python
call_by_key: Callable[[Any], Callable[..., Any]] = _attribute("torch.ops.aten.mm.default._op_dk")  # (key, ...)
kernels_in_python: Callable[[Any], dict[Any, Any]] = _attribute("torch.ops.aten.mm.default.py_kernels")
redispatch: Callable[..., Any] = _name("torch._ops.OpOverload.redispatch")  # (overload, keys, ...)

# Products and attention that have no public operation; emulation and wide backward passes know them by these.
ADDMM_ACTIVATION: OpOverload = _name("torch.ops.aten._addmm_activation.default")
TRILINEAR: OpOverload = _name("torch.ops.aten._trilinear.default")
FLASH_ATTENTION_CPU: OpOverload = _name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
FLASH_ATTENTION_CPU_BACKWARD: OpOverload = _name(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
)

# Dispatch modes.
mode_stack: Callable[[], list[TorchDispatchMode]] = _name(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
pop_mode: Callable[[], TorchDispatchMode] = _name("torch.utils._python_dispatch._pop_mode")
push_mode: Callable[[TorchDispatchMode], None] = _name("torch.utils._python_dispatch._push_mode")
without_modes: Callable[[], AbstractContextManager[Any]] = _name("torch._C._DisableTorchDispatch")
NO_TORCH_DISPATCH: Any = _name("torch._C._disabled_torch_dispatch_impl")  # of a class whose memory holds its elements

# Trees of containers.
tree_leaves: Callable[[Any], list[Any]] = _name("torch.utils._pytree.tree_leaves")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _name("torch.utils._pytree.tree_map")
tree_map_only: Callable[[Any, Callable[[Any], Any], Any], Any] = _name("torch.utils._pytree.tree_map_only")

# Autograd.
NO_BACKWARD = -1  # the task outside of every backward pass; tried
backward_task: Callable[[], int] = _name("torch._C._current_graph_task_id")
running_node: Callable[[], Any] = _name("torch._C._current_autograd_node")
next_sequence_number: Callable[[], int] = _name("torch._C._autograd._get_sequence_nr")
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")  # of a node; tried
hooks_of: Callable[[Tensor], MutableMapping[int, Any] | None] = _attribute("torch.Tensor._backward_hooks")  # tried
post_accumulate_hooks_of: Callable[[Tensor], MutableMapping[int, Any] | None] = _attribute(  # tried
    "torch.Tensor._post_accumulate_grad_hooks"
)

# Tensors.
version_of: Callable[[Tensor], int] = _attribute("torch.Tensor._version")  # counts what is written into a tensor
sparse_values: Callable[[Tensor], Tensor] = _method("torch.Tensor._values")  # of a sparse COO one, as it is
sparse_indices: Callable[[Tensor], Tensor] = _method("torch.Tensor._indices")
jagged_values: Callable[[Any], Tensor] = operator.attrgetter("_values")  # of a nested tensor; tried
is_zero_tensor: Callable[[Tensor], bool] = _method("torch.Tensor._is_zerotensor")  # one without memory
storage_identity: Callable[[Any], int] = _attribute("torch.UntypedStorage._cdata")
is_functorch_wrapped: Callable[[Tensor], bool] = _name("torch._C._functorch.is_functorch_wrapped_tensor")
functorch_unwrapped: Callable[[Tensor], Tensor] = _name("torch._C._functorch.get_unwrapped")
unflatten: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = _name("torch._C._nn.unflatten_dense_tensors")

# Loops over lists of tensors, and torch's fused updates.
foreach_add_: Callable[..., None] = _name("torch._foreach_add_")
foreach_mul_: Callable[..., None] = _name("torch._foreach_mul_")
foreach_copy_: Callable[..., None] = _name("torch._foreach_copy_")
foreach_norm: Callable[..., Sequence[Tensor]] = _name("torch._foreach_norm")
fused_adam_: Callable[..., None] = _name("torch._fused_adam_")
fused_adamw_: Callable[..., None] = _name("torch._fused_adamw_")
fused_sgd_: Callable[..., None] = _name("torch._fused_sgd_")
update_scale_: Callable[..., Tensor] = _name("torch._amp_update_scale_")

# Modules.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _attribute("torch.nn.Module._parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = _attribute("torch.nn.Module._buffers")
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _attribute("torch.nn.Module._modules")
state_dict_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = operator.attrgetter(  # and those of loading
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)
_name("torch.nn.Module._state_dict_hooks")
_name("torch.nn.Module._state_dict_pre_hooks")
_name("torch.nn.Module._load_state_dict_pre_hooks")
_name("torch.nn.Module._load_state_dict_post_hooks")
COMPILED = "_orig_mod"  # the name of a module inside the wrapper of torch.compile; tried
AVERAGING: CodeType = _name(
    "torch.optim.swa_utils.AveragedModel.update_parameters.__code__"
)  # asks for parameters; tried


def metadata_of(state: Any) -> dict[str, dict[str, Any]]:
    """Returns what a state dict says of its modules by name; a dict that torch did not make says nothing. Tried."""
    found: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})
    return found


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Returns the module inside the wrapper of torch.compile, None where `module` is no such wrapper."""
    below = modules_of(module)
    return below[COMPILED] if COMPILED in below else None  # noqa: SIM401  a ScriptModule's has no `get`


# Optimizers.
_STEPPED = "_opt_called"  # without it LR schedulers warn of a step that they have not seen; tried
SCHEDULED = "_wrapped_by_lr_sched"  # the mark by which a scheduler knows that it has wrapped `step` already; tried
_FUSED = "_step_supports_amp_scaling"  # of an optimizer that takes `grad_scale` and `found_inf`; tried
step_pre_hooks_of: Callable[[Optimizer], MutableMapping[int, Any]] = _attribute(
    "torch.optim.Optimizer._optimizer_step_pre_hooks"
)
step_post_hooks_of: Callable[[Optimizer], Any] = _attribute("torch.optim.Optimizer._optimizer_step_post_hooks")
load_pre_hooks_of: Callable[[Optimizer], Any] = _attribute("torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks")
load_post_hooks_of: Callable[[Optimizer], Any] = _attribute(
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks"
)
GLOBAL_STEP_PRE_HOOKS: MutableMapping[int, Any] = _name("torch.optim.optimizer._global_optimizer_pre_hooks")  # tried
GLOBAL_STEP_POST_HOOKS: MutableMapping[int, Any] = _name("torch.optim.optimizer._global_optimizer_post_hooks")  # tried


def mark_stepped(optimizer: Optimizer, stepped: bool = True) -> None:
    """Tells LR schedulers that an optimizer was stepped, by another way than its `step`."""
    setattr(optimizer, _STEPPED, stepped)


def was_stepped(optimizer: Optimizer) -> bool:
    """Tells whether LR schedulers take an optimizer for one that was stepped."""
    return bool(getattr(optimizer, _STEPPED, False))  # absent until the first step or scheduler


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer's own kernel looks at `found_inf`; absent from those that have no such kernel."""
    return bool(getattr(optimizer, _FUSED, False))


class OpenGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with what a subclass needs of it under public names."""

    @property
    def growth_tracker(self) -> Tensor | None:
        """Clean steps in a row (0-dim int32); None until the scale is on a device."""
        return self._growth_tracker

    def scale_and_tracker(self) -> tuple[Tensor, Tensor]:
        """Returns the scale and the growth tracker; raises where nothing was scaled yet."""
        return self._check_scale_growth_tracker("update")

    def found(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns what was found of an optimizer's gradients, nonzero for overflow, for each device."""
        return list(self._found_inf_per_device(optimizer).values())

    def found_by_all(self) -> list[Tensor]:
        """Returns the same of all optimizers since the last `update`."""
        states = self._per_optimizer_states.values()
        return [found for state in states for found in state["found_inf_per_device"].values()]

    def forget_found(self) -> None:
        """Begins anew, as `update` does at its end."""
        self._per_optimizer_states = defaultdict(_fresh_optimizer_state)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Returns whether the gradients of an optimizer were unscaled, and not stepped, since the last `update`."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is _UNSCALED)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer steps on unscaled gradients that are all finite."""

    def on_device(self, device: torch.device) -> None:
        """Called when the scale is made, on the device of the first loss."""

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.before_step(optimizer)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self.on_device(dev)


class OpenAutocast(torch.autocast):
    """`torch.autocast` that can tell what it was made with."""

    @property
    def enabled(self) -> bool:
        """Whether it casts: as asked, but for a device that is not there."""
        return self._enabled

    def again(self, of: type[torch.autocast] = torch.autocast) -> torch.autocast:
        """Returns torch's own with the same settings, but for warnings that were given."""
        return of(self.device, self.fast_dtype, self._enabled, self._cache_enabled)


_UNSCALED: Any = _name("torch.amp.grad_scaler.OptState").UNSCALED
_fresh_optimizer_state: Callable[[], dict[str, Any]] = _name("torch.amp.grad_scaler._refresh_per_optimizer_state")
for _of_scaler in (
    "_maybe_opt_step",
    "_lazy_init_scale_growth_tracker",
    "_check_scale_growth_tracker",
    "_found_inf_per_device",
):
    _name(f"torch.amp.GradScaler.{_of_scaler}")


# torch.compile.
def forget_compiled() -> None:
    """Drops every compiled graph of this process, where there can be any."""
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch.compiler.reset()


def end_stance(stance: Any) -> None:
    """Makes what `torch.compiler.set_stance` returned the stance that was before it. Tried.

    To set that one again would undo a `with set_stance(...)` entered since, whose end would then bring ours back.
    """
    for field in fields(stance.stance):
        object.__setattr__(stance.stance, field.name, getattr(stance.prev, field.name))


def cache_tag() -> Any:
    """Returns the tag that torch.compile's caches on disk have in every thread. Tried."""
    entry = _process_wide_tag()
    return torch.compiler.config.cache_key_tag if entry is None else entry.env_value_default


def set_cache_tag(tag: Any) -> None:
    """Sets the tag of torch.compile's caches on disk in every thread. Tried."""
    entry = _process_wide_tag()
    if entry is None:
        torch.compiler.config.cache_key_tag = tag
    else:
        entry.env_value_default = tag


def _process_wide_tag() -> Any:
    """Returns the config entry whose default holds in every thread; None where setting the config does (torch 2.11).

    A config that is set holds in one context only since torch 2.13, so not in another thread or notebook cell.
    """
    entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    per_context = isinstance(getattr(entry, "user_override", None), ContextVar)
    return entry if per_context and hasattr(entry, "env_value_default") else None


# Processes.
_JOIN = "_join_config"
_JoinConfig: Any = _name("torch.distributed.algorithms.join._JoinConfig")
_SYNCS = "init_sync"  # the argument of DistributedDataParallel by which it sends weights


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Tells whether processes may have run out of data, within `join()` of a wrapper. Tried."""
    return bool(getattr(wrapper, _JOIN).enable)


def sends_weights(frame: FrameType | None) -> bool:
    """Tells whether the wrapper that is being made sends weights: its constructor's argument, which it keeps not.

    `frame` is that of what the constructor has called. Tried.
    """
    while frame is not None and frame.f_code is not DistributedDataParallel.__init__.__code__:
        frame = frame.f_back
    return frame is None or bool(frame.f_locals.get(_SYNCS, True))


# The stack: whose code a frame runs. Tried, all of it.
FOLDER = os.path.dirname(torch.__file__) + os.sep
ENGINE = "_engine_run_backward"  # the function of torch's from which every backward pass starts
CHECKPOINT_FILE = os.path.join(FOLDER, "utils", "checkpoint.py")
FUNCTIONAL_FILES = tuple(os.path.join(FOLDER, *path) for path in (("nn", "functional.py"), ("functional.py",)))
DISPATCH_FILES = tuple(  # between what calls an operation and what sees it
    os.path.join(FOLDER, *path.split("/"))
    for path in (
        "_ops.py",
        "utils/_python_dispatch.py",
        "utils/_contextlib.py",
        "_compile.py",
        "library.py",
        "_dynamo/eval_frame.py",
    )
)

# Texts. Tried.
BEYOND = "without overflow"  # in the error for a constant that the format of the result does not have


_ACCUMULATE: Any = _name("torch._C._functions.AccumulateGrad")


def leaf_of(node: Any) -> Tensor | None:
    """Returns the tensor at which a node of a graph leaves gradients, None where it passes them on."""
    leaf: Tensor | None = node.variable if isinstance(node, _ACCUMULATE) else None
    return leaf


def is_tracing() -> bool:
    """Tells whether this thread traces a model for TorchScript."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def in_backward() -> bool:
    """Tells whether this thread runs a backward pass; hot paths compare `backward_task()` themselves."""
    return backward_task() != NO_BACKWARD


def onednn_takes_bf16() -> bool:
    """Returns whether torch's oneDNN computes bf16 products here; True of a torch that cannot be asked."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return True if ask is None else bool(ask())


# What is there, and what does as it did.
def missing(*, run: bool = False) -> list[str]:
    """Returns the private names that this torch lacks; with `run` also what it has but does otherwise.

    To run them takes seconds: some import torch.compile.
    """
    absent = [path for path in _NAMES if not _is_there(path)]
    return absent + [what for what, works in _BEHAVIOURS.items() if not _does(works)] if run else absent


def _is_there(path: str) -> bool:
    try:
        _find(path)
    except AttributeError:
        return False
    return True


def _does(works: Callable[[], bool]) -> bool:
    try:
        return works()
    except Exception:
        return False


def _averages_ask_for_parameters() -> bool:
    asked: list[CodeType] = []

    class Asked(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            asked.append(sys._getframe(1).f_code)
            return super().parameters(recurse)

    model = Asked(1, 1)
    averaged = AveragedModel(model)
    asked.clear()
    averaged.update_parameters(model)
    return asked == [AVERAGING]


def _optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))], lr=1.0)


def _global_hooks_are_kept() -> bool:
    def hook(*_: Any) -> None: ...

    kept = []
    for register, hooks in (
        (register_optimizer_step_pre_hook, GLOBAL_STEP_PRE_HOOKS),
        (register_optimizer_step_post_hook, GLOBAL_STEP_POST_HOOKS),
    ):
        handle = register(hook)
        kept.append(hook in hooks.values())
        handle.remove()
    return all(kept)


def _schedulers_see_marks() -> bool:
    optimizer = _optimizer()
    before = was_stepped(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    marked = hasattr(optimizer.step, SCHEDULED)
    mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # warns where it takes the optimizer for one that was not stepped
    unmarked = _optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(unmarked, lambda _: 1.0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scheduler.step()
    return marked and not before and was_stepped(optimizer) and bool(warned)


def _fused_optimizers_say_so() -> bool:
    weight = nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))
    return takes_found_inf(torch.optim.SGD([weight], fused=True)) and not takes_found_inf(_optimizer())


def _hooks_of_tensors_are_kept() -> bool:
    weight = nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))
    none = hooks_of(weight) is None and post_accumulate_hooks_of(weight) is None
    weight.register_hook(_averages_ask_for_parameters)  # type: ignore[no-untyped-call]  # which is not called
    weight.register_post_accumulate_grad_hook(_averages_ask_for_parameters)  # type: ignore[no-untyped-call]
    kept = (hooks_of(weight) or {}, post_accumulate_hooks_of(weight) or {})
    return none and all(list(hooks.values()) == [_averages_ask_for_parameters] for hooks in kept)


def _overflow_is_called_so() -> bool:
    try:
        torch.ones(1, dtype=torch.float16, device="cpu").masked_fill(torch.ones(1, dtype=torch.bool, device="cpu"), 1e9)
    except RuntimeError as error:
        return BEYOND in str(error)
    return False


def _compiled_modules_hold_theirs() -> bool:
    module = nn.Identity()
    wrapper: Any = torch.compile(module, backend="eager")
    return compiled_module(wrapper) is module and compiled_module(module) is None


def _stances_end() -> bool:
    with torch.compiler.set_stance("default"):  # whose end puts back what was before
        ours = torch.compiler.set_stance("force_eager")
        end_stance(ours)
        return bool(torch.compiler.set_stance("default").prev.stance == "default")


def _tag_holds_in_threads() -> bool:
    before, seen = cache_tag(), []
    set_cache_tag("halfstep")
    try:
        thread = threading.Thread(target=lambda: seen.append(torch.compiler.config.cache_key_tag))
        thread.start()
        thread.join()
    finally:
        set_cache_tag(before)
    return seen == ["halfstep"] and cache_tag() == before


def _nodes_are_named_and_numbered() -> bool:
    x = torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=True)
    first = next_sequence_number()
    out = x.softmax(0).log_softmax(0)
    node, seen = out.grad_fn, []
    assert node is not None
    x.register_hook(lambda _: seen.append((in_backward(), running_node() is not None)))  # type: ignore[no-untyped-call]
    out.sum().backward()  # type: ignore[no-untyped-call]
    (softmax, _), *_ = node.next_functions
    names = (node.name(), "" if softmax is None else softmax.name())
    numbers = (sequence_number(softmax), sequence_number(node))
    return (
        names == ("LogSoftmaxBackward0", "SoftmaxBackward0")
        and numbers == (first, first + 1)
        and seen == [(True, True)]
        and not in_backward()
    )


def _stack_has_known_files() -> bool:
    """Looks at the files on the stack of a part of a forward that a checkpoint runs again in a backward pass."""
    seen: list[tuple[str, str]] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frame: FrameType | None = sys._getframe()
            while frame is not None and in_backward():
                seen.append((frame.f_code.co_filename, frame.f_code.co_name))
                frame = frame.f_back
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=True)
    with Look():  # type: ignore[no-untyped-call]
        out = checkpoint(lambda t: nn.functional.softmax(t, 0), x, use_reentrant=False)
        out.sum().backward()
    files = {file for file, _ in seen}
    starts = {name for file, name in seen if file.startswith(FOLDER)}
    there = all(map(os.path.isfile, (*FUNCTIONAL_FILES, *DISPATCH_FILES)))
    return {CHECKPOINT_FILE, FUNCTIONAL_FILES[0]} <= files and ENGINE in starts and there


def _wrappers_keep_names() -> bool:
    joinable = inspect.unwrap(Joinable.__init__).__code__.co_names
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    made = inspect.unwrap(DistributedDataParallel.__init__) is DistributedDataParallel.__init__
    return _JOIN in joinable and _SYNCS in own and made and not _JoinConfig.construct_disabled_join_config().enable


def _jagged_tensors_have_values() -> bool:
    parts = [torch.ones(n, dtype=torch.float32, device="cpu") for n in (1, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return jagged_values(nested).shape == (4,)


def _states_have_metadata() -> bool:
    return metadata_of(nn.Linear(1, 1).state_dict()).get("", {}).get("version") == 1


_BEHAVIOURS: dict[str, Callable[[], bool]] = {
    "AveragedModel.update_parameters asks both models for their parameters itself": _averages_ask_for_parameters,
    "step hooks of all optimizers lie in two dicts": _global_hooks_are_kept,
    f"LR schedulers look at {_STEPPED} and {SCHEDULED}": _schedulers_see_marks,
    f"fused optimizers have {_FUSED}": _fused_optimizers_say_so,
    "hooks of a tensor lie in two dicts, None while there are none": _hooks_of_tensors_are_kept,
    f"the error for a constant beyond its format says {BEYOND!r}": _overflow_is_called_so,
    f"torch.compile keeps a module as {COMPILED}": _compiled_modules_hold_theirs,
    "what torch.compiler.set_stance returned can be turned into what was before": _stances_end,
    "the tag of torch.compile's caches holds in every thread": _tag_holds_in_threads,
    "autograd nodes are named for their operations and numbered in order": _nodes_are_named_and_numbered,
    "files and functions of torch's on the stack are the known ones": _stack_has_known_files,
    f"DistributedDataParallel has {_JOIN} and {_SYNCS}": _wrappers_keep_names,
    "nested tensors of layout jagged have _values": _jagged_tensors_have_values,
    "state dicts have _metadata": _states_have_metadata,
}


if _absent := missing():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_absent)}, on which this halfstep stands; "
        f"install torch {WORKS_WITH}, or a newer halfstep"
    )
