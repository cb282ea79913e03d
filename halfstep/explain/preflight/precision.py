"""Compares one step under the plan with one in fp32, and finds the modules that lose precision without an overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.edits import FULL, Edit, OpChange, Policy, Rule, spell
from halfstep.explain.diagnose.cures import FULL_OUT, WHOLE, edited, is_op, is_product, own_code, rules_on
from halfstep.explain.diagnose.losses import Loss, LossFinder
from halfstep.explain.diagnose.rehearsal import Rehearsal
from halfstep.explain.diagnose.shadow import SecondCall, Shadow, has_code, named_modules, off_by
from halfstep.explain.diagnose.words import in_model, place_of, which_model
from halfstep.explain.tape.nonfinite import nonfinite
from halfstep.kinds import Kind
from halfstep.plan.levels import level
from halfstep.plan.matching import first_device, unwrap
from halfstep.plan.plan import Plan
from halfstep.records import CERTAIN, COMPARED, SUSPECT, Finding, called
from halfstep.torch_internals import in_backward, is_out_of_memory, parameters_of, tree_leaves, without_modes
from halfstep.train.cast.copies import plain_class
from halfstep.train.probe.hooks import dense
from halfstep.validate import named

OUTPUT = 0.1
"""Of their spread: how far the outputs of a model may be from those in fp32."""
GRADIENT = 0.2
"""Of their norm: how far the gradients may be."""
GAIN = 3.0
"""A cure divides the error by this at least."""
_SCALES = (1024.0, 32.0, 1.0)  # of fp16 gradients, where they overflow at the session's own loss scale
_TRIALS = 4  # plans that are tried
_OF_GRADIENTS = 2  # of them where gradients alone are off, as with BatchNorm and small batches
_NO_LOSS = 1e-4  # what a loss may be off by where it is nearly 0
_FAINT = 0.03  # of its spread: what a module may be off by where none is a suspect
_HELPS = 1.5  # an edit that divides the error by it is named where none is a cure
_FAR = 10.0  # a ratio above it is not given in percent
_MANY = 3  # modules of a class, all that there are, from which a rule names the class
_PARTS = 4  # of a module, from which it is large
_MODULES = 4  # in which the operation is looked for
_SAME_BATCH = "make it use the same batch on every call"


@dataclass(eq=False)
class StepResult:
    """What a step made: the outputs of the outermost modules, and the gradients, which carry a loss scale."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    scale: float = 1.0
    loss: float = math.nan

    def take_gradients(self, rehearsal: Rehearsal) -> None:
        self.scale = rehearsal.used_scale
        with without_modes():  # a recorder would look at each
            self.gradients = [None if p.grad is None else dense(p.grad).detach() for p in rehearsal.params]

    @property
    def overflowed(self) -> bool:
        return any(g is not None and nonfinite(g) is not None for g in self.gradients)


@dataclass(frozen=True)
class Damage:
    """How far a step is from the same step in fp32: its outputs, in their spread, and its gradients, in their norm."""

    output: float  # of the worst of those that were compared
    gradient: float | None  # None: they overflow; NaN: of a forward alone
    compared: int  # outputs; fewer in a trial, if some are not finite there

    @property
    def is_large(self) -> bool:
        """Whether rounding alone does not explain it."""
        return self.output > OUTPUT or (self.gradient or 0.0) > GRADIENT

    @property
    def size(self) -> float:
        """How many times more it is than rounding alone explains."""
        gradient = math.inf if self.gradient is None else self.gradient
        return max(self.output / OUTPUT, 0.0 if math.isnan(gradient) else gradient / GRADIENT)

    def is_cured_by(self, trial: Damage) -> bool:
        """Tells whether what is large is divided by `GAIN` in a trial, in which nothing else became infinite."""
        if trial.compared < self.compared or (trial.gradient is None and self.gradient is not None):
            return False
        output = self.output > OUTPUT and trial.output < self.output / GAIN
        before, after = self.gradient or 0.0, trial.gradient or 0.0
        return output or (before > GRADIENT and after < before / GAIN)

    def __str__(self) -> str:
        outputs = f"the model's outputs are off by {share(self.output)} of their spread"
        if not self.compared:
            outputs = "no output could be compared"
        if self.gradient is not None and math.isnan(self.gradient):
            return outputs
        return f"{outputs}, gradients " + ("overflow" if self.gradient is None else f"by {share(self.gradient)}")


@contextmanager
def outputs_of(roots: Sequence[nn.Module], *, inside: bool = False) -> Iterator[StepResult]:
    """Yields a `StepResult` that gets what the models return; with `inside`, what the outermost modules in them do."""
    taken, depth, handles = StepResult(), [0], []

    def before(module: nn.Module, args: Any) -> None:
        depth[0] += not in_backward()

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if in_backward():
            return
        depth[0] -= 1
        if depth[0] == inside:
            found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            with without_modes():
                taken.outputs += [leaf.detach().clone() for leaf in found]

    modules = [*named_modules(roots).values()] if inside else [unwrap(root) for root in roots]
    try:
        for module in modules:
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def take_step(rehearsal: Rehearsal, loss: Tensor, taken: StepResult) -> None:
    """Runs the backward pass of a loss and keeps its gradients; those that overflow in fp16 at a lower loss scale."""
    for scale in (rehearsal.plan.scale.first, *_SCALES):
        with rehearsal.gradients(loss, scale):
            taken.take_gradients(rehearsal)
        if not taken.overflowed:
            return


def damage_of(low: StepResult, exact: StepResult) -> Damage:
    """Returns how far a step is from the same step in fp32; scales are taken off the gradients."""
    ratios = []
    if len(low.outputs) == len(exact.outputs):
        ratios = [r for a, b in zip(low.outputs, exact.outputs, strict=True) if (r := off_by(a, b)) is not None]
    if not (low.gradients and exact.gradients):
        return Damage(max(ratios, default=0.0), math.nan, len(ratios))
    pairs = [(a, b) for a, b in zip(low.gradients, exact.gradients, strict=True) if a is not None and b is not None]
    error = math.hypot(*(_norm(torch.sub(a, b, alpha=low.scale / exact.scale)) / low.scale for a, b in pairs))
    norm = math.hypot(*(_norm(b) / exact.scale for _, b in pairs))
    gradient = error / norm if norm else 0.0
    return Damage(max(ratios, default=0.0), gradient if math.isfinite(gradient) else None, len(ratios))


def _norm(x: Tensor) -> float:
    # in fp32, whose squares neither vanish nor overflow between these limits; in fp64 it takes six times as long
    norm = float(torch.linalg.vector_norm(x))
    return norm if 1e-15 < norm < 1e15 else float(torch.linalg.vector_norm(x, dtype=torch.float64))


def precision_findings(rehearsal: Rehearsal, low: StepResult, loss: Tensor) -> list[Finding]:
    """Returns what a rehearsal, of which `low` is a step, loses without an overflow, or a note of what was compared."""
    # The same step in fp32 tells how far outputs and gradients are off. If they are, calls of modules are made again in
    # fp32 with their own inputs. A suspect, which gives something else then, becomes a finding if an edit that keeps it
    # in fp32, tried on copies, divides the error by 3.
    check = _Check(rehearsal, low, float(loss.detach()))
    try:
        return check.findings()
    except StopIteration:
        return [_not_compared(f"the closure ran out of batches; {_SAME_BATCH}")]
    except Exception as error:  # whatever a model raises under another plan, or as a copy
        if not is_out_of_memory(error):
            return [_not_compared(f"a copy of the model cannot be made or run: {type(error).__name__}: {error}")]
    return check.without_copies()


class _Check:
    def __init__(self, rehearsal: Rehearsal, low: StepResult, loss: float) -> None:
        self._rehearsal, self._low, self._losses_of_runs = rehearsal, low, {loss}  # under the session's own plan
        self._loss = loss
        self._plan, self._roots = rehearsal.plan, rehearsal.roots
        self._modules = named_modules(rehearsal.roots)
        self._unchecked: dict[str, str] = {}  # modules that could not be called again, and why
        self._first: Loss | None = None  # where it begins, if nothing cures it
        self._best: tuple[tuple[Edit, ...], Damage] | None = None  # and what helps most
        self._inside = False
        self._again = StepResult()  # of a second forward under the session's own plan

    def findings(self) -> list[Finding]:
        exact = self._exact()
        if not any(off_by(each, each) is not None for each in exact.outputs):  # such as a loss
            self._inside = True
            exact, self._low = self._exact(), self._step(None)
        if not self._rehearsal.inputs.same:
            return [_not_compared(f"the closure takes another batch each time; {_SAME_BATCH}")]
        damage = damage_of(self._low, exact)
        if not damage.compared and not any(g is not None and bool(g.any()) for g in exact.gradients):
            return [_not_compared("the model returns nothing that can be compared, and has no gradients")]
        if not damage.is_large:
            limits = f"rounding alone may do {share(OUTPUT)} and {share(GRADIENT)}"
            lost = f"gradients were not compared (they overflow at a loss scale of {_SCALES[-1]:.0f} too); "
            return [_compared(damage, f"{lost if damage.gradient is None else 'nothing to do: '}{limits}")]
        found = self._cured(damage, exact) or self._magnified(damage, exact) or [self._uncured(damage)]
        noise = next((n for n in self._noises(damage, exact, found[0]) if not damage.is_cured_by(n)), None)
        if noise is not None:
            why = f"the model does not repeat: from one run to the next {noise}"
            return [_not_compared(f"{damage}; {why}. What the format loses cannot be told from that")]
        names = named(f"{place_of(name, None)} ({why})" for name, why in self._unchecked.items())
        return [*found, *([_not_compared(f"calls that could not be made again in fp32: {names}")] if names else [])]

    def _noises(self, damage: Damage, exact: StepResult, found: Finding) -> Iterator[Damage]:
        """Yields how far runs under one plan are apart: those that there are, and if it is no note, more in fp32."""
        alone = damage.output <= OUTPUT  # gradients
        if not (self._inside or alone):
            yield damage_of(self._again, self._low)
            yield damage_of(self._low, self._again)  # in the other spread
        more = 0 if found.severity == "note" else 2 if len(self._losses_of_runs) > 1 else 1  # two: runs may alternate
        for _ in range(more):
            yield damage_of(self._exact(backward=alone), exact)

    def _magnified(self, damage: Damage, exact: StepResult) -> list[Finding]:
        """Returns a finding where loss and gradients are mostly error, which no module and no operation alone makes."""
        plans = edited(self._plan, [WHOLE] if self._loss_is_off(exact) and (damage.gradient or 0.0) > GAIN else [])
        if not any(damage.is_cured_by(after := self._trial(plan, exact)) for _, plan in plans):
            return []
        said = f"{damage}; the loss is {self._loss:.4g} in place of {exact.loss:.4g}"
        advice = f"{spell(WHOLE)}, with which {after}; no smaller edit that was tried divides this by 3"
        return [Finding("warning", Kind.PRECISION_LOST.value, place_of(self._root, None), said, advice, WHOLE)]

    def _loss_is_off(self, exact: StepResult) -> bool:
        return abs(self._loss - exact.loss) > GRADIENT * abs(exact.loss) + _NO_LOSS

    def _uncured(self, damage: Damage) -> Finding:
        first, best = self._first, self._best
        helps = best is not None and best[1].output < damage.output / _HELPS
        most = f"; the best, {spell(best[0])}, leaves: {best[1]}" if best is not None and helps else ""
        if damage.output <= CERTAIN or first is None:
            normal = any("BatchNorm" in type(module).__name__ for module in self._modules.values())
            why = "; BatchNorm does this in small batches" if normal else ""
            why += "; near a minimum, where gradients vanish, rounding does" if damage.output <= OUTPUT else ""
            return _compared(damage, f"no edit that was tried divides this by 3{most}{why}")
        said = f"{called(first.operator)} {first.said}; {damage}"
        advice = f"compute this in fp32; no edit that was tried divides the error by 3{most}"
        return Finding("warning", Kind.PRECISION_LOST.value, place_of(first.module, first.line), said, advice)

    def without_copies(self) -> list[Finding]:
        """Returns the suspects alone, as notes, where there is no memory for a copy of the model."""
        said, lost = "there is no memory for a copy of the model on which to try an edit", Kind.PRECISION_LOST.value
        try:
            suspects = self._suspects()
        except Exception as error:
            return [_not_compared(f"{said}, nor to call its modules again: {type(error).__name__}")]
        found = [
            Finding("note", lost, place_of(name, None), _own(again), f"{said}; try Rule({name!r}, FULL)")
            for name, again in suspects.items()
        ]
        return found or [_not_compared(f"{said}; no module alone is off by more than {share(SUSPECT)} of its spread")]

    def _exact(self, *, backward: bool = True) -> StepResult:
        return self._step(level("O0", self._plan.low), backward=backward)

    def _step(self, plan: Plan | None, *, backward: bool = True) -> StepResult:
        """Runs a step on copies under a plan; None: on the session's own models, under its own."""
        self._rehearsal.rewind()
        with outputs_of(self._roots, inside=self._inside) as taken:
            if plan is None:
                take_step(self._rehearsal, self._rehearsal.loss(), taken)
            else:
                with self._rehearsal.under(plan) as trial:
                    loss = trial.loss()
                    taken.loss = float(loss.detach())
                    if backward:
                        take_step(trial, loss, taken)
        return taken

    def _cured(self, damage: Damage, exact: StepResult) -> list[Finding]:
        """Returns a finding with the first edits that leave no damage, else with the best that divide it by `GAIN`."""
        suspects = self._suspects()
        worst = sorted(suspects, key=lambda name: -(suspects[name].off_by() or 0.0))
        clear = any((suspects[name].off_by() or 0.0) > SUSPECT for name in worst[:1])
        alone = not (clear or damage.output > OUTPUT or self._inside)  # the gradients
        is_own = alone and not suspects
        worst, most = ([], _OF_GRADIENTS) if alone else (worst, _TRIALS)  # lost in the model's own code, if at all
        tried: list[tuple[list[str], tuple[Edit, ...], Damage]] = []
        every = self._losses({name: suspects[name].number for name in worst[:_MODULES]})
        losses = {name: own[0] for name, own in every.items() if not alone or own[0].ratio > _FAINT}
        if is_own and not losses and (found := self._rounded_terms(chain(*every.values()), damage, exact)):
            return found
        whole = []
        if is_own and not (losses or self._loss_is_off(exact) or (damage.gradient or 0.0) > CERTAIN):
            return []  # near a minimum, where rounding is much of small gradients
        for edits, plan in edited(self._plan, own_code(self._plan, self._roots, "full") if is_own else []):
            whole = [([self._root], edits, self._trial(plan, exact))]
            if not damage.is_cured_by(whole[0][2]):  # nor would less of it
                return []
        waiting = self._candidates(worst, losses)
        while len(tried) + len(whole) < most and (candidate := next(waiting, None)) is not None:
            names, edits = candidate
            for _, plan in edited(self._plan, [edits] if edits else []):
                trial = self._trial(plan, exact)
                tried.append((names, edits, trial))
                if damage.is_cured_by(trial) and not trial.is_large:
                    waiting = iter([(few, self._rules(few, FULL)) for few in self._fewer(names, edits)])
        tried += whole
        if worst and not any(damage.is_cured_by(after) for _, _, after in tried):
            tried += self._with_readers(worst, exact)
        good = [each for each in tried if damage.is_cured_by(each[2])]
        if not good:
            self._first = next(iter(losses.values()), None)
            self._best = min(((edits, after) for _, edits, after in tried), key=lambda e: e[1].output, default=None)
            return []
        clean = [each for each in good if not each[2].is_large]
        best = min(clean, key=lambda each: len(each[0])) if clean else min(good, key=lambda each: each[2].size)
        names, edits, after = best
        return [self._lost(names, suspects, losses, edits, (damage, after))]

    def _rounded_terms(self, losses: Iterable[Loss], damage: Damage, exact: StepResult) -> list[Finding]:
        """Returns a finding of an addition; little of what the code returns may be much of what a loss makes of it."""
        first = next((loss for loss in losses if loss.rounds_terms), None)
        for edits, plan in edited(self._plan, [] if first is None else [_denied([first])]):
            if damage.is_cured_by(after := self._trial(plan, exact)) and not after.is_large and first is not None:
                name = first.module or self._root
                return [self._lost([name], {}, {name: first}, edits, (damage, after))]
        return []

    def _trial(self, plan: Plan, exact: StepResult) -> Damage:
        """Returns the damage under a plan; under one in which the user's own casts raise it is infinite."""
        try:
            return damage_of(self._step(plan), exact)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return Damage(math.inf, None, 0)

    def _candidates(
        self, worst: Sequence[str], losses: Mapping[str, Loss]
    ) -> Iterator[tuple[list[str], tuple[Edit, ...]]]:
        """Yields modules and edits that may cure them, the smallest change first."""
        denied = _denied(losses.values())
        names = list(worst) or [max(losses, key=lambda name: losses[name].ratio, default=self._root)]
        if not worst or any(self._is_large(name) for name in worst):
            yield names, denied
        if not worst:
            kept = dict.fromkeys((self._plan.param, "full"))  # the code may cast to the format of a weight
            yield from ((names, edits) for param in kept for edits in own_code(self._plan, self._roots, param))
            if self._plan.input == "low":
                yield names, (Rule("", Policy(self._plan.param, "low", "full"), input="keep"),)
            return
        yield names, self._rules(names, FULL)
        yield names, self._rules(names, FULL_OUT)
        yield names, denied
        around = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        yield around, self._rules([name for name in around if in_model(name)[1]], FULL_OUT)
        yield from ((names, edits) for edits in own_code(self._plan, self._roots))

    def _with_readers(
        self, names: list[str], exact: StepResult
    ) -> Iterator[tuple[list[str], tuple[Edit, ...], Damage]]:
        """Tries an edit that keeps in fp32 what some modules return, and the modules that would round that."""
        for own, plan in edited(self._plan, [self._rules(names, FULL_OUT)]):
            with self._rehearsal.under(plan) as trial:
                readers = [each for each in _Check(trial, self._low, self._loss)._suspects() if each not in names]
            for edits, wider in edited(self._plan, [(*own, *self._rules(readers, FULL))] if readers else []):
                yield [*names, *readers], edits, self._trial(wider, exact)

    def _is_large(self, name: str) -> bool:
        """Tells whether a module has most of the weights in several parts: to keep it full is nearly O0."""
        own, trained = self._modules[name], self._rehearsal.params
        parts = [part for part in own.modules() if part is not own and parameters_of(part)]
        inside = sum(p.numel() for p in own.parameters())
        return len(parts) >= _PARTS and 2 * inside > sum(p.numel() for p in trained)

    def _rules(self, names: Iterable[str], policy: Policy) -> tuple[Edit, ...]:
        """Returns rules that give modules a policy; by class where they are all that the model has of it."""
        names = list(names)
        kinds = {plain_class(type(self._modules[name])) for name in names}
        known = {kind.__name__ for kind in kinds}
        alike = [m for m in self._modules.values() if known & {b.__name__ for b in plain_class(type(m)).__mro__}]
        if not self._plan.rules and len(self._roots) == 1 and len(alike) == len(names) >= _MANY * len(kinds):
            return tuple(Rule(f"type:{name}", policy) for name in sorted(known))
        rules = (rule for name in names for rule in rules_on(in_model(name)[1], policy, self._plan, self._roots))
        return tuple(dict.fromkeys(rules))

    def _fewer(self, names: Sequence[str], edits: tuple[Edit, ...]) -> list[list[str]]:
        """Returns fewer modules that may be enough, where rules on several cured the damage: one, and each class."""
        classes: dict[type, list[str]] = {}
        for name in names:
            classes.setdefault(plain_class(type(self._modules[name])), []).append(name)
        several = len(names) > 1 and all(isinstance(edit, Rule) and edit.pattern for edit in edits)
        return [list(names[:1]), *(each for each in classes.values() if 1 < len(each) < len(names))] if several else []

    @property
    def _root(self) -> str:
        return next(iter(self._modules))

    def _suspects(self) -> dict[str, SecondCall]:
        """Returns the worst call of each innermost module whose results are far from those of the same call in fp32."""
        found: dict[str, tuple[float, SecondCall]] = {}

        def tell(again: SecondCall) -> None:
            off = again.off_by()
            if off is None:
                self._unchecked.setdefault(again.module, "nothing that it returns can be compared")
            elif off > max(_FAINT, found[again.module][0] if again.module in found else 0.0):
                found[again.module] = off, again

        outermost = {id(unwrap(root)) for root in self._roots}
        parts = {name: module for name, module in self._modules.items() if id(module) not in outermost}
        own = {name: module for name, module in parts.items() if has_code(module)}
        with outputs_of(self._roots) as self._again:
            self._forward(Shadow(own, tell, self._fail, device_type=first_device(self._roots).type))
        clear = {name for name, (off, _) in found.items() if off > SUSPECT}
        names = clear or sorted(found, key=lambda name: -found[name][0])[:1]
        return {name: found[name][1] for name in names if not any(other.startswith(f"{name}.") for other in names)}

    def _losses(self, calls: Mapping[str, int]) -> dict[str, list[Loss]]:
        """Returns for one call of each module (none: of the model) the operations that went wrong, the worst first."""
        calls = calls or {name: 1 for name, module in self._modules.items() if module in map(unwrap, self._roots)}
        finder = LossFinder(self._roots, calls, {name: self._modules[name] for name in calls}, self._fail)
        with self._rehearsal.recording(finder.low):
            self._forward(finder)
        return finder.found

    def _forward(self, shadow: Shadow) -> None:
        """Runs the closure without a backward pass, with calls of modules made again in fp32."""
        self._rehearsal.rewind()
        with ExitStack() as stack:
            stack.callback(shadow.put_on())
            self._losses_of_runs.add(float(self._rehearsal.loss().detach()))

    def _fail(self, name: str, error: Exception) -> None:
        said = str(error).partition("\n")[0]
        self._unchecked.setdefault(name, f"{type(error).__name__}{said and ': '}{said}")

    def _lost(
        self,
        names: Sequence[str],
        suspects: Mapping[str, SecondCall],
        losses: Mapping[str, Loss],
        edits: tuple[Edit, ...],
        errors: tuple[Damage, Damage],
    ) -> Finding:
        before, after = errors
        first = max((n for n in suspects if n in names), key=lambda n: suspects[n].off_by() or 0.0, default=names[0])
        loss = losses.get(first) or next(iter(losses.values()), None)
        said = [] if loss is None else [f"{called(loss.operator)} {loss.said}"]
        said += [_own(suspects[first])] if first in suspects else []
        others = [place_of(name, None) for name in names if name != first]
        said += [f"likewise {named(others)}"] if others else []
        place, what = place_of(first, None if loss is None else loss.line), "; ".join([*said, str(before)])
        advice = f"{spell(edits)}, with which {after}"
        return Finding("warning", Kind.PRECISION_LOST.value, place, what + which_model(first), advice, edits)


def _denied(losses: Iterable[Loss]) -> tuple[Edit, ...]:
    """Returns edits that keep the operations of some losses in fp32, but for products."""
    operators = dict.fromkeys(loss.operator for loss in losses)
    return tuple(OpChange("deny", each) for each in operators if is_op(each) and not is_product(each))


def _own(again: SecondCall) -> str:
    got, want = again.worst()
    off = share(again.off_by() or 0.0)
    return f"what the module returns is off by {off} of its spread, at worst {got:.6g} in place of {want:.6g}"


def share(ratio: float) -> str:
    """Returns a ratio in percent, with as many digits as say something."""
    if ratio > _FAR:
        return f"over {_FAR:.0%}"
    return f"{ratio:.0%}" if ratio >= OUTPUT else f"{ratio:.1%}" if ratio >= 1e-3 else "under 0.1%"


def _compared(damage: Damage, advice: str) -> Finding:
    return Finding("note", COMPARED, "(model)", f"against the same step in fp32, {damage}", advice)


def _not_compared(why: str) -> Finding:
    return Finding("note", "precision not compared", "(model)", why, "see docs/diagnosis.md for what can be compared")
