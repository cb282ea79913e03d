"""Rehearsals: run a closure repeatedly, on a session's models or on copies under another plan, and undo its effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import set_detect_anomaly

from halfstep.cast.enter import put_in_place
from halfstep.diagnose.closure import Inputs, check_closure, compute_loss, leaves_kept, noting_inputs
from halfstep.diagnose.rewind import CONTAINERS, attributes, give_attributes, untouched
from halfstep.errors import SessionError, SetupError
from halfstep.modes import uncompiled
from halfstep.plan.plan import Plan
from halfstep.processes.shards import reshard, sharded_parameters
from halfstep.scale.loss import leaves_of
from halfstep.session.session import Session
from halfstep.torch_internals import compiled_module, hooks_of, parameters_of


class Rehearsal:
    """Runs a closure on a session's models; made by `rehearsing`, which undoes at the end what the runs changed.

    `params` are the trainable parameters; `inputs` tells whether all runs got the same inputs. Inside `at_scale(scale)`
    the closure's calls of `session.grad` use that loss scale. Inside `recording(recorder)` a recorder sees the
    operations. `reads_originals` is True if the models are copies, and the last loss depends on low weights of the
    originals.
    """

    def __init__(
        self,
        session: Session,
        closure: Callable[[], Any],
        rewind: Callable[[], None],
        inputs: Inputs,
        *,
        originals: Sequence[nn.Parameter] = (),
    ) -> None:
        self.plan, self.roots, self.full = session.plan, session.runtime.roots, session.runtime.full
        self.recording, self.at_scale = session.runtime.recording, session.runtime.scales.held_at
        self.params = trainable(self.roots)
        self._session, self._closure = session, closure
        self._rewind, self.inputs = rewind, inputs
        self._originals = {id(p) for p in originals if p.dtype is self.plan.low.dtype}
        self.reads_originals = False

    def rewind(self) -> None:
        """Restores the initial state before another run."""
        self._rewind()
        self.inputs.begin_run()

    def loss(self) -> Tensor:
        """Returns the loss that the closure computes."""
        loss = compute_loss(self._closure, self.params)
        self.reads_originals = any(id(leaf) in self._originals for leaf in leaves_of([loss]))
        return loss

    @contextmanager
    def gradients(self, loss: Tensor, scale: float | None) -> Iterator[list[Tensor]]:
        """Runs the backward pass at a loss scale (None: unscaled) and yields the gradients of all leaves of the loss.

        Gradients of leaves other than the models' parameters are restored at the end of the `with` block.
        """
        with leaves_kept(loss, self.params) as leaves:
            for leaf in leaves:
                leaf.grad = None
            self._session.runtime.backward(loss, scale)
            yield [leaf.grad for leaf in leaves if leaf.grad is not None]

    @contextmanager
    def under(self, plan: Plan) -> Iterator[Rehearsal]:
        """Yields a rehearsal under another plan; when the closure calls the models, copies of them run instead."""
        with (
            self._session.trial(plan) as trial,
            trial.runtime.whole_products(),
            _standing_in(self.roots, trial.runtime.roots),
        ):
            yield Rehearsal(trial, self._closure, self._rewind, self.inputs, originals=self.params)


def check_given(function: str, session: object, closure: object) -> None:
    """Checks the session and the closure that were passed to the public function named `function`."""
    if not isinstance(session, Session) or session.closed:
        what = "a closed session" if isinstance(session, Session) else type(session).__name__
        raise SessionError(f"{function}() takes an open session, not {what}; call it after halfstep.initialize")
    check_closure(function, closure)
    reshard(session.runtime.roots)  # after an evaluation they hold whole weights
    if sharded_parameters(session.runtime.roots):
        raise SetupError(
            f"the model is sharded over processes, and {function}() runs the closure on copies of the model, which "
            "FSDP2 cannot make. Use a copy that one process gathers: define build(), which returns the model without "
            "fully_shard, and call in all processes halfstep.on_gathered_copy(session, build, lambda whole, model: "
            f"halfstep.{function}(whole, lambda: loss_fn(model(inputs), targets)))"
        )


@contextmanager
def rehearsing(session: Session, closure: Callable[[], Any]) -> Iterator[Rehearsal]:
    """Yields a rehearsal of a closure; restores weights, buffers, gradients and random state when it ends."""
    roots = session.runtime.roots
    with (
        session.rehearsing(),
        session.runtime.whole_products(),
        untouched(roots, trainable(roots)) as rewind,
        noting_inputs(roots) as inputs,
        uncompiled(),
        set_detect_anomaly(False),  # anomaly detection would raise at the failure to be examined
    ):
        yield Rehearsal(session, closure, rewind, inputs)


def trainable(roots: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of models that require a gradient, each once."""
    return list({id(p): p for root in roots for p in root.parameters() if p.requires_grad}.values())


@contextmanager
def _standing_in(models: Sequence[nn.Module], twins: Sequence[nn.Module]) -> Iterator[None]:
    """Redirects calls of the models' modules to the modules of their copies, the `twins`."""
    found = {
        id(own): (own, twin)
        for model, copied in zip(models, twins, strict=True)
        for own, twin in zip(model.modules(), copied.modules(), strict=True)
    }
    pairs = [pair for pair in found.values() if compiled_module(pair[0]) is None]  # calls go on to what it compiled
    for own, _ in pairs:
        if "forward" in vars(own):
            raise RuntimeError(f"{type(own).__name__} has a forward of its own, which cannot be redirected to a copy")
    calls = _Calls(pairs)
    with ExitStack() as stack:
        for own, twin in pairs:
            stack.callback(give_attributes, own, attributes(own))
            for name, param in parameters_of(own).items():
                stack.callback(_share_hooks(param, parameters_of(twin).get(name)))
        stack.callback(put_in_place((own, partial(calls.run, twin)) for own, twin in pairs))
        yield


class _Calls:
    """Runs copies of modules in place of the modules, and keeps the attributes of both the same.

    Changed attributes are copied to the copies before the outermost call, and back to the modules after it.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._pairs = [(own, twin, attributes(own), attributes(twin)) for own, twin in pairs]
        self._running = 0

    def run(self, twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._running == 0:
            self._take_over()
        self._running += 1
        try:
            return type(twin).forward(twin, *args, **kwargs)
        finally:
            self._running -= 1
            if self._running == 0:
                self._hand_over()

    def _take_over(self) -> None:
        for own, twin, before, _ in self._pairs:
            new = {name: value for name, value in attributes(own).items() if before.get(name, self) is not value}
            if new:
                give_attributes(twin, attributes(twin) | new)

    def _hand_over(self) -> None:
        for own, twin, _, before in self._pairs:
            now = attributes(twin)
            new = {n: v for n, v in now.items() if before.get(n, self) is not v or isinstance(v, CONTAINERS)}
            if new:
                give_attributes(own, attributes(own) | new)


def _share_hooks(param: nn.Parameter | None, twin: nn.Parameter | None) -> Callable[[], None]:
    hooks = None if param is None else hooks_of(param)
    if not hooks or twin is None or hooks_of(twin):  # hooks on the twin: shared by two modules and already done
        return lambda: None
    with ExitStack() as stack:
        for hook in list(hooks.values()):
            stack.callback(twin.register_hook(hook).remove)  # type: ignore[no-untyped-call]
        return stack.pop_all().close
