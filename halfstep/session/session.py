"""The session: the only part of halfstep that touches a model or an optimizer, and it can undo all that it did."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from halfstep.cast.casting import Casting
from halfstep.cast.enter import CheckpointHook, mark, plain_copies
from halfstep.cast.modules import cast_buffers, keep_checkpoints_full, keep_parameters
from halfstep.errors import ObserveError, SessionError
from halfstep.formats import FP16, FP32
from halfstep.kernels.batch import Scratch
from halfstep.machine import Processor
from halfstep.observe.attach import make_probe
from halfstep.observe.probe import Probe, Probes
from halfstep.optim.guard import forbid_step
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import check_gradients
from halfstep.optim.state import exact_state_loading
from halfstep.optim.steppers import needs_closure
from halfstep.optim.update_watch import UpdateWatch
from halfstep.plan.fit import (
    STATE_SCHEMA,
    check_state,
    device_of,
    unwrap,
)
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats, resolve
from halfstep.processes import LateNumbers, Replicas
from halfstep.records import (
    TENSOR_KINDS,
    Finding,
    Observation,
    Recorder,
    SessionStart,
    Status,
    StepRecord,
    Verdict,
)
from halfstep.scale.buffers import BufferGuard
from halfstep.scale.ledger import Collected
from halfstep.scale.loss import (
    FP16_LOSS_CEILING,
    check_loss,
    overflowed,
    pair_outputs,
    poisoned,
    scaled,
    true_gradient,
)
from halfstep.scale.norm import read
from halfstep.scale.scales import LossScales
from halfstep.session.parts import LastStep, Part, StepFacts, last_steps, make_part, memory_of, parts_to_step, step_each
from halfstep.session.stage import Stage
from halfstep.session.together import SharedState, agree
from halfstep.stack import begin_pass
from halfstep.torch_internals import parameters_of

Sink = Callable[[StepRecord], None]
Stepped = tuple[StepRecord, list[Part], BaseException | None]  # which parts, and what a hook raised afterwards
STEP_IS_OURS = (
    "a halfstep session owns the step: call session.step() instead of optimizer.step(), which would read scaled "
    "gradients and miss the masters (after session.close() optimizer.step() works again)"
)
IN_A_CLOSURE = (
    "a closure for blame or check only computes and returns the loss: they run the backward pass, and no step"
)
_LOG = logging.getLogger("halfstep")


class Watcher(Protocol):
    """What looks at each step of a session, as the guardian does.

    `pending` is what it has to raise, once all processes that step together know that they stop; else None.
    """

    pending: BaseException | None

    def carry(self, scale: Tensor) -> None:
        """Notes the loss scale of the backward pass that comes next."""

    def after_step(
        self, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor], stopping: Sequence[int]
    ) -> None:
        """Looks at a step of `parts` on gradients of the losses of `scales`, which has the loss scale of each by id.

        `stopping` are the processes that have something `pending`, which all processes raise at this step.
        """

    def close(self) -> None:
        """Ends what it has left on for the next step."""


class Session:
    """Trains models under a plan; made by `initialize`, ended by `close()` or by leaving its `with` block.

    `plan` is what was asked, `assignment` what each module got. Several sessions may live in one process.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        plan: Plan,
        *,
        emulate: bool,
        processor: Processor,
        sinks: Sequence[Sink] = (),
    ) -> None:
        roots = [unwrap(model) for model in models]
        self.plan = plan
        self.assignment: Assignment = resolve(plan, roots)
        self.closed = False
        self.watchers: list[Watcher] = []
        self._roots = roots
        self._sinks = tuple(sinks)
        self._recorders = [sink for sink in sinks if isinstance(sink, Recorder)]
        self._device = device_of(models, plan)
        self._plain = plan.ops == "none"
        self._constant_one = plan.scale.kind == "none"
        self._undo = ExitStack()
        self._probes = Probes()
        self._undo.callback(self._probes.detach)
        self._store = MasterStore(plan.master, plan.low.dtype)
        self._processor = processor
        self._casting = Casting(plan, self._device, emulate=emulate, wide_backward=processor.wide_backward)
        self._scales = LossScales(plan.scale, self._device)
        self._awaiting: list[Part] = []  # parts with a backward since their last step
        self._scratch = Scratch()  # of the read of the gradients
        self._steps = 0
        self._loss: Tensor | None = None  # of the backward calls since the last step
        self._overflows: list[tuple[list[nn.Parameter], Tensor]] = []  # of the last step: which gradients overflowed
        self._skips = torch.zeros((), dtype=torch.int64, device=self._device)
        self._rehearsing = False
        self._trial: Session | None = None
        self._last: dict[int, LastStep] = {}  # by loss id
        self._first_losses: dict[int, Tensor] = {}  # likewise
        shared = SharedState(plan, self._store, self._scales, self._name_of, self._replaced)
        self._replicas = Replicas(roots, shared)
        self._spoiled: Tensor | None = None  # in which processes a loss of the last step overflowed
        self._late = LateNumbers()
        self._stopping: list[int] = []  # processes whose verdict ends the step
        self.stage = Stage(
            plan, roots, self._device, self._casting, self._scales, self._store.full, self._replicas.summing
        )
        try:
            self._open(optimizers)
            self.tell(SessionStart(to_dict(plan), str(self._device), emulate, self.assignment.names()))
        except BaseException:
            self.close()
            raise

    def _open(self, optimizers: Sequence[Optimizer]) -> None:
        self._undo.callback(self._casting.open())
        self._undo.callback(mark([module for root in self._roots for module in root.modules()], self))
        self._undo.callback(self._restore_weights)
        pairs = list(self.modules())
        for module, formats in pairs:
            self._cast_module(module, formats)
        self._parts = [self._make_part(optimizer) for optimizer in optimizers]
        self._stepping = [part for part in self._parts if not part.needs_closure]
        self._buffers = BufferGuard([] if self._plain else self._roots)
        for root in () if self._plain else self._roots:
            hook = CheckpointHook(lambda *_: self._buffers.after_step())
            handle = root.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)
        caps = self.plan.low is FP16 and self.plan.scale.kind != "none"
        gates = self._casting.install(
            pairs,
            full=self._store.full,
            before=self._buffers.refresh,
            look=self._look_for_fp16_losses if caps else None,
        )
        self._undo.callback(gates)
        if not self._plain:
            self._undo.callback(self._replicas.close)
            self._replicas.open(search=bool(self._parts) and self.plan.param == "full")  # else: wrapped after
        self._undo.callback(self._close_watchers)

    def modules(self) -> Iterator[tuple[nn.Module, ModuleFormats]]:
        """Yields every module once with what the assignment gives it; models may share modules."""
        seen: set[int] = set()
        modules = [module for root in self._roots for module in root.modules()]
        for module, formats in zip(modules, self.assignment.modules, strict=True):
            if id(module) not in seen:
                seen.add(id(module))
                yield module, formats

    def _cast_module(self, module: nn.Module, formats: ModuleFormats) -> None:
        if not self._plain and not isinstance(module, torch.jit.ScriptModule):  # which takes no such hooks
            self._undo.callback(keep_parameters(module))
        if formats.buffers is not None:
            self._undo.callback(cast_buffers(module, formats.buffers.dtype))
        if formats.param is None or formats.param is FP32:
            if self.plan.param == "low" and is_parametrized(module):  # which gets parameters when that ends
                self._undo.callback(keep_checkpoints_full(module, self._store))
            return
        own = [p for p in parameters_of(module).values() if p is not None and p.dtype is torch.float32]
        for parameter in own:
            self._store.track(parameter)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the new weights in one piece of memory
        self._undo.callback(keep_checkpoints_full(module, self._store))

    def _restore_weights(self) -> None:
        for parameter in list(self._store):
            self._store.restore(parameter)

    def _make_part(self, optimizer: Optimizer) -> Part:
        part = make_part(
            optimizer,
            self._store,
            plain=self._plain,
            full_accumulate=self.plan.param == "low",
            reduced=lambda: self._replicas.reduced,
            name_of=self._name_of,
        )
        self._undo.callback(part.stepper.close)
        if not self._plain:
            self._undo.callback(part.ledger.close)
            self._undo.callback(exact_state_loading(optimizer))
            if not part.needs_closure:
                self._undo.callback(forbid_step(optimizer, STEP_IS_OURS, part.stepper.prepare))
        return part

    def _replaced(self) -> None:
        """Takes note that weights and buffers are another process's from now on."""
        self._casting.weights_changed()
        self._buffers.after_step()

    def _look_for_fp16_losses(self, value: Tensor) -> Tensor:
        if value.dtype is torch.float16 and value.dim() == 0 and value.requires_grad:
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
        """Runs the backward pass of a loss times the loss scale; any number of times before a step.

        `p.grad` holds scaled gradients until `step()`. `kwargs` are those of `Tensor.backward`. Losses with different
        `loss_id` have loss scales of their own. A non-finite loss makes the next step a skipped one.

        Raises:
            SessionError: the session is closed or for inference, or `loss` is not a scalar that needs a gradient.
        """
        self._check_training()
        if not self._parts:
            raise SessionError(
                "this session has no optimizer (inference); give halfstep.initialize the optimizer to train"
            )
        check_loss(loss, kwargs)
        scale = self._scales.of(loss_id)
        if loss.dtype == torch.float16:
            scale.limit(FP16_LOSS_CEILING)
        self._carry(scale.value)
        if self._plain:
            begin_pass(lambda: loss.backward(**kwargs))  # type: ignore[no-untyped-call]
            self._add_loss(loss, loss_id)
            self._awaiting = list(self._parts)
            return
        for part in self._parts:
            part.ledger.before_backward(loss_id, scale.value)
        try:
            with self._casting.backward():
                sent = poisoned(loss) if self._replicas.joining else loss
                begin_pass(lambda: scaled(sent, scale).backward(**kwargs))  # type: ignore[no-untyped-call]
        except BaseException:
            for part in self._parts:
                part.ledger.undo_backward()
            raise
        not_finite = overflowed(loss)
        for part in self._parts:
            part.ledger.after_backward(loss_id, scale.value, not_finite)
        self._scales.went_backward(loss_id)
        self._add_loss(loss, loss_id)
        self._awaiting = list(self._parts)

    def _carry(self, scale: Tensor) -> None:
        """Tells the watchers and probes the loss scale of the next backward pass."""
        self._probes.carry(scale)
        for watcher in self.watchers:
            watcher.carry(scale)

    def _add_loss(self, loss: Tensor, loss_id: int) -> None:
        if loss.numel() != 1:  # its backward had a gradient of its own
            return
        loss = loss.detach()
        if loss_id not in self._first_losses:
            self._first_losses[loss_id] = loss
        self._loss = loss if self._loss is None else self._loss.float() + loss.to(self._loss.device)

    def grad(
        self, outputs: Any, inputs: Any, *, loss_id: int = 0, grad_outputs: Any = None, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Does what `torch.autograd.grad` does, with the loss scale in on the way down and out of the results.

        Returns true gradients in fp32 (float64 and complex stay), so that a penalty on them can be added to the loss
        (`create_graph=True`). `loss_id` is that of this loss: its scale is used, and backs off where these gradients
        overflow. `kwargs` are those of `torch.autograd.grad`.

        Raises:
            SessionError: the session is closed, an output is not a tensor, or a non-scalar has no `grad_outputs`.
        """
        self._check_open()
        outputs, directions = pair_outputs(outputs, grad_outputs)
        scale = self._scales.of(loss_id)
        if any(out.dtype == torch.float16 for out in outputs):
            scale.limit(FP16_LOSS_CEILING)
        self._carry(scale.value)
        value = scale.value.clone()
        if scale.active:
            directions = tuple(
                (torch.ones_like(out) if d is None else d) * value.to(out.device, out.dtype)
                for out, d in zip(outputs, directions, strict=True)
            )
        with self._casting.backward():
            found = torch.autograd.grad(outputs, inputs, directions, **kwargs)
        return tuple(None if g is None else true_gradient(g, value if scale.active else None) for g in found)

    def unscale_(self) -> None:
        """Makes the gradients in `p.grad` true fp32 ones, to be read or changed before `step`."""
        self._check_training()
        for part in () if self._plain else self._parts:
            part.ledger.unscale_()

    def step(self, optimizer: Optimizer | None = None, *, max_norm: float | None = None) -> StepRecord:
        """Updates the weights from the gradients of the `backward` calls since the last step, unless one is non-finite.

        `optimizer` picks one of several; without it all that have gradients step, or skip, together. `max_norm` clips
        the global L2 norm of all their true gradients, as `clip_grad_norm_` does. Nothing waits for the device.

        What a step hook or a sink raises after the update comes out in the end: the step is made and counted, once.
        What a pre-hook raises leaves its optimizer as it was: call `step` again. Where one of several optimizers has
        stepped by then, that counts as a step, and the next call steps the rest.

        Raises:
            SessionError: closed, for inference, no `backward` came before, or not one of the session's optimizers.
            NumericsError: steps go on being skipped for what no lower loss scale cures (`on_failure="raise"`).
        """
        self._check_training()
        number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
        if max_norm is not None and not (number and max_norm > 0):
            raise SessionError(f"max_norm is {max_norm!r}; give a positive number, or None not to clip")
        parts = parts_to_step(self._parts, self._awaiting, optimizer)
        self._steps += 1
        try:
            record, parts, failed = self._plain_step(parts, max_norm) if self._plain else self._step(parts, max_norm)
        except BaseException:
            self._steps -= 1
            raise
        self._loss = None
        self._awaiting = [part for part in self._awaiting if part not in parts]
        if not self._awaiting:
            self._buffers.after_step()
        with ExitStack() as told:  # all of them, the last first, also where one raises
            for watcher in self.watchers:
                scales = {loss_id: last.scale for loss_id, last in self._last.items() if last.skipped is record.skipped}
                told.callback(watcher.after_step, record, parts, scales, self._stopping)
            told.callback(self._probes.stepped, self._steps, parts, self._stepping)
            for sink in reversed(self._sinks):
                told.callback(sink, record)
            if failed is not None:
                raise failed
        return record

    def tell(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Gives a record other than a step's to the sinks that take them (`Recorder`), such as a run log."""
        for sink in self._recorders:
            sink.record(record)

    def _plain_step(self, parts: list[Part], max_norm: float | None) -> Stepped:
        norm = None
        seen = [part.ledger.collect() for part in parts] if self._probes.looking else []
        for held in seen:
            self._probes.read(held.params, held.grads, held.carried)
        if max_norm is not None:
            mine = {id(p) for part in parts for p in part.parameters()}
            ordered = [p for root in self._roots for p in root.parameters() if id(p) in mine]
            norm = nn.utils.clip_grad_norm_(ordered, max_norm)  # in the model's order, on which the sum's bits depend
        false = torch.zeros((), dtype=torch.bool, device=self._device)

        def step(part: Part) -> BaseException | None:
            with self._updating(part, seen[parts.index(part)], None, false) if seen else nullcontext():
                return part.stepper.step([], [], None, false)

        count, failed = step_each(parts, step)
        one = torch.ones((), dtype=torch.float32, device=self._device)
        return StepRecord(self._steps, false, one, norm, loss=self._loss), parts[:count], failed

    def _step(self, parts: list[Part], max_norm: float | None) -> Stepped:
        self._casting.weights_changed()
        collected = [part.ledger.collect() for part in parts]
        for held in collected:  # before one of them has stepped, and before kernels read what has no memory
            if len(parts) > 1 or set(map(type, held.grads)) != {Tensor}:
                check_gradients(held.params, held.grads, self._name_of)
        readings = [read(held.grads, device=self._device, scratch=self._scratch) for held in collected]
        factors = [None if self._constant_one else held.inverse.to(self._device) for held in collected]
        norms = [
            reading.norm if factor is None else reading.norm * factor
            for reading, factor in zip(readings, factors, strict=True)
        ]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        stop = any(watcher.pending is not None for watcher in self.watchers)
        agreed = agree(self._replicas, parts, collected, readings, norm, stop=stop)
        collected, readings, norm = agreed.collected, agreed.readings, agreed.norm
        found = readings[0].found
        for flag in (*(reading.found for reading in readings[1:]), *(held.found for held in collected)):
            if flag is not None:
                found = found | (flag if flag.device == self._device else flag.to(self._device))
        clip = None if max_norm is None else (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        looking = self._probes.looking
        for held in collected if looking else ():
            self._probes.read(held.params, held.grads, held.carried)

        def step(part: Part) -> BaseException | None:
            held, factor = collected[parts.index(part)], factors[parts.index(part)]
            if clip is not None:
                factor = clip if factor is None else factor * clip
            with self._updating(part, held, factor, found) if looking else nullcontext():
                failed = part.stepper.step(held.params, held.grads, factor, found)
            part.ledger.consumed()
            return failed

        count, failed = step_each(parts, step)
        parts, collected, readings = parts[:count], collected[:count], readings[:count]
        self._overflows, self._spoiled = agreed.flags[:count], agreed.processes
        self._stopping = [] if agreed.stops is None else self._late.read(agreed.stops)
        self._last.update(last_steps(parts, collected, found))
        self._buffers.restore(found)
        if not self._constant_one:
            self._scales.update(collected, [reading.found for reading in readings])
        self._skips += found  # in place: a CUDA graph counts its replays
        synced = any(part.stepper.syncs for part in parts)
        return StepRecord(self._steps, found, collected[0].scale, norm, synced, self._loss), parts, failed

    def _updating(
        self, part: Part, held: Collected, factor: Tensor | None, found: Tensor
    ) -> AbstractContextManager[None]:
        """Returns a context around the update of a part, for the probes that look at updates."""
        watch = partial(UpdateWatch, part.optimizer, part.stepper, self._store, found)
        return self._probes.updating(watch, held.params, held.grads, factor)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, root in enumerate(self._roots):
            yield from root.named_parameters(prefix="" if len(self._roots) == 1 else str(index))

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, p in self._named_parameters() if p is parameter), "(in no model of the session)")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Runs a closure unobserved: no watcher or probe sees it, and it cannot take a step.

        Raises:
            SessionError: the session is closed, or the closure itself calls this.
        """
        self._check_open()
        if self._rehearsing:
            raise SessionError(
                f"this was called inside a closure that blame or check runs; {IN_A_CLOSURE}; call it outside"
            )
        self._close_watchers()
        self._rehearsing = True
        try:
            with self._probes.paused():
                yield
        finally:
            self._rehearsing = False

    @contextmanager
    def trial(self, plan: Plan) -> Iterator[Session]:
        """Opens a session with another plan over copies of the models; `autocast` is that of the trial meanwhile."""
        emulate = self._casting.emulates and plan.ops != "none"
        with Session(plain_copies(self._roots), [], plan, emulate=emulate, processor=self._processor) as trial:
            self._trial = trial
            try:
                yield trial
            finally:
                self._trial = None

    def _close_watchers(self) -> None:
        for watcher in self.watchers:
            watcher.close()

    def last_step(self, loss_id: int = 0) -> StepFacts:
        """Returns what is known of the last step on a loss, read on the host (this waits for the device)."""
        last = self._last.get(loss_id)
        skipped = last is not None and bool(last.skipped)
        now = self._scales.read(loss_id)
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        bad = [
            names.get(id(p), "a parameter")
            for part in (self._parts if last is None else last.parts)
            for p in part.parameters()
            if p.grad is not None and bool(read([p.grad]).found)
        ]
        first = float(self._first_losses[loss_id]) if loss_id in self._first_losses else math.nan
        return StepFacts(
            scale=max(now, float(last.scale)) if last is not None and skipped else now,
            skipped=skipped,
            bad=tuple(bad),
            left_over=any(part.ledger.left_over for part in self._parts),
            first_loss=first if math.isfinite(first) else None,
        )

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that the session was given."""
        return tuple(part.optimizer for part in self._parts)

    def low_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters whose stored form this session made low."""
        return list(self._store)

    def status(self) -> Status:
        """Returns what the session is doing, read on the host (this waits for the device)."""
        bad = [
            name
            for name, p in self._named_parameters()
            if p.is_floating_point() and not bool(torch.isfinite(p.detach()).all())
        ]
        parameters = {id(p): p for root in self._roots for p in root.parameters()}.values()
        optimizers = [part.optimizer for part in self._parts]
        return Status(
            level=self.plan.name,
            low=self.plan.low.name,
            steps=self._steps,
            skipped=int(self._skips),
            scales=self._scales.read_all(),
            nonfinite_parameters=tuple(bad),
            nonfinite_gradients=self._nonfinite_gradients(),
            spoiled_by=() if self._spoiled is None else tuple(self._spoiled.nonzero().flatten().tolist()),
            memory=memory_of(parameters, optimizers, masters=self._store.bytes()),
        )

    def _nonfinite_gradients(self) -> tuple[str, ...]:
        """Returns whose gradients were infinite or NaN in the last step, from the flags of its one read."""
        bad = {
            id(p) for params, flags in self._overflows for p, flag in zip(params, flags.tolist(), strict=True) if flag
        }
        return tuple(name for name, p in self._named_parameters() if id(p) in bad)

    def observe(
        self,
        every: int = 50,
        modules: str | Iterable[str] = "*",
        tensors: str | Iterable[str] = TENSOR_KINDS,
        *,
        sample: int | None = None,
        log: Callable[[Observation], object] | None = None,
    ) -> Probe:
        """Returns a probe that measures tensors of the model at the next step and then at every `every`-th one.

        Where only some of several optimizers make such a step, those after it are looked at too until each has made
        one, 8 in all; an observation has the number of the step that it was read at, and weights are read at the first.

        `modules` are patterns as in a Rule ("blocks.0", "*.attn", "type:Linear"), for what matches and all below it.
        `tensors` are kinds: "weight" (as stored, before the step), "weight_grad" (as it lies in `p.grad` at the step),
        "activation" and "activation_grad" (what a module's forward returns, in passes with gradients on, and the
        gradient of that), and "update" (what the step adds to each weight, in units of the weight's last place, from
        which `Observation.lost_updates` follows). `sample` bounds how many elements are read of each tensor.

        Several passes before a step are counted together. A module that only returns what a module inside it returned
        is left out, as is one whose forward nobody calls (`out_proj` of MultiheadAttention: its weights are seen). At
        steps that are observed, compiled models run uncompiled. `probe.flush()` gives the observations; `log` and the
        session's sinks that are Recorders get each of them as it arrives.

        Raises:
            ObserveError: a pattern matches no module, there is nothing to measure, or a setting is not allowed.
            SessionError: the session is closed, or for inference, which makes no steps.
        """
        self._check_open()
        if all(needs_closure(part.optimizer) for part in self._parts):
            raise SessionError(
                "observe() looks at session.step(), which this session does not make (inference, or an optimizer with "
                "a closure); halfstep.observe.stats.measure(tensor) measures any tensor"
            )
        if log is not None and not callable(log):
            raise ObserveError(f"log is {log!r:.60}; give a function that is called with each Observation, or None")
        deliver = [*([log] if log else []), *([self.tell] if self._recorders else [])]
        probe = make_probe(self._roots, every=every, modules=modules, tensors=tensors, sample=sample, deliver=deliver)
        self._probes.add(probe)
        return probe

    def adopt_weights(self) -> None:
        """Takes over weights that were written behind halfstep's back (`p.data.clamp_()` and the like).

        The masters become what the stored weights are now; a master that rounds to its stored weight keeps its further
        bits. `model.load_state_dict`, the optimizer and in-place operations on the parameters themselves need no such
        call.
        """
        self._check_open()
        for parameter in self._store:
            self._store.adopt(parameter)
        self._casting.weights_changed()

    def state_dict(self) -> dict[str, Any]:
        """Returns scale, counters and plan as plain Python values; the weights are in `model.state_dict()`, in fp32."""
        return {
            "schema": STATE_SCHEMA,
            "plan": to_dict(self.plan),
            "steps": self._steps,
            "skipped": int(self._skips),
            "scales": self._scales.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `state_dict` gave, in any order with the model's and the optimizer's states.

        Raises:
            StateError: entries are missing or unknown, or the state is of another plan; nothing was changed.
        """
        self._check_open()
        check_state(state, to_dict(self.plan))
        self._scales.load_state_dict(state["scales"])
        self._steps = state["steps"]
        self._skips.fill_(state["skipped"])

    def close(self) -> None:
        """Puts back all that the session changed: the model is an ordinary fp32 one again, trained. Idempotent."""
        self.closed = True
        self._undo.close()

    def _check_open(self) -> None:
        if self.closed:
            raise SessionError("this session is closed; call halfstep.initialize again")

    def _check_training(self) -> None:
        self._check_open()
        if self._rehearsing:
            raise SessionError(IN_A_CLOSURE)

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.plan.name}, low={self.plan.low}, steps={self._steps}{', closed' if self.closed else ''})"
