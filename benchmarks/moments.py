"""What keeping Adam's moments in fewer bits costs: the same gradients through each optimizer, and stress tests.

    python benchmarks/moments.py               # some minutes; with the rows of torchao and bitsandbytes if installed
    python benchmarks/moments.py --steps 100   # shorter runs of char_lm

Every optimizer is a black box: its weights are set to zero before a step with a learning rate of 1, so that they are
minus its update afterwards. `exact` is torch.optim.AdamW. FlashOptim needs CUDA; its row is its published formula
(companded int8 and root-uint8, fp16 scales of 32 elements).

Columns: bytes of state a parameter; `error`, |u - exact| over |exact| after `--steps` of char_lm, and the largest
update over the largest exact one in any of them, at beta2 0.999 and 0.95; `stall`, the median of own / exact after
gradients fall tenfold for 2,000 steps (0.4: a learning rate 2.5 times too small); `dead rows`, the largest update over
the largest exact one where half the elements of each group get a gradient every 50th step; `tiny`, the error with
gradients of 1e-6; `inf`, whether one infinite gradient leaves the state as it was; `resumes`, whether a state dict
loaded into a new optimizer gives the same next updates, bit for bit.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.lab.workloads.load import load_workload
from halfstep.train.kernels.batch import Code
from halfstep.train.optim.moments import decode, encode

SHAPES = [(64, 64)]
SPREADS = (0.5, 1.5, 2.5)
STALL = 2500  # steps, of which gradients are small after 500
SETTINGS = {"d": "128", "layers": "4", "heads": "4", "length": "64", "batch": "16"}
COLUMNS = ("bytes", "error .999", "largest", "error .95", "largest", "stall", "dead rows", "tiny", "inf", "resumes")


class Formula(torch.optim.Optimizer):
    """Adam whose moments are kept between steps as `kept` returns them and as `opened` reads them."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Makes an update."""
        (group,) = self.param_groups
        (beta1, beta2), eps = group["betas"], group["eps"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                zero = torch.zeros(p.numel() // 32, 32)
                state |= {"step": 0} | self.kept(zero, zero)
            g, t = p.grad.view(-1, 32), state["step"] + 1
            m, v = self.opened(state)
            m, v = m * beta1 + g * (1 - beta1), v * beta2 + g * g * (1 - beta2)
            state |= {"step": t} | self.kept(m, v)
            p.sub_((m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)).view(p.shape), alpha=group["lr"])


class Flash(Formula):
    """FlashOptim's form of Adam's moments: softsign int8, and uint8 of the root, with fp16 scales of 32 elements."""

    def kept(self, m: Tensor, v: Tensor) -> dict[str, Any]:
        """Returns what is kept of moments of groups (n, 32)."""
        scale, root = m.abs().amax(1, keepdim=True).half(), v.sqrt()
        y, largest = m / scale.float().clamp_min(1e-38), root.amax(1, keepdim=True).half()
        z = (2 * y / (1 + y.abs()) * 127).round().clamp(-127, 127).to(torch.int8)
        q = (root / largest.float().clamp_min(1e-38) * 255).round().clamp(0, 255).to(torch.uint8)
        return {"m": (z, scale), "v": (q, largest)}

    def opened(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns both moments."""
        (z, scale), (q, largest) = state["m"], state["v"]
        z = z.float() / 127
        return z / (2 - z.abs()) * scale.float(), (q.float() / 255 * largest.float()).square()


class Nearest(Formula):
    """Moments in bf16, rounded to nearest, as Megatron, torchtitan and TransformerEngine keep them."""

    def kept(self, m: Tensor, v: Tensor) -> dict[str, Any]:
        """Returns what is kept of moments."""
        return {"m": m.bfloat16(), "v": v.bfloat16()}

    def opened(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns both moments."""
        return state["m"].float(), state["v"].float()


class Box:
    """An optimizer over weights of some shapes, as a function from gradients to updates."""

    def __init__(self, make: Callable[..., Any], shapes: Sequence[tuple[int, ...]], beta2: float, eps: float) -> None:
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        moments = make if isinstance(make, str) else None
        cls: Callable[..., Any] = torch.optim.AdamW if isinstance(make, str) else make
        self.optimizer = cls([*self.weights], lr=1.0, betas=(0.9, beta2), eps=eps, weight_decay=0.0)
        self.session = None
        if moments is not None:
            self.session = halfstep.initialize(self.weights, self.optimizer, "O0", moments=moments)

    def step(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the updates."""
        with torch.no_grad():
            for p in self.weights:
                p.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        if self.session is None:
            for p, g in zip(self.weights, grads, strict=True):
                p.grad = g.clone()
            self.optimizer.step()
        else:
            self.session.backward(sum((p * g).sum() for p, g in zip(self.weights, grads, strict=True)))
            self.session.step()
        return [-p.detach().clone() for p in self.weights]

    def bytes(self) -> float:
        """Returns the bytes of state a parameter."""
        count = sum(p.numel() for p in self.weights)
        if self.session is not None:
            return self.session.status().memory["optimizer"] / count
        found, waiting = 0, [self.optimizer.state[p] for p in self.weights]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += [each for name, each in value.items() if not str(name).startswith("qmap")]
            elif isinstance(value, tuple | list):
                waiting += value
            elif isinstance(value, Tensor):
                inner = [t for name in ("codes", "scale") if isinstance(t := getattr(value, name, None), Tensor)]
                found += sum(t.nbytes for t in inner) if inner else value.nbytes
        return found / count


def error(own: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Returns |u - exact| over |exact|, and the largest update over the largest exact one."""
    mine, theirs = (torch.cat([t.flatten().double() for t in ts]) for ts in (own, exact))
    return float((mine - theirs).norm() / theirs.norm()), float(mine.abs().max() / theirs.abs().max())


def gradients(data: Path | None, steps: int) -> Iterator[list[Tensor]]:
    """Yields the gradients of char_lm's large weights while AdamW trains it in fp32."""
    workload = load_workload("char_lm", SETTINGS, data=data)
    model = workload.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    large = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= 4096]
    batches = iter(workload.batches(0))
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield [p.grad.clone() for p in large]
        optimizer.step()


def noise(count: int) -> Iterator[Tensor]:
    """Yields gradients whose sizes differ between the elements of a group, lognormal."""
    g = torch.Generator().manual_seed(1)
    size = torch.exp(torch.randn(SHAPES[0], generator=g))
    for _ in range(count):
        yield size * torch.randn(SHAPES[0], generator=g)


def stall(make: Any) -> float:
    """Returns the median of own / exact update after every other gradient has fallen tenfold."""
    own, exact = Box(make, SHAPES, 0.999, 1e-30), Box(torch.optim.AdamW, SHAPES, 0.999, 1e-30)
    half = (torch.arange(64) % 2 == 0).expand(SHAPES[0])
    for t, g in enumerate(noise(STALL)):
        grads = [torch.where(half & torch.tensor(t >= 500), g * 0.1, g)]
        mine, theirs = own.step(grads), exact.step(grads)
    ratio = (theirs[0] / mine[0]).abs()[half]
    return 1 / float(ratio[ratio.isfinite()].median())


def dead_rows(make: Any) -> float:
    """Returns the largest update over the largest exact one, where some elements get a gradient every 50th step."""
    own, exact = Box(make, SHAPES, 0.999, 1e-8), Box(torch.optim.AdamW, SHAPES, 0.999, 1e-8)
    hot, worst = (torch.arange(64) // 16 % 2 == 0).expand(SHAPES[0]), 0.0
    for t, g in enumerate(noise(200)):
        grads = [torch.where(hot, g, g * 1e-3 if t % 50 == 0 else torch.zeros(()))]
        worst = max(worst, error(own.step(grads), exact.step(grads))[1])
    return worst


def tiny(make: Any) -> float:
    """Returns the update error with gradients of 1e-6."""
    own, exact = Box(make, SHAPES, 0.999, 1e-14), Box(torch.optim.AdamW, SHAPES, 0.999, 1e-14)
    for g in noise(100):
        found = error(own.step([g * 1e-6]), exact.step([g * 1e-6]))[0]
    return found


def keeps_its_state(make: Any) -> bool:
    """Tells whether an infinite gradient is skipped: the next update is that of an optimizer that never saw it."""
    one, other = Box(make, SHAPES, 0.999, 1e-8), Box(make, SHAPES, 0.999, 1e-8)
    grads = list(noise(4))
    for g in grads[:3]:
        one.step([g]), other.step([g])
    one.step([torch.full(SHAPES[0], math.inf)])
    return torch.equal(one.step([grads[3]])[0], other.step([grads[3]])[0])


def resumes(make: Any) -> bool:
    """Tells whether a new optimizer goes on as the old one from its state dict."""
    one, other = Box(make, SHAPES, 0.999, 1e-8), Box(make, SHAPES, 0.999, 1e-8)
    grads = list(noise(8))
    for g in grads[:6]:
        one.step([g])
    other.step([grads[0]])
    file = io.BytesIO()
    torch.save(one.optimizer.state_dict(), file)
    file.seek(0)
    other.optimizer.load_state_dict(torch.load(file, weights_only=False))
    return all(torch.equal(one.step([g])[0], other.step([g])[0]) for g in grads[6:])


def candidates() -> dict[str, Any]:
    """Returns the optimizers by name; a string is halfstep's `moments`."""
    found: dict[str, Any] = {"halfstep full": "full", "halfstep bf16": "bf16", "halfstep 8bit": "8bit"}
    found |= {"bf16 to nearest": Nearest, "FlashOptim's formula": Flash}
    try:
        from torchao.optim import AdamW8bit, AdamWFp8

        found |= {"torchao AdamW8bit": AdamW8bit, "torchao AdamWFp8": AdamWFp8}
    except ImportError:
        print("torchao is not installed: without its rows")
    try:
        from bitsandbytes.optim import AdamW8bit as Blockwise

        found["bitsandbytes AdamW8bit"] = lambda params, **options: Blockwise(params, min_8bit_size=1, **options)
    except ImportError:
        print("bitsandbytes is not installed: without its row")
    return found


def spreads() -> None:
    """Prints the error of codes of the first moment at beta1 0.9, over its own rms, where gradients differ in size."""
    code, row = Code(signed=True, stochastic=False), 64
    far = torch.full((256, 1), 1e-30)  # in each group, so that it takes 4 exponent bits

    def softsign(m: Tensor) -> Tensor:
        scale = torch.exp2(m.abs().amax(1, keepdim=True).clamp_min(1e-38).log2().ceil())
        y = m / scale
        z = (2 * y / (1 + y.abs()) * 127).round() / 127
        return z / (2 - z.abs()) * scale

    kinds = {
        "halfstep: 3 exponent bits or 4": lambda m: decode(*encode(m, None, code)),
        "always 4 exponent bits": lambda m: decode(*encode(torch.cat([m, far], 1), None, code))[:, :row],
        "softsign": softsign,
        "bf16": lambda m: m.bfloat16().float(),
    }
    print(
        "\n| first moment | " + " | ".join(f"spread e^{s}" for s in SPREADS) + " |\n| --- |" + " --- |" * len(SPREADS)
    )
    for name, kept in kinds.items():
        cells = []
        for spread in SPREADS:
            g = torch.Generator().manual_seed(0)
            size = torch.exp(torch.randn(256, row, generator=g) * spread) * 1e-3
            exact, own, off, rms = (torch.zeros(256, row, dtype=torch.float64) for _ in range(4))
            for t in range(400):
                grad = size * torch.randn(256, row, generator=g)
                exact = exact * 0.9 + grad.double() * 0.1
                own = kept(own.float() * 0.9 + grad * 0.1).double()
                if t >= 100:
                    off, rms = off + (own - exact).square(), rms + exact.square()
            ratio = (off / rms).sqrt()
            cells.append(f"{ratio.median():.3f} ({ratio.flatten().quantile(0.99):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="another text than the package has")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    made = candidates()
    errors: dict[str, list[float]] = {name: [] for name in made}
    for beta2 in (0.999, 0.95):
        boxes: dict[str, Box] = {}
        worst = dict.fromkeys(made, 0.0)
        for grads in gradients(options.data, options.steps):
            shapes = [tuple(g.shape) for g in grads]
            boxes = boxes or {
                name: Box(make, shapes, beta2, 1e-8) for name, make in [*made.items(), ("exact", torch.optim.AdamW)]
            }
            exact = boxes["exact"].step(grads)
            last = {name: error(boxes[name].step(grads), exact) for name in made}
            worst = {name: max(worst[name], last[name][1]) for name in made}
        for name in made:
            errors[name] += [last[name][0], worst[name]]
    print("| kept by | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS))
    for name, make in made.items():
        numbers = [boxes[name].bytes(), *errors[name], stall(make), dead_rows(make), tiny(make)]
        words = [f"{number:,.3g}" for number in numbers] + [str(f(make)) for f in (keeps_its_state, resumes)]
        print(f"| {name} | " + " | ".join(words) + " |", flush=True)
    spreads()


if __name__ == "__main__":
    main()
