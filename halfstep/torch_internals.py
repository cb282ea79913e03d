"""Every private name of torch that halfstep uses, and nothing else: the file to check against a new torch release.

If torch lacks a name, `import halfstep` fails with one error that lists all missing names. What a name means could
change without any error, and so could texts and names of files; tests/torch_behaviours.py tries what is counted on.

Functions of torch are bound directly, attributes as `attrgetter`s: on hot paths neither costs a Python call.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import fields
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy

WORKS_WITH = "2.13"
"""The release of torch that the whole test suite passes on; docs/support.md says what was tried on others."""

# What differs between releases, and what provides for it:
# 2.12  casts to e4m3 saturate, and gave NaN before: explain/forecast/backward.py
# 2.13  the tag of compiled code is set for one context, and was for all threads: `_process_wide_tag`
# 2.13  FSDP2 has several groups of parameters a module, and had one: `_groups_of`
# 2.13  low layer norms on a CPU sum the gradients of fp32 parameters low: `_LOW_SUMS_ON_CPU` in train/cast/opkernels.py
# 2.13  FSDP2 has another name for the layout of a parameter that is a DTensor: `summed_twice`
# 2.13  reading of its TF32 switch warns: explain/forecast/backward.py
# 2.15  FSDP2 keeps gradients that it has not reduced with the gathered parameter: `holds_unreduced` finds both
# 2.15  torch.compile cannot copy an OrderedDict: train/cast/tree.py

Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES: list[str] = []
_GONE = object()


def _find(path: str) -> Any:
    """Returns the object at a dotted path, or `_GONE`; None for an instance attribute that its class only annotates."""
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
            except ImportError:
                return _GONE
        elif name in getattr(found, "__annotations__", {}):
            return None
        else:
            return _GONE  # no module of halfstep ever sees it: the import ends below
    return found


def _name(path: str) -> Any:
    """Returns the object at a dotted path, and registers the path for the check in `missing`."""
    _NAMES.append(path)
    return _find(path)


def _attribute(path: str) -> Any:
    """Returns a function that reads an attribute of an instance, from a path such as "torch.Tensor._version"."""
    _name(path)
    return operator.attrgetter(path.rpartition(".")[2])


def _method(path: str) -> Any:
    """Returns a function that calls a method of an instance without arguments, from a path as for `_attribute`."""
    _name(path)
    return operator.methodcaller(path.rpartition(".")[2])


# Classes, which mypy has to know as such.
if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._C import FunctionSchema as FunctionSchema
    from torch._ops import OpOverload as OpOverload
    from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm = _BatchNorm
    BatchNormBase = _NormBase
else:
    DispatchKey = _name("torch._C.DispatchKey")
    FunctionSchema = _name("torch._C.FunctionSchema")
    OpOverload = _name("torch._ops.OpOverload")  # an operation as a dispatch mode and the op registry see it
    StorageWeakRef = _name("torch.multiprocessing.reductions.StorageWeakRef")  # of memory; undocumented
    BatchNormBase = _name("torch.nn.modules.batchnorm._NormBase")  # of batch and instance norms
    BatchNorm = _name("torch.nn.modules.batchnorm._BatchNorm")
    TorchDispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode")  # sees every operation

# The dispatcher: the rows of the op table are kernels for autocast's keys.
keyset_after: Callable[[Any], Any] = _name("torch._C._dispatch_keyset_full_after")  # the keys below one
set_key_included: Callable[[Any, bool], None] = _name("torch._C._dispatch_tls_set_dispatch_key_included")
set_key_excluded: Callable[[Any, bool], None] = _name("torch._C._dispatch_tls_set_dispatch_key_excluded")
forced_keys: Callable[[Any, Any], AbstractContextManager[Any]] = _name("torch._C._ForceDispatchKeyGuard")
keys_included_here: Callable[[], Any] = _name("torch._C._dispatch_tls_local_include_set")
keys_excluded_here: Callable[[], Any] = _name("torch._C._dispatch_tls_local_exclude_set")
parsed_key: Callable[[str], Any] = _name("torch._C._dispatch_key_parse")
has_kernel: Callable[[str], bool] = _name("torch._C._dispatch_has_kernel")  # for any key; asked first
has_kernel_for: Callable[[str, Any], bool] = _name("torch._C._dispatch_has_kernel_for_dispatch_key")
has_fallback: Callable[[Any], bool] = _name("torch._C._dispatch_has_backend_fallback")  # of a key
all_op_names: Callable[[], list[str]] = _name("torch._C._dispatch_get_all_op_names")  # for "did you mean"
schemas_of_op: Callable[[str], list[FunctionSchema]] = _name("torch._C._jit_get_schemas_for_operator")
scripts_builtins: Callable[[], dict[int, str]] = _name("torch.jit._builtins._get_builtin_table")  # by id
take_kernels_out: Callable[[Any], None] = _method("torch.library.Library._destroy")

# Operations.
schema_of: Callable[[Any], Any] = _attribute("torch.ops.aten.mm.default._schema")
direct_call: Callable[[Any], Callable[..., Any]] = _attribute("torch.ops.aten.mm.default._op")  # past torch's Python
call_by_key: Callable[[Any], Callable[..., Any]] = _attribute("torch.ops.aten.mm.default._op_dk")  # (key, ...)
kernels_in_python: Callable[[Any], dict[Any, Any]] = _attribute("torch.ops.aten.mm.default.py_kernels")
redispatch_of: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_handle.redispatch_boxed")  # (keys, ...)
_name("torch.ops.aten.mm.default._handle.redispatch_boxed")

# Operations that take functions, such as `cond` and `scan`; the list has the keys that new ones pass.
HigherOrder: Any = _name("torch._ops.HigherOrderOperator")
_HIGHER_ORDER: Mapping[str, Any] = _name("torch._ops._higher_order_ops")
_PASSED_BY_THEM: list[Any] = _name("torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS")
FLEX_ATTENTION: Any = _name("torch._higher_order_ops.flex_attention")


def let_higher_order_pass(key: Any, flex: Callable[..., Any]) -> None:
    """Makes operations that take functions go on to the next key, as at autocast's; `flex` runs flex_attention."""
    if key not in _PASSED_BY_THEM:
        _PASSED_BY_THEM.append(key)
        for operation in _HIGHER_ORDER.values():
            operation.fallthrough(key)
        FLEX_ATTENTION.py_impl(key)(flex)


# Products and attention that have no public operation; emulation and wide backward passes know them by these.
ADDMM_ACTIVATION: OpOverload = _name("torch.ops.aten._addmm_activation.default")
TRILINEAR: OpOverload = _name("torch.ops.aten._trilinear.default")
FLASH_ATTENTION_CPU: OpOverload = _name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
FLASH_ATTENTION_CPU_BACKWARD: OpOverload = _name(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
)
# Of rows, offsets and lengths; the public function refuses to be traced.
jagged_of: Callable[..., Tensor] = _name("torch.nested._internal.nested_tensor.nested_view_from_values_offsets_lengths")
attention_kernel: Callable[..., int] = _name("torch._fused_sdp_choice")  # a value of SDPBackend
CUSTOM_OPERATIONS: Mapping[str, Any] = _name("torch._library.custom_ops.OPDEFS")  # by name, those that Python defines

# Dispatch modes.
mode_stack: Callable[[], list[TorchDispatchMode]] = _name(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
pop_mode: Callable[[], TorchDispatchMode] = _name("torch.utils._python_dispatch._pop_mode")
push_mode: Callable[[TorchDispatchMode], None] = _name("torch.utils._python_dispatch._push_mode")
without_modes: Callable[[], AbstractContextManager[Any]] = _name("torch._C._DisableTorchDispatch")
without_subclasses: Callable[[], AbstractContextManager[Any]] = _name("torch._C.DisableTorchFunctionSubclass")
NO_TORCH_DISPATCH: Any = _name("torch._C._disabled_torch_dispatch_impl")  # of a class whose memory holds its elements

# Trees of containers.
tree_leaves: Callable[[Any], list[Any]] = _name("torch.utils._pytree.tree_leaves")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _name("torch.utils._pytree.tree_map")
tree_map_only: Callable[[Any, Callable[[Any], Any], Any], Any] = _name("torch.utils._pytree.tree_map_only")

# Autograd.
NO_BACKWARD = -1  # the task outside of every backward pass
backward_task: Callable[[], int] = _name("torch._C._current_graph_task_id")
saved_tensor_hooks: Callable[[bool], Any] = _name("torch._C._autograd._top_saved_tensors_default_hooks")  # None: none
running_node: Callable[[], Any] = _name("torch._C._current_autograd_node")
next_sequence_number: Callable[[], int] = _name("torch._C._autograd._get_sequence_nr")
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")  # of a node
# Of a tensor or a module, which keeps them under the same name.
hooks_of: Callable[[Any], MutableMapping[int, Any] | None] = _attribute("torch.Tensor._backward_hooks")
post_accumulate_hooks_of: Callable[[Tensor], MutableMapping[int, Any] | None] = _attribute(
    "torch.Tensor._post_accumulate_grad_hooks"
)

# Tensors.
version_of: Callable[[Tensor], int] = _attribute("torch.Tensor._version")  # counts what is written into a tensor
sparse_values: Callable[[Tensor], Tensor] = _method("torch.Tensor._values")  # of a sparse COO one, as it is
sparse_indices: Callable[[Tensor], Tensor] = _method("torch.Tensor._indices")
jagged_values: Callable[[Any], Tensor] = operator.attrgetter("_values")  # of a nested tensor
is_zero_tensor: Callable[[Tensor], bool] = _method("torch.Tensor._is_zerotensor")  # one without memory
storage_identity: Callable[[Any], int] = _attribute("torch.UntypedStorage._cdata")
is_functorch_wrapped: Callable[[Tensor], bool] = _name("torch._C._functorch.is_functorch_wrapped_tensor")
in_functorch: Callable[[], Any] = _name("torch._C._functorch.peek_interpreter_stack")  # None outside of transforms
_transforms: Callable[[], Any] = _name("torch._C._functorch.get_interpreter_stack")  # None outside of them
_VMAP: Any = _name("torch._C._functorch.TransformType.Vmap")
outside_of_transforms: Callable[[], AbstractContextManager[Any]] = _name(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)
functorch_unwrapped: Callable[[Tensor], Tensor] = _name("torch._C._functorch.get_unwrapped")
unflatten: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = _name("torch._C._nn.unflatten_dense_tensors")

_guards: Callable[..., Any] = _name("torch._C._dynamo.guards.TensorGuards")


def viewed(tensor: Tensor) -> Tensor:
    """Returns the tensor that a tensor is a view of, or itself."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def transforms_differentiate() -> bool:
    """Tells whether a transform of torch.func computes derivatives here."""
    return any(each.key() != _VMAP for each in _transforms() or ())


_NEAR = 128  # tensors whose headers stay in a processor's cache


def same_kinds(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[int] | None]:
    """Returns a function that gives the addresses of tensors if they have the same classes, devices, dtypes and shapes.

    It gives None if one of these or of their strides differs, or if a tensor is sparse. The loops are in C, over few
    tensors each, whose headers then come from memory once.
    """
    if any(t.layout is not torch.strided for t in tensors):  # sparse rows are new each time, and CSR ends the process
        return lambda given: None
    count, parts = len(tensors), [slice(i, i + _NEAR) for i in range(0, len(tensors), _NEAR)]
    checks = [_guards(*tensors[part], dynamic_dims_sizes=None, dynamic_dims_strides=None).check for part in parts]

    def starts(given: Sequence[Tensor]) -> list[int] | None:
        if len(given) != count:
            return None
        found: list[int] = []
        for part, check in zip(parts, checks, strict=True):
            here = given[part]
            if not check(*here):
                return None
            found += map(Tensor.data_ptr, here)
        return found

    return starts


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
_STATE = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
state_dict_hooks_of: Callable[[nn.Module], tuple[OrderedDict[int, Any], ...]] = operator.attrgetter(*_STATE)
_NAMES += [f"torch.nn.Module.{hooks}" for hooks in _STATE]
forward_hooks_of: Callable[[nn.Module], MutableMapping[int, Any]] = _attribute("torch.nn.Module._forward_hooks")
forward_pre_hooks_of: Callable[[nn.Module], MutableMapping[int, Any]] = _attribute("torch.nn.Module._forward_pre_hooks")
COMPILED = "_orig_mod"  # the name of a module inside the wrapper of torch.compile
CHECKPOINTED = "_checkpoint_wrapped_module"  # and inside that of torch's checkpoint_wrapper, which Accelerate calls


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Returns a module's own parameter, None if it has none of this name; torch.compile can trace this."""
    found: nn.Parameter | None = module._parameters.get(name)
    return found


_FRAME_ACTION: Any = _name("torch._C._dynamo.eval_frame._FrameAction")
_FRAME_STRATEGY: Any = _name("torch._C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy: Callable[[CodeType, Any], None] = _name("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def uncompiled(function: Function) -> Function:
    """Makes torch.compile leave calls of a function alone, with all that it calls; costs the function nothing."""
    # It is for functions that torch's dispatcher calls, also between the graphs of a compiled model.
    _set_strategy(function.__code__, _FRAME_STRATEGY(_FRAME_ACTION.SKIP, _FRAME_ACTION.SKIP))
    return function


def compiled_inside(function: Function) -> Function:
    """Has torch.compile trace a function only inside its caller; where that breaks, it runs as is."""
    _set_strategy(function.__code__, _FRAME_STRATEGY(_FRAME_ACTION.SKIP, _FRAME_ACTION.DEFAULT))
    return function


_node_meta: Callable[[], dict[str, Any]] = _name("torch.fx.traceback.get_current_meta")


@contextmanager
def recomputed() -> Iterator[None]:
    """Has compiled code compute again in its backward pass, rather than keep, what is traced in this context."""
    meta = _node_meta()  # of the nodes that are made; torch's checkpoints mark theirs so
    if "recompute" in meta:
        yield  # inside a checkpoint
        return
    meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        del meta["recompute"]


def marked_constant(function: Function) -> Function:
    """Makes torch.compile call a function when it traces, and use the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def metadata_of(state: Any) -> dict[str, dict[str, Any]]:
    """Returns a state dict's metadata by module name; empty if torch did not make the dict."""
    found: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})
    return found


def makes_weights(module: nn.Module) -> bool:
    """Tells whether a hook computes a module's weight before forward, as the older spectral and weight norm do."""
    return any(isinstance(hook, (SpectralNorm, WeightNorm)) for hook in forward_pre_hooks_of(module).values())


def called_from_above(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keywords of `torch.jit.script` with which it looks up a class's names one frame further up."""
    return {**named, "_frames_up": named.get("_frames_up", 0) + 1}


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Returns the module inside the wrapper of torch.compile, None if `module` is not such a wrapper."""
    below = modules_of(module)
    return below[COMPILED] if COMPILED in below else None  # noqa: SIM401  a ScriptModule's has no `get`


# Optimizers.
_STEPPED = "_opt_called"  # without it LR schedulers warn of a step that they have not seen
SCHEDULED = "_wrapped_by_lr_sched"  # the mark by which a scheduler knows that it has wrapped `step` already
_FUSED = "_step_supports_amp_scaling"  # of an optimizer that takes `grad_scale` and `found_inf`
step_pre_hooks_of: Callable[[Optimizer], MutableMapping[int, Any]] = _attribute(
    "torch.optim.Optimizer._optimizer_step_pre_hooks"
)
step_post_hooks_of: Callable[[Optimizer], Any] = _attribute("torch.optim.Optimizer._optimizer_step_post_hooks")
REGISTRATION_HOOKS: MutableMapping[int, Any] = _name("torch.nn.modules.module._global_module_registration_hooks")
PARAM_HOOKS: MutableMapping[int, Any] = _name("torch.nn.modules.module._global_parameter_registration_hooks")
LOADS_STATE = "_process_value_according_to_param_policy"  # the static method that casts a loaded state
_name(f"torch.optim.Optimizer.{LOADS_STATE}")
GLOBAL_STEP_PRE_HOOKS: MutableMapping[int, Any] = _name("torch.optim.optimizer._global_optimizer_pre_hooks")
GLOBAL_STEP_POST_HOOKS: MutableMapping[int, Any] = _name("torch.optim.optimizer._global_optimizer_post_hooks")


def is_made(optimizer: Optimizer) -> bool:
    """Tells whether `Optimizer.__init__` was called; wrappers of other optimizers do not call it."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def mark_stepped(optimizer: Optimizer, stepped: bool = True) -> None:
    """Marks an optimizer as stepped, so that LR schedulers do not warn if its `step` method was not called."""
    setattr(optimizer, _STEPPED, stepped)


def was_stepped(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer is marked as stepped; LR schedulers check the mark."""
    return bool(getattr(optimizer, _STEPPED, False))  # absent until the first step or scheduler


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer's own kernel takes `found_inf`, by which it skips the update on overflow."""
    return bool(getattr(optimizer, _FUSED, False))


class OpenGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with public names for the private parts that a subclass needs."""

    @property
    def growth_tracker(self) -> Tensor | None:
        """The number of steps in a row without overflow (0-dim int32); None until the scale is on a device."""
        return self._growth_tracker

    def scale_and_tracker(self) -> tuple[Tensor, Tensor]:
        """Returns the scale and the growth tracker; raises an error if nothing was scaled yet."""
        return self._check_scale_growth_tracker("update")

    def found_by_all(self) -> list[Tensor]:
        """Returns a tensor for each optimizer and device since the last `update`, nonzero after an overflow there."""
        states = self._per_optimizer_states.values()
        return [found for state in states for found in state["found_inf_per_device"].values()]

    def forget_found(self) -> None:
        """Drops the tensors that `found_by_all` returns, as `update` does at its end."""
        self._per_optimizer_states = defaultdict(_fresh_optimizer_state)

    def is_ready(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer has not stepped and its gradients were not unscaled since the last `update`."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is _READY)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer's gradients were unscaled, but not used in a step, since the last `update`."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is _UNSCALED)

    def before_step(self, optimizer: Optimizer) -> None:
        """For subclasses: called before an optimizer steps on unscaled, finite gradients; does nothing here."""

    def on_device(self, device: torch.device) -> None:
        """For subclasses: called when the scale is made, on the device of the first loss; does nothing here."""

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.before_step(optimizer)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self.on_device(dev)


class OpenAutocast(TorchAutocast):
    """`torch.autocast` that can make another instance with the same settings."""

    # In code that torch.compile traces, it makes plain `torch.autocast` instances: the tracer ends these at the end of
    # their `with` block, but a subclass only at the end of the traced code.

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance; in code that torch.compile traces, makes a plain `torch.autocast` instead."""
        if torch.compiler.is_compiling():
            return TorchAutocast(*args, **kwargs)
        cls.check(kwargs)
        return super().__new__(cls)

    @staticmethod
    def check(given: dict[str, Any]) -> None:
        """For subclasses: called with the keywords of a new instance; does nothing."""

    @property
    def enabled(self) -> bool:
        """Whether this instance casts: as requested, but False if its device is not available."""
        return self._enabled

    def again(self) -> torch.autocast:
        """Returns a `torch.autocast` with the same settings, without repeating the warnings of this instance."""
        return TorchAutocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)


_SavedTensor: Any = _name("torch._C._autograd.SavedTensor")
_name("torch._C._autograd.SavedTensor.unpack_hook")
_READY: Any = _name("torch.amp.grad_scaler.OptState.READY")
_UNSCALED: Any = _name("torch.amp.grad_scaler.OptState.UNSCALED")
_fresh_optimizer_state: Callable[[], dict[str, Any]] = _name("torch.amp.grad_scaler._refresh_per_optimizer_state")
_OF_SCALER = ("_maybe_opt_step", "_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker")
_NAMES += [f"torch.amp.GradScaler.{name}" for name in _OF_SCALER]


# torch.compile.
def forget_compiled() -> None:
    """Drops every graph that torch.compile has made in this process; does nothing if its compiler is not loaded."""
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch.compiler.reset()


def end_stance(stance: Any) -> None:
    """Ends a stance that `torch.compiler.set_stance` returned, and restores the stance before it."""
    # Calling `set_stance` with the earlier stance would be wrong inside a `with set_stance(...)` block that has begun
    # since then: it would override the stance of the block, and the end of the block would bring back the ended
    # stance.
    for field in fields(stance.stance):
        object.__setattr__(stance.stance, field.name, getattr(stance.prev, field.name))


def cache_tag() -> Any:
    """Returns the tag of torch.compile's caches on disk, which is the same for all threads."""
    entry = _process_wide_tag()
    return torch.compiler.config.cache_key_tag if entry is None else entry.env_value_default


def set_cache_tag(tag: Any) -> None:
    """Sets the tag of torch.compile's caches on disk for all threads."""
    entry = _process_wide_tag()
    if entry is None:
        torch.compiler.config.cache_key_tag = tag
    else:
        entry.env_value_default = tag


def _process_wide_tag() -> Any:
    """Returns torch's config entry for the tag of its caches, or None if setting the tag affects all threads."""
    # Setting it affects all threads in torch 2.11. Since torch 2.13, setting it affects one context only, and not
    # other threads or notebook cells; only the default value of the entry applies to all of them.
    entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    per_context = isinstance(getattr(entry, "user_override", None), ContextVar)
    return entry if per_context and hasattr(entry, "env_value_default") else None


_tracing_context: Callable[[], Any] = _name("torch._guards.TracingContext.try_get")


def is_compiling_here() -> bool:
    """Tells whether torch.compile is tracing in this thread; it then runs backward passes too, to make their graphs."""
    return _tracing_context() is not None


def is_super(code: CodeType) -> bool:
    """Tells whether code is torch.compile's, where it looks for the class that called `super()` among the bases."""
    return code.co_name == "_resolved_getattr_and_source" and code.co_filename.startswith(FOLDER)


# Processes.
_JOIN = "_join_config"
_SYNCS = "init_sync"  # the argument of DistributedDataParallel by which it sends weights
_HOOKS = "_comm_hooks"
default_store: Callable[[], Any]  # in which the processes of a group have met
group_named: Callable[[str], Any]
if torch.distributed.is_available():
    default_store = _name("torch.distributed.distributed_c10d._get_default_store")
    group_named = _name("torch.distributed.distributed_c10d._resolve_process_group")


def is_lost_connection(error: RuntimeError) -> bool:
    """Tells whether an error comes from an operation that lost its connection to other processes."""
    # What connects processes on CPUs names itself in its messages; tests/test_sharded.py has them come.
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


# What torch's allocator, C++ and oneDNN say.
_OUT_OF_MEMORY = ("not enough memory", "allocate memory", "out of memory", "bad_alloc", "could not create a memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an exception says that memory ran out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Tells whether a DistributedDataParallel is inside its `join()`, where other processes may be out of data."""
    return bool(getattr(wrapper, _JOIN).enable)


def has_comm_hook(wrapper: DistributedDataParallel) -> bool:
    """Tells whether a DistributedDataParallel has a communication hook other than torch's built-in ones."""
    return bool(getattr(wrapper, _HOOKS))


def sends_weights(frame: FrameType | None) -> bool:
    """Tells whether a DistributedDataParallel whose constructor is running sends its weights to other processes."""
    # The constructor's argument `init_sync` is read from the stack, since the wrapper does not keep it.
    found = next((each for each in frames_of(frame) if each.f_code is DistributedDataParallel.__init__.__code__), None)
    return found is None or bool(found.f_locals.get(_SYNCS, True))


_CLASS_INDEX = "_orig_cls_mro_index"  # of a module's own class below the one that FSDP2 gives it
_SHARDING = "FSDPModule"
# Of what FSDP2 keeps for a parameter.
_WAITING, _GATHERED, _OFFLOADED = "unsharded_accumulated_grad", "_unsharded_param", "offload_to_cpu"
_DTYPE = "_orig_dtype"
_POLICY = "_mp_policy"


def class_index_above(base: type) -> dict[str, int]:
    """Returns class attributes for a subclass of `base`, from which FSDP2 finds the original class of a module."""
    # FSDP2 needs the original class, for example, when a container of modules is sliced. The dict is empty if FSDP2
    # did not make `base`.
    return {_CLASS_INDEX: getattr(base, _CLASS_INDEX) + 1} if hasattr(base, _CLASS_INDEX) else {}


def holds_unreduced(module: Any) -> bool:
    """Tells whether FSDP2 holds gradients of a module from a backward pass that did not reduce them."""
    held = _held_by(module)
    if any(getattr(p, _WAITING) is not None for p in held):
        return True
    return any(getattr(p, _GATHERED).grad is not None for p in held if hasattr(p, _GATHERED))


def learns_gradients(module: Any) -> bool:
    """Has FSDP2 look for the dtypes of gradients of a module if it trained no weight yet; tells whether it now does."""
    # By itself it does so in the first forward only, and what is unfrozen later gets low gradients (pytorch#186998).
    groups = [group for group in _groups_of(module) if getattr(group, _DTYPE, None) is None]
    for group in groups:
        if hasattr(group, _DTYPE):
            group._init_mp_dtypes()
    return all(getattr(group, _DTYPE, None) is not None for group in groups)


def offloads(module: Any) -> bool:
    """Tells whether FSDP2 keeps shards of a module on the CPU, even if they are gathered on another device."""
    return any(getattr(p, _OFFLOADED) for p in _held_by(module))


def frees_after_backward(module: Any) -> bool:
    """Tells whether FSDP2 frees the gathered weights of a module after a backward pass."""
    return any(group.reshard_after_backward for group in _groups_of(module))


def shard_offset(t: Any) -> Sequence[int]:
    """Returns the indices in a DTensor of its local shard's first element."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return offset


def policy_of(module: Any) -> Any:
    """Returns the `mp_policy` that was passed to `fully_shard` for a module."""
    return getattr(module._get_fsdp_state(), _POLICY)


def summed_twice(module: Any) -> list[nn.Module]:
    """Returns the modules in groups of FSDP2 whose gradients it sums over another mesh too, before it reduces them."""
    # Such as weights of norms under SequenceParallel. FSDP2 sums them in the dtype of the gradients, and not in
    # reduce_dtype (pytorch#190626), and the gradients of a group must have one dtype.
    from torch.distributed.tensor import Replicate

    held = _held_by(module)
    specs = (getattr(p, "_unsharded_dtensor_spec", None) or p._tp_spec for p in held if p.is_dtensor)
    placed = (at for spec in specs for at in spec.placements)
    return [p._module_info.module for p in held] if any(isinstance(at, Replicate) for at in placed) else []


def _held_by(module: Any) -> list[Any]:
    """Returns FSDP2's records of the parameters that `fully_shard` sharded when it was called on this very module."""
    return [p for group in _groups_of(module) for p in group.fsdp_params]


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one or none
    return [each for each in (state._fsdp_param_group,) if each is not None] if groups is None else groups


def is_sharding(cls: type) -> bool:
    """Tells whether a class was made by FSDP2, or is a subclass of such a class."""
    return any(each.__name__ == _SHARDING for each in cls.__mro__)


def forget_sharded(cls: type) -> None:
    """Takes out of FSDP2 what it made of a class of halfstep's, which modules of the class it equals would get."""
    from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

    if any(each is cls for each in cls_to_fsdp_cls):
        del cls_to_fsdp_cls[cls]


_FAKE = "FakeTensor"


def holds_shapes(cls: type) -> bool:
    """Tells whether tensors of a class have shapes but no values; DTensor runs operations on such tensors."""
    return cls.__name__ == _FAKE


# The stack: whose code a frame runs.
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


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that called it, the nearest first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


# Texts.
BEYOND = "without overflow"  # in the error for a constant that the format of the result does not have


swap_contents: Callable[[Tensor, Tensor], None] = _name("torch._C._swap_tensor_impl")  # with nodes, gradients, hooks
_ACCUMULATE: Any = _name("torch._C._functions.AccumulateGrad")


def leaf_of(node: Any) -> Tensor | None:
    """Returns the tensor in which an autograd node accumulates gradients, None if the node passes them on."""
    leaf: Tensor | None = node.variable if isinstance(node, _ACCUMULATE) else None
    return leaf


def saved_by(node: Any) -> list[Tensor] | None:
    """Returns the tensors that an autograd node keeps from the forward pass."""
    raw = tree_leaves([getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")])
    if any(isinstance(each, _SavedTensor) and each.unpack_hook is not None for each in raw):
        return None
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        kept = [*node.saved_tensors, *vars(node).values()]
    else:
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [each for each in tree_leaves(kept) if isinstance(each, Tensor)]


def is_users_function(node: Any) -> bool:
    """Tells whether an autograd node is of a `torch.autograd.Function` that is not torch's own."""
    # The Functions of FSDP2, for example, are torch's own.
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return not str(type(node)._forward_cls.__module__).startswith("torch.")  # type: ignore[attr-defined]


def is_tracing() -> bool:
    """Tells whether this thread is tracing a model for TorchScript."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def in_backward() -> bool:
    """Tells whether this thread runs a backward pass."""
    return backward_task() != NO_BACKWARD


_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)  # from torch 2.14 on it has none


def in_function(frame: FrameType | None) -> bool:
    """Returns whether a frame runs in the forward of a custom autograd function."""
    # Where `apply` is not python code, a forward is known by its first argument: a mistake costs time alone.
    codes = (each.f_code for each in frames_of(frame))
    if _APPLY is None:
        return any(code.co_argcount and code.co_varnames[0] == "ctx" for code in codes)
    return any(code is _APPLY for code in codes)


def in_checkpoint() -> bool:
    """Tells whether an activation checkpoint of torch's is on the call stack."""
    return any(each.f_code.co_filename == CHECKPOINT_FILE for each in frames_of(sys._getframe(1)))


_allocations: Any = _name("torch.autograd.profiler_legacy.profile")  # in order, and without a word on the terminal
_end_allocations: Any = _name("torch.autograd._disable_profiler_legacy")


def begin_allocations() -> None:
    """Makes torch record this thread's allocations on the CPU, until `end_allocations`."""
    _allocations(profile_memory=True).__enter__()


def end_allocations() -> list[tuple[str, int]]:
    """Stops the recording that `begin_allocations` started, and returns the recorded events in order."""
    return [
        ("", event.cpu_memory_usage()) if event.kind() == "memory_alloc" else (event.name(), 0)
        for thread in _end_allocations()
        for event in thread
        if event.kind() in ("memory_alloc", "push")
    ]


_takes_bf16: Callable[[], bool] | None = None
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _takes_bf16 = _name("torch.ops.mkldnn._is_mkldnn_bf16_supported")


def onednn_takes_bf16() -> bool:
    """Returns whether torch's oneDNN computes bf16 products here; True if this torch was built without oneDNN."""
    return _takes_bf16 is None or bool(_takes_bf16())


def missing() -> list[str]:
    """Returns the paths of the private names that this torch lacks."""
    return [path for path in _NAMES if _find(path) is _GONE]


if _absent := missing():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_absent)}, which this halfstep uses; "
        f"install torch {WORKS_WITH}, or a newer halfstep"
    )
