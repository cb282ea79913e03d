"""Ctrl-C anywhere in a step: the thread's autocast, gradient mode and dispatch modes are as before, and so is compiled
code; the session goes on."""

import sys
from contextlib import ExitStack
from itertools import count
from linecache import getline
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule
from halfstep.torch_internals import keys_excluded_here, mode_stack

HERE = str(Path(halfstep.__file__).parent)
DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia", "maia", "ipu", "xla", "mps", "privateuseone")
LOCK = "with self._lock:"


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one bytecode, counted over all frames of files in a folder."""

    def __init__(self, folder, at):
        self.folder, self.left = folder, at
        self.where = None

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.look

    def look(self, frame, event, arg):
        # Python looks for a Ctrl-C after calls: none before a lock's release. 3.14 swallows it where generators end.
        if event == "opcode" and frame.f_lineno and getline(frame.f_code.co_filename, frame.f_lineno).strip() != LOCK:
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.look


class Model(nn.Module):
    """Has doors, a module that a rule keeps full, and one that is called with autocast switched off."""

    def __init__(self):
        super().__init__()
        self.first, self.full, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        x = self.full(self.first(x).relu())
        with torch.autocast("cpu", enabled=False):
            return self.last(x.to(self.last.weight.dtype))


def state_of_thread():
    torch.autocast_increment_nesting()
    return (
        [torch.is_autocast_enabled(device) for device in DEVICES],
        torch.get_autocast_dtype("cpu"),
        torch.autocast_decrement_nesting(),
        torch.is_grad_enabled(),
        str(keys_excluded_here()),
        mode_stack(),
        torch._dynamo.eval_frame._stance.stance,
    )


@pytest.mark.slow_but("casting-native-O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["native", "emulated", "watched"])
@pytest.mark.parametrize(
    ("part", "every"), [("train/cast", 3), ("modes", 3), ("", 1)], ids=["every-third-of-casting", "modes", "every"]
)
def test_ctrl_c_at_any_bytecode_of_a_step_leaves_autocast_as_it_was(level, how, part, every, request):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = [Rule("full", FULL)]
    session = halfstep.initialize(model, optimizer, level, low="bf16", rules=rules, emulate=how != "native")
    if how == "watched":  # as in a step that is recorded
        stack = ExitStack()
        stack.enter_context(session.runtime.whole_products())
        request.addfinalizer(stack.close)
    x = torch.ones(2, 2)

    def step():
        optimizer.zero_grad()
        out = model(x)
        with session.autocast():
            loss = nn.functional.mse_loss(out, torch.ones_like(out))
        session.backward(loss)
        session.step()

    step()
    before, outer = state_of_thread(), sys.gettrace()
    for at in count(1, every):
        interrupt = Interrupt(f"{HERE}/{part}", at)
        sys.settrace(interrupt)
        try:
            step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
        assert state_of_thread() == before, interrupt.where
        if interrupt.where is None:
            break
    assert at > (500 if part != "modes" else 0)
    step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
