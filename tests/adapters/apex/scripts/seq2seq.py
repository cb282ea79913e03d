"""A translation model: recurrent encoder and decoder, one optimizer, clipping by master_params, an LR scheduler."""

import argparse
import random

import torch
import torch.nn as nn

try:
    from apex import amp
except ImportError:
    amp = None


class Encoder(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.rnn = nn.GRU(size, size, batch_first=True)

    def forward(self, src):
        return self.rnn(self.embedding(src))


class Decoder(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.cell = nn.GRUCell(2 * size, size)
        self.out = nn.Linear(2 * size, vocab)

    def step(self, token, hidden, memory):
        weights = torch.bmm(memory, hidden.unsqueeze(2)).squeeze(2).softmax(1)
        context = torch.bmm(weights.unsqueeze(1).to(memory.dtype), memory).squeeze(1)
        hidden = self.cell(torch.cat([self.embedding(token), context], 1), hidden)
        return self.out(torch.cat([hidden, context], 1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, vocab=12, size=16):
        super().__init__()
        self.encoder, self.decoder = Encoder(vocab, size), Decoder(vocab, size)

    def forward(self, batch, teacher_forcing=0.5):
        memory, hidden = self.encoder(batch["src"])
        hidden, token, outputs = hidden[0], batch["trg"][:, 0], []
        for t in range(1, batch["trg"].size(1)):
            logits, hidden = self.decoder.step(token, hidden, memory)
            outputs.append(logits)
            token = batch["trg"][:, t] if random.random() < teacher_forcing else logits.argmax(1)
        return torch.stack(outputs, 1)


class Trainer:
    def __init__(self, args):
        torch.manual_seed(1)
        random.seed(1)
        self.use_amp = not args.fp32
        self.clip = 0.5
        self.model = Seq2Seq()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)
        if self.use_amp:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=args.opt_level)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1, factor=0.5)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)

    def train_step(self, batch):
        self.optimizer.zero_grad()
        out = self.model(batch)
        loss = self.criterion(out.reshape(-1, out.size(-1)), batch["trg"][:, 1:].reshape(-1))
        if self.use_amp:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), self.clip)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def fit(self, batches, epochs=5):
        history = []
        for _ in range(epochs):
            history.append(sum(self.train_step(batch) for batch in batches))
            self.scheduler.step(history[-1])
        return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--opt-level", default="O1")
    trainer = Trainer(parser.parse_args())
    src = torch.randint(1, 12, (8, 5), generator=torch.Generator().manual_seed(0))
    losses = trainer.fit([{"src": part, "trg": part.flip(1)} for part in src.split(4)])
    torch.save({"losses": losses, "weights": trainer.model.state_dict()}, parser.parse_args().out)
