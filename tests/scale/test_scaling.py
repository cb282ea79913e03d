"""The loss scales: hand-derived sequences, a slow reference in Python numbers, limits, states."""

import math
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.edits import Scaling
from halfstep.errors import SessionError, StateError
from halfstep.train.scale import scaling as scaling_module
from halfstep.train.scale.scaling import DynamicScale, adapt_, make_scale
from tests.scale.sync import NoSync

CPU = torch.device("cpu")


def run(scale, outcomes):
    """Feeds a string of steps, "x" for an overflow and "." for a clean one; returns the scale after each."""
    seen = []
    for outcome in outcomes:
        scale.update(torch.tensor(outcome == "x"))
        seen.append(float(scale.value))
    return seen


def dynamic(**fields):
    return make_scale(Scaling("dynamic", **fields), CPU)


@dataclass
class Reference:
    """The rule in Python numbers, an `if` for each case."""

    scaling: Scaling
    value: float
    clean: int = 0
    overflows: int = 0

    def update(self, found, count=True):
        plan = self.scaling
        if found:
            self.clean = 0
            self.overflows += 1
            if self.overflows >= plan.hysteresis:
                self.value = max(to_fp32(self.value * plan.backoff), plan.min)
        elif count:
            self.clean += 1
            if self.clean == plan.growth_interval:
                self.clean = self.overflows = 0
                self.value = min(to_fp32(self.value * plan.growth), plan.max)


def to_fp32(number):
    return float(torch.tensor(number, dtype=torch.float64).float())


# Fields of a dynamic scale, steps, and the scale after each.
SEQUENCES = {
    "grows after the interval and counts anew": ({"init": 4.0, "growth_interval": 3}, "......", [4, 4, 8, 8, 8, 16]),
    "an overflow halves": ({"init": 4.0, "growth_interval": 3}, "..x..", [4, 4, 2, 2, 2]),
    "an overflow restarts the count": ({"init": 4.0, "growth_interval": 3}, "..x...", [4, 4, 2, 2, 2, 4]),
    "grows every step at interval one": ({"init": 4.0, "growth_interval": 1}, "..x.", [8, 16, 8, 16]),
    "own factors": ({"init": 4.0, "growth_interval": 1, "growth": 3.0, "backoff": 0.25}, ".x", [12, 3]),
    "the floor holds": ({"init": 2.0}, "xxx", [1, 1, 1]),
    "the floor is met": ({"init": 3.0}, "xx", [1.5, 1]),
    "the ceiling holds and the count goes on": (
        {"init": 4.0, "growth_interval": 2, "max": 8.0}, "....x..", [4, 8, 8, 8, 4, 4, 8]
    ),
    "the ceiling is met": ({"init": 4.0, "growth_interval": 1, "max": 7.0}, "..", [7, 7]),
    "the default ceiling is 2**24": ({"init": 2.0**23, "growth_interval": 1}, "..", [2.0**24, 2.0**24]),
    "hysteresis backs off at the second overflow and every one after it": (
        {"init": 16.0, "hysteresis": 2, "growth_interval": 3}, "xxx", [16, 8, 4]
    ),
    "clean steps do not restore the credit": (
        {"init": 16.0, "hysteresis": 2, "growth_interval": 3}, "x.x", [16, 16, 8]
    ),
    "growth restores the credit": (
        {"init": 16.0, "hysteresis": 2, "growth_interval": 2}, "x..xx", [16, 16, 32, 32, 16]
    ),
    "a forgiven overflow still restarts the count": (
        {"init": 16.0, "hysteresis": 3, "growth_interval": 2}, ".x..", [16, 16, 16, 32]
    ),
}  # fmt: skip


class TestDynamic:
    @pytest.mark.parametrize(("fields", "outcomes", "scales"), SEQUENCES.values(), ids=SEQUENCES)
    def test_follows_the_overflows(self, fields, outcomes, scales):
        assert run(dynamic(**fields), outcomes) == scales

    @pytest.mark.parametrize("hysteresis", [1, 2])
    def test_nothing_syncs(self, hysteresis):
        scale = dynamic(hysteresis=hysteresis)
        with NoSync():
            scale.update(torch.tensor(True))
            scale.update(torch.tensor(False), count=False)
            scale.limit(32768.0)


schedules = st.builds(
    Scaling,
    st.just("dynamic"),
    init=st.sampled_from([1.0, 2.0, 1000.0, 65536.0]),
    growth=st.sampled_from([2.0, 1.1, 3.7]),
    backoff=st.sampled_from([0.5, 0.9, 0.3]),
    growth_interval=st.integers(1, 4),
    min=st.sampled_from([1.0, 2.0**-20]),
    max=st.sampled_from([65536.0, 2.0**24]),
    hysteresis=st.integers(1, 3),
)
steps = st.lists(st.tuples(st.sampled_from([True, False, False]), st.sampled_from([True, True, False])), max_size=30)


@settings(max_examples=150)
@given(schedules, steps)
def test_any_sequence_follows_the_reference(scaling, steps):
    scale, reference = DynamicScale(scaling, CPU), Reference(scaling, scaling.init)
    for found, count in steps:
        scale.update(torch.tensor(found), count=count)
        reference.update(found, count)
        assert scale.value.item() == reference.value


@settings(max_examples=100)
@given(schedules, st.lists(st.booleans(), max_size=30))
def test_the_one_kernel_path_equals_the_general_one(scaling, outcomes):
    schedule = replace(scaling, hysteresis=1)
    one, general = ([torch.tensor(scaling.init), torch.tensor(0).int(), torch.tensor(1).int()] for _ in range(2))
    for found in outcomes:
        adapt_(*one, torch.tensor(found), schedule)
        with mock.patch.object(scaling_module, "_ONE_KERNEL", ()):
            adapt_(*general, torch.tensor(found), schedule)
        assert [t.item() for t in one] == [t.item() for t in general]


class TestLimit:
    def test_an_fp16_loss_caps_at_the_power_of_two_below_its_maximum(self):
        scale = dynamic()
        scale.limit(65504.0)
        assert scale.value.item() == 32768

    def test_growth_stays_below_it(self):
        scale = dynamic(init=32768.0, growth_interval=1)
        scale.limit(32768.0)
        assert run(scale, "..") == [32768, 32768]

    def test_a_scale_below_it_stays_and_a_higher_limit_does_not_lift(self):
        scale = dynamic(init=8.0, growth_interval=1)
        scale.limit(16.0)
        scale.limit(64.0)
        assert run(scale, "...") == [16, 16, 16]

    def test_repeating_it_writes_nothing(self):
        scale = dynamic()
        scale.limit(32768.0)
        version = scale.value._version
        scale.limit(32768.0)
        assert scale.value._version == version

    def test_a_floor_above_it_is_refused_and_nothing_changes(self):
        scale = dynamic(init=2.0**17, min=2.0**16)
        with pytest.raises(SessionError, match=r"loss\.float\(\)"):
            scale.limit(65504.0)
        assert scale.value.item() == 2.0**17

    def test_static_above_it_is_refused(self):
        scale = make_scale(Scaling("static", init=65536.0), CPU)
        with pytest.raises(SessionError, match=r"65536.*65504.*loss\.float\(\)"):
            scale.limit(65504.0)

    def test_static_up_to_it_stays(self):
        scale = make_scale(Scaling("static", init=65504.0), CPU)
        scale.limit(65504.0)
        assert scale.value.item() == 65504


class TestConstantScales:
    def test_none_is_inactive_and_one(self):
        scale = make_scale(Scaling("none"), CPU)
        assert run(scale, "x.") == [1, 1]
        assert not scale.active

    def test_static_is_active_and_never_changes(self):
        scale = make_scale(Scaling("static", init=1000.0), CPU)
        assert run(scale, "x" + 3000 * ".")[-1] == 1000
        assert scale.active


class TestState:
    @pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
    def test_round_trip(self, kind):
        scaling = Scaling(kind, init=128.0) if kind != "none" else Scaling(kind)
        old, new = make_scale(scaling, CPU), make_scale(scaling, CPU)
        run(old, "..x.")
        new.load_state_dict(old.state_dict())
        assert new.state_dict() == old.state_dict()

    @settings(max_examples=50)
    @given(schedules, st.text("x.", max_size=12), st.text("x.", max_size=12))
    def test_a_loaded_scale_goes_on_as_the_saved_one(self, scaling, before, after):
        old, new = DynamicScale(scaling, CPU), DynamicScale(scaling, CPU)
        run(old, before)
        new.load_state_dict(old.state_dict())
        assert run(new, after) == run(old, after)

    def test_is_plain_numbers(self):
        scale = dynamic(init=4.0, hysteresis=2, growth_interval=9)
        run(scale, "x..")
        assert scale.state_dict() == {"kind": "dynamic", "scale": 4.0, "clean_steps": 2, "overflows_left": 1}

    def test_loading_writes_in_place_and_leaves_the_state(self):
        scale, state = dynamic(), {"kind": "dynamic", "scale": 4.0, "clean_steps": 2, "overflows_left": 1}
        value, kept = scale.value, dict(state)
        scale.load_state_dict(state)
        assert scale.value is value
        assert value.item() == 4
        assert state == kept

    def test_more_clean_steps_than_the_plan_waits_for_grow_at_the_next(self):
        scale = dynamic(init=4.0, growth_interval=3)
        scale.load_state_dict({"kind": "dynamic", "scale": 4.0, "clean_steps": 10, "overflows_left": 1})
        assert run(scale, ".") == [8]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"kind": "static"}, "'static' loss scale, but this plan has 'dynamic'"),
            ({"extra": 1}, "has the unknown 'extra'; load what"),
            ({"scale": -1.0}, "positive finite"),
            ({"scale": math.inf}, "positive finite"),
            ({"scale": "8"}, "positive finite"),
            ({"clean_steps": -1}, "clean_steps=-1"),
            ({"clean_steps": 1.5}, "clean_steps=1.5"),
            ({"overflows_left": None}, "overflows_left=None"),
        ],
    )
    def test_a_wrong_state_is_refused_and_nothing_changes(self, change, message):
        scale = dynamic()
        before = scale.state_dict()
        with pytest.raises(StateError, match=message):
            scale.load_state_dict({**before, "scale": 2.0, **change})
        assert scale.state_dict() == before

    @pytest.mark.parametrize("missing", ["kind", "scale", "clean_steps", "overflows_left"])
    def test_a_missing_key_is_named(self, missing):
        state = {key: value for key, value in dynamic().state_dict().items() if key != missing}
        with pytest.raises(StateError, match=f"has no '{missing}'; load what"):
            dynamic().load_state_dict(state)

    def test_another_static_scale_is_refused(self):
        scale, state = (make_scale(Scaling("static", init=init), CPU) for init in (128.0, 64.0))
        with pytest.raises(StateError, match=r"64.*128"):
            scale.load_state_dict(state.state_dict())
        with pytest.raises(StateError, match="'dynamic' loss scale, but this plan has 'static'"):
            scale.load_state_dict(dynamic().state_dict())
