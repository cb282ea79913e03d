"""`amp.state_dict`, resuming, and what scripts read and write of `_amp_state`."""

import copy
import io

import pytest
import torch

from halfstep.errors import StateError
from tests.adapters.apex.cases import LEVELS, loss_of, same, sgd, small, step, values, vectors


def opened(amp, level, seed=0, **settings):
    model = small(seed)
    return amp.initialize(model, sgd(model), opt_level=level, **{"verbosity": 0, **settings})


def overflow(amp, model, optimizer, loss_id=0):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, vectors()) * float("inf"), optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
    optimizer.step()


def test_the_state_has_apexs_entries(amp):
    model, optimizer = opened(amp, "O1", num_losses=2)
    step(amp, model, optimizer, vectors(), loss_id=0)
    overflow(amp, model, optimizer, loss_id=1)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }
    given = {"epoch": 3}
    assert amp.state_dict(destination=given) is given
    assert set(given) == {"epoch", "loss_scaler0", "loss_scaler1"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_resumed_run_is_bit_identical(amp, level, skip):
    """Also right after a skipped step; apex made masters anew from the low weights."""

    def train(model, optimizer, seeds):
        for seed in seeds:
            step(amp, model, optimizer, vectors(seed))

    model, optimizer = opened(amp, level)
    train(model, optimizer, range(3))
    if skip and level != "O0":
        overflow(amp, model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    expected, expected_state = values(model), amp.state_dict()
    file.seek(0)
    loaded = torch.load(file)
    model, optimizer = opened(amp, level, seed=7)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    train(model, optimizer, range(3, 6))
    assert same(values(model), expected)
    assert amp.state_dict() == expected_state


def test_a_checkpoint_loads_at_any_level_and_without_amp(amp):
    model, optimizer = opened(amp, "O2")
    step(amp, model, optimizer, vectors())
    saved, plain = model.state_dict(), small(3)
    plain.load_state_dict(saved)
    assert same(values(plain), saved)
    for level in LEVELS:
        other, _ = opened(amp, level, seed=4)
        other.load_state_dict(saved)
        assert same(values(other), saved) or level == "O3"  # which keeps no more than the low weights


def test_without_a_session_the_state_is_empty(amp):
    assert amp.state_dict() == {}
    opened(amp, "O1")
    assert amp.state_dict() != {}
    opened(amp, "O1", enabled=False)
    assert amp.state_dict() == {}


def test_entries_that_are_none_are_refused_before_anything_is_loaded(amp):
    opened(amp, "O1", num_losses=2)
    before, good = amp.state_dict(), {"loss_scale": 8.0, "unskipped": 0}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({"loss_scaler0": good, "model": {}})
    for entry, words in ((0.0, "positive finite"), ("big", "positive finite"), (float("inf"), "positive finite")):
        with pytest.raises(StateError, match=words):
            amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": {"loss_scale": entry, "unskipped": 0}})
    for entry in (8.0, {}, {"loss_scale": 8.0}):
        with pytest.raises(StateError, match="expected a dict with loss_scale and unskipped"):
            amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": entry})
    with pytest.raises(TypeError, match=r"got NoneType; pass the result of amp.state_dict\(\)"):
        amp.load_state_dict(None)
    assert amp.state_dict() == before


def test_a_state_that_comes_before_initialize_is_refused(amp):
    with pytest.raises(RuntimeError, match=r"before amp\.initialize.*call it after"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})


def test_scales_are_found_by_their_number(amp):
    """As of a state that went through a file with sorted keys; apex went by the order."""
    opened(amp, "O1", num_losses=11)
    saved = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(11)}
    amp.load_state_dict(dict(sorted(saved.items())))
    assert amp.state_dict() == saved


def test_another_number_of_losses_is_told(amp, capsys):
    opened(amp, "O1", verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(2)})
    said = capsys.readouterr().out
    assert "contains 2 entries, while 1 loss_scalers are used" in said
    assert "Skipping loss_scaler[1]" in said
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}


def test_a_fixed_scale_stays_as_it_was_asked_for(amp, capsys):
    opened(amp, "O1", loss_scale=128.0, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    assert "another, static one" in capsys.readouterr().out
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def test_scripts_set_the_first_scale(amp):
    model, optimizer = opened(amp, "O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**20
    assert amp._amp_state.loss_scalers[0].dynamic
    with pytest.raises(AttributeError):
        amp._amp_state.loss_scalers[0]._scale_window = 100  # which would change nothing


@pytest.mark.parametrize(("level", "scale"), [("O0", None), ("O3", None), ("O2", 8.0)])
def test_a_fixed_scale_cannot_be_set(amp, level, scale):
    opened(amp, level, loss_scale=scale)
    with pytest.raises(AttributeError, match=r'fixed at .*"dynamic"'):
        amp._amp_state.loss_scalers[0]._loss_scale = 4.0


@pytest.mark.parametrize("level", LEVELS)
def test_scripts_that_have_apex_make_its_masters_before_they_resume(amp, level):
    """They save master parameters and copy them back, which leaves halfstep's masters, and so the run, as they were."""
    model, optimizer = opened(amp, level)
    step(amp, model, optimizer, vectors())
    saved = model.state_dict(), copy.deepcopy(optimizer.state_dict()), list(amp.master_params(optimizer))
    saved = copy.deepcopy((dict(saved[0]), saved[1], [p.data for p in saved[2]]))
    step(amp, model, optimizer, vectors(2))
    expected = values(model)
    model, optimizer = opened(amp, level, seed=5)
    model.load_state_dict(saved[0])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved[1])
    for p, kept in zip(amp.master_params(optimizer), saved[2], strict=True):
        p.data.copy_(kept)
    step(amp, model, optimizer, vectors(2))
    assert same(values(model), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_handle_tells_whether_ops_are_cast(amp, level):
    handle = amp._amp_state.handle
    assert not handle.is_active()
    opened(amp, level)
    assert amp._amp_state.handle._is_active is (level == "O1")
    with amp.disable_casts():
        assert not amp._amp_state.handle.is_active()


def test_nothing_is_there_before_initialize(amp):
    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(amp._amp_state, "loss_scalers")
    with pytest.raises(AttributeError, match="no attribute 'lr'"):
        _ = (opened(amp, "O1"), amp._amp_state.opt_properties.lr)


def test_a_model_that_is_no_longer_used_is_let_go(amp):
    import gc
    import weakref

    model, optimizer = opened(amp, "O2")
    gone = weakref.ref(model)
    del model, optimizer
    opened(amp, "O2")
    gc.collect()
    assert gone() is None


def test_a_copy_of_the_model_is_an_average_in_fp32(amp):
    model, optimizer = opened(amp, "O2")
    average = copy.deepcopy(model)
    step(amp, model, optimizer, vectors())
    assert average[0].weight.dtype is torch.float32
    assert not torch.equal(average[0].weight, model.state_dict()["0.weight"])
