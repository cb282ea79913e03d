"""Loops written for torch.amp, as people write them: the same bits with torch, the drop-ins, and `halfstep run`."""

from dataclasses import replace

import pytest
import torch

from halfstep.adapters.torch_amp import install
from halfstep.machine import AVX512_BF16
from tests.adapters.scripts_in_process import converted, differing, plainly, writes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:User provided device_type:UserWarning")

HEAD = """
import copy, sys
from contextlib import nullcontext
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
losses, scales = [], []
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))
"""
TAIL = """
torch.save({"losses": losses, "scales": scales, "model": model.state_dict()}, sys.argv[1])
"""
STYLES = {}
STYLES["the loop of the documentation"] = """
scaler = torch.amp.GradScaler("cpu", growth_interval=2)
for epoch in range(4):
    input, target = batch()
    optimizer.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        output = model(input)
        loss = F.cross_entropy(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
"""
STYLES["the deprecated names, accumulation and clipping"] = """
from torch.cpu.amp import GradScaler, autocast
scaler = GradScaler()
for i in range(6):
    x, y = batch()
    with autocast(dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / 2
    scaler.scale(loss).backward()
    if (i + 1) % 2 == 0:
        scaler.unscale_(optimizer)
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
"""
STYLES["a Trainer class and a decorated forward"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return self.fc(x)


class Trainer:
    def __init__(self, model, amp=True):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", enabled=amp)

    def training_step(self, x, y):
        loss = F.cross_entropy(self.model(x).float(), y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


model = Net()
trainer = Trainer(model)
losses += [trainer.training_step(*batch()) for _ in range(4)]
"""
STYLES["two models, two optimizers, two losses, one scaler"] = """
judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer1 = torch.optim.Adam(judge.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(4):
    x, y = batch()
    optimizer.zero_grad()
    optimizer1.zero_grad()
    with torch.amp.autocast("cpu", torch.bfloat16):
        output0 = model(x)
        output1 = judge(output0)
        loss0 = F.cross_entropy(output0 * 2, y) + output1.mean()
        loss1 = F.binary_cross_entropy_with_logits(output1, torch.ones_like(output1))
    scaler.scale(loss0).backward(retain_graph=True)
    scaler.scale(loss1).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer1)
    scaler.update()
    losses += [loss0.item(), loss1.item()]
"""
STYLES["a gradient penalty"] = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(3):
    x, y = batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    grads = [p * inv_scale for p in scaled]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
STYLES["functions with custom_fwd and custom_bwd"] = """
from torch.amp import custom_bwd, custom_fwd


class Mul(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad.to(a.dtype))


class Full(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


scaler = torch.GradScaler("cpu", init_scale=8.0)
weight = nn.Parameter(torch.randn(3, 3))
optimizer.add_param_group({"params": [weight]})
for _ in range(3):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = Full.apply(Mul.apply(model(x).float(), weight) * 0.1).float().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
STYLES["checkpoint and resume"] = """
import io
def build():
    net = nn.Linear(6, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return net, torch.optim.Adam(net.parameters(), lr=1e-2), scaler


def train(net, opt, scaler, steps):
    for _ in range(steps):
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())


parts = build()
train(*parts, 3)
file = io.BytesIO()
torch.save({name: part.state_dict() for name, part in zip(("model", "opt", "scaler"), parts)}, file)
file.seek(0)
state = torch.load(file)
parts = build()
for name, part in zip(("model", "opt", "scaler"), parts):
    part.load_state_dict(state[name])
train(*parts, 3)
model = parts[0]
scales.append(parts[2].state_dict())
"""
STYLES["EMA, a schedule, and an infinite batch whose skip is seen by the scale"] = """
ema = copy.deepcopy(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
for step in range(6):
    x, y = batch()
    if step == 2:
        x = x * float("inf")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters()):
                average.mul_(0.9).add_(p, alpha=0.1)
    scales.append(scaler.get_scale())
model.ema = ema
"""
STYLES["closures, and a scale that is set by hand"] = """
def make_step(net, opt, scaler):
    def step(x, y, new_scale=None):
        def forward():
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(net(x), y)

        opt.zero_grad()
        loss = forward()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update(new_scale)
        return loss.item()

    return step


scaler = torch.amp.GradScaler("cpu", growth_interval=1)
step = make_step(model, optimizer, scaler)
for i in range(4):
    losses.append(step(*batch(), new_scale=16.0 if i == 2 else None))
    scales.append(scaler.get_scale())
"""
STYLES["sparse gradients"] = """
model = nn.Sequential(nn.EmbeddingBag(20, 6, sparse=True, mode="sum"), nn.Linear(6, 3))
sparse = torch.optim.SparseAdam(model[0].parameters(), lr=1e-2)
dense = torch.optim.Adam(model[1].parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(4):
    words, y = torch.randint(0, 20, (8, 4)), torch.randint(0, 3, (8,))
    sparse.zero_grad()
    dense.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(words), y)
    scaler.scale(loss).backward()
    scaler.step(sparse)
    scaler.step(dense)
    scaler.update()
    losses.append(loss.item())
"""
STYLES["one context for the whole run, bf16, no scaling"] = """
dtype = "bfloat16"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type="cpu", dtype=ptdtype)
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))


@torch.no_grad()
def estimate_loss():
    model.eval()
    with ctx:
        loss = F.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 1])).item()
    model.train()
    return loss


for it in range(3):
    losses.append(estimate_loss())
    for micro in range(2):
        x, y = batch()
        with ctx:
            loss = F.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
STYLES["reentrant checkpoints, and names of modules that no drop-in is put into"] = """
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
scaler = GradScaler("cpu", init_scale=512.0)
for _ in range(3):
    x, y = batch()
    with autocast("cpu", torch.bfloat16):
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        loss = F.cross_entropy(model[2](hidden), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
OFF = """
from torch.cuda.amp import GradScaler, autocast
use_amp = torch.cuda.is_available()
scaler = GradScaler(enabled=use_amp)
for _ in range(3):
    x, y = batch()
    optimizer.zero_grad()
    with autocast(enabled=use_amp):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""


@pytest.mark.parametrize("style", STYLES)
def test_a_torch_amp_loop_has_the_same_bits_on_the_drop_ins_and_under_run(style, tmp_path, on_processor):
    on_processor(replace(AVX512_BF16, fp16=2.0))  # else the drop-ins emulate, and round otherwise than torch's kernels
    path = writes(tmp_path, HEAD + STYLES[style] + TAIL)
    theirs = plainly(path, tmp_path / "torch.pt")
    undo = install()
    try:
        assert differing(plainly(path, tmp_path / "drop_ins.pt"), theirs) == []
    finally:
        undo()
    found, ran = converted(path, tmp_path / "run.pt", "O2", "fp16")  # which would scale and cast once more
    assert differing(found, theirs) == []
    assert ran.brings in ("torch.amp's autocast", "torch.amp's GradScaler")
    assert ran.trained is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script switches torch.amp on where there is a GPU")
def test_a_loop_that_switches_torch_amp_off_is_trained_under_the_plan(tmp_path):
    path = writes(tmp_path, HEAD + OFF + TAIL)
    theirs = plainly(path, tmp_path / "torch.pt")
    found, ran = converted(path, tmp_path / "run.pt", "O0", None)
    assert differing(found, theirs) == []
    found, ran = converted(path, tmp_path / "run.pt", "O1", "bf16")
    assert differing(found, theirs) != []
    assert (ran.brings, ran.trained.steps) == (None, 3)
