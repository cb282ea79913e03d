"""Losses of products in 8 bits beside those of torchao's emulation of the same recipes, on the same batches.

    python benchmarks/fp8_torchao.py [--steps 100]        # needs torchao (pip install torchao); some minutes

A GPT with d=128. torchao's Float8Linear (`emulate=True`, scales rounded to powers of two) stands in the same layers,
under torch.autocast in bf16. Columns: the mean loss of the last ten steps, its difference to bf16, and the largest
difference of a step's loss to halfstep's with the same recipe.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import halfstep
from halfstep.lab.workloads.load import load_workload

SMALL = {"d": "128", "layers": "4", "heads": "4", "length": "64", "batch": "8"}
RECIPES = {"fp8": "tensorwise", "fp8-row": "rowwise"}


def losses(work: Any, steps: int, prepare: Callable[[nn.Module, Any], Any]) -> list[float]:
    """Returns the loss of each step; `prepare` returns a function that takes one on a batch."""
    torch.manual_seed(0)
    model = work.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, batches = prepare(model, optimizer), work.batches(0)
    return [float(step(next(batches))) for _ in range(steps)]


def by_halfstep(products: str, work: Any) -> Callable[[nn.Module, Any], Any]:
    """Returns what prepares a session at O1."""

    def prepare(model: nn.Module, optimizer: Any) -> Any:
        session = halfstep.initialize(model, optimizer, "O1", low="bf16", products=products)

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = work.loss(model(batch[0]), batch[1])
            session.backward(loss)
            session.step()
            return loss.detach()

        return step

    return prepare


def by_torchao(products: str, work: Any) -> Callable[[nn.Module, Any], Any]:
    """Returns what puts torchao's layers into a model, where a plan with these products has its own."""

    def prepare(model: nn.Module, optimizer: Any) -> Any:
        plan = halfstep.level("O1", "bf16")
        names = halfstep.initialize(model, None, replace(plan, products=products))
        runs = set(names.status().products[products])
        names.close()
        config = Float8LinearConfig.from_recipe_name(RECIPES[products])
        config = replace(config, emulate=True, round_scales_to_power_of_2=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in runs)
        print(f"{sum('Float8' in type(m).__name__ for m in model.modules())} of torchao's layers")

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = work.loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return prepare


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    work: Any = load_workload("char_lm", SMALL)
    plain = losses(work, steps, by_halfstep("plan", work))
    print(f"bf16              {mean(plain[-10:]):.4f}")
    for products in RECIPES:
        own = losses(work, steps, by_halfstep(products, work))
        theirs = losses(work, steps, by_torchao(products, work))
        apart = max(abs(a - b) for a, b in zip(own, theirs, strict=True))
        for name, found in (("halfstep", own), ("torchao", theirs)):
            last, off = mean(found[-10:]), mean(found[-10:]) - mean(plain[-10:])
            print(f"{products:8} {name:8} {last:.4f} {off:+.4f} {apart if found is theirs else 0:.4f}")


if __name__ == "__main__":
    main()
