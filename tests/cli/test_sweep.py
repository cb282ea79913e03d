"""`halfstep bench` over models and batch sizes, as a user calls it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep import level, load_plan
from halfstep.lab.bench import bench as bench_module
from tests.bench.test_sweep import Played

SMALL = ["--set", "d_in=4", "--set", "d_out=4", "--steps", 2, "--levels", "O0,O2", "--low", "bf16", "--no-peer"]


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(bench_module, "Remote", Played)
    monkeypatch.setattr(Played, "log", [])
    return Played


def test_a_sweep_prints_its_table_and_writes_json_and_page(halfstep, played, tmp_path):
    files = ["--json", tmp_path / "x.json", "--page", tmp_path / "x.html"]
    code, out, err = halfstep("bench", "regression", "--batch-size", "2,4", *SMALL, *files)
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[4:8]] == [
        ["regression", "2", "O0"], ["regression", "2", "O2"], ["regression", "4", "O0"], ["regression", "4", "O2"],
    ]  # fmt: skip
    assert out.splitlines()[-1].startswith("Train at O2 bf16: 2.00 times as fast as O0")
    assert len(json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["points"]) == 2
    assert "Train at O2 bf16" in (tmp_path / "x.html").read_text(encoding="utf-8")
    before = (tmp_path / "x.json").read_bytes()
    played.log.clear()
    code, again, err = halfstep("bench", "regression", "--batch-size", "2,4", *SMALL, *files)
    assert (code, again, played.log) == (0, out, [])
    assert "already has 2 of 2 points; these are not measured again" in " ".join(err.split())
    assert (tmp_path / "x.json").read_bytes() == before
    code, _, err = halfstep("bench", "regression", "--batch-size", "2,8", *SMALL, *files)
    assert (code, "another sweep" in err, "measured again" in err) == (2, True, False)


def test_the_cheapest_plan_with_a_close_gradient_is_named_and_written(halfstep, played, tmp_path):
    plan, kept = tmp_path / "best.toml", tmp_path / "x.json"
    command = ["bench", "regression", "--batch-size", "2", *SMALL, "--save-plan", plan, "--json", kept]
    _, out, _ = halfstep(*command)
    assert "under 25% of the noise of batches: O2 bf16, 20.0%" in " ".join(out.split())
    assert load_plan(plan) == level("O2", "bf16")
    code, out, err = halfstep(*command, "--gradient-error", "0.1")
    assert (code, "gradient error: 0.25 in the file, 0.1 now" in " ".join(err.split())) == (2, True)
    code, out, _ = halfstep(*command[:-2], "--gradient-error", "0.1")
    assert "under 10% of the noise of batches: O0, 0.0%" in " ".join(out.split())
    assert load_plan(plan).name == "O0"
    code, out, err = halfstep(*command[:-2], "--gradient-error", "0.1", "--levels", "O2")
    assert (code, "no plan was written" in err, load_plan(plan).name) == (2, True, "O0")
    assert "No run was measured" in out
    assert "gradient" not in halfstep(*command[:-4])[1]


def test_a_results_file_does_not_say_where_anyone_s_home_is(halfstep, played, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    source = tmp_path / "own.py"
    source.write_text(
        "from halfstep.lab.workloads.load import Regression\n\n\n"
        "def mine(data=None, batch='2'):\n    return Regression(batch=int(batch))\n"
    )
    (tmp_path / "a").mkdir()
    command = ["bench", f"{source}:mine", "--batch-size", "2", *SMALL[4:], "--json", tmp_path / "x.json"]
    assert halfstep(*command, "--data", tmp_path / "a")[0] == 0
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "--data ~/a" in text
    assert f"--data {tmp_path}" not in text
    assert '"data": "a (' in text
    (tmp_path / "b").mkdir()
    code, _, err = halfstep(*command, "--data", tmp_path / "b")
    assert (code, "another sweep (data: a (" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["regression", "--batch-size", "0"], "'0' holds '0', which is not a size"),
        (["regression", "--batch-size", ","], "',' holds ',', which is not a size"),
        (["regression", "--batch-size", "4,x"], "holds 'x', which is not a size"),
        (["regression", "--model", "resnet18"], "both choose what is trained"),
        (["--model", "resnet19"], "unknown workload 'resnet19'"),
        (["regresion", "--batch-size", "4"], "unknown workload 'regresion'; did you mean 'regression'? choose one of"),
        (["--model", "resnet18"], "cifar_resnet: no data given"),
        (["regression", "--batch-size", "4", "--seeds", "2"], "a sweep runs each row with one seed"),
        (["regression", "--compile", "perhaps"], "--compile 'perhaps' is unknown; choose one of off, on, both"),
        (["regression", "--batch-size", "4", "--low", "e4m3"], "e4m3"),
        (["regression", "--batch-size", "4", "--json", "./x", "--page", "x"], "--page and --json are both x; pass two"),
        (["regression", "--largest-batch", "1GiB", "--json", "x", "--page", "x"], "--page and --json are both x"),
        (["regression", "--batch-size", "4", "--page", "nowhere/x.html"], "--page nowhere/x.html: the folder"),
        (["regression", "--save-plan", "nowhere/x.toml"], "--save-plan nowhere/x.toml: the folder"),
        (["regression", "--save-plan", "x.yaml"], ".toml or .json"),
        (["regression", "--largest-batch", "1GiB", "--save-plan", "x.toml"], "--largest-batch measures no gradients"),
    ],
)
def test_bad_input_is_one_message(halfstep, played, arguments, said):
    code, out, err = halfstep("bench", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("halfstep: ")
    assert said in err
    assert played.log == []


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_its_finished_rows_stay_byte_for_byte(tmp_path):
    command = [sys.executable, "-m", "halfstep", "bench", "regression", "--batch-size", "2,4,8", *map(str, SMALL)]
    path = tmp_path / "x.json"
    first = subprocess.Popen([*command, "--json", str(path)])
    while not path.exists():
        time.sleep(0.2)
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = path.read_text(encoding="utf-8")
    count = len(json.loads(before)["points"])
    assert 1 <= count < 3
    subprocess.run([*command, "--json", str(path)], check=True)
    after = path.read_text(encoding="utf-8")
    assert len(json.loads(after)["points"]) == 3
    cut = before.rindex("\n    }\n")
    assert after[:cut] == before[:cut]
