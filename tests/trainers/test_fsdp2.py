"""Accelerate's FSDP2, alone, in Hugging Face's Trainer and in TRL (there DDP too), in several processes on a CPU."""

import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

for package in ("accelerate", "transformers", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed; run ./dev adapters")

import accelerate  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters.accelerate import prepare, session_of  # noqa: E402
from halfstep.errors import HalfstepError  # noqa: E402
from tests import forks  # noqa: E402
from tests.replicas import digest  # noqa: E402
from tests.trainers import loops, test_transformers, test_trl  # noqa: E402
from tests.trainers.loops import ACCUMULATE, MAX_NORM  # noqa: E402
from tests.trainers.test_processes import sharded, whole  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
multiprocessing.set_forkserver_preload([*forks.COSTLY, __name__])  # with Transformers and TRL
SETTINGS = [("O0", "bf16"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]
BAD = 8  # the infinite batch of the first process
STATE = AcceleratorState.__init__


def with_shards_on_a_cpu(self, *args, fsdp_plugin=None, **kwargs):
    """Does what Accelerate does where there are several GPUs: a plugin of FSDP makes the distributed type FSDP."""
    STATE(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)


def reset():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def plugin_of(**settings):
    common = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT"}
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear", "LayerNorm"]}
    return FullyShardedDataParallelPlugin(**{**common, **wrapped, **settings})


def items_of(level, rank, size, count=24):
    items = loops.batches(count * size, None)
    if level != "O0":
        items[BAD * size][0].fill_(torch.inf)
    return items[rank::size]


def by_hand(level, low, rank, size, copies):
    net = loops.network()
    names = {"mesh_dim_names": ("copies", "shards")}
    sharded(net, level, low, None if copies == 1 else init_device_mesh("cpu", (copies, size // copies), **names))
    optimizer, losses = loops.optimizer_of(net), []
    with halfstep.initialize(net, optimizer, level, low=low) as session:
        for index, batch in enumerate(items_of(level, rank, size)):
            last = index % ACCUMULATE == ACCUMULATE - 1
            net.set_requires_gradient_sync(last)
            losses.append((loss := loops.loss_of(net, batch)).item())
            session.backward(loss / ACCUMULATE)
            if last:
                session.unscale_()
                nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
                session.step()
                optimizer.zero_grad()
        return losses, whole(net), session.status().skipped


def trained(level, low, rank, size, count=24, first=0, load=None, save=None, copies=1, **settings):
    meshes = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=size // copies) if copies > 1 else None
    ways = {"fsdp_plugin": plugin_of(**settings), "parallelism_config": meshes}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, **ways)
    net = loops.network()
    if rank and settings.get("cpu_ram_efficient_loading"):  # as from_pretrained leaves it in all processes but one
        nn.init.zeros_(net[0].weight)
    model, optimizer = prepare(accelerator, net, loops.optimizer_of(net), plan=level, low=low)
    if load:
        accelerator.load_state(load)
    losses, skipped = [], 0
    for batch in items_of(level, rank, size)[first:count]:
        with accelerator.accumulate(model):
            losses.append((loss := loops.loss_of(model, batch)).item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                skipped += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    found = whole(model)
    session_of(accelerator).close()
    reset()
    return losses, found, skipped


def accelerated(rank, size, path, level, low, copies=1):
    whole_run = trained(level, low, rank, size, copies=copies)
    first = trained(level, low, rank, size, count=12, save=path / "at", copies=copies)
    second = trained(level, low, rank, size, first=12, load=path / "at", copies=copies)
    hand = by_hand(level, low, rank, size, copies)
    return {
        "as by hand": loops.same_losses(whole_run[0], hand[0]) and whole_run[1:] == hand[1:],
        "resumed": loops.same_losses(first[0] + second[0], whole_run[0]) and second[1] == whole_run[1],
        "skipped": whole_run[2],
        "weights": whole_run[1],
    }


WAYS = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "loaded in one process": {"cpu_ram_efficient_loading": True},
    "full state": {"state_dict_type": "FULL_STATE_DICT"},
    "root alone": {"auto_wrap_policy": "no_wrap"},
}


def ways(rank, size, path):
    """Returns the weights after each way of sharding, and after the same runs stopped and resumed."""
    found = []
    for name, settings in WAYS.items():
        found.append(trained("O2", "bf16", rank, size, **settings)[1])
        trained("O2", "bf16", rank, size, count=12, save=path / name, **settings)
        found.append(trained("O2", "bf16", rank, size, first=12, load=path / name, **settings)[1])
    return found


def kept(rank, size, path):
    """Returns, for norms in FSDP2's groups and in one of their own: whether other fp32 weights are exact, a weight of a
    norm as it is gathered, and how often it was said that such are rounded."""
    found, said = [], []
    log, handler = logging.getLogger("halfstep"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    for own in (False, True):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of(transformer_cls_names_to_wrap=["Linear"]))
        net, seen = loops.network(), []
        nn.init.constant_(net[1].weight, 1.001)  # bf16 has 1 and 1.0078125
        net[0].bfloat16()  # the rest was loaded in fp32
        before = net[3].weight.clone()
        if own:
            fully_shard([net[1]], mp_policy=halfstep.fsdp_policy("O0"))
        net[1].register_forward_pre_hook(lambda module, _, seen=seen: seen.append(round(module.weight[0].item(), 6)))
        optimizer, rules = loops.optimizer_of(net), [halfstep.Rule("type:LayerNorm", halfstep.FULL)]
        log.addHandler(handler)
        log.setLevel(logging.WARNING)
        model, _ = prepare(accelerator, net, optimizer, plan="O3", low="bf16", rules=rules)
        log.setLevel(logging.CRITICAL)
        log.removeHandler(handler)
        loops.loss_of(model, loops.batches(1, None)[0])
        rounds = [each for each in said if "a rule says fp32" in each]
        found.append([torch.equal(net[3].weight.full_tensor(), before), seen, len(rounds)])
        said.clear()
        session_of(accelerator).close()
        reset()
    return found


def work(rank, size, path, cases):
    for name in ("halfstep", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ |= {key: str(value) for key, value in mine.items()}
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size)
    found = {}
    with patch.object(AcceleratorState, "__init__", with_shards_on_a_cpu):
        for name, (case, given) in cases.items():
            folder = path / name.replace(" ", "-")
            found[name] = case(rank, size, folder, *given)
            reset()
    (path / f"{rank}.json").write_text(json.dumps(found))


def run(path, size, cases):
    forks.start(work, (size, path, cases), size)
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(size)]


ACCELERATED = {f"{level} {low}": (accelerated, (level, low)) for level, low in SETTINGS}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accelerate_trains_shards_bit_for_bit_as_by_hand_and_resumes(size, tmp_path):
    copies = {"O2 bf16, two copies of the shards": (accelerated, ("O2", "bf16", 2))} if size == 4 else {}
    found = run(tmp_path, size, ACCELERATED | copies)
    for name in ACCELERATED | copies:
        first, *others = (each[name] for each in found)
        assert first == {**first, "as by hand": True, "resumed": True, "skipped": int("O0" not in name)}, name
        assert all(each == first for each in others)


def test_ways_to_shard_and_to_save_train_and_resume_to_the_same_bits(tmp_path):
    found = run(tmp_path, 2, {"ways": (ways, ()), "kept": (kept, ())})
    assert {digest for each in found for digest in each["ways"]} == {found[0]["ways"][0]}
    assert [each["kept"] for each in found] == [[[True, [1.0], 1], [True, [1.001], 0]]] * 2


def shards(layer="GPT2Block"):
    config = {"version": 2, "cpu_ram_efficient_loading": False, "transformer_layer_cls_to_wrap": [layer]}
    return {"fsdp": "full_shard", "fsdp_config": config, "ddp_backend": "gloo"}


def in_trainer(rank, size, path, level, low):
    """Returns the logged losses of a Trainer, whether it resumed bit for bit, and what it saved."""

    def trainer(at=None, **settings):
        model, kept = test_transformers.language_model(at), test_transformers.Losses()
        settings = {"max_steps": 6, "save_steps": 3, **shards(), **settings}
        made = test_transformers.trainer_of(level, low, path, model, settings, callbacks=[kept])
        return made, kept

    def own(**settings):
        kept = test_transformers.Losses()
        settings = {"max_steps": 6, "save_strategy": "no", **shards(), **settings}
        args = test_transformers.arguments(path, **settings)
        rows = test_transformers.samples()
        transformers.Trainer(test_transformers.language_model(), args, train_dataset=rows, callbacks=[kept]).train()
        reset()
        return [row["loss"] for row in kept.rows]

    straight, kept = trainer()
    straight.train()
    weights = digest([value.full_tensor() for value in straight.model.state_dict().values()])
    reset()
    resumed, _ = trainer()
    resumed.train(resume_from_checkpoint=str(path / "checkpoint-3"))
    again = digest([value.full_tensor() for value in resumed.model.state_dict().values()])
    resumed.save_model(path / "last")
    reset()
    spoiled, seen = trainer(2 if rank == 0 and level != "O0" else None, save_strategy="no")
    spoiled.train()
    reset()
    losses = [row["loss"] for row in kept.rows]
    plain = transformers.GPT2LMHeadModel.from_pretrained(path / "last")
    return {
        "resumed": again == weights,
        "saved": digest(plain.state_dict().values()) == weights and plain.dtype is torch.float32,
        "skipped": seen.rows[-1]["halfstep/skipped"] if level != "O0" else 0,
        "weights": weights,
        "losses": losses,
        "fp32": own(),
        "bf16": own(bf16=True),
    }


@pytest.mark.slow_but("O2-bf16")
@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_the_trainer_shards_trains_and_resumes(level, low, tmp_path):
    first, second = (each["trainer"] for each in run(tmp_path, 2, {"trainer": (in_trainer, (level, low))}))
    print(first)
    assert first == second
    assert (first["resumed"], first["saved"], first["skipped"]) == (True, True, 1)
    assert first["losses"] == pytest.approx(first["fp32"], abs=2e-3)
    assert first["losses"] == pytest.approx(first["bf16"], abs=0.01)  # which Accelerate's policy returns in bf16


REPLICAS = {"ddp_backend": "gloo"}


def in_trl(rank, size, path, kind, ways):
    """Returns logged losses of TRL's own and of O2, its last weights, whether it resumed, and the steps it skipped."""

    def weights(trainer):
        trained = (p for p in trainer.model.parameters() if p.requires_grad)
        return digest([p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained])

    found = {}
    for name in ("fp32", "bf16", "O2"):
        saved = {} if name == "O2" else {"save_strategy": "no"}
        trainer, kept = test_trl.trainer_of(kind, name, path, **ways, **saved)
        trainer.train()
        reset()
        found[name] = [row["loss"] for row in kept.rows]
    resumed, _ = test_trl.trainer_of(kind, "O2", path, **ways)
    resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))
    reset()
    spoiled, kept = test_trl.trainer_of(kind, "O2", path, **ways, save_strategy="no")
    if rank:
        loss = spoiled.compute_loss
        spoiled.compute_loss = lambda *args, **more: (
            loss(*args, **more) * (1, torch.inf)[spoiled.state.global_step == 1]
        )
    spoiled.train()
    reset()
    skipped = [row["halfstep/skipped"] for row in kept.rows]
    same = weights(resumed) == weights(trainer)
    return {**found, "resumed": same, "weights": weights(trainer), "spoiled": weights(spoiled), "skipped": skipped}


@pytest.mark.slow_but("SFT-FSDP2")
@pytest.mark.parametrize("ways", [shards("LlamaDecoderLayer"), REPLICAS], ids=["FSDP2", "DDP"])
@pytest.mark.parametrize("kind", test_trl.KINDS)
def test_trl_trains_in_two_processes_skips_and_resumes(kind, ways, tmp_path):
    first, second = (each["trl"] for each in run(tmp_path, 2, {"trl": (in_trl, (kind, ways))}))
    print(first)
    assert first == second
    assert (first["resumed"], first["skipped"]) == (True, [0, 1, 1, 1])
    assert first["O2"] == pytest.approx(first["fp32"], abs=2e-3)
    assert first["O2"] == pytest.approx(first["bf16"], abs=0.01)  # which Accelerate's policy returns in bf16


def refused(rank, size, path):
    """Returns the sentence with which each setting is refused."""
    found = {}

    def ask(name, act):
        try:
            act()
        except (HalfstepError, RuntimeError) as error:
            found[name] = str(error)
        reset()
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # which a plugin sets

    def start(plan="O2", net=None, replicas=False, said=None, rules=(), **settings):
        net = loops.network() if net is None else net
        accelerator = Accelerator(cpu=True, fsdp_plugin=None if replicas else plugin_of(**settings))
        vars(accelerator.state).update(said or {})  # what Accelerate takes on GPUs alone
        model, _ = prepare(accelerator, net, loops.optimizer_of(net), plan=plan, low="bf16", rules=rules)
        loops.loss_of(model, loops.batches(1, None)[0])
        session_of(accelerator).close()

    def wrapped(*parts, **settings):
        net = loops.network()
        for part in parts or (net[0], net):
            fully_shard(net[part] if isinstance(part, int) else part, **settings)
        return net

    def prepared(other=False):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of())
        model, optimizer = accelerator.prepare(net := loops.network(), loops.optimizer_of(net))
        optimizer = loops.optimizer_of(loops.network()) if other else optimizer
        prepare(accelerator, model, optimizer, plan="O0" if other else "O2", low="bf16")

    def twice(**settings):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of(**settings))
        with (
            patch.object(accelerator, "_prepare_one", side_effect=OSError("full")),
            pytest.raises(OSError, match="full"),
        ):
            prepare(accelerator, net := loops.network(), loops.optimizer_of(net), plan="O2", low="bf16")
        prepare(accelerator, net := loops.network(), loops.optimizer_of(net), plan="O1", low="bf16")
        session_of(accelerator).close()

    unmatched = loops.network()

    ask("FSDP1", lambda: start(fsdp_version=1, transformer_cls_names_to_wrap=["Linear"]))
    ask("mixed precision", lambda: start(said={"_mixed_precision": "fp16"}))
    ask("offload", lambda: start(cpu_offload=True))
    ask("tensor parallel", lambda: start(said={"parallelism_config": ParallelismConfig(tp_size=2)}))
    ask("context parallel", lambda: start(said={"parallelism_config": ParallelismConfig(cp_size=2)}))
    ask("rule", lambda: start(net=unmatched, rules=[halfstep.Rule("missing", halfstep.FULL)]))
    assert not isinstance(unmatched[0].weight, DTensor)  # it was told before
    tied = loops.network().extend([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[5].weight = tied[4].weight
    ask("tied in two groups", lambda: start(net=tied))
    plain = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}
    ask("tied and loaded in one process", lambda: start(net=tied, cpu_ram_efficient_loading=True, **plain))
    start(net=tied, **plain)  # in one group
    reset()
    for name in ("", " of replicas"):
        given = {"rules": [halfstep.Rule("missing", halfstep.FULL)] if rank else [], "replicas": bool(name)}
        ask(f"rule in one process{name}", lambda given=given: start(**given))
    ask("a second try", twice)
    ask("sharded in part", lambda: start(net=wrapped(1), cpu_ram_efficient_loading=True))
    ask("policy", lambda: start(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.float16)))
    ask("prepared before", prepared)
    ask("an optimizer of another model", lambda: prepared(other=True))
    ask("plans", lambda: start(plan=("O1", "O2")[rank]))
    ask("wrapped", lambda: start(net=wrapped()))
    ask("wrapped in FSDP1", lambda: start(net=FullyShardedDataParallel(loops.network(), device_id=torch.device("cpu"))))
    ask("wrapped by the plan", lambda: start(net=wrapped(mp_policy=halfstep.fsdp_policy("O2", low="bf16"))))
    ask("plans of replicas", lambda: start(plan=("O1", "O2")[rank], replicas=True))
    ask("wrapped replicas", lambda: start(net=nn.parallel.DistributedDataParallel(loops.network()), replicas=True))
    ask("offloaded replicas", lambda: start(net=accelerate.cpu_offload(loops.network()), replicas=True))
    first = shards()
    first["fsdp_config"] |= {"version": 1, "sync_module_states": False}
    model = test_transformers.language_model()
    ask(
        "Trainer's FSDP1",
        lambda: test_transformers.trainer_of("O2", "bf16", path, model, {"max_steps": 1, **first}).train(),
    )
    return found


REFUSED = {
    "FSDP1": r"Accelerate's FSDP1; use one device, .*, or FSDP2 \(fsdp_version: 2 in",
    "mixed precision": r"mixed_precision='fp16' together with halfstep.*leave mixed_precision out",
    "offload": r"would offload shards to the CPU, .*fsdp_offload_params: false",
    "tensor parallel": r"Accelerate's tensor, context and sequence parallelism; leave tp_size out of ParallelismConfig",
    "context parallel": r"Accelerate's tensor, context and sequence parallelism; leave cp_size out of Paralle",
    "rule": r"rule 'missing' matches no module",
    "tied in two groups": r"4\.weight, 5\.weight are one parameter, .* would part; leave layers that have it out of",
    "tied and loaded in one process": r"4\.weight, 5\.weight are one .*, and set fsdp_cpu_ram_efficient_loading to",
    "rule in one process": r"rule 'missing' matches no module",
    "rule in one process of replicas": r"rule 'missing' matches no module",
    "sharded in part": r"some modules were sharded before prepare, .*; set it to false",
    "policy": r"mixed_precision_policy is set in .*; leave it out",
    "prepared before": r"sharded this model before, .* format than torch\.bfloat16; pass a new model to halfstep's",
    "an optimizer of another model": r"6 of 6 parameters in group 0 of AdamW do not belong to the model",
    "plans": r"differs between processes: .*'O2', .*'O1'; use the same model, optimizer and plan",
    "wrapped": r"sharded this model before, .* format than torch\.bfloat16; pass a new model to halfstep's",
    "wrapped in FSDP1": r"\(FSDP1\) shards the model, .*; shard with FSDP2 instead",
    "plans of replicas": r"differs between processes: .*'O2', .*'O1'; use the same model, optimizer and plan",
    "wrapped replicas": r"has been wrapped in DistributedDataParallel, .*call halfstep\.initialize first, then wrap",
    "offloaded replicas": r"'0\.weight' is on the meta device, .*; load the model without them, and shard it",
    "Trainer's FSDP1": r"Accelerate's FSDP1; use one device, .*, or FSDP2 \(fsdp_version: 2 in",
}


def test_what_does_not_go_with_shards_is_refused_in_a_sentence(tmp_path):
    for each in run(tmp_path, 2, {"refused": (refused, ())}):
        assert each["refused"].keys() == REFUSED.keys()  # a model that was sharded by fsdp_policy trains
        assert [said for name, said in each["refused"].items() if not re.search(REFUSED[name], said)] == []


LAUNCHED = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Linear
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: true
num_machines: 1
num_processes: 2
main_process_port: 0
"""
SCRIPT = """
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from halfstep.adapters.accelerate import prepare, session_of
from tests.trainers import loops
from tests.trainers.test_fsdp2 import with_shards_on_a_cpu

with patch.object(AcceleratorState, "__init__", with_shards_on_a_cpu):
    accelerator = Accelerator(cpu=True)
net = loops.network()
model, optimizer = prepare(accelerator, net, loops.optimizer_of(net), plan="O2", low="bf16")
accelerator.backward(loops.loss_of(model, loops.batches(1, None)[0]))
optimizer.step()
kinds = {type(module).__name__ for module in model.modules()}
print(f"{accelerator.is_fsdp2} {session_of(accelerator).status().steps} {sorted(kinds)}\\n", end="", flush=True)
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mixed", ["no", "fp16"])
def test_a_file_of_accelerate_config_that_says_fsdp2_trains_without_mixed_precision_of_its_own(mixed, tmp_path):
    (tmp_path / "config.yaml").write_text(LAUNCHED.replace('"no"', mixed if mixed == "fp16" else '"no"'))
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.yaml", "train.py"]
    paths = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False)
    if mixed == "fp16":
        assert done.returncode != 0
        assert "SetupError: mixed_precision='fp16' together with halfstep" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True 1 ['FSDPCheckpointWrapper', 'FSDPLayerNorm', 'FSDPLinear'") == 2, done.stdout
