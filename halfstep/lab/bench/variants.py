"""What a benchmark compares: a workload in a halfstep session, and the same in a plain torch.amp loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor, nn

from halfstep.errors import WorkloadError
from halfstep.formats import BF16, FP16, FP32, Format
from halfstep.initialize import initialize
from halfstep.lab.workloads.workload import Batch, Workload
from halfstep.machine import DeviceFacts, needs_emulation
from halfstep.plan.levels import customize, level
from halfstep.plan.plan import Plan
from halfstep.timing import clock_of, synchronize
from halfstep.train.session.parts import memory_of

PEER = "torch.amp"


@dataclass(frozen=True)
class End:
    """What a training run has come to so far; its lane adds the peak memory, if it was counted, and a validation."""

    skipped: int
    scale: float
    memory: dict[str, int]  # bytes held between steps: weights, masters, gradients, optimizer state
    peak: int | None = None
    validation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One row of a benchmark: a level in a format, or torch.amp in a format."""

    level: str
    low: Format
    peer: bool  # of torch.amp
    emulated: bool = False
    refused: str | None = None  # why it is not run
    compiled: bool = False  # by torch.compile
    scaled: bool = False  # the loss, dynamically, in every format
    moments: str = "full"  # how a session keeps the optimizer's averages
    products: str = "plan"  # how its linear layers multiply

    @property
    def name(self) -> str:
        """The row's name in results.

        >>> Entry("O1", FP16, peer=False, emulated=True, compiled=True).name
        'O1 fp16 (emulated) compiled'
        """
        end = "" if self.moments == "full" else f", {self.moments} moments"
        end += "" if self.products == "plan" else f", products {self.products}"
        end += f"{' scaled' if self.scaled else ''}{' compiled' if self.compiled else ''}"
        if self.low == FP32:
            return self.level + end
        return f"{self.level} {self.low}{' (emulated)' if self.emulated else ''}{end}"

    @property
    def plan(self) -> Plan:
        """The plan of a row that is no peer."""
        plan = level(self.level, "bf16" if self.low == FP32 else self.low)
        scale = "dynamic" if self.scaled else None
        return customize(plan, moments=self.moments, products=self.products, loss_scale=scale)

    def start(self, workload: Workload, seed: int, device: torch.device) -> Variant:
        model = workload.build(seed).to(device)
        if self.compiled:
            model.compile()
        if self.peer:
            return AmpVariant(workload, model, self.low, device, scaled=self.scaled)
        return SessionVariant(workload, model, self.plan)


def entries(
    levels: Iterable[str],
    lows: Iterable[Format],
    facts: DeviceFacts,
    *,
    peer: bool,
    moments: Iterable[str] = ("full",),
    products: Iterable[str] = ("plan",),
) -> list[Entry]:
    """Returns the rows of a benchmark: O0 once, then for each format the remaining levels and torch.amp.

    Each row of a level is there once for each of the `moments`; O1 and O2 in bf16 once for each of the `products`.
    """
    # In bf16 it runs on torch's own kernels.
    names, formats, kept = list(dict.fromkeys(levels)), list(dict.fromkeys(lows)), list(dict.fromkeys(moments))
    for name, low, how in product(names, formats, kept):
        customize(level(name, low), moments=how)  # raises for what does not exist
    ways = list(dict.fromkeys(products))
    for way in ways:
        customize(level("O1", BF16), products=way)
    if not names or not formats or not kept:
        raise WorkloadError(
            "a benchmark needs at least one level, format and kind of moments; pass for example --levels O0 --low bf16"
        )
    rows = [Entry("O0", FP32, peer=False)] if "O0" in names else []
    for low in formats:
        emulated = needs_emulation(low, facts)
        rows += [Entry(name, low, peer=False, emulated=emulated) for name in names if name != "O0"]
        if peer:
            why = f"{low} must be emulated on this {facts.kind}, and torch.amp cannot emulate"
            rows.append(Entry(PEER, low, peer=True, refused=why if emulated and low == FP16 else None))
    rows = [replace(row, moments=how) for row in rows for how in (("full",) if row.peer else kept)]
    eight = [row.low == BF16 and row.level in ("O1", "O2") for row in rows]
    if ways != ["plan"] and not any(eight):
        raise WorkloadError(f"products {', '.join(ways)} are those of O1 and O2 in bf16: pass --levels O2 --low bf16")
    return [
        replace(row, products=way) for row, can in zip(rows, eight, strict=True) for way in (ways if can else ["plan"])
    ]


class SessionVariant:
    """Trains in a halfstep session as the README does; only `train` is timed, `observe` follows each step."""

    def __init__(self, workload: Workload, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.optimizer = workload.optimizer(model, fused=True)
        self._workload = workload
        self._session = initialize(model, self.optimizer, plan)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Makes one training step, zeroing gradients first, and returns the loss on the device."""
        self.optimizer.zero_grad()
        loss = self._workload.loss(self.model(inputs), targets)
        self._session.backward(loss)
        self._session.step(max_norm=self._workload.max_norm)
        return loss.detach()

    def observe(self) -> None:
        """Does nothing: a session counts its skipped steps itself."""

    def end(self) -> End:
        status = self._session.status()
        return End(status.skipped, status.scales.get(0, 1.0), dict(status.memory))

    def close(self) -> None:
        self._session.close()


class AmpVariant:
    """Trains under torch.amp as torch documents it, with a fused optimizer; the loss is computed on fp32 outputs."""

    def __init__(
        self, workload: Workload, model: nn.Module, low: Format, device: torch.device, *, scaled: bool = False
    ) -> None:
        self.model = Autocast(model, device, low.dtype)
        self.optimizer = workload.optimizer(model, fused=True)
        self._workload = workload
        self._parameters = list(model.parameters())
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaled or low.needs_scale)
        self._scale = self._scaler.get_scale()
        self._skipped = 0

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Makes one training step, zeroing gradients first, and returns the loss on the device."""
        self.optimizer.zero_grad()
        loss = self._workload.loss(self.model(inputs), targets)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # Tensor.backward of torch
        if self._workload.max_norm is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._workload.max_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss.detach()

    def observe(self) -> None:
        """Counts the last step as skipped if it lowered the loss scale; only skipped steps lower the scale."""
        before, self._scale = self._scale, self._scaler.get_scale()
        self._skipped += self._scale < before

    def end(self) -> End:
        return End(self._skipped, self._scale, memory_of(self._parameters, [self.optimizer]))

    def close(self) -> None:
        """Does nothing: autocast and the GradScaler leave nothing to restore."""


Variant = SessionVariant | AmpVariant


def timed_step(variant: Variant, batch: Batch, base_lr: Sequence[float], factor: float) -> tuple[Tensor, float]:
    """Makes one training step and returns its loss and its time in milliseconds, by the clock of `clock_of`."""
    for group, lr in zip(variant.optimizer.param_groups, base_lr, strict=True):
        group["lr"] = lr * factor
    device = batch[0].device
    synchronize(device)
    clock = clock_of(device)
    start = clock()
    loss = variant.train(*batch)
    synchronize(device)
    return loss, 1e3 * (clock() - start)


class Autocast(nn.Module):
    """A model whose forward runs under torch.autocast and returns fp32."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = model
        self._device_type = device.type
        self._dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the inner model's outputs in fp32; autocast runs the operations on its list in low precision."""
        with torch.autocast(self._device_type, self._dtype):
            out: Tensor = self.inner(inputs)
        return out.float()
