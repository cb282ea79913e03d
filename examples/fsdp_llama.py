"""A small Llama as torchtitan trains large ones: torchrun --nproc-per-node 2 examples/fsdp_llama.py --out checkpoint

Made on the meta device, sharded by block, over `--tensor 2` processes a layer too; blocks are checkpointed and, with
`--compile inductor`, compiled; checkpoints are written while it trains, which goes on from one that is there.
`--moments 8bit` keeps Adam's averages in a byte each; `--level torch` is torch's MixedPrecisionPolicy alone.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import shakespeare
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfstep

parser = argparse.ArgumentParser()
for name, default in {"level": "O2", "moments": "full", "steps": 100, "width": 128, "layers": 4, "tensor": 1}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--compile", help="a backend of torch.compile, such as inductor")
parser.add_argument("--out", type=Path, help="the folder of checkpoints")
args = parser.parse_args()
LENGTH, HEAD = 64, 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def attend(self, x, turns):
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (torch.view_as_real(torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) * turns) for t in (q, k))
        q, k = (t.flatten(-2).to(v.dtype) for t in (q, k))
        return self.wo(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x, turns):
        x = x + self.attend(self.norm1(x), turns)
        normed = self.norm2(x)
        return x + self.w2(nn.functional.silu(self.w1(normed)) * self.w3(normed))


class Llama(nn.Module):
    def __init__(self, characters, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, characters, bias=False)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] / 1e4 ** torch.linspace(0, 1, HEAD // 2 + 1)[:-1]
        turns, x = torch.polar(torch.ones_like(angles), angles).to(ids.device), self.tokens(ids)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


LAYERS = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
LAYERS |= {name: RowwiseParallel() for name in ("wo", "w2")}


def shards(mesh, characters, policy):
    """Returns the model in shards, of which no process ever held the whole."""
    with torch.device("meta"):
        model = Llama(characters, args.width, args.layers)
    shard = partial(fully_shard, mesh=mesh["data"], mp_policy=policy)
    for block in model.blocks:
        if args.tensor > 1:
            parallelize_module(block, mesh["tensor"], LAYERS)
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
        if args.compile:
            block.compile(backend=args.compile)
        shard(block)
    shard(model)
    model.to_empty(device=mesh.device_type)
    for number, p in enumerate(model.parameters()):
        here = mesh.get_coordinate()[: p.device_mesh.ndim]  # what tensor parallel processes share is the same in all
        seed = torch.Generator(mesh.device_type).manual_seed(hash((number, *here)))
        nn.init.normal_(p.to_local(), std=0.02, generator=seed) if p.ndim > 1 else nn.init.ones_(p.to_local())
    return model


def held(model, optimizer):
    """Returns the bytes that this process holds for each of its weights, without a session."""
    states = [t for state in optimizer.state.values() for t in state.values()]
    kinds = {"weights": model.parameters(), "gradients": [p.grad for p in model.parameters()], "optimizer": states}
    return {kind: sum(getattr(t, "_local_tensor", t).nbytes for t in tensors) for kind, tensors in kinds.items()}


def state(steps):
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "session": session.state_dict() if session else {"steps": steps}}


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
processes, plain = dist.get_world_size(), args.level == "torch"
if min(args.steps, args.tensor) < 1 or processes % args.tensor or args.width % (HEAD * args.tensor):
    parser.error(f"--tensor divides the {processes} processes, and --width / {HEAD}; no number is below 1")
if plain and (args.tensor > 1 or args.moments != "full"):
    parser.error("--level torch has full moments, and torch clips one mesh: leave out --moments and --tensor")
mesh = init_device_mesh(device, (processes // args.tensor, args.tensor), mesh_dim_names=("data", "tensor"))
data, characters = shakespeare()
low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = shards(mesh, characters, low if plain else halfstep.fsdp_policy(args.level, low="bf16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = None if plain else halfstep.initialize(model, optimizer, args.level, low="bf16", moments=args.moments)

start, saving, apart = 0, None, dist.new_group(backend="gloo")
whole = [int(each.parent.name) for each in args.out.glob("*/.metadata")] if args.out else []  # written last
if whole:
    dcp.load(saved := state(0), checkpoint_id=args.out / str(max(whole)))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    start = saved["session"]["steps"]
    if session:
        session.load_state_dict(saved["session"])
for step in range(start, start + args.steps):
    batches = torch.Generator().manual_seed(1000 * step + mesh["data"].get_local_rank())
    windows = data[torch.randint(len(data) - LENGTH, (16, 1), generator=batches) + torch.arange(LENGTH + 1)].to(device)
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())
    optimizer.zero_grad()
    if session:
        session.backward(loss)
        session.step(max_norm=1.0)
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if dist.get_rank() == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
    if args.out is not None and step == start + args.steps // 2:
        saving = dcp.async_save(state(step + 1), checkpoint_id=args.out / str(step + 1), process_group=apart)

if saving is not None:
    saving.result()
    dcp.save(state(step + 1), checkpoint_id=args.out / str(step + 1))
here, bytes_of = sum(p.to_local().numel() for p in model.parameters()), session and session.status().memory
if dist.get_rank() == 0:
    each = ", ".join(f"{kind} {count / here:.2f}" for kind, count in (bytes_of or held(model, optimizer)).items())
    print(f"step {step + 1}: loss {loss.item():.4f}; bytes for each weight: {each}")
dist.destroy_process_group()
