"""ResNet-18, -50 and -101 on CIFAR-10 (He et al., 2015, arXiv:1512.03385; with a 3x3 stem for 32x32 images)."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import DataError, WorkloadError
from halfstep.lab.workloads.workload import Batch, Workload, seeded, shuffled

CLASSES = 10
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
HOW_TO_GET = (
    'pass a folder that holds cifar-10-batches-py, which torchvision downloads: python -c "import torchvision; '
    "torchvision.datasets.CIFAR10('data', download=True)\", then --data data. Or pass an .npz file with x_train, "
    "y_train, x_test, y_test; its pixels are uint8 of N x 32 x 32 x 3"
)


class Basic(nn.Module):
    """A residual block of two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(inside, width, 3, stride), nn.ReLU(), *_conv(width, width, 3, 1))
        self.shortcut = _shortcut(inside, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A residual block of a 1x1, a 3x3 and a widening 1x1 convolution."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(inside, width, 1, 1),
            nn.ReLU(),
            *_conv(width, width, 3, stride),
            nn.ReLU(),
            *_conv(width, 4 * width, 1, 1),
        )
        self.shortcut = _shortcut(inside, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages (the last three halve the image and double the width), mean pooling and a linear layer."""

    def __init__(self, block: type[Basic | Bottleneck], counts: tuple[int, ...], *, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv(3, width, 3, 1), nn.ReLU())
        stages: list[nn.Module] = []
        inside = width
        for stage, count in enumerate(counts):
            for i in range(count):
                stages.append(block(inside, width << stage, 2 if stage and i == 0 else 1))
                inside = (width << stage) * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


def _conv(inside: int, outside: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(outside)


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if inside == outside and stride == 1:
        return nn.Identity()
    return nn.Sequential(*_conv(inside, outside, 1, stride))


DEPTHS: dict[int, tuple[type[Basic | Bottleneck], tuple[int, ...]]] = {
    18: (Basic, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}


Split = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # pixels and labels as the file has them


class Images(NamedTuple):
    """CIFAR-10 as uint8 pixels (N, 3, 32, 32) and int64 labels."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True, kw_only=True)
class CifarResNet(Workload):
    """Image classification with random crops and flips, trained by SGD with momentum.

    `depth` is 18, 50 or 101. `width` is the number of channels in the first stage: 64 in the paper, 16 by default, so
    that a CPU trains it in minutes. `eval_images` is the number of test images that `evaluate` uses.
    """

    name: ClassVar[str] = "cifar_resnet"
    batch: int = 128
    lr: float = 0.1
    depth: int = 18
    width: int = 16
    eval_images: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in DEPTHS:
            raise WorkloadError(
                f"cifar_resnet: depth={self.depth} is unknown; choose one of {', '.join(map(str, DEPTHS))}"
            )

    def build(self, seed: int) -> nn.Module:
        block, counts = DEPTHS[self.depth]
        return seeded(seed, lambda: ResNet(block, counts, width=self.width, classes=CLASSES))

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused
        )

    def lr_factor(self, step: int, steps: int) -> float:
        """Returns the factor of `lr`: a linear warm-up over the first 10%, then a cosine from 1 to 0."""
        warm = max(1, steps // 10)
        return (step + 1) / warm if step < warm else 0.5 * (1 + cos(pi * (step - warm) / max(1, steps - warm)))

    def batches(self, seed: int) -> Iterator[Batch]:
        images = self._images
        generator = torch.Generator().manual_seed(seed)
        for chosen in shuffled(len(images.x_train), self.batch, seed):
            yield augment(images.x_train[chosen], generator), images.y_train[chosen]

    def examples(self) -> int:
        return len(self._images.x_train)

    def validation(self) -> Iterable[Batch]:
        images, count = self._images, self.eval_images
        pairs = zip(torch.split(images.x_test[:count], 250), torch.split(images.y_test[:count], 250), strict=True)
        return ((normalize(x), y) for x, y in pairs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross entropy in nats per image."""
        return F.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    @cached_property
    def _images(self) -> Images:
        return read_images(self.data)


def normalize(pixels: Tensor) -> Tensor:
    """Returns uint8 pixels (N, 3, H, W) as fp32, normalized by CIFAR-10's mean and standard deviation per channel."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Returns normalized images, each shifted by up to 4 pixels (zeros fill in) and flipped with probability 0.5."""
    count = len(pixels)
    padded = F.pad(normalize(pixels), (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count), generator=generator)
    rows = top[:, None] + torch.arange(32)
    columns = left[:, None] + torch.arange(32)
    flip = torch.rand(count, generator=generator) < 0.5
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    return (
        padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .contiguous()
    )


def read_images(path: Path | None) -> Images:
    """Returns CIFAR-10, read from torchvision's folder `cifar-10-batches-py` or from an .npz file."""
    if path is None or not path.exists():
        raise DataError(f"cifar_resnet: {'no data given' if path is None else f'{path} does not exist'}; {HOW_TO_GET}")
    for folder in (path, path / "cifar10"):
        batches = folder if folder.name == "cifar-10-batches-py" else folder / "cifar-10-batches-py"
        if batches.is_dir():
            return _read_batches(batches)
        packed = [folder] if folder.suffix == ".npz" else sorted(folder.glob("*.npz"))
        if packed:
            return _read_npz(packed[0])
    raise DataError(f"cifar_resnet: {path} holds neither cifar-10-batches-py nor an .npz file; {HOW_TO_GET}")


def _read_npz(path: Path) -> Images:
    try:
        with zipfile.ZipFile(path):  # numpy takes what is no zip for a pickle
            pass
        with np.load(path, allow_pickle=False) as packed:
            arrays = {key: packed[key] for key in Images._fields if key in packed}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"cifar_resnet: {path} is not a complete .npz file ({error}); {HOW_TO_GET}") from error
    missing = [key for key in Images._fields if key not in arrays]
    if missing:
        raise DataError(f"cifar_resnet: {path} lacks {', '.join(missing)}; {HOW_TO_GET}")
    x_train, y_train, x_test, y_test = arrays.values()
    return _images(path, (x_train, y_train), (x_test, y_test), (32, 32, 3))


def _read_batches(folder: Path) -> Images:
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"cifar_resnet: {folder} lacks {', '.join(missing)}; {HOW_TO_GET}")
    *train, test = (_read_pickle(folder / name) for name in names)
    pixels, labels = map(np.concatenate, zip(*train, strict=True))
    return _images(folder, (pixels, labels), test, (3, 32, 32))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts and numpy arrays, as in CIFAR-10's files, and refuses anything else, which could run code."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.allowed or module.split(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR-10 batch")
        return super().find_class(module, name)


def _read_pickle(path: Path) -> Split:
    try:
        with path.open("rb") as handle:
            content = _ArraysOnly(handle, encoding="bytes").load()
        return content[b"data"].reshape(-1, 3, 32, 32), np.asarray(content[b"labels"])
    except (OSError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"cifar_resnet: {path} is not a CIFAR-10 batch ({error}); {HOW_TO_GET}") from error


def _images(path: Path, train: Split, test: Split, shape: tuple[int, ...]) -> Images:
    return Images(*_tensors(path, "train", train, shape), *_tensors(path, "test", test, shape))


def _tensors(path: Path, split: str, arrays: Split, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    pixels, labels = arrays
    if pixels.dtype != np.uint8 or pixels.shape[1:] != shape:
        wanted = " x ".join(map(str, ("N", *shape)))
        came = f"{pixels.dtype} of {' x '.join(map(str, pixels.shape))}"
        raise DataError(f"cifar_resnet: {path}: {split} pixels must be uint8 of {wanted}, got {came}")
    if len(pixels) == 0:
        raise DataError(f"cifar_resnet: {path}: the {split} split holds no images; {HOW_TO_GET}")
    if labels.shape not in ((len(pixels),), (len(pixels), 1)) or labels.dtype.kind not in "iu":
        raise DataError(
            f"cifar_resnet: {path}: {split} labels must be one integer for each of {len(pixels)} images, got"
            f" {labels.dtype} of {' x '.join(map(str, labels.shape)) or 'no dimension'}"
        )
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(
            f"cifar_resnet: {path}: {split} labels must be from 0 to {CLASSES - 1}, got {labels.min()} to"
            f" {labels.max()}"
        )
    images = pixels if shape[0] == 3 else pixels.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.reshape(-1).astype(np.int64))
