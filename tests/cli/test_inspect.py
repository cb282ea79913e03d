"""`halfstep inspect` and `halfstep doctor`, called as a user does."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from halfstep.cli import step
from halfstep.lab.doctor import doctor as examination
from halfstep.lab.doctor import rates

SMALL = ["--set", "d_in=8", "--set", "d_out=8", "--set", "batch=4"]


@pytest.mark.parametrize(("level", "low"), [("O0", "bf16"), ("O1", "bf16"), ("O2", "fp16")])
def test_inspect_prints_operations_and_casts_and_counts_its_parts(halfstep, tmp_path, monkeypatch, level, low):
    path, seen = tmp_path / "x.json", []
    counted = nullcontext(lambda what, done, total: seen.append((what.rpartition(" ")[2], done, total)))
    monkeypatch.setattr(step, "progress_bar", lambda unit, quiet: counted)
    code, out, err = halfstep("inspect", "regression", *SMALL, "--level", level, "--low", low, "--json", path)
    assert (code, err) == (0, "")
    assert out.startswith(f"regression under {level} in {low}: ")
    assert "addmm" in out
    assert json.loads(path.read_text())["level"] == level
    assert seen[:2] == [("step", 0, 13), ("step", 1, 13)]
    assert seen[-6:] == [("time", done, 13) for done in range(7, 13)]


def test_doctor_prints_what_to_train_in(halfstep, tmp_path, monkeypatch):
    for name in ("RATES_SECONDS", "WIDE_SECONDS", "SETTINGS_SECONDS"):
        monkeypatch.setattr(examination, name, 0.0)
    monkeypatch.setattr(rates, "STEADY", 1e-4)
    works = rates.works
    cut = lambda work: replace(work, operands=tuple(t[..., :32, :32] if t.dim() > 1 else t[:32] for t in work.operands))  # noqa: E731
    monkeypatch.setattr(rates, "works", lambda device: [cut(work) for work in works(device)])
    monkeypatch.setattr(examination, "wide_backward", lambda seconds: ((32, 64),))
    code, out, _ = halfstep("doctor", "--device", "cpu", "--json", tmp_path / "x.json")
    assert code == 0
    assert "matrix product" in out
    found = json.loads((tmp_path / "x.json").read_text())
    assert out.rstrip().rpartition("Train at ")[2].startswith(found["level"])
    assert "measured here: 64 at head width 32" in out
    assert halfstep("doctor", "--device", "tpu")[0] == 2
