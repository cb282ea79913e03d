"""A sentiment LSTM on IMDB reviews, in halfstep's own lines: python examples/halfstep_sentiment.py --data FOLDER"""

import argparse
from pathlib import Path

import torch
from data import imdb
from torch import nn

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with imdb_train.tsv.gz")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--level", default="O2")
parser.add_argument("--out", type=Path, help="where the checkpoint goes")
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
device = "cuda" if torch.cuda.is_available() else "cpu"
reviews, verdicts = imdb(args.data)
model = SentimentRNN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
criterion = nn.BCEWithLogitsLoss()
session = halfstep.initialize(model, optimizer, args.level)

for step in range(args.steps):
    chosen = torch.randint(len(reviews), (64,))
    text, label = reviews[chosen].to(device), verdicts[chosen].to(device)
    optimizer.zero_grad()
    loss = criterion(model(text), label)
    session.backward(loss)
    session.step(max_norm=1.0)
    scheduler.step()

print(f"loss {loss.item():.4f}")
if args.out is not None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
    torch.save(state, args.out)
