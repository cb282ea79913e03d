"""The benchmark of what trainers cost, at a small size: each row trains, and none of it says how fast."""

import json

import pytest

for package in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed; run ./dev adapters")

from tests.test_benchmarks import FOLDER, load, run  # noqa: E402
from tests.trainers.test_accelerate import fresh_state  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"d": 16, "layers": 1, "heads": 2, "length": 16, "batch": 2}


class Enough(Exception):
    pass


class Turns:
    """The end of a pipe that gives a row its turns."""

    def __init__(self, turns):
        self.left, self.sent = turns, []

    def send(self, seconds):
        self.sent.append(seconds)

    def recv(self):
        self.left -= 1
        if self.left < 0:
            raise Enough


@pytest.mark.parametrize("own", [{"own": False}, {"own": True}])
@pytest.mark.parametrize("name", ["Lightning", "Fabric", "Accelerate", "Trainer"])
def test_a_trainer_makes_a_step_for_each_turn(name, own):
    made(lambda cost: cost.TRAINERS[name], own)


def test_the_loop_by_hand_makes_a_step_for_each_turn():
    made(lambda cost: cost.by_hand, {})


def made(row, way):
    cost = load("trainers_cost")
    job = cost.Job(cost.CharLM(**SIZES), "O2", "bf16")
    pipe = Turns(3)
    with pytest.raises(Enough):
        row(cost)(job, cost.turns(job, pipe), **way)
    assert pipe.sent[0] is None  # it is ready
    assert len(pipe.sent) == 4
    assert all(seconds > 0 for seconds in pipe.sent[1:])


@pytest.mark.slow
def test_every_row_is_compared_with_the_loop_by_hand_and_with_the_trainers_own_bf16(tmp_path):
    path = tmp_path / "cost.json"
    sizes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    ran = run(FOLDER / "trainers_cost.py", "--rounds", 2, *sizes, "--json", path)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(path.read_text())["rows"]
    assert rows.pop("halfstep by hand")["time_x_by_hand"] == 1
    for trainer in ("Lightning", "Fabric", "Accelerate", "Trainer"):
        assert rows[f"{trainer}, halfstep"]["time_x_by_hand"] > 0
        assert rows[f"{trainer}, halfstep"]["time_x_own_bf16"] > 0
        assert rows[f"{trainer}, bf16"]["ms"]["count"] == 2
    assert len(rows) == 8
