"""The check before training: finds what would go wrong in a session, from its setup and one traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.edits import Rule, Scaling
from halfstep.errors import SessionError
from halfstep.explain.diagnose.cures import FULL_OUT, rules_on
from halfstep.explain.diagnose.rehearsal import check_given
from halfstep.explain.preflight.trace import trace_step
from halfstep.formats import CASTABLE, FP32, as_format, is_low, needs_scale
from halfstep.plan.matching import Site, has_running_stats, norm_kind, uncompiled
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import ModuleFormats
from halfstep.records import SEVERITIES, Finding
from halfstep.sharded import is_sharded
from halfstep.torch_internals import buffers_of, parameters_of
from halfstep.train.optim.masters import Fit
from halfstep.train.scale.grad_scaler import GradScaler
from halfstep.train.session.session import REPLACED, Session
from halfstep.validate import named, short, with_near_misses

ROTARY = ("inv_freq", "freqs", "rotary", "rope", "cos", "sin", "timescale", "sinusoid")  # parts of buffer names
PRODUCT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MOST_LOST = 0.1  # share of the nonzero values of a weight; initializations lose less than 0.001
RECAST = f"{REPLACED}; or something cast the model (model.half() and the like): remove that"


@dataclass(frozen=True)
class Part:
    """A module of a session: its name as rules spell it, and the formats that the plan gives it."""

    name: str
    module: nn.Module
    formats: ModuleFormats

    @property
    def place(self) -> str:
        return self.name or "(model)"

    def inside(self, name: str) -> str:
        return f"{self.name}.{name}".removeprefix(".")

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the floating-point parameters of the module with their names in it."""
        for name, parameter in parameters_of(self.module).items():
            if parameter is not None and parameter.is_floating_point():
                yield name, parameter


@dataclass(frozen=True)
class Setup:
    """What the checks read: a session's plan, modules and optimizers, and the loop's own gradient scaler."""

    plan: Plan
    parts: tuple[Part, ...]
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None  # the gradient scaler of the loop itself
    fit: Callable[[nn.Parameter], Fit]  # how the fp32 value of a parameter fits the low format
    rounded: Set[int] = frozenset()  # ids of the weights that the traced step cast to the low format


@with_near_misses
def check(
    session: Session,
    closure: Callable[[], Any] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    precision: bool = True,
) -> tuple[Finding, ...]:
    """Returns what would go wrong in a session, most severe first: places, evidence and, where known, cures.

    `closure` takes a batch, computes and returns the loss, and does not call backward. One step of it is traced,
    forward and backward, to find operations that fail and constants that vanish or overflow. To try an edit that may
    cure a failure, the closure is called again on a copy of the model. `scaler` is the gradient scaler that the loop
    uses, if any. Afterwards weights, gradients, buffers, random states and the loss scale are as before.

    With `precision` the step is compared with the same step in fp32, on a copy of the model: a note says how far
    outputs and gradients are off ("precision compared"). Where that is far more than rounding explains, the module and
    the operation that lose it are found, and edits are tried, in at most 12 steps ("precision lost"). The closure must
    use the same batch on every call.

    Raises:
        SessionError: the session is closed, the model is on the meta device, or the closure returns no scalar loss.
        SetupError: the model is sharded.
    """
    check_given("check", session, (lambda: None) if closure is None else closure)
    for wrong, why in (
        (
            scaler is not None and not isinstance(scaler, torch.amp.GradScaler),
            f"scaler is of type {type(scaler).__name__}; pass the torch.amp.GradScaler that the loop uses, or leave it "
            "out",
        ),
        (
            not isinstance(precision, bool),
            f"precision is {short(precision)}; pass True to compare the step with fp32, or False",
        ),
        (
            any(tensor.is_meta for module, _ in session.modules() for tensor in module.parameters(recurse=False)),
            "the model is on the meta device, where no number can be read; move it with to_empty() first",
        ),
    ):
        if wrong:
            raise SessionError(why)
    traced, rounded = ([], set()) if closure is None else trace_step(session, closure, precision=precision)
    setup = Setup(
        plan=session.plan,
        parts=tuple(Part(uncompiled(formats.name), module, formats) for module, formats in session.modules()),
        optimizers=session.optimizers,
        scaler=scaler,
        fit=session.runtime.fit,
        rounded=rounded,
    )
    found = [finding for look in CHECKS for finding in look(setup)] + traced
    found.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    for finding in found:
        session.tell(finding)
    return tuple(found)


def _parameters(setup: Setup) -> Iterator[Finding]:
    """Finds parameters stored in another dtype than the plan's, or trained low without a master."""
    for part in setup.parts:
        for name, parameter in part.parameters():
            place = part.inside(name)
            dtype = str(parameter.dtype).removeprefix("torch.")
            expected = part.formats.stored(name) or FP32
            if parameter.dtype is torch.float64:
                advice = "it stays float64, and so do the ops that use it"
                yield Finding("note", "float64 parameter", place, f"{place} is float64", advice)
            elif parameter.requires_grad and is_low(parameter.dtype) and setup.plan.ops == "none":
                severity = "error" if needs_scale(parameter.dtype) else "warning"
                what = f"trainable, stored as {dtype}, without a master and with an optimizer that works in {dtype}"
                advice = "call model.float() before initialize, and use level O2 for low weights with fp32 masters"
                yield Finding(severity, "low parameter at O0", place, what, advice)
            elif (
                parameter.dtype in CASTABLE and parameter.dtype is not expected.dtype and part.formats.param is not None
            ):
                what = f"stored as {dtype}, but the plan stores it as {expected} (reason: {part.formats.reason})"
                yield Finding("error", "parameter format", place, what, RECAST)


def _replaced(setup: Setup) -> Iterator[Finding]:
    """Finds parameters that an optimizer updates, but that the model no longer has."""
    here = {id(p) for part in setup.parts for p in parameters_of(part.module).values()}
    for optimizer in setup.optimizers:
        given = (p for group in optimizer.param_groups for p in group["params"])
        gone = [p for p in given if id(p) not in here and not is_sharded(p)]  # but for a gathered copy's
        if gone:
            what = f"updates {len(gone)} parameters that the model lacks, the first of shape {tuple(gone[0].shape)}"
            yield Finding("error", "replaced parameters", type(optimizer).__name__, what, REPLACED)


def _untrained(setup: Setup) -> Iterator[Finding]:
    """Finds weights that stay in fp32 because no optimizer updates them, beside weights that are stored low."""
    kept = [part.inside(name) for part in setup.parts for name in part.formats.kept]
    low = next((part.place for part in setup.parts if part.formats.param is setup.plan.low), None)
    if kept and low is not None:
        what = f"no optimizer updates {named(kept)}: stored in fp32, beside weights in {setup.plan.low} such as {low}'s"
        advice = (
            "an average written with lerp_ or _foreach_lerp_ raises 'expected dtype float for `end`' outside of "
            "`with session.full_weights():`; mul_ and add_ take both formats, and so do values of model.state_dict()"
        )
        yield Finding("note", "weights without an optimizer", kept[0], what, advice)


def _ranges(setup: Setup) -> Iterator[Finding]:
    """Finds weights that are not finite, and those whose fp32 values the low format cannot hold."""
    low, bad, beyond, lost = setup.plan.low, [], {}, {}
    for part in setup.parts:
        for own, parameter in part.parameters():
            name, fits = part.inside(own), setup.fit(parameter) if parameter.numel() else None
            if fits is not None and fits.nonfinite:
                bad.append(name)
            elif fits is None or not _is_rounded(setup, part, parameter):
                continue
            elif fits.beyond:
                beyond[name] = part
            elif fits.lost > MOST_LOST * fits.nonzero:
                lost[f"{name} ({fits.lost / fits.nonzero:.0%})"] = part
    if bad:
        what, advice = f"not finite: {named(bad)}", "load or initialize them again"
        yield Finding("error", "non-finite weights", bad[0], what, advice)
    if beyond:
        what = f"larger than {low.max:g}, the largest value of {low}: {named(list(beyond))}"
        place, kept = next(iter(beyond)), _kept_full(setup, beyond.values())
        yield Finding("error", "weights beyond the format", place, what, *kept)
    if lost:
        what = f"values other than 0 are 0 in {low}, whose smallest number is {low.smallest_subnormal:.0e}"
        place, kept = next(iter(lost)).partition(" (")[0], _kept_full(setup, lost.values())
        yield Finding("warning", "weights vanish", place, f"{what}: {named(list(lost))}", *kept)


def _is_rounded(setup: Setup, part: Part, parameter: nn.Parameter) -> bool:
    """Tells whether a weight is stored in the low format, or cast to it where it is used."""
    low = setup.plan.low
    cast = id(parameter) in setup.rounded or (isinstance(part.module, PRODUCT_LAYERS) and part.formats.compute is low)
    return setup.plan.ops != "none" and (parameter.dtype is low.dtype or cast)


def _kept_full(setup: Setup, parts: Iterable[Part]) -> tuple[str, tuple[Rule, ...]]:
    """Returns the advice to keep modules full, and the rules that do so; there is no rule for the model itself."""
    plan, roots = setup.plan, [part.module for part in setup.parts if not part.name]
    names = dict.fromkeys(part.name for part in parts if part.name)
    rules = tuple(dict.fromkeys(rule for name in names for rule in rules_on(name, FULL_OUT, plan, roots)))
    advice = "compute in fp32, with a rule that keeps the module full, or rescale the weights"
    if plan.param == "low" and plan.master == "none":
        advice += f"; {plan.name} has no fp32 copies of them: load the weights again before the next initialize"
    return advice, rules


def _scalers(setup: Setup) -> Iterator[Finding]:
    """Finds a gradient scaler that the training loop uses although the session already scales the loss."""
    if setup.scaler is None or not setup.scaler.is_enabled():
        return
    kind = type(setup.scaler).__name__
    halves = [
        part.inside(name)
        for part in setup.parts
        for name, parameter in part.parameters()
        if parameter.requires_grad and needs_scale(parameter.dtype)
    ]
    if halves and not isinstance(setup.scaler, GradScaler):
        what = f"{kind} raises 'Attempting to unscale FP16 gradients.' for fp16 parameters: {named(halves)}"
        advice = "leave the scaler out, as session.backward and session.step scale the loss; or use halfstep.GradScaler"
        yield Finding("error", "refused gradients", halves[0], what, advice)
    elif setup.plan.ops != "none":
        what = "both this gradient scaler and the session scale the loss: the two factors multiply"
        advice = "leave the scaler out: session.backward and session.step scale the loss"
        yield Finding("warning", "two scalers", kind, what, advice)


def _buffers(setup: Setup) -> Iterator[Finding]:
    """Finds buffers that should stay full but that a rule or the user stores low, and masks that exceed the format."""
    for part in setup.parts:
        for name, buffer in buffers_of(part.module).items():
            if buffer is None or not buffer.is_floating_point() or buffer.numel() == 0:
                continue
            place = part.inside(name)
            if is_low(buffer.dtype):
                yield _low_buffer(setup.plan, part, place, name, buffer)
            elif setup.plan.ops != "none" and -FP32.max <= float(buffer.min()) < -setup.plan.low.max:
                low, lowest = setup.plan.low, float(buffer.min())
                what = f"holds {lowest:g}, which is -inf in {low}; the buffer itself stays {FP32}"
                advice = f"if the model casts it, use torch.finfo(scores.dtype).min ({-low.max:g}) instead"
                yield Finding("note", "mask beyond the format", place, what, advice)


def _low_buffer(plan: Plan, part: Part, place: str, name: str, buffer: Tensor) -> Finding:
    fmt = as_format(buffer.dtype)
    cure = _keep_buffers(plan, part)
    how = "set buffers='keep' in the rule that stores it low" if cure else f"register it in fp32: {place}.float()"
    if norm_kind(part.module) is not None or name.startswith("running_"):
        why = f"a running statistic in {fmt}: with {fmt.fraction_bits + 1} significant bits, small updates are lost"
        return Finding("warning", "running statistics stored low", place, why, how, cure)
    if any(word in name.lower() for word in ROTARY):
        why = f"frequencies in {fmt}: an angle at position 2048 is off by up to {2048 * fmt.eps / 2:g} radians"
        return Finding("warning", "rotary frequencies stored low", place, why, how, cure)
    if bool(buffer.isneginf().any()):
        why = f"a mask in {fmt} holds -inf: a row that is masked entirely gives NaN in a softmax"
        return Finding("warning", "mask stored low", place, why, how, cure)
    return Finding("note", "buffer stored low", place, f"stored as {fmt}", how, cure)


def _keep_buffers(plan: Plan, part: Part) -> tuple[Rule, ...]:
    """Returns the plan's rules that store the buffers of a module low, changed so that buffers keep their format."""
    rules = []
    for rule in plan.rules:
        site = Site(0, part.module, (part.name,))
        around = [".".join(part.name.split(".")[:end]) for end in range(len(part.name.split(".")))]
        if rule.buffers == "low" and (rule.matches(site.names, site.type_names) or rule.matches(around, ())):
            statistics = rule.matches(site.names, site.type_names) and has_running_stats(part.module)
            policy = replace(rule.policy, param="full") if statistics else rule.policy
            rules.append(replace(rule, policy=policy, buffers="keep"))
    return tuple(rules)


def _constants(setup: Setup) -> Iterator[Finding]:
    """Finds eps of optimizers that are 0 in the low format in which they keep their state."""
    if setup.plan.ops != "none":  # then halfstep steps, or the optimizer does on fp32 copies: its state is fp32
        return
    for optimizer in setup.optimizers:
        for group in optimizer.param_groups:
            eps, params = group.get("eps"), (p for p in group["params"] if p.requires_grad and is_low(p.dtype))
            fmt = next((as_format(p.dtype) for p in params), None)
            if fmt is not None and isinstance(eps, float) and fmt.rounds_to_zero(eps):
                what = f"the optimizer's state is {fmt}, in which eps={eps:g} is 0: a zero gradient gives 0/0"
                advice = (
                    f"use eps={fmt.usable_eps:g} or more, or call model.float() and use level O2, whose state is fp32"
                )
                yield Finding("warning", "eps vanishes", type(optimizer).__name__, what, advice)
                break


def _scale(setup: Setup) -> Iterator[Finding]:
    """Finds fp16 gradients that nothing scales."""
    scale, low = setup.plan.scale, setup.plan.low
    unscaled = not scale.adapts and scale.first == 1
    if setup.plan.ops != "none" and low.needs_scale and unscaled and setup.optimizers:
        what = f"{low} gradients below {low.smallest_subnormal / 2:.1e} are lost without a loss scale"
        advice = "use a dynamic loss scale, or the constant one that halfstep.whatif recommends"
        yield Finding("note", "no loss scale", setup.plan.name, what, advice, (Scaling("dynamic"),))


CHECKS: tuple[Callable[[Setup], Iterator[Finding]], ...] = (
    *(_parameters, _replaced, _untrained, _ranges, _scalers),
    *(_buffers, _constants, _scale),
)
"""The checks that run nothing; a new check is a new row."""
