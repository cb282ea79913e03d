"""A training step inside each trainer: halfstep's adapter against the loop by hand, and against the trainer's own bf16.

    python benchmarks/trainers_cost.py [--rounds 20] [--level O2] [--low bf16] [--set d=64] [--json FILE]

Needs the extra [trainers]. The GPT of char_lm; a step is forward, loss, backward, clip, update of AdamW(fused=True).
Every row is a process of its own, as trainers keep state of a process and an open session slows torch.autocast beside
it. A trainer asks for a batch when the step before is made, and waits there until it is the row's turn again: one step
is from one request to the next, and every row takes a turn in each round, another first in each. Ratios are those of
one round.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from halfstep.lab.workloads.char_lm import CharLM
from halfstep.machine import read_machine
from halfstep.timing import spread
from halfstep.train.cast.opregistry import REGISTRY

WARM_UP = 3
HAND = "halfstep by hand"
Batches = Iterator[dict[str, Tensor]]


@dataclass(frozen=True)
class Job:
    """What every row trains, and how."""

    workload: CharLM
    level: str
    low: str


class Language(nn.Module):
    """A model that returns its loss, as Hugging Face's Trainer wants it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.gpt = job, job.workload.build(0)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the mean loss of a batch."""
        return {"loss": self.job.workload.loss(self.gpt(inputs), labels)}


def parts(job: Job) -> tuple[Language, torch.optim.Optimizer, float]:
    """Returns the model, its optimizer and what gradients are clipped to."""
    model = Language(job)
    assert job.workload.max_norm is not None
    return model, job.workload.optimizer(model, fused=True), job.workload.max_norm


def by_hand(job: Job, batches: Batches) -> None:
    """Trains by the loop that a user of halfstep writes who clips as trainers do."""
    import halfstep

    model, optimizer, max_norm = parts(job)
    session = halfstep.initialize(model, optimizer, job.level, low=job.low)
    for batch in batches:
        session.backward(model(**batch)["loss"])
        session.unscale_()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        session.step()
        optimizer.zero_grad()


def by_lightning(job: Job, batches: Batches, *, own: bool) -> None:
    """Trains inside Lightning."""
    import lightning

    from halfstep.adapters.lightning import Halfstep

    model, optimizer, max_norm = parts(job)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            if own:  # Lightning's own plugin refuses fused optimizers, as it would for a GradScaler
                nn.utils.clip_grad_norm_(self.parameters(), max_norm)
            else:
                super().configure_gradient_clipping(optimizer, *args, **kwargs)

    way: dict[str, Any] = {"precision": "bf16-mixed"} if own else {"plugins": [Halfstep(job.level, low=job.low)]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, enable_checkpointing=False, gradient_clip_val=max_norm, **quiet, **way
    )
    trainer.fit(Module(), loader(batches))


def by_fabric(job: Job, batches: Batches, *, own: bool) -> None:
    """Trains by the loop that a user of Fabric writes."""
    import lightning

    from halfstep.adapters.lightning import Halfstep

    model, optimizer, max_norm = parts(job)
    if own:
        fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
        wrapped, stepped = fabric.setup(model, optimizer)
    else:
        plugin = Halfstep(job.level, low=job.low)
        fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
        wrapped, stepped = plugin.setup(fabric, model, optimizer)
    for batch in batches:
        fabric.backward(wrapped(**batch)["loss"])
        fabric.clip_gradients(wrapped, stepped, max_norm=max_norm, error_if_nonfinite=False)
        stepped.step()
        stepped.zero_grad()


def by_accelerate(job: Job, batches: Batches, *, own: bool) -> None:
    """Trains by the loop that a user of Accelerate writes."""
    from accelerate import Accelerator

    from halfstep.adapters.accelerate import prepare

    model, optimizer, max_norm = parts(job)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if own else "no")
    if own:
        wrapped, stepped = accelerator.prepare(model, optimizer)
    else:
        wrapped, stepped = prepare(accelerator, model, optimizer, plan=job.level, low=job.low)
    for batch in batches:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch)["loss"])
            accelerator.clip_grad_norm_(wrapped.parameters(), max_norm)
            stepped.step()
            stepped.zero_grad()


def by_transformers(job: Job, batches: Batches, *, own: bool) -> None:
    """Trains inside Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from halfstep.adapters.transformers import HalfstepMixin

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader(batches)

    class FedByHalfstep(HalfstepMixin, Fed):
        pass

    model, optimizer, max_norm = parts(job)
    with tempfile.TemporaryDirectory() as folder:
        common = {"max_steps": sys.maxsize, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(
            folder, use_cpu=True, bf16=own, optim="adamw_torch_fused", max_grad_norm=max_norm, **common
        )
        if own:
            Fed(model, arguments, optimizers=(optimizer, None)).train()
        else:
            way = {"plan": job.level, "halfstep": {"low": job.low}}
            FedByHalfstep(model, arguments, optimizers=(optimizer, None), **way).train()


def loader(batches: Batches) -> Any:
    """Returns a DataLoader of batches that are made already."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Batches:
            return batches

    return torch.utils.data.DataLoader(Stream(), batch_size=None)


TRAINERS: dict[str, Callable[..., None]] = {
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
    "Trainer": by_transformers,
}


def turns(job: Job, connection: Connection, *, own: bool = False) -> Batches:
    """Yields a batch when it is the row's turn, and sends how long the step took, in seconds.

    In the process of a trainer's `own` bf16 no session may be open.
    """
    connection.send(None)
    connection.recv()
    for inputs, labels in job.workload.batches(0):
        start = perf_counter()
        yield {"inputs": inputs, "labels": labels}
        connection.send(perf_counter() - start)
        assert not (own and REGISTRY.kernels), "a session is open in the process of a peer"
        connection.recv()


def train(job: Job, trainer: str | None, own: bool, threads: int, connection: Connection) -> None:
    """Trains one row, in a process of its own, until that is ended."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    batches = turns(job, connection, own=own)
    if trainer is None:
        by_hand(job, batches)
    else:
        TRAINERS[trainer](job, batches, own=own)


def measure(job: Job, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each row's steps."""
    rows: dict[str, tuple[str | None, bool]] = {HAND: (None, False)}
    for trainer in TRAINERS:
        rows |= {f"{trainer}, halfstep": (trainer, False), f"{trainer}, bf16": (trainer, True)}
    context = multiprocessing.get_context("spawn")
    started = {}
    try:
        for name, (trainer, own) in rows.items():
            here, there = context.Pipe()
            arguments = (job, trainer, own, torch.get_num_threads(), there)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            there.close()  # so that a process that ends is seen
            started[name] = process, here
        for _, connection in started.values():
            connection.recv()  # it is ready
        times: dict[str, list[float]] = {name: [] for name in rows}
        names = list(started)
        for turn in range(WARM_UP + rounds):
            first = turn % len(names)  # so that no row always has the same one before it
            for name in names[first:] + names[:first]:
                _, connection = started[name]
                connection.send(None)
                took = connection.recv()
                if turn >= WARM_UP:
                    times[name].append(took)
    except EOFError:
        raise SystemExit("a row ended before its last step, see above") from None
    finally:
        for process, _ in started.values():
            process.kill()  # Lightning would end its run first
    return times


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--low", default="bf16")
    parser.add_argument("--set", action="append", default=[], help="a setting of the workload, such as d=64")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    sizes = {name: int(value) for name, value in (each.split("=") for each in options.set)}
    times = measure(Job(CharLM(**sizes), options.level, options.low), options.rounds)

    def ratio(name: str, peer: str) -> float:
        return median(a / b for a, b in zip(times[name], times[peer], strict=True))

    rows: dict[str, dict[str, Any]] = {}
    table = Table("row", "ms per step (quartiles)", "time x by hand", "time x the trainer's own bf16")
    for name, seconds in times.items():
        trainer, _, way = name.partition(", ")
        versus = {"time_x_by_hand": ratio(name, HAND) if way != "bf16" else None}
        versus["time_x_own_bf16"] = ratio(name, f"{trainer}, bf16") if way == "halfstep" else None
        s = spread([each * 1e3 for each in seconds])
        rows[name] = {"ms": asdict(s), **versus}
        ratios = ["" if each is None else f"{each:.3f}" for each in versus.values()]
        table.add_row(name, f"{s.median:.1f} ({s.low:.1f}-{s.high:.1f})", *ratios)
    Console().print(table)
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
