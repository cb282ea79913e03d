"""A character GPT, sharded by FSDP2: torchrun --nproc-per-node 2 examples/fsdp_char_lm.py --out checkpoint

Goes on from the checkpoint where there is one, which any number of processes may have written.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import shakespeare
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--level", default="O2")
parser.add_argument("--low", default="bf16")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--out", type=Path, help="the folder of the checkpoint")
args = parser.parse_args()
LENGTH = 64


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters, width, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    data, characters = shakespeare()
    torch.manual_seed(0)
    model = GPT(characters, args.width).to(device)
    policy = halfstep.fsdp_policy(args.level, low=args.low)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, args.level, low=args.low)

    start = 0
    if args.out is not None and args.out.exists():
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states, "session": session.state_dict()}
        dcp.load(saved, checkpoint_id=args.out)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        session.load_state_dict(saved["session"])
        start = saved["session"]["steps"]

    batches = torch.Generator().manual_seed(1 + rank + 1000 * start)
    for step in range(start, start + args.steps):
        starts = torch.randint(len(data) - LENGTH - 1, (16, 1), generator=batches)
        windows = data[starts + torch.arange(LENGTH + 1)].to(device)
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        session.backward(loss)
        session.step(max_norm=1.0)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    if args.out is not None:
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states, "session": session.state_dict()}
        dcp.save(saved, checkpoint_id=args.out)
    if rank == 0:
        print(f"step {session.status().steps}: loss {loss.item():.4f}")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
