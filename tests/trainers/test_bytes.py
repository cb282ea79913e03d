"""The bytes that a process holds inside each trainer, where two processes share the model by FSDP2."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

for package in ("lightning", "accelerate", "transformers", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed; run ./dev adapters")

import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters.accelerate import prepare, session_of  # noqa: E402
from halfstep.adapters.lightning import Halfstep  # noqa: E402
from halfstep.train.session.parts import memory_of  # noqa: E402
from tests.trainers import test_lightning, test_transformers, test_trl  # noqa: E402
from tests.trainers.test_fsdp2 import plugin_of, reset, run, shards  # noqa: E402

pytestmark = pytest.mark.slow
WIDTH = 128
EXPECTED = {"own": 16, "full": 16, "bf16": 12, "8bit": 10}  # 4 of the weight, 4 of its gradient, 8 of Adam's averages


def network():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def items():
    return [(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * 2


def in_accelerate(path, moments):
    own = moments == "own"
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin_of(transformer_cls_names_to_wrap=["Linear"]),
        mixed_precision="bf16" if own else "no",
    )
    net = network()
    parts = net, torch.optim.AdamW(net.parameters())
    ours = {} if own else {"plan": "O2", "low": "bf16", "moments": moments}
    model, optimizer = accelerator.prepare(*parts) if own else prepare(accelerator, *parts, **ours)

    def train():
        for inputs, targets in items():
            optimizer.zero_grad()
            accelerator.backward((model(inputs).float() - targets).square().mean())
            optimizer.step()

    return train, lambda: session_of(accelerator)


def in_lightning(path, moments):
    own = moments == "own"
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if own else halfstep.fsdp_policy("O2", low="bf16")

    class Sharded(test_lightning.Module):
        def configure_model(self):
            for part in (*self.net, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

        def training_step(self, batch, index):
            return (self.net(batch[0]).float() - batch[1]).square().mean()

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    ways = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": 1}
    ways |= {"precision": "bf16-mixed"} if own else {}
    plugins = [] if own else [Halfstep("O2", low="bf16", moments=moments)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}
    quiet |= {"logger": False, "enable_checkpointing": False}
    trainer = test_lightning.lightning.Trainer(plugins=plugins, **quiet, **ways)
    module = Sharded(network())
    return lambda: trainer.fit(module, DataLoader(items(), batch_size=None)), lambda: plugins[0].session


def in_trainer(path, moments):
    own, settings = moments == "own", {"max_steps": 2, "save_strategy": "no", **shards()}
    model = test_transformers.language_model(width=WIDTH)
    if own:
        args = test_transformers.arguments(path, bf16=True, **settings)
        trainer = transformers.Trainer(model, args, train_dataset=test_transformers.samples())
    else:
        trainer = test_transformers.trainer_of("O2", "bf16", path, model, settings)
        trainer._settings["moments"] = moments
    return trainer.train, lambda: session_of(trainer.accelerator)


def in_sft(path, moments):
    own, settings = moments == "own", {"max_steps": 2, "save_strategy": "no", **shards("LlamaDecoderLayer")}
    with patch.object(test_trl, "llama", partial(test_trl.llama, hidden_size=WIDTH, intermediate_size=WIDTH)):
        trainer, _ = test_trl.trainer_of("SFT", "bf16" if own else "O2", path, **settings)
    if not own:
        trainer._settings["moments"] = moments
    return trainer.train, lambda: session_of(trainer.accelerator)


TRAINERS = {"Accelerate": in_accelerate, "Lightning": in_lightning, "Trainer": in_trainer, "SFT": in_sft}


def measured(rank, size, path, name, moments):
    """Returns the bytes for each weight that this process holds at the end of a step: of weights, gradients, states."""
    train, session = TRAINERS[name](path, moments)
    found = {}

    def keep(optimizer, *_):
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        memory = memory_of(held, [optimizer]) if moments == "own" else session().status().memory
        count = sum(p.to_local().numel() for p in held)
        found.update({kind: bytes / count for kind, bytes in memory.items()})

    handle = register_optimizer_step_post_hook(keep)
    train()
    handle.remove()
    if moments != "own" and name != "Lightning":
        session().close()
    reset()
    return found


@pytest.mark.parametrize("name", TRAINERS)
def test_a_process_holds_as_many_bytes_for_a_weight_in_each_trainer(name, tmp_path):
    found = run(tmp_path, 2, {moments: (measured, (name, moments)) for moments in EXPECTED})
    for moments, expected in EXPECTED.items():
        for each in found:
            print(name, moments, each[moments])
            assert expected <= sum(each[moments].values()) < expected + 0.12
