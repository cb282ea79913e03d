"""A small BERT on IMDB reviews in Hugging Face's Trainer: python examples/hf_trainer_finetune.py --data FOLDER"""

import argparse
from pathlib import Path

import torch
from data import imdb
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from halfstep.adapters.transformers import HalfstepTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with imdb_train.tsv.gz")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--level", default="O2")
parser.add_argument("--out", type=Path, default=Path("hf_trainer_finetune"), help="where checkpoints go")
args = parser.parse_args()

torch.manual_seed(0)
reviews, verdicts = imdb(args.data)
data = [{"input_ids": text, "labels": label} for text, label in zip(reviews, verdicts.long(), strict=True)]
config = BertConfig(vocab_size=5000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
trainer = HalfstepTrainer(
    BertForSequenceClassification(config),
    TrainingArguments(  # without bf16= and fp16=
        str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=32,
        learning_rate=5e-4,
        report_to=[],
    ),
    train_dataset=data,
    plan=args.level,
)
result = trainer.train()
print(f"loss {result.training_loss:.4f}")
