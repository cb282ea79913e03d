"""Whether healthy models are left in peace: absorbed overflows that a check and a probe report of them in fp16.

    pip install torch==2.13.0 torchvision==0.28.0 transformers timm diffusers
    python benchmarks/false_alarms.py [--only NAME ...] [--json FILE]

A torchvision needs the torch of its own version and build: another one has pip replace torch, or cannot be imported.

Each model has random weights and is made of a small config: nothing is downloaded. It is checked at O1 and O2 in fp16
(emulated where the device has no units for it), then trained for two steps that a probe observes with `absorbed=True`.
There is nothing to find, so that each absorbed overflow is a false alarm. The other codes of findings above a note are
listed, as a check says more than this. The exit code is 1 if there is a false alarm, or a model that could not be run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import diffusers
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep
from halfstep.machine import read_machine
from halfstep.records import ABSORBED

LEVELS = ("O1", "O2")
STEPS = 2
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 16
CODE = "overflow absorbed"
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]  # a model, and the loss that it computes


@dataclass(frozen=True)
class Row:
    """What was said of one model at one level: absorbed overflows in check and probe, other codes, or an error."""

    model: str
    level: str
    parameters: int
    check: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    error: str | None = None


def tokens() -> Tensor:
    """Returns ids of 2 texts."""
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def pictures(size: int, channels: int = 3) -> Tensor:
    """Returns 2 pictures."""
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def causal(name: str, **options: object) -> Callable[[], Made]:
    """Returns what makes a decoder of transformers with its own loss."""

    def make() -> Made:
        config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return model, lambda model: model(input_ids=tokens(), labels=tokens()).loss

    return make


def masked(name: str, **options: object) -> Callable[[], Made]:
    """Returns what makes an encoder of transformers, given a padded batch."""

    def make() -> Made:
        config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
        model = transformers.AutoModelForMaskedLM.from_config(config)
        mask = torch.ones(2, LENGTH, dtype=torch.int64)
        mask[1, LENGTH // 2 :] = 0
        return model, lambda model: model(input_ids=tokens(), attention_mask=mask, labels=tokens()).loss

    return make


def pair(name: str, **options: object) -> Callable[[], Made]:
    """Returns what makes an encoder and decoder of transformers."""

    def make() -> Made:
        config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
        config.decoder_start_token_id, config.pad_token_id = 0, 0
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        return model, lambda model: model(input_ids=tokens(), labels=tokens()).loss

    return make


def of_timm(name: str, size: int = 64, **options: object) -> Callable[[], Made]:
    """Returns what makes a classifier of timm."""

    def make() -> Made:
        model = timm.create_model(name, pretrained=False, num_classes=5, **options)
        return model, lambda model: F.cross_entropy(model(pictures(size)), torch.tensor([1, 3]))

    return make


def of_diffusers(kind: str, *further: object, channels: int = 3, **options: object) -> Callable[[], Made]:
    """Returns what makes a denoiser of diffusers, given late and early timesteps."""

    def make() -> Made:
        model = getattr(diffusers, kind)(**options)
        noise = pictures(16, channels)
        steps = torch.tensor([999, 1])
        return model, lambda model: F.mse_loss(model(noise, steps, *further).sample[:, :channels], noise)

    return make


def autoencoder() -> Made:
    """Returns a variational autoencoder of diffusers."""
    model = diffusers.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **blocks(2, "EncoderBlock2D"))
    return model, lambda model: F.mse_loss(model(pictures(16)).sample, pictures(16))


def blocks(count: int, kind: str = "Block2D") -> dict[str, object]:
    """Returns the options that name the blocks of a network of diffusers."""
    up = kind.replace("Encoder", "Decoder")
    return {"down_block_types": (f"Down{kind}",) * count, "up_block_types": (f"Up{up}",) * count}


SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64}
D_MODEL = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
UNET = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": causal("gpt2", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "llama": causal("llama", num_key_value_heads=2, **SIZES),
    "mistral": causal("mistral", num_key_value_heads=2, sliding_window=8, **SIZES),
    "qwen2": causal("qwen2", num_key_value_heads=2, **SIZES),
    "gemma": causal("gemma", num_key_value_heads=1, head_dim=8, **SIZES),
    "gpt_neox": causal("gpt_neox", **SIZES),
    "opt": causal("opt", hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=64),
    "bloom": causal("bloom", hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "bert": masked("bert", **SIZES),
    "roberta": masked("roberta", **SIZES),
    "albert": masked("albert", embedding_size=16, **SIZES),
    "distilbert": masked("distilbert", dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=64),
    "deberta_v2": masked("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], **SIZES),
    "t5": pair("t5", d_model=WIDTH, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=HEADS),
    "bart": pair("bart", **D_MODEL),
    "pegasus": pair("pegasus", **D_MODEL),
    "timm resnet10t": of_timm("resnet10t"),
    "timm vit": of_timm("vit_tiny_patch16_224", img_size=64, embed_dim=WIDTH, depth=LAYERS, num_heads=HEADS),
    "timm convnext": of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm swin": of_timm(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm mobilevit": of_timm("mobilevit_xxs"),
    "timm mobilenetv3": of_timm("mobilenetv3_small_050"),
    "diffusers UNet2D": of_diffusers("UNet2DModel", sample_size=16, **UNET, **blocks(2)),
    "diffusers UNet2DCondition": of_diffusers(
        "UNet2DConditionModel", torch.randn(2, 4, WIDTH), channels=4, sample_size=16, cross_attention_dim=WIDTH,
        attention_head_dim=2, **UNET, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers DiT": of_diffusers(
        "DiTTransformer2DModel", torch.tensor([1, 3]), channels=4, num_attention_heads=HEADS, attention_head_dim=8,
        in_channels=4, out_channels=4, num_layers=LAYERS, sample_size=16, norm_num_groups=4,
    ),
    "diffusers AutoencoderKL": autoencoder,
}  # fmt: skip


def look(name: str, level: str) -> Row:
    """Checks a model at a level in fp16, and trains it under a probe."""
    torch.manual_seed(0)
    count = 0
    try:
        model, loss = MODELS[name]()
        count = sum(p.numel() for p in model.parameters())
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with halfstep.initialize(model, optimizer, level, low="fp16", on_failure="warn") as session:
            found = halfstep.check(session, lambda: loss(model))
            probe = session.observe(every=1, tensors=(), absorbed=True)
            for _ in range(STEPS):
                optimizer.zero_grad()
                session.backward(loss(model))
                session.step()
            seen = [each for each in probe.flush() if each.kind == ABSORBED]
    except Exception as error:  # whatever a model raises: a row that says so
        return Row(name, level, count, error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return Row(
        name,
        level,
        count,
        check=tuple(f"{each.place}: {each.evidence}" for each in found if each.code == CODE),
        probe=tuple(f"step {each.step}, {each.module}: {each.absorbed}" for each in seen),
        others=tuple(dict.fromkeys(each.code for each in found if each.code != CODE and each.severity != "note")),
    )


def main() -> int:
    """Looks at all models, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write every row, with machine and versions, to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries
    rows = []
    print("| model | level | parameters | check | probe | other findings |\n| --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        for level in LEVELS:
            row = look(name, level)
            rows.append(row)
            others = row.error or ", ".join(row.others) or "-"
            figures = f"{row.parameters:,} | {len(row.check)} | {len(row.probe)}"
            print(f"| {name} | {level} | {figures} | {others} |", flush=True)
            for said in (*row.check, *row.probe):
                print(f"    {said}", flush=True)
    alarms = sum(len(row.check) + len(row.probe) for row in rows)
    failed = sum(row.error is not None for row in rows)
    print(f"{alarms} false alarms in {len(rows) - failed} runs; {failed} could not be run")
    if options.json is not None:
        libraries = {each.__name__: each.__version__ for each in (transformers, timm, diffusers)}
        result = {
            "alarms": alarms,
            "rows": [asdict(row) for row in rows],
            "libraries": libraries,
            "machine": asdict(read_machine(torch.device("cpu"))),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if not alarms and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
