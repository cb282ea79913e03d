"""A tensor parallel MLP on a toy regression: torchrun --nproc-per-node 2 examples/tp_mlp.py

With `--data 2` and twice as many processes FSDP2 shards it over the other dimension of the mesh.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--level", default="O2")
parser.add_argument("--low", default="bf16")
parser.add_argument("--data", type=int, default=1, help="how many processes have batches of their own")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (args.data, dist.get_world_size() // args.data), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 4)).to(device)
    target = torch.randn(16, 4).to(device)
    for block in model[1:3]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if args.data > 1:
        fully_shard(model, mesh=mesh["data"], mp_policy=halfstep.fsdp_policy(args.level, low=args.low))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = halfstep.initialize(model, optimizer, args.level, low=args.low)

    batches = torch.Generator().manual_seed(1 + mesh["data"].get_local_rank())  # one for all tensor parallel processes
    for step in range(args.steps):
        inputs = torch.randn(32, 16, generator=batches).to(device)
        loss = nn.functional.mse_loss(model(inputs), (inputs @ target).tanh())
        optimizer.zero_grad()
        session.backward(loss)
        session.step(max_norm=1.0)
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
