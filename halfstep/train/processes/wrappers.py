"""DistributedDataParallel wrappers and stages of pipelines around a session's models, and the sums of low gradients.

This file has no postponed annotations, since `register_comm_hook` compares annotations as objects.
"""

import gc
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from itertools import compress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import SessionError, SetupError
from halfstep.formats import is_low
from halfstep.torch_internals import has_comm_hook
from halfstep.train.processes.shards import group_is_open

T = TypeVar("T")
ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Within the context, sessions that this process opens by itself, for a forecast, tell other processes nothing."""
    token = ALONE.set(True)
    try:
        yield
    finally:
        ALONE.reset(token)


def wrappers_of(roots: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Returns the DistributedDataParallel wrappers of these models' parameters, found through the garbage collector."""
    if not group_is_open():
        return []
    own = {id(p) for root in roots for p in root.parameters()}
    return [each for each in _living(DistributedDataParallel) if any(id(p) in own for p in each.parameters())]


def stage_groups_of(roots: Sequence[nn.Module]) -> list[dist.ProcessGroup]:
    """Returns the groups of the pipelines (`torch.distributed.pipelining`) that the models are stages of."""
    if "torch.distributed.pipelining" not in sys.modules:
        return []
    from torch.distributed.pipelining import PipelineStage

    own = {id(p) for root in roots for p in root.parameters()}
    kind: Any = PipelineStage.__base__  # also of stages that `build_stage` made
    stages = (each for each in _living(kind) if any(id(p) in own for p in each.submod.parameters()))
    return [group for each in stages if (group := each.group or dist.group.WORLD) is not None]


def _living(kind: type[T]) -> list[T]:
    objects = gc.get_objects()  # a million, so without a line of Python for each
    kinds = {each for each in set(map(type, objects)) if kind in each.__mro__}
    return list(compress(objects, map(kinds.__contains__, map(type, objects)))) if kinds else []


def living_wrappers_of(roots: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Returns the DDP wrappers of the models that are still in use, the same in all processes."""
    # Garbage is collected first: otherwise some processes would find a wrapper that others have already freed.
    if not wrappers_of(roots):
        return []
    gc.collect()  # only then, since it takes half a second
    return wrappers_of(roots)


def refuse_wrapped(roots: Sequence[nn.Module], when: str) -> None:
    """Refuses models that are already wrapped in DistributedDataParallel; `when` says when that would go wrong."""
    if living_wrappers_of(roots):
        raise SetupError(
            "the model has been wrapped in DistributedDataParallel, which would silently stop reducing gradients when "
            f"{when}; delete all references to earlier wrappers, call halfstep.initialize first, then wrap the model: "
            "`wrapped = DistributedDataParallel(model)`"
        )


def retire(wrapper: weakref.ref[DistributedDataParallel], low: Sequence[nn.Parameter]) -> None:
    """Makes a DistributedDataParallel wrapper refuse to train once one of its `low` parameters has another dtype."""
    own = wrapper()
    if own is not None and low:
        own.register_forward_pre_hook(_Retired(low))


class _Retired:
    """A hook with which a DDP wrapper, but no copy of it, refuses to train parameters whose dtype has changed."""

    def __init__(self, made_for: Sequence[nn.Parameter]) -> None:
        self._made_for = [(weakref.ref(p), p.dtype) for p in made_for]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if any((p := ref()) is not None and p.dtype is not dtype for ref, dtype in self._made_for):
            raise SessionError(
                "the session of this model is closed and its weights are fp32 again, but DistributedDataParallel was "
                "made for low weights and would no longer reduce their gradients; wrap the model again "
                "(wrapped = DistributedDataParallel(model))"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Retired, ([],)


# ---- sums of low gradients in fp32: over the processes, and over the backward passes of a step
_LOG = logging.getLogger("halfstep")


class WideSums:
    """A communication hook that sums low gradients in fp32, where DistributedDataParallel would sum them low.

    Each process sums one share of a bucket, and what is sent is low: as many bytes as an all-reduce. `hold` sets aside
    a parameter's fp32 sum over earlier backward passes, which a bucket cannot hold. If all processes have the same sum,
    `release` returns it after the pass; otherwise it is added to the bucket before the bucket is sent.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.counts = False  # whether the mean is that of the processes that have data, within `join()`
        self._has_data = True
        self._pending: list[tuple[weakref.ref[DistributedDataParallel], list[nn.Parameter]]] = []
        self._covered: set[nn.Parameter] = set()
        self._maybe_unused: set[nn.Parameter] = set()
        self._held: dict[nn.Parameter, Tensor] = {}
        self._reduced: set[nn.Parameter] = set()  # in the backward pass that runs
        self._common: set[nn.Parameter] = set()  # whose gradients are the same in all processes
        self._stream: torch.cuda.Stream | None = None

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._covered

    def __reduce__(self) -> tuple[Any, ...]:
        return WideSums, ()  # wrappers keep their hooks in copies and pickles, where they are not called

    def add(self, wrapper: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> None:
        """Notes a wrapper that has low parameters; the next `take_over` registers this hook with the wrapper."""
        low = [p for p in parameters if is_low(p.dtype) and p.requires_grad]
        if low:
            self._pending.append((weakref.ref(wrapper), low))

    def before_backward(self) -> None:
        """Prepares for a backward pass; registers this hook with the wrappers that `add` has noted."""
        self._reduced.clear()
        self.take_over()

    def take_over(self) -> None:
        """Makes this object the communication hook of DDP wrappers added since the last call, unless they have one."""
        for reference, low in self._pending:
            wrapper = reference()
            if wrapper is not None and self._register(wrapper):
                self._covered.update(low)
                if wrapper.find_unused_parameters or wrapper.static_graph:
                    self._maybe_unused.update(low)
        self._pending.clear()

    def _register(self, wrapper: DistributedDataParallel) -> bool:
        self.group = wrapper.process_group
        if not has_comm_hook(wrapper):
            try:
                wrapper.register_comm_hook(self, mean_of_bucket)
            except RuntimeError:  # one that was built in, of which only the reducer knows
                pass
            else:
                return True
        _LOG.info(
            "DistributedDataParallel already has a communication hook, which sums the gradients; halfstep's own hook, "
            "which would sum low gradients in fp32, is off"
        )
        return False

    def hold(self, parameter: nn.Parameter) -> None:
        """Moves a parameter's fp32 gradient out of `p.grad`, so that the next backward pass can put a low one there."""
        assert parameter.grad is not None
        self._held[parameter], parameter.grad = parameter.grad, None
        parameter.grad_dtype = parameter.dtype
        if parameter in self._maybe_unused:
            parameter.grad = torch.zeros_like(parameter)

    def release(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Returns, after a backward pass, the held gradients of these parameters that `p.grad` does not yet include."""
        left: dict[nn.Parameter, Tensor] = {}
        if not (self._held or self._reduced or self._common):  # as where no wrapper sums
            return left
        for p in parameters:
            held, was_common = self._held.pop(p, None), p in self._common
            if p in self._reduced:
                self._common.add(p)
            elif p.grad is not None:
                self._common.discard(p)
            if held is not None and (p.grad is None or was_common or p not in self._reduced):
                left[p] = held
        return left

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Within the context, this process counts as one that has run out of data; for use within `join()`."""
        self._has_data = False
        try:
            yield
        finally:
            self._has_data = True

    def add_held(self, bucket: Any) -> None:
        """Adds the held gradients to a bucket of low gradients, except those that are the same in all processes."""
        parameters = bucket.parameters()
        self._reduced.update(parameters)
        for p, gradient in zip(parameters, bucket.gradients(), strict=True):
            if p in self._held and p not in self._common:
                gradient.copy_(gradient.float().add_(self._held[p]))

    def divisor(self, device: torch.device) -> Tensor | int:
        """Returns the number of processes to divide a sum of gradients by; may be a collective call within `join()`."""
        assert self.group is not None  # there is one where a hook is called
        if not self.counts:
            return self.group.size()
        present = torch.tensor(float(self._has_data), device=device)
        dist.all_reduce(present, group=self.group)
        return present

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream that sends gradients, after making it wait for the work of the current stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


def mean_of_bucket(
    sums: WideSums,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Computes the mean of a bucket of gradients over the processes; DistributedDataParallel calls it as a hook."""
    # On a CPU this function waits for the collectives, so that all processes run them in the order of the buckets.
    device = bucket.buffer().device
    on_cuda = device.type == "cuda"
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if on_cuda else None)
    with torch.cuda.stream(sums.stream(device)) if on_cuda else nullcontext():
        done.set_result(_mean(sums, bucket))
    return done


def _mean(sums: WideSums, bucket: Any) -> Tensor:
    buffer: Tensor = bucket.buffer()
    divisor = sums.divisor(buffer.device)
    if not is_low(buffer.dtype) or buffer.layout is not torch.strided:
        total = buffer.float() if is_low(buffer.dtype) else buffer  # sparse: no backend has to add it up low
        total.div_(divisor)
        dist.all_reduce(total, group=sums.group)
        return total.to(buffer.dtype)
    sums.add_held(bucket)
    size = dist.get_world_size(sums.group)
    share = -(-buffer.numel() // size)
    sent = pad(buffer, (0, share * size - buffer.numel())) if buffer.numel() % size else buffer
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=sums.group)
    mean = came.view(size, share).sum(0, dtype=torch.float32).div_(divisor).to(buffer.dtype)
    dist.all_gather(list(came.view(size, share).unbind()), mean, group=sums.group)
    return buffer.copy_(came[: buffer.numel()])
