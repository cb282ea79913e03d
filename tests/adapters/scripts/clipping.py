"""An LSTM language model whose gradients are clipped."""

import sys

import torch
from torch import nn


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(30, 12)
        self.rnn = nn.LSTM(12, 12, batch_first=True)
        self.decoder = nn.Linear(12, 30)

    def forward(self, x, hidden=None):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output), hidden


torch.manual_seed(3)
model = RNN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
hidden = None
for step in range(6):
    text = torch.randint(0, 30, (4, 7))
    if hidden is not None:
        hidden = tuple(h.detach() for h in hidden)
    model.zero_grad()
    output, hidden = model(text[:, :-1], hidden)
    loss = nn.functional.cross_entropy(output.reshape(-1, 30), text[:, 1:].reshape(-1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    losses += [loss.item(), norm.item()]
torch.save({"losses": losses, "model": model.state_dict()}, sys.argv[1])
