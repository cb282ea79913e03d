"""`benchmarks/gpu.sh` on the simulated device at tiny sizes: a part starts, runs and writes its results."""

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
WRITES = {
    "tests": None,
    "gpt2": "gpt2",
    "blocks": "blocks",
}


@pytest.mark.parametrize("part", WRITES)
def test_a_part_runs_and_writes_its_results(part, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "tests/cudasim/everywhere")}
    command = ["bash", "benchmarks/gpu.sh", "--quick", "--part", part, "--results", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    summary = json.loads((tmp_path / f"summary-{part}.json").read_text())
    assert [entry["exit"] for entry in summary["parts"]] == [0], ran.stdout[-3000:]  # its figures mean nothing here
    assert summary["device"] == "Simulated GPU"
    if WRITES[part] is None:
        assert summary["tests"][part]["passed"] > 0
    else:
        found = json.loads((tmp_path / f"{WRITES[part]}.json").read_text())
        assert found.get("rows") or found.get("results") or found.get("runs")
