"""`halfstep run`, called as a user does: output, exit codes and tracebacks are those of the script."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from halfstep.adapters.script.run import Ran
from halfstep.cli.run import summary
from halfstep.explain.report.run import read_log
from halfstep.records import Status

SCRIPTS = Path(__file__).parents[1] / "adapters" / "scripts"


def ends(*command, cwd, interrupt=False):
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )  # fmt: skip
    if interrupt:
        process.stdout.readline()
        time.sleep(1)  # it sleeps by then
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def traceback_of(err):
    return [line for line in err.splitlines() if not line.startswith(("halfstep: ", "this processor has no "))]


TRAINING = """
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, x):
        if x.sum() > 10:
            {ending}
        return self.fc(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
print("ready", flush=True)
model(torch.full((1, 4), 5.0))
"""
ENDINGS = {
    "raises": "raise KeyError('what')",
    "exits": "sys.exit(3)",
    "says why": "sys.exit('no more data')",
    "interrupted": "import time; time.sleep(60)",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_ends_a_script_ends_it_as_python_would(ending, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.format(ending=ENDINGS[ending]), encoding="utf-8")
    interrupt = ending == "interrupted"
    code, out, err = ends("train.py", cwd=tmp_path, interrupt=interrupt)
    ours = ends(
        "-m", "halfstep", "run", "--low", "bf16", "--report", "log", "train.py", cwd=tmp_path, interrupt=interrupt
    )
    assert ours[:2] == (code, out)
    assert [line.strip("^~ ") for line in traceback_of(ours[2])] == [line.strip("^~ ") for line in err.splitlines()]
    assert "halfstep: O1 bf16, 1 steps, 0 skipped" in ours[2]
    log = read_log(tmp_path / "log")
    assert len(log.steps) == 1
    assert log.processes[0].closed
    assert (tmp_path / "log" / "run.html").exists()


def test_a_module_is_run_as_python_m_does_and_gets_all_that_follows(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "other.py").write_text("name = 'other'\n", encoding="utf-8")
    text = "import sys\nfrom . import other\nprint(__name__, sys.argv[1:], sys.path[0], other.name)\n"
    (tmp_path / "package" / "train.py").write_text(text, encoding="utf-8")
    arguments = ("package.train", "--level", "7", "-m", "--help")
    _, out, _ = ends("-m", *arguments, cwd=tmp_path)
    ours = ends("-m", "halfstep", "run", "--level", "O0", "-m", *arguments, cwd=tmp_path)
    assert (ours[0], ours[1]) == (0, out)
    assert "no model was trained in this process" in ours[2]


@pytest.mark.slow
def test_a_script_finds_what_python_gives_it(tmp_path):
    text = """
import __main__, inspect, pickle, sys
class Here:
    pass
print(__name__, __file__, sys.argv, sys.path[0], __spec__, __package__, type(__loader__), sorted(vars(__main__)))
print(pickle.loads(pickle.dumps(Here())), inspect.getsource(Here))
1 / 0
"""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(text, encoding="utf-8")
    arguments = ("sub/show.py", "--level", "7", "-m", "x")
    code, out, err = ends(*arguments, cwd=tmp_path)
    ours = ends("-m", "halfstep", "run", "--quiet", *arguments, cwd=tmp_path)
    assert re.sub("0x[0-9a-f]+", "", ours[1]) == re.sub("0x[0-9a-f]+", "", out)
    assert (ours[0], ours[2]) == (code, err)


@pytest.mark.slow
def test_spawned_processes_and_workers_come_and_go(tmp_path):
    code, _, err = ends(
        "-m", "halfstep", "run", "--low", "bf16", SCRIPTS / "workers.py", tmp_path / "out.pt", cwd=tmp_path
    )
    assert (code, (tmp_path / "out.pt").exists()) == (0, True)
    assert err.count("halfstep: O1 bf16, 6 steps") == 1


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # the weights too differ until they are sent
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(6):
    x = torch.randn(8, 6)
    if step == 2 and rank == 1:
        x = x * float("inf")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.save(model.module.state_dict(), f"{sys.argv[1]}.{rank}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_of_torchrun_train_alike_and_one_of_them_tells_how(tmp_path):
    (tmp_path / "train.py").write_text(DISTRIBUTED, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    code, _, err = ends(*torchrun, "-m", "halfstep", "run", "--low", "bf16", "train.py", "weights", cwd=tmp_path)
    assert code == 0, err
    assert err.count("halfstep: O1 bf16, 6 steps, 1 skipped") == err.count("halfstep: ") == 1
    one, other = (torch.load(tmp_path / f"weights.{rank}") for rank in (0, 1))
    assert all(torch.equal(value, other[name]) and value.isfinite().all() for name, value in one.items())


@pytest.mark.parametrize(
    ("ran", "line"),
    [
        (
            Ran(None, 0, None, 2.0, None, 0),
            "no model was trained in this process, so nothing ran in mixed precision; 2.0 s",
        ),
        (
            Ran(None, 0, None, 2.0, None, 0, ("Net",)),
            "not trained under the plan but in plain fp32: Net, 2.0 s",
        ),
        (
            Ran(None, 0, "torch.amp's GradScaler", 2.0, None, 0),
            "the script uses torch.amp's GradScaler; no session was added, 2.0 s",
        ),
        (
            Ran(Status("O1", "fp16", 7, 2, {}, (), {"weights": 2**20}), 0, "apex.amp", 2.0, None, 0),
            "the script uses apex.amp; no session was added, O1 fp16, 7 steps, 2 skipped, 2.0 s, weights 1.0 MiB",
        ),
        (
            Ran(Status("O0", "bf16", 7, 0, {}, (), {"weights": 2**20, "masters": 0}), 2**21, None, 2.0, None, 0),
            "O0, 7 steps, 0 skipped, 2.0 s, weights 1.0 MiB, peak on the GPU 2.0 MiB",
        ),
    ],
)
def test_the_last_line(ran, line):
    assert summary(ran) == line


@pytest.mark.parametrize(
    ("arguments", "ends_with", "message"),
    [
        (("nowhere.py",), 2, "there is no script nowhere.py"),
        ((str(Path(__file__).parent),), 1, "is a folder without a __main__.py"),
        (("-m", "no.such.module"), 1, "there is no module no.such.module"),
        (("-m", "tests.cli"), 1, "tests.cli is a package without a __main__"),
        (("--level", "O7", __file__), 2, "O7"),
        (("--low", "int8", __file__), 2, "int8"),
        (("--moments", "4bit", __file__), 2, "4bit"),
        (("--plan", "nowhere.toml", __file__), 2, "nowhere.toml"),
        (("--level", "O2", "--plan", "own.toml", __file__), 2, "pass only one of them"),
        (("nowhere.py", "--level", "O2"), 2, "nowhere.py gets --level O2; options of halfstep stand before the script"),
        (("--low", "bf16", "nowhere.py", "--low=fp16"), 2, "there is no script nowhere.py"),
    ],
)
def test_bad_input(halfstep, arguments, ends_with, message):
    """A script that is not there ends with python's exit code."""
    code, out, err = halfstep("run", *arguments)
    assert (code, out) == (ends_with, "")
    assert err.startswith("halfstep: ")
    assert message in err
    assert ("stand before" in err) is ("stand before" in message)


@pytest.mark.parametrize("option", ["--level", "--low"])
def test_an_option_of_the_script_itself_is_no_mistake(halfstep, tmp_path, option):
    path = tmp_path / "own.py"
    path.write_text(f"import sys; assert '{option}' in sys.argv")
    _, _, err = halfstep("run", str(path), option, {"--level": "O2", "--low": "bf16"}[option])
    assert "stand before" not in err
