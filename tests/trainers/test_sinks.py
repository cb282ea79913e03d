"""Weights & Biases and MLflow, offline, hold what the records said, under TensorBoard's names."""

import json
import struct
import time
from threading import Event
from unittest.mock import Mock

import pytest

wandb = pytest.importorskip("wandb", reason="wandb is not installed; run ./dev adapters")
mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed; run ./dev adapters")

from wandb.proto import wandb_internal_pb2  # noqa: E402

from halfstep.errors import LogError  # noqa: E402
from halfstep.explain.report.mlflow import MLflow  # noqa: E402
from halfstep.explain.report.wandb import WandB  # noqa: E402
from halfstep.records import Finding  # noqa: E402
from tests.report.logs import START, seen, step  # noqa: E402
from tests.scale.sync import NoSync  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def written(sink):
    with NoSync():
        sink(step(1, skipped=True, scale=8, norm=float("inf"), loss=2))
        sink(step(2, scale=4, loss=1))
    sink.record(START)
    sink.record(seen(2, "head", {-26: 3, -20: 1, 16: 4}, scale=4.0))
    sink.record(Finding("warning", "some-code", "head", "what is wrong", "do this"))
    sink.close()


def history_of(held):
    """What wandb writes offline is a log of LevelDB's: blocks of 32 KiB, records with a checksum, length and type."""
    at, found, rows = 7, b"", []
    while at + 7 <= len(held):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        length, kind = struct.unpack("<HB", held[at + 4 : at + 7])
        if at + 7 + length > len(held):  # not yet written
            break
        found += held[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(found)
            found = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def test_wandb_draws_them_over_the_step(tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off", silent=True))
    written(WandB(run))
    assert "what is wrong" in run.summary["halfstep/finding of step 2"]
    run.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while len(rows := history_of(file.read_bytes())) < 3 and time.monotonic() < end:
        time.sleep(0.1)  # wandb's own process writes the file, which may lag behind on a busy machine
    first, second, third = rows
    assert (first["halfstep/step"], first["halfstep/loss"], first["halfstep/scale"]) == (1, 2, 8)
    assert (first["halfstep/skipped"], second["halfstep/skipped"]) == (1, 0)
    assert (second["halfstep/step"], second["halfstep/loss"]) == (2, 1)
    assert (third["lost/weight_grad/head.weight"], third["saturated/weight_grad/head.weight"]) == (0.375, 0.5)


def test_mlflow_has_them_as_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(LogError, match="no MLflow run is active"):
        MLflow()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        written(MLflow())
    client = mlflow.MlflowClient()

    def history(name):
        return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]

    assert sorted(history("halfstep/loss")) == [(1, 2.0), (2, 1.0)]
    assert sorted(history("halfstep/skipped")) == [(1, 1.0), (2, 0.0)]
    assert history("lost/weight_grad/head.weight") == [(2, 0.375)]
    (text,) = client.list_artifacts(run.info.run_id, "halfstep")
    assert text.path == "halfstep/finding-2.txt"


def test_mlflow_tells_what_its_thread_could_not_write(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        monkeypatch.setattr(mlflow, "log_metrics", Mock(side_effect=OSError(28, "No space left on device")))
        written(MLflow())
    assert caplog.text.count("the MLflow run can no longer be written (No space left on device)") == 1


def test_while_mlflows_server_hangs_only_so_many_writes_wait_and_the_rest_is_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    answers, came = Event(), []
    monkeypatch.setattr(mlflow, "log_metrics", lambda numbers, step, run_id: came.append(step) if answers.wait() else 0)
    monkeypatch.setattr("halfstep.explain.report.mlflow.MOST", 3)
    with mlflow.start_run(), MLflow() as sink:
        for number in range(1, 6):
            sink(step(number))
        answers.set()
    assert came == [1, 2, 3]
    assert caplog.messages == [
        "3 writes wait for the server of the MLflow run; more are left out until it answers",
        "the MLflow run lacks 2 writes, for which its server was too slow",
    ]


class Full(WandB):
    def write_numbers(self, numbers, step, time):
        raise wandb.Error("gone")


def test_a_service_that_is_gone_does_not_end_the_run(tmp_path, caplog):
    run = wandb.init(mode="disabled", dir=tmp_path)
    written(Full(run))
    assert caplog.text.count("the wandb run can no longer be written (gone); the run goes on without it") == 1
