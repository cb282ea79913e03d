"""A character GPT on Tiny Shakespeare with Lightning Fabric: python examples/fabric_char_lm.py"""

import argparse
from pathlib import Path

import lightning
import torch
from torch.nn import functional as F

from halfstep.adapters.lightning import Halfstep
from halfstep.lab.workloads.char_lm import GPT, read_text

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a text file; Tiny Shakespeare by default, which comes with halfstep")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
parser.add_argument("--level", default="O2")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--out", type=Path, default=Path("fabric_char_lm.ckpt"), help="where the checkpoint goes")
parser.add_argument("--resume", action="store_true", help="go on from that checkpoint")
args = parser.parse_args()

lightning.seed_everything(0)
text, length = read_text(args.text), 64
characters = sorted(set(text))
numbers = {character: number for number, character in enumerate(characters)}
data = torch.tensor([numbers[character] for character in text])

plugin = Halfstep(args.level)  # in place of precision=
fabric = lightning.Fabric(plugins=[plugin])
model = GPT(len(characters), d=args.width, layers=2, heads=4, length=length)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
model, optimizer = plugin.setup(fabric, model, optimizer)  # in place of fabric.setup

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "halfstep": plugin, "step": 0}
if args.resume:
    fabric.load(args.out, state)
while state["step"] < args.steps:
    for micro in range(args.accumulate):
        starts = torch.randint(len(data) - length - 1, (16, 1))
        windows = fabric.to_device(data[starts + torch.arange(length + 1)])
        with fabric.no_backward_sync(model, enabled=micro < args.accumulate - 1):
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            fabric.backward(loss / args.accumulate)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    state["step"] += 1
    if state["step"] % 50 == 0:
        fabric.print(f"step {state['step']}: loss {loss.item():.4f}")

fabric.save(args.out, state)
fabric.print(f"loss {loss.item():.4f}")
plugin.close()
