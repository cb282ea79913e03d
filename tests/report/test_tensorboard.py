"""The files of TensorBoard hold what the records said."""

import errno
import logging
import os
import sys

import pytest

from halfstep.errors import LogError
from halfstep.records import Finding
from tests.report.logs import START, seen, step
from tests.scale.sync import NoSync

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from halfstep.explain.report.tensorboard import TensorBoard


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    found.Reload()
    return found


def scalars(found, tag):
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_steps_are_scalars(tmp_path):
    with TensorBoard(tmp_path) as board, NoSync():
        board(step(1, skipped=True, scale=8, norm=float("inf"), loss=2, bad=True))
        board(step(2, scale=4, loss=1))
    found = read(tmp_path)
    assert scalars(found, "halfstep/loss") == [(1, 2.0), (2, 1.0)]
    assert scalars(found, "halfstep/scale") == [(1, 8.0), (2, 4.0)]
    assert scalars(found, "halfstep/skipped") == [(1, 1.0), (2, 0.0)]
    assert scalars(found, "halfstep/bad_loss") == [(1, 1.0)]
    assert scalars(found, "halfstep/grad_norm") == [(1, float("inf"))]


def test_observations_are_shares_and_histograms_of_true_magnitudes(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.record(START)
        board.record(seen(5, "head", {-26: 3, -20: 1, 16: 4}, scale=4.0))
        board.record(seen(5, "", {}, zeros=3))
    found = read(tmp_path)
    assert scalars(found, "lost/weight_grad/head.weight") == [(5, 0.375)]
    assert scalars(found, "saturated/weight_grad/head.weight") == [(5, 0.5)]
    assert scalars(found, "saturated/weight_grad/model.weight") == [(5, 0.0)]
    assert "lost/weight_grad/model.weight" not in found.Tags()["scalars"]  # of no values there is no share
    (event,) = found.Histograms("log2 of weight_grad/head.weight")
    value = event.histogram_value
    assert (event.step, value.num, value.min, value.max) == (5, 8, -28, 15)
    counts = {limit - 1: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n}
    assert counts == {-28: 3, -22: 1, 14: 4}
    assert value.sum == pytest.approx(3 * -27.5 - 21.5 + 4 * 14.5)


def test_updates_are_lost_below_half_a_unit_in_the_last_place(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.record(seen(5, "head", {-2: 3, -1: 1}, kind="update"))
    found = read(tmp_path)
    assert scalars(found, "lost/update/head.weight") == [(5, 0.75)]
    assert "saturated/update/head.weight" not in found.Tags()["scalars"]


def test_shares_are_those_of_the_statistics_where_all_values_lie_on_the_limit(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.record(seen(5, "head", {-25: 3}))
        board.record(seen(5, "head", {-1: 3}, kind="update"))
    found = read(tmp_path)
    assert scalars(found, "lost/weight_grad/head.weight") == [(5, 1.0)]
    assert scalars(found, "lost/update/head.weight") == [(5, 0.0)]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match=r"the folder .*file cannot be written: File exists; name another"):
        TensorBoard(tmp_path / "file")


def test_a_full_disk_ends_the_writing_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TensorBoard(tmp_path) as board, caplog.at_level(logging.WARNING, "halfstep"):
        monkeypatch.setattr(board._writer, "add_scalar", full)
        board(step(1))
        board(step(2))
        board.record(seen(2, "head", {0: 1}))
    (message,) = caplog.messages
    assert message == f"{tmp_path} can no longer be written (No space left on device); the run goes on without it"


def test_the_plan_names_the_format(tmp_path):
    with TensorBoard(tmp_path) as board:
        plan = {**START.plan, "low": "bf16"}
        board.record(type(START)(plan, "cpu", emulated=False))
        board.record(seen(1, "head", {-26: 3}))
    assert scalars(read(tmp_path), "lost/weight_grad/head.weight") == [(1, 0.0)]


def test_findings_are_texts(tmp_path):
    with TensorBoard(tmp_path) as board:
        board(step(7))
        board.record(Finding("warning", "eps", "norm", "1e-8", "use 1e-6"))
    found = read(tmp_path)
    (event,) = found.Tensors("finding/text_summary")
    assert event.step == 7
    assert b"eps at norm" in event.tensor_proto.string_val[0]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "halfstep.explain.report.tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'halfstep\[tensorboard\]'"):
        import halfstep.explain.report.tensorboard  # noqa: F401
