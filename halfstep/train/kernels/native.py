"""Reads gradients and updates weights on a CPU with compiled loops (step.cpp)."""

from __future__ import annotations

import ctypes
import functools
from array import array
from typing import Any

import torch
from torch import Tensor

from halfstep.records import BINS, COUNTS, DOUBLES
from halfstep.train.kernels.batch import Batch, Options, Scratch, is_dense
from halfstep.train.kernels.library import load

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LAYOUTS = {"full": 0, "copy": 1, "split": 2, "low": 3}
_WIDTHS = {"full": 0, "bf16": 1, "8bit": 2}
_STATES = 3  # the most that a loop takes
_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_FUNCTIONS = {  # of step.cpp and stats.cpp, with what they return and take
    "halfstep_read": (None, (_L, _P, _P, _P, _I, _P, _P, _P)),
    "halfstep_step": (_I, (ctypes.c_char_p, _P, _P, _P, _L)),
    "halfstep_add_stats": (None, (_L, _P, _P, _P, _P, _L, _L, _I)),
    "halfstep_add_updates": (_I, (ctypes.c_char_p, _P, _P, _P, _L, _P, _L, _L)),
}

# A row of statistics is int64: the histogram, the counts, and the bits of the doubles, in the order of the fields of
# `TensorStats`.
WIDTH = BINS + len(COUNTS) + len(DOUBLES)


class _Tensors(ctypes.Structure):  # as in blocks.h, and so _Common
    _fields_ = (
        ("tensors", _L),
        *((name, _P) for name in ("numels", "weights", "extras", "grads", "grad_formats")),
        *((name, _P * _STATES) for name in ("states", "bases")),
        *((name, _P) for name in ("steps", "places")),
        *((name, _I) for name in ("layout", "format", "threads", "width", "rounds")),
        ("codes", _I * _STATES),
    )


class _Common(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("factor", "found")),
        *((name, _D) for name in ("lr", "weight_decay")),
        *((name, _I) for name in ("maximize", "decoupled")),
    )


class Table:
    """A batch in the two structures that the compiled loops take; it keeps alive the arrays to which they point."""

    def __init__(self, batch: Batch) -> None:
        assert len(batch.states) <= _STATES
        kept = batch.kept
        self.states = [pointers(tensors) for tensors in batch.states.values()]
        self.bases = [] if kept is None else [pointers(tensors) for tensors in kept.bases.values()]
        codes = [] if kept is None else [code.signed + 2 * code.stochastic for code in kept.codes]
        self.arrays = {
            "weights": pointers(batch.weights),
            "extras": pointers(batch.extras),
            "steps": pointers(batch.steps),
            "numels": array("q", [weight.numel() for weight in batch.weights]),
            "grad_formats": array("i", [_FORMATS[grad.dtype] for grad in batch.grads]),
            "places": array("q", [] if kept is None else [number for place in kept.places for number in place]),
        }
        self.tensors = _Tensors(
            tensors=len(batch.weights),
            layout=_LAYOUTS[batch.layout],
            format=_FORMATS[batch.weights[0].dtype],
            states=(_P * _STATES)(*map(address, self.states)),
            bases=(_P * _STATES)(*map(address, self.bases)),
            width=0 if kept is None else _WIDTHS[kept.kind],
            rounds=kept is not None and kept.rounds,
            codes=(_I * _STATES)(*codes),
            **{name: address(numbers) for name, numbers in self.arrays.items()},
        )
        self.common = _Common()

    def point(self, batch: Batch, options: Options, factor: Tensor | None, found: Tensor) -> tuple[Any, Any]:
        """Sets this step's gradients, `factor` (None: 1), `found` and options; returns the loops' two pointers."""
        self.arrays["grads"] = grads = pointers(batch.grads)
        self.tensors.grads = address(grads)
        self.tensors.threads = torch.get_num_threads()
        common = self.common
        common.factor = None if factor is None else factor.data_ptr()
        common.found = found.data_ptr()
        common.lr = _number(options.lr) if isinstance(options.lr, Tensor) else options.lr
        common.weight_decay = options.weight_decay
        common.maximize = options.maximize
        common.decoupled = options.decoupled
        return ctypes.byref(self.tensors), ctypes.byref(common)


def _number(lr: Tensor) -> float:
    """Returns a learning rate that is on the CPU, of the usual dtypes read from memory without an operation."""
    kind = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}.get(lr.dtype)
    return float(lr) if kind is None else float(kind.from_address(lr.data_ptr()).value)


def pointers(tensors: list[Tensor]) -> array[int]:
    """Returns the memory addresses of the tensors."""
    return array("q", [t.data_ptr() for t in tensors])


def address(numbers: array[int] | array[float]) -> int | None:
    """Returns the memory address of the array; None if it is empty."""
    return numbers.buffer_info()[0] if numbers else None


@functools.cache
def loops() -> ctypes.CDLL | None:
    """Returns the compiled loops; None if there are none."""
    loaded = load()
    for name, (result, arguments) in _FUNCTIONS.items() if loaded is not None else ():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def can_read(grads: list[Tensor]) -> bool:
    """Returns whether `read` can read these gradients: dense fp32, bf16 or fp16 on a CPU, and the loops compile."""
    for grad in grads:
        if type(grad) is not Tensor or grad.dtype not in _FORMATS or not grad.is_cpu:
            return False
        if grad.layout is not torch.strided:
            return False
        if not (grad.is_contiguous() or is_dense(grad)):
            return False
    return loops() is not None


def read(grads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the L2 norm of all gradients, whether any of them is infinite or NaN, and a flag for each gradient."""
    compiled = loops()
    assert compiled is not None
    norm = torch.empty((), dtype=torch.float32, device="cpu")
    found = torch.empty((), dtype=torch.bool, device="cpu")
    flags = torch.empty(len(grads), dtype=torch.bool, device="cpu")
    places = pointers(grads)
    numels = array("q", [grad.numel() for grad in grads])
    formats = array("i", [_FORMATS[grad.dtype] for grad in grads])
    compiled.halfstep_read(
        len(grads),
        address(places),
        address(numels),
        address(formats),
        torch.get_num_threads(),
        norm.data_ptr(),
        found.data_ptr(),
        flags.data_ptr(),
    )
    return norm, found, flags


def fits(batch: Batch, options: Options) -> bool:
    """Returns whether `update` takes this batch: dense tensors on a CPU, updated in fp32, and the loops compile."""
    return (not isinstance(options.lr, Tensor) or options.lr.is_cpu) and table_of(batch) is not None


def table_of(batch: Batch) -> Table | None:
    """Returns the batch in the form that the loops take, made once; None if the loops do not support its tensors."""
    if "native" not in batch.memory:
        dense = batch.layout == "full" or all(is_dense(weight) for weight in batch.weights)
        known = all(grad.dtype in _FORMATS and is_dense(grad) for grad in batch.grads)
        here = batch.device.type == "cpu" and batch.dtype is torch.float32 and all(map(is_dense, batch.weights))
        fitting = here and dense and known and loops() is not None
        batch.memory["native"] = Table(batch) if fitting else None
    table: Table | None = batch.memory["native"]
    return table


def update(kernel: str, batch: Batch, options: Options, factor: Tensor | None, found: Tensor, scratch: Scratch) -> None:
    """Makes one update by the optimizer `kernel`, in one pass over the tensors."""
    call("halfstep_step", kernel, batch, options, factor, found)
    torch.autograd.graph.increment_version(batch.weights)  # what autograd may have saved


def call(
    function: str, kernel: str, batch: Batch, options: Options, factor: Tensor | None, found: Tensor, *rest: Any
) -> None:
    """Calls a function of the loops for a batch that `fits` accepted, with the optimizer `kernel`."""
    compiled, table, numbers = loops(), table_of(batch), array("d", options.numbers)
    assert compiled is not None
    assert table is not None
    structures = table.point(batch, options, factor, found)
    if not getattr(compiled, function)(kernel.encode(), *structures, address(numbers), len(numbers), *rest):
        raise LookupError(
            f"the optimizer's row (halfstep/train/optim/laws.py) names the compiled loop {kernel!r} with "
            f"{len(numbers)} numbers and the states {list(batch.states)}, but halfstep/train/kernels/optimizers.h "
            "has no such loop: the two files must agree"
        )
