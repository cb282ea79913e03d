"""LoRA adapters on a GPT-2 that is stored in bf16, on IMDB reviews: python examples/peft_lora.py --data FOLDER"""

import argparse
from pathlib import Path

import torch
from data import imdb
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with imdb_train.tsv.gz")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--level", default="O2")
parser.add_argument("--out", type=Path, default=Path("peft_lora"), help="where the adapters go")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
reviews, _ = imdb(args.data, length=64)
loader = DataLoader(TensorDataset(reviews), batch_size=16, shuffle=True)

# A small model with random weights, in place of `GPT2LMHeadModel.from_pretrained(..., dtype="bfloat16")`.
base = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_positions=64, n_embd=128, n_layer=2, n_head=4))
base = base.to(device, torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn", "c_proj"]))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

with halfstep.initialize(model, optimizer, args.level, low="bf16") as session:
    step = 0
    while step < args.steps:
        for (words,) in loader:
            words = words.to(device)
            loss = model(input_ids=words, labels=words).loss
            session.backward(loss)
            session.step(max_norm=1.0)
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == args.steps:
                break
    model.save_pretrained(args.out)  # the adapters, in fp32; the base stays the file that it was loaded from
print(f"loss {loss.item():.4f}")
