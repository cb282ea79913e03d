"""Replicas of a model in several processes: compares them, keeps them the same, and sums what a step found in each."""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import SessionError, SetupError
from halfstep.formats import bits_of, is_low
from halfstep.pages import PROCESSES, more
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.sharded import is_sharded
from halfstep.torch_internals import is_joining, sends_weights
from halfstep.train.cast.reading import line_to_shard
from halfstep.train.optim.hooks import updated_by
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.steppers import holds_a_part
from halfstep.train.processes.collectives import Findings, naming_who_is_gone, told_by_all
from halfstep.train.processes.shards import group_is_open, group_of, policies, sharded_parameters
from halfstep.train.processes.wrappers import ALONE, WideSums, living_wrappers_of, retire, stage_groups_of
from halfstep.train.scale.scaling import LossScales
from halfstep.train.session.parts import on_registration

WRAPPING = (
    "DistributedDataParallel(model), where the sessions of all processes compare their levels. A process without a "
    "session takes no part in that (torch's error there: DDP expects same model across all ranks): call "
    "halfstep.initialize in every process, with level O0 where it is to train as written"
)
SAMPLE = 4096  # values of a parameter that a step compares, at most


class Replicas:
    """The processes that train a session's models together, each on a replica; at first this process alone."""

    # Once wrapped in DistributedDataParallel, they train together until the session ends, even without the wrapper:
    # whether a process takes part in a step's sum must not depend on when its garbage is collected.

    def __init__(  # noqa: PLR0913  # all that must be the same in all of them
        self,
        roots: Sequence[nn.Module],
        plan: Plan,
        store: MasterStore,
        scales: LossScales,
        optimizers: Callable[[], Sequence[Optimizer]],
        name_of: Callable[[nn.Parameter], str],
        replaced: Callable[[], None],
        given: dist.ProcessGroup | None,
    ) -> None:
        self._roots, self._plan, self._store, self._scales = list(roots), plan, store, scales
        self._optimizers, self._name_of = optimizers, name_of
        self._replaced = replaced  # called once the weights and states of another process have come
        self._group: dist.ProcessGroup | None = None
        self._given = given  # who steps together, where the user says so
        self._stages: dist.ProcessGroup | None = None  # who steps together, if some hold other models
        self._looked, self._met = False, False  # for stages, and with them
        self.sharded = False  # whether parameters are; then they are not replicas
        self._join: weakref.ref[DistributedDataParallel] | None = None  # who has begun one
        self._agreed: set[tuple[int, ...]] = set()  # parameters that all processes were found to have alike
        self._alike: list[nn.Parameter] = []  # what wrappers keep alike
        self._samples = 0
        self._plain = False
        self._meeting = ""  # what the processes that compare what they train are known by
        self.sums = WideSums()
        self._undo = ExitStack()

    def meet(self) -> None:
        """Checks that plan, parameters and `mp_policy` are the same in all processes; does nothing without shards."""
        if own_shards := sharded_parameters(self._roots):
            self._group, self.sharded = group_of(own_shards), True
            with naming_who_is_gone(self._group):
                self._compare(list({id(p): p for root in self._roots for p in root.parameters()}.values()))
                first, *others = told_by_all(policies(self._roots), self._group)
            for rank, theirs in enumerate(others, 1):
                differing = [name for name in first | theirs if theirs.get(name) != first.get(name)]
                if differing:
                    name = differing[0]
                    raise SetupError(
                        f"the mp_policy of {name or 'the model'} differs between processes: process {rank} has "
                        f"{theirs.get(name)}, process 0 has {first.get(name)}; write "
                        f"{line_to_shard(self._plan)}, in all processes"
                    )

    def open(self, *, search: bool, plain: bool = False) -> None:
        """Notes each DistributedDataParallel wrapper made from now on; `search` also finds those made before."""
        self._plain = plain
        self._undo.callback(on_registration(self._registered))
        if search:
            self.search()

    def search(self) -> None:
        """Looks for a DDP wrapper of the models that was made before `open`; does nothing if one is known already."""
        wrappers = living_wrappers_of(self._roots) if self._group is None else []
        shared = {id(p) for wrapper in wrappers for p in self._shared(wrapper, wrapper.module)}
        for wrapper in [] if self._plain else wrappers:
            self._attach(wrapper, self._shared(wrapper, wrapper.module))
        if shared and not ALONE.get():  # in the models' order, which all have: the wrappers are found in none
            own = {id(p): p for root in self._roots for p in root.parameters()}
            self._compare([p for key, p in own.items() if key in shared], wrappers[0].process_group)

    def close(self) -> None:
        """Stops noting new wrappers, and restores torch's own join hooks in the noted ones."""
        self._undo.close()

    @property
    def reduced(self) -> bool:
        """Whether DistributedDataParallel reduces the gradients."""
        return self._group is not None and not self.sharded

    @property
    def size(self) -> int:
        """The number of processes that hold replicas or shards of these models."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def staged(self) -> bool:
        """Whether some of the processes that step together hold other models, such as other stages of a pipeline."""
        return self._stages is not None

    @property
    def _stepping(self) -> dist.ProcessGroup | None:
        return self._stages or self._group

    def find_stages(self) -> None:
        """Finds the processes that hold the other stages of a pipeline; looks for them once."""
        if self._looked or not group_is_open():
            return
        self._looked = True
        group = self._given or self._around(stage_groups_of(self._roots))
        if self._group is not None and group is not None:
            missing = {*dist.get_process_group_ranks(self._group)} - {*dist.get_process_group_ranks(group)}
            if missing:
                raise SetupError(
                    f"process_group lacks the processes {sorted(missing)}, which hold replicas or shards of this "
                    "model; pass a group of all processes that hold a stage, each with its replicas and shards"
                )
        if group is not None and group != self._group and dist.get_world_size(group) > 1:
            self._stages = group

    def _around(self, found: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
        """Returns the group of all processes that hold a stage, a replica or a shard, given groups of stages."""
        if not found or self._group is None:
            return found[0] if found else None
        if dist.get_world_size(found[0]) * self.size == dist.get_world_size():
            return dist.group.WORLD
        raise SetupError(
            f"a pipeline has stages in {dist.get_world_size(found[0])} processes, and this stage is in {self.size}, of "
            f"{dist.get_world_size()} in all; pass process_group=, the group of all processes that hold a stage, "
            "each with its replicas and shards, to halfstep.initialize"
        )

    def refuse_a_stage_alone(self) -> None:
        """Refuses a scaled backward pass without losses, such as that of a stage, if no other process is known."""
        if self._given is None and self._stepping is None and group_is_open() and dist.get_world_size() > 1:
            raise SessionError(
                f"scaling() was entered without losses in one of {dist.get_world_size()} processes, and this session "
                "knows of no other process: if the gradients come from another stage of a pipeline, the stages must "
                "agree on overflows and the loss scale. Pass process_group=, the group of their processes, to "
                "halfstep.initialize, or use bf16, which needs no loss scale; if this process trains alone, pass "
                f"scaling() its losses; {more(PROCESSES)}"
            )

    @property
    def joining(self) -> bool:
        """Whether a wrapper is within `join()`, where processes may have run out of data."""
        # Such processes take part only in the collective operations of DistributedDataParallel, not in the sum of a
        # step.
        wrapper = None if self._join is None else self._join()
        return wrapper is not None and is_joining(wrapper)

    def is_own(self, device: torch.device) -> Tensor:
        """Returns a bool tensor with one entry per process, True only for this process."""
        numbers = torch.arange(dist.get_world_size(self._stepping), device=device)
        return numbers == dist.get_rank(self._stepping)

    def summing(self) -> bool:
        """Tells whether a step sums its findings over several processes."""
        stepping = self._stages or self._group
        if stepping is not None and not group_is_open():
            kind = "a stage of a pipeline" if self.staged else "sharded" if self.sharded else "one of several replicas"
            raise SessionError(
                f"the model is {kind}, and its process group was "
                "destroyed; save and close the session before torch.distributed.destroy_process_group()"
            )
        return stepping is not None and not self.joining

    def agreeing(self) -> bool:
        """Tells whether all processes that train these models know of a step's losses what this one knows."""
        alone = self._stepping is None and not (group_is_open() and dist.get_world_size() > 1)
        return alone or self.summing()

    def agree(self, own: Findings, parameters: Sequence[nn.Parameter]) -> Findings:
        """Returns what all processes together found in a step, by one all-reduce of what each found (`own`)."""
        total = own.packed()
        with self.naming_who_is_gone("the step"):
            if self._group is not None and (key := tuple(map(id, parameters))) not in self._agreed:
                self._compare(parameters)
                self._agreed.add(key)
            if self.staged and not self._met:  # not in a backward pass, where a stage may wait for another
                self._meeting, self._met = told_by_all(secrets.token_hex(8), self._stages)[0], True
            dist.all_reduce(total, group=self._stepping)
        return own.unpacked(total)

    def naming_who_is_gone(self, what: str) -> AbstractContextManager[None]:
        """Returns a context: if a collective operation in `what` fails, the error names the processes that are gone."""
        if self._stepping is None and not group_is_open():
            return nullcontext()
        return naming_who_is_gone(self._stepping, what, f"halfstep/failed/{self._meeting}")

    def sampled(self, device: torch.device) -> Tensor:
        """Returns a number (0-dim float64) from the bits of a few weights, the same weights in all processes."""
        number, self._samples = self._samples, self._samples + 1
        if not self._alike or self.staged:
            return torch.zeros((), dtype=torch.float64, device=device)
        turn, index = divmod(number, len(self._alike))
        number_of = _number_of([_part(t, turn) for t in self._held(self._alike[index])])
        return number_of.double().to(device, non_blocking=True)  # exact: below 2**53

    def parted(self) -> dict[str, list[int]]:
        """Returns the parameters that differ between processes, by name, with the ranks that differ from process 0."""
        found = told_by_all([int(_number_of(self._held(p))) for p in self._alike], self._group)
        others = {
            self._name_of(p): [rank for rank, theirs in enumerate(found) if theirs[i] != first]
            for i, (p, first) in enumerate(zip(self._alike, found[0], strict=True))
        }
        return {name: ranks for name, ranks in others.items() if ranks}

    def _held(self, p: nn.Parameter) -> list[Tensor]:
        """Returns a weight, followed by its master or remainder if it has one."""
        return [p, self._store.extra(p)] if self._store.keeps(p) else [p]

    def _registered(self, wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
        """Notes a new wrapper; if it broadcasts weights, first copies masters and optimizer states from process 0."""
        if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
            return
        shared = self._shared(wrapper, module)
        if shared and not self._plain:
            self._attach(wrapper, shared)
        if shared and sends_weights(sys._getframe()):
            with naming_who_is_gone(wrapper.process_group, WRAPPING):
                if self._plain:
                    self._compare(shared, wrapper.process_group)
                else:
                    self._hand_on(shared, 0, sent_again=True)

    def _attach(self, wrapper: DistributedDataParallel, shared: Sequence[nn.Parameter]) -> None:
        if self.sharded:
            raise SetupError(
                "the model is sharded over processes and wrapped in DistributedDataParallel as well; remove the "
                "wrapper and pass fully_shard a mesh of two dimensions (replicate, shard): fully_shard(model, "
                "mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')))"
            )
        if self._group is not None and self._group != wrapper.process_group:
            raise SetupError(
                "the models of one session are wrapped in DistributedDataParallel over different process groups; use "
                "the same process_group for all of them, or a separate session for each model"
            )
        self._group = wrapper.process_group
        self._alike = list({id(p): p for p in (*self._alike, *shared) if p.is_floating_point()}.values())
        self.sums.add(wrapper, shared)
        self._undo.callback(_Join(wrapper, self).undo)
        self._undo.callback(retire, weakref.ref(wrapper), [p for p in shared if is_low(p.dtype)])

    def begin_join(self, wrapper: DistributedDataParallel, *, by_initial: bool) -> None:
        """Begins `join()`: from now on processes may run out of data at different times."""
        self._join = weakref.ref(wrapper)
        self.sums.take_over()  # a process without any data makes no backward pass, and answers the others'
        self.sums.counts = not by_initial

    def end_join(self, wrapper: DistributedDataParallel, is_last: bool) -> None:
        """Ends `join()`: sends the weights and masters of the last process that had data to all others."""
        # Optimizer states are sent too: processes that ran out of data have older states, with which the next step
        # would make the weights differ again. torch itself sends only the stored weights, of one of the last
        # processes.
        self._join, self.sums.counts = None, False
        rank = dist.get_rank(self._group) if is_last else -1
        last = torch.tensor(rank, dtype=torch.int64, device=wrapper.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=self._group)
        self._hand_on(self._shared(wrapper, wrapper.module), int(last), sent_again=False)

    def _shared(self, wrapper: DistributedDataParallel, module: nn.Module) -> list[nn.Parameter]:
        """Returns the session's parameters that the wrapper of a module keeps the same in all processes."""
        own = {id(p) for root in self._roots for p in root.parameters()}
        ignored: set[str] = wrapper.parameters_to_ignore
        return [p for name, p in module.named_parameters() if id(p) in own and name not in ignored]

    @torch.no_grad()
    def _hand_on(self, parameters: Sequence[nn.Parameter], source: int, *, sent_again: bool) -> None:
        """Copies the session's state of these parameters from process `source` to all others, bit for bit."""
        # Pass `sent_again` if DistributedDataParallel will write the same weights once more, so that its write does
        # not count as a change of the weights.
        assert self._group is not None
        scales = self._compare(parameters)[source]
        for tensor in (each for p in parameters if self._store.keeps(p) for each in self._held(p)):
            bits = tensor.detach()
            if bits.dtype is torch.int16:  # which no backend sends
                bits = bits.view(torch.bfloat16)
            sent = bits.contiguous()
            dist.broadcast(sent, group=self._group, group_src=source)
            if sent.data_ptr() != bits.data_ptr():
                bits.copy_(sent)
        self._store.note(parameters, writes_to_come=int(sent_again))
        if scales != self._scales.state_dict():
            self._scales.load_state_dict(scales)
        self._replaced()
        self._hand_on_moments(parameters, self._group, source)

    def _hand_on_moments(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, source: int) -> None:
        """Copies optimizer states of these parameters, and the options of their param groups, from `source` to all."""
        is_source = dist.get_rank(group) == source
        every = [each for optimizer in self._optimizers() for each in optimizer.param_groups]
        groups = [each for each in every if not {*map(id, parameters)}.isdisjoint(map(id, each["params"]))]
        own: dict[int, dict[str, Any]] = {}
        for optimizer in self._optimizers() if is_source else ():
            states = {} if holds_a_part(optimizer) else optimizer.state_dict()["state"]
            own |= {id(p): states.get(index, {}) for index, p in enumerate(updated_by(optimizer))}
        shapes = [{name: _to_announce(each, p) for name, each in own.get(id(p), {}).items()} for p in parameters]
        options = [{name: value for name, value in each.items() if name != "params"} for each in groups]
        sent: list[Any] = [(shapes, options) if is_source else None]
        dist.broadcast_object_list(sent, group=group, group_src=source)
        shapes, options = sent[0]
        for state, p in zip(shapes, parameters, strict=True):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_meta:
                    new = torch.empty_like(value, device=p.device, memory_format=torch.contiguous_format)
                    state[name] = own[id(p)][name].contiguous() if is_source else new
                    dist.broadcast(state[name], group=group, group_src=source)
        if not is_source:
            self._take_moments(dict(zip(map(id, parameters), shapes, strict=True)))
        for each, values in zip(groups, options if not is_source else (), strict=False):
            for name, value in values.items():
                if isinstance(each.get(name), Tensor) and isinstance(value, Tensor):
                    each[name].copy_(value)  # a schedule may hold it
                else:
                    each[name] = value

    def _take_moments(self, theirs: Mapping[int, dict[str, Any]]) -> None:
        for optimizer in self._optimizers():
            if holds_a_part(optimizer):
                continue
            saved, updated = optimizer.state_dict(), updated_by(optimizer)
            new = {i: theirs[id(p)] for i, p in enumerate(updated) if id(p) in theirs}
            state = {i: each for i, each in (saved["state"] | new).items() if each}
            if new and (saved["state"] or state):
                optimizer.load_state_dict({**saved, "state": state})

    def _compare(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None) -> list[Any]:
        """Checks that all processes have the same plan and parameters; returns the loss scales of each process."""
        lines = [f"the plan's {key} = {value!r}" for key, value in to_dict(self._plan).items()]
        for p in parameters:
            placed = f"{p.dtype} and placed as {p.placements}" if is_sharded(p) else str(p.dtype)
            lines.append(f"{self._name_of(p)} of shape {tuple(p.shape)} stored as {placed}")
        found = told_by_all((lines, self._scales.state_dict(), secrets.token_hex(8)), group or self._group)
        first = found[0][0]
        for rank, (theirs, *_) in enumerate(found):
            differing = [pair for pair in zip(theirs, first, strict=False) if pair[0] != pair[1]]
            if len(theirs) != len(first):
                differing.append((f"{len(theirs)} entries", f"{len(first)}"))
            if differing:
                raise SessionError(
                    f"what is trained differs between processes: process {rank} has {differing[0][0]}, process 0 has "
                    f"{differing[0][1]}; use the same model, optimizer and plan in all processes"
                )
        self._meeting = found[0][2]
        return [scales for _, scales, _ in found]


class _Join:
    """Replaces the `join_hook` of a DDP wrapper (not of copies), to add what a session does in `join()`."""

    def __init__(self, wrapper: DistributedDataParallel, replicas: Replicas) -> None:
        self._wrapper, self._replicas = weakref.ref(wrapper), weakref.ref(replicas)
        wrapper.__dict__["join_hook"] = self

    def undo(self) -> None:
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.__dict__.get("join_hook") is self:
            del wrapper.__dict__["join_hook"]

    def __call__(self, **kwargs: Any) -> JoinHook:
        """Begins `join()`; returns torch's hook, extended by what the session does at the end of `join()`."""
        wrapper, replicas = self._wrapper(), self._replicas()
        assert wrapper is not None  # whose attribute this is
        hook: JoinHook = type(wrapper).join_hook(wrapper, **kwargs)  # type: ignore[no-untyped-call]
        if replicas is None:
            return hook
        replicas.begin_join(wrapper, by_initial=kwargs.get("divide_by_initial_world_size", True))
        return _Joined(hook, wrapper, replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (DistributedDataParallel.join_hook, self._wrapper())


class _Joined(JoinHook):
    """DDP's join hook; then sends weights, masters and optimizer states from a process that joined last."""

    def __init__(self, hook: JoinHook, wrapper: DistributedDataParallel, replicas: Replicas) -> None:
        self._hook, self._wrapper, self._replicas = hook, wrapper, replicas

    def main_hook(self) -> None:
        """Takes part in the collective operations of one step of the processes that still have data."""
        with self._replicas.sums.without_data():
            self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Makes the replicas the same when no process has data any more."""
        self._hook.post_hook(is_last_joiner)
        self._replicas.end_join(self._wrapper, is_last_joiner)


def _to_announce(value: Any, parameter: nn.Parameter) -> Any:
    """Returns what to send first of a value of an optimizer state: of a tensor that follows, its shape and dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to("meta") if value.dim() and value.device == parameter.device else value.cpu()


def _part(t: Tensor, turn: int) -> Tensor:
    """Returns `t`, or a part that depends on `turn` if `t` has more than `SAMPLE` elements; does not copy."""
    while t.numel() > SAMPLE:
        t = t[turn % len(t)] if t.dim() > 1 else t[:SAMPLE]
    return t


@torch.no_grad()
def _number_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a number (0-dim int64) computed from the bits of floating tensors; equal tensors have equal numbers."""
    numbers = [bits_of(t).sum(dtype=torch.int64) for t in tensors]
    return torch.stack([number * (i + 1) for i, number in enumerate(numbers)]).sum()
