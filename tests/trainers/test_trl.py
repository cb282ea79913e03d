"""TRL's trainers under HalfstepMixin: the losses of TRL's own bf16, resume from its checkpoints, a skipped step."""

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed; run ./dev adapters")
peft = pytest.importorskip("peft", reason="PEFT is not installed; run ./dev adapters")

import datasets  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from halfstep.adapters.transformers import HalfstepMixin  # noqa: E402
from tests.trainers.loops import same_weights  # noqa: E402
from tests.trainers.test_transformers import Losses, fresh_state, weights  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")
LETTERS = "abcdefgh"


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: 3 + i for i, c in enumerate(LETTERS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(**settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(pad_token_id=0, eos_token_id=1, **{**sizes, **heads, **settings}))


def low_with_adapters():
    torch.manual_seed(1)
    return peft.get_peft_model(llama().bfloat16(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def rewards(completions, **_):
    return [float(each.count("a")) for each in completions]


def rows(key=None):
    lines = [" ".join(LETTERS[i:] + LETTERS[:i]) for i in range(8)] * 4
    if key == "prompt":
        return datasets.Dataset.from_list([{"prompt": line[:7]} for line in lines])
    if key == "pairs":
        pairs = [{"prompt": line[:7], "chosen": line[7:], "rejected": " h h h"} for line in lines]
        return datasets.Dataset.from_list(pairs)
    return datasets.Dataset.from_list([{"text": line} for line in lines])


KINDS = {  # trainer, its configuration, data, more for either
    "SFT": (trl.SFTTrainer, trl.SFTConfig, rows, {"max_length": 16}, {}),
    "LoRA": (trl.SFTTrainer, trl.SFTConfig, rows, {"max_length": 16}, {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, lambda: rows("pairs"), {"max_length": 16}, {"ref_model": llama}),
    "GRPO": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        lambda: rows("prompt"),
        {"num_generations": 2, "max_completion_length": 8},
        {"reward_funcs": lambda: rewards},
    ),
}
PACKED = {"max_length": 16, "packing": True, "eval_strategy": "steps", "eval_steps": 2}
KINDS["packed"] = (trl.SFTTrainer, trl.SFTConfig, rows, PACKED, {"eval_dataset": rows})
KINDS["reference"] = (*KINDS["GRPO"][:3], {**KINDS["GRPO"][3], "beta": 0.5}, KINDS["GRPO"][4])


def trainer_of(kind, level, folder, **settings):
    """Returns a trainer of TRL under a plan, or, with a level of "fp32" or "bf16", TRL's own."""
    trainer, config, data, own, given = KINDS[kind]
    common = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "bf16": level == "bf16",
        "save_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
    args = config(output_dir=str(folder), **{**common, **own, **settings})
    halfstep = {} if level in ("fp32", "bf16") else {"plan": level, "halfstep": {"low": "bf16"}}
    model = low_with_adapters() if kind == "LoRA" else llama()
    if kind == "reference":  # which GRPO loads by the name of the model
        model.save_pretrained(folder / "base")  # in the first process alone
        model.config._name_or_path = str(folder / "base")
        if torch.distributed.is_initialized():  # by the arguments
            torch.distributed.barrier()
    more = {name: make() for name, make in given.items()}
    mixed = type("Mine", (HalfstepMixin, trainer), {}) if halfstep else trainer
    kept = Losses()
    made = mixed(
        model=model, args=args, train_dataset=data(), processing_class=tokenizer(), callbacks=[kept], **more, **halfstep
    )
    return made, kept


@pytest.mark.slow_but("SFT-O2", "GRPO-O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_trl_trains_as_under_its_own_bf16_and_resumes_bit_for_bit(kind, level, tmp_path):
    losses = {}
    for name in ("fp32", "bf16", level):
        trainer, kept = trainer_of(kind, name, tmp_path / name, **({} if name == level else {"save_strategy": "no"}))
        trainer.train()
        losses[name] = torch.tensor([row["loss"] for row in kept.rows])
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert len(losses[level]) == 4
    assert all(torch.allclose(each, losses[level], rtol=0, atol=1e-3) for each in losses.values())
    resumed, _ = trainer_of(kind, level, tmp_path / level)
    resumed.train(resume_from_checkpoint=str(tmp_path / level / "checkpoint-2"))
    assert same_weights(weights(resumed.model), weights(trainer.model))


def test_another_release_of_trl_is_told_and_trains(tmp_path, monkeypatch, caplog):
    for version in ("1.16.3", "1.17.0", "1.160.0"):
        monkeypatch.setattr(trl, "__version__", version)
        trainer_of("SFT", "O2", tmp_path)
    told = [each.getMessage() for each in caplog.records if "TRL" in each.getMessage()]
    assert ["1.17.0" in each or "1.160.0" in each for each in told] == [True, True]
    assert all("tested with TRL 1.16" in each for each in told)
