"""An image classifier in the style of large scripts: arguments, meters, a prefetcher, apex's DDP, validation."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from apex import amp, optimizers  # noqa: F401  # as such scripts do
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier  # noqa: F401
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model
except ImportError as error:
    raise ImportError("Please install apex to run this example.") from error


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--sync_bn", action="store_true")
    return parser.parse_args()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.mean = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        self.next_input = self.next_input.float().sub_(self.mean)

    def next(self):
        input, target = self.next_input, self.next_target
        if input is not None:
            self.preload()
        return input, target


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt)
    rt /= dist.get_world_size()
    return rt


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def adjust_learning_rate(args, optimizer, epoch, step, len_epoch):
    lr = args.lr * 0.1 ** (epoch // 2)
    if epoch < 1:
        lr = lr * float(1 + step + epoch * len_epoch) / len_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(args, loader, model, criterion, optimizer, epoch):
    losses = AverageMeter()
    model.train()
    prefetcher = Prefetcher(loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        adjust_learning_rate(args, optimizer, epoch, i, len(loader))
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        if args.fp32:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        reduced_loss = reduce_tensor(loss.data)
        losses.update(to_python_float(reduced_loss), input.size(0))  # noqa: F405
        input, target = prefetcher.next()
        i += 1
    return losses.avg


def validate(loader, model):
    model.eval()
    right = AverageMeter()
    for input, target in loader:
        with torch.no_grad():
            output = model(input)
        right.update((output.argmax(1) == target).float().mean().item(), input.size(0))
    return right.avg


def main():
    args = parse()
    dist.init_process_group("gloo", init_method=f"file://{args.out}.store", rank=0, world_size=1)
    torch.manual_seed(0)
    model = make_model()
    if args.sync_bn:
        model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    if not args.fp32:
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
    model = DDP(model, delay_allreduce=True)
    images, labels = torch.randn(64, 3, 8, 8), torch.arange(64) % 4
    images += labels.view(-1, 1, 1, 1) * 0.5
    loader = DataLoader(TensorDataset(images, labels), batch_size=args.batch_size)
    losses, best, best_prec1 = [], None, -1.0
    for epoch in range(args.epochs):
        losses.append(train(args, loader, model, nn.CrossEntropyLoss(), optimizer, epoch))
        prec1 = validate(loader, model)
        if prec1 > best_prec1:
            best, best_prec1 = model.state_dict(), prec1
    torch.save({"losses": losses, "weights": best, "optimizer": optimizer.state_dict()}, args.out)
    dist.destroy_process_group()
    os.remove(f"{args.out}.store")


if __name__ == "__main__":
    main()
