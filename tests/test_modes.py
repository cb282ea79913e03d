"""What dispatch modes switch off: autocast around custom operations, and compiled code, for whoever asks for it."""

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import FP16
from halfstep.modes import as_called, run_uncompiled, uncompiled
from halfstep.train.cast.products import Emulation
from tests.preflight.planted import product


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


class Compiled:
    """A compiled function, and whether a call of it runs as compiled code."""

    def __init__(self) -> None:
        self.calls = 0
        torch.compiler.reset()
        self._run = torch.compile(lambda x: x + 1, backend=self._backend)
        self._run(torch.zeros(2))
        assert self.calls == 1

    def _backend(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run

    def is_used(self) -> bool:
        before = self.calls
        self._run(torch.zeros(2))
        return self.calls > before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_stance_comes_back_when_the_last_of_several_ends(order):
    compiled = Compiled()
    releases = [run_uncompiled() for _ in range(3)]
    for index in order:
        assert not compiled.is_used()
        releases[index]()
    assert compiled.is_used()
    assert stance() == "default"


def test_to_release_twice_is_to_release_once():
    first, second = run_uncompiled(), run_uncompiled()
    first()
    first()
    assert stance() == "force_eager"
    second()
    assert stance() == "default"


def test_the_users_stance_comes_back():
    with torch.compiler.set_stance("eager_on_recompile", skip_guard_eval_unsafe=True):
        with uncompiled():
            assert stance() == "force_eager"
        now = torch._dynamo.eval_frame._stance
        assert (now.stance, now.skip_guard_eval_unsafe) == ("eager_on_recompile", True)
    assert stance() == "default"


def test_a_stance_that_the_user_entered_since_stays_and_ends_with_what_was_before():
    release = run_uncompiled()
    with torch.compiler.set_stance("eager_on_recompile"):
        release()
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_a_stance_of_the_users_that_ends_inside_is_not_brought_back():
    theirs = torch.compiler.set_stance("eager_on_recompile")
    release = run_uncompiled()
    theirs.__exit__(None, None, None)
    release()
    assert stance() == "default"


def test_two_that_ask_in_turn_around_stances_of_the_users():
    first = run_uncompiled()
    with torch.compiler.set_stance("eager_on_recompile"):
        first()
        second = run_uncompiled()
        assert stance() == "force_eager"
    second()
    assert stance() == "default"


def test_an_error_inside_ends_it():
    with pytest.raises(KeyboardInterrupt), uncompiled():
        raise KeyboardInterrupt
    assert stance() == "default"


def test_emulation_and_others_ask_for_the_same_stance():
    release = run_uncompiled()
    with uncompiled(Emulation(FP16)):
        release()
        assert stance() == "force_eager"
    assert stance() == "default"


def test_threads_that_come_and_go_leave_the_stance_as_it_was():
    def run() -> None:
        for _ in range(200):
            one, other = run_uncompiled(), run_uncompiled()
            one()
            with uncompiled():
                other()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stance() == "default"


def test_a_release_in_the_middle_of_another_is_taken(monkeypatch):
    """As the garbage collector may do it, in the same thread."""
    asked = torch.compiler.set_stance
    earlier = run_uncompiled()
    earlier()

    def collecting(*args: Any, **kwargs: Any) -> Any:
        earlier()
        return asked(*args, **kwargs)

    monkeypatch.setattr(torch.compiler, "set_stance", collecting)
    release = run_uncompiled()
    assert stance() == "force_eager"
    release()
    assert stance() == "default"


@torch.library.custom_op("halfstep_modes::low_product", mutates_args=())
def low_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


low_product.register_autocast("cpu", torch.float16)  # casts what it gets, and has autocast off inside


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return as_called(func, args, kwargs or {})


@pytest.mark.parametrize("operation", [product, low_product])
@pytest.mark.parametrize("inference", [False, True])
def test_a_custom_operation_runs_in_a_mode_as_without_one(operation, inference):
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    found = []
    for mode in (nullcontext(), Passing()):
        with mode, torch.autocast("cpu", torch.float16), torch.inference_mode(inference):
            found += [operation(a.half(), b), operation(a, b)]
    assert [out.dtype for out in found] == [torch.float16] * 4
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_custom_operation_that_was_called_without_autocast_gets_none():
    with torch.autocast("cpu", torch.float16), Passing(), torch.autocast("cpu", enabled=False):
        assert product(torch.randn(3, 3), torch.randn(3, 3)).dtype is torch.float32
