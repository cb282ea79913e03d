"""Loads a workload by name, or from a user's `path.py:function`, with settings given as text; one is a regression."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import DataError, HalfstepError, WorkloadError
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.cifar_resnet import DEPTHS, CifarResNet
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM
from halfstep.lab.workloads.workload import Batch, Workload, seeded
from halfstep.validate import near_miss


@dataclass(frozen=True, kw_only=True)
class Regression(Workload):
    """Linear layers with ReLUs between them, trained by SGD on fixed random data.

    Batch size, widths, data, loss and optimizer are those of NVIDIA's talk on automatic mixed precision. The talk's
    model is a single `nn.Linear(D_in, D_out)`, which is `layers=1`. Each further layer is a hidden layer of `d_in`
    units in front of that one.
    """

    name: ClassVar[str] = "regression"
    reads_data: ClassVar[bool] = False
    batch: int = 64
    lr: float = 1e-3
    d_in: int = 1024
    d_out: int = 512
    layers: int = 2

    def build(self, seed: int) -> nn.Module:
        hidden, out = (self.d_in, self.d_in), (self.d_in, self.d_out)

        def network() -> nn.Module:
            parts = [part for _ in range(self.layers - 1) for part in (nn.Linear(*hidden), nn.ReLU())]
            return nn.Sequential(*parts, nn.Linear(*out)) if parts else nn.Linear(*out)

        return seeded(seed, network)

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, fused=fused)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yields the same batch again and again, as in the talk: x and y are standard normal."""
        batch = self._draw(seed)
        while True:
            yield batch

    def validation(self) -> Iterable[Batch]:
        """Yields the batch of seed 0: the job fits noise, so there is nothing to generalise to."""
        return [self._draw(0)]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def _draw(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(self.batch, self.d_in, generator=generator),
            torch.randn(self.batch, self.d_out, generator=generator),
        )


WORKLOADS: dict[str, type[Workload]] = {kind.name: kind for kind in (CharLM, CifarResNet, ImdbLSTM, Regression)}
MODELS: dict[str, tuple[str, dict[str, str]]] = {  # models of a known size, as workloads with these settings
    f"resnet{depth}": (CifarResNet.name, {"depth": str(depth), "width": "64"}) for depth in DEPTHS
}


def load_workload(name: str, settings: Mapping[str, str] | None = None, *, data: Path | None = None) -> Workload:
    """Returns the workload `name` with settings given as text, as on a command line.

    `name` is one of `WORKLOADS`, one of `MODELS`, whose settings `settings` override, or `path.py:function`, which gets
    the settings as keywords, as text, and `data` if that is not None, and returns a `Workload`.
    """
    name, own = MODELS.get(name, (name, {}))
    settings = {**own, **(settings or {})}
    if ":" in name:
        return _load_file(name, settings, data)
    if name not in WORKLOADS:
        known = (*WORKLOADS, *MODELS)
        hint = near_miss(name, known) or ";"
        raise WorkloadError(f"unknown workload {name!r}{hint} choose one of {', '.join(known)}, or path.py:function")
    kind = WORKLOADS[name]
    hints = get_type_hints(kind)
    types = {f.name: hints[f.name] for f in fields(kind) if f.name != "data"}
    _refuse_unknown(name, settings, list(types))
    values: dict[str, Any] = {key: _parse(name, key, text, types[key]) for key, text in settings.items()}
    if data is not None and not kind.reads_data:
        readers = ", ".join(other.name for other in WORKLOADS.values() if other.reads_data)
        raise WorkloadError(
            f"{name} reads no data, but got data={data}; leave it out, or choose a workload that does: {readers}"
        )
    return kind(data=data, **values)


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Returns the settings in `key=value` strings as a dict."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise WorkloadError(f"setting {pair!r} is not key=value; write, for example, --set batch=32")
        if key in settings:
            raise WorkloadError(f"setting {key!r} is set twice, to {settings[key]!r} and {value!r}; set it once")
        settings[key] = value
    return settings


def _parse(workload: str, key: str, text: str, kind: Any) -> object:
    kinds = get_args(kind) or (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    base = next(k for k in kinds if k is not type(None))
    try:
        return base(text)
    except ValueError:
        allowed = " or none" if type(None) in kinds else ""
        raise WorkloadError(
            f"{workload}: {key} is {text!r}; set it to a value of type {base.__name__}{allowed}"
        ) from None


def _refuse_unknown(workload: str, settings: Mapping[str, str], allowed: list[str]) -> None:
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        near = near_miss(unknown[0], allowed)
        raise WorkloadError(
            f"{workload} has no setting {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}{near}"
        )


def _load_file(name: str, settings: dict[str, str], data: Path | None) -> Workload:
    path_text, _, function = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file() or path.suffix != ".py":
        raise WorkloadError(f"{name!r}: no Python file {path_text!r}; pass path.py:function")
    make = getattr(_import(path), function, None)
    if not callable(make):
        raise WorkloadError(
            f"{path} has no function {function!r}; define it there, and let it return a halfstep.lab.workloads.Workload"
        )
    parameters = inspect.signature(make).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _refuse_unknown(name, settings, [key for key in parameters if key != "data"])
        if data is not None and "data" not in parameters:
            raise WorkloadError(f"{name} takes no data; add a parameter `data` to the function, or leave --data out")
    if data is not None and not data.exists():
        raise DataError(f"{name}: {data} does not exist; pass the folder or file that the workload reads")
    try:
        made = make(**settings, **({} if data is None else {"data": data}))
    except HalfstepError:
        raise
    except Exception as error:
        raise WorkloadError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Workload):
        raise WorkloadError(f"{name} returned {type(made).__name__}; it must return a halfstep.lab.workloads.Workload")
    return made


def _import(path: Path) -> Any:
    module_name = f"halfstep_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported as Python; pass a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while the class is made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise WorkloadError(f"{path} raised {type(error).__name__} on import: {error}") from error
    return module
