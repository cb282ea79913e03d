"""What the doctor measures and recommends: each figure from times that are given, each setting from one that is set."""

import dataclasses
import errno
import json

import pytest
import torch

from halfstep import machine, saved
from halfstep.errors import HalfstepError
from halfstep.explain.report.lines import to_json
from halfstep.explain.report.tables import doctor_report
from halfstep.lab.doctor import doctor, rates
from halfstep.lab.doctor.rates import ATTENTION, CONVOLUTION, EMULATED, NATIVE, PRODUCT
from halfstep.measurements import Examination, Rate, Setting

CPU = torch.device("cpu")


def rated(**gains):
    """Rates with these speeds against fp32: `product_bf16=2.0`, `attention_fp16_emulated=0.5`."""
    names = {"product": PRODUCT, "convolution": CONVOLUTION, "attention": ATTENTION}
    found = {}
    for key, gain in gains.items():
        work, low, *how = key.split("_")
        key = (names[work], low, EMULATED if how else NATIVE)
        found[key] = Rate(key[0], low, key[2], None, None, "GFLOP/s", gain)
    return found


@pytest.fixture
def quick(monkeypatch):
    """Has every measurement take one small turn."""
    product = rates.Work(PRODUCT, "32 x 32 x 32", (torch.ones(32, 32), torch.ones(32, 32)), torch.mm, 2.0 * 32**3)
    copy = rates.Work(rates.COPY, "32 numbers", (torch.ones(32), torch.ones(32)), torch.Tensor.copy_, numbers=32)
    monkeypatch.setattr(rates, "works", lambda device: [product, copy])
    monkeypatch.setattr(rates, "STEADY", 1e-4)
    monkeypatch.setattr(doctor, "_LENGTHS", (16,))
    for name in ("RATES_SECONDS", "WIDE_SECONDS", "SETTINGS_SECONDS"):
        monkeypatch.setattr(doctor, name, 0.01)


@pytest.fixture
def config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    saved._read.cache_clear()
    yield tmp_path / "halfstep" / "processor.json"
    saved._read.cache_clear()


# ---- what is recommended


@pytest.mark.parametrize(
    ("gains", "level", "low"),
    [
        (dict(product_bf16=1.9, convolution_bf16=1.5, product_fp16=0.01, convolution_fp16=0.02), "O1", "bf16"),
        (dict(product_bf16=0.4, convolution_bf16=1.4, product_fp16=0.01, convolution_fp16=0.02), "O0", "bf16"),
        (dict(product_bf16=1.0, convolution_bf16=1.0, product_fp16=7.0, convolution_fp16=4.0), "O1", "fp16"),
        (dict(product_bf16=7.0, convolution_bf16=4.0, product_fp16=7.0, convolution_fp16=4.2), "O1", "bf16"),
        (dict(product_bf16=2.0), "O0", "bf16"),  # no convolution in any low format: nothing is known to be faster
    ],
)
def test_a_format_is_recommended_where_matrices_and_convolutions_gain(gains, level, low):
    assert doctor.recommend(rated(**gains))[:2] == (level, low)


def test_the_reason_has_the_figures_of_both_formats():
    gains = dict(product_bf16=1.93, convolution_bf16=1.5, product_fp16=0.0123, convolution_fp16=0.02)
    _, _, reason = doctor.recommend(rated(**gains))
    assert "bf16 runs matrix products at 1.9 and convolutions at 1.5 times fp32's speed" in reason
    assert "fp16 runs matrix products at 0.012 and convolutions at 0.02 times fp32's speed" in reason


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (
            dict(product_bf16=3.0, convolution_bf16=0.6, product_fp16=0.01, convolution_fp16=0.01),
            "bf16 is faster in matrix products only; a model with few other operations may gain at O1",
        ),
        (
            dict(product_bf16=1.07, convolution_bf16=1.07, product_fp16=0.01, convolution_fp16=0.01),
            "no low format is faster than fp32 here by 10% or more",
        ),
        (dict(product_bf16=0.9), "bf16 runs matrix products at 0.9 times fp32's speed and has no kernel for convolut"),
        (dict(product_bf16=0.9), "fp16 has no kernel for matrix products and convolutions"),
    ],
)
def test_why_fp32_is_recommended_contradicts_no_figure(gains, said):
    level, _, reason = doctor.recommend(rated(**gains))
    assert level == "O0"
    assert said in reason


def test_a_gpu_is_named_with_its_driver(monkeypatch):
    monkeypatch.setattr(doctor, "get_nvidia_driver_version", lambda run: "580.65")
    tools = doctor.read_tools(torch.device("cuda"))
    assert tools["CUDA driver"] == f"580.65; torch is built with CUDA {torch.version.cuda}"
    assert "CUDA driver" not in doctor.read_tools(CPU)
    here = dataclasses.replace(machine.read_machine(CPU), device="NVIDIA H100", fast=("fp32", "bf16", "fp16"))
    found = Examination(here, "cuda sm90", "x86", "", (), (), (), (), tools, "O1", "bf16", "fast", 1.0, "today")
    lines = [str(part) for part in doctor_report(found).renderables]
    assert "NVIDIA H100 (cuda sm90)" in lines[0]
    assert "known to be fast on this device: fp32, bf16, fp16" in lines
    assert any(line.startswith("CUDA driver: 580.65") for line in lines)


# ---- what is measured


def test_a_rate_is_the_work_over_the_median_time(monkeypatch):
    times = {"bf16/native": [2e-9, 4e-9, 8e-9]}
    monkeypatch.setattr(rates, "take_turns", lambda calls, **_: {each: [4e-9, 8e-9, 4e-9] for each in calls} | times)
    work = rates.Work("matrix product", "2 x 2 x 2", (torch.ones(2, 2), torch.ones(2, 2)), torch.mm, 16.0)
    found = rates.by_kind(rates._measure_work(work, CPU, 0.0))["matrix product", "bf16", NATIVE]
    # 16 operations in 4 ns, and the median of 2, 2 and 0.5
    assert (found.rate, found.unit, found.vs_fp32) == (pytest.approx(4.0), "GFLOP/s", 2.0)
    copy = rates.Work("copy", "8 numbers", (torch.ones(8),), torch.clone, numbers=8)
    found = rates.by_kind(rates._measure_work(copy, CPU, 0.0) + rates._measure_casts(torch.ones(8), CPU, 0.0))
    # 8 numbers, read and written: 8 bytes each way, and 2 and 4
    assert found["copy", "fp64", NATIVE].rate == pytest.approx(32.0)
    assert found["cast to fp32", "fp16", NATIVE].rate == pytest.approx(12.0)


def test_each_work_is_measured_in_every_format_and_emulated_where_a_product_is(quick):
    found = rates.by_kind(rates.measure(CPU, seconds=0.01))
    for low in ("fp32", "fp64", "bf16", "fp16"):
        assert found[PRODUCT, low, NATIVE].rate > 0
        assert found[rates.COPY, low, NATIVE].rate > 0
    for low in ("bf16", "fp16"):
        assert found[PRODUCT, low, EMULATED].vs_fp32 > 0
        assert (rates.COPY, low, EMULATED) not in found
    assert {(work, low) for work, low, _ in found if "cast" in work} == {
        (work, low) for work in (rates.CAST_DOWN, rates.CAST_UP) for low in ("bf16", "fp16")
    }


def test_a_format_without_a_kernel_is_a_row_that_says_so():
    def refuse(operand):
        if operand.dtype is not torch.float32:
            raise RuntimeError("no kernel\nsecond line")

    found = rates._measure_work(rates.Work("x", "1", (torch.ones(1),), refuse, 1.0), CPU, 0.0)
    assert {(rate.format, rate.error) for rate in found if rate.how == NATIVE} == {
        ("fp32", None), ("fp64", "no kernel"), ("bf16", "no kernel"), ("fp16", "no kernel")
    }  # fmt: skip


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("native", "emulated", "gain"),
    [
        ((2.4, 1.2), (0.8, 0.8), 2.0),  # three times and one and a half times as fast
        ((0.02, 0.02), (0.8, 0.8), 0.025),
        ((0.8, 0.02), (0.4, 0.8), 2 / (1 / 2 + 40)),  # one kind of work that is slow outweighs the other
        ((0.8, 0.0), (0.4, 0.8), 0.0),  # no kernel
    ],
)
def test_the_gain_of_native_products_is_against_emulated_ones(low, native, emulated, gain):
    rows = {f"{work}_{low}": speed for work, speed in zip(("product", "convolution"), native, strict=True)}
    rows |= {f"{work}_{low}_emulated": speed for work, speed in zip(("product", "convolution"), emulated, strict=True)}
    assert doctor.gain(rated(**rows), low) == pytest.approx(gain)


@pytest.mark.parametrize(
    ("gains", "limits"),
    [
        ({}, ()),
        ({(32, 64): 2, (32, 128): 2, (64, 64): 2}, ((32, 128), (64, 64))),
        ({(32, 64): 2, (32, 256): 2, (128, 64): 1.2}, ((32, 64), (128, 64))),  # what comes after a loss does not count
    ],
)
def test_attention_goes_wide_up_to_the_first_length_that_loses(gains, limits, monkeypatch):
    monkeypatch.setattr(doctor, "_gain_of_wide", lambda width, length, _: gains.get((width, length), 0.9))
    assert doctor.wide_backward(seconds=0.0) == limits


def test_the_measured_backward_passes_are_of_the_same_gradients():
    operands = [torch.randn(1, 2, 16, 32).bfloat16() for _ in range(3)]
    grad = torch.randn(1, 2, 16, 32).bfloat16()
    low = doctor._backward(operands, grad)()
    wide = doctor._backward([each.float() for each in operands], grad.float())()
    for a, b in zip(low, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)


# ---- settings


def test_flushed_subnormals_cost_accuracy():
    torch.set_flush_denormal(True)
    try:
        found = doctor._subnormals(0.0)
    finally:
        torch.set_flush_denormal(False)
    assert found.value == "flushed to 0"
    assert found.costs.startswith("accuracy")
    assert doctor._subnormals(0.0).value == "kept"


def test_fewer_threads_than_cores_are_timed_and_put_back(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(doctor, "_cores", lambda: before + 1)
    monkeypatch.setattr(doctor, "speedup", lambda *times: 1.8)
    found = doctor._threads(0.0)
    assert torch.get_num_threads() == before
    assert found.costs == f"speed: a matrix product takes 1.8 times as long as on {before + 1} threads"
    assert f"set_num_threads({before + 1})" in found.advice
    monkeypatch.setattr(doctor, "speedup", lambda *times: 1.02)
    assert doctor._threads(0.0).costs is None


def test_onednn_and_deterministic_algorithms(quick):
    deterministic, *_, onednn = doctor.read_settings(CPU)
    assert (deterministic.costs, onednn) == (None, Setting("oneDNN", "on"))
    torch.backends.mkldnn.enabled = False
    torch.use_deterministic_algorithms(True)
    try:
        deterministic, *_, onednn = doctor.read_settings(CPU)
    finally:
        torch.backends.mkldnn.enabled = True
        torch.use_deterministic_algorithms(False)
    assert onednn.advice == "torch.backends.mkldnn.enabled = True"
    assert deterministic.costs


# ---- the whole, and what is saved


def test_an_examination_has_all_parts_and_prints(quick):
    said = []
    found = doctor.examine(CPU, told=lambda *now: said.append(now))
    assert isinstance(found, Examination)
    whole = [
        "matrix product",
        "copy",
        "casts",
        "settings",
        "the backward pass of attention",
    ]  # and two more kinds of work
    assert said == [(what, done, 7) for done, what in enumerate(whole)]
    assert {choice.what.split()[0] for choice in found.choices} == {"bf16", "fp16", "attention's"}
    fields = json.loads(to_json(found))
    assert fields["rates"][0]["format"] == "fp32"
    held = {(each.level, each.low): each.bytes for each in found.memory}
    assert len(held) == 8
    assert round(sum(held["O0", "bf16"].values())) == 16
    parts = {use: round(size) for use, size in held["O2", "bf16"].items()}
    assert parts == {"weights": 2, "masters": 2, "gradients": 2, "optimizer": 8}
    assert fields["level"] in ("O0", "O1")
    assert any(f"Train at {found.level}" in str(part) for part in doctor_report(found).renderables)


def test_what_is_saved_goes_before_the_table(quick, config, monkeypatch, caplog):
    monkeypatch.setattr(doctor, "_gain_of_wide", lambda *_: 2.0)
    before = machine.read_processor()
    found = doctor.examine(CPU, keep=True)
    assert found.saved == str(config)
    row = machine.read_processor()
    assert row.wide_backward == ((32, 16), (64, 16), (128, 16)) != before.wide_backward
    assert row.source.startswith("saved on 20")
    assert caplog.text.count(str(config)) == 1  # said once
    assert machine.table_row() == before
    assert all(choice.agrees for choice in found.choices)  # with what they decide by now
    monkeypatch.setattr(doctor, "_gain_of_wide", lambda *_: 0.5)
    again = doctor.examine(CPU)
    attention = again.choices[-1]
    said = (attention.used, attention.measured, attention.agrees)
    assert said == (", ".join(f"16 at head width {width}" for width in (32, 64, 128)), "never", False)
    assert attention.table == doctor._said(before)[-1][1]
    assert [doctor._said(row)[0][1] for row in (machine.AMX_FP16, machine.AVX2)] == ["native", "emulated"]
    lines = [str(part) for part in doctor_report(again).renderables]
    assert any(f"{attention.used} (by the table: {attention.table}); measured here: never" in line for line in lines)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (
            lambda text: text.replace('"bf16": 1.5', '"bf16": true'),
            "cannot be read",
        ),
        (lambda text: text.replace('"schema": 2', '"schema": 1'), "cannot be read"),
        (lambda text: text.replace('"torch": "', '"torch": "9.'), "was measured on"),
    ],
)
def test_a_saved_file_that_does_not_fit_is_left_out_and_said_so(edit, why, config, caplog):
    row = machine.table_row()
    saved.save(saved.Saved(row.name, machine.model_name(), str(torch.__version__), 1.5, 0.5, ((32, 8),), "2026-01-01"))
    config.write_text(edit(config.read_text()))
    saved._read.cache_clear()
    assert machine.read_processor() == row
    assert why in caplog.text


def test_what_cannot_be_saved_ends_the_doctor_before_it_measures(quick, config, monkeypatch):
    measured = []
    with pytest.raises(HalfstepError, match="works only for the CPU, got device cuda; add --device cpu"):
        doctor.examine(torch.device("cuda"), told=measured.append, keep=True)
    config.parent.mkdir(parents=True, exist_ok=True)

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(saved.tempfile, "TemporaryFile", read_only)
        with pytest.raises(HalfstepError, match="cannot be written: Read-only"):
            doctor.examine(torch.device("cpu"), told=measured.append, keep=True)
    config.parent.rmdir()
    config.parent.write_text("no folder")
    with pytest.raises(HalfstepError, match="cannot be written"):
        doctor.examine(torch.device("cpu"), told=measured.append, keep=True)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(saved, "saved_path", homeless)
    with pytest.raises(HalfstepError, match="no home folder to save to; set XDG_CONFIG_HOME"):
        doctor.examine(torch.device("cpu"), told=measured.append, keep=True)
    assert measured == []


def test_a_full_disk_leaves_no_part_of_a_file(config, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved.os, "replace", full)
    with pytest.raises(HalfstepError, match="No space left"):
        saved.save(saved.Saved("x", "y", "z", 1.5, 0.5, (), "2026-01-01"))
    assert list(config.parent.iterdir()) == []
