"""Rehearsals: run a closure repeatedly, on a session's models or on copies under another plan, and undo its effects.

A sharded model is examined as a whole one: one process gathers a copy, and tells all others what it has found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly

from halfstep.errors import SessionError, SetupError
from halfstep.explain.diagnose.rewind import CONTAINERS, attributes, give_attributes, is_readable, untouched
from halfstep.explain.tape.nonfinite import unwrapped
from halfstep.machine import free_bytes
from halfstep.modes import begin_pass, uncompiled
from halfstep.plan.plan import Plan
from halfstep.sharded import fsdp_modules
from halfstep.torch_internals import compiled_module, hooks_of, parameters_of, tree_leaves, without_modes
from halfstep.train.cast.copies import forward_set_on, is_bound
from halfstep.train.cast.enter import put_in_place
from halfstep.train.processes.collectives import full_state, run_on_rank
from halfstep.train.processes.shards import group_of, reshard, sharded_parameters
from halfstep.train.scale.loss import leaves_of
from halfstep.train.session.session import Session
from halfstep.validate import with_near_misses

_NEAR = 0.05  # of the largest element: how far equal inputs may differ if a model computed them in low precision

_CLOSURE = "pass a function without arguments that computes the loss and returns it: lambda: loss_fn(model(x), y)"


def check_closure(function: str, closure: object) -> None:
    """Checks that the public function named `function` can call the closure that was passed to it."""
    if not callable(closure):
        raise SessionError(
            f"{function}() takes a function that returns the loss, not {type(closure).__name__}; {_CLOSURE}"
        )
    try:
        inspect.signature(closure).bind()
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise SessionError(f"{function}() calls the closure without arguments, but it is {error}; {_CLOSURE}") from None


def compute_loss(closure: Callable[[], Any], params: Sequence[nn.Parameter]) -> Tensor:
    """Calls the closure and returns the loss that it computed."""
    loss = begin_pass(closure)
    if not isinstance(loss, Tensor):
        raise SessionError(f"the closure returned {type(loss).__name__}, not the loss; {_CLOSURE}")
    if loss.numel() != 1 or loss.is_complex():
        raise SessionError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}, not one real number; {_CLOSURE}"
        )
    if any(param.grad is not None for param in params):
        raise SessionError(
            "the closure ran the backward pass; remove that call: a closure only computes and returns the loss, and "
            "halfstep runs the backward pass"
        )
    if not loss.requires_grad:
        raise SessionError(
            "the loss of the closure requires no gradient: it was detached, or computed under torch.no_grad() or from "
            "nothing trainable; compute it with gradients enabled, from parameters that require them"
        )
    return loss


@contextmanager
def leaves_kept(loss: Tensor, params: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields all leaves that a backward pass writes gradients of; puts back those of leaves outside of `params`."""
    leaves = {id(leaf): leaf for leaf in [*params, *leaves_of([loss])]}
    own = {id(p) for p in params}
    kept = [(leaf, leaf.grad) for leaf in leaves.values() if id(leaf) not in own]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield list(leaves.values())
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


class Inputs:
    """Compares the inputs of the first module that each run of a closure calls; `same`: they were equal in all runs."""

    def __init__(self) -> None:
        self.same = True
        self._first: list[Tensor] | None = None
        self.noted = False  # in this run

    def note(self, given: Any) -> None:
        """Compares the inputs of the first module called in this run with those of the first run."""
        if self.noted:
            return
        self.noted = True
        with without_modes(), torch.no_grad():
            tensors = [unwrapped(leaf) for leaf in tree_leaves(given) if is_readable(leaf)]
            if self._first is None:
                self._first = [t.clone() for t in tensors]
            elif len(tensors) != len(self._first) or not all(map(_is_same, tensors, self._first)):
                self.same = False


@contextmanager
def noting_inputs(roots: Sequence[nn.Module]) -> Iterator[Inputs]:
    """Yields an `Inputs` that observes, through hooks, what the runs of a closure pass to the modules."""
    inputs = Inputs()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:  # a function, which copies of the modules share
        inputs.note((args, kwargs))

    modules = {id(module): module for root in roots for module in root.modules()}.values()
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(note, prepend=True, with_kwargs=True).remove)
        yield inputs


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.device != other.device:
        return False
    if not (one.is_floating_point() and other.is_floating_point()):
        return one.dtype == other.dtype and torch.equal(one, other)
    one, other = one.float(), other.float()
    finite = other[torch.isfinite(other)]
    room = _NEAR * float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=room, equal_nan=True)


class Rehearsal:
    """Runs a closure on a session's models; made by `rehearsing`, which undoes at the end what the runs changed."""

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
        self.recording = session.runtime.recording  # a context in which a recorder sees the operations
        self.at_scale = session.runtime.scales.held_at  # one in which `session.grad` uses a loss scale
        self.params = trainable(self.roots)
        self._session, self._closure = session, closure
        self._rewind, self.inputs = rewind, inputs
        self._originals = {id(p) for p in originals if p.dtype is self.plan.low.dtype}
        self.reads_originals = False  # the models are copies, and the last loss depends on low weights of the originals
        self.used_scale = 1.0  # which the last gradients carry

    def rewind(self) -> None:
        self._rewind()
        self.inputs.noted = False

    def loss(self) -> Tensor:
        loss = compute_loss(self._closure, self.params)
        self.reads_originals = any(id(leaf) in self._originals for leaf in leaves_of([loss]))
        return loss

    @contextmanager
    def gradients(self, loss: Tensor, scale: float | None) -> Iterator[list[Tensor]]:
        """Runs the backward pass at a loss scale (None: unscaled); yields the gradients of all leaves."""
        with leaves_kept(loss, self.params) as leaves:
            for leaf in leaves:
                leaf.grad = None
            self.used_scale = self._session.runtime.backward(loss, scale)
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


def _shards_of(session: Session, function: str, instead: str) -> list[nn.Parameter]:
    """Returns the sharded parameters of an open session, which was passed to the public function named `function`."""
    if not isinstance(session, Session) or session.closed:
        what = "a closed session" if isinstance(session, Session) else type(session).__name__
        raise SessionError(f"{function}() takes an open session, not {what}; {instead}")
    reshard(session.runtime.roots)  # after an evaluation they hold whole weights
    return sharded_parameters(session.runtime.roots)


def check_given(function: str, session: Session, closure: object) -> None:
    """Checks the session and the closure that were passed to the public function named `function`."""
    shards = _shards_of(
        session, function, f"pass first what initialize returned: halfstep.{function}(session, closure)"
    )
    check_closure(function, closure)
    if shards:
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
        if not is_bound(forward := forward_set_on(own), own) and forward is not None:
            raise RuntimeError(f"{type(own).__name__} has a forward of its own, which cannot be redirected to a copy")
    held = [(own, twin, attributes(own), attributes(twin)) for own, twin in pairs]
    running = 0

    def run(called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a copy in place of its module; attributes are copied to the copies before and back after a call."""
        nonlocal running
        for own, twin, before, _ in held if running == 0 else ():
            new = {name: value for name, value in attributes(own).items() if before.get(name, held) is not value}
            give_attributes(twin, attributes(twin) | new)
        running += 1
        try:
            return type(called).forward(called, *args, **kwargs)
        finally:
            running -= 1
            for own, twin, _, before in held if running == 0 else ():
                now = attributes(twin)
                new = {n: v for n, v in now.items() if before.get(n, held) is not v or isinstance(v, CONTAINERS)}
                give_attributes(own, attributes(own) | new)

    with ExitStack() as stack:
        for own, twin in pairs:
            stack.callback(give_attributes, own, attributes(own))
            for name, param in parameters_of(own).items():
                hooks, copied = None if param is None else hooks_of(param), parameters_of(twin).get(name)
                if hooks and copied is not None and not hooks_of(copied):  # else shared by two modules and already done
                    for hook in list(hooks.values()):
                        stack.callback(copied.register_hook(hook).remove)  # type: ignore[no-untyped-call]
        stack.callback(put_in_place((own, partial(run, twin)) for own, twin in pairs))
        yield


# ---- sharded models, as whole ones
T = TypeVar("T")
PER_ELEMENT = 16  # bytes: fp32 weights and gradients of the copy, and of the copy of it on which cures are tried


@with_near_misses
def on_gathered_copy(session: Session, build: Callable[[], Any], ask: Callable[..., T], *, rank: int = 0) -> T:
    """Returns the result of `ask` on an unsharded copy of a sharded model, on all processes; all must call this.

    The process `rank` calls `build()`, which must return the model as it is before sharding (a list if the session has
    several models). That process loads the current weights and buffers into the model, opens a session `whole` on it
    with the same plan, and calls `ask(whole, model)`:

        verdict = halfstep.on_gathered_copy(
            session, GPT, lambda whole, model: halfstep.blame(whole, lambda: loss_fn(model(inputs), targets))
        )

    `halfstep.check` and `halfstep.inspect` work the same way. Pass as `rank` the process whose `inputs` to use;
    `session.status().spoiled_by` tells which processes had a loss that was not finite. The session `whole` reports the
    last step of `session`. Weights are rounded to the low format, as FSDP2 gathers them. The sharded model and its
    training do not change.

    Raises:
        SessionError: the session is closed, or another process has raised an error, which the message names.
        SetupError: the model is not sharded, does not fit into the memory of that process, or differs from the model
            that `build` returns.
    """
    parameters = _shards_of(session, "on_gathered_copy", "call it after halfstep.initialize")
    roots = session.runtime.roots
    if not parameters:
        raise SetupError("the model is not sharded: use the session itself, as in halfstep.blame(session, closure)")
    group = group_of(parameters)
    if rank not in dist.get_process_group_ranks(group):
        ranks = dist.get_process_group_ranks(group)
        raise SetupError(f"rank is {rank}; the model is sharded over the processes {ranks}: pass one of these")
    built: list[nn.Module] = []
    run_on_rank(lambda: built.extend(_built(build, roots, session.runtime.device)), rank, group)
    states = [full_state(root, rank) for root in roots]

    def look() -> T:
        for model, root, state in zip(built, roots, states, strict=True):
            _fill(model, root, state, session.plan)
        with session.trial(session.plan, built) as whole:
            return ask(whole, *built)

    return run_on_rank(look, rank, group)


def _built(build: Callable[[], Any], roots: Sequence[nn.Module], device: torch.device) -> list[nn.Module]:
    """Calls `build` for unsharded copies of the models `roots`, and returns the copies on the device."""
    needed = PER_ELEMENT * sum(p.numel() for root in roots for p in root.parameters())
    free = free_bytes(device)
    if free is not None and needed > free:
        raise SetupError(
            f"an unsharded copy of the model needs {needed / 2**30:.3g} GiB for its weights and gradients, plus what a "
            f"forward keeps; {device} has {free / 2**30:.3g} GiB free: use a process with more memory and a "
            "checkpoint (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))"
        )
    found = build()
    models = list(found) if isinstance(found, (list, tuple)) else [found]
    for model in models:
        if not isinstance(model, nn.Module) or sharded_parameters([model]):
            what = "a sharded model" if isinstance(model, nn.Module) else type(model).__name__
            raise SetupError(f"build() returned {what}; it must return the model as it is before fully_shard")
    if len(models) != len(roots):
        raise SetupError(f"build() returned {len(models)} models, and the session has {len(roots)}: return as many")
    return [model.to(device) for model in models]


@torch.no_grad()
def _fill(model: nn.Module, root: nn.Module, state: dict[str, Tensor], plan: Plan) -> None:
    """Copies the state of a sharded model into `model`, with weights rounded as the sharded model rounds them."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SetupError(f"build() returned another model than the one that is sharded: {error}") from error
    own = dict(root.named_parameters())
    low = plan.low.dtype if plan.ops != "none" and fsdp_modules([root]) else torch.float32
    for name, p in model.named_parameters():
        p.requires_grad_(own[name].requires_grad)
        if p.dtype is torch.float32:
            p.copy_(p.to(low))
    for copied, module in zip(model.modules(), root.modules(), strict=True):
        copied.training = module.training
