"""Calls that all processes of a group make together, what a step sums, and errors that name who is gone."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from halfstep.errors import SessionError, SetupError
from halfstep.machine import DeviceFacts
from halfstep.pages import PROCESSES, more
from halfstep.sharded import is_sharded
from halfstep.torch_internals import default_store, is_lost_connection
from halfstep.train.processes.shards import group_is_open, group_of, reshard, sharded_parameters

T = TypeVar("T")
ROLL_CALL = 5.0  # seconds
_OPENINGS = count()
_PROCESSOR = "halfstep/processor"
LOSSES = 64  # flags for losses in the sum: one for each `loss_id` below 63, and the last
NOT_FINITE = -1  # the place of the last: whether a loss was not finite itself, whichever it was
SCALE_BITS, WEIGHT_BITS = 32, 19  # of what processes are compared by


@contextmanager
def naming_who_is_gone(
    group: dist.ProcessGroup | None, what: str = "halfstep.initialize", meeting: str = ""
) -> Iterator[None]:
    """Raises an error that names the processes that are gone, if a collective operation inside the context fails."""
    # After a restart by torchrun, use another `meeting`, since the store still has the keys from before the restart.
    # Processes need none where all make the same calls, as of halfstep.initialize.
    meeting = meeting or f"halfstep/failed/initialize/{next(_OPENINGS)}"
    try:
        yield
    except RuntimeError as error:
        if not (group_is_open() and is_lost_connection(error)):
            raise
        said = _said_of(absent(group, meeting))
        raise SessionError(
            f"process {dist.get_rank()} got no answer in {what} ({error}): {said}. This process has updated nothing; "
            f"restart all processes from the last checkpoint; {more(PROCESSES)}"
        ) from error


@contextmanager
def telling_of_errors(models: Sequence[nn.Module]) -> Iterator[None]:
    """Reports an error inside the context to the processes that hold shards of the models."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # from which nothing else is to be heard
            reshard(models)
            if group_is_open() and (own := sharded_parameters(models)):
                group = group_of(own)
                with naming_who_is_gone(group):
                    told_by_all(None, group, failed=f"{type(error).__name__}: {error}")
        raise


@contextmanager
def failing_together() -> Iterator[None]:
    """Makes an error of one process inside the context one of all processes; a collective call."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    if group_is_open() and (group := dist.group.WORLD) is not None and dist.get_world_size() > 1:
        said = None if failed is None else f"{type(failed).__name__}: {failed}"
        heard = nullcontext() if failed is None else suppress(Exception)
        with heard, naming_who_is_gone(group, "the setup of a session"):
            told_by_all(None, group, failed=said)
    if failed is not None:
        raise failed


def told_by_all(value: Any, group: dist.ProcessGroup | None, failed: str | None = None) -> list[Any]:
    """Returns the `value` of each process of a group; waits for all of them."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (value, failed), group=group)
    for rank, (_, error) in enumerate(found):
        if error is not None:
            raise SetupError(f"process {rank} has raised {error}")
    return [each for each, _ in found]


def absent(group: dist.ProcessGroup | None, meeting: str) -> list[int]:
    """Returns the processes of a failed group that do not check in within `ROLL_CALL` seconds."""
    # They check in through the group's store, which answers even if the group no longer works.
    own = dist.get_rank()
    missing = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    until = time.monotonic() + ROLL_CALL
    try:
        store = default_store()
        store.set(f"{meeting}/{own}", "")
        while True:
            missing = [rank for rank in missing if not store.check([f"{meeting}/{rank}"])]
            if not missing or time.monotonic() > until:
                break
            time.sleep(0.05)
    except RuntimeError:  # the store ends with the process that keeps it, where no torchrun does
        pass
    return missing


def _said_of(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no process is missing, so they make different steps (fewer batches, another loss_id)"
    if len(ranks) == 1:
        return f"process {ranks[0]} has ended, has raised, or is late (fewer batches); see the end of its output"
    named = ", ".join(map(str, ranks))
    return (
        f"the processes {named} have ended, have raised, are late (fewer batches), or wait for one of the others; see "
        "the end of their output"
    )


def full_state(root: nn.Module, rank: int) -> dict[str, Tensor]:
    """Returns the state dict of a model with whole tensors in process `rank`, and an empty dict in the others."""
    found = {}
    for name, value in root.state_dict().items():
        whole = value.full_tensor() if is_sharded(value) else value
        if dist.get_rank() == rank:
            found[name] = whole
    return found


def run_on_rank(run: Callable[[], T], rank: int, group: dist.ProcessGroup) -> T:
    """Calls `run` in process `rank` and returns its result in all processes of a group; a collective call."""
    failed: Exception | None = None
    sent: list[Any] = [None, None]
    if dist.get_rank() == rank:
        try:
            result = run()
            sent = [pickle.dumps(result), None]
        except Exception as error:  # whatever it is, the others are waiting
            failed, sent = error, [None, f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(sent, src=rank, group=group)
    if failed is not None:
        raise failed
    if sent[1] is not None:
        raise SessionError(f"process {rank} has raised {sent[1]}")
    answer: T = result if dist.get_rank() == rank else pickle.loads(sent[0])
    return answer


def agreed(facts: DeviceFacts) -> DeviceFacts:
    """Returns the facts of a CPU with the measurements of the process of this run that asked first."""
    if facts.kind != "cpu" or not group_is_open():
        return facts
    row = facts.processor
    own = json.dumps([row.bf16, row.fp16, row.wide_backward])
    try:
        found = default_store().compare_set(_PROCESSOR, "", own).decode()
    except (RuntimeError, NotImplementedError):  # the process that keeps the store has ended, or it compares nothing
        return facts
    if found == own:
        return facts
    bf16, fp16, wide = json.loads(found)
    source = f"measured in another process of this run; {row.source}"
    limits = tuple((width, length) for width, length in wide)
    return replace(facts, processor=replace(row, bf16=bf16, fp16=fp16, wide_backward=limits, source=source))


@dataclass(frozen=True)
class Findings:
    """What one process found in a step's gradients and losses, or, once summed, what all processes found together."""

    square: Tensor  # its share of the squared norm of the unscaled gradients (0-dim float64)
    gradients: Tensor  # (bool) of each parameter: is its gradient not finite
    losses: Tensor  # (bool, `LOSSES`) of each: did its gradients overflow; at `NOT_FINITE`: was any loss not finite
    processes: Tensor  # (bool) of each process: did one of its losses set a flag
    stops: Tensor  # (bool) of each process: does it ask all to stop
    # (2, processes): of the scales that gradients carry, and of the weights, a number of each process (float64); once
    # summed, whether it differs from that of process 0 (bool)
    same: Tensor

    def packed(self) -> Tensor:
        """Returns one float64 vector to sum over the processes: the share of the squared norm, the flags, `same`."""
        # All entries but the first are whole numbers below 2**53, also after the sum, so they stay exact. A flag of
        # `gradients` or `losses` becomes a count of processes, of which several share an entry; each process sets one
        # entry at the end.
        flags = torch.cat((self.gradients, self.losses))
        bits, room = _room(len(self.processes))
        rows = pad(flags.double(), (0, -len(flags) % room)).view(-1, room)
        places = torch.arange(0, bits * room, bits, dtype=torch.float64, device=flags.device).exp2()
        scales, weights = _folded(self.same[0], SCALE_BITS), _folded(self.same[1], WEIGHT_BITS)
        own = self.processes + 2 * self.stops.long() + 4 * weights + (4 << WEIGHT_BITS) * scales
        return torch.cat((self.square.double().view(1), (rows * places).sum(1), own.double()))

    def unpacked(self, total: Tensor) -> Findings:
        """Returns the findings of all processes from the sum of their `packed` vectors."""
        size = len(self.processes)
        bits, room = _room(size)
        square, rows, own = torch.split(total, [1, len(total) - 1 - size, size])
        places = torch.arange(0, bits * room, bits, device=total.device)
        counts = (rows.long().view(-1, 1) >> places) & ((1 << bits) - 1)
        flags = (counts > 0).flatten()
        gradients, losses = flags[: len(self.gradients)], flags[len(self.gradients) :][: len(self.losses)]
        number = own.long()
        same = torch.stack((number >> (2 + WEIGHT_BITS), (number >> 2) & ((1 << WEIGHT_BITS) - 1)))
        return Findings(square.view(()), gradients, losses, (number & 1) > 0, (number & 2) > 0, same != same[:, :1])

    @property
    def norm(self) -> Tensor:
        """The L2 norm of the gradients (0-dim fp32), which is the square root of `square`."""
        return self.square.sqrt().float()


def _room(size: int) -> tuple[int, int]:
    """Returns how many bits a count of up to `size` processes takes, and how many such counts fit into a float64."""
    bits = size.bit_length()
    return bits, 53 // bits


def _folded(t: Tensor, bits: int) -> Tensor:
    """Returns a hash of `bits` bits (int64) of float64 numbers: 0 for 0, and different for different powers of two."""
    return (t.view(torch.int64) * -0x61C8864680B583EB >> 64 - bits) & ((1 << bits) - 1)
