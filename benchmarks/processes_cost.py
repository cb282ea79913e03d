"""What `session.step()` takes in two processes, under DDP and FSDP2: against torch's own clip and fused step.

    python benchmarks/processes_cost.py [--rounds 60] [--set d=64] [--json FILE]

Two processes of gloo, one thread each, train the GPT of char_lm with AdamW(fused=True). In each round every row makes a
forward and backward pass of its own. Then both processes meet and make the step, which alone is timed, until the later
of them has made it: `clip_grad_norm_` and `optimizer.step()`, or `session.step(max_norm=...)`. Under FSDP2 all rows
gather in bf16 and hold the same fp32 shards and gradients. Ratios are those of one round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.lab.workloads.char_lm import GPT, CharLM
from halfstep.machine import read_machine
from halfstep.timing import spread

PROCESSES, WARM_UP, LOW = 2, 5, "bf16"
ENGINES, LEVELS = ("DDP", "FSDP2"), ("O1", "O2")


@dataclass(frozen=True)
class Row:
    """A model that is trained one way."""

    loss: Callable[[Tensor, Tensor], Tensor]
    zero_grad: Callable[[], None]
    backward: Callable[[Tensor], None]
    step: Callable[[], object]


def sharded(model: GPT, level: str) -> GPT:
    """Returns the model as FSDP2 shards it, gathered as a level wants it."""
    policy = halfstep.fsdp_policy(level, low=LOW)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def row(job: CharLM, engine: str, level: str | None) -> Row:
    """Returns a model in training at a level, by torch alone where there is none."""
    model = job.build(0)
    assert isinstance(model, GPT)
    assert job.max_norm is not None
    if engine == "FSDP2":
        model = sharded(model, level or LEVELS[0])
    optimizer = job.optimizer(model, fused=True)
    if level is not None:
        session = halfstep.initialize(model, optimizer, level, low=LOW)
    called: nn.Module = DistributedDataParallel(model) if engine == "DDP" else model

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return job.loss(called(inputs).float(), targets)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, job.max_norm)
        optimizer.step()

    if level is None:
        parameters = list(model.parameters())
        return Row(loss, optimizer.zero_grad, Tensor.backward, step)
    return Row(loss, optimizer.zero_grad, session.backward, partial(session.step, max_norm=job.max_norm))


def measure(job: CharLM, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each row's steps in this process."""
    rows = {f"{engine} {level or 'torch'}": row(job, engine, level) for engine in ENGINES for level in (None, *LEVELS)}
    times: dict[str, list[float]] = {name: [] for name in rows}
    batches = job.batches(dist.get_rank())
    for turn in range(WARM_UP + rounds):
        inputs, targets = next(batches)
        for name, made in rows.items():
            made.zero_grad()
            made.backward(made.loss(inputs, targets))
            dist.barrier()
            start = perf_counter()
            made.step()
            if turn >= WARM_UP:
                times[name].append(perf_counter() - start)
    return times


def work(rank: int, folder: str, job: CharLM, rounds: int) -> None:
    """Measures in one of the processes; the first writes how long all of them took together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    own = measure(job, rounds)
    found: list[dict[str, list[float]]] = [{}] * PROCESSES
    dist.all_gather_object(found, own)
    if rank == 0:
        later = {name: [max(each) for each in zip(*(mine[name] for mine in found), strict=True)] for name in own}
        Path(folder, "times.json").write_text(json.dumps(later), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], help="a setting of the workload, such as d=64")
    parser.add_argument("--json", type=Path, help="write every figure, with machine and versions, to this file")
    options = parser.parse_args()
    settings = {"batch": 2, "length": 32} | {
        name: int(value) for name, value in (each.split("=") for each in options.set)
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, CharLM(**settings), options.rounds)
        torch.multiprocessing.spawn(work, args=arguments, nprocs=PROCESSES)  # type: ignore[attr-defined, no-untyped-call]
        times = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    rows: dict[str, dict[str, object]] = {}
    table = Table("step", "ms (quartiles)", "time x torch's", title=f"{PROCESSES} processes, {options.rounds} rounds")
    for name, seconds in times.items():
        peer = times[f"{name.partition(' ')[0]} torch"]
        ratio = median(a / b for a, b in zip(seconds, peer, strict=True))
        s = spread([each * 1e3 for each in seconds])
        rows[name] = {"ms": asdict(s), "time_x_torch": ratio}
        table.add_row(name, f"{s.median:.2f} ({s.low:.2f}-{s.high:.2f})", f"{ratio:.3f}")
    Console().print(table)
    if options.json is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(read_machine(torch.device("cpu"))),
            "settings": settings,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
