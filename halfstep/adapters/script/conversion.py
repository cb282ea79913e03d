"""Opens a session for an unmodified script, as soon as the script shows which models it trains."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.adapters.script.found import (
    ByHand,
    CallWatch,
    Outsiders,
    Strays,
    alias_of,
    newest,
    paired,
    roots_of,
    trained_by,
)
from halfstep.edits import FULL, Rule
from halfstep.errors import SetupError
from halfstep.formats import Format
from halfstep.initialize import initialize
from halfstep.machine import read_facts
from halfstep.modes import begin_pass
from halfstep.plan.io import choose_plan, to_dict
from halfstep.plan.levels import customize
from halfstep.plan.matching import first_device
from halfstep.plan.plan import Plan
from halfstep.records import Status, StepRecord
from halfstep.torch_internals import in_backward, in_functorch, outside_of_transforms
from halfstep.train.cast.copies import CheckpointHook
from halfstep.train.cast.modules import owners
from halfstep.train.optim.hooks import forbid_step, original_step, send_step
from halfstep.train.optim.steppers import needs_closure
from halfstep.train.processes.shards import own_number
from halfstep.train.scale.loss import unscaled_leaves
from halfstep.train.session.session import Session, Sink

DEFAULT = "O1"
_LOG = logging.getLogger("halfstep")


@dataclass(eq=False)
class _Made:
    """An optimizer of the script, held weakly."""

    own: weakref.ref[Optimizer]
    release: Callable[[], None]  # undoes what was put on it until a session steps it
    waits: bool  # a copy, of whose modules none was called: it may never train


class Conversion:
    """Finds what a script trains, and trains it in one session; `patches.install` makes torch call its methods.

    The session opens when the script first calls a model that an optimizer trains. Another optimizer, or a copy of one,
    reopens it for all that are still there, with the same scales and counts, so no loss is scaled by two sessions. It
    closes when the script has dropped them all. A script that uses mixed precision itself gets none.
    """

    def __init__(
        self,
        plan: Plan | str | None,
        low: Format | str | None,
        sinks: Callable[[int], Sequence[Sink]],
        *,
        observe: bool,
        changes: Mapping[str, Any] = {},  # read only
    ) -> None:
        self._given, self._changes = (plan is not None, low), changes
        self._asked = plan or DEFAULT, low
        self._plan = customize(choose_plan(*self._asked, read_facts(torch.device("cpu")))[0], **changes)
        self._make_sinks, self._observe = sinks, observe
        self._made: dict[int, _Made] = {}  # by id, in the order in which the script made them
        self._opened: list[int] = []  # the keys of those in the session
        self._stale = False  # whether one of them is gone
        self._in_use = 1  # how many optimizers there were after the last garbage collection
        self._session: Session | None = None
        self._own: weakref.ref[Session] | None = None  # of the script's
        self._undo = ExitStack()  # of what goes with the session
        self._state: dict[str, Any] | None = None
        self._optimizes = False  # whether the script has made an optimizer
        self._by_hand: ByHand | None = None
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # what a session without an optimizer has
        self._refused: str | None = None  # a model that is trained by hand where it cannot be
        self._inside = self._said = self._rests = False
        self._thread = threading.get_ident()
        self._skipped: Tensor | None = None  # of the last step
        self.trained: Status | None = None
        self.brings: str | None = None
        """The mixed precision that the script itself uses, such as "apex.amp"; None if it uses none."""
        self.outsiders = Outsiders()
        self.rank = 0
        self.programs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """What was traced from models: it runs as written, also where it shares their weights."""
        self.watch = CallWatch(self._called)

    def built(self, optimizer: Optimizer, *, copied: bool = False) -> None:
        """Records an optimizer that the script makes or copies; the optimizer's `__init__` may still be running."""
        known = (o for made in self._made.values() if (o := made.own()) is not None)
        if self.brings is not None or isinstance(optimizer, ByHand) or any(vars(o) is vars(optimizer) for o in known):
            return
        key = id(optimizer)
        own = weakref.ref(optimizer, partial(self._gone, key))
        self._optimizes = True
        release = send_step(alias_of(optimizer), partial(self._step_unopened, weakref.ref(optimizer)))
        self._made[key] = _Made(own, release, copied)
        self.watch.start()

    def _gone(self, key: int, _: weakref.ref[Optimizer]) -> None:
        """Lets go of an optimizer that the script has dropped, and closes the session if it was the last one in it."""
        self._made.pop(key).release()
        if key not in self._opened:
            return
        self._opened.remove(key)
        if self._opened or not self._may_change():
            self._stale = True
            self.watch.start()  # the next call of a trained module opens the session anew
        else:
            self.close()

    def _may_change(self) -> bool:
        """Returns whether the session can be opened or closed now: no code runs under it."""
        if threading.get_ident() != self._thread or in_backward() or torch.compiler.is_compiling():
            return False
        if in_functorch() is not None:  # whose tensors would get into what is opened
            return False
        return self._session is None or self._session.closed or not self._session.runtime.is_entered()

    def _step_unopened(self, optimizer: weakref.ref[Optimizer], *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer that no session steps yet; `args` and `kwargs` are the arguments of its `step`."""
        own = optimizer()
        assert own is not None  # it steps
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure) or needs_closure(own):
            return original_step(own)(*args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        if id(own) in self._opened:
            own.step()
            return loss
        return original_step(own)(lambda: loss)

    def uses(self, what: str) -> None:
        """Ends the conversion, since the script itself uses mixed precision, named by `what`."""
        if self.brings is None:
            self.brings, self.rank = what, own_number() or 0
            self._tell_what_is_not_used(what)
        self.watch.stop()
        if not in_backward():  # else the pass goes on in the session to its end
            self.close()
            self._forget()

    def _forget(self) -> None:
        while self._made:
            self._made.popitem()[1].release()

    def opened(self, session: Session, what: str) -> None:
        """Records a session that the script itself opened; `what` names the API that it used."""
        self.uses(what)
        self.brings, self._own = what, weakref.ref(session)

    def _tell_what_is_not_used(self, what: str) -> None:
        leveled, low = self._given
        for_apex = low is not None and what.startswith("apex")
        asked = ["level or plan"] * leveled + [name for name, value in self._changes.items() if value is not None]
        asked += ["low format"] * (low is not None and not for_apex)
        if asked and self.rank == 0:
            _LOG.warning(
                f"the script uses {what}, which decides what runs in low precision, so halfstep run ignores the "
                f"{' and the '.join(asked)}" + f"; the low format {low} is used by the stand-in for apex" * for_apex
            )

    def _called(self, module: nn.Module) -> None:
        """Opens the session if the script trains `module`, which is about to be called, and no session has it yet."""
        if module in self.programs or not self._may_change():
            return
        if self._rests and not (module.training and torch.is_grad_enabled()):
            return
        own = list(module.parameters())
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in own):
            return  # its first batch gives it a shape
        trained = {id(p): made for made in self._made.values() for p in trained_by(_there([made]))}
        found = [trained[id(p)] for p in own if id(p) in trained]
        if found:
            for made in found:
                made.waits = False
            self._open(module)
        elif not self._optimizes and torch.is_grad_enabled() and module not in self._known:
            self._open_by_hand(module)

    def _alive(self) -> list[Optimizer]:
        """Returns the script's optimizers, without copies that it does not train with."""
        return _there([made for made in self._made.values() if not made.waits])

    def _open(self, called: nn.Module) -> None:
        """Closes the open session, and opens one for the script's optimizers and the models that they train."""
        kept, replaced = newest(self._alive())
        if self._session is not None and not self._stale and [id(optimizer) for optimizer in kept] == self._opened:
            self._watch()
            return  # what was built was one of halfstep's own, to try a state on, or is gone
        if self._session is not None:
            del kept, replaced
            self.close()
            kept, replaced = newest(self._alive())
            if len(kept) > 2 * self._in_use:  # models that hold their optimizer in a cycle were held by the session
                del kept, replaced
                gc.collect()  # seldom: it takes as long as a thousand small steps
                kept, replaced = newest(self._alive())
                self._in_use = len(kept)
        trained = trained_by(kept)
        roots = roots_of(trained, called)
        if not any(called is module for root in roots for module in root.modules()):
            return  # a program that was exported from them runs as written
        owned = {id(p) for root in roots for p in root.parameters()}
        self._initialize(roots, kept, strays=[p for p in trained if id(p) not in owned])
        plan = self._plan
        if self._session is not None and (plan.param == "low" or plan.scale.active):
            why = (
                f"this optimizer shares parameters with a newer optimizer; at {plan.name} halfstep steps only the "
                "newest optimizer of a parameter; create each optimizer with its own parameters, or use --level O1 "
                "--low bf16"
            )
            for optimizer in replaced:
                self._undo.callback(forbid_step(alias_of(optimizer), why))
        self._watch()

    def _watch(self) -> None:
        """Watches the calls of modules as long as there are optimizers that wait for one."""
        if any(made.waits for made in self._made.values()):
            self.watch.start()
        else:
            self.watch.stop()

    def _open_by_hand(self, module: nn.Module) -> None:
        """Opens the session for `module`, which the script trains without an optimizer."""
        if not any(p.requires_grad for p in module.parameters()):
            return
        if self.stores_low:
            self._refused = self._refused or type(module).__name__
            return
        known = [weakref.ref(p) for p in trained_by([] if self._by_hand is None else [self._by_hand])]
        if self._session is not None:
            self.close()
            gc.collect()
        before = [p for each in known if (p := each()) is not None]
        roots = roots_of([*before, *(p for p in module.parameters() if p.requires_grad)], module)
        by_hand = ByHand(p for root in roots for p in root.parameters() if p.requires_grad)
        self._initialize(roots, [by_hand])
        if self._session is not None:
            self._by_hand = by_hand
            self._known = weakref.WeakSet(inner for root in roots for inner in root.modules())

    def _initialize(
        self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], strays: Sequence[Tensor] = ()
    ) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.close()
            if owners(module for root in roots for module in root.modules()):
                self.uses("a halfstep session")
            if not roots or self.brings is not None:
                return
            self._plan, _ = choose_plan(*self._asked, read_facts(first_device(roots)))
            self._check(roots)
            models = [*roots, *([Strays(strays)] if strays else [])]
            rules = [Rule(f"type:{Strays.__name__}", FULL)] if strays and self.stores_low else []
            self.rank = own_number() or 0
            sinks = [self._note, *self._make_sinks(self.rank)]
            plan, low = self._asked if self._state is None else (self._plan, None)  # one notice
            for optimizer in optimizers:
                if id(optimizer) in self._made:
                    self._made[id(optimizer)].release()
            aliases = [alias_of(optimizer) for optimizer in optimizers]
            settings = {"rules": rules, "sinks": sinks, **self._changes}
            session = initialize(models, aliases, plan, low=low, stepping="optimizer", **settings)
            self._undo.callback(session.forget)
        self._session, self._opened = session, [id(optimizer) for optimizer in optimizers]
        if session.plan.param == "low":
            for root in roots if session.plan.master != "copy" else ():  # a copy stays until a step needs it
                handle = root.register_state_dict_pre_hook(CheckpointHook(lambda *_: self._adopt()))  # type: ignore[no-untyped-call]
                self._undo.callback(handle.remove)
            for optimizer in session.optimizers:  # SAM, for one, writes weights between the backward pass and the step
                self._undo.callback(send_step(optimizer, partial(self._adopt_and, optimizer.step)))
        if self._state is not None and self._state["plan"] == to_dict(session.plan):
            session.load_state_dict(self._state)
        if self._observe and not all(map(needs_closure, optimizers)):
            session.observe()

    def _check(self, roots: Sequence[nn.Module]) -> None:
        """Refuses models inside DistributedDataParallel if the plan stores weights in low precision."""
        wrapped = [each for root in roots for each in root.modules() if isinstance(each, DistributedDataParallel)]
        if wrapped and self.stores_low:
            raise SetupError(
                f"{type(wrapped[0].module).__name__} is already wrapped in DistributedDataParallel at its first "
                f"forward pass, when halfstep changes the format of its weights at {self._plan.name}: the wrapper "
                "would silently stop reducing gradients; use --level O1"
            )

    def _note(self, record: StepRecord) -> None:
        self._skipped = record.skipped

    def backward(self, original: Callable[..., Any], tensors: Any, grad_tensors: Any, kwargs: dict[str, Any]) -> None:
        """Runs torch's `original` backward at the session's loss scale; all leaves get unscaled gradients."""
        session, self._rests = self._current(), False  # what is trained in eval mode goes on with the next forward
        outputs, directions = paired(tensors, grad_tensors)
        own = self._opened_ids()
        if outputs is not None and self.brings is None:
            self.outsiders.look(outputs, own)
        if session is None or outputs is None:
            original(tensors, grad_tensors, **kwargs)
            return
        if not session.plan.scale.active:
            with session.scaling(*outputs):
                begin_pass(partial(original, tensors, grad_tensors, **kwargs))
        else:
            with session.scaling(*outputs) as scale, unscaled_leaves(outputs, scale, but=own):
                ones = [torch.ones_like(out) if d is None else d for out, d in zip(outputs, directions, strict=True)]
                scaled = [d * scale.to(out.device, out.dtype) for out, d in zip(outputs, ones, strict=True)]
                begin_pass(partial(original, outputs, scaled, **kwargs))
        if self._by_hand is not None and session.plan.ops != "none":
            self._by_hand.step()  # by which the session checks the gradients; they are zeroed if it skips the step
            for p in trained_by([self._by_hand]):
                if p.grad is not None and self._skipped is not None:
                    p.grad.detach().masked_fill_(self._skipped.to(p.grad.device), 0.0)
        if self.brings is not None:
            self.close()
            self._forget()

    def grad(self, original: Callable[..., Any], outputs: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Returns gradients as torch's own `grad` (`original`) does, computed with the loss scale and then unscaled."""
        session = self._current()
        given = kwargs.get("grad_outputs")
        if session is None or session.plan.ops == "none" or paired(outputs, given)[0] is None:
            return original(outputs, inputs, **kwargs)
        self._inside = True  # the session calls torch's function itself
        try:
            return session.grad(outputs, inputs, **kwargs)
        finally:
            self._inside = False

    def _current(self) -> Session | None:
        """Returns the session that a backward pass goes through; None if torch alone runs the pass."""
        if self._inside:
            return None
        if self._session is not None and self._session.closed:
            self.uses("a halfstep session")  # which has taken the model over
        if self._session is None and self._refused is not None and not self._optimizes:
            self.outsiders.find(())  # a pass in a constructor, to try the model, changes no weight
            if self.outsiders.names:
                raise SetupError(
                    f"the script trains {self._refused} without an optimizer; at {self._plan.name} weights are stored "
                    f"in {self._plan.low}, and updates by hand (p.data -= ...) would not reach their fp32 masters; use "
                    "--level O1, or a torch.optim optimizer"
                )
        if self._by_hand is not None and self._made and self._may_change():
            self._meet(self._by_hand)
        self._adopt()
        return self._session

    def _meet(self, by_hand: ByHand) -> None:
        """Opens the session for the optimizers that the script has made for weights that seemed trained by hand."""
        mine = {id(p) for p in trained_by([by_hand])}
        if any(id(p) in mine for p in trained_by(self._alive())):
            self._open(next(iter(self._known)))

    def _adopt(self) -> None:
        """Copies to the masters what the script has written to the weights since the last step."""
        # This is needed because no hook can see what is written to `p.data`.
        session = self._storing_low()
        if session is not None:
            session.adopt_weights()

    def _adopt_and(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._adopt()
        return step(*args, **kwargs)

    def _opened_ids(self) -> set[int]:
        return set() if self._session is None else {id(p) for p in trained_by(self._session.optimizers)}

    @property
    def stores_low(self) -> bool:
        """Whether sessions store weights in the low format."""
        return self._plan.param == "low"

    def _storing_low(self) -> Session | None:
        """Returns the session if it is open and stores weights in the low format."""
        session = self._session
        return None if session is None or session.closed or session.plan.param == "full" else session

    def lends_full(self) -> bool:
        """Returns whether weights are low, and this is outside of forwards, backward passes and transforms."""
        session = self._storing_low()
        inside = session is None or session.runtime.is_entered() or in_backward()
        return not inside and in_functorch() is None

    def full_value(self, t: Tensor) -> Tensor | None:
        """Returns the fp32 values of a tensor that shares the memory of a low weight, None if it shares none's."""
        session = self._storing_low()
        return None if session is None else session.full_value(t)

    def writing_full(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor]]:
        """A context with the fp32 values of those tensors that share the memory of low weights, to be written."""
        session = self._storing_low()
        return nullcontext(tensors) if session is None else session.writing_full(tensors)

    def look_at_saved(self, t: Tensor) -> None:
        """Says once that the script saves a low tensor that may have been computed from weights."""
        session = self._storing_low()
        if self._said or session is None or t.dtype is not session.plan.low.dtype:
            return
        if any(p.shape == t.shape for p in session.low_parameters()):
            self._said = True
            _LOG.warning(
                f"the script saves a {session.plan.low} tensor of shape {tuple(t.shape)}, as a weight has. If it was "
                "computed from weights outside of the model, it has their rounded values: compute it from "
                "state_dict(), from p.detach().clone() or from p.float(), which are fp32 (in a session of your own, "
                "inside session.full_weights())"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Makes the models ordinary ones inside the context, and until one is called to train."""
        was_on = self.watch.on
        if self._session is not None and self._may_change():
            self.close()
            was_on = self._rests = True
        self.watch.stop()
        try:
            yield
        finally:
            if was_on and self.brings is None:
                self.watch.start()

    def end(self) -> None:
        """Closes the session; if the script opened a session itself, sets `trained` to the status of that session."""
        self.outsiders.find(self._opened_ids())
        self.close()
        self._forget()
        own = None if self._own is None else self._own()
        if own is not None and own.optimizers:
            self.trained = own.status()

    def close(self) -> None:
        """Closes the session, and keeps its state for the next session."""
        if self._session is None:
            self._undo.close()
            return
        with outside_of_transforms():
            self._adopt()
            session, self._session, self._opened, self._stale = self._session, None, [], False
            self._by_hand, self._known = None, weakref.WeakSet()
            try:
                self._state = session.state_dict()
                self.trained = session.status()
            finally:
                self._undo.close()


def _there(made: Sequence[_Made]) -> list[Optimizer]:
    """Returns the optimizers that are still there, without those whose `__init__` has not come far."""
    found = [optimizer for each in made if (optimizer := each.own()) is not None]
    return [optimizer for optimizer in found if hasattr(optimizer, "param_groups")]
