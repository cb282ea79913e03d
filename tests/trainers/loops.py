"""What the trainers are compared with: a small network, its batches, and a loop written by hand with halfstep."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

import halfstep

SETTINGS = [("O0", "bf16"), *((level, low) for level in ("O1", "O2", "O3") for low in ("bf16", "fp16"))]
ACCUMULATE, MAX_NORM, BAD = 2, 0.5, 20  # backward passes per step, what gradients are clipped to, the infinite batch
PROCESSES = 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def optimizer_of(model, name="AdamW", **settings):
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)


def batches(count=100, bad=BAD):
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]
    if bad is not None:
        found[bad][0].fill_(torch.inf)
    return found


def bad_at(level):
    """At O0 halfstep skips nothing, so an infinite batch would end the training."""
    return None if level == "O0" else BAD


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def share(items, rank):
    """Returns what one of two processes takes of these; all of them where there is one process."""
    return items if rank is None else items[rank::PROCESSES]


@dataclass
class Trained:
    losses: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    rates: list = field(default_factory=list)
    skipped: int = 0


def by_hand(
    level,
    low,
    count=100,
    *,
    accumulate=ACCUMULATE,
    leave_out=False,
    name="AdamW",
    after=lambda model: None,
    rank=None,
    turns=1,
    clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, MAX_NORM),
    **settings,
):
    """Trains by a loop that a user of halfstep writes who unscales and clips by himself, as trainers do.

    `leave_out` makes no step of the schedule where the optimizer's was skipped. `after` is called after each step.
    The schedule makes so many `turns` for each. With a `rank`, this is one of two processes, which train on every other
    batch under DistributedDataParallel.
    """
    model = network()
    optimizer = optimizer_of(model, name, **settings)
    schedule = schedule_of(optimizer)
    trained = Trained()
    with halfstep.initialize(model, optimizer, level, low=low) as session:
        wrapped = model if rank is None else nn.parallel.DistributedDataParallel(model)
        for index, batch in enumerate(share(batches(count, bad_at(level)), rank)):
            with nullcontext() if rank is None or index % accumulate == accumulate - 1 else wrapped.no_sync():
                loss = loss_of(wrapped, batch)
                trained.losses.append(loss.item())
                session.backward(loss / accumulate)
            session.unscale_()
            if index % accumulate == accumulate - 1:
                clip(list(model.parameters()))
                record = session.step()
                optimizer.zero_grad()
                after(model)
                if not (leave_out and record.skipped):
                    for _ in range(turns):
                        schedule.step()
                trained.rates.append(schedule.get_last_lr()[0])
        trained.skipped = session.status().skipped
        trained.weights = {key: value.clone() for key, value in model.state_dict().items()}
    return trained


def same_losses(a, b):
    return [x if x == x else "nan" for x in a] == [x if x == x else "nan" for x in b]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype is b[key].dtype for key in a)
