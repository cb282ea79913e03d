"""`benchmarks/gpu.sh` on the simulated device at tiny sizes: each part starts, runs and writes its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("tests.cudasim.device" not in sys.modules, reason="needs the simulated device of tests/cudasim"),
]
ROOT = Path(__file__).resolve().parents[2]
# The CPU's kernels warn so (tests/cudasim/build.py).
WARNED = '-W "ignore:An output with one or more elements was resized"'
# What needs a GPU is left out: tests marked `silicon`, as replays of graphs, and the compiled row of `gpt2_compiled`.
# Those of the last list train without Triton, whose interpreter would take minutes for them.
PARTS = (
    ("1", ("tests", "optimizer_step", "blocks")),
    ("1", ("gpt2", "fp8")),
    ("0", ("graph", "gpt2_compiled", "resnet50", "accuracy")),
)


@pytest.mark.parametrize(("interpreted", "parts"), PARTS)
def test_its_parts_run_and_write_their_results(interpreted, parts, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "tests/cudasim/everywhere")}
    environment |= {"TRITON_INTERPRET": interpreted, "PYTEST_ADDOPTS": WARNED}
    asked = [word for part in parts for word in ("--part", part)]
    command = ["bash", "benchmarks/gpu.sh", "--quick", "--results", str(tmp_path), *asked]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (written,) = tmp_path.glob("summary-*.json")
    summary = json.loads(written.read_text())
    ended = {entry["part"]: entry["exit"] for entry in summary["parts"]}
    assert ended == dict.fromkeys(parts, 0), ran.stdout[-3000:]  # its figures mean nothing here
    assert summary["device"] == "Simulated GPU"
    for part in ended:
        if part in ("tests", "graph"):
            assert summary["tests"][part]["passed"] > 0
            continue
        files = [*tmp_path.glob(f"{part}.json"), *tmp_path.glob(f"{part}/*.json")]
        found = [json.loads(file.read_text()) for file in files]
        assert found
        assert all(each.get("rows") or each.get("results") or each.get("runs") for each in found)
