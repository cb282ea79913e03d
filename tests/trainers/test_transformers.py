"""halfstep inside Hugging Face's Trainer: the numbers of a loop by hand, its checkpoints, and what it refuses."""

import json
import logging
import runpy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed; run ./dev adapters")
pytest.importorskip("accelerate", reason="Accelerate is not installed; run ./dev adapters")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters import transformers as adapter  # noqa: E402
from halfstep.adapters.accelerate import check_plan  # noqa: E402
from halfstep.adapters.transformers import HalfstepMixin, HalfstepTrainer  # noqa: E402
from halfstep.errors import HalfstepError, SetupError  # noqa: E402
from tests.trainers.loops import ACCUMULATE, MAX_NORM, SETTINGS, same_weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, BATCH, SAVED = 50, 2, 12  # a checkpoint after the step that is skipped


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Spoiled(GPT2LMHeadModel):
    """A language model whose loss is infinite in one pass, counted by what it is told (`at`)."""

    at = None

    def forward(self, input_ids=None, labels=None):
        out = super().forward(input_ids=input_ids, labels=labels)
        if self.training and self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                out.loss = out.loss * torch.inf
        return out


def language_model(at=None, width=16):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": width, "vocab_size": 64, "n_positions": 16}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = Spoiled(GPT2Config(**sizes, **still))
    model.at = at
    return model


def samples():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (STEPS * BATCH * ACCUMULATE, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **settings):
    common = {
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": MAX_NORM,
        "learning_rate": 0.01,
        "save_steps": SAVED,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "logging_nan_inf_filter": False,
    }
    return TrainingArguments(str(folder), **{**common, **settings})


def trainer_of(level, low, folder, model=None, settings=None, **options):
    model = language_model(None if level == "O0" else 20) if model is None else model
    options = {"train_dataset": samples(), **options}
    return HalfstepTrainer(model, arguments(folder, **(settings or {})), plan=level, halfstep={"low": low}, **options)


def weights(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def by_hand(level, low, steps=STEPS, rank=0, size=1):
    """What the Trainer does, written with halfstep, with its linear schedule; in one of several processes, too."""
    model = language_model(None if level == "O0" or rank else 20)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    model.train()
    rows, losses = samples(), []
    with halfstep.initialize(model, optimizer, level, low=low) as session:
        wrapped = model if size == 1 else nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for step in range(steps):
            total = torch.zeros(())
            for index in range(ACCUMULATE):
                first = ((step * ACCUMULATE + index) * size + rank) * BATCH
                inputs = torch.stack([row["input_ids"] for row in rows[first : first + BATCH]])
                with nullcontext() if size == 1 or index == ACCUMULATE - 1 else wrapped.no_sync():
                    loss = wrapped(input_ids=inputs, labels=inputs).loss / ACCUMULATE
                    total += loss.detach()
                    session.backward(loss)
                session.unscale_()
            losses.append(total.item())
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if not session.step().skipped:
                schedule.step()
            model.zero_grad()
        return losses, weights(model)


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.rows.append(dict(logs))


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_the_trainer_trains_bit_for_bit_as_the_loop_by_hand(level, low, tmp_path):
    kept = Losses()
    trainer = trainer_of(level, low, tmp_path, callbacks=[kept], settings={"save_strategy": "no"})
    trainer.train()
    losses, final = by_hand(level, low)
    assert same_weights(weights(trainer.model), final)
    before = 10 if level != "O0" else STEPS  # after an infinite loss the Trainer logs NaN
    assert [row["loss"] for row in kept.rows[:before]] == pytest.approx(losses[:before], rel=1e-3)
    skipped = [index for index, row in enumerate(kept.rows) if row["halfstep/skipped"]]
    assert skipped == ([] if level == "O0" else list(range(10, STEPS)))  # how many so far: one
    assert kept.rows[0]["grad_norm"] > MAX_NORM
    if low == "fp16" and level == "O1":
        assert kept.rows[10]["halfstep/scale"] == kept.rows[11]["halfstep/scale"]  # which a bad loss does not lower


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_run_resumed_from_the_trainers_checkpoint_is_bit_identical(level, low, tmp_path):
    settings = {"max_steps": SAVED + 4, "save_steps": SAVED}
    whole = trainer_of(level, low, tmp_path, settings=settings)
    whole.train()
    folder = tmp_path / f"checkpoint-{SAVED}"
    resumed = trainer_of(level, low, tmp_path, language_model(), settings)
    resumed.train(resume_from_checkpoint=str(folder))
    assert same_weights(weights(resumed.model), weights(whole.model))
    held = load_file(folder / "model.safetensors")
    assert {value.dtype for value in held.values()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    last = tmp_path / f"checkpoint-{SAVED + 4}"
    plain = GPT2LMHeadModel.from_pretrained(last)
    assert same_weights(weights(plain), weights(whole.model))


@pytest.mark.parametrize(("level", "way"), [("O0", "model"), ("O1", "model_init"), ("O2", "model")])
def test_a_model_that_came_low_resumes_bit_identically_too(level, way, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3}

    def trainer():
        made = (lambda: language_model().bfloat16()) if way == "model_init" else None
        model = None if made else language_model().bfloat16()
        args = arguments(tmp_path, **settings)
        return HalfstepTrainer(
            model, args, train_dataset=samples(), model_init=made, plan=level, halfstep={"low": "bf16"}
        )

    whole, resumed = trainer(), trainer()
    whole.train()
    folder = tmp_path / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(folder))
    assert same_weights(weights(resumed.model), weights(whole.model))
    held = load_file(folder / "model.safetensors")
    dtype = "bfloat16" if level == "O0" else "float32"  # O0 trains as written
    assert {str(value.dtype) for value in held.values()} == {f"torch.{dtype}"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("name", ["fp16_full_eval", "bf16_full_eval", "bf16"])
def test_precision_left_on_in_the_arguments_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(SetupError, match=rf"TrainingArguments\({name}=True\) does not work with halfstep"):
        trainer_of("O1", "bf16", tmp_path, settings={name: True})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plan": "O9"}, "unknown level 'O9'"),
        ({"plan": "O2", "halfstep": {"norms": "x"}}, "norms is 'x'"),
        ({"halfstep": {"lo": "bf16"}}, "no keyword 'lo'; did you mean 'low'"),
        ({"halfstep": {"rules": ["lm_head"]}}, "edit 'lm_head' is not an edit; expected a Rule"),
        ({"bf16": True}, r"bf16=True\) does not work with halfstep"),
    ],
)
def test_a_wrong_plan_is_told_before_a_trainer_loads_a_model(given, said, tmp_path):
    class Loading(Trainer):
        def __init__(self, *args, **kwargs):
            pytest.fail("a model is loaded here")

    class Mine(HalfstepMixin, Loading):
        pass

    args = arguments(tmp_path, bf16=given.pop("bf16", False))
    with pytest.raises((HalfstepError, TypeError), match=said):
        Mine("name of a model", args, **given)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (halfstep.level("O2", "bf16").edit(halfstep.Rule("transformer.h.0", halfstep.FULL)), {}),
        ("O2", {"low": "bf16", "moments": "bf16", "full_moments": ["*wte*"]}),
    ],
)
def test_patterns_of_a_plan_are_those_of_the_models_names(plan, settings, tmp_path):
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    trainer = HalfstepTrainer(language_model(), args, train_dataset=samples(), plan=plan, halfstep=settings)
    trainer.train()
    assert trainer.state.global_step == 1


def test_what_is_tried_of_a_plan_draws_no_random_numbers():
    before = torch.get_rng_state()
    check_plan("O2", {"low": "bf16", "products": "fp8", "rules": [halfstep.Rule("missing", halfstep.FULL)]})
    assert torch.equal(torch.get_rng_state(), before)


def test_several_devices_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(SetupError, match=r"2 devices in one process with DataParallel.*torchrun"):
        trainer_of("O1", "bf16", tmp_path)


def test_a_run_that_begins_again_with_smaller_batches_trains(tmp_path):
    class Small(HalfstepTrainer):
        def training_step(self, model, inputs, *rest):
            if len(inputs["input_ids"]) > 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)

    args = arguments(tmp_path, auto_find_batch_size=True, max_steps=3, save_strategy="no")
    trainer = Small(language_model(), args, train_dataset=samples(), plan="O2", halfstep={"low": "bf16"})
    trainer.train()
    assert trainer.state.global_step == 3
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("prepared", [True, False])
def test_a_replaced_optimizer_is_refused_before_it_steps(prepared, tmp_path):
    trainer = trainer_of("O2", "bf16", tmp_path)
    before = weights(trainer.model)

    class Replace(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            made = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
            trainer.optimizer = trainer.accelerator.prepare(made) if prepared else made

    trainer.add_callback(Replace())
    with pytest.raises(SetupError, match=r"SGD, is not an optimizer of .*HalfstepTrainer\(optimizers=\.\.\.\)"):
        trainer.train()
    assert same_weights(weights(trainer.model), before)


def test_an_override_that_makes_the_optimizer_ends_with_the_trainers(tmp_path):
    class Alone(HalfstepTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    class Whole(Alone):
        def create_optimizer(self, model=None):
            super().create_optimizer()
            return super(Alone, self).create_optimizer()

    for kind in (Alone, Whole):
        args = arguments(tmp_path, save_strategy="no", max_steps=2)
        trainer = kind(language_model(), args, train_dataset=samples(), plan="O2", halfstep={"low": "bf16"})
        if kind is Alone:
            with pytest.raises(SetupError, match=r"an override of create_optimizer that ends with .return super\(\)"):
                trainer.train()
        else:
            trainer.train()
            assert type(trainer.optimizer.optimizer) is torch.optim.SGD


def test_skips_are_counted_from_the_beginning_of_a_run(tmp_path):
    kept = Losses()
    settings = {"save_strategy": "no", "max_steps": 3, "logging_steps": 1}
    trainer = trainer_of("O1", "bf16", tmp_path, settings=settings, callbacks=[kept], model=language_model(at=0))
    trainer.train()
    trainer.train()
    for name in ("halfstep/skipped", "halfstep/bad_losses"):
        assert [row[name] for row in kept.rows] == [1, 1, 1, 0, 0, 0]


def test_the_filter_of_nan_losses_is_told_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "halfstep"):
        trainer_of("O1", "bf16", tmp_path, settings={"logging_nan_inf_filter": True})
    assert "logging_nan_inf_filter=True" in caplog.text


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.1")  # `from transformers import` makes the module anew
    with pytest.raises(SetupError, match=r"transformers 4\.57\.1 is installed.*pip install 'transformers>="):
        runpy.run_path(adapter.__file__)


def test_training_goes_on_in_a_second_call_and_evaluates_between(tmp_path):
    class Save(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            model.save_pretrained(tmp_path / "end")

    trainer = trainer_of("O2", "bf16", tmp_path, settings={"save_strategy": "no", "max_steps": 3}, callbacks=[Save()])
    trainer.train()
    assert json.loads((tmp_path / "end" / "config.json").read_text())["dtype"] == "float32"
    assert trainer.evaluate(samples()[:4])["eval_loss"] > 0
    before = weights(trainer.model)
    trainer.train()
    assert not same_weights(weights(trainer.model), before)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_compiled_model_trains_as_it_does_uncompiled_and_sinks_of_the_user_get_the_steps(tmp_path):
    def trained(seen, **compiled):
        settings = {"save_strategy": "no", "max_steps": 3, **compiled}
        trainer = HalfstepTrainer(
            GPT2LMHeadModel(language_model().config),
            arguments(tmp_path, **settings),
            train_dataset=samples(),
            plan="O2",
            halfstep={"low": "bf16", "sinks": [seen.append]},
        )
        trainer.train()
        return weights(trainer.model)

    seen, other = [], []
    compiled = trained(seen, torch_compile=True, torch_compile_backend="eager")
    assert same_weights(compiled, trained(other))
    assert [record.step for record in seen] == [record.step for record in other] == [1, 2, 3]
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, True], ids=["PEFT's wrapper", "add_adapter"])
def test_lora_on_a_low_base_saves_its_adapters_in_fp32_and_no_config_of_the_base(inside, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed; run ./dev adapters")

    def adapted():
        torch.manual_seed(0)
        model, config = language_model().bfloat16(), peft.LoraConfig(r=2, target_modules=["c_attn"])
        if not inside:
            return peft.get_peft_model(model, config)
        model.add_adapter(config)
        return model

    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.01}
    whole = trainer_of("O2", "bf16", tmp_path, adapted(), settings)
    whole.train()
    folder = tmp_path / "checkpoint-2"
    held = load_file(folder / "adapter_model.safetensors")
    assert {value.dtype for value in held.values()} == {torch.float32}
    assert not (folder / "config.json").exists()
    assert whole.model.config.dtype is not torch.float32  # the base is bf16
    if inside:
        return  # from which the Trainer itself cannot resume
    resumed = trainer_of("O2", "bf16", tmp_path, adapted(), settings)
    resumed.train(resume_from_checkpoint=str(folder))
    assert same_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("adapters", [True, False])
def test_the_best_weights_are_loaded_with_all_their_bits(adapters, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed; run ./dev adapters")
    model = language_model().bfloat16()
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    best = {"eval_strategy": "steps", "load_best_model_at_end": True, "logging_steps": 2, "eval_steps": 2}
    settings = {"max_steps": 6, "save_steps": 2, "learning_rate": 0.1, **best}
    trainer = trainer_of("O2", "bf16", tmp_path, model, settings, eval_dataset=samples()[:4])
    trainer.train()
    assert adapters or not trainer.state.best_model_checkpoint.endswith("-6")  # later ones are worse
    file, end = ("adapter_model", ".default.weight") if adapters else ("model", ".weight")
    held = load_file(f"{trainer.state.best_model_checkpoint}/{file}.safetensors")
    for name, value in held.items():
        assert torch.equal(weights(model)[name.replace(".weight", end)], value)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in held.values())
