"""The optimizer step alone, from gradients that are there to low weights: halfstep against torch's parts.

    python benchmarks/optimizer_step.py                      # 50 million parameters on a CPU, 1 billion on a GPU
    python benchmarks/optimizer_step.py --device cuda --json benchmarks/results/optimizer_step-h200.json

halfstep runs as users run it: `halfstep.initialize`, a backward, `session.step`. The gradients of that backward are
replaced by prepared ones, of four batches in turn, and `session.step` alone is timed: the read of the gradients for
norm and overflow, the update, the weights in low, the new scale. Both halfstep and its peers unscale. All rows take a
turn in each round, and the ratios are those of one round. The floor is the fewest bytes that a row's kind of step can
move (gradients read twice, as the update must know whether it may happen) over the bandwidth of a copy, or of a pass
in place where that is higher, measured in the same rounds. (On a CPU a copy reads the lines that it writes; a pass in
place does not.)
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.machine import read_machine
from halfstep.timing import speedup, spread
from halfstep.train.optim.implementations import IMPLEMENTATIONS
from halfstep.train.scale.norm import READERS

LR, DECAY, MAX_NORM, SCALE = 1e-4, 0.01, 1.0, 1024.0
SMALL, BILLION = 50_000_000, 1_000_000_000
WARMUP = 2
BATCHES = 4  # with one, a mean of squares is one square, which differs in a group as no batches' mean does
PARTS = "parts"
# Bytes read and written a parameter, of them twice what a low gradient has: torch's as its kernels are, ours the floor.
BYTES = {"split": 28, "bf16 moments": 20, "8bit moments": 16, "copy": 30, "full": 32}
BYTES |= {PARTS: 48, "foreach": 100, "GradScaler": 46, "torchao": 14}
KINDS = ("split", "bf16 moments", "8bit moments", "copy", "full")
CLIP_BYTES = {PARTS: 12, "foreach": 12, "GradScaler": 12}
AHEAD_CYCLES = 20_000_000  # some 10 ms in which a GPU waits while the host queues the step, as in training


@dataclass
class Row:
    """One way to make a step: `prepare` is not timed, `run` is."""

    name: str
    kind: str
    clip: bool
    prepare: Callable[[], None]
    run: Callable[[], None]
    memory: Callable[[], float]
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def peer(self) -> str:
        """The row that this one is compared with."""
        return f"{PARTS} + clip" if self.clip else PARTS

    @property
    def bytes(self) -> int:
        """Bytes that a step of this kind moves, a parameter."""
        return BYTES[self.kind] + (CLIP_BYTES.get(self.kind, 0) if self.clip else 0)


class Transformer(nn.Module):
    """The weights of a GPT of about `numel` parameters; only the anchor takes part in a backward."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        d = next(width for width, most in ((16, 1e4), (64, 1e6), (512, 2e8), (2048, float("inf"))) if numel <= most)
        layers = max(1, round(0.8 * numel / (12 * d * d)))
        rows = max(1, (numel - layers * 12 * d * d) // d)
        with torch.device(device):
            self.embedding = nn.Embedding(rows, d)
            self.blocks = nn.ModuleList(
                nn.ModuleList(
                    [nn.LayerNorm(d), *(nn.Linear(*ends) for ends in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)))]
                )
                for _ in range(layers)
            )
            self.anchor = nn.Parameter(torch.zeros(1))


class Lane(ABC):
    """Weights, gradients and state of one way to train, and the calls that step them."""

    kind: str

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yields the rows that use this lane."""


class Halfstep(Lane):
    """A session at O2 with a split or copied master, or at O1, whose weights are full."""

    def __init__(self, kind: str, numel: int, device: torch.device) -> None:
        self.kind = kind
        torch.manual_seed(0)
        self._model = Transformer(numel, device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=DECAY)
        width, moments, _ = kind.partition(" moments")
        options: dict[str, Any] = {"moments": width} if moments else {} if kind == "full" else {"master": kind}
        self._session = halfstep.initialize(
            self._model,
            self._optimizer,
            halfstep.level("O1" if kind == "full" else "O2", "bf16"),
            loss_scale=halfstep.Scaling("dynamic", init=SCALE),
            **options,
        )
        self._params = list(self._model.parameters())
        batches = [[gradient(p.shape, p.dtype, device) for p in self._params] for _ in range(BATCHES)]
        self._grads = cycle(batches)

    def rows(self) -> Iterator[Row]:
        """Yields a row for each implementation of the table that takes such weights here, with and without clipping."""
        for implementation in IMPLEMENTATIONS:
            with only(implementation):
                self._prepare()
                try:
                    self._session.step()
                except StopIteration:  # it is of another device
                    continue
            for clip in (False, True):
                name = f"halfstep {self.kind} {implementation}{' + clip' if clip else ''}"
                yield Row(name, self.kind, clip, self._prepare, self._step(implementation, clip), self._memory)

    def _prepare(self) -> None:
        self._optimizer.zero_grad()
        self._session.backward(self._model.anchor.sum())
        for param, grad in zip(self._params, next(self._grads), strict=True):
            if param is not self._model.anchor:
                param.grad = grad

    def _step(self, implementation: str, clip: bool) -> Callable[[], None]:
        def step() -> None:
            with only(implementation):
                self._session.step(max_norm=MAX_NORM if clip else None)

        return step

    def _memory(self) -> float:
        return sum(self._session.status().memory.values()) / sum(p.numel() for p in self._params)


@contextmanager
def only(implementation: str) -> Iterator[None]:
    """Leaves one implementation of the update, and the read that goes with it, in halfstep's tables."""
    tables = ((IMPLEMENTATIONS, (implementation,)), (READERS, (implementation, "torch")))
    kept = [dict(table) for table, _ in tables]
    for table, names in tables:
        for other in [key for key in table if key not in names]:
            del table[other]
    try:
        yield
    finally:
        for (table, _), rows in zip(tables, kept, strict=True):
            table.clear()
            table.update(rows)


class Parts(Lane):
    """bf16 weights with an fp32 copy, stepped by torch's parts: gradients up, unscale and check, AdamW, weights down.

    On a skip a fused AdamW does nothing by itself; foreach's must be told by the host.
    """

    def __init__(self, numel: int, device: torch.device, *, fused: bool) -> None:
        self.kind = PARTS if fused else "foreach"
        self._fused = fused
        torch.manual_seed(0)
        self._masters = list(Transformer(numel, device).parameters())
        self._weights = [p.detach().bfloat16() for p in self._masters]
        self._low_grads = [gradient(p.shape, torch.bfloat16, device) for p in self._masters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._grads = [master.grad for master in self._masters if master.grad is not None]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=LR, weight_decay=DECAY, fused=fused or None, foreach=not fused or None
        )
        self._inverse = torch.full((), 1 / SCALE, device=device)
        self._found = torch.zeros((), device=device)
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._optimizer.found_inf = self._found if fused else None  # type: ignore[attr-defined]

    def rows(self) -> Iterator[Row]:
        """Yields the step with and without `clip_grad_norm_`."""
        for clip in (False, True):
            yield Row(
                f"{self.kind}{' + clip' if clip else ''}", self.kind, clip, nothing, self._step(clip), self._memory
            )

    @torch.no_grad()
    def _update(self, clip: bool) -> None:
        torch._foreach_copy_(self._grads, self._low_grads)
        self._found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(self._grads, self._found, self._inverse)
        if clip:
            nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        if self._fused or not self._found.item():
            self._optimizer.step()
        torch._foreach_copy_(self._weights, self._masters)

    def _step(self, clip: bool) -> Callable[[], None]:
        return lambda: self._update(clip)

    def _memory(self) -> float:
        return held_bytes([*self._masters, *self._weights, *self._low_grads, *self._grads], self._optimizer)


class Scaler(Lane):
    """fp32 weights and gradients under torch.amp: GradScaler, a fused AdamW, and autocast's cast of every weight."""

    kind = "GradScaler"

    def __init__(self, numel: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._params = list(Transformer(numel, device).parameters())
        self._grads = [gradient(p.shape, torch.float32, device) for p in self._params]
        self._optimizer = torch.optim.AdamW(self._params, lr=LR, weight_decay=DECAY, fused=True)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=2**30)
        self._scaler.scale(torch.ones((), device=device))
        self._low: list[Tensor] = []

    def rows(self) -> Iterator[Row]:
        """Yields the step with and without `unscale_` and `clip_grad_norm_`."""
        for clip in (False, True):
            name = f"GradScaler{' + clip' if clip else ''}"
            yield Row(name, self.kind, clip, self._prepare, self._step(clip), self._memory)

    def _prepare(self) -> None:  # the scale is 1, as the kernels write unscaled gradients back
        self._low.clear()
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad

    def _step(self, clip: bool) -> Callable[[], None]:
        def step() -> None:
            if clip:
                self._scaler.unscale_(self._optimizer)
                nn.utils.clip_grad_norm_(self._params, MAX_NORM)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._low = [param.detach().bfloat16() for param in self._params]

        return step

    def _memory(self) -> float:
        return held_bytes([*self._params, *self._grads, *self._low], self._optimizer)


class Torchao(Lane):
    """torchao's AdamW on bf16 weights alone, rounded at random, with bf16 state: half the bytes, no norm, no check."""

    kind = "torchao"

    def __init__(self, numel: int, device: torch.device) -> None:
        from torchao.optim import _AdamW  # type: ignore[import-not-found]  # where it is installed

        torch.manual_seed(0)
        self._params = [nn.Parameter(p.detach().bfloat16()) for p in Transformer(numel, device).parameters()]
        self._optimizer = _AdamW(self._params, lr=LR, weight_decay=DECAY, bf16_stochastic_round=True)
        for param in self._params:
            param.grad = gradient(param.shape, torch.bfloat16, device)

    def rows(self) -> Iterator[Row]:
        """Yields the step without clipping."""
        yield Row("torchao bf16", self.kind, False, nothing, self._optimizer.step, self._memory)

    def _memory(self) -> float:
        return held_bytes([*self._params, *(p.grad for p in self._params if p.grad is not None)], self._optimizer)


def nothing() -> None:
    """Prepares nothing."""


def gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns random gradients."""
    return torch.randn(shape, device=device).to(dtype)


def held_bytes(tensors: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Returns the bytes of tensors and optimizer state per parameter."""
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return sum(t.nbytes for t in [*tensors, *states]) / numel


class Clock:
    """Times calls: on a GPU by its own clock, with the host ahead of it, elsewhere by the host's."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def time(self, call: Callable[[], object]) -> float:
        """Returns the milliseconds of a call."""
        if not self._cuda:
            start = perf_counter()
            call()
            return 1e3 * (perf_counter() - start)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        start_event.record()
        call()
        end_event.record()
        torch.cuda.synchronize()
        return float(start_event.elapsed_time(end_event))


def build(numel: int, device: torch.device) -> tuple[list[Row], dict[str, str]]:
    """Returns the rows, and by name why some could not be built."""
    makers: dict[str, Callable[[], Lane]] = {
        "parts": lambda: Parts(numel, device, fused=True),
        "foreach": lambda: Parts(numel, device, fused=False),
        "GradScaler": lambda: Scaler(numel, device),
        "torchao bf16": lambda: Torchao(numel, device),
        **{f"halfstep {kind}": (lambda kind=kind: Halfstep(kind, numel, device)) for kind in KINDS},
    }
    rows: list[Row] = []
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            rows += make().rows()
        except Exception as error:  # the other rows go on
            absent[name] = f"{type(error).__name__}: {error}"
        gc.collect()
    return rows, absent


def measure(rows: list[Row], rounds: int, numel: int, device: torch.device) -> Iterator[dict[str, float]]:
    """Times every row once a round, from another one on each time; yields the bandwidths of memory in bytes a ms."""
    clock = Clock(device)
    size = 2**26 if device.type == "cpu" else 2**29
    source = torch.ones(min(size, max(2**20, numel)), device=device)
    target = torch.empty_like(source)
    passes: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "in place": lambda: source.mul_(1.0),
    }
    took: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(WARMUP + rounds):
        for name, call in passes.items():
            took[name].append(clock.time(call))
        running = [row for row in rows if row.error is None]
        start = turn % max(1, len(running))
        for row in running[start:] + running[:start]:
            try:
                row.prepare()
                row.times.append(clock.time(row.run))
            except Exception as error:  # the other rows go on
                row.error = f"{type(error).__name__}: {error}"
        if turn + 1 == WARMUP:
            for row in rows:
                row.times.clear()
        elif turn >= WARMUP:
            yield {name: 2 * source.nbytes / median(times[WARMUP:]) for name, times in took.items()}


def records(rows: list[Row], numel: int, bandwidths: dict[str, float]) -> list[dict[str, Any]]:
    """Returns the figures of each row."""
    by_name = {row.name: row.times for row in rows}
    made: list[dict[str, Any]] = []
    for row in rows:
        taken = spread(row.times)
        moved = numel * row.bytes
        floor = moved / max(bandwidths.values())
        made.append(
            {
                "name": row.name,
                "kind": row.kind,
                "clip": row.clip,
                "error": row.error,
                "ms": None if taken is None else asdict(taken),
                "times_ms": [round(value, 4) for value in row.times],
                "peer": row.peer,
                "vs_peer": speedup(by_name.get(row.peer, []), row.times),
                "bytes_moved": row.bytes,
                "floor_ms": floor,
                "vs_floor": None if taken is None else taken.median / floor,
                "of_copy_bandwidth": None if taken is None else moved / taken.median / bandwidths["copy"],
                "bytes_held": None if row.error else row.memory(),
            }
        )
    return made


def table(made: list[dict[str, Any]]) -> str:
    """Returns the figures as text in columns."""
    header = ("step", "ms (quartiles)", "x peer", "peer", "bytes", "floor ms", "x floor", "% of copy", "bytes held")
    lines = [header]
    for row in made:
        ms = row["ms"]
        if row["error"] or ms is None:
            lines.append((row["name"], f"failed: {row['error']}"[:60], *("-" for _ in header[2:])))
            continue
        lines.append(
            (
                row["name"],
                f"{ms['median']:.2f} ({ms['low']:.2f}-{ms['high']:.2f})",
                "-" if row["vs_peer"] is None else f"{row['vs_peer']:.2f}",
                row["peer"],
                str(row["bytes_moved"]),
                f"{row['floor_ms']:.2f}",
                f"{row['vs_floor']:.2f}",
                f"{100 * row['of_copy_bandwidth']:.0f}",
                f"{row['bytes_held']:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    """Measures, prints the table, and returns the exit code: 1 where a row of halfstep's failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, help="parameters (default: 50 million on a CPU, 1 billion on a GPU)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", default="", help="only rows whose name contains one of these, separated by commas")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # which would warn that gradients are replaced
    device = torch.device(options.device)
    size = options.numel or (SMALL if device.type == "cpu" else BILLION)
    numel = sum(p.numel() for p in Transformer(size, torch.device("meta")).parameters())
    rows, absent = build(size, device)
    wanted = [text for text in options.rows.split(",") if text]
    rows = [row for row in rows if not wanted or row.kind == PARTS or any(text in row.name for text in wanted)]
    machine = read_machine(device)
    result = {
        "benchmark": "optimizer_step",
        "parameters": numel,
        "absent": absent,
        "machine": asdict(machine),
        "command": shlex.join(["python", "benchmarks/optimizer_step.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    for rounds, bandwidths in enumerate(measure(rows, options.rounds, numel, device), start=1):
        made = records(rows, numel, bandwidths)
        result |= {"rounds": rounds, "gb_s": {name: value / 1e6 for name, value in bandwidths.items()}, "rows": made}
        if options.json is not None:  # after each, so that what is there stays when the time is up
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    memory = ", ".join(f"{name} {value / 1e6:.1f} GB/s" for name, value in bandwidths.items())
    print(f"{numel:,} parameters on {machine.device}, {options.rounds} rounds; memory: {memory}")
    print(table(made))
    for name, why in absent.items():
        print(f"{name}: not measured ({why})")
    failed = [row.name for row in rows if row.error] + [name for name in absent if name.startswith("halfstep")]
    return int(any(name.startswith("halfstep") for name in failed))


if __name__ == "__main__":
    sys.exit(main())
