"""Training loops as people wrote them for apex, in four styles; each runs unchanged and does what its fp32 twin does.

The scripts import `apex` by themselves. A twin is the same script with `amp` off, in fp32.
"""

import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

LEVELS = ("O0", "O1", "O2")


def points(count=64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3]).tanh()


def loader(size=16):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points()), batch_size=size)


def mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Trainer:
    """Style 1: a class with everything in attributes, a scheduler, and an average of the weights."""

    def __init__(self, opt_level, fp16=True, epochs=6):
        from apex import amp

        self.amp, self.fp16, self.epochs = amp, fp16, epochs
        torch.manual_seed(0)
        self.model = mlp(8, 32, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        if self.fp16:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=opt_level, verbosity=0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.history = []

    def backward(self, loss):
        if not self.fp16:
            return loss.backward()
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        return None

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for inputs, targets in loader():
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(inputs), targets)
            self.backward(loss)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.average.update_parameters(self.model)
            total += loss.item()
        self.scheduler.step()
        return total

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        return F.mse_loss(self.model(points()[0]), points()[1]).item()

    def fit(self):
        for _ in range(self.epochs):
            self.history.append((self.train_epoch(), self.evaluate()))
        return self.history


def train_with_closure(opt_level, enabled=True, steps=24):
    """Style 2: functions within a function, the step inside of the optimizer's closure."""
    from apex import amp

    torch.manual_seed(0)
    net = mlp(8, 32, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, opt = amp.initialize(net, opt, opt_level=opt_level, enabled=enabled, verbosity=0)

    def make_closure(x, y):
        def closure():
            opt.zero_grad()
            loss = F.smooth_l1_loss(net(x), y)
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
            return loss

        return closure

    def run():
        batches = [batch for _ in range(math.ceil(steps / 4)) for batch in loader()]
        return [opt.step(make_closure(x, y)).item() for x, y in batches[:steps]]

    return run()


def train_accumulating(opt_level, fp16=True, accumulate=4, epochs=6):
    """Style 3: accumulation over batches with delay_unscale, clipping by master_params, warm-up, as for BERT."""
    if fp16:
        from apex import amp
    torch.manual_seed(0)
    model = mlp(8, 32, 1)
    decayed = [p for name, p in model.named_parameters() if "bias" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    if fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic", verbosity=0)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**12
    losses = []
    for _ in range(epochs):
        for step, (inputs, targets) in enumerate(loader(8)):
            loss = F.mse_loss(model(inputs), targets) / accumulate
            last = (step + 1) % accumulate == 0
            if fp16:
                with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            losses.append(loss.item() * accumulate)
            if last:
                params = amp.master_params(optimizer) if fp16 else model.parameters()
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
    return losses


def train_resumable(opt_level, path, epochs, use_amp=True):
    """Style 4: saves each epoch and goes on from the file where there is one, with amp behind try and except."""
    try:
        from apex import amp

        has_apex = use_amp
    except ImportError:
        has_apex = False
    torch.manual_seed(0)
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if has_apex:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    start, losses = 0, []
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start, losses = checkpoint["epoch"], checkpoint["losses"]
        if has_apex:
            amp.load_state_dict(checkpoint["amp"])
    for epoch in range(start, epochs):
        for inputs, targets in loader():
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            if has_apex:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        torch.save(
            {
                "epoch": epoch + 1,
                "losses": losses,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "amp": amp.state_dict() if has_apex else None,
            },
            path,
        )
    return losses, model.state_dict()


def close(losses, expected, level):
    """At O0 the same numbers; else within what the low format's rounding adds up to over such a run."""
    if level == "O0":
        assert losses == expected
    else:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.1, atol=0.02)
        assert losses != expected


@pytest.mark.parametrize("level", LEVELS)
def test_a_trainer_class_with_scheduler_clipping_and_average(level):
    trainer = Trainer(level)
    found = trainer.fit()
    plain = Trainer(level, fp16=False)
    close(found, plain.fit(), level)
    assert found[-1][0] < found[0][0] / 2
    assert next(trainer.average.parameters()).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_in_functions(level):
    found = train_with_closure(level)
    close(found, train_with_closure(level, enabled=False), level)
    assert found[-1] < found[0]


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_with_delayed_unscaling_and_clipping_by_master_params(level):
    found = train_accumulating(level)
    expected = train_accumulating(level, fp16=False)
    if level == "O0":  # a dynamic scale of 2**12 rounds nothing, but the sums are clipped after it
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    else:
        close(found, expected, level)
    assert sum(found[-8:]) < sum(found[:8])


@pytest.mark.parametrize("level", LEVELS)
def test_checkpoint_and_resume(level, tmp_path):
    train = functools.partial(train_resumable, level)
    whole, weights = train(tmp_path / "whole.pt", 4)
    train(tmp_path / "part.pt", 2)
    resumed, again = train(tmp_path / "part.pt", 4)
    assert resumed == whole
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    plain, _ = train(tmp_path / "plain.pt", 4, use_amp=False)
    close(whole, plain, level)
