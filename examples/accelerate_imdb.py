"""A sentiment LSTM on IMDB reviews with Accelerate: python examples/accelerate_imdb.py --data FOLDER"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from data import imdb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.adapters.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with imdb_train.tsv.gz")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--level", default="O2")
args = parser.parse_args()


class SentimentRNN(nn.Module):
    def __init__(self, words=5000, embedding=64, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.rnn = nn.LSTM(embedding, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        _, (hidden, _) = self.rnn(self.embedding(x))
        return self.fc(hidden[-1]).squeeze(1)


torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)  # without mixed_precision=
model = SentimentRNN()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
loader = DataLoader(TensorDataset(*imdb(args.data)), batch_size=32, shuffle=True)
model, optimizer, scheduler, loader = prepare(accelerator, model, optimizer, scheduler, loader, plan=args.level)

step = 0
while step < args.steps:
    for text, label in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.binary_cross_entropy_with_logits(model(text), label)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == args.steps:
            break

accelerator.print(f"loss {loss.item():.4f}")
