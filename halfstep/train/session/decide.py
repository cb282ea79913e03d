"""Decides what a session will do, once, before it changes anything."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import SetupError
from halfstep.formats import FP32, is_low
from halfstep.machine import DeviceFacts, emulation_notice, needs_emulation, units
from halfstep.plan.compatibility import (
    check_closures,
    check_models,
    check_optimizers,
    check_parameters,
    check_some_products,
    device_of,
)
from halfstep.plan.matching import match_parameters, unwrap
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, check_forwards, resolve
from halfstep.sharded import is_sharded
from halfstep.torch_internals import parameters_of
from halfstep.train.cast.functions import check_functions
from halfstep.train.optim.hooks import updated_by
from halfstep.train.optim.laws import uncoded
from halfstep.train.optim.optimizers import row_of, unsupported_options
from halfstep.train.optim.steppers import holds_a_part, needs_closure
from halfstep.train.processes.shards import reshard
from halfstep.train.processes.wrappers import refuse_wrapped

_LOG = logging.getLogger("halfstep")
_WORTH_SAYING = 1.0  # MiB
Stepping = Literal["session", "optimizer"]
Places = frozenset[tuple[int, str]]
"""Parameters, each by the number of its model and its dotted name there, so that they are found in copies too."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What a session will do."""

    roots: tuple[nn.Module, ...]  # without their wrappers
    optimizers: tuple[Optimizer, ...]
    plan: Plan
    assignment: Assignment
    device: torch.device
    emulate: bool  # products are computed in a wider format
    asked: bool | None  # by the user, for that or not; None: the `facts` decide
    facts: DeviceFacts
    mixed: bool  # False if the plan casts and scales nothing
    stepping: Stepping = "session"  # whose `step` the loop calls
    untrained: Places = frozenset()  # parameters that no optimizer updates
    group: dist.ProcessGroup | None = None  # processes that the user said step together

    @property
    def updates(self) -> bool:
        """Whether halfstep makes the updates, and skips those of gradients that are not finite."""
        return self.mixed or self.plan.moments != "full"

    def stored_low(self) -> Iterator[nn.Parameter]:
        """Yields the fp32 parameters that the session will store in low precision."""
        for module, formats in zip(modules_of(self.roots), self.assignment.modules, strict=True):
            for name, p in parameters_of(module).items():
                full = p is None or p.dtype is not torch.float32 or is_sharded(p)  # which arrive low
                if not full and formats.stored(name) not in (None, FP32):
                    yield p  # type: ignore[misc]  # not None


def decide(  # noqa: PLR0913  # all that it depends on
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    emulate: bool | None,
    stepping: Stepping = "session",
    facts: DeviceFacts,
    made_low: Sequence[nn.Parameter] = (),
    training: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Decision:
    """Returns what a session for these models will do; adapts the plan to what the optimizers support."""
    # Trainable parameters in a low format are refused, except those that another session `made_low` until this opens.
    reshard(models)
    device = device_of(models, plan)
    roots = tuple(unwrap(model) for model in models)
    check_models(models, plan, made_low)
    if plan.param == "low":
        refuse_wrapped(roots, f"the weights change format at {plan.name}")
    check_optimizers(optimizers, models)
    check_training(optimizers, models, plan)
    match_parameters(plan.full_moments, roots)
    if plan.moments != "full" and plan.ops == "none" and training and stepping == "optimizer":
        raise SetupError(
            f"moments={plan.moments!r} works at {plan.name} only with the session's own step, not with "
            'stepping="optimizer"; call session.step(), train at O1 to O3, or use moments="full"'
        )
    untrained = _untrained(roots, optimizers) if training else frozenset()
    if any(row_of(optimizer) is None for optimizer in optimizers):  # what their own step needs
        plan = replace(plan, master="copy" if plan.master == "split" else plan.master, rounding="nearest")
    assignment = resolve(plan, roots, made_low=made_low, untrained=at_places(roots, untrained))
    check_forwards(roots, plan)
    check_some_products(assignment)
    check_functions(plan.op_changes)
    mixed = plan.ops != "none"
    return Decision(
        roots,
        tuple(optimizers),
        plan,
        assignment,
        device,
        mixed and needs_emulation(plan.low, facts) if emulate is None else emulate,
        emulate,
        facts,
        mixed,
        stepping,
        untrained,
        group,
    )


def emulates_after(decision: Decision, saved: bool | None) -> bool:
    """Returns whether a session emulates products once it has loaded a state, and logs where that was otherwise."""
    if saved is None or saved is decision.emulate or not decision.mixed:
        return decision.emulate
    low, kinds = decision.plan.low, {True: "emulated", False: "native"}
    came = f"the session state was saved by training with {kinds[saved]} {low} products"
    if decision.asked is not None:
        _LOG.warning(
            "%s, and emulate=%s was passed: they are %s from here on, and the run does not repeat bit for bit",
            came, decision.asked, kinds[decision.emulate],
        )  # fmt: skip
        return decision.emulate
    costs = "" if saved else _slower(decision)
    _LOG.warning("%s, so they are here too; pass emulate=%s to change that%s", came, not saved, costs and f"; {costs}")
    return saved


def _untrained(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Places:
    """Returns the places of parameters that no optimizer updates; without optimizers, of the frozen ones."""
    held = [p for optimizer in optimizers for p in updated_by(optimizer)]
    if not optimizers:
        held = [p for root in roots for p in root.parameters()]
    trained = {id(p) for p in held if p.requires_grad}
    return frozenset((at, name) for at, name, p in _placed(roots) if id(p) not in trained)


def at_places(roots: Sequence[nn.Module], places: Places) -> list[nn.Parameter]:
    """Returns the parameters at these places in the models, or in copies of them."""
    return [p for at, name, p in _placed(roots) if (at, name) in places]


def _placed(roots: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    for at, root in enumerate(roots):
        yield from ((at, name, p) for name, p in root.named_parameters(remove_duplicate=False))


def modules_of(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns all modules of the models, as often as they come."""
    return [module for root in roots for module in root.modules()]


def decide_for_copies(decision: Decision, copies: Sequence[nn.Module], plan: Plan) -> Decision:
    """Returns what a session without optimizers will do with copies of the models, under another plan."""
    mixed = plan.ops != "none"
    return replace(
        decision,
        roots=tuple(copies),
        optimizers=(),
        plan=plan,
        assignment=resolve(plan, copies, untrained=at_places(copies, decision.untrained)),
        emulate=decision.emulate and mixed,
        mixed=mixed,
    )


def say_what_stays_full(decision: Decision) -> None:
    """Logs which weights stay in fp32: shards, and those that no optimizer updates, which could be stored low."""
    if decision.plan.param == "full":
        return
    sharded = sum(is_sharded(p) for optimizer in decision.optimizers for p in updated_by(optimizer))
    if sharded and decision.plan.rounding == "stochastic":
        said = "the fp32 shards of %d weights are masters at %s too, so rounding='stochastic' changes nothing there"
        _LOG.warning(said, sharded, decision.plan.name)
    pairs = zip(modules_of(decision.roots), decision.assignment.modules, strict=True)
    held = [parameters_of(module)[name] for module, formats in pairs for name in formats.kept]
    kept = {id(p): p.numel() for p in held if p is not None}
    saved = sum(kept.values()) * (4 - decision.plan.low.dtype.itemsize) / 2**20
    if kept:
        _LOG.log(
            logging.WARNING if saved >= _WORTH_SAYING else logging.INFO,
            "%d weights that no optimizer updates stay in fp32, so that averages written into them are exact; "
            "frozen='low' or a rule would store them in %s without masters and save %.2f MiB",
            len(kept),
            decision.plan.low,
            saved,
        )


def say_what_steps_itself(decision: Decision, optimizers: Sequence[Optimizer]) -> None:
    """Warns about optimizers without an update in halfstep, if their step needs more time or memory than in fp32."""
    if decision.plan.param == "low" or (decision.mixed and decision.device.type != "cpu"):
        lost = decision.plan.param == "low" and decision.plan.master == "none"
        for optimizer in optimizers:
            if row_of(optimizer) is None:
                _say(
                    f"halfstep has no update of its own for {_with_options(optimizer)}: its own step runs, on fp32 "
                    f"copies of low weights{', rounded to nearest' * lost}, and is waited for"
                )


def _with_options(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer with the options that only its own step supports."""
    options = ", ".join(unsupported_options(optimizer))
    return type(optimizer).__name__ + (options and f" with {options}")


def say_how_products_run(decision: Decision, *, told: bool) -> None:
    """Logs, once per process, that products are emulated by default, or what the wish not to do so costs."""
    low = decision.plan.low
    if decision.mixed and decision.facts.kind == "cuda" and units(low, decision.facts) is None and not told:
        _say(f"this device ({decision.facts}) has no {low} units: training at level O0 would be faster")
    if not decision.mixed or decision.facts.kind != "cpu":
        return
    if decision.asked is None and decision.emulate and not told:
        _say(emulation_notice(low, decision.facts))
    elif decision.asked is False and (costs := _slower(decision)):
        _say(f"emulate=False: {costs}")
    elif decision.asked and units(low, decision.facts) is not None:
        gain = decision.facts.processor.gain(low) or 1.0
        _say(
            f"emulate=True: native {low} products are about {gain:.2g} times as fast as emulated ones on this processor"
        )


def _slower(decision: Decision) -> str:
    """Returns how much slower native products are here than emulated ones; empty if they are not."""
    low, processor = decision.plan.low, decision.facts.processor
    gain = processor.gain(low) or 1.0
    times = f"take about {1 / gain:.2g} times as long as emulated ones on this processor ({processor.name})"
    return f"native {low} products {times}" if gain < 1.0 else ""


@functools.cache
def _say(notice: str) -> None:
    logging.getLogger("halfstep.device").warning(notice)


def check_training(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses optimizers that cannot train their parameters under a plan."""
    check_parameters(optimizers, models, plan)
    for optimizer in optimizers:
        if plan.ops != "none":
            _refuse_whole_rows(optimizer)
        if plan.moments != "full":
            _refuse_moments(optimizer, plan)
            if plan.ops == "none":
                _refuse_low_weights(optimizer, plan)
        if plan.param == "low" and holds_a_part(optimizer):
            raise SetupError(
                f"{type(optimizer).__name__} updates some of the weights in each process and sends them to the others "
                f"as they are stored: low at {plan.name}, but fp32 while it steps; use O1, or shard by fully_shard"
            )
    check_closures([optimizer for optimizer in optimizers if needs_closure(optimizer)], plan)


def _refuse_moments(optimizer: Optimizer, plan: Plan) -> None:
    """Refuses an optimizer that cannot keep its states as the plan says."""
    row, name = row_of(optimizer), _with_options(optimizer)
    states = [] if row is None else sorted({s for group in optimizer.param_groups for s in uncoded(row, group)})
    if row is None:
        why = f"{name}, for which halfstep has no update of its own"
    elif states:
        option = " with amsgrad=True" if "max_exp_avg_sq" in states else ""
        why = f"{name}{option}, whose {' and '.join(states)} halfstep keeps in full only"
    elif not row.coarse and plan.moments == "8bit":
        raise SetupError(
            f'moments="8bit" is too coarse for {name}, which orthogonalizes its momentum; use moments="bf16"'
        )
    else:
        return
    raise SetupError(f'moments={plan.moments!r} does not work with {why}; use moments="full"')


def _refuse_low_weights(optimizer: Optimizer, plan: Plan) -> None:
    """Refuses weights in a low format where nothing gives them fp32 values, which the session's own step needs."""
    low = next((p for p in updated_by(optimizer) if is_low(p.dtype)), None)
    if low is not None:
        raise SetupError(
            f"moments={plan.moments!r} needs fp32 weights at {plan.name}, but one of shape {tuple(low.shape)} is in "
            f'{low.dtype}; call model.float() before, train at O2, or use moments="full"'
        )


def _refuse_whole_rows(optimizer: Optimizer) -> None:
    """Refuses an optimizer that has sharded parameters, if its update in halfstep needs whole weights."""
    row = row_of(optimizer)
    needs_whole = row is not None and row.whole and not row.gathers
    if needs_whole and any(map(is_sharded, updated_by(optimizer))):
        raise SetupError(
            f"{type(optimizer).__name__} needs the norms of whole weights, and its parameters are sharded over "
            "processes; use torch.optim.AdamW, Adam or SGD, or halfstep.Lion, or train replicas under "
            "DistributedDataParallel"
        )
