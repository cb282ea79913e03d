"""What recipes of products do to one batch's gradient, beside what another batch does to it.

    python benchmarks/fp8.py                                # a GPT with d=128, half a minute
    python benchmarks/fp8.py --set d=384 --set layers=6     # 10.8 million parameters

Columns: `error`, |g - g32| / |g32| over all weights, g32 of O0; `of the noise`, over |g_a - g_b| / |g_a| of two batches
in fp32: what a short run could see of it; `output`, `grad_input` and `grad_weight`, the error with the recipe in that
product alone, the others in bf16; `flushed` and `saturated`, the largest share of an operand in any layer;
`time`, a step at O2 over one of O2 in bf16, the least of ten in turn. Errors are at a random
initialization, and O1's: O2's bf16 weights have an error of their own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import halfstep
from halfstep.formats import BF16, FP16
from halfstep.lab.workloads.load import load_workload, parse_settings
from halfstep.timing import take_turns
from halfstep.train.cast.narrow import PRODUCTS
from halfstep.train.cast.recipes import RECIPES, Cast, Recipe

SMALL = {"d": "128", "layers": "4", "heads": "4", "length": "64", "batch": "8"}
ROWS = ("plan", *RECIPES)
NEAR = Cast(replace(BF16, max=FP16.max))  # rounds as bf16 does; scaled to a smaller largest value, sums do not overflow


def alone(recipe: Recipe, product: str) -> Recipe:
    """Returns a recipe that rounds the operands of one product, and those of the others to bf16."""
    casts = {place: cast if place[0] == product else NEAR for place, cast in recipe.casts.items()}
    return replace(recipe, casts=casts, on=None)


def gradient(work: Any, batch: Any, products: str | None, *, seed: int) -> tuple[Tensor, Any]:
    """Returns the gradient of a batch under O1 with products, or in fp32 for None, and what was lost."""
    model = work.build(seed).to(batch[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    level, ways = ("O0", "plan") if products is None else ("O1", products)
    with halfstep.initialize(model, optimizer, level, low="bf16", products=ways) as session:
        session.backward(work.loss(model(batch[0]), batch[1]))
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        return grads, session.status().lost


def time_over_plan(work: Any, batch: Any, products: str, steps: int) -> float:
    """Returns the time of a step with products by a recipe over that of O2 in bf16, the least of `steps` in turn."""
    calls, sessions = {}, []
    for name in ("plan", products):
        model = work.build(0).to(batch[0].device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sessions.append(halfstep.initialize(model, optimizer, "O2", low="bf16", products=name))

        def step(model: Any = model, optimizer: Any = optimizer, session: Any = sessions[-1]) -> None:
            optimizer.zero_grad()
            session.backward(work.loss(model(batch[0]), batch[1]))
            session.step()

        calls[name] = step
    times = take_turns(calls, device=batch[0].device, seconds=20.0, least=steps, most=steps)
    for session in sessions:
        session.close()
    return min(times[products]) / min(times["plan"])


def main() -> None:
    """Prints the table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], help="a setting of char_lm; repeatable")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed, a row")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="a GPU multiplies in 8 bits itself")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each row")
    args = parser.parse_args()
    settings = {**SMALL, **parse_settings(args.set)}
    work: Any = load_workload("char_lm", settings)
    rows: dict[str, dict[str, float]] = {}
    for seed in range(args.seeds):
        batches = work.batches(seed)
        one, other = ([t.to(args.device) for t in next(batches)] for _ in range(2))
        exact, _ = gradient(work, one, None, seed=seed)
        noise = float((gradient(work, other, None, seed=seed)[0] - exact).norm() / exact.norm())
        for name in ROWS:
            found, lost = gradient(work, one, name, seed=seed)
            error = float((found - exact).norm() / exact.norm())
            row = {"error": error, "of the noise": error / noise}
            row |= {"flushed": max((each.flushed / each.elements for each in lost), default=0.0)}
            for product in PRODUCTS if name != "plan" else ():
                with patch.dict(RECIPES, {name: alone(RECIPES[name], product)}):
                    row[product] = float((gradient(work, one, name, seed=seed)[0] - exact).norm() / exact.norm())
            row |= {"saturated": max((each.saturated / each.elements for each in lost), default=0.0)}
            rows[name] = {key: max(value, rows.get(name, {}).get(key, 0.0)) for key, value in row.items()}
    print("products   error  of the noise  output  grad_input  grad_weight  flushed  saturated   time")
    for name, row in rows.items():
        row["time"] = time_over_plan(work, one, name, args.steps) if name != "plan" else 1.0
        each = "  ".join(f"{row.get(product, 0.0):{max(len(product), 6)}.4f}" for product in PRODUCTS)
        print(
            f"{name:9}  {row['error']:.4f}  {row['of the noise']:12.1%}  {each}  {row['flushed']:7.2%}"
            f"  {row['saturated']:9.2%}  {row['time']:5.2f}"
        )
        if args.json is not None:
            args.json.write_text(json.dumps({"settings": settings, "seeds": args.seeds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
