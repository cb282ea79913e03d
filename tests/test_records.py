"""Shares of lost, subnormal and saturated values, from the histogram alone, against exact rounding."""

from typing import get_type_hints

import pytest
import torch

from halfstep.edits import Edit, Scaling
from halfstep.errors import FormatError
from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, round_nearest
from halfstep.records import Finding, NumericsError, ScaleRange, Verdict, WhatIf
from halfstep.train.probe.rows import measure

FORMATS = [FP16, BF16, E4M3, E5M2]


def shares(t, fmt, scale):
    """Lost, subnormal and saturated by rounding every value."""
    scaled = t.double() * scale
    assert (scaled.float().double() == scaled).all()
    rounded = round_nearest(scaled.float(), fmt)
    nonzero = int((t != 0).sum())
    lost = int(((rounded == 0) & (t != 0)).sum())
    small = int(((rounded != 0) & (scaled.abs() < fmt.smallest_normal)).sum())
    return lost / nonzero, small / nonzero, int((scaled.abs() > fmt.max).sum()) / t.numel()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [2.0**-6, 1.0, 2.0**10])
def test_shares_at_power_of_two_scales_equal_those_of_exact_rounding(fmt, scale):
    t = torch.randn(40_000) * torch.exp2(torch.randint(-60, 30, (40_000,)).float())
    t[:1000] = 0
    stats = measure(t)
    lost, small, beyond = shares(t, fmt, scale)
    assert stats.lost(fmt, scale) == pytest.approx(lost, abs=1e-12)
    assert stats.subnormal(fmt, scale) == pytest.approx(small, abs=1e-12)
    # The entry that holds `max` is cut: 0.19 of an octave of 1/90 of the values for e4m3, less for the others.
    assert stats.saturated(fmt, scale) == pytest.approx(beyond, abs=2e-3)


def test_both_sides_of_the_limits_of_fp16():
    half = 2.0**-25
    below, above = half * (1 - 2.0**-20), half * (1 + 2.0**-20)
    assert measure(torch.tensor([below, -below, above, 0.0])).lost(FP16) == pytest.approx(2 / 3)
    assert measure(torch.tensor([2.0**-14 * (1 - 2.0**-20), 2.0**-14])).subnormal(FP16) == 0.5
    assert measure(torch.tensor([65504.0, -65504.0])).saturated(FP16) == 0.0
    assert measure(torch.tensor([65504.0, 65505.0, 1.0, 0.0])).saturated(FP16) == 0.25


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2])
def test_half_the_smallest_subnormal_itself_rounds_to_zero(fmt):
    half = fmt.smallest_subnormal / 2
    values = torch.full((9,), half)
    assert not values.to(fmt.dtype).float().any()  # to even
    assert measure(values).lost(fmt) == 1.0
    assert measure(values).subnormal(fmt) == 0.0
    if fmt is not BF16:  # whose subnormals share one entry with all of fp32's
        assert measure(values).lost(fmt, 2.0) == 0.0
        assert measure(values).subnormal(fmt, 2.0) == 1.0


def test_half_the_smallest_subnormal_counts_as_kept_among_larger_ones():
    assert measure(torch.tensor([2.0**-25, 1.0])).lost(FP16) == 0.0


def test_an_entry_that_a_limit_cuts_is_split_evenly_in_the_logarithm():
    one_entry = measure(torch.tensor([40_000.0] * 99 + [65_000.0]))  # all from 2^15 to 2^16
    assert one_entry.saturated(FP16, 65504 / 2**15.5) == pytest.approx(0.5)
    assert one_entry.saturated(FP16, 1.0077) == 0.0  # `amax` is not beyond: 65,500.5
    assert one_entry.saturated(FP16) == 0.0
    subnormals = measure(torch.tensor([2.0**-140] * 22 + [2.0**-127]))  # entry 0 holds the 23 octaves from 2^-149 on
    assert subnormals.lost(BF16) == pytest.approx(15 / 23)  # bf16 loses what is below 2^-134


def test_infinities_are_saturated_in_every_format_and_nan_is_not():
    stats = measure(torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]))
    assert stats.saturated(FP32) == 0.5
    assert stats.lost(FP16) == 0.0
    assert (stats.finite, stats.nonzero) == (1, 1)


def test_mean_and_rms_are_those_of_the_finite_elements():
    stats = measure(torch.tensor([3.0, -4.0, 0.0, torch.inf, torch.nan]))
    assert stats.mean == pytest.approx(-1 / 3)
    assert stats.rms == pytest.approx((25 / 3) ** 0.5)


def test_statistics_of_nothing_are_zeros():
    stats = measure(torch.empty(0))
    assert (stats.mean, stats.rms, stats.lost(FP16), stats.subnormal(FP16), stats.saturated(FP16)) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(FormatError, match="positive finite"):
        measure(torch.ones(1)).lost(FP16, scale)


@pytest.mark.parametrize("cut", [0, 1, 500, 999])
def test_the_sum_of_two_is_the_count_of_both(cut):
    t = torch.randint(-100, 100, (1000,)) / 8
    assert measure(t[:cut]) + measure(t[cut:]) == measure(t)


def test_edits_and_verdicts_are_typed_where_a_user_meets_them():
    assert get_type_hints(Verdict)["cure"] == get_type_hints(Finding)["cure"] == tuple[Edit, ...]
    assert get_type_hints(WhatIf.edits)["return"] == tuple[Edit, ...]
    assert get_type_hints(ScaleRange)["edit"] is Scaling
    assert get_type_hints(NumericsError.__init__)["verdict"] is Verdict


def test_a_prediction_prints_scales_and_findings():
    scale = ScaleRange("fp16", 2.0, 1024.0, 16.0, (512.0, 1024.0), 64.0, "head", Scaling("static", init=16))
    finding = Finding("warning", "stay full", "head", "activation: 5.6% saturated", "keep head full", ())
    prediction = WhatIf("O2", 3, ("fp16",), (), (scale,), {"fp16": (finding,)})
    assert str(prediction).splitlines() == [
        "predicted from 3 steps in fp32, for what plan O2 stores low",
        "fp16: safe loss scales 2 to 1024",
        "  warning: stay full at head",
        "    seen: activation: 5.6% saturated",
        "    do: keep head full",
    ]
