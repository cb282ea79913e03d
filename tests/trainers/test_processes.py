"""Trainers in two processes, under DDP and over shards: the numbers of the loop by hand in as many."""

import json
import logging
import os

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

for package in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed; run ./dev adapters")

import lightning  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters.accelerate import session_of  # noqa: E402
from halfstep.adapters.lightning import Halfstep  # noqa: E402
from halfstep.errors import HalfstepError  # noqa: E402
from tests import forks  # noqa: E402
from tests.replicas import digest  # noqa: E402
from tests.trainers import loops, test_accelerate, test_lightning, test_transformers  # noqa: E402
from tests.trainers.loops import ACCUMULATE, MAX_NORM, PROCESSES, SETTINGS, Trained  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = 20  # of the Trainer


def in_accelerate(rank, level, low, path):
    trained = Trained()
    other = loops.by_hand(level, low, leave_out=True, rank=rank, turns=PROCESSES)  # as Accelerate steps schedules
    accelerator = test_accelerate.train(level, low, trained, rank=rank)
    kind = accelerator.distributed_type.value
    session_of(accelerator).close()
    pairs = [(each.losses, digest(each.weights.values()), each.rates[-1:], each.skipped) for each in (trained, other)]
    return kind, repr(pairs[0]) == repr(pairs[1]), trained.skipped, pairs[0][1]


def in_trainer(rank, level, low, path):
    model = test_transformers.language_model(None if level == "O0" or rank else 20)
    settings = {"max_steps": STEPS, "save_steps": STEPS, "ddp_backend": "gloo"}
    trainer = test_transformers.trainer_of(level, low, path / level / low, model, settings)
    trainer.train()
    _, other = test_transformers.by_hand(level, low, STEPS, rank, PROCESSES)
    mine = test_transformers.weights(trainer.model)
    held = load_file(path / level / low / f"checkpoint-{STEPS}" / "model.safetensors")
    saved = all(torch.equal(value, mine[name]) for name, value in held.items())
    return (
        trainer.args.parallel_mode.value,
        digest(mine.values()) == digest(other.values()),
        saved,
        digest(mine.values()),
    )


def sharded(net, level, low, mesh):
    policy = halfstep.fsdp_policy(level, low=low)
    for part in (net[0], net[1], net[3], net):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def whole(net):
    return digest([value.full_tensor() for value in net.state_dict().values()])


def by_hand_over_shards(rank, level, low):
    net = loops.network()
    mesh = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    sharded(net, level, low, mesh["data_parallel"])
    optimizer = loops.optimizer_of(net)
    schedule = loops.schedule_of(optimizer)
    losses = []
    with halfstep.initialize(net, optimizer, level, low=low) as session:
        for index, batch in enumerate(loops.share(loops.batches(100, loops.bad_at(level)), rank)):
            loss = loops.loss_of(net, batch)
            losses.append(loss.item())
            session.backward(loss / ACCUMULATE)
            session.unscale_()
            if index % ACCUMULATE == ACCUMULATE - 1:
                nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
                session.step()
                optimizer.zero_grad()
                schedule.step()
        return losses, whole(net)


def in_lightning_under_ddp(rank, level, low, path):
    module = test_lightning.Module()
    trainer = test_lightning.trainer_of(
        level, low, strategy="ddp", devices=PROCESSES, use_distributed_sampler=False, max_epochs=1
    )
    items = loops.share(loops.batches(100, loops.bad_at(level)), rank)
    trainer.fit(module, DataLoader(items, batch_size=None))
    return compared(module.losses, module.net, level, low, rank)


def in_fabric(rank, level, low, path):
    plugin = Halfstep(level, low=low)
    fabric = lightning.Fabric(accelerator="cpu", devices=PROCESSES, strategy="ddp", plugins=[plugin])
    fabric.launch()
    model = loops.network()
    own = loops.optimizer_of(model)
    if level != "O0":
        other = Halfstep(level, low=low, rules=[halfstep.Rule("missing", halfstep.FULL)] * rank)
        with pytest.raises(HalfstepError, match="'missing' matches no module"):
            other.setup(fabric, loops.network())
    schedule = loops.schedule_of(own)
    wrapped, optimizer = plugin.setup(fabric, model, own)
    losses = []
    for index, batch in enumerate(loops.share(loops.batches(100, loops.bad_at(level)), rank)):
        last = index % ACCUMULATE == ACCUMULATE - 1
        with fabric.no_backward_sync(wrapped, enabled=not last):
            loss = loops.loss_of(wrapped, batch)
            losses.append(loss.item())
            fabric.backward(loss / ACCUMULATE)
        if last:
            fabric.clip_gradients(wrapped, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    plugin.close()
    return compared(losses, model, level, low, rank)


def compared(losses, model, level, low, rank):
    other = loops.by_hand(level, low, rank=rank)
    mine = digest(model.state_dict().values())
    same = loops.same_losses(losses, other.losses) and mine == digest(other.weights.values())
    return torch.distributed.get_world_size(), same, other.skipped, mine


def in_lightning(rank, level, low, path):
    class Sharded(test_lightning.Module):
        def configure_model(self):
            sharded(self.net, level, low, self.device_mesh["data_parallel"])

    def fit(module, epochs, items, load=None, save=None):
        strategy = ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1)
        ways = {"devices": PROCESSES, "use_distributed_sampler": False, "max_epochs": epochs}
        trainer = test_lightning.trainer_of(level, low, strategy=strategy, **ways)
        trainer.fit(module, DataLoader(items, batch_size=None), ckpt_path=load)
        if save:
            trainer.save_checkpoint(save)
        return trainer

    items = loops.share(loops.batches(100, loops.bad_at(level)), rank)
    module = Sharded()
    trainer = fit(module, 1, items)
    losses, other = by_hand_over_shards(rank, level, low)
    same = loops.same_losses(module.losses, losses) and whole(module.net) == other
    twice, first, second = Sharded(), Sharded(), Sharded()
    fit(twice, 2, items[:20])
    fit(first, 1, items[:20], save=path / f"{level}-{low}")
    fit(second, 2, items[:20], load=path / f"{level}-{low}")
    return (
        trainer.precision_plugin.state_dict()["skipped"],
        same,
        whole(second.net) == whole(twice.net),
        whole(module.net),
    )


CASES = {
    "DDP": in_lightning_under_ddp,
    "Fabric": in_fabric,
    "Lightning": in_lightning,
    "Accelerate": in_accelerate,
    "Trainer": in_trainer,
}


def work(rank, path):
    for level in (logging.getLogger("halfstep"), logging.getLogger("transformers")):
        level.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=PROCESSES)
    found = {}
    for name, case in CASES.items():
        for level, low in SETTINGS:
            os.environ |= {key: str(value) for key, value in {**mine, "OMP_NUM_THREADS": 1}.items()}
            found[f"{name} {level} {low}"] = case(rank, level, low, path)
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
    (path / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    forks.start(work, (path,), PROCESSES)
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize(("level", "low"), SETTINGS)
@pytest.mark.parametrize("trainer", CASES)
def test_each_trains_bit_for_bit_as_the_loop_by_hand(found, trainer, level, low):
    """Shards are resumed too, and what the Trainer saves is fp32."""
    skipped = 0 if level == "O0" else 1
    expected = {
        "DDP": [PROCESSES, True, skipped],
        "Fabric": [PROCESSES, True, skipped],
        "Lightning": [skipped, True, True],
        "Accelerate": ["MULTI_CPU", True, skipped],
        "Trainer": ["distributed", True, True],
    }
    first, second = (each[f"{trainer} {level} {low}"] for each in found)
    assert first[:3] == second[:3] == expected[trainer]
    assert first[3] == second[3]
