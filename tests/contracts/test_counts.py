"""What one step costs, as counts, since no test may time: counts.json has them, and its numbers only fall."""

import gc
import json
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.torch_internals import WORKS_WITH
from halfstep.train.kernels import library
from tests.models.zoo import TASKS

FILE = Path(__file__).with_name("counts.json")
OURS = Path(halfstep.__file__).parent
LEVELS = ("O1", "O2")
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # no calls from Python 3.12 on

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.__version__.startswith(WORKS_WITH), reason="other releases run other operations"),
    pytest.mark.skipif(library.load() is None, reason="needs the compiled loops"),
]


class Operations(TorchDispatchMode):
    """Counts what torch's dispatcher runs: all, casts, and collectives."""

    def __init__(self):
        super().__init__()
        self.all = self.casts = self.collectives = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.all += 1
        self.casts += op.name().startswith("aten::_to_copy")
        self.collectives += op.namespace in ("c10d", "_c10d_functional")
        return op(*args, **(kwargs or {}))


class Calls:
    """Counts calls of halfstep's functions, and those of its kernels for torch's dispatcher."""

    def __init__(self):
        self.all = self.kernels = 0

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _see(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS and code.co_filename.startswith(str(OURS)):
            self.all += 1
            self.kernels += code.co_name == "kernel"


@contextmanager
def without_onednn():
    """OneDNN's LSTM needs bf16 units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another setting, which torch sets back too
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def count(task, level):
    """Returns the counts of the third step of a model; products run in torch's own low kernels."""
    torch.manual_seed(0)
    model = TASKS[task].build()
    optimizer = TASKS[task].optimizer(model.parameters())
    batches = list(TASKS[task].batches(4))
    with without_onednn(), halfstep.initialize(model, optimizer, level, low="bf16", emulate=False) as session:

        def step(batch):
            optimizer.zero_grad()
            session.backward(TASKS[task].loss(model, batch))
            session.step(max_norm=1.0)

        step(batches[0])
        step(batches[1])
        gc.collect()  # or what earlier tests left runs in the middle
        gc.disable()
        with Calls() as calls:
            step(batches[2])
        gc.enable()
        with Operations():  # the first step in a mode sorts tensors anew
            step(batches[2])
        with Operations() as operations:
            step(batches[3])
        moved = sum(session.status().memory.values())
    return {
        "kernels in Python": calls.kernels,
        "calls of halfstep's functions": calls.all,
        "operations": operations.all,
        "casts": operations.casts,
        "collectives": operations.collectives,
        "bytes that a step passes over": moved,
    }


@pytest.mark.slow_but("GPT with rotary buffers-O1", "LSTM-O1")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_costs_no_more_than_was_counted(task, level):
    known = json.loads(FILE.read_text(encoding="utf-8"))[task][level]
    found = count(task, level)
    more = {name: f"{number}, was {known[name]}" for name, number in found.items() if number > known[name]}
    assert not more, "a step costs more than before; find out why, and raise no number without a reason in the commit"
    assert found == known, (
        "a step costs less than before: `python -m tests.contracts.test_counts` writes the lower numbers into "
        "counts.json, so that they stay low"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    written = {task: {level: count(task, level) for level in LEVELS} for task in TASKS}
    FILE.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
