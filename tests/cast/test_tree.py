"""Nested arguments and results: what is entered, what passes, what stays the caller's."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from halfstep.train.cast.tree import cast_floats, first_float_dtype, map_tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Point = namedtuple("Point", ["x", "tag"])


@dataclass
class Sample:
    x: Tensor
    tag: str


@dataclass(frozen=True)
class FrozenSample:
    x: Tensor
    length: int = field(init=False, default=3)


@dataclass
class SlottedSample:
    __slots__ = ("x",)
    x: Tensor


class Batch:
    """A user's batch, whose `to` was written for devices and would cast its indices too."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self.x, self.ids = x, ids

    def to(self, *args: Any) -> Batch:
        self.x, self.ids = self.x.to(*args), self.ids.to(*args)
        return self


class SlottedBatch:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *args: Any) -> SlottedBatch:
        return SlottedBatch(self.x.to(*args))


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class OpaqueBatch:
    """Holds its tensor where no walk reaches it."""

    def __init__(self, x: Tensor) -> None:
        self.hidden = Hidden(x)

    def to(self, dtype: torch.dtype) -> OpaqueBatch:
        return OpaqueBatch(self.hidden.x.to(dtype))


class DeviceBatch(OpaqueBatch):
    def to(self, device: str) -> OpaqueBatch:  # type: ignore[override]
        if not isinstance(device, str):
            raise TypeError(device)
        return self


@dataclass
class Output(OrderedDict):
    """As the outputs of Hugging Face models: a dataclass and a mapping whose two views agree."""

    logits: Tensor | None = None
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) is not None:
                super().__setitem__(f.name, getattr(self, f.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        kind, _, *rest = super().__reduce__()
        return kind, tuple(getattr(self, f.name) for f in fields(self)), *rest


def ones(dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(2, dtype=dtype)


CONTAINERS = {
    "tensor": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (t, 1), lambda o: o[0]),
    "list": (lambda t: ["a", t], lambda o: o[1]),
    "dict": (lambda t: {"a": t}, lambda o: o["a"]),
    "nested": (lambda t: {"a": [(None, {"b": t})]}, lambda o: o["a"][0][1]["b"]),
    "named tuple": (lambda t: Point(t, "tag"), lambda o: o.x),
    "ordered dict": (lambda t: OrderedDict(a=t), lambda o: o["a"]),
    "default dict": (lambda t: defaultdict(list, a=t), lambda o: o["a"]),
    "user dict": (lambda t: UserDict(a=t), lambda o: o["a"]),
    "read-only mapping": (lambda t: types.MappingProxyType({"a": t}), lambda o: o["a"]),
    "model output": (lambda t: Output(logits=t), lambda o: o.logits),
    "dataclass": (lambda t: Sample(t, "tag"), lambda o: o.x),
    "frozen dataclass": (lambda t: FrozenSample(t), lambda o: o.x),
    "slotted dataclass": (lambda t: SlottedSample(t), lambda o: o.x),
    "batch": (lambda t: Batch(t, torch.tensor([1])), lambda o: o.x),
    "slotted batch": (lambda t: SlottedBatch(t), lambda o: o.x),
    "opaque batch": (lambda t: OpaqueBatch(t), lambda o: o.hidden.x),
    "list in batch": (lambda t: Batch([t], torch.tensor([1])), lambda o: o.x[0]),
    "parameter": (lambda t: nn.Parameter(t), lambda o: o),
    "return type": (lambda t: torch.return_types.max((t, torch.tensor(0))), lambda o: o.values),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_cast_reaches_the_tensor_and_keeps_its_container(name: str) -> None:
    make, get = CONTAINERS[name]
    before = make(ones())
    after = cast_floats(before, BF16)
    assert get(after).dtype is BF16
    if name != "parameter":
        assert type(after) is type(before)


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_callers_object_stays_as_it_was(name: str) -> None:
    make, get = CONTAINERS[name]
    before = make(ones())
    cast_floats(before, BF16)
    assert get(before).dtype is FP32


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_needs_no_cast_is_returned_itself(name: str) -> None:
    make, _ = CONTAINERS[name]
    before = make(ones(BF16))
    after = cast_floats(before, BF16)
    assert after is before or name == "opaque batch"


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "opaque batch"])
def test_the_first_float_dtype_is_found_inside(name: str) -> None:
    make, _ = CONTAINERS[name]
    assert first_float_dtype((0, make(ones(FP16)))) is FP16


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8])
def test_other_dtypes_are_never_cast(dtype: torch.dtype) -> None:
    x = torch.ones(2, dtype=dtype)
    assert cast_floats((x, ones()), FP16)[0] is x


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", None, 1, 2.5, torch.float32, torch.Size([1]), np.ones(2), object(), int]
)
def test_other_objects_pass(leaf: Any) -> None:
    assert cast_floats([leaf, ones()], FP16)[0] is leaf


def test_a_module_passes_though_it_has_a_to_method() -> None:
    module = nn.Linear(1, 1)
    assert cast_floats((module, ones()), FP16)[0] is module
    assert module.weight.dtype is FP32


def test_integers_of_a_batch_stay_integers() -> None:
    assert cast_floats(Batch(ones(), torch.tensor([1])), FP16).ids.dtype is torch.int64


def test_a_batch_whose_to_takes_no_dtype_passes() -> None:
    batch = DeviceBatch(ones())
    assert cast_floats(batch, FP16) is batch


def test_batches_that_refer_to_each_other_end_the_walk() -> None:
    first, second = Batch(ones(), torch.tensor([1])), Batch(ones(), torch.tensor([1]))
    first.other, second.other = second, first  # type: ignore[attr-defined]
    assert cast_floats(first, FP16).other.x.dtype is FP16
    assert first_float_dtype(first) is FP32


def test_fields_that_init_does_not_take_survive() -> None:
    before = FrozenSample(ones())
    object.__setattr__(before, "length", 7)
    assert cast_floats(before, FP16).length == 7


def test_both_views_of_a_model_output_change() -> None:
    after = cast_floats(Output(logits=ones(), loss=ones(FP16)), FP16)
    assert is_dataclass(after)
    assert after["logits"] is after.logits
    assert list(after) == ["logits", "loss"]


def test_a_packed_sequence_keeps_its_order() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([1, 3]), batch_first=True, enforce_sorted=False)
    after = cast_floats(packed, BF16)
    assert isinstance(after, PackedSequence)
    assert after.data.dtype is BF16
    assert after.batch_sizes is packed.batch_sizes


def test_a_cast_is_differentiable() -> None:
    x = ones().requires_grad_()
    cast_floats({"x": x}, BF16)["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32


def test_map_keeps_a_key_order_and_the_unchanged_parts() -> None:
    shared = [1, 2]
    after = map_tensors(torch.neg, {"b": shared, "a": ones()})
    assert list(after) == ["b", "a"]
    assert after["b"] is shared


def test_positional_arguments_come_before_keywords() -> None:
    assert first_float_dtype((ones(BF16),), {"x": ones(FP16)}) is BF16
    assert first_float_dtype((torch.tensor(1), torch.ones(1, dtype=torch.float64)), {"x": ones(FP16)}) is FP16
    assert first_float_dtype(("text",), {}) is None


COMPILED = ["tensor", "tuple", "list", "dict", "nested", "named tuple", "ordered dict"]
COMPILES_COPIES = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch.compile traces no copy.copy here")
COMPILED += [pytest.param(name, marks=COMPILES_COPIES) for name in ("dataclass", "batch", "frozen dataclass")]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.slow_but("tuple", "batch", "nested")
def test_a_cast_can_be_compiled_whole(name: str) -> None:
    make, get = CONTAINERS[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda o: cast_floats(o, BF16), backend="eager", fullgraph=True)
    assert get(compiled(make(ones()))).dtype is BF16
