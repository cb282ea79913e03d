"""Tensors are found in whatever a module returns."""

import collections
import dataclasses

import torch
from torch import nn

from halfstep.train.probe.hooks import tensors_in


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple
    loss: torch.Tensor | None = None


class Bag:
    def __init__(self, value):
        self.value = value
        self.module = nn.Linear(1, 1)
        self.me = self


def places(output):
    return [place for place, _ in tensors_in(output)]


def test_places_name_keys_fields_and_indices():
    t = torch.ones(1)
    pair = collections.namedtuple("pair", "left right")
    assert places(t) == [""]
    assert places((t, [t + 1])) == ["0", "1.0"]
    assert places({"a": t, 3: (t + 1,)}) == ["a", "3.0"]
    assert places(pair(t, t + 1)) == ["left", "right"]
    assert places(Output(t, (t + 1, None))) == ["logits", "hidden.0"]
    assert places(Bag(t)) == ["value"]


def test_a_recurrent_module_gives_its_three_tensors():
    assert places(nn.LSTM(2, 3)(torch.ones(4, 1, 2))) == ["0", "1.0", "1.1"]


def test_only_floating_and_complex_tensors_count_and_each_once():
    t = torch.ones(1)
    assert places((t, t)) == ["0"]
    assert places((torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), t.to(torch.complex64))) == ["2"]
    assert places(None) == places("text") == places(3.0) == places(nn.Linear(1, 1)) == []


def test_structures_that_hold_themselves_end():
    loop = [torch.ones(1)]
    loop.append(loop)
    assert places(loop) == ["0"]
