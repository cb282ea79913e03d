"""A probe: collects statistics of a model's tensors in some steps, and rarely reads them on the host."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.edits import FULL, Rule
from halfstep.errors import ObserveError, PlanError
from halfstep.plan.matching import find_sites, nearest, uncompiled
from halfstep.records import TENSOR_KINDS, UPDATE, Observation
from halfstep.train.kernels.stats import Updates
from halfstep.train.probe.hooks import readable, undo_all
from halfstep.train.probe.rows import More, Pending, Window, check_sample, owned
from halfstep.validate import near_miss, short, with_near_misses

LONGEST = 8  # consecutive steps that are observed until each optimizer has made one
KEPT = 20_000  # rows of 2 KiB each that are kept until a flush
KEPT_DELIVERED = 500  # where a log or a sink has them
_LOG = logging.getLogger("halfstep")
KINDS = (*TENSOR_KINDS, UPDATE)
_OF_PARAMETERS = {"weight", "weight_grad", UPDATE}
# Takes parameters, their gradients, and what gets the updates that are made to them inside the context that it returns.
Watching = Callable[[Sequence[Parameter], Sequence[Tensor], Callable[[Updates], None]], AbstractContextManager[None]]


@with_near_misses
class Probe(AbstractContextManager["Probe"]):
    """Observes some steps of a session; made by `session.observe`, ended by `detach()` or by leaving its `with` block.

    It observes the next step, or the one after `wait` others, then each step whose number is divisible by `every`. With
    several optimizers it goes on until each has stepped, but for at most 8 steps (`LONGEST`). Between observed steps
    nothing is attached to the model. The statistics stay on the device; `flush()` reads them all at once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        kinds: frozenset[str],
        *,
        every: int,
        sample: int | None,
        deliver: Sequence[Callable[[Observation], object]],
        more: More,
        wait: int = 0,
    ) -> None:
        self._more, self._wait = more, wait
        self._modules, self._kinds, self._every, self._sample = modules, kinds, every, sample
        self._deliver = deliver
        self._waiting: deque[Pending] = deque()  # for `flush`
        self._arriving: deque[Pending] = deque()  # for `deliver`
        self._said = {"captured"} if wait else set()  # who was not asked for need not say what a graph hides
        self.window: Window | None = None
        self._stepped: set[int] = set()  # optimizers that stepped since the first of these consecutive steps
        self._looked = 0  # steps observed since then
        self.attached = True
        self.undo: list[Callable[[], None]] = []  # of the window that is open
        weakref.finalize(self, undo_all, self.undo).atexit = False
        if not wait:
            self._open(kinds)

    def flush(self) -> list[Observation]:
        """Returns the observations since the last flush, oldest first; waits for the device once.

        Only the most recent 20,000 observations are kept (a step has one for each observed tensor), and 500 where `log`
        or a sink gets them as they arrive.
        """
        found = [observation for pending in self._waiting for observation in pending.read()]
        self._waiting.clear()
        self._hand_over(wait=True)
        return found

    def detach(self) -> None:
        """Ends the probe; `flush()` still returns what was observed before. Idempotent."""
        self.attached = False
        if self.window is not None:
            self.window.close()
            self.window = None
        undo_all(self.undo)  # left by a window that Ctrl-C ended before it was open
        self._hand_over(wait=True)

    def stepped(self, step: int, parts: Sequence[object], of: Sequence[object]) -> None:
        """Ends step number `step`, made by the optimizers `parts` of all (`of`), and observes the next if it is due."""
        window, self.window = self.window, None
        if window is not None:
            window.close()
            self._say_what_is_missing(window, step)
            self._keep(window.pending(step))
            self._stepped.update(map(id, parts))
            self._looked += 1
        self._wait -= 1
        if (step + 1) % self._every == 0 or self._wait == 0:
            self._stepped.clear()
            self._looked = 0
            self._open(self._kinds)
        elif window is not None and self._looked < LONGEST and any(id(part) not in self._stepped for part in of):
            self._open(self._kinds - {"weight"})  # those of all were read at the first step
        self._hand_over(wait=False)  # last, because a receiver may raise

    def _open(self, kinds: frozenset[str]) -> None:
        if kinds or any(self._more):
            self.window = Window(self._modules, kinds, self._sample, self.undo, self._more)

    def _keep(self, pending: Pending) -> None:
        if not len(pending):
            return
        if self._deliver:
            self._arriving.append(pending)
        self._waiting.append(pending)
        kept = KEPT_DELIVERED if self._deliver else KEPT
        while sum(map(len, self._waiting)) > kept and len(self._waiting) > 1:
            self._waiting.popleft()
            if not self._deliver:
                self._say(
                    "dropped",
                    f"a probe has seen more than {KEPT} tensors since its last flush() and drops the oldest; "
                    "call flush() more often, observe fewer steps or modules, or pass the session a run log",
                )

    def _hand_over(self, *, wait: bool) -> None:
        while self._arriving and (wait or self._arriving[0].numbers.arrived()):
            for observation in self._arriving.popleft().read():
                for take in self._deliver:
                    take(observation)

    def _say_what_is_missing(self, window: Window, step: int) -> None:
        for name in sorted(window.unread):
            self._say(
                name,
                f"a probe cannot read some tensors, of type {name}: they have no plain storage "
                "(torch.func, nested, meta, fake or, for updates, distributed tensors)",
            )
        if window.captured:
            self._say("captured", "a probe cannot see steps that are captured in a CUDA graph or replayed from one")
        elif window.hooks is not None and not window.hooks.saw_any and self._looked == 0:
            self._say(
                "no activation",
                f"a probe saw no activation in step {step}: none of the observed modules ran a forward with gradients "
                "on since the previous step, or since the probe was made",
            )

    def _say(self, subject: str, notice: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            _LOG.warning(notice)

    def __exit__(self, *_: object) -> None:
        self.detach()


class Probes:
    """Passes the events of one session to its probes. Does nothing in a step that no probe observes."""

    def __init__(self) -> None:
        self._attached: list[Probe] = []

    def add(self, probe: Probe) -> None:
        """Passes all events from now on to the probe."""
        self._attached.append(probe)
        weakref.finalize(self, undo_all, probe.undo).atexit = False  # for a session that nobody closes

    def detach(self) -> None:
        for probe in self._attached:
            probe.detach()
        self._attached.clear()

    def carry(self, scale: Tensor, losses: Sequence[Tensor]) -> None:
        """Tells the probes the loss scale of the next backward pass, and from which `losses` it will start."""
        for window in self._windows():
            window.carry(scale, losses)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops observing inside the `with`, for forward and backward passes outside of training steps."""
        windows = self._windows()
        for window in windows:
            window.pause(on=False)
        try:
            yield
        finally:
            for window in windows:
                window.pause(on=True)

    def read(self, params: Sequence[Parameter], grads: Sequence[Tensor], scale: Tensor) -> None:
        """Passes the gradients of a step, still multiplied by `scale`, to the probes before the step is made."""
        for window in self._windows():
            window.read(params, grads, scale)

    def updating(
        self, watching: Watching, params: Sequence[Parameter], grads: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Observes the update of `params` from `grads` that is made inside the `with`."""
        windows = [window for window in self._windows() if UPDATE in window.kinds]
        if not windows:
            return nullcontext()
        owned = set().union(*(window.owners for window in windows))
        mine = [(p, grad) for p, grad in zip(params, grads, strict=True) if id(p) in owned]
        parted = {type(p.data).__name__ for p, _ in mine if readable(p) is not p}  # DTensors and the like
        for window in windows:
            window.unread.update(f"{name} (updates)" for name in parted)
        mine = [(p, grad) for p, grad in mine if readable(p) is p]

        def take(updates: Updates) -> None:
            for window in windows:
                window.update(updates)

        return watching([p for p, _ in mine], [grad for _, grad in mine], take)

    def stepped(self, step: int, parts: Sequence[object], of: Sequence[object]) -> None:
        """Ends step number `step`, made by the optimizers `parts` of all (`of`)."""
        if not self._attached:
            return
        self._attached = [probe for probe in self._attached if probe.attached]
        with ExitStack() as told:  # all of them, the last first, even if one raises
            for probe in reversed(self._attached):
                told.callback(probe.stepped, step, parts, of)

    @property
    def looking(self) -> bool:
        return bool(self._windows())

    def _windows(self) -> list[Window]:
        if not self._attached:
            return []
        return [probe.window for probe in self._attached if probe.window is not None]


def make_probe(
    roots: Sequence[nn.Module],
    *,
    every: int,
    modules: str | Iterable[str],
    tensors: str | Iterable[str],
    sample: int | None,
    deliver: Sequence[Callable[[Observation], object]],
    more: More,
) -> Probe:
    """Returns a probe on the modules that the patterns match and all modules inside them; see `Session.observe`."""
    whole = isinstance(every, int) and not isinstance(every, bool)
    if not whole or every < 1:
        raise ObserveError(f"every is {every!r}; pass an integer, 1 or more: every=10 observes one step in ten")
    check_sample(sample)
    for take in deliver:
        if not callable(take):
            raise ObserveError(f"log is {short(take)}; pass a function that is called with each Observation, or None")
    kinds = _kinds(tensors, may_be_none=any(more[:2]))
    chosen = _chosen(roots, _patterns(modules))
    parameters = owned(chosen).values()
    if UPDATE in kinds and any(p.device.type == "mps" for p, _, _ in parameters):
        raise ObserveError("updates are measured in float64, which MPS does not have; leave 'update' out of tensors")
    if kinds and kinds <= _OF_PARAMETERS and not parameters:
        raise ObserveError(
            f"tensors is {sorted(kinds)}, but none of the {len(chosen)} modules that {modules!r} matches has a "
            "floating-point parameter; name other modules, or observe their activations"
        )
    return Probe(chosen, kinds, every=every, sample=sample, deliver=deliver, more=more)


def _listed(name: str, given: Any, what: str) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise ObserveError(f"{name} is {given!r}; pass {what}, or a list of such strings")
    return list(given)


def _kinds(tensors: str | Iterable[str], *, may_be_none: bool) -> frozenset[str]:
    given = _listed("tensors", tensors, "a string such as 'activation'")
    for kind in given:
        if kind not in KINDS:
            allowed = ", ".join(map(repr, KINDS))
            raise ObserveError(f"tensors has {kind!r}; expected one of {allowed}{near_miss(kind, KINDS)}")
    if not given and not may_be_none:
        raise ObserveError(f"tensors is empty; name at least one of {', '.join(map(repr, KINDS))}")
    return frozenset(given)


def _patterns(modules: str | Iterable[str]) -> list[Rule]:
    given = _listed("modules", modules, "a pattern of module names as a string ('*' for all)")
    if not given:
        raise ObserveError("modules is empty; pass a pattern of module names ('*' for all)")
    try:
        return [Rule(pattern, FULL) for pattern in given]
    except PlanError as error:
        raise ObserveError(f"modules: {error}") from None


def _chosen(roots: Sequence[nn.Module], patterns: Sequence[Rule]) -> dict[str, nn.Module]:
    """Returns, by name, the modules that the patterns match and all modules inside them, in model order."""
    sites = [site for index, root in enumerate(roots) for site in find_sites(root, index)]
    wanted: set[int] = set()
    for pattern in patterns:
        hits = [site for site in sites if pattern.matches(site.names, site.type_names)]
        if not hits:
            raise ObserveError(f"the pattern {pattern.pattern!r} in modules matches no module{nearest(pattern, sites)}")
        wanted.update(id(module) for site in hits for module in site.module.modules())
    chosen: dict[str, nn.Module] = {}
    for site in sites:
        if id(site.module) in wanted:
            wanted.discard(id(site.module))
            prefix = [] if len(roots) == 1 else [str(site.model)]
            chosen[".".join([*prefix, *filter(None, [uncompiled(site.name)])])] = site.module
    return chosen
