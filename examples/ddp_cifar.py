"""A small ResNet on CIFAR-10 in several processes: torchrun --nproc-per-node 2 examples/ddp_cifar.py --data FOLDER

Goes on from the checkpoint where there is one, at the beginning of its epoch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from data import cifar10
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="a folder with cifar-10-batches-py, or an .npz file")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=128, help="of all processes together")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--level", default="O2")
parser.add_argument("--low", help="the low format; what suits the device by default")
parser.add_argument("--out", type=Path, help="the checkpoint, written after each epoch")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def stage(inside, outside):
    conv = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU(), Residual(outside))


def resnet(width):
    stages = stage(3, width), stage(width, 2 * width), stage(2 * width, 4 * width)
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def accuracy(model, images, labels, device):
    """Returns which share of the test images is right; each process looks at its own part of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for some, classes in zip(images[rank::size].split(256), labels[rank::size].split(256), strict=True):
            right = model(some.to(device)).argmax(1) == classes.to(device)
            counts += torch.tensor([right.sum(), len(right)], device=device)
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    train_images, train_labels, test_images, test_labels = cifar10(args.data)
    training = TensorDataset(train_images, train_labels)
    sampler = DistributedSampler(training, drop_last=True)
    loader = DataLoader(training, batch_size=args.batch // size, sampler=sampler, drop_last=True)

    model = resnet(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    session = halfstep.initialize(model, optimizer, args.level, low=args.low)
    wrapped = DistributedDataParallel(model)  # sends the weights of process 0 to all others

    start = 0
    if args.out is not None and args.out.exists():  # in all processes: nothing is sent after the wrap
        saved = torch.load(args.out, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        session.load_state_dict(saved["session"])
        start = saved["epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(wrapped(images), labels)
            optimizer.zero_grad()
            session.backward(loss)
            session.step(max_norm=1.0)
            schedule.step()
        right = accuracy(model, test_images, test_labels, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right:.1%} of the test images right")
        if rank == 0 and args.out is not None:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "session": session}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch + 1}, args.out)

    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
