"""Stop, save, load in a new process, go on: bit-identical to never having stopped."""

import copy
import io
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep
from halfstep.machine import AVX2, AVX512_BF16
from tests.contracts.cases import differing, every_plan, make, mixed_plans, snapshot, start, train

ROOT = Path(__file__).parents[2]
ORDERS = list(itertools.permutations(["model", "optimizer", "session"]))


def saved(model, optimizer, session):
    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}, buffer
    )
    buffer.seek(0)
    return buffer


def resumed(file, name, low, order, optimizer=torch.optim.AdamW):
    model, opt = make(seed=99, optimizer=optimizer)
    session = halfstep.initialize(model, opt, name, low=low)
    states = torch.load(file, weights_only=True)
    targets = {"model": model, "optimizer": opt, "session": session}
    for part in order:
        targets[part].load_state_dict(states[part])
    return model, opt, session


@mixed_plans
@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
@pytest.mark.parametrize("poison", [(), (2,)], ids=["", "right after a skip"])
@pytest.mark.slow_but("[-session-optimizer-model", "right after a skip-session-optimizer-model")
def test_every_load_order_goes_on_bit_identically(name, low, order, poison):
    model, opt, session = start(name, low)
    train(session, model, opt, range(3), poison=poison)
    file = saved(model, opt, session)
    other = resumed(file, name, low, order)
    if name != "O3":  # without a master the checkpoint's fp32 value is the stored weight itself, so O3 is exact too
        assert differing(snapshot(model, opt, session), snapshot(*other)) == []
    train(session, model, opt, range(3, 6))
    train(other[2], *other[:2], range(3, 6))
    assert differing(snapshot(model, opt, session), snapshot(*other)) == []
    other[2].close()


@pytest.mark.slow_but("O0", "O1-bf16")
@every_plan
def test_states_loaded_before_initialize_go_on_bit_identically(name, low):
    model, opt, session = start(name, low)
    train(session, model, opt, range(3))
    states = torch.load(saved(model, opt, session), weights_only=True)
    fresh, fresh_opt = make(seed=99)
    fresh.load_state_dict(states["model"])
    fresh_opt.load_state_dict(states["optimizer"])
    again = halfstep.initialize(fresh, fresh_opt, name, low=low)
    again.load_state_dict(states["session"])
    train(session, model, opt, range(3, 6))
    train(again, fresh, fresh_opt, range(3, 6))
    assert differing(snapshot(model, opt, session), snapshot(fresh, fresh_opt, again)) == []
    again.close()


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_foreign_optimizers_resume_exactly(optimizer):
    model, opt, session = start("O2", "bf16", optimizer)
    train(session, model, opt, range(3))
    other = resumed(saved(model, opt, session), "O2", "bf16", ["optimizer", "model", "session"], optimizer)
    train(session, model, opt, range(3, 6))
    train(other[2], *other[:2], range(3, 6))
    assert differing(snapshot(model, opt, session), snapshot(*other)) == []
    other[2].close()


RESUME = """
import sys, torch
from tests.contracts.cases import snapshot, train
from tests.contracts.test_resume import resumed
name, low, source, target, threads = sys.argv[1:]
torch.set_num_threads(int(threads))  # sums depend on it
model, opt, session = resumed(source, name, low, ["session", "model", "optimizer"])
train(session, model, opt, range(3, 6))
torch.save(snapshot(model, opt, session), target)
"""


@pytest.mark.slow  # test_kill.py goes on in another process too
@pytest.mark.parametrize(("name", "low"), [("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")])
def test_a_new_process_goes_on_bit_identically(name, low, tmp_path):
    model, opt, session = start(name, low)
    train(session, model, opt, range(3), poison=[2])
    source, target = tmp_path / "checkpoint.pt", tmp_path / "end.pt"
    source.write_bytes(saved(model, opt, session).read())
    threads = str(torch.get_num_threads())
    subprocess.run([sys.executable, "-c", RESUME, name, low, source, target, threads], check=True, cwd=ROOT)
    train(session, model, opt, range(3, 6))
    assert differing(snapshot(model, opt, session), torch.load(target)) == []


@mixed_plans
def test_checkpoints_are_fp32_and_load_without_halfstep(name, low):
    model, opt, session = start(name, low)
    train(session, model, opt, range(3))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    floating = {k: v.dtype for k, v in state.items() if v.is_floating_point()}
    assert set(floating.values()) == {torch.float32}
    plain, _ = make(seed=5)
    assert plain.load_state_dict(state) == torch.nn.modules.module._IncompatibleKeys([], [])
    session.close()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_a_checkpoint_of_another_plan_is_refused_and_changes_nothing():
    _, _, session = start("O1", "fp16", loss_scale=64.0)
    state = session.state_dict()
    session.close()
    model, opt, other = start("O2", "bf16")
    train(other, model, opt, range(2))
    was = other.state_dict()
    with pytest.raises(halfstep.StateError, match=r"another plan;.*low is"):
        other.load_state_dict(state)
    assert other.state_dict() == was
    other.close()


@pytest.mark.parametrize(("before", "after"), [({}, {"moments": "8bit"}), ({"moments": "bf16"}, {})])
def test_a_state_loads_however_moments_are_kept(before, after):
    with start("O2", "bf16", **before)[2] as session:
        state = session.state_dict()
    del state["plan"]["rounding"]  # as before there was one
    with start("O2", "bf16", full_moments=["*"], **after)[2] as session:
        session.load_state_dict(state)


@pytest.mark.parametrize("missing", ["scales", "steps", "plan", "skipped", "schema"])
def test_a_truncated_state_is_refused_and_changes_nothing(missing):
    model, opt, session = start("O1", "fp16")
    train(session, model, opt, range(2))
    was = session.state_dict()
    state = {k: v for k, v in was.items() if k != missing}
    with pytest.raises(halfstep.StateError, match=missing):
        session.load_state_dict(state)
    state = {**was, "scales": {"0": {}}}
    with pytest.raises(halfstep.StateError):
        session.load_state_dict(state)
    assert session.state_dict() == was


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(()), torch.ones(2, device="meta"), object()])
@pytest.mark.parametrize("path", [("low",), ("rules",), ("scale", "init")])
@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_a_plan_that_holds_no_plain_values_is_refused_and_changes_nothing(name, path, value):
    _, _, session = start(name, "bf16")
    was = session.state_dict()
    state = copy.deepcopy(was)
    held = state["plan"]
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = [value] if path == ("rules",) else value
    with pytest.raises(halfstep.StateError, match=rf"plan has '{path[0]}'.*expected only numbers"):
        session.load_state_dict(state)
    assert session.state_dict() == was
    session.close()


def test_loading_leaves_its_input_as_it_was():
    model, opt, session = start("O2", "bf16")
    train(session, model, opt, range(2))
    states = [part.state_dict() for part in (model, opt, session)]
    before = [repr(state) for state in states]
    for part, state in zip((model, opt, session), states, strict=True):
        part.load_state_dict(state)
    assert [repr(state) for state in states] == before


def test_assign_is_refused_since_it_would_part_model_and_optimizer():
    model, _, _session = start("O2", "bf16")
    with pytest.raises(halfstep.StateError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)


BAD_STATES = {
    "steps a word": {"steps": "x"},
    "steps negative": {"steps": -1},
    "steps true": {"steps": True},
    "skipped missing": {"skipped": None},
    "scales a list": {"scales": [1]},
    "scale of a word": {"scales": {"a": {}}},
    "scale of none": {"scales": {"0": None}},
    "scale true": {"scales": {"0": {"kind": "dynamic", "scale": True, "clean_steps": 0, "overflows_left": 1}}},
    "steps beyond int64": {"steps": 2**80},
    "skipped beyond int64": {"skipped": 2**80},
    "other digits": {"scales": {"\u0661": {"kind": "dynamic", "scale": 2.0, "clean_steps": 0, "overflows_left": 1}}},
    "leading zero": {"scales": {"01": {"kind": "dynamic", "scale": 2.0, "clean_steps": 0, "overflows_left": 1}}},
    "a number as id": {"scales": {1.0: {"kind": "dynamic", "scale": 2.0, "clean_steps": 0, "overflows_left": 1}}},
    "true as id": {"scales": {True: {"kind": "dynamic", "scale": 2.0, "clean_steps": 0, "overflows_left": 1}}},
    "scale without a normal fp32": {
        "scales": {"0": {"kind": "dynamic", "scale": 1e-45, "clean_steps": 0, "overflows_left": 1}}
    },
    "scale beyond fp32": {
        "scales": {"0": {"kind": "dynamic", "scale": 2.0**200, "clean_steps": 0, "overflows_left": 1}}
    },
    "scale beyond any float": {
        "scales": {"0": {"kind": "dynamic", "scale": 2**2000, "clean_steps": 0, "overflows_left": 1}}
    },
    "scale nan": {"scales": {"0": {"kind": "dynamic", "scale": float("nan"), "clean_steps": 0, "overflows_left": 1}}},
    "clean steps beyond int64": {
        "scales": {"0": {"kind": "dynamic", "scale": 2.0, "clean_steps": 2**80, "overflows_left": 1}}
    },
    "keys of two kinds": {"scales": {"0": {1: 2, "kind": "dynamic"}}},
    "plan missing": {"plan": None},
    "another schema": {"schema": 3},
    "emulate a word": {"emulate": "yes"},
    "emulate a count": {"emulate": 1},
    "emulate missing": {"emulate": None},
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_with_a_wrong_entry_is_refused_and_changes_nothing(case):
    model, opt, session = start("O1", "fp16")
    train(session, model, opt, range(2))
    was = session.state_dict()
    with pytest.raises(halfstep.StateError):
        session.load_state_dict({**was, **BAD_STATES[case]})
    assert session.state_dict() == was
    train(session, model, opt, [2])


@pytest.mark.parametrize("schema", [0, -1, True, "2", 2**80])
def test_a_schema_that_no_version_writes_is_told_as_broken_not_as_another_version(schema):
    _, _, session = start("O1", "bf16")
    with pytest.raises(halfstep.StateError, match=f"schema is {schema!r}; expected a count from 1 on: pass what sess"):
        session.load_state_dict({**session.state_dict(), "schema": schema})
    session.close()


def test_a_session_state_of_another_level_says_that_it_can_be_left_out():
    _, _, first = start("O1", "bf16")
    state = first.state_dict()
    first.close()
    _, _, second = start("O2", "bf16")
    with pytest.raises(halfstep.StateError, match=r"do not load the session state.*trainers\.md"):
        second.load_state_dict(state)
    second.close()


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16")])
@pytest.mark.parametrize(("there", "here"), [(AVX2, AVX512_BF16), (AVX512_BF16, AVX2)], ids=["emulated", "native"])
def test_on_another_processor_a_resume_emulates_as_before(name, low, there, here, on_processor, caplog):
    on_processor(there)
    model, opt, session = start(name, low)
    train(session, model, opt, range(3))
    on_processor(here)
    other = resumed(saved(model, opt, session), name, low, ["model", "session", "optimizer"])
    assert other[2].state_dict()["emulate"] is session.state_dict()["emulate"] is (there is AVX2)
    said = caplog.text
    kind = "emulated" if there is AVX2 else "native"
    assert (
        f"was saved by training with {kind} bf16 products, so they are here too; pass emulate={there is not AVX2}"
        in said
    )
    assert ("take about 42 times as long" in said) is (here is AVX2)
    train(session, model, opt, range(3, 6))
    train(other[2], *other[:2], range(3, 6))
    assert differing(snapshot(model, opt, session), snapshot(*other)) == []
    other[2].load_state_dict(session.state_dict())
    assert caplog.text == said  # nothing more to say
    other[2].close()
    session.close()
    assert type(other[0]) is type(model)


@pytest.mark.parametrize("emulate", [True, False])
def test_what_was_asked_for_stays_and_one_line_says_that_it_is_another_way(emulate, on_processor, caplog):
    on_processor(AVX512_BF16 if emulate else AVX2)
    _, _, session = start("O2", "bf16")
    state = session.state_dict()
    session.close()
    _, _, other = start("O2", "bf16", emulate=emulate)
    other.load_state_dict(state)
    assert other.state_dict()["emulate"] is emulate is not state["emulate"]
    assert f"emulate={emulate} was passed: they are {'emulated' if emulate else 'native'} from here on" in caplog.text
    assert len(caplog.messages) == 1
    other.close()


@pytest.mark.parametrize("row", [AVX2, AVX512_BF16], ids=lambda row: row.name)
def test_a_state_from_before_emulation_was_kept_loads(row, on_processor, caplog):
    on_processor(row)
    model, opt, session = start("O2", "bf16")
    train(session, model, opt, range(2))
    state = session.state_dict()
    before = {key: value for key, value in state.items() if key != "emulate"}
    session.load_state_dict(before)
    assert session.state_dict() == state
    assert caplog.messages == []
    session.close()


def test_at_o0_nothing_is_emulated_whatever_a_state_says(caplog):
    _, _, session = start("O0", "bf16")
    session.load_state_dict({**session.state_dict(), "emulate": True})
    assert session.state_dict()["emulate"] is False
    assert caplog.messages == []
    session.close()
