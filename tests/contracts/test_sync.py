"""A training step reads nothing on the host, at every level but O0; an optimizer that must is said to in the record."""

import pytest
import torch

from tests.contracts.cases import mixed_plans, start, train
from tests.scale.sync import NoSync


@mixed_plans
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_step_does_not_wait_for_the_device(name, low, optimizer):
    model, opt, session = start(name, low, optimizer)
    train(session, model, opt, [0])
    with NoSync():
        (record,) = train(session, model, opt, [1])
        (skipped,) = train(session, model, opt, [2], poison=[2])
    assert not record.synced
    assert not bool(record.skipped)
    assert bool(skipped.skipped)


def test_an_optimizer_that_cannot_be_predicated_says_that_it_waited():
    model, opt, session = start("O2", "bf16", torch.optim.RMSprop)
    (record,) = train(session, model, opt, [0])
    assert record.synced
    with pytest.raises(AssertionError), NoSync():
        train(session, model, opt, [1])


@mixed_plans
def test_what_is_carried_from_step_to_step_on_the_device_stays_where_it_is(name, low):
    """A CUDA graph that was captured from a step reads and writes these places at each replay."""
    model, opt, session = start(name, low)

    def places():
        state = [value for entry in opt.state.values() for value in entry.values()]
        held = [session._skips, session._scales.of(0).value, *model.parameters(), *model.buffers(), *state]
        return [tensor.data_ptr() for tensor in held]

    train(session, model, opt, [0])
    before = places()
    train(session, model, opt, [1, 2, 3], poison=[2])
    assert places() == before
