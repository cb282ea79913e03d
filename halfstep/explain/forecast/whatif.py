"""What-if: predicts what a training job would lose in each format, from a few steps in fp32."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.edits import FULL, LARGEST_SCALE, OpChange, Policy, Rule, Scaling, spell
from halfstep.errors import FormatError, PlanError, SessionError, SetupError
from halfstep.explain.diagnose.cures import FULL_OUT, edited, is_op, rules_on
from halfstep.explain.diagnose.rehearsal import check_closure, compute_loss, leaves_kept
from halfstep.explain.diagnose.rewind import untouched
from halfstep.explain.diagnose.search import error_of
from halfstep.explain.forecast.backward import Recast, TensorName, parameters, rounded, step, watching_gradients
from halfstep.explain.forecast.predict import GRADIENTS, LEAST_SNR_DB, Scouted, predict
from halfstep.explain.tape.absorbed import AbsorbedWatch
from halfstep.formats import BF16, FP16, FP32, NARROW, Format, as_format
from halfstep.machine import read_facts
from halfstep.plan.compatibility import check_models, check_optimizers
from halfstep.plan.io import choose_plan
from halfstep.plan.levels import customize, loss_scale_of
from halfstep.plan.matching import first_device, uncompiled
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import resolve
from halfstep.records import Finding, Foreseen, Observation, Rounded, WhatIf, absorbed_finding
from halfstep.torch_internals import mark_stepped, was_stepped
from halfstep.train.cast.modules import owners
from halfstep.train.optim.steppers import needs_closure
from halfstep.train.processes.collectives import agreed
from halfstep.train.processes.wrappers import alone, wrappers_of
from halfstep.train.scale.loss import FP16_LOSS_CEILING
from halfstep.train.session.open import open_session
from halfstep.train.session.session import Session
from halfstep.validate import as_tuple, with_near_misses

FORMATS = tuple(fmt.name for fmt in NARROW)
# The gradient with which the scouting backward pass starts instead of 1. Every low format rounds it, so a gradient that
# holds this number, or a fraction such as 1/8 of it, was not computed low.
START = 1 + 2.0**-12
_NOT_FINITE = "not finite"  # the code of a finding


@with_near_misses
def whatif(  # noqa: PLR0913  # the settings of a prediction
    closure: Callable[[], Any],
    model: nn.Module,
    formats: Format | torch.dtype | str | Iterable[Format | torch.dtype | str] = FORMATS,
    *,
    steps: int = 3,
    optimizer: Optimizer | None = None,
    plan: Plan | str = "O2",
    loss_scale: float | None = None,
    products: str | Iterable[str] = (),
) -> WhatIf:
    """Predicts from fp32 training steps what each format would lose, which loss scales are safe, and what to keep full.

    `closure` takes a batch, computes and returns the loss, and does not call backward. It is called once under `plan`
    in bf16, to learn what that plan stores low, and then `steps` times in fp32. With an `optimizer` the weights are
    updated between these steps. Gradients are multiplied by `loss_scale` before rounding; by default each format has a
    suitable scale.

    `products` names one or several recipes, as in `initialize(products=)`: of the layers that `plan` would run by each,
    `products` of the result has what the scaled casts of each operand lose, `stay_full` a finding for those that lose
    much. Weights that the plan stores low, and gradients, are rounded to bf16 before, as there.

    If `formats` include fp16, the closure is called once more at the end, under `plan` in fp16, to find overflows that
    a later operation makes finite again. `stay_full` has a finding "overflow absorbed" for each of them, and a finding
    "not finite" if the loss of this pass is not finite and no other finding says why.

    If the closure fails under `plan`, the prediction is for `plan` with the edits of the first finding of `stay_full`,
    under which it runs.

    Afterwards weights, gradients, buffers, optimizer state and random states are as before, and so are the gradients of
    other tensors that the loss depends on.

    Raises:
        SessionError: the closure fails under `plan` and under all edits tried, or returns no scalar loss; the loss is
            not finite in fp32 or has no gradient; or the backward pass cannot run twice over one forward.
        SetupError: the model is in a session, has no floating-point parameters or no layer for `products`, or is
            wrapped in DistributedDataParallel and `plan` stores weights low; or `steps` is not a positive integer.
        FormatError: `formats` is empty, or has an unknown format or fp32.
        PlanError: `plan` is unknown or stores nothing low, `loss_scale` is invalid, or `products` names no recipe, or
            contradicts the plan.
    """
    if loss_scale is not None:
        loss_scale = loss_scale_of(loss_scale)
    several = formats if isinstance(formats, Iterable) and not isinstance(formats, str) else [formats]
    chosen = list(dict.fromkeys(as_format(fmt) for fmt in several))
    _check(closure, model, chosen, steps, optimizer)
    low_plan, _ = choose_plan(plan, "bf16", read_facts(torch.device("cpu")))
    low_plan = customize(low_plan, low=BF16, rounding="nearest")  # the weights are not stepped low
    if low_plan.ops == "none":
        raise PlanError(f"plan {low_plan.name} stores nothing low; pass O1, O2, O3 or a plan based on one of them")
    check_models([model], low_plan)
    if low_plan.param == "low" and wrappers_of([model]):
        raise SetupError(
            "the model is wrapped in DistributedDataParallel, which stops reducing gradients when weights are stored "
            f"low for a while, as {low_plan.name} does; call whatif before wrapping, or with plan='O1'"
        )
    recipes = [products] if isinstance(products, str) else as_tuple("products", products, of="recipes, such as 'fp8'")
    if "plan" in recipes:
        raise PlanError("products has 'plan', which keeps products in the low format; name recipes only, such as 'fp8'")
    for name in recipes:
        customize(low_plan, products=name)  # raises for what does not exist
    closure = _fed(closure, steps, calls=steps + (2 if FP16 in chosen else 1))
    with untouched([model], list(model.parameters())) as rewind, _kept(optimizer), alone():
        scouted, low_plan, failed = _scouted(closure, model, low_plan)
        rewind()
        recasts = [Recast(customize(low_plan, products=name), model) for name in dict.fromkeys(recipes)]
        rows, scales, largest = predict(
            closure, model, chosen, steps=steps, optimizer=optimizer, scouted=scouted, loss_scale=loss_scale,
            recasts=recasts,
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.grad = None
        absorbed = _absorbed_in_fp16(closure, model, low_plan) if FP16 in chosen else ()
    findings = {fmt.name: (*failed, *_stay_full(fmt, rows, largest, model, low_plan)) for fmt in chosen}
    if absorbed:
        findings[FP16.name] = (*findings[FP16.name], *_about_absorbed(absorbed, findings[FP16.name], model, low_plan))
    foreseen: list[Foreseen] = []
    for recast in recasts:
        found, findings[recast.recipe] = recast.read()
        foreseen += found
    return WhatIf(
        plan=low_plan.name,
        steps=steps,
        formats=tuple(fmt.name for fmt in chosen),
        rows=rows,
        scales=scales,
        stay_full=findings,
        products=tuple(foreseen),
    )


def _fed(closure: Callable[[], Any], steps: int, calls: int) -> Callable[[], Any]:
    def fed() -> Any:
        try:
            return closure()
        except StopIteration:
            raise SessionError(
                f"the closure ran out of batches: what-if calls it {calls} times for steps={steps}; pass fewer steps "
                "or use an endless iterator"
            ) from None

    return fed


def _check(closure: object, model: nn.Module, formats: Sequence[Format], steps: int, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise SetupError(
            f"model must be a Module, not {type(model).__name__}; pass the module that the closure calls: "
            "halfstep.whatif(closure, model)"
        )
    check_closure("whatif", closure)
    if not formats or FP32 in formats:
        raise FormatError(
            "formats must name one or more formats other than fp32; pass some of fp16, bf16, e4m3, e5m2, tf32"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise SetupError(f"steps is {steps!r}; pass the number of fp32 steps, 1 or more")
    if any(isinstance(owner, Session) and not owner.closed for owner in owners(model.modules())):
        raise SetupError("the model is in a session; call whatif before initialize, or after session.close()")
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise SetupError(f"optimizer is of type {kind}; pass one torch.optim.Optimizer, or leave it out")
    check_optimizers([optimizer], [model])
    if needs_closure(optimizer):
        raise SetupError(
            f"{kind} is not supported, because it calls the closure several times per step; leave the optimizer out: "
            "then all steps use the same weights"
        )


@contextmanager
def _kept(optimizer: Optimizer | None) -> Iterator[None]:
    """Restores the state and settings of an optimizer when the context ends."""
    if optimizer is None:
        yield
        return
    state = {p: copy.deepcopy(entries) for p, entries in optimizer.state.items()}
    settings = [
        {key: (value, copy.deepcopy(value)) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    called = was_stepped(optimizer)
    try:
        yield
    finally:
        optimizer.state = defaultdict(dict, state)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            for key, (value, kept) in before.items():
                if isinstance(value, Tensor):  # a learning rate that its owner changes in place
                    group[key] = value
                    value.copy_(kept)
                else:
                    group[key] = kept
        mark_stepped(optimizer, called)  # schedulers check this


def _scouted(
    closure: Callable[[], Any], model: nn.Module, plan: Plan, known: tuple[Finding, ...] = ()
) -> tuple[Scouted, Plan, tuple[Finding, ...]]:
    """Scouts under a plan, or under edits with which it runs; returns the plan then, and the finding with the edits."""
    try:
        return scout(closure, model, plan), plan, known
    except SessionError:
        raise
    except Exception as error:
        found: Finding | None = None
        with suppress(SessionError), _session(model, plan) as session:  # of a closure that runs out of batches
            found = error_of(session, closure)
        if known or not found or not found.cure:
            raise SessionError(
                f"a step under {plan.name} in {plan.low} fails; find the place and a cure with halfstep.check(session, "
                "closure), and pass whatif the plan with the edits that check names. The error was "
                f"{type(error).__name__}: {error}"
            ) from error
    return _scouted(closure, model, plan.edit(*found.cure), (found,))


def scout(closure: Callable[[], Any], model: nn.Module, plan: Plan) -> Scouted:
    """Runs one step under `plan` and returns which tensors are low: those whose values all fit the low format."""
    # The dtype is not enough to tell: a gradient that was computed low, and so rounded, may arrive as fp32. The
    # gradient of a loss counts as low if a module computes the loss low, even if it returns the loss as fp32.
    places: dict[TensorName, Tensor] = {}
    losses: set[TensorName] = set()
    largest: dict[TensorName, Tensor] = {}
    inside: list[Tensor] = []

    def see(place: TensorName, tensor: Tensor) -> None:
        values = tensor.detach().float()
        exact = ((rounded(values, plan.low) == values) | ~values.isfinite()).all() & (tensor.dtype is not torch.float64)
        places[place] = places[place] & exact if place in places else exact
        if place.kind == "activation" and tensor.dim() == 0:
            losses.add(place)
        if place.kind in GRADIENTS and values.numel():
            amax = _amax(values)
            largest[place] = torch.maximum(largest[place], amax) if place in largest else amax

    def see_inside(gradient: Tensor) -> None:
        if gradient.dtype is plan.low.dtype and gradient.numel():
            inside.append(_amax(gradient.float()))

    with _session(model, plan) as session:

        def backward(loss: Tensor) -> None:
            with leaves_kept(loss, list(model.parameters())), watching_gradients(loss, see_inside):
                session.backward(loss, gradient=torch.full_like(loss, START))

        loss = step(model, closure, see, backward=backward)
        formats = session.assignment.modules
        stored_low = {place for place, parameter in parameters(model) if parameter.dtype is plan.low.dtype}
    low = {place: bool(exact) for place, exact in places.items()}
    low_losses = [place for place in losses if low[place]]
    _follow(low, low_losses, stored_low if plan.param == "low" else None)
    outside = max((float(amax) for place, amax in largest.items() if low[place]), default=0.0)
    most = max([outside, *map(float, inside)])
    return Scouted(
        low=low,
        full_modules=frozenset(uncompiled(each.name) for each in formats if each.compute is FP32),
        largest_gradient=most,
        inside=most / outside if outside else 1.0,
        ceiling=FP16_LOSS_CEILING if low_losses or loss.dtype is plan.low.dtype else LARGEST_SCALE,
    )


def _session(model: nn.Module, plan: Plan) -> Session:
    """Opens a session that scales no loss, with an optimizer that changes nothing."""
    still = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or model.parameters(), lr=0.0)
    return open_session([model], [still], plan.edit(Scaling("none")), facts=agreed(read_facts(first_device([model]))))


def _follow(
    low: dict[TensorName, bool], low_losses: Sequence[TensorName], stored_low: Collection[TensorName] | None
) -> None:
    """Corrects the entries of `low` for weights and gradients; `low` says for each tensor whether it is low."""
    low.update((place._replace(kind="activation_grad"), True) for place in low_losses)
    for place in [place for place in low if place.kind == "weight"]:
        gradient = place._replace(kind="weight_grad")
        if stored_low is not None:
            low[place] = low[gradient] = place in stored_low
        else:  # a full weight that is cast for use has a gradient of that format
            low[place] = low.get(gradient, False)


def _amax(values: Tensor) -> Tensor:
    return values.abs().nan_to_num(0.0, 0.0, 0.0).max()


def _stay_full(
    fmt: Format, predicted: Iterable[Rounded], products: Mapping[str, float], model: nn.Module, plan: Plan
) -> Iterable[Finding]:
    """Yields a finding for each module that should stay full because the format does not suit it."""
    harmed: dict[str, list[Rounded]] = {}
    for row in predicted:
        bad = row.snr_db < LEAST_SNR_DB or (row.saturated > 0 and row.kind not in GRADIENTS)
        if row.format == fmt.name and row.low and bad:
            harmed.setdefault(row.module, []).append(row)
    beyond = {module: most for module, most in products.items() if most > fmt.max}
    for module in dict.fromkeys([*harmed, *beyond]):
        rows = harmed.get(module, [])
        policy = FULL_OUT if any(row.kind == "activation" for row in rows) else FULL
        cure, why = _cure(module, policy, model, plan)
        evidence = []
        for row in rows:
            shares = ((row.lost, "nonzero elements become 0"), (row.saturated, "elements overflow"))
            harm = [f"{share:.1%} of the {happens}" for share, happens in shares if share]
            evidence.append(f"{row.kind}: {', '.join([*harm, f'the signal-to-noise ratio is {row.snr_db:.0f} dB'])}")
        if module in beyond:
            evidence.append(f"a product in it reaches {beyond[module]:.4g}, beyond {fmt.max:g}, the maximum of {fmt}")
        yield Finding("warning", "stay full", module or "(model)", "; ".join(evidence), why, cure)


def _absorbed_in_fp16(closure: Callable[[], Any], model: nn.Module, plan: Plan) -> tuple[Observation | Finding, ...]:
    """Returns the overflows absorbed in the forward pass of one step under `plan` in fp16."""
    with _session(model, customize(plan, low=FP16)) as session:
        watch = AbsorbedWatch(session.runtime.roots)
        try:
            with session.runtime.under(watch), watch:
                loss = compute_loss(closure, list(model.parameters()))
        except SessionError:
            raise
        except Exception as error:  # whatever the model raises
            evidence = f"a forward pass under {plan.name} in fp16 raises {type(error).__name__}: {error}"
            advice = "find the place and a cure with halfstep.check(session, closure) in a session with low='fp16'"
            return (Finding("warning", "step fails", "(model)", evidence, advice),)
        watch.end([loss])
        seen = tuple(watch.observations(0))
        if seen or bool(loss.isfinite()):
            return seen
        evidence = f"the loss of a forward pass under {plan.name} in fp16 is {float(loss.detach())}"
        advice = "find the operation and a cure with halfstep.blame(session, closure) in a session with low='fp16'"
        return (Finding("warning", _NOT_FINITE, "(model)", evidence, advice),)


def _about_absorbed(
    absorbed: Iterable[Observation | Finding], known: Sequence[Finding], model: nn.Module, plan: Plan
) -> Iterator[Finding]:
    """Yields a finding for each overflow that would be absorbed."""
    ruled = {edit.pattern for finding in known for edit in finding.cure if isinstance(edit, Rule)}
    for each in absorbed:
        if isinstance(each, Finding):
            if each.code != _NOT_FINITE or not known:  # else one of those may say why
                yield each
            continue
        said = absorbed_finding(each)
        rules, why = _cure(each.module, FULL_OUT, model, plan)
        candidates = [(OpChange("deny", each.name),)] if not rules and is_op(each.name) else []
        denied = next((edits for edits, _ in edited(plan, candidates)), ())
        if denied:
            why = f"{spell(denied)}, which computes {each.name} in fp32: a rule would keep the whole model full"
        if ruled.intersection(rule.pattern for rule in rules):
            rules, why = (), "the rule of another finding already keeps this module full"
        ruled.update(rule.pattern for rule in rules)
        yield replace(said, advice=why, cure=(*rules, *denied))


def _cure(module: str, policy: Policy, model: nn.Module, plan: Plan) -> tuple[tuple[Rule, ...], str]:
    """Returns the rules that keep a module full, and the advice in words."""
    name = module
    while name:
        rules = rules_on(name, policy, plan, [model])
        try:
            resolve(plan.edit(*rules), model)
        except PlanError:
            name = name.rpartition(".")[0]
            continue
        return rules, f"keep {', '.join(rule.pattern for rule in rules)} full"
    return (), "a rule would keep the whole model full; deny the ops of the model's own forward instead"
