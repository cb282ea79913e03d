"""FSDP2 and DistributedDataParallel on a GPU, in a group of this process alone: the same losses as without them."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import halfstep
from tests import sharded


def losses(device, level, low, engine):
    """Trains four steps on a device; returns the losses."""
    net = sharded.made().to(device)
    model = sharded.shard(net, level, low, exact=True) if engine == "FSDP2" else net
    optimizer = sharded.adamw(net)
    plan = {"plan": level} if level == "O1" else sharded.AS_STORED[level]
    with halfstep.initialize(net, optimizer, low=low, **plan) as session:
        model = torch.nn.parallel.DistributedDataParallel(net) if engine == "DDP" else model
        found = []
        for step in range(4):
            ids, targets = (t.to(device) for t in sharded.data(step))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
            session.backward(loss)
            session.step(max_norm=1.0)
            found.append(loss.detach())
    return [loss.item() for loss in found]


ON_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.silicon])


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), ON_CUDA])
def device(request, tmp_path):
    backend = "nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield request.param
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("low", sharded.LOWS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_of_one_process_trains_as_no_group(device, level, low):
    alone = losses(device, level, low, None)
    assert losses(device, level, low, "DDP") == alone
    assert losses(device, level, low, "FSDP2") == pytest.approx(alone, rel=2e-3)  # which reads its weights rounded
