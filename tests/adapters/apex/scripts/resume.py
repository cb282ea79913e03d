"""Accumulation with delay_unscale, and checkpoints of all states, amp's too, that the next run goes on from."""

import argparse
import contextlib
from pathlib import Path

import torch
from torch import nn

with contextlib.suppress(ImportError):
    import apex
    from apex import amp


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    return parser.parse_args()


def save(path, epoch, losses, model, optimizer, scheduler, use_amp):
    state = {
        "epoch": epoch,
        "losses": losses,
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_sched": scheduler.state_dict(),
    }
    if use_amp:
        state["amp"] = amp.state_dict()
    torch.save(state, path)


def run(args):
    use_amp = not args.fp32
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, 1))
    optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=2e-2, weight_decay=0.01)
    if use_amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    start, losses = 0, []
    if args.out.exists():
        checkpoint = torch.load(args.out, map_location="cpu")
        model.load_state_dict(checkpoint["weights"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["lr_sched"])
        if use_amp:
            amp.load_state_dict(checkpoint["amp"])
        start, losses = checkpoint["epoch"], checkpoint["losses"]
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :1] * x[:, 1:2]
    for epoch in range(start, args.epochs):
        for i, (inputs, targets) in enumerate(zip(x.split(6), y.split(6), strict=True)):
            loss = nn.functional.mse_loss(model(inputs), targets) / args.accumulate
            update = (i + 1) % args.accumulate == 0
            if use_amp:
                with amp.scale_loss(loss, optimizer, delay_unscale=not update) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
            if update:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        save(args.out, epoch + 1, losses, model, optimizer, scheduler, use_amp)


if __name__ == "__main__":
    run(get_args())
