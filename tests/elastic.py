"""Trains in several processes, with a checkpoint after each step and a fault: torchrun elastic.py FOLDER FAULT.

It goes on from the last whole checkpoint of its folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import halfstep
from tests.sharded import adamw, loss_of, made, shard, states

STEPS, AT = 6, 3
LONG = 600  # seconds: longer than the test waits


def last_of(folder):
    """Returns the number of the last whole checkpoint; its metadata are what torch writes last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def trained(rank, folder, fault=None):
    """Trains from the last checkpoint to the end, with a fault at the step `AT`; returns what came of it."""
    folder = Path(folder)
    size = dist.get_world_size()
    net = shard(made(), "O2", "fp16")
    optimizer = adamw(net)
    session = halfstep.initialize(net, optimizer, "O2", low="fp16")
    begin = last_of(folder)
    if begin:
        model, optim = get_state_dict(net, optimizer)
        saved = {"model": model, "optim": optim, "session": session.state_dict()}
        dcp.load(saved, checkpoint_id=folder / str(begin))
        set_state_dict(net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
        session.load_state_dict(saved["session"])
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        session.backward(loss_of(net, step, rank, size))
        if step == AT and fault is not None:
            fault(rank, folder)
        session.step(max_norm=1.0)
        model, optim = get_state_dict(net, optimizer)
        saved = {"model": model, "optim": optim, "session": session.state_dict()}
        dcp.save(saved, checkpoint_id=folder / str(step + 1))
    found = begin, [states(net, optimizer), session.state_dict()]
    session.close()
    return found


def waits(folder):
    (folder / "waits").touch()
    time.sleep(LONG)


def killed(rank, folder):
    """Ends process 1 in the middle of its step, but for the second time that it is started."""
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def in_step(rank, folder):
    """Has process 1 wait in its step, and so all others wait for it."""
    if rank == 1:
        waits(folder)


def in_save(rank, folder):
    """Has process 1 wait in the checkpoint that follows, when the others have written theirs."""
    if rank == 1:
        dcp.FileSystemWriter.write_data = lambda *args, **kwargs: waits(folder)


FAULTS = {"killed": killed, "step": in_step, "save": in_save, "none": None}


def main():
    folder, fault = Path(sys.argv[1]), FAULTS[sys.argv[2]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    found = trained(rank, folder, fault)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
