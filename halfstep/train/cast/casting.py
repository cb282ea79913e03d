"""The casts of a session: in its ops, at the inputs and outputs of its modules, and in the emulation of a format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.errors import PlanError
from halfstep.formats import FP32, Format
from halfstep.machine import WideBackward
from halfstep.modes import uncompiled
from halfstep.plan.matching import enterable
from halfstep.plan.optable import effective
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import ModuleFormats
from halfstep.torch_internals import TorchDispatchMode, compiled_inside, in_backward, is_out_of_memory, makes_weights
from halfstep.train.cast.enter import Options, gated
from halfstep.train.cast.functions import patch_functions
from halfstep.train.cast.gate import Around, Casts, Gate, marking
from halfstep.train.cast.modules import CastOut, Undo, bake, holds_state, inputs_to, outputs_to
from halfstep.train.cast.narrow import HERE, MULTIPLIES, Layers
from halfstep.train.cast.opregistry import REGISTRY
from halfstep.train.cast.ops import OpEngine, Switch, Token
from halfstep.train.cast.probabilities import THREAD, Forward, Stuck, widened
from halfstep.train.cast.products import Emulation
from halfstep.train.cast.reading import read_low
from halfstep.train.cast.recipes import RECIPES, Units
from halfstep.train.cast.tree import cast_floats, map_tensors

Mode = AbstractContextManager[Any]


class Casting:
    """The casts of one session; under a plan that runs ops as written, its methods cast nothing."""

    def __init__(self, plan: Plan, device: torch.device, *, emulate: bool, wide_backward: WideBackward) -> None:
        self._plan, self._device, self._wide_backward = plan, device, wide_backward
        self._engine, self._emulation = self._made(emulate)
        self._opened, self._installed = ExitStack(), ExitStack()
        self._install: Callable[[], None] = lambda: None
        self._over: list[tuple[TorchDispatchMode, ...]] = []  # by who looks at operations
        self._around = Around()
        self._learned: tuple[dict[int, bool], Stuck] = {}, Stuck()  # of the probabilities that leave the model
        self.layers: Layers | None = None  # that multiply by a recipe
        self._as_written = 0  # how many contexts that ask for it are open

    def _made(self, emulate: bool) -> tuple[OpEngine | None, Emulation | None]:
        plan = self._plan
        emulation = Emulation(plan.low) if emulate else None  # a mode for who looks at operations
        if plan.ops != "table":
            return None, emulation
        engine = OpEngine(
            effective(plan),
            plan.low.dtype,
            self._device.type,
            () if emulate else self._wide_backward,  # emulation computes it in fp32 by itself
            emulate=emulate,
            products=plan.products,
            units=self._units(emulate),
        )
        return engine, emulation

    def _units(self, emulate: bool) -> Units:
        """Returns what multiplies operands that a recipe has rounded."""
        recipe = RECIPES.get(self._plan.products)
        if recipe is None or recipe.on is None or emulate or self._device.type != "cuda":
            return "fp32" if emulate else "bf16"
        return "own" if torch.cuda.get_device_capability(self._device) >= recipe.on else "bf16"

    def emulate(self, on: bool) -> None:
        """Emulates low-precision products from here on, or no longer; compiled code is compiled anew."""
        before = self._engine, self._emulation
        try:
            self._start_again(*self._made(on))
        except PlanError:  # there are too many op tables in this process
            self._start_again(*before)
            raise

    def _start_again(self, engine: OpEngine | None, emulation: Emulation | None) -> None:
        self._installed.close()
        self._opened.close()
        self._engine, self._emulation = engine, emulation
        self.open()
        self._install()

    @property
    def emulates(self) -> bool:
        return self._emulation is not None

    @property
    def switch(self) -> Switch | None:
        """The switch that tells whether op casting is on in a thread; None under a plan that runs ops as written."""
        return None if self._engine is None else self._engine.switch

    def open(self) -> Undo:
        """Puts the kernels and wrappers of the plan's op table in place; returns a function that removes them."""
        with ExitStack() as stack:
            if self._engine is not None:
                self._engine.open()
                stack.callback(self._engine.close)
                stack.callback(patch_functions(self._plan.op_changes, self._engine))
            self._opened = stack.pop_all()
        return lambda: self._opened.close()

    def install(
        self,
        modules: Iterable[tuple[nn.Module, ModuleFormats]],
        *,
        full: Callable[[nn.Parameter], Tensor],
        before: Callable[[], None],
        look: Callable[[Tensor], Tensor] | None,
        lent: Callable[[], Mode],
    ) -> Undo:
        """Puts a gate around the forward of each module; returns a function that removes the gates."""
        self._around.before = before
        self._install = partial(self._put_gates, list(modules), full, look, lent)
        self._install()
        return self._uninstall

    def _uninstall(self) -> None:
        self._installed.close()
        self._install, self._around.before = lambda: None, None  # which keep all modules

    def _put_gates(
        self,
        modules: Sequence[tuple[nn.Module, ModuleFormats]],
        full: Callable[[nn.Parameter], Tensor],
        look: Callable[[Tensor], Tensor] | None,
        lent: Callable[[], Mode],
    ) -> None:
        if self._engine is None:
            return
        self._around.emulating = self.emulating if self.emulates else None
        plan = self._engine.switch
        written = marking(plan)
        (layer_norm, _), (_, batch_norm) = (REGISTRY.act(name, plan.marker) for name in ("layer_norm", "batch_norm"))
        classes: dict[tuple[type, Options], type[nn.Module]] = {}
        entered: set[int] = set()  # modules inside one whose forward is entered already
        with ExitStack() as stack:
            for module, formats in modules:
                stored_low = self._plan.param == "low" and formats.door  # here or below
                own_low = formats.param is not None and formats.param is not FP32
                outside, inside, door = None, written, True
                if own_low and isinstance(module, ParametrizationList):
                    baking = partial(bake, module, full)
                    outside = Casts(nullcontext, lambda: None, lambda _: None, lambda _: None, baking)
                elif formats.boundary or formats.door:
                    own = outside = self._casts(self._engine, formats, look)
                    if not formats.boundary or id(module) in entered:
                        outside = self._casts(self._engine, _as_root(formats, self._plan), look)
                        outside.cast_out = _called_first(plan.device_type, outside.cast_out, own.cast_out)
                    outside.around = self._around
                    if formats.boundary:
                        inside = own
                        entered.update(id(each) for each in module.modules())
                    by_recipe = None
                    if formats.products is not None and formats.compute is not FP32:
                        by_recipe = formats.products == self._plan.products
                        inside, outside = (multiplying(by_recipe, each, module) for each in (inside, outside))
                    door = not formats.boundary and by_recipe is None
                elif not holds_state(module) or not enterable(module):  # else copied and saved like the others
                    continue
                how = Options(
                    plan,
                    door=outside is not None and door,
                    explains=stored_low or own_low,
                    at_call=makes_weights(module),
                    reads=read_low(module, formats),
                    layer_norm=None if formats.boundary else layer_norm,
                    batch_norm=None if formats.boundary else batch_norm,
                )
                gate = Gate(plan, full, lent, outside, inside, asks=not formats.boundary)
                stack.callback(gated(module, gate, how, classes))
            self._installed = stack.pop_all()

    def _casts(self, engine: OpEngine, formats: ModuleFormats, look: Callable[[Tensor], Tensor] | None) -> Casts:
        low = formats.compute is not FP32

        def enter(token: Token) -> None:
            engine.enter(token, enabled=low and not self._as_written)

        casts = Casts(
            region=lambda: engine.region(enabled=low and not self._as_written),
            read=engine.read,
            enter=enter,
            leave=engine.leave,
            cast_in=None if formats.input is None else inputs_to(formats.input.dtype),
            cast_out=_cast_out(formats, look),
        )
        return keeping(self._learned, casts) if low and formats.output is FP32 else casts

    def hold(self, layers: Layers) -> Undo:
        """Takes the layers that multiply by a recipe; returns a function that lets them go."""
        self.layers = layers
        return REGISTRY.hold(layers)

    def emulating(self) -> Mode:
        """Returns a context in which each emulated product is one operation, while somebody looks at operations."""
        if self._emulation is None:
            return nullcontext()
        return uncompiled(self._emulation, *chain(*self._over)) if self._over else _telling_of_copies(self._plan.low)

    def region(self) -> Mode:
        """Returns a context in which ops run as the plan's table says."""
        if self._engine is None:
            return nullcontext()
        if self._around.begin is not None:
            self._around.begin()
        open_region = self._engine.region if torch.compiler.is_compiling() else self._engine.entered
        region = open_region(not self._as_written)
        return self._emulated(region) if self._over else region

    @contextmanager
    def _emulated(self, region: Mode) -> Iterator[None]:
        with region, self.emulating():
            yield

    @property
    def is_as_written(self) -> bool:
        return self._as_written > 0

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Returns a context without the plan's casts: ops run in the formats of their inputs."""
        if self._engine is None:
            yield
            return
        self._as_written += 1
        try:
            with self._engine.region(enabled=False):
                yield
        finally:
            self._as_written -= 1

    def backward(self) -> Mode:
        """Returns a context for one backward pass, in which the op table and the emulation (if there is one) act."""
        # The op table is needed because activation checkpoints repeat parts of the forward in the backward pass.
        region = nullcontext() if self._engine is None else self._engine.backward()
        return region if self._emulation is None else self._emulated(region)

    def weights_changed(self) -> None:
        """Drops the low copies of weights that autocast keeps for reuse."""
        if self._engine is not None:
            torch.clear_autocast_cache()
        if self.layers is not None:
            self.layers.weights_changed()

    @contextmanager
    def over_emulation(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """A context in which emulation runs as its mode, with `modes` above it; may end in any order."""
        self._over.append(modes)
        try:
            yield
        finally:
            self._over.remove(modes)

    @contextmanager
    def before_forwards(self, begin: Callable[[], None]) -> Iterator[None]:
        """A context in which `begin` is called before each `region` and uncompiled forward of the plan."""
        own, self._around.begin = self._around.begin, begin
        try:
            yield
        finally:
            self._around.begin = own

    def before_training(self, before: Callable[[], None]) -> None:
        """Calls `before` from now on where `install` said to call another function."""
        self._around.before = before


@contextmanager
def _telling_of_copies(low: Format) -> Iterator[None]:
    """Returns a context in which an error about memory says that products are emulated, and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        why = (
            f"products in {low} are emulated here, with fp32 copies of their operands: use a smaller batch, or pass "
            "emulate=False for torch's own kernels, which are slow and need no copies"
        )
        if is_out_of_memory(error) and why not in str(error):
            error.args = (f"{error} ({why})", *error.args[1:])
        raise


def keeping(learned: tuple[dict[int, bool], Stuck], casts: Casts) -> Casts:
    """Returns the casts around a forward in which is kept how to compute its probabilities again in fp32."""

    def read() -> Any:
        return THREAD.now, Forward(*learned, sys._getframe(1).f_code), casts.read()

    def enter(token: Any) -> None:
        THREAD.now = token[1]
        casts.enter(token[2])

    def leave(token: Any) -> None:
        casts.leave(token[2])
        THREAD.now, THREAD.ended, _ = token

    return replace(casts, read=read, enter=enter, leave=leave)


def multiplying(by_recipe: bool, casts: Casts, layer: nn.Module) -> Casts:
    """Returns the casts around the forward of a linear layer, with products by a recipe or not."""
    is_on, turn = torch.is_autocast_enabled, torch.set_autocast_enabled

    def read() -> Any:
        return casts.read(), is_on(MULTIPLIES), HERE.layer

    def enter(token: Any) -> None:
        casts.enter(token[0])
        turn(MULTIPLIES, by_recipe)
        HERE.layer = layer

    def leave(token: Any) -> None:
        HERE.layer = token[2]
        turn(MULTIPLIES, token[1])
        casts.leave(token[0])

    @contextmanager
    def region() -> Iterator[None]:
        """Enters both; without a docstring torch 2.15 cannot compile it on Python 3.14."""
        with casts.region(), TorchAutocast(MULTIPLIES, enabled=by_recipe):
            yield

    return replace(casts, region=region, read=read, enter=enter, leave=leave)


def _as_root(formats: ModuleFormats, plan: Plan) -> ModuleFormats:
    """Returns a module's formats for calls from outside of the model's forward."""
    output = None if plan.output == "keep" else FP32 if plan.output == "full" else plan.low
    takes = formats.input if formats.boundary else plan.low if plan.input == "low" else None
    return replace(formats, input=takes, output=output)


def _called_first(device_type: str, cast: CastOut | None, again: CastOut | None) -> CastOut | None:
    """Returns an output cast for a module that is called from outside of the model's forward."""
    # Autocast alone is not enough, because a caller outside of the model may have switched it on.
    if cast is None and again is None:
        return None

    def cast_out(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        repeated = torch.is_autocast_enabled(device_type) and not torch.compiler.is_compiling() and in_backward()
        chosen = again if repeated else cast
        return out if chosen is None else chosen(out, args, kwargs)

    return compiled_inside(cast_out)


def _cast_out(formats: ModuleFormats, look: Callable[[Tensor], Tensor] | None) -> CastOut | None:
    if formats.output is not FP32:
        return None if formats.output is None else outputs_to(formats.output)

    def cast(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast_floats(widened(out if look is None else map_tensors(look, out)), torch.float32)

    return compiled_inside(cast)
