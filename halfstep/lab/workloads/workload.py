"""The base class of workloads, small real training jobs that say nothing about precision, and what they share."""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halfstep.errors import DataError, WorkloadError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A training job whose settings are its fields: equal fields and seeds give equal weights and batches.

    `data` is the folder or file that the job reads (None: the workload's default). `batch` is the number of examples
    per step, `lr` the peak learning rate, `max_norm` the gradient norm to clip to (None: no clipping). A job that reads
    no data sets `reads_data = False`.
    """

    name: ClassVar[str]
    reads_data: ClassVar[bool] = True
    data: Path | None = None
    batch: int = 16
    lr: float = 1e-3
    max_norm: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise WorkloadError(f"{self.name}: {field.name} is {value}; set it above 0")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """Returns the fp32 model on the CPU; the same seed gives the same weights."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yields (inputs, targets) on the CPU without end; the same seed gives the same batches."""

    @abstractmethod
    def validation(self) -> Iterable[Batch]:
        """Yields the batches (inputs, targets) for `evaluate`, the same at every call."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch; called outside the model, with fp32 outputs."""

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Returns the optimizer of the job; `fused` selects torch's fused kernels."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=fused)

    def lr_factor(self, step: int, steps: int) -> float:
        """Returns the factor by which `lr` is multiplied at `step` (from 0) of `steps`."""
        return 1.0

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns the accuracy on a batch, a fraction as a 0-dim tensor; None if the job has no accuracy."""
        return None

    def examples(self) -> int | None:
        """Returns the number of training examples in an epoch; None if the job has no epochs."""
        return None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the mean validation loss of `model` and, if the job has one, the accuracy between 0 and 1."""
        sums: dict[str, float] = {}
        count, was_training = 0, model.training
        model.eval()
        try:
            with torch.no_grad():
                for batch in self.validation():
                    inputs, targets = to_device_of(model, *batch)
                    outputs = model(inputs)
                    found = {"loss": self.loss(outputs, targets), "accuracy": self.correct(outputs, targets)}
                    for name, value in found.items():
                        if value is not None:
                            sums[name] = sums.get(name, 0.0) + float(value) * len(inputs)
                    count += len(inputs)
        finally:
            model.train(was_training)
        if not sums:
            raise WorkloadError(f"{self.name}: validation() yielded no batch; it must yield at least one")
        return {name: total / count for name, total in sums.items()}


def to_device_of(model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors on the device of the model's first parameter."""
    device = next(model.parameters()).device
    return tuple(t.to(device) for t in tensors)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Returns `make()`, run with torch's CPU generator seeded; restores the generator's state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def shuffled(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yields the indices of full batches without end, in a new random order each epoch."""
    if count < batch:
        raise WorkloadError(f"batch={batch} is more than the {count} training examples; set a smaller batch")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from (order[i : i + batch] for i in range(0, count - batch + 1, batch))


def read_bytes(path: Path, workload: str) -> bytes:
    """Returns the content of a file, unpacked if its name ends in .gz; errors begin with the name `workload`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{workload}: {path} cannot be read ({error.strerror}); pass a readable file") from error
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{workload}: {path} is not a complete gzip file ({error}); pack or download it again, or rename it "
            "without .gz if it is not packed"
        ) from error


def as_text(content: bytes, path: Path, workload: str) -> str:
    """Returns the content of a file as text; errors begin with the name `workload`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{workload}: {path} must be UTF-8 text, but byte {content[error.start]:#04x} in line {line} is not;"
            " convert the file to UTF-8"
        ) from error
