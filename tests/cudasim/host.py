"""The host's cost on CUDA: of `session.step` beside torch's own parts, and of forward and backward beside torch.amp.

    python -m tests.cudasim.host [step] [models]

For the step all kernels of both are mocked. For models the time of the simulated device's kernels is taken off. Each
row has a process of its own, as kernels and hooks serve all sessions. All are measured in turns, and the clock is CPU
time. Read the ratios; microseconds are of this machine.
"""

import gc
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

from tests.cudasim import build

if (what := build.lacking()) is not None:
    sys.exit(f"no simulated CUDA device here: {what}")
build.load()

import torch  # noqa: E402  # after the device
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import halfstep  # noqa: E402
from halfstep.lab.workloads.cifar_resnet import Bottleneck, ResNet  # noqa: E402
from tests.cudasim import device  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import train_step  # noqa: E402  # a script

ROUNDS = 15


def launch(self, *args, grid=None, warmup=False, **options):
    """Counts a launch, and does nothing."""
    device.LAUNCHES[self.fn.__name__] += 1


def of_torch(count):
    """Returns a call of torch's own parts for as many tensors, whose kernels do nothing, and what comes before it."""
    params = [nn.Parameter(torch.ones(16, 16, device="cuda")) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    optimizer.step()
    mocks = {
        "_fused_adamw_": lambda *args, **options: None,
        "_foreach_add_": lambda *args, **options: None,
        "_foreach_mul_": lambda *args, **options: None,
        "_foreach_norm": lambda tensors, *args, **options: [tensors[0][0, 0]] * len(tensors),
        "stack": lambda tensors, *args, **options: tensors[0],
    }

    def call():
        kept = {name: getattr(torch, name) for name in mocks}
        for name, mock in mocks.items():
            setattr(torch, name, mock)
        try:
            nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
        finally:
            for name, function in kept.items():
                setattr(torch, name, function)

    return call, lambda: None


def of_session(count, level):
    """Returns a call of a session's step for as many tensors, and what gives it gradients at other addresses."""
    JITFunction.run = launch
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(count))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, level, low="bf16")
    params = list(model.parameters())

    def prepare():
        optimizer.zero_grad()
        session.backward(model[0](torch.ones(1, 16, device="cuda")).float().sum() * 0.0)
        for p in params:
            p.grad = torch.zeros_like(p)
        device.LAUNCHES.clear()
        device.taken()

    return (lambda: session.step(max_norm=1.0)), prepare


class Residual(nn.Sequential):
    """A small block."""

    def forward(self, x):
        return x + super().forward(x)


def model_of(name):
    """Returns a model as deep as the one it stands for, and narrow, with inputs and labels: its cost is alike."""
    torch.manual_seed(0)
    tokens, labels = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    if name == "GPT-2":
        model = train_step.GPT2(64, d=48, layers=12, heads=12, context=16)
        return model.cuda(), tokens.cuda(), tokens.flatten().cuda()
    if name == "ResNet-50":
        model = ResNet(Bottleneck, (3, 4, 6, 3), width=4, classes=10)
        return model.cuda(), torch.randn(2, 3, 32, 32).cuda(), labels.cuda()
    parts = (Residual(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(24))
    return nn.Sequential(*parts).cuda(), torch.randn(2, 16).cuda(), labels.cuda()


MODELS = ("GPT-2", "ResNet-50", "24 small blocks")


def of_model(name, level):
    """Returns a call of a model's forward and backward, at a level or under torch.amp, and what comes before it."""
    model, inputs, targets = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = None if level == "torch.amp" else halfstep.initialize(model, optimizer, level, low="bf16")

    def call():
        if session is None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(inputs).flatten(0, -2), targets)
            loss.backward()
        else:
            session.backward(F.cross_entropy(model(inputs).flatten(0, -2), targets))

    def prepare():
        (session or optimizer).step()  # as losses add up until one
        optimizer.zero_grad()

    call()
    return call, prepare


def host_time(call, prepare):
    """Returns the microseconds of a call on all threads (autograd has one for each device), without kernels."""
    prepare()
    torch.ops.cudasim.kernels()
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start - torch.ops.cudasim.kernels()) / 1e3


def show(what, names, peer):
    """Prints the ratios of all rows to a peer."""
    command = [sys.executable, "-m", "tests.cudasim.host", "row"]
    rows = {
        row: subprocess.Popen([*command, row], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for row in (peer, "O1", "O2")
    }
    for name in names:
        times, launches = {row: [] for row in rows}, {}
        for _ in range(ROUNDS):
            for row, process in rows.items():
                print(name, file=process.stdin, flush=True)
                taken, launches[row] = map(float, process.stdout.readline().split())
                times[row].append(taken)
        base, *found = (statistics.median(times[row]) for row in rows)
        ratios = ", ".join(
            f"{row} {each:.0f} us ({each / base:.2f})" for row, each in zip(list(rows)[1:], found, strict=True)
        )
        made = f"; {launches['O2']:.0f} launches a step" if name.isdigit() else ""
        print(f"{name} {what}: {peer} {base:.0f} us, {ratios}{made}", flush=True)
    for process in rows.values():
        process.communicate()


def answer(level):
    """Measures a row of one model, or of a step of as many tensors, for each line of stdin."""
    name = None
    for line in sys.stdin:
        if line.strip() != name:
            name, row = line.strip(), None
            gc.collect()  # which closes the last session
            if not name.isdigit():
                row = of_model(name, level)
            else:
                row = of_torch(int(name)) if level == "torch" else of_session(int(name), level)
            host_time(*row)
        taken = host_time(*row)
        print(taken, device.launches(device.taken()), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["row"]:
        answer(sys.argv[2])
        sys.exit()
    if "step" in sys.argv or not sys.argv[1:]:
        show("tensors, step", ("300", "1000"), "torch")
    if "models" in sys.argv or not sys.argv[1:]:
        show("forward and backward", MODELS, "torch.amp")
