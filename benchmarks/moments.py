"""What keeping Adam's moments in fewer bits costs: the same gradients through each optimizer, and stress tests.

    python benchmarks/moments.py               # some minutes; with the rows of torchao and bitsandbytes if installed
    python benchmarks/moments.py --json FILE   # and writes what it found

With --steps 100 the runs of char_lm are shorter, with --processes 0 no processes are begun for `shards`.

Every optimizer is a black box: its weights are set to zero before a step with a learning rate of 1, so that they are
minus its update afterwards. `exact` is torch.optim.AdamW. FlashOptim needs CUDA; its row is its published formula
(companded int8 and root-uint8, fp16 scales of 32 elements). The last two rows are halfstep's second moment beside
other codes of the first: softsign, and in each group of 64 the one of the two that is off by less.

Columns: bytes of state a parameter; `error`, |u - exact| over |exact| after `--steps` of char_lm, and the largest
update over the largest exact one in any of them, at beta2 0.999 and 0.95; `stall`, the median of own / exact after
gradients fall tenfold for 2,000 steps (0.4: a learning rate 2.5 times too small); `dead rows`, the largest update over
the largest exact one where half the elements of each group get a gradient every 50th step; `tiny`, the error with
gradients of 1e-6; `clip`, the error with gradients that are clipped to a thousandth, by halfstep in its step, else by
torch before it; `inf`, whether one infinite gradient leaves the state as it was; `resumes`, whether a state dict
loaded into a new optimizer gives the same next updates, bit for bit; `shards`, whether `--processes` (3) that hold
7 rows of 800, of 3, 3 and 1, get the updates of one that holds all, bit for bit, else the error beside it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import halfstep
from halfstep.lab.workloads.load import load_workload
from halfstep.machine import read_machine
from halfstep.train.kernels.batch import Code, Place
from halfstep.train.optim.moments import decode, encode, random_bits

SHAPES = [(64, 64)]
UNEVEN = [(7, 800)]
SPREADS = (0.5, 1.5, 2.5)
STALL = 2500  # steps, of which gradients are small after 500
SETTINGS = {"d": "128", "layers": "4", "heads": "4", "length": "64", "batch": "16"}
COLUMNS = (
    "bytes", "error .999", "largest .999", "error .95", "largest .95", "stall", "dead rows", "tiny", "clip", "inf",
    "resumes", "shards",
)  # fmt: skip


class Formula(torch.optim.Optimizer):
    """Adam whose moments are kept between steps as `kept` returns them and as `opened` reads them."""

    size = 32  # of a group

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
                zero = torch.zeros(p.numel() // self.size, self.size)
                state |= {"step": 0} | self.kept(zero, zero, 0)
            g, t = p.grad.view(-1, self.size), state["step"] + 1
            m, v = self.opened(state)
            m, v = m * beta1 + g * (1 - beta1), v * beta2 + g * g * (1 - beta2)
            state |= {"step": t} | self.kept(m, v, t)
            p.sub_((m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)).view(p.shape), alpha=group["lr"])


class Flash(Formula):
    """FlashOptim's form of Adam's moments: softsign int8, and uint8 of the root, with fp16 scales of 32 elements."""

    def kept(self, m: Tensor, v: Tensor, step: int) -> dict[str, Any]:
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

    def kept(self, m: Tensor, v: Tensor, step: int) -> dict[str, Any]:
        """Returns what is kept of moments."""
        return {"m": m.bfloat16(), "v": v.bfloat16()}

    def opened(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns both moments."""
        return state["m"].float(), state["v"].float()


class Softsign(Formula):
    """halfstep's second moment beside a first one by softsign, with a power-of-two scale for 64 elements."""

    size = 64

    def kept(self, m: Tensor, v: Tensor, step: int) -> dict[str, Any]:
        """Returns what is kept of moments of groups (n, 64)."""
        place = Place(0, 0, v.numel(), v.numel())
        random = random_bits(place, v.numel(), torch.tensor(float(step)), which=1).view(v.shape)
        return {"m": self.first(m), "v": encode(v, random, Code(signed=False, stochastic=True))}

    def first(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and scales of a first moment."""
        return softsign(m)

    def opened(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns both moments."""
        return from_softsign(*state["m"]), decode(*state["v"])


class Better(Softsign):
    """The same with softsign or halfstep's code of the first moment, whichever is off by less in a group."""

    SOFT = 1 << 14  # added to the scale of a group that takes softsign

    def first(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and scales of a first moment."""
        (soft, scale), (own, base) = softsign(m), encode(m, None, Code(signed=True, stochastic=False))
        off, own_off = ((m - t).square().sum(1, keepdim=True) for t in (from_softsign(soft, scale), decode(own, base)))
        return torch.where(off < own_off, soft, own), torch.where(off < own_off, scale.short() + self.SOFT, base)

    def opened(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns both moments."""
        (codes, scale), v = state["m"], decode(*state["v"])
        scale = scale.short()  # fp32 after `load_state_dict`
        return torch.where(scale >= self.SOFT, from_softsign(codes, scale & 255), decode(codes, scale)), v


def softsign(m: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 codes of groups of fp32 values, and the exponents (uint8) of powers of two that none exceeds."""
    exponent = ((m.abs().amax(1, keepdim=True).view(torch.int32) + 0x7FFFFF) >> 23).clamp(1, 254)
    y = m / (exponent << 23).view(torch.float32)
    return (254 * y / (1 + y.abs()) + 0.5).floor().clamp(-127, 127).to(torch.int8), exponent.to(torch.uint8)


def from_softsign(codes: Tensor, exponents: Tensor) -> Tensor:
    """Returns the values of codes of `softsign`."""
    z = codes.float() / 127
    return z / (2 - z.abs()) * (exponents.to(torch.int32) << 23).view(torch.float32)


class Box:
    """An optimizer over weights of some shapes, as a function from gradients to updates."""

    def __init__(self, make: Callable[..., Any], shapes: Sequence[tuple[int, ...]], beta2: float, eps: float) -> None:
        self.weights = nn.ParameterList([nn.Parameter(spread_out(torch.zeros(shape))) for shape in shapes])
        moments = make if isinstance(make, str) else None
        cls: Callable[..., Any] = torch.optim.AdamW if isinstance(make, str) else make
        self.optimizer = cls([*self.weights], lr=1.0, betas=(0.9, beta2), eps=eps, weight_decay=0.0)
        self.session = None
        if moments is not None:
            self.session = halfstep.initialize(self.weights, self.optimizer, "O0", moments=moments)

    def step(self, grads: Sequence[Tensor], max_norm: float | None = None) -> list[Tensor]:
        """Returns the updates."""
        with torch.no_grad():
            for p in self.weights:
                p.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        if self.session is None:
            for p, g in zip(self.weights, grads, strict=True):
                p.grad = g.clone()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.weights, max_norm)
            self.optimizer.step()
        else:
            self.session.backward(sum((p * g).sum() for p, g in zip(self.weights, grads, strict=True)))
            self.session.step(max_norm=max_norm)
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


def gradients(data: Path | None, steps: int, *, flat: bool) -> Iterator[list[Tensor]]:
    """Yields gradients of char_lm while AdamW trains it in fp32: of its large weights, or of all as rows of 64."""
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
        if flat:
            every = torch.cat([p.grad.flatten() for p in model.parameters()])
            yield [every[: len(every) // 64 * 64].view(-1, 64)]
        else:
            yield [p.grad.clone() for p in large]
        optimizer.step()


def noise(count: int, shape: tuple[int, ...] = SHAPES[0]) -> Iterator[Tensor]:
    """Yields gradients whose sizes differ between the elements of a group, lognormal."""
    g = torch.Generator().manual_seed(1)
    size = torch.exp(torch.randn(shape, generator=g))
    for _ in range(count):
        yield size * torch.randn(shape, generator=g)


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


def clip(make: Any) -> float:
    """Returns the update error with gradients that are clipped to about a thousandth."""
    own, exact = Box(make, SHAPES, 0.999, 1e-8), Box(torch.optim.AdamW, SHAPES, 0.999, 1e-8)
    for g in noise(100):
        found = error(own.step([g], max_norm=0.1), exact.step([g], max_norm=0.1))[0]
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


def spread_out(t: Tensor) -> Tensor:
    """Returns a tensor with its rows spread over the processes, if there are some."""
    return distribute_tensor(t, init_device_mesh("cpu", (count,)), [Shard(0)]) if (count := processes()) > 1 else t


def processes() -> int:
    """Returns how many there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def updates(make: Any) -> Tensor:
    """Returns the last of 20 updates of a weight with a few rows, whole in each process."""
    box = Box(make, UNEVEN, 0.999, 1e-8)
    for g in noise(20, UNEVEN[0]):
        (update,) = box.step([spread_out(g)])
    return update.full_tensor() if isinstance(update, DTensor) else update


def _as_one_of(rank: int, name: str, count: int, port: int, file: Path) -> None:
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    found = updates(candidates()[name])
    if rank == 0:
        torch.save(found, file)
    distributed.destroy_process_group()


def shards(name: str, count: int) -> str:
    """Tells whether processes with uneven shards get the updates of one: yes, no (the error), or what failed."""
    whole = updates(candidates()[name])
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, file = free.getsockname()[1], Path(folder) / "updates"
        free.close()
        try:
            multiprocessing.spawn(_as_one_of, (name, count, port, file), nprocs=count)
        except multiprocessing.ProcessRaisedException as e:
            errors = [line for line in str(e).splitlines() if re.match(r"[\w.]*(Error|Exception):", line)]
            return (errors or ["an error"])[-1][:90]
        found = torch.load(file)
    return "yes" if torch.equal(found, whole) else f"no ({error([found], [whole])[0]:.2g})"


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
    return found | {"softsign first": Softsign, "the better first": Better}


def spreads() -> dict[str, list[tuple[float, float]]]:
    """Returns the error of codes of the first moment at beta1 0.9 over its own rms, median and 99%, for each spread."""
    code, row = Code(signed=True, stochastic=False), 64
    far = torch.full((256, 1), 1e-30)  # in each group, so that it takes 4 exponent bits
    better = Better.__new__(Better)

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "halfstep: 3 exponent bits or 4": lambda m: decode(*encode(m, None, code)),
        "always 4 exponent bits": lambda m: decode(*encode(torch.cat([m, far], 1), None, code))[:, :row],
        "softsign": lambda m: from_softsign(*softsign(m)),
        "halfstep's or softsign, the better": lambda m: better.opened(better.kept(m, m.abs(), 1))[0],
        "bf16": lambda m: m.bfloat16().float(),
    }
    return {name: [_off(kept, spread, row) for spread in SPREADS] for name, kept in kinds.items()}


def _off(kept: Callable[[Tensor], Tensor], spread: float, row: int) -> tuple[float, float]:
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
    return float(ratio.median()), float(ratio.flatten().quantile(0.99))


def char_lm(
    made: dict[str, Any], data: Path | None, steps: int, *, flat: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns error and largest update of each at both beta2, and their bytes."""
    errors: dict[str, list[float]] = {name: [] for name in made}
    for beta2 in (0.999, 0.95):
        boxes: dict[str, Box] = {}
        worst = dict.fromkeys(made, 0.0)
        for grads in gradients(data, steps, flat=flat):
            shapes = [tuple(g.shape) for g in grads]
            boxes = boxes or {
                name: Box(make, shapes, beta2, 1e-8) for name, make in [*made.items(), ("exact", torch.optim.AdamW)]
            }
            exact = boxes["exact"].step(grads)
            last = {name: error(boxes[name].step(grads), exact) for name in made}
            worst = {name: max(worst[name], last[name][1]) for name in made}
        for name in made:
            errors[name] += [last[name][0], worst[name]]
    return errors, {name: boxes[name].bytes() for name in made}


def table(name: str, columns: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Prints a table, row by row."""
    print(f"| {name} | " + " | ".join(columns) + " |\n| --- |" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="another text than the package has")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument(
        "--flat", action="store_true", help="one vector of all weights of char_lm, biases and norms too"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    made = candidates()
    errors, sizes = char_lm(made, options.data, options.steps, flat=options.flat)
    found: dict[str, dict[str, float | bool | str]] = {}

    def rows() -> Iterator[list[str]]:
        for name, make in made.items():
            numbers = [sizes[name], *errors[name], *(f(make) for f in (stall, dead_rows, tiny, clip))]
            words = [keeps_its_state(make), resumes(make)]
            formula = isinstance(make, type) and issubclass(make, Formula)
            cut = "-" if formula or options.processes < 2 else shards(name, options.processes)
            found[name] = dict(zip(COLUMNS, [*numbers, *words, cut], strict=True))
            yield [name, *(f"{number:,.3g}" for number in numbers), *map(str, words), cut]

    table("kept by", COLUMNS, rows())
    even = spreads()
    cells = ([name, *(f"{median:.3f} ({most:.2f})" for median, most in each)] for name, each in even.items())
    table("first moment", [f"spread e^{s}" for s in SPREADS], cells)
    if options.json:
        record = {
            "benchmark": "moments",
            "machine": asdict(read_machine(torch.device("cpu"))),
            "rows": found,
            "spreads": even,
        }
        record |= {"command": shlex.join(["python", *sys.argv]), "date": f"{datetime.now(timezone.utc):%FT%TZ}"}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
