"""Measures how far a plan's gradient is from fp32's, beside how far that of another batch is."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.edits import Scaling
from halfstep.initialize import initialize
from halfstep.lab.bench.tally import next_batch
from halfstep.lab.workloads.workload import Batch, Workload
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan

SCALE = 1024.0  # of the loss, in formats that need one: far from both ends of a gradient at initialization


def gradient_error(workload: Workload, plan: Plan, seed: int, device: torch.device) -> float | None:
    """Returns |g - g32| / |g_a - g_b|: of the first batch under the plan and in fp32, and of two batches in fp32.

    Weights are those at initialization: the error of what a plan rounds, as a share of what a short run sees anyway.
    None if both batches are the same.
    """
    batches = workload.batches(seed)
    one, other = (
        (inputs.to(device), targets.to(device)) for inputs, targets in (next_batch(batches), next_batch(batches))
    )
    full = level("O0", "bf16")
    exact = _gradient(workload, full, one, seed, device)
    noise = (_gradient(workload, full, other, seed, device) - exact).norm()
    plan = plan.edit(Scaling("static", init=SCALE)) if plan.scale.active else plan
    return float((_gradient(workload, plan, one, seed, device) - exact).norm() / noise) if noise else None


def _gradient(workload: Workload, plan: Plan, batch: Batch, seed: int, device: torch.device) -> Tensor:
    model = workload.build(seed).to(device)
    with initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan) as session:
        torch.manual_seed(seed)  # the same dropout
        session.backward(workload.loss(model(batch[0]), batch[1]))
        scale = plan.scale.init if plan.scale.active else 1.0
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]) / scale
