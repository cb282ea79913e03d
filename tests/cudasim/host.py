"""The host's cost and the launches of `session.step` on CUDA beside torch's fused AdamW and clip_grad_norm_.

    python -m tests.cudasim.host [TENSORS ...]        300 1000

All kernels of both are mocked, in turns, and the clock is CPU time. Read the ratios; microseconds are of this machine.
"""

import statistics
import sys
import time

from tests.cudasim import build

if (what := build.lacking()) is not None:
    sys.exit(f"no simulated CUDA device here: {what}")
build.load()

import torch  # noqa: E402  # after the device
from torch import nn  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import halfstep  # noqa: E402
from tests.cudasim import device  # noqa: E402

ROUNDS = 15


def launch(self, *args, grid=None, warmup=False, **options):
    """Counts a launch, and does nothing."""
    device.LAUNCHES[self.fn.__name__] += 1


def microseconds(call, prepare):
    prepare()
    start = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - start)


def of_torch(count):
    """Returns a call of torch's own parts for as many tensors, whose kernels do nothing."""
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

    return call


def of_session(count, level):
    """Returns a call of a session's step for as many tensors, and what gives it gradients at other addresses."""
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


def main():
    JITFunction.run = launch
    torch.set_num_threads(1)
    for count in map(int, sys.argv[1:] or ("300", "1000")):
        peer, rows = of_torch(count), {level: of_session(count, level) for level in ("O1", "O2")}
        times = {"torch": []} | {level: [] for level in rows}
        for _ in range(ROUNDS):
            times["torch"].append(microseconds(peer, lambda: None))
            for level, row in rows.items():
                times[level].append(microseconds(*row))
                launches = device.launches(device.taken())
        base = statistics.median(times["torch"])
        print(f"{count} tensors: torch {base:.0f} us", end="")
        for level in rows:
            found = statistics.median(times[level])
            print(f", {level} {found:.0f} us ({found / base:.2f})", end="")
        print(f"; {launches} launches a step", flush=True)


if __name__ == "__main__":
    main()
