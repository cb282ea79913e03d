"""Plants what `halfstep.inspect` finds, makes the edit that it names, and holds the gain against what it promised.

    python benchmarks/inspect_gains.py [--device cuda]

Each plant is a model with one fault and the same model with the edit made; whole forward and backward passes of the two
take turns. Of the heavyweights one runs in fp32 under a plan in bf16, which is slow where there are units for bf16, and
one in fp64, which is slow everywhere. Last, a model with no fault, of which nothing is to be found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from statistics import median

import torch
from torch import Tensor, nn

import halfstep
from halfstep.measurements import Saving
from halfstep.timing import take_turns

WIDTH, SECONDS = 2048, 12.0
Forward = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """Three layers, a fixed weight, and what is done with them."""

    def __init__(self, forward: Forward, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(WIDTH, width), nn.Linear(width, width), nn.Linear(width, WIDTH)
        self.fixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self._do = forward

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the plant computes."""
        return self._do(self, x)


def _plain(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x)))


def _cast_twice(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x @ m.fixed @ m.fixed)))


def _cast_once(m: nn.Module, x: Tensor) -> Tensor:
    fixed = m.fixed.to(torch.bfloat16)
    return m.c(m.b(m.a(x @ fixed @ fixed)))


def _wide(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x) + x
    return m.c(h + m.b(h))


def _narrow(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h + x.to(h.dtype)
    return m.c(h + m.b(h))


def _double(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(nn.functional.linear(m.a(x).double(), m.fixed.double()).float())


def _single(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(nn.functional.linear(m.a(x), m.fixed))


@torch.library.custom_op("halfstep_gains::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    """Returns a product in the format of what it is given."""
    with torch.autocast("cpu", enabled=False):
        return x @ w


def _product_backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return product(grad, ctx.weight.t()), None  # type: ignore[attr-defined]


product.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "weight", inputs[1])
)


def _custom(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(product(m.a(x).float(), m.fixed.float()))


def measured(
    code: str,
    level: str,
    before: Forward,
    after: Forward,
    *,
    rows: int = 1,
    width: int | None = None,
    padded: int = 0,
    **plan: object,
) -> tuple[Saving | None, float]:
    """Returns the first saving of a kind, and the seconds that a step with the edit made takes less."""
    x = torch.randn(rows, WIDTH)
    with ExitStack() as stack:
        opened = lambda forward, width, plan, **how: stack.enter_context(_session(Layers(forward, width), plan, **how))  # noqa: E731
        width = width or WIDTH
        first = opened(before, width, level, **plan)
        found = halfstep.inspect(first, lambda: _loss(first, x))
        saving = next((each for each in found.savings if each.code == code), None)
        if saving is None:
            return None, 0.0
        edited = first.plan.edit(*saving.cure)
        second = opened(after, padded or width, edited)
        steps = {"before": lambda: first.backward(_loss(first, x)), "after": lambda: second.backward(_loss(second, x))}
        times = take_turns(steps, device=torch.get_default_device(), seconds=SECONDS)
    return saving, median(a - b for a, b in zip(times["before"], times["after"], strict=False))


def _session(model: nn.Module, plan: object, **how: object) -> halfstep.Session:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    return halfstep.initialize(model, optimizer, plan, **({"low": "bf16"} if isinstance(plan, str) else {}), **how)  # type: ignore[arg-type]


def _loss(session: halfstep.Session, x: Tensor) -> Tensor:
    return session.runtime.roots[0](x).float().square().mean()


def _plants() -> Iterator[tuple[str, tuple[Saving | None, float]]]:
    full = [halfstep.Rule("b", halfstep.FULL)]
    yield "ran full, in fp32", measured("ran full", "O2", _plain, _plain, rows=256, rules=full)
    yield "ran full, as a custom op", measured("ran full", "O2", _custom, _custom, rows=256)
    yield "ran full, in fp64", measured("ran full", "O0", _double, _single, rows=256)
    yield "cast again", measured("cast again", "O1", _cast_twice, _cast_once)
    yield "wide stream", measured("wide stream", "O2", _wide, _narrow, rows=512)
    yield "not aligned", measured("not aligned", "O2", _plain, _plain, rows=64, width=1003, padded=1008)


def _unplanted() -> str:
    """Returns what is found in a model with no fault, at each level that trains low."""
    x, found = torch.randn(64, WIDTH), []
    for level in ("O1", "O2", "O3"):
        with _session(Layers(_plain, WIDTH), level) as session:
            savings = halfstep.inspect(session, lambda session=session: _loss(session, x)).savings
        found += [f"{each.code} at {each.place} under {level}: {1e3 * each.seconds:.2f} ms" for each in savings]
    return "; ".join(found) or "nothing"


def main() -> None:
    """Prints what each plant promised and gained, and what is found where nothing is planted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    with nullcontext() if device == "cpu" else torch.device(device):  # which costs Python in each call of torch
        for code, (saving, gained) in _plants():
            if saving is None:
                print(f"{code}: not found here, as nothing would be gained")
            else:
                promised, share = 1e3 * saving.seconds, gained / saving.seconds
                print(f"{code} at {saving.place}: promised {promised:.2f} ms, gained {1e3 * gained:.2f} ({share:.0%})")
        print(f"no plant: {_unplanted()} found")


if __name__ == "__main__":
    main()
