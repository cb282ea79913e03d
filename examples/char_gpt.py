"""A character GPT on Tiny Shakespeare, with no mixed precision at all.

python examples/char_gpt.py
halfstep run --level O2 examples/char_gpt.py
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a text file; Tiny Shakespeare by default, which comes with halfstep")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--out", type=Path, help="where the checkpoint goes")
args = parser.parse_args()


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
    def __init__(self, characters, width, length, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


def read(file):
    if file is not None:
        return file.read_text(encoding="utf-8")
    import halfstep

    (shipped,) = (Path(halfstep.__file__).parent / "lab" / "workloads" / "data").glob("*shakespeare*")
    return gzip.decompress(shipped.read_bytes()).decode()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, length = read(args.text), 64
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    data = torch.tensor([numbers[character] for character in text])
    model = GPT(len(characters), args.width, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        starts = torch.randint(len(data) - length - 1, (16, 1))
        windows = data[starts + torch.arange(length + 1)].to(device)
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"loss {loss.item():.4f}")
    if args.out is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
