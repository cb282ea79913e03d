"""The loss scales of a session: which loss has which scale, and what all of them obey."""

import pytest
import torch

from halfstep.edits import Scaling
from halfstep.errors import SessionError, StateError
from halfstep.train.scale.accumulator import Collected
from halfstep.train.scale.scaling import LossScales

CPU = torch.device("cpu")


def dynamic(**settings):
    return LossScales(Scaling("dynamic", init=1024.0, **settings), CPU)


def collected(*losses):
    flags = {loss: torch.tensor(False) for loss in losses}
    return Collected([], [], torch.tensor(1024.0), None, losses, flags, {}, False)


def test_dynamic_scales_are_one_a_loss_and_a_constant_is_one_for_all():
    scales, constant = dynamic(), LossScales(Scaling("static", init=8.0), CPU)
    assert scales.of(0) is scales.of(0) is not scales.of(1)
    assert constant.of(0) is constant.of(1)


@pytest.mark.parametrize("loss_id", [-1, True, 1.0, "0"])
def test_a_loss_id_is_an_integer_from_0_up(loss_id):
    for ask in (dynamic().of, dynamic().read):
        with pytest.raises(SessionError, match="it must be a non-negative int"):
            ask(loss_id)


def test_a_limit_holds_for_scales_that_come_later():
    scales = dynamic()
    before = scales.of(0)
    scales.limit(100.0)  # the largest power of two below it is 64
    assert float(before.value) == float(scales.of(1).value) == 64.0


def test_only_the_scale_of_a_loss_that_went_in_backs_off():
    scales = dynamic()
    scales.of(0), scales.of(1)
    scales.update([collected(1)], [torch.tensor(True)])
    assert scales.read_all() == {0: 1024.0, 1: 512.0}


def test_two_steps_of_one_backward_count_once_towards_growth():
    scales = dynamic(growth_interval=2)
    scales.of(0)
    clean = torch.tensor(False)
    for _ in range(2):  # two optimizers, one after the other
        scales.update([collected(0)], [clean])
    assert scales.read(0) == 1024.0
    scales.went_backward(0)
    scales.update([collected(0)], [clean])
    assert scales.read(0) == 2048.0


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (True, False, True)])
def test_steps_of_one_backward_back_off_once(flags):
    scales = dynamic()
    scales.of(0)
    for flag in flags:  # several optimizers, one after the other
        scales.update([collected(0)], [torch.tensor(flag)])
    assert scales.read(0) == 512.0
    scales.went_backward(0)
    scales.update([collected(0)], [torch.tensor(True)])
    assert scales.read(0) == 256.0


@pytest.mark.parametrize("hysteresis", [1, 2])  # 1 has a kernel of its own
@pytest.mark.parametrize("overflowed", [True, False])
def test_a_step_with_a_loss_that_is_not_finite_says_nothing_but_to_torch_amp(overflowed, hysteresis):
    scales = dynamic(growth_interval=3, hysteresis=hysteresis)
    scales.of(0)
    clean, void, found = torch.tensor(False), torch.tensor(True), torch.tensor(overflowed)
    for flag in (clean, clean):
        scales.went_backward(0)
        scales.update([collected(0)], [flag], clean)
    before = scales.state_dict()
    assert before["0"]["clean_steps"] == 2
    scales.went_backward(0)
    for _ in range(2):  # of two optimizers
        scales.update([collected(0)], [found], void)
    assert scales.state_dict() == before
    scales.as_torch_amp = True
    scales.went_backward(0)
    scales.update([collected(0)], [found], void)
    assert scales.state_dict()["0"]["clean_steps"] == 0


def test_reading_makes_no_scale():
    scales = dynamic()
    assert scales.read(3) == 1024.0
    assert scales.read_all() == {}
    assert LossScales(Scaling("none"), CPU).read(0) == 1.0


def test_held_at_is_unseen_and_undone():
    scales = dynamic()
    value = scales.of(0).value
    writes = value._version
    with scales.held_at(2.0):
        assert scales.read(0) == 2.0
    assert scales.read(0) == 1024.0
    assert value._version == writes


def test_a_state_goes_into_other_scales_and_a_bad_one_changes_nothing():
    scales, others = dynamic(), dynamic()
    scales.of(2).value.fill_(4.0)
    others.load_state_dict(scales.state_dict())
    assert others.read_all() == {0: 1024.0, 2: 4.0}  # a state has loss 0, whether it came or not
    with pytest.raises(StateError, match="this plan has 'dynamic'"):
        others.load_state_dict({"0": {"kind": "static", "scale": 1.0}})
    assert others.read_all() == {0: 1024.0, 2: 4.0}
