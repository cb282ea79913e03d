"""Runs of torchrun that end before their time: all processes end, and go on bit for bit from the last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import elastic, replicas

DEADLINE = 240  # seconds, with starts on a busy machine
ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@contextmanager
def torchrun(folder, fault, *options):
    """Gives a run of the script, which is ended with the test."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torch 2.13 may connect restarted processes to the dead ones
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    with (folder / "said.txt").open("w") as said:
        ran = subprocess.Popen(
            [sys.executable, *command, elastic.__file__, str(folder), fault],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            yield ran
        finally:
            if ran.poll() is None:
                os.killpg(ran.pid, signal.SIGKILL)


def results(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each process has in the end where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "saved").mkdir()
    found = replicas.run(folder, 2, {"run": (elastic.trained, (str(folder / "saved"),))})
    return [end for _, end in (each["run"] for each in found)]


def test_a_run_whose_process_was_killed_restarts_and_goes_on_bit_for_bit(undisturbed, tmp_path):
    with torchrun(tmp_path, "killed", "--max-restarts", "1") as run:
        assert run.wait(DEADLINE) == 0, (tmp_path / "said.txt").read_text()
    found = results(tmp_path)
    assert [begun for begun, _ in found] == [elastic.AT] * 2
    assert [end for _, end in found] == undisturbed


@pytest.mark.parametrize("middle", ["step", "save"])
def test_a_run_ended_by_sigterm_leaves_no_process_and_no_torn_checkpoint(middle, undisturbed, tmp_path):
    with torchrun(tmp_path, middle) as run:
        begun = time.monotonic()
        while not (tmp_path / "waits").exists():
            assert run.poll() is None, (tmp_path / "said.txt").read_text()
            assert time.monotonic() - begun < DEADLINE
            time.sleep(0.1)
        time.sleep(1)  # the other process is waiting for it by now
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) != 0
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}.pid").read_text()), 0)
    assert elastic.last_of(tmp_path) == elastic.AT
    assert (tmp_path / str(elastic.AT + 1)).exists() == (middle == "save")
    with torchrun(tmp_path, "none") as run:
        assert run.wait(DEADLINE) == 0, (tmp_path / "said.txt").read_text()
    assert results(tmp_path) == [[elastic.AT, end] for end in undisturbed]
