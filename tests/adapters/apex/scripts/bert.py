"""Pretraining of a transformer: FusedLAMB, FusedLayerNorm, accumulation, warm-up, and apex's private names."""

import argparse

import torch
from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm as BertLayerNorm
from apex.optimizers import FusedLAMB
from apex.parallel.distributed import flat_dist_call  # noqa: F401  # as such scripts do
from torch import nn
from torch.nn import functional as F


class BertConfig:
    vocab_size, hidden_size, num_heads, layers, length = 20, 16, 2, 2, 6


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden, mask):
        q, k, v = self.split(self.query(hidden)), self.split(self.key(hidden)), self.split(self.value(hidden))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5 + mask
        probs = nn.Softmax(dim=-1)(scores)
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(hidden.shape)


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.LayerNorm = BertLayerNorm(config.hidden_size, eps=1e-12)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask):
        return self.LayerNorm(hidden + F.gelu(self.dense(self.attention(hidden, mask))))


class BertForPreTraining(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = nn.ModuleList([BertLayer(config) for _ in range(config.layers)])
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.embeddings.weight

    def forward(self, input_ids, attention_mask):
        mask = (1.0 - attention_mask[:, None, None, :].to(dtype=next(self.parameters()).dtype)) * -10000.0
        hidden = self.embeddings(input_ids)
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return self.decoder(hidden)


def prepare_model_and_optimizer(args):
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig)
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(groups, lr=args.learning_rate)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = 2**14
    return model, optimizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--fp32", dest="fp16", action="store_false")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--learning_rate", type=float, default=2e-2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=8)
    args = parser.parse_args()
    model, optimizer = prepare_model_and_optimizer(args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    ids = torch.randint(BertConfig.vocab_size, (8, BertConfig.length))
    attention_mask = (torch.arange(BertConfig.length) < 5).long().expand(8, -1)
    losses, average_loss, global_step, training_steps, norms = [], 0.0, 0, 0, []
    while global_step < args.max_steps:
        training_steps += 1
        half = ids[:4] if training_steps % 2 else ids[4:]
        scores = model(half, attention_mask[:4])
        loss = F.cross_entropy(scores.view(-1, BertConfig.vocab_size), half.view(-1))
        divisor = args.gradient_accumulation_steps
        loss = loss / divisor
        if args.fp16:
            with amp.scale_loss(loss, optimizer, delay_overflow_check=False) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        average_loss += loss.item()
        if training_steps % divisor == 0:
            norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            global_step += 1
            losses.append(average_loss)
            average_loss = 0.0
    if args.fp16:
        print("final loss scale", _amp_state.loss_scalers[0].loss_scale())
    torch.save({"losses": losses, "norms": norms, "weights": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
