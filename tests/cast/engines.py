"""What the tests of the op engine share: engines opened for a test, and a record of what ran in which dtype."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.edits import OpChanges
from halfstep.formats import as_format
from halfstep.plan.levels import level
from halfstep.plan.optable import effective
from halfstep.train.cast.ops import OpEngine


def make_engine(name="O1", low=torch.bfloat16, **changes):
    plan = replace(level(name, as_format(low)), op_changes=OpChanges(**changes))
    return OpEngine(effective(plan), low, "cpu")


@contextmanager
def opened(name="O1", low=torch.bfloat16, **changes):
    engine = make_engine(name, low, **changes)
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


class Record(TorchDispatchMode):
    """Lists (op, dtype of its first result) of what runs, for ops whose name contains one of the words."""

    def __init__(self, *words):
        super().__init__()
        self.words = words
        self.ran = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor) and any(word in op.name() for word in self.words):
            self.ran.append((op.name().removeprefix("aten::"), first.dtype))
        return out
