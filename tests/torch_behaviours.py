"""What halfstep's boundary to torch counts on besides names: that they mean what they meant, tried in miniature."""

import inspect
import os
import sys
import threading
import warnings
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from halfstep import torch_internals as internals


def otherwise():
    """Returns what this torch does otherwise; takes seconds, as some of it imports torch.compile."""
    return [what for what, works in BEHAVIOURS.items() if not _does(works)]


def _does(works):
    try:
        return works()
    except Exception:
        return False


def _averages_ask_for_parameters():
    model = nn.Linear(1, 1)
    for averaged in (AveragedModel(model), AveragedModel(model, use_buffers=True)):
        averaged.update_parameters(SimpleNamespace(parameters=model.parameters, buffers=model.buffers))
    return True


def _optimizer():
    return torch.optim.SGD([nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))], lr=1.0)


def _global_hooks_are_kept():
    def hook(*_): ...

    kept = []
    for register, hooks in (
        (register_optimizer_step_pre_hook, internals.GLOBAL_STEP_PRE_HOOKS),
        (register_optimizer_step_post_hook, internals.GLOBAL_STEP_POST_HOOKS),
    ):
        handle = register(hook)
        kept.append(hook in hooks.values())
        handle.remove()
    return all(kept)


def _schedulers_see_marks():
    optimizer = _optimizer()
    before = internals.was_stepped(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    marked = hasattr(optimizer.step, internals.SCHEDULED)
    internals.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # warns where it takes the optimizer for one that was not stepped
    unmarked = _optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(unmarked, lambda _: 1.0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scheduler.step()
    return marked and not before and internals.was_stepped(optimizer) and bool(warned)


def _fused_optimizers_say_so():
    weight = nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))
    return internals.takes_found_inf(torch.optim.SGD([weight], fused=True)) and not internals.takes_found_inf(
        _optimizer()
    )


def _hooks_of_tensors_are_kept():
    weight = nn.Parameter(torch.ones((), dtype=torch.float32, device="cpu"))
    none = internals.hooks_of(weight) is None and internals.post_accumulate_hooks_of(weight) is None
    weight.register_hook(_averages_ask_for_parameters)  # which is not called
    weight.register_post_accumulate_grad_hook(_averages_ask_for_parameters)
    kept = (internals.hooks_of(weight) or {}, internals.post_accumulate_hooks_of(weight) or {})
    return none and all(list(hooks.values()) == [_averages_ask_for_parameters] for hooks in kept)


def _overflow_is_called_so():
    try:
        torch.ones(1, dtype=torch.float16, device="cpu").masked_fill(torch.ones(1, dtype=torch.bool, device="cpu"), 1e9)
    except RuntimeError as error:
        return internals.BEYOND in str(error)
    return False


def _compiled_modules_hold_theirs():
    module = nn.Identity()
    wrapper = torch.compile(module, backend="eager")
    return internals.compiled_module(wrapper) is module and internals.compiled_module(module) is None


def _stances_end():
    with torch.compiler.set_stance("default"):  # whose end puts back what was before
        ours = torch.compiler.set_stance("force_eager")
        internals.end_stance(ours)
        return bool(torch.compiler.set_stance("default").prev.stance == "default")


def _tag_holds_in_threads():
    before, seen = internals.cache_tag(), []
    internals.set_cache_tag("halfstep")
    try:
        thread = threading.Thread(target=lambda: seen.append(torch.compiler.config.cache_key_tag))
        thread.start()
        thread.join()
    finally:
        internals.set_cache_tag(before)
    return seen == ["halfstep"] and internals.cache_tag() == before


def _nodes_are_named_and_numbered():
    x = torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=True)
    first = internals.next_sequence_number()
    out = x.softmax(0).log_softmax(0)
    node, seen = out.grad_fn, []
    x.register_hook(lambda _: seen.append((internals.in_backward(), internals.running_node() is not None)))
    out.sum().backward()
    (softmax, _), *_ = node.next_functions
    names = (node.name(), "" if softmax is None else softmax.name())
    numbers = (internals.sequence_number(softmax), internals.sequence_number(node))
    return (
        names == ("LogSoftmaxBackward0", "SoftmaxBackward0")
        and numbers == (first, first + 1)
        and seen == [(True, True)]
        and not internals.in_backward()
    )


def _stack_has_known_files():
    """Looks at the files on the stack of a part of a forward that a checkpoint runs again in a backward pass."""
    seen = []

    class Look(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe()
            while frame is not None and internals.in_backward():
                seen.append((frame.f_code.co_filename, frame.f_code.co_name))
                frame = frame.f_back
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=True)
    with Look():
        out = checkpoint(lambda t: nn.functional.softmax(t, 0), x, use_reentrant=False)
        out.sum().backward()
    files = {file for file, _ in seen}
    starts = {name for file, name in seen if file.startswith(internals.FOLDER)}
    there = all(map(os.path.isfile, (*internals.FUNCTIONAL_FILES, *internals.DISPATCH_FILES)))
    return {internals.CHECKPOINT_FILE, internals.FUNCTIONAL_FILES[0]} <= files and internals.ENGINE in starts and there


def _wrappers_keep_names():
    joinable = inspect.unwrap(Joinable.__init__).__code__.co_names
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    made = inspect.unwrap(DistributedDataParallel.__init__) is DistributedDataParallel.__init__
    return (
        internals._JOIN in joinable
        and internals._SYNCS in own
        and internals._HOOKS in DistributedDataParallel.register_comm_hook.__code__.co_names
        and made
        and not _JoinConfig.construct_disabled_join_config().enable
    )


def _sharded_modules_keep_names():
    kept = (*FSDPParam.__init__.__code__.co_names, *FSDPParam.__annotations__, *vars(FSDPParam))
    return (
        FSDPModule.__name__ == internals._SHARDING
        and internals.holds_shapes(FakeTensor)
        and internals._CLASS_INDEX in vars(FSDPModule)
        and internals._POLICY in FSDPState.init.__code__.co_names
        and {internals._WAITING, internals._GATHERED, internals._OFFLOADED}
        <= {*kept, *FSDPParam.init_unsharded_param.__code__.co_names}
    )


def _jagged_tensors_have_values():
    parts = [torch.ones(n, dtype=torch.float32, device="cpu") for n in (1, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return internals.jagged_values(nested).shape == (4,)


def _states_have_metadata():
    return internals.metadata_of(nn.Linear(1, 1).state_dict()).get("", {}).get("version") == 1


def _autocasts_keep_settings():
    made = internals.OpenAutocast("cpu", torch.bfloat16, False, cache_enabled=False)
    again = [internals.OpenAutocast("cpu", torch.bfloat16, on, cache_enabled=on).again() for on in (True, False)]
    seen = []
    for each in again:
        with each:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    return not made.enabled and seen == [(True, True), (False, False)]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _nodes_know_their_functions():
    x = torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=True)
    made = _Twice.apply(x), checkpoint(torch.sin, x, use_reentrant=True), x.sin()
    return [internals.is_users_function(each.grad_fn) for each in made] == [True, False, False]


BEHAVIOURS = {
    "torch.autocast has _enabled and _cache_enabled": _autocasts_keep_settings,
    "autograd nodes of Functions have _forward_cls": _nodes_know_their_functions,
    "AveragedModel.update_parameters reads the parameters and buffers of a model alone": _averages_ask_for_parameters,
    "step hooks of all optimizers lie in two dicts": _global_hooks_are_kept,
    f"LR schedulers look at {internals._STEPPED} and {internals.SCHEDULED}": _schedulers_see_marks,
    f"fused optimizers have {internals._FUSED}": _fused_optimizers_say_so,
    "hooks of a tensor lie in two dicts, None while there are none": _hooks_of_tensors_are_kept,
    f"the error for a constant beyond its format says {internals.BEYOND!r}": _overflow_is_called_so,
    f"torch.compile keeps a module as {internals.COMPILED}": _compiled_modules_hold_theirs,
    "what torch.compiler.set_stance returned can be turned into what was before": _stances_end,
    "the tag of torch.compile's caches holds in every thread": _tag_holds_in_threads,
    "autograd nodes are named for their operations and numbered in order": _nodes_are_named_and_numbered,
    "files and functions of torch's on the stack are the known ones": _stack_has_known_files,
    f"DistributedDataParallel has {internals._JOIN}, {internals._SYNCS} and {internals._HOOKS}": _wrappers_keep_names,
    f"fully_shard makes {internals._SHARDING}s with {internals._CLASS_INDEX}, {internals._WAITING}": (
        _sharded_modules_keep_names
    ),
    "nested tensors of layout jagged have _values": _jagged_tensors_have_values,
    "state dicts have _metadata": _states_have_metadata,
}
