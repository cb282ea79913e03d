"""What is noted of the calls that a checkpoint may repeat."""

import gc

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from halfstep.train.cast.gate import Calls


def hooked():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def test_calls_with_the_same_arguments_are_repeated_last_first_and_again_so():
    calls, x, y = Calls(), torch.ones(2), torch.ones(2)
    with hooked():
        for entered in (True, False, False):
            calls.note((x,), {}, entered=entered)
        calls.note((), {"y": y}, entered=True)
    assert [calls.repeated((x.detach(),), {}) for _ in range(6)] == [False, False, True] * 2
    assert calls.repeated((), {"y": y}) is True
    assert calls.repeated((torch.ones(2),), {}) is None


@pytest.mark.parametrize(
    ("grad_on", "asks", "noted"),
    [(True, True, False), (True, False, False), (False, False, False), (False, True, True)],
)
def test_without_hooks_only_a_call_without_gradients_on_what_asks_for_one_is_noted(grad_on, asks, noted):
    calls, x = Calls(), torch.ones(2, requires_grad=asks)
    with torch.set_grad_enabled(grad_on):
        calls.note((x,), {}, entered=True)
    assert calls.repeated((x,), {}) is (True if noted else None)


def test_memory_that_is_freed_is_forgotten_and_none_is_kept_alive():
    calls = Calls()
    with hooked():
        for _ in range(10_000):
            calls.note((torch.ones(2),), {}, entered=True)
        assert len(calls._ways) <= 64
        kept = [torch.ones(2) for _ in range(200)]
        for x in kept:
            calls.note((x,), {}, entered=True)
    assert all(calls.repeated((x,), {}) for x in kept)
    gc.collect()
