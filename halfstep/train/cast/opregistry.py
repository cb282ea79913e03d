"""Puts halfstep's kernels into torch's dispatcher; there is one dispatcher per process, and one registry.

The kernels of an op table act only while the table's marker is on: the autocast bit of a device type that this process
does not use. It belongs to a thread, is passed on to autograd's threads, and torch.compile guards on it and saves it.

A table's kernels have the autocast key of its marker, if torch's dispatcher comes to that key before the one of the
table's own device type, as it does on a CPU. No tensor has the marker's key, so threads that use the table include it
(`reach`), and autocast's bit excludes it outside of the table's regions: code there never meets these kernels. Where
the key of the device type comes first, as on CUDA, the kernels have that key, and pass on the calls of other code.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PlanError
from halfstep.machine import WideBackward, keep_freed_memory
from halfstep.plan.optable import AS_WRITTEN, CARRIED, Action, stock_action
from halfstep.torch_internals import (
    FLASH_ATTENTION_CPU_BACKWARD,
    OpOverload,
    cache_tag,
    forget_compiled,
    has_fallback,
    has_kernel_for,
    in_function,
    keyset_after,
    let_higher_order_pass,
    marked_constant,
    parsed_key,
    saved_tensor_hooks,
    set_cache_tag,
    set_key_included,
    take_kernels_out,
    uncompiled,
)
from halfstep.train.cast.narrow import NARROW, Layers, define_products, make_narrow
from halfstep.train.cast.opkernels import Act, OpSite, flex_attention, is_composite, make_act, wide_attention
from halfstep.train.cast.probabilities import define_traced
from halfstep.train.cast.products import ALSO_EMULATED, EMULATED, make_product
from halfstep.train.cast.recipes import Units
from halfstep.version import __version__

# torch's own kernels for autocast call these ops, and switch off only the key of the device type.
_PARTS = ("convolution", "_convolution", "_convolution.deprecated")
MARKERS = ("ipu", "hpu", "xla", "mtia", "maia")


@dataclass(frozen=True)
class Table:
    """What an engine casts: the device type, and an action for each aten overload."""

    device_type: str
    actions: frozenset[tuple[str, Action]]
    wide_backward: WideBackward = ()  # within which attention runs its backward pass in fp32
    emulate: bool = False  # products of low tensors are computed in fp32 and rounded
    products: str = "plan"  # the recipe of linear layers
    units: Units = "bf16"  # what multiplies in it

    @property
    def widens(self) -> bool:
        """Whether backward passes of attention on a CPU may run in fp32."""
        return self.device_type == "cpu" and bool(self.wide_backward)

    def digest(self) -> str:
        """Returns a short hash of what decides the casts in compiled code: torch keeps such code on disk."""
        held = (__version__, self.device_type, sorted(self.actions), self.emulate, self.products, self.units)
        return hashlib.sha256(repr(held).encode()).hexdigest()[:16]


@dataclass
class _Slot:
    """A table whose marker is in use, and by how many engines."""

    table: Table
    users: int = 0
    repeats: bool = False  # a kernel has run in what an activation checkpoint may compute again


_site_of = cache(OpSite)  # to read 200 schemas takes a third of the time in which a session opens
_key_of = cache(parsed_key)
_torch_has = cache(has_kernel_for)  # of keys of markers, where only torch has some while no table is open


@dataclass
class _Site:
    """One of halfstep's kernels in the dispatcher."""

    site: OpSite
    stock: Any  # torch's own autocast kernel, for when no marker is on; None if torch has none
    own: Action | None  # what torch's autocast does, None if nothing
    alone: _Slot | None = None  # of a kernel with the key of a marker
    acts: tuple[tuple[str, Act], ...] = ()  # what runs the op while a marker is on

    def kernel(self) -> Any:
        """Returns the function to register with the dispatcher: a closure, which costs less per call than a method."""
        return uncompiled(self._for_several() if self.alone is None else self._for_one(self.alone))

    def _for_one(self, slot: _Slot) -> Any:
        device_type, passed, plain = self.site.device_type, self.site.passed, self.site.plain
        is_on = torch.is_autocast_enabled

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if is_on(device_type):  # off in a backward pass, and in what torch's own kernels call
                if not slot.repeats and may_be_repeated():
                    slot.repeats = True
                for _, act in self.acts:
                    return act(keyset, args, kwargs)
            return passed(plain, args, kwargs)

        return kernel

    def _for_several(self) -> Any:
        stock, below = self.stock, self.site.below
        is_on = torch.is_autocast_enabled

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            for marker, act in self.acts:
                if is_on(marker):
                    return act(keyset, args, kwargs)
            if stock is not None:
                return stock.call_boxed(keyset, *args, **kwargs)
            return below(keyset, args, kwargs)

        return kernel


@dataclass
class _Device:
    library: torch.library.Library = field(default_factory=lambda: torch.library.Library("aten", "IMPL"))  # type: ignore[no-untyped-call]
    sites: dict[str, _Site] = field(default_factory=dict)


@marked_constant
def reach(marker: str, on: bool = True) -> bool:
    """Makes the operations of this thread meet the kernels that have the marker's key, while the marker is on."""
    set_key_included(_KEYS[marker], on)
    return on


def may_be_repeated() -> bool:
    """Tells whether an activation checkpoint may compute again what runs now."""
    # A non-reentrant checkpoint calls its function under saved-tensor hooks, a reentrant one inside an autograd
    # function, with gradients off.
    if saved_tensor_hooks(True) is not None:
        return True
    return not torch.is_grad_enabled() and in_function(sys._getframe(1))


def autocast_key(device_type: str) -> str:
    """Returns the name of the dispatch key of autocast for a device type."""
    return f"Autocast{device_type.upper()}"


_KEYS = {marker: _key_of(autocast_key(marker)) for marker in MARKERS}


@cache
def place_of(name: str, marker: str, device_type: str) -> str:
    """Returns the name of the dispatch key under which a table with this marker registers a kernel of the op `name`."""
    key = autocast_key(marker)
    if name in _PARTS:
        return autocast_key(device_type)
    return key if keyset_after(_key_of(key)).has(_key_of(autocast_key(device_type))) else autocast_key(device_type)


class DeferringLock:
    """A reentrant lock; finalizers pass their work to `defer`, which never waits: it is done at the release."""

    # A finalizer can run at any point of any thread. If it waited for the lock, it could wait forever; in the thread
    # that holds the lock, it could change what that thread is using.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def defer(self, work: Callable[[], None]) -> None:
        """Runs `work` at once if nobody holds the lock, else just before the lock is released; never waits."""
        self._waiting.append(work)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            while self._depth == 1 and self._waiting:
                self._waiting.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()


class Registry:
    """The markers and kernels of the open engines; when the last engine closes, the dispatcher is as it was before."""

    def __init__(self) -> None:
        self._lock = DeferringLock()
        self._slots: dict[str, _Slot] = {}  # replaced, not changed: a finalizer may release while others() reads it
        self._devices: defaultdict[str, _Device] = defaultdict(_Device)  # by the key of their kernels
        self._backward: _Device | None = None
        self._passing: dict[str, Any] = {}  # by key, the library of its fallback; None where torch has one
        self._last: dict[str, Table] = {}  # which table had a marker last, in order of use
        self._fast_path = True
        self._own: list[torch.library.Library] = []  # with operations of halfstep's
        self._layers: tuple[weakref.ref[Layers], ...] = ()  # of the open sessions that have some
        self._cache_tag: Any = ""

    def acquire(self, table: Table) -> str:
        """Registers the kernels of a table; returns its marker, the device type whose autocast bit switches them on."""
        with self._lock:
            marker = self._marker(table)
            if table.emulate and table.device_type == "cpu":
                keep_freed_memory()
            if not self._slots:
                self._cache_tag, self._own = cache_tag(), [define_traced()]
                self._fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)  # it computes whole layers as it likes, autocast or not
            slot = self._slots.get(marker) or _Slot(table)
            self._slots = {**self._slots, marker: slot}
            slot.users += 1
            try:
                if slot.users == 1:
                    self._last.pop(marker, None)
                    self._last[marker] = table
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # torch says once per process that a kernel is overridden
                        self._install(marker, table)
                self._tag_caches()
            except BaseException:
                self.release(marker)
                raise
            return marker

    def release(self, marker: str) -> None:
        """Ends one engine's use of a table, which `marker` switches on; the last one to end removes its kernels."""
        with self._lock:
            slot = self._slots[marker]
            slot.users -= 1
            if slot.users:
                return
            self._slots = {other: kept for other, kept in self._slots.items() if other != marker}
            marked = set(map(autocast_key, self._slots))
            for place, device in list(self._devices.items()):
                for site in device.sites.values():
                    site.acts = tuple(pair for pair in site.acts if pair[0] != marker)
                if place not in marked and not any(site.acts for site in device.sites.values()):
                    take_kernels_out(self._devices.pop(place).library)
            if self._backward is not None and not any(other.table.widens for other in self._slots.values()):
                take_kernels_out(self._backward.library)
                self._backward = None
            self._tag_caches()
            if not self._slots:
                torch.backends.mha.set_fastpath_enabled(self._fast_path)
                for library in self._own:
                    take_kernels_out(library)

    def abandon(self, marker: str) -> None:
        """Gives back the marker of an engine that nobody has closed; called by the engine's finalizer."""
        self._lock.defer(partial(self.release, marker))

    def hold(self, layers: Layers) -> Callable[[], None]:
        """Lets products find a session's layers; returns a function that ends this."""
        held = weakref.ref(layers)
        self._layers = (*(each for each in self._layers if each() is not None), held)

        def undo() -> None:
            self._layers = tuple(each for each in self._layers if each is not held)
            layers.weights_changed()

        return undo

    def _layer_of(self, weight: Tensor) -> tuple[Layers, int] | None:
        layers = (each for held in self._layers if (each := held()) is not None)
        found = ((each, each.find(weight)) for each in sorted(layers, key=lambda each: not each.knows(weight)))
        return next(((layers, number) for layers, number in found if number is not None), None)

    def act(self, name: str, marker: str) -> tuple[Act | None, OpSite | None]:
        """Returns what a table's kernel of the op `name` does, and where it is; Nones if the table has none."""
        sites = (device.sites[name] for device in self._devices.values() if name in device.sites)
        return next(((act, site.site) for site in sites for own, act in site.acts if own == marker), (None, None))

    def repeats(self, marker: str) -> bool:
        """Returns whether a kernel of this table has run in what an activation checkpoint may compute again."""
        return self._slots[marker].repeats

    def others(self, marker: str) -> tuple[str, ...]:
        return tuple(other for other in self._slots if other != marker)

    @property
    def kernels(self) -> int:
        """The number of halfstep's kernels in the dispatcher, which every operation of the process may meet."""
        return sum(len(device.sites) for device in self._devices.values()) + (self._backward is not None)

    def _marker(self, table: Table) -> str:
        for marker, slot in self._slots.items():
            if slot.table == table:
                return marker
        here = torch.accelerator.current_accelerator(check_available=True)
        used = {*self._slots, table.device_type, None if here is None else here.type}
        free = [marker for marker in MARKERS if marker not in used]
        if not free:
            raise PlanError(
                f"{len(self._slots)} sessions with different op tables are open, which is the most that is possible; "
                "close one, or use the same level and op changes in two of them"
            )
        for last in (table, None):
            for marker in free:
                if self._last.get(marker) == last:
                    return marker
        forget_compiled()  # graphs compiled under this marker hold another table's casts
        return next(marker for marker in self._last if marker in free)  # the one that was used longest ago

    def _tag_caches(self) -> None:
        """Adds hashes of the open tables to the tag of torch.compile's disk caches."""
        tables = [f"{marker}={slot.table.digest()}" for marker, slot in sorted(self._slots.items())]
        before = self._cache_tag if isinstance(self._cache_tag, str) else ""
        set_cache_tag(",".join([before, *tables]) if tables else self._cache_tag)

    def _install(self, marker: str, table: Table) -> None:
        also, key = ALSO_EMULATED if table.emulate else (), autocast_key(marker)
        if table.products != "plan" and len(self._own) == 1:
            self._own.append(define_products(self._layer_of))
        self._let_others_pass(key)  # also where all kernels have another key: threads include the marker's
        wanted: dict[str, Action] = {**dict.fromkeys((*AS_WRITTEN, *also), "pass"), **dict(table.actions)}
        for name, action in wanted.items():
            place = place_of(name, marker, table.device_type)
            device = self._devices[place]
            site = device.sites.get(name)  # what torch's own kernel does can only be read while ours is not there
            own = stock_action(name, table.device_type) if site is None else site.own
            if action == "gather" and table.device_type != "cpu":  # other devices add up in fp32 themselves
                action = "carry" if name in CARRIED else "pass"
            emulated = table.emulate and (name in ALSO_EMULATED or name.partition(".")[0] in EMULATED)
            narrow = table.products != "plan" and name in NARROW
            registers = ":" not in name and (emulated or narrow or _deviates(name, action, own))
            # torch has kernels at the keys of MTIA and MAIA: they would switch the marker off, and cast nothing here
            if (key != place or not registers) and ":" not in name and _torch_has(f"aten::{name}", key):
                self._devices[key].library.impl(name, torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
            if not registers:
                continue
            site = site or self._register(device, name, marker, own, place)
            if site is not None:
                act = (
                    make_product(site.site.overload, table.device_type, action, _key_of(place))
                    if emulated
                    else make_act(site.site, action)
                )
                act = make_narrow(site.site, act, table.products, table.units) if narrow else act
                site.acts = (*site.acts, (marker, act))
        if table.widens and self._backward is None:
            op = FLASH_ATTENTION_CPU_BACKWARD
            kernel = uncompiled(wide_attention(torch.library.get_kernel(op, "CPU"), self._wide_backward))
            self._backward = _Device()
            self._backward.library.impl(op, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]

    def _let_others_pass(self, place: str) -> None:
        """Makes operations without a kernel at a marker's key go on to the next key, as at every key of autocast."""
        # This stays when the last engine closes, because a session may be closed inside of its own region, where the
        # key is still on.
        if place in self._passing:
            return
        key = _key_of(place)
        let_higher_order_pass(key, partial(flex_attention, key))
        library = None if has_fallback(key) else torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        if library is not None:
            library.fallback(torch.library.fallthrough_kernel, place)  # type: ignore[no-untyped-call]
        self._passing[place] = library

    def _wide_backward(self) -> WideBackward:
        """Returns pairs (head width, length), the limits within which attention runs its backward pass in fp32."""
        on = torch.is_autocast_enabled
        return next((slot.table.wide_backward for marker, slot in self._slots.items() if on(marker)), ())

    def _register(self, device: _Device, name: str, marker: str, own: Action | None, place: str) -> _Site | None:
        overload = find_overload(name)
        if overload is None:
            return None
        slot = self._slots[marker]
        alone = slot if place == autocast_key(marker) else None
        taken = alone is None and has_kernel_for(f"aten::{name}", place)
        stock = torch.library.get_kernel(overload, place) if taken else None
        site = _Site(_site_of(overload, slot.table.device_type, _key_of(place)), stock, own, alone)
        device.library.impl(name, site.kernel(), place, with_keyset=True)  # type: ignore[no-untyped-call]
        device.sites[name] = site
        return site


@cache
def find_overload(name: str) -> OpOverload | None:
    """Returns the aten overload of a name such as "softmax.int"; None if this torch has none."""
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def _deviates(name: str, action: Action, own: Action | None) -> bool:
    """Tells whether the op `name` needs a kernel of halfstep's to do `action`."""
    # `own` is what torch's autocast does to the op, None if it does nothing.
    if action == "infer" and own is None:
        return is_composite(name)
    return own == "promote" or action != (own or "pass")


REGISTRY = Registry()
"""Torch has one dispatcher per process, so there is one count of its kernels; empty while no engine is open."""
