"""The session: the only part of halfstep that changes models and optimizers; it can undo every change."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from halfstep.errors import ObserveError, SessionError
from halfstep.formats import FP32, needs_scale
from halfstep.modes import begin_pass, ordinary_tensors
from halfstep.plan.compatibility import check_optimizers, check_per_sample
from halfstep.plan.io import to_dict
from halfstep.plan.matching import match_parameters
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats, resolve
from halfstep.records import (
    ABSORBED_SAMPLE,
    TENSOR_KINDS,
    Finding,
    Observation,
    Recorder,
    SessionStart,
    Status,
    StepRecord,
    Verdict,
    absorbed_finding,
    preformatted,
)
from halfstep.sharded import is_sharded
from halfstep.torch_internals import LOADS_STATE, parameters_of
from halfstep.train.cast.casting import Casting
from halfstep.train.cast.copies import CheckpointHook, plain_copies
from halfstep.train.cast.functions import patch_function
from halfstep.train.cast.modules import (
    Given,
    holds_state,
    keep_buffers_full,
    keep_checkpoints_full,
    keep_parameters,
    mark,
)
from halfstep.train.cast.narrow import Layers
from halfstep.train.cast.opkernels import called_flex_attention
from halfstep.train.cast.reading import read_as_planned
from halfstep.train.kernels.batch import Scratch, resolved
from halfstep.train.optim.hooks import forbid_step, lend_weights, send_step, updated_by, watch_steps
from halfstep.train.optim.masters import MasterStore, average_full, full_originals, full_state
from halfstep.train.optim.moments import Moments
from halfstep.train.optim.state import exact_state_loading, widen_states
from halfstep.train.optim.steppers import make_stepper, needs_closure
from halfstep.train.probe.probe import Probe, Probes, make_probe
from halfstep.train.probe.rows import Overflows, Shadows
from halfstep.train.processes.shards import check_gathered, local, own_number, reshard, whole
from halfstep.train.scale.accumulator import GradientAccumulator
from halfstep.train.scale.buffers import BufferGuard
from halfstep.train.scale.loss import (
    FP16_LOSS_CEILING,
    GRAD,
    check_loss,
    check_losses,
    grad_inputs,
    overflowed,
    pair_outputs,
    scaled,
    true_gradient,
)
from halfstep.train.scale.norm import read
from halfstep.train.scale.scaling import LossScales, Scale
from halfstep.train.session.decide import (
    Decision,
    at_places,
    check_training,
    decide_for_copies,
    emulates_after,
    modules_of,
    say_what_steps_itself,
)
from halfstep.train.session.parts import Part, Runtime, StepFacts, memory_of, parts_to_step
from halfstep.train.session.replicas import Replicas
from halfstep.train.session.state import STATE_SCHEMA, check_state
from halfstep.train.session.training import MixedTraining, PlainTraining, Step, Training
from halfstep.validate import as_list, check_keywords, near_miss, short, with_near_misses

Sink = Callable[[StepRecord], None]
STEP_IS_OURS = (
    "a halfstep session owns the step: call session.step() instead of optimizer.step(), which would read scaled "
    "gradients and not update the masters. After session.close(), optimizer.step() works again"
)
RETURNED = (
    "halfstep.initialize returns one Session, not model and optimizer, which stay as you have them: "
    "session = halfstep.initialize(model, optimizer, ...)"
)
SCALED = "; session.backward(loss) scales the loss, session.step() adapts the scale, session.status() has it"
NO_OPTIMIZER = "this session has no optimizer (inference); to train, pass the optimizer to halfstep.initialize"
REPLACED = "a module was replaced after initialize: make the optimizer and initialize again after that"
IN_A_CLOSURE = (
    "a closure for blame or check must only compute and return the loss; leave out backward and step, since blame and "
    "check run backward themselves"
)
_LOG = logging.getLogger("halfstep")


class Watcher(Protocol):
    """An observer of each step of a session, such as the guardian."""

    pending: BaseException | None  # held back until all processes that step together have agreed to stop

    def carry(self, scale: Tensor) -> None:
        """Notes the loss scale of the next backward pass."""

    def after_step(
        self, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor], stopping: Sequence[int]
    ) -> None:
        """Looks at a step of `parts`; `scales` has the loss scale of each loss whose gradients it used, by loss id."""

    def close(self) -> None:
        """Ends what the watcher has started for the next step, such as a recording."""


class Session:
    """Trains models under a plan; made by `initialize`, ended by `close()` or by leaving its `with` block.

    `plan` is what the session trains under, `assignment` has the formats of each module. Several sessions may be open
    in one process.
    """

    def __init__(self, decision: Decision, *, sinks: Sequence[Sink] = ()) -> None:
        plan, device, roots = decision.plan, decision.device, decision.roots
        self.plan = plan
        self.assignment: Assignment = decision.assignment
        self.closed = False
        self.watchers: list[Watcher] = []
        self.overflows: Overflows | None = None  # for `observe(absorbed=True)`
        self.shadows: Callable[[], Shadows] | None = None  # for `observe(precision=True)`
        self._decision = decision
        self._roots = roots
        self._sinks = tuple(sinks)
        self._recorders = [sink for sink in sinks if isinstance(sink, Recorder)]
        self._device = device
        # FSDP2 puts other parameters in the place of these for a while
        self._names = {id(p): name for name, p in self._named_parameters() if is_sharded(p)}
        self._undo = ExitStack()
        self._probes = Probes()
        self._undo.callback(self._probes.detach)
        self._scratch = Scratch()
        self._store = MasterStore(plan.master, plan.low.dtype, self._joins)
        self._untrained = {id(p): p for p in at_places(roots, decision.untrained)}  # that no optimizer updates
        self._given: Given = {}
        self._casting = Casting(
            plan, device, emulate=decision.emulate, wide_backward=decision.facts.processor.wide_backward
        )
        self._scales = LossScales(plan.scale, device)
        self._awaiting: list[Part] = []  # parts with a backward since their last step
        self._steps = 0
        self._loss: Tensor | None = None  # of the backward calls since the last step
        self._skips = torch.zeros((), dtype=torch.int64, device=device)
        self._bad_losses = torch.zeros((), dtype=torch.int64, device=device)  # steps with one
        self._rehearsing = False
        self._lending = False
        self._trial: Session | None = None
        self._stepped = Step([])  # the last one
        self._last: dict[int, Step] = {}  # by loss id: the last one that used its gradients
        self._first_losses: dict[int, Tensor] = {}  # likewise
        mine = self._store, self._scales, lambda: self.optimizers, self._name_of, self._replaced
        self._replicas = Replicas(roots, plan, *mine, decision.group)
        self.runtime = Runtime(
            plan, roots, device, self._casting, self._scales, self._store.full, self._store.fit, self._replicas.summing
        )
        try:
            self._open()
            names = self.assignment.names()
            self.tell(SessionStart(to_dict(plan), str(device), decision.emulate, names, own_number()))
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._undo.callback(reshard, self._roots)  # after an evaluation they hold whole weights
        self._undo.callback(self._casting.open())
        self._undo.callback(mark(modules_of(self._roots), self))
        self._undo.callback(lambda: [self._store.restore(p) for p in list(self._store)])
        pairs = list(self.modules())
        for parameter in self._decision.stored_low():
            self._store.track(parameter, master=id(parameter) not in self._untrained)
        for module, formats in pairs:
            self._cast_module(module, formats)
        self._parts = [self._make_part(optimizer, self._undo) for optimizer in self._decision.optimizers]
        self._buffers = BufferGuard(self._roots if self._decision.updates else [])
        if self.plan.products != "plan":
            named = zip(self.assignment.names(), self.assignment.modules, modules_of(self._roots), strict=True)
            by_recipe = [(name, module) for name, f, module in named if f.products == self.plan.products]
            self._undo.callback(self._casting.hold(Layers(by_recipe, self._device)))
        caps = self.plan.low.needs_scale and self._scales.active
        gates = self._casting.install(
            pairs,
            full=self._store.full,
            before=self._before_forward,
            look=self._look_for_fp16_losses if caps else None,
            lent=self.full_weights,
        )
        self._undo.callback(gates)
        if self.plan.param == "low":
            self._undo.callback(watch_steps(self._refuse_others))
            self._undo.callback(patch_function(Optimizer, LOADS_STATE, full_state, owner=self._store))
            self._undo.callback(patch_function(ParametrizationList, "__init__", full_originals, owner=self._store))
            self._undo.callback(patch_function(AveragedModel, "update_parameters", average_full, owner=self._store))
        self._replicas.meet()
        if self._decision.mixed:  # after all have met, so that what one refuses all have
            self._undo.callback(read_as_planned(self._roots, pairs, self.plan))
        self._undo.callback(self._replicas.close)
        full = self.plan.param == "full"  # DDP may wrap first
        self._replicas.open(search=bool(self._parts) and full, plain=not self._decision.updates)
        self._training = self._make_training()
        self._undo.callback(self._close_watchers)

    def _before_forward(self) -> None:
        for root in self._roots:
            check_per_sample(root, self.plan)
        self._buffers.refresh()
        if self._steps:  # who takes gradients per sample does so from the start
            self._casting.before_training(self._buffers.refresh)

    def _make_training(self) -> Training:
        if not self._decision.updates:
            return PlainTraining(self._roots, self._parts, self._probes, self._device)
        for root in self._roots:
            hook = CheckpointHook(lambda *_: self._buffers.after_step())
            handle = root.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)
        return MixedTraining(
            roots=self._roots,
            parts=self._parts,
            casting=self._casting,
            scales=self._scales,
            store=self._store,
            buffers=self._buffers,
            replicas=self._replicas,
            probes=self._probes,
            device=self._device,
            name_of=self._name_of,
            unscales=self._decision.stepping == "optimizer",
            scratch=self._scratch,
        )

    def modules(self) -> Iterator[tuple[nn.Module, ModuleFormats]]:
        """Yields every module with its formats in the assignment; a module that several models share comes once."""
        seen: set[int] = set()
        now, then = modules_of(self._roots), self.assignment.modules
        if len(now) != len(then):
            raise SessionError(f"the model has {len(now)} modules instead of {len(then)}: {REPLACED}")
        for module, formats in zip(now, then, strict=True):
            if id(module) not in seen:
                seen.add(id(module))
                yield module, formats

    def _cast_module(self, module: nn.Module, formats: ModuleFormats) -> None:
        if self._decision.mixed and holds_state(module):
            self._undo.callback(keep_parameters(module))
        if formats.buffers is not None:
            self._undo.callback(keep_buffers_full(module, formats.buffers.dtype))
        stores_low = formats.param not in (None, FP32)
        if stores_low and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the new weights in one piece of memory
        gets_some = self.plan.param == "low" and is_parametrized(module)  # once it is so no more
        if stores_low or formats.kept or gets_some:
            self._undo.callback(keep_checkpoints_full(module, self._store, self._given))

    def _joins(self, parameter: nn.Parameter) -> bool:
        """Tells whether a weight that an optimizer updates for the first time is now stored as trained weights are."""
        # Under DistributedDataParallel, whose buckets have the formats of the weights that it wrapped, it trains in
        # fp32.
        if id(parameter) not in self._untrained or is_sharded(parameter) or self._replicas.reduced:
            return False
        before = self.assignment
        del self._untrained[id(parameter)]
        left = self._untrained.values()
        self.assignment = resolve(self.plan, self._roots, made_low=[*self._store, parameter], untrained=left)
        held = zip(modules_of(self._roots), before.modules, strict=True)
        return any(p is parameter and name in f.kept for m, f in held for name, p in parameters_of(m).items())

    def _make_part(self, optimizer: Optimizer, undo: ExitStack) -> Part:
        replicas, updates = self._replicas, self._decision.updates
        width, rounds = self.plan.moments, self.plan.rounding == "stochastic"
        moments = None
        if width != "full" or rounds:
            full = match_parameters(self.plan.full_moments, self._roots)
            moments = Moments(optimizer, width, full, self._name_of, rounds=rounds)
        part = Part(
            optimizer,
            GradientAccumulator(
                lambda: updated_by(optimizer), self.plan.param == "low", lambda: replicas.reduced, replicas.sums
            ),
            make_stepper(
                optimizer,
                self._store,
                plain=not updates,
                name_of=self._name_of,
                moments=moments,
                emulates=lambda: self._casting.emulates,
                scratch=self._scratch,
            ),
            needs_closure(optimizer),
        )
        undo.callback(part.stepper.close)
        if self.plan.param == "low":
            undo.callback(lend_weights(optimizer, partial(_full, self._store, self._casting)))
        if updates:
            undo.callback(part.accumulator.close)
            undo.callback(exact_state_loading(optimizer))
        if self._decision.stepping == "optimizer" and not part.needs_closure:
            undo.callback(send_step(optimizer, partial(self._own_step, part), part.stepper.prepare))
        elif updates and not part.needs_closure:
            undo.callback(forbid_step(optimizer, STEP_IS_OURS, part.stepper.prepare))
        if part.needs_closure:
            undo.callback(optimizer.register_step_post_hook(self._count_own_step).remove)
        return part

    def _refuse_others(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuses a step by an optimizer outside of the session that would round weights or read scaled gradients."""
        if any(optimizer is part.optimizer for part in self._parts):
            return
        theirs = updated_by(optimizer)
        low = self._store.tracked(theirs)
        scaled = [p for p in theirs if id(p) in self._untrained and p.grad is not None] if self._scales.active else []
        why = " with a gradient that carries the loss scale. Pass it to halfstep.initialize, or use bf16"
        if low:
            why = (
                f", which the session stores in {self.plan.low}: its updates would be rounded and would not reach the "
                "masters. Pass the optimizer to halfstep.initialize, or call session.close() first. In a trainer, pass "
                "it by configure_optimizers, plugin.setup, prepare or HalfstepTrainer(optimizers=...)"
            )
        if low or scaled:
            raise SessionError(
                f"{type(optimizer).__name__} is not an optimizer of this session, but would step "
                f"{self._name_of((low or scaled)[0])}{why}"
            )

    def _count_own_step(self, *_: Any) -> None:
        """Counts a step that an optimizer with a closure has made without the session."""
        self._steps += 1
        if self._casting.layers is not None:
            self._casting.layers.step += 1

    def _own_step(self, part: Part, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the session in place of a call of `optimizer.step`; returns the loss of the closure."""
        self._check_training()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.closed:  # within the closure: who owns the optimizer now makes the step
            part.optimizer.step()
        else:
            self._step([part], None)
        return loss

    def _replaced(self) -> None:
        """Refreshes casts and buffer snapshots after another process's weights and buffers were copied in."""
        self._casting.weights_changed()
        self._buffers.after_step()

    def _look_for_fp16_losses(self, value: Tensor) -> Tensor:
        if needs_scale(value.dtype) and value.dim() == 0 and value.requires_grad:
            self._scales.limit(FP16_LOSS_CEILING)
        return value

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context that extends the plan to code outside the model's forward (a loss with weights, say)."""
        self._check_open()
        if self._trial is not None:
            return self._trial.autocast()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._buffers.refresh()
        return self._casting.region()

    def backward(self, loss: Tensor, *, loss_id: int = 0, **kwargs: Any) -> None:
        """Runs the backward pass of a loss times the loss scale; may be called any number of times before a step.

        `p.grad` holds scaled gradients until `step()`. `kwargs` are those of `Tensor.backward`. Losses with different
        `loss_id` have separate loss scales. If a loss is not finite, the next step is skipped.

        Raises:
            SessionError: the session is closed or for inference, or `loss` is not a scalar that requires a gradient.
        """
        self._check_training()
        check_loss(loss, kwargs)
        with self._scaling((loss,), loss_id, unscale=True) as scale:
            sent = scaled(loss, scale) if self._scales.active or self._replicas.joining else loss
            begin_pass(partial(sent.backward, **kwargs))

    @with_near_misses
    def scaling(self, *losses: Tensor, loss_id: int = 0, unscale: bool = True) -> AbstractContextManager[Tensor]:
        """Returns a context that yields the loss scale (0-dim fp32), for a backward pass that the caller runs in it.

        For loops that call `backward` themselves: `with session.scaling(loss) as scale: (loss * scale).backward()`.
        `losses` are the unscaled losses of that pass; if one is not finite, the next step is skipped.

        With `stepping="optimizer"` the gradients are unscaled at the end of the block. Pass `unscale=False` to keep
        them scaled if more backward passes follow before the step.

        Raises:
            SessionError: the session is closed or for inference, or a loss is not a tensor.
        """
        self._check_training()
        check_losses(losses)
        return self._scaling(losses, loss_id, unscale=unscale)

    @contextmanager
    def _scaling(self, losses: Sequence[Tensor], loss_id: int, *, unscale: bool) -> Iterator[Tensor]:
        self._carry(loss_id, losses)
        detached = [loss.detach() if type(loss) is Tensor else whole(loss.detach()) for loss in losses]
        with self._training.scaling(detached, loss_id, unscale=unscale) as value:
            yield value
        for loss in detached:
            if loss.numel() == 1:  # else its backward had a gradient of its own
                self._first_losses.setdefault(loss_id, loss)
                self._loss = loss if self._loss is None else self._loss.float() + loss.to(self._loss.device)
        self._awaiting = list(self._parts)

    def _carry(self, loss_id: int, losses: Sequence[Tensor]) -> Scale:
        """Returns the scale of a loss for a backward pass from `losses`, after it has told watchers and probes."""
        scale = self._scales.of(loss_id)
        if any(needs_scale(loss.dtype) for loss in losses):
            scale.limit(FP16_LOSS_CEILING)
        self._probes.carry(scale.value, losses)
        for watcher in self.watchers:
            watcher.carry(scale.value)
        return scale

    def grad(
        self, outputs: Any, inputs: Any, *, loss_id: int = 0, grad_outputs: Any = None, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Returns gradients as `torch.autograd.grad` does, computed with the loss scale and then divided by it.

        The gradients are true ones in fp32 (float64 and complex keep their dtype), so that a penalty on them can be
        added to the loss (`create_graph=True`). The loss scale is the one for `loss_id`. If these gradients overflow,
        the scale backs off when the loss with the penalty is passed to `backward` with the same `loss_id`. `kwargs` are
        those of `torch.autograd.grad`.

        Raises:
            SessionError: the session is closed, an output or input is not a tensor that requires a gradient, a
                non-scalar has no `grad_outputs`, or `create_graph` needs weights that FSDP2 frees.
        """
        self._check_open()
        check_keywords("grad()", kwargs, GRAD)
        if kwargs.get("create_graph"):
            check_gathered(self._roots)
        outputs, directions = pair_outputs(outputs, grad_outputs)
        inputs = grad_inputs(inputs)
        scale = self._carry(loss_id, outputs)
        value = scale.value.clone()
        if scale.active:
            directions = tuple(
                (torch.ones_like(out) if d is None else d) * value.to(out.device, out.dtype)
                for out, d in zip(outputs, directions, strict=True)
            )
        with self._casting.backward():
            found = torch.autograd.grad(outputs, inputs, directions, **kwargs)
        if scale.active:
            bad = torch.stack([overflowed(local(out.detach())).to(value.device) for out in outputs]).any()
            lost = read([resolved(local(g)) for g in found if g is not None], device=value.device).found > bad
            self._scales.penalties[loss_id] = lost | self._scales.penalties.get(loss_id, lost)
        return tuple(None if g is None else true_gradient(g, value if scale.active else None) for g in found)

    @with_near_misses
    def unscale_(self) -> None:
        """Unscales the gradients in `p.grad` to true fp32 gradients, to be read or changed before `step`."""
        self._check_training()
        self._training.unscale_()

    @with_near_misses
    def step(self, optimizer: Optimizer | None = None, *, max_norm: float | None = None) -> StepRecord:
        """Updates the weights from the gradients of the `backward` calls since the last step, unless one is non-finite.

        Gradients stay in `p.grad`: call `optimizer.zero_grad()` before the next backward pass, as without halfstep.

        `optimizer` picks one of several; without it all optimizers that have gradients step, or skip, together.
        `max_norm` clips the global L2 norm of all their true gradients, as `clip_grad_norm_` does. `step` does not wait
        for the device.

        If a step hook raises an error, `step` raises it, as in torch. If no optimizer has stepped before, nothing has
        changed: call `step` again. Otherwise the step is made and counted, and the next call steps the optimizers that
        remain. With several processes it is made in any case, since the others have made it. An error of a sink comes
        after the step.

        Raises:
            SessionError: the session is closed or for inference, `backward` was not called before, or `optimizer` is
                not one of the session's.
            NumericsError: steps keep being skipped for a reason that no lower loss scale cures (`on_failure="raise"`).
        """
        self._check_training()
        if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0):
            raise SessionError(f"max_norm is {max_norm!r}; pass a positive number, or None for no clipping")
        return self._step(parts_to_step(self._parts, self._awaiting, optimizer), max_norm)

    def _step(self, parts: list[Part], max_norm: float | None) -> StepRecord:
        step = Step(parts)
        stop = any([watcher.pending is not None for watcher in self.watchers])
        try:
            self._training.step(step, self._steps + 1, max_norm=max_norm, loss=self._loss, stop=stop)
        finally:
            if step.made:
                self._count(step)
        return step.record

    def _count(self, step: Step) -> None:
        """Counts a step that was made, and passes it to all sinks, probes and watchers, even if one of them raises."""
        for held in step.held:
            held.grads = []  # which `zero_grad` is to free
        scales = step.scales()
        self._steps += 1
        if self._casting.layers is not None:
            self._casting.layers.step += 1
        self._skips += step.record.skipped  # in place: a CUDA graph counts its replays
        if step.record.bad_loss is not None:
            self._bad_losses += step.record.bad_loss
        self._stepped = step
        self._last.update(dict.fromkeys(scales, step))
        self._loss = None
        self._awaiting = [part for part in self._awaiting if part not in step.made]
        if not self._awaiting:
            self._buffers.after_step()
        stepping = [part for part in self._parts if not part.needs_closure]
        with ExitStack() as told:  # the last one first
            for watcher in reversed(self.watchers):
                told.callback(watcher.after_step, step.record, step.made, scales, step.stopping)
            told.callback(self._probes.stepped, step.record.step, step.made, stepping)
            for sink in reversed(self._sinks):
                told.callback(sink, step.record)

    def tell(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Passes a record that is not a StepRecord to the sinks that accept it (`Recorder`), such as a run log."""
        for sink in self._recorders:
            sink.record(record)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, root in enumerate(self._roots):
            yield from root.named_parameters(prefix="" if len(self._roots) == 1 else str(index))

    def _name_of(self, parameter: nn.Parameter) -> str:
        added = (name for name, p in self._named_parameters() if p is parameter)
        return self._names.get(id(parameter)) or next(added, "(in no model of the session)")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Returns a context to run a closure in, as blame and check do: nothing of it is observed or recorded."""
        self._check_open()
        if self._rehearsing:
            raise SessionError(
                "blame, check and inspect cannot be called inside a closure, which must only compute and return the "
                "loss; call them outside of it"
            )
        self._close_watchers()
        self._rehearsing = True
        try:
            with self._probes.paused():
                yield
        finally:
            self._rehearsing = False

    @contextmanager
    def trial(self, plan: Plan, copies: Sequence[nn.Module] | None = None) -> Iterator[Session]:
        """Opens a session with another plan over copies of the models, with this one's optimizers and last step."""
        copies = plain_copies(self._roots) if copies is None else copies
        with Trial(decide_for_copies(self._decision, copies, plan), self) as trial:
            self._trial = trial
            try:
                yield trial
            finally:
                self._trial = None

    def _close_watchers(self) -> None:
        for watcher in self.watchers:
            watcher.close()

    def last_step(self, loss_id: int = 0) -> StepFacts:
        """Returns facts about the last step that used gradients of the loss `loss_id`; waits for the device."""
        last = self._last.get(loss_id)
        skipped = last is not None and bool(last.record.skipped)
        parts = self._parts if last is None else last.parts_of(loss_id)
        now = self._scales.read(loss_id)
        reshard(self._roots)
        held = [(p, p.grad) for part in parts for p in part.parameters()]
        bad = [self._name_of(p) for p, grad in held if grad is not None and read([resolved(local(grad))]).found]
        first = float(self._first_losses[loss_id]) if loss_id in self._first_losses else math.nan
        return StepFacts(
            scale=max(now, float(last.scales()[loss_id])) if last is not None and skipped else now,
            skipped=skipped,
            bad=tuple(bad),
            left_over=any(part.accumulator.left_over for part in self._parts),
            first_loss=first if math.isfinite(first) else None,
        )

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that the session trains with."""
        return tuple(part.optimizer for part in self._parts)

    @with_near_misses
    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Adds optimizers to the session, for loops that make them after the model is on its device and wrapped.

        Raises:
            SessionError: the gradients of a backward pass still wait for their step.
            SetupError: an item is not an optimizer, or as raised by `initialize`. After any error nothing has changed.
        """
        self._check_open()
        optimizers = as_list(optimizers, Optimizer, "optimizers", empty=True)
        if self._awaiting:
            raise SessionError("gradients of a backward pass still wait for their step; add optimizers after the step")
        reshard(self._roots)
        check_optimizers([*self.optimizers, *optimizers], self._roots)
        check_training(optimizers, self._roots, self.plan)
        with ExitStack() as stack:
            parts = [self._make_part(optimizer, stack) for optimizer in optimizers]
            if self.plan.param == "full":
                self._replicas.search()
            self._undo.callback(stack.pop_all().close)
        for optimizer in optimizers:
            widen_states(optimizer, self._store)
        say_what_steps_itself(self._decision, optimizers)
        self._parts += parts  # in place: those who step and scale hold the list

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the session's models."""
        return list({id(p): p for root in self._roots for p in root.parameters()}.values())

    def low_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this session stores in low precision."""
        return list(self._store)

    def status(self) -> Status:
        """Returns the state of the session, read on the host (this waits for the device).

        Of sharded parameters only this process's shards are checked and counted.
        """
        reshard(self._roots)
        bad = [
            name
            for name, p in self._named_parameters()
            if p.is_floating_point() and not bool(torch.isfinite(local(p).detach()).all())
        ]
        flags, spoiled = self._stepped.flags, self._stepped.spoiled
        overflowed = {id(p) for ps, bad in flags for p, is_bad in zip(ps, bad.tolist(), strict=True) if is_bad}
        moments = sum((Counter(part.stepper.bytes()) for part in self._parts), Counter())
        return Status(
            level=self.plan.name,
            low=self.plan.low.name,
            steps=self._steps,
            skipped=int(self._skips),
            bad_losses=int(self._bad_losses),
            scales=self._scales.read_all(),
            nonfinite_parameters=tuple(bad),
            nonfinite_gradients=tuple(name for name, p in self._named_parameters() if id(p) in overflowed),
            spoiled_by=() if spoiled is None else tuple(spoiled.nonzero().flatten().tolist()),
            memory=memory_of(
                self.parameters(),
                self.optimizers,
                masters=self._store.bytes(),
                moments=moments.total(),
            ),
            moments=dict(moments),
            products=self.assignment.by_products(),
            lost=self._casting.layers.losses() if self._casting.layers is not None else (),
        )

    @with_near_misses
    def observe(
        self,
        every: int = 50,
        modules: str | Iterable[str] = "*",
        tensors: str | Iterable[str] = TENSOR_KINDS,
        *,
        sample: int | None = None,
        log: Callable[[Observation], object] | None = None,
        absorbed: bool = False,
        precision: bool = False,
    ) -> Probe:
        """Returns a probe that measures tensors of the model at the next step and then at every `every`-th step.

        `probe.flush()` returns the observations. Several passes before a step are counted together. A module that only
        returns what a module inside it returned has no activations, nor has one whose forward is never called (such as
        `out_proj` of MultiheadAttention). Compiled models run uncompiled at measured steps.

        With several optimizers of which only some make a measured step, the following steps are measured too, up to 8
        in all, until each optimizer has made one. Weights are read at the first of them.

        Of layers that multiply by a recipe there is an observation of kind "operand" for each operand of each product.

        Args:
            every: the distance of the measured steps.
            modules: patterns as in a Rule ("blocks.0", "*.attn", "type:Linear"); modules inside a match are included.
            tensors: kinds: "weight" (as stored, before the step), "weight_grad" (as in `p.grad` at the step),
                "activation" (what a module's forward returns, in passes with gradients on), "activation_grad" (its
                gradient), and "update" (what the step adds to each weight, see `Observation.lost_updates`).
            sample: how many elements of each tensor are read at most.
            log: gets each observation as it arrives, as the session's sinks that are Recorders do.
            absorbed: whether to look also for overflows that a later operation makes finite again, in all training
                forwards of a measured step and the losses after them. Each that a loss passed to the session depends on
                is an observation of kind "absorbed". This waits for the device at each low result, and takes some 20
                microseconds of Python for each operation.
            precision: whether to call one module again in fp32 at each measured step, with the inputs that it got: the
                modules take turns. What its outputs are off by, in units of their spread in fp32, is an observation of
                kind "precision", whose `stats.rms` is below 0.02 where rounding alone explains it. This costs a copy of
                the module and one of its forwards, and waits for nothing.

        Raises:
            ObserveError: a pattern matches no module, there is nothing to measure, or a setting is not allowed.
            SessionError: the session is closed, or makes no steps (inference, or an optimizer with a closure).
        """
        self._check_open()
        if all(part.needs_closure for part in self._parts):
            raise SessionError(
                "observe() needs session.step(), which this session does not run (inference, or an optimizer with a "
                "closure); to measure one tensor use halfstep.measure(tensor)"
            )
        if not isinstance(precision, bool):
            raise ObserveError(f"precision is {short(precision)}; pass True to compare modules with fp32, or False")
        deliver = [take for take in (log, self.tell if self._recorders else None) if take is not None]
        layers = self._casting.layers
        shadows = self.shadows() if precision and self.shadows else None
        probe = make_probe(
            self._roots,
            every=every,
            modules=modules,
            tensors=tensors,
            sample=sample,
            deliver=deliver,
            more=(self.overflows if absorbed else None, shadows, None if layers is None else layers.watched),
        )
        self._probes.add(probe)
        return probe

    def sample_absorbed(self) -> None:
        """Looks for absorbed overflows in few steps, as `observe(absorbed=True)` does, and logs each place of one."""
        said: set[str] = set()

        def say(seen: Observation) -> None:
            found = absorbed_finding(seen)
            if found.place not in said:
                said.add(found.place)
                _LOG.warning("step %s: %s", f"{seen.step:,}", found)

        (first, every), begin = ABSORBED_SAMPLE, self.overflows
        assert begin is not None
        deliver = [say, *([self.tell] if self._recorders else [])]
        more = (lambda undo: None if called_flex_attention() else begin(undo)), None, None
        rare = Probe({}, frozenset(), every=every, sample=None, deliver=deliver, more=more, wait=first - 1)
        self._probes.add(rare)
        _LOG.info("overflows that a later operation hides are looked for at step %s and at every %sth", first, every)

    def adopt_weights(self) -> None:
        """Copies stored weights into their masters, after a write that halfstep does not see (`p.data.clamp_()`, say).

        A master that still rounds to its stored weight keeps its fp32 value. This call is not needed after
        `model.load_state_dict`, after optimizer steps, or after in-place operations on the parameters themselves.
        """
        self._check_open()
        for parameter in [] if self._lending else self._store:  # lent weights are kept as they are at the end
            self._store.adopt(parameter)
        self._casting.weights_changed()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Stores weights in fp32 inside the context, for code that reads or writes them (`p.data.copy_(average)`).

        The values at the end of the context are kept, in the masters too; at O3, which has no masters, they are
        rounded. Inside the context `p.grad` is None; the gradients come back at its end.
        """
        self._check_open()
        if self._lending:
            yield
            return
        self._lending = True
        try:
            with _full(self._store, self._casting):
                yield
        finally:
            self._lending = False

    def full_value(self, t: Tensor) -> Tensor | None:
        """Returns the fp32 values of a tensor that shares the memory of a low parameter, None if it shares none's."""
        found = self._full_of(t)
        return None if found is None else found[2]

    @contextmanager
    def writing_full(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Gives tensors, with the fp32 values of those that share a low parameter's memory; keeps what is written."""
        made: dict[nn.Parameter, Tensor] = {}
        found = [self._full_of(t, made) for t in tensors]
        yield [t if each is None else each[2] for t, each in zip(tensors, found, strict=True)]
        for p, full, _ in filter(None, found):
            self._store.write(p, full)
            self._casting.weights_changed()

    def _full_of(
        self, t: Tensor, made: dict[nn.Parameter, Tensor] | None = None
    ) -> tuple[nn.Parameter, Tensor, Tensor] | None:
        start = t.untyped_storage().data_ptr()
        p = next((p for p in self._store if p.untyped_storage().data_ptr() == start), None)
        if p is None or t.dtype is not p.dtype:
            return None
        full = None if made is None else made.get(p)
        if full is None:
            self._store.adopt(p)
            full = self._store.full(p)
            if made is not None:
                made[p] = full
        offset = full.storage_offset() + t.storage_offset() - p.storage_offset()
        return (p, full, full.as_strided(t.shape, t.stride(), offset)) if full.stride() == p.stride() else None

    def state_dict(self) -> dict[str, Any]:
        """Returns scales, counters and plan as plain Python values; weights are in `model.state_dict()`, in fp32."""
        scales = self._scales.state_dict()
        return {
            "schema": STATE_SCHEMA,
            "plan": to_dict(self.plan),
            "steps": self._steps,
            "skipped": int(self._skips),
            "losses": len(scales),
            "scales": scales,
            "emulate": self._casting.emulates,
        } | ({"bad_losses": bad} if (bad := int(self._bad_losses)) else {})  # old states load, by torch's dcp too

    @with_near_misses
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; model, optimizer and session states may be loaded in any order.

        Products are emulated if they were when the state was saved, also on another machine, unless `initialize` was
        called with `emulate=True` or `emulate=False`.

        Raises:
            StateError: entries are missing or unknown, or the state belongs to another plan; nothing was changed.
        """
        self._check_open()
        check_state(state, to_dict(self.plan))
        self._scales.load_state_dict(state["scales"])
        emulate = emulates_after(self._decision, state.get("emulate"))
        if emulate is not self._decision.emulate:
            with ordinary_tensors():
                self._casting.emulate(emulate)
            self._decision = replace(self._decision, emulate=emulate)
        self._steps = state["steps"]
        if self._casting.layers is not None:
            self._casting.layers.step.fill_(self._steps)
        self._skips.fill_(state["skipped"])
        self._bad_losses.fill_(state.get("bad_losses", 0))

    def close(self) -> None:
        """Undoes all changes of the session: the trained model is an ordinary fp32 model again. Idempotent."""
        layers = None if self.closed else self._casting.layers
        self.closed = True
        with ordinary_tensors():
            self._undo.close()
        if layers is not None and self._recorders:  # at last: a sink that raises must not keep the model changed
            for finding in islice(layers.findings(self.plan), 3):
                self.tell(finding)

    def forget(self) -> None:
        """Closes the session and drops all that it refers to, so that models and optimizers are freed at once."""
        self.close()
        kept = {"plan": self.plan, "closed": True, "_steps": self._steps, "_undo": self._undo}
        vars(self).clear()
        vars(self).update(kept)

    def _check_open(self) -> None:
        if self.closed:
            raise SessionError("this session is closed; call halfstep.initialize again")

    def _check_training(self) -> None:
        if self.closed:
            self._check_open()
        if self._rehearsing:
            raise SessionError(IN_A_CLOSURE)
        if not self._parts:
            raise SessionError(NO_OPTIMIZER)

    def __iter__(self, *_: object) -> NoReturn:
        raise TypeError(RETURNED)

    if not TYPE_CHECKING:  # for which a session has only what stands here
        __getitem__ = __iter__

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):  # the error of a property stays
                return super().__getattribute__(name)
            public = (each for each in dir(type(self)) if not each.startswith("_"))
            near = near_miss(name, [] if hasattr(nn.Module, name) else tuple(public))
            instead = SCALED if hasattr(torch.amp.GradScaler, name) else near or f"; {RETURNED}"
            raise AttributeError(f"a session has no {name!r}{instead}")

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SessionError(
            "a session cannot be copied or pickled, because it belongs to its model and optimizer: save "
            "session.state_dict() beside theirs, or copy the model and call halfstep.initialize for the copy"
        )

    def _repr_html_(self) -> str:
        return preformatted(repr(self) if self.closed else f"{self!r}\n{self.status()}")

    def __repr__(self) -> str:
        return f"Session({self.plan.name}, low={self.plan.low}, steps={self._steps}{', closed' if self.closed else ''})"


class Trial(Session):
    """A session over copies of another session's models, under another plan; it reports what that one `of` would."""

    def __init__(self, decision: Decision, of: Session) -> None:
        self._of = of
        super().__init__(decision)

    def tell(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        if not isinstance(record, SessionStart):  # this one is its own
            self._of.tell(record)

    def last_step(self, loss_id: int = 0) -> StepFacts:
        return self._of.last_step(loss_id)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return self._of.optimizers


@contextmanager
def _full(store: MasterStore, casting: Casting) -> Iterator[None]:
    casting.weights_changed()  # which code inside may write by `p.data`
    try:
        with store.widened():
            yield
    finally:
        casting.weights_changed()
