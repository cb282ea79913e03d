"""The command line: what it prints, how it refuses, how it ends."""

import errno
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from runpy import run_path

import pytest
import torch
import typer
from rich.console import Console

from halfstep.__main__ import main
from halfstep.cli import options
from halfstep.cli.options import FAILED, INTERRUPTED, activity, end
from halfstep.errors import DataError
from halfstep.machine import AVX2, AVX512_BF16
from halfstep.measurements import BenchRun
from halfstep.pages import FOLDER
from halfstep.version import __version__
from halfstep_command import to_the_end

SMALL = ["--set", "d_in=8", "--set", "d_out=8", "--set", "batch=4"]


def test_the_version_and_where_the_pages_are(halfstep):
    code, out, _ = halfstep("--version")
    assert (code, out) == (
        0,
        f"halfstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}\n",
    )
    assert (FOLDER / "nan.md").is_file()
    _, out, _ = halfstep("--help")
    assert str(FOLDER) in re.sub(r"\s", "", out)


def test_an_op_that_is_not_in_the_table_runs_as_written(halfstep):
    for name in ("relu", "tanh"):
        said = halfstep("ops", name)[1]
        assert said.startswith(f"{name} is not in the table: it runs in the formats of its inputs; to run it in fp32")
        assert f"rnn_{name} " in said
    assert halfstep("ops", "gelu", "--plan", "O0")[1].endswith("in the formats of its inputs; at O0 all ops do.\n")
    assert "(did you mean 'gelu'" in halfstep("ops", "GELU")[2]
    assert "\n conv1d " in halfstep("ops", "conv")[1]
    assert (
        "it writes into its first argument, whose format cannot change; name and call 'relu'"
        in halfstep("ops", "relu_")[2]
    )
    code, said, _ = halfstep("ops", "gelu")
    assert code == 0
    assert "gelu is not in the table: it runs in the formats of its inputs" in said
    assert 'deny it: ops={"deny": ["gelu"]}' in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("F.softmax", "softmax +deny"),  # by its public name
        ("torch.nn.functional.cross_entropy", "cross_entropy_loss +deny"),
        ("promote", "addcdiv +promote"),  # all of a list
        ("torch.nn.functional:normalize", r"is a Python function.*OpChange..deny., .torch\.nn\.functional:normalize"),
        ("normalize", 'is a Python function made of several ops; name it "torch.nn.functional:normalize"'),
        ("exp,log", "halfstep: op 'exp,log' is not a torch op"),
        ("nomodule:x", r"^halfstep: module 'nomodule' cannot be imported; name an importable module before the colon$"),
        ("torch.nomodule:x", "module 'torch.nomodule' cannot be imported"),
        ("mine:x", "mine:x is a Python function"),  # of the current folder
    ],
)
def test_ops_takes_names_of_functions_and_lists(halfstep, name, says, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.chdir(tmp_path)
    _, out, err = halfstep("ops", name)
    assert re.search(says, out + err)


def test_what_takes_long_says_what_it_does_and_nothing_with_quiet(monkeypatch, capsys):
    monkeypatch.setattr(options, "PAUSE", 0.01)
    for quiet in (False, True):
        with activity("measuring", quiet=quiet) as now:
            now("measuring casts")
            time.sleep(0.1)
        assert ("measuring casts\n" in capsys.readouterr().err) is not quiet


@pytest.mark.parametrize("command", ["bench", "check", "inspect", "ops", "whatif"])
def test_commands_take_level_whatever_else_they_call_it(halfstep, command):
    code, _, err = halfstep(command, "--level", "O9")
    assert (code, "unknown level 'O9'" in err) == (2, True)


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_is_quiet_about_a_machine_without_units_too(halfstep, caplog, on_processor, said_before, quiet):
    on_processor(AVX2)
    said_before.undo()
    code, out, _ = halfstep("check", "regression", *SMALL, "--low", "fp16", "--no-precision", *["--quiet"] * quiet)
    assert (code, out) == (0, "regression under O1 in fp16: nothing found\n")
    assert ("this processor has no fp16 units" in caplog.text) is not quiet


@pytest.mark.parametrize(("terminal", "lines"), [(True, 2), (False, 1)])
def test_the_first_line_of_progress_fits_a_terminal_and_is_one_line_elsewhere(monkeypatch, terminal, lines):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    monkeypatch.setattr(options, "stderr", lambda: console)
    with options.progress_bar(first="several words " * 8) as progress:
        progress("measuring", 0, 0)
    assert len([line for line in console.file.getvalue().splitlines() if "several" in line]) == lines


@pytest.mark.parametrize("command", ["bench", "check", "doctor", "inspect", "report", "run", "whatif"])
def test_commands_that_take_long_take_quiet(halfstep, command):
    assert "--quiet" in halfstep(command, "--help")[1]


def test_ops_narrows_to_a_name_and_shows_another_plan(halfstep):
    _, out, _ = halfstep("ops", "log_softmax", "--plan", "O2")
    header, row = out.splitlines()
    assert "at O2" in header
    assert row.split()[:2] == ["log_softmax", "deny"]
    assert "as stored" in row


def test_ops_shows_what_a_plan_file_changes(halfstep, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('schema = 1\nbase = "O1"\n[op_changes]\ndeny = ["gelu"]\n', encoding="utf-8")
    code, out, err = halfstep("ops", "gelu", "--plan", path)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:6] == ["gelu", "deny", "changed", "by", "the", "plan"]


@pytest.mark.parametrize(
    ("row", "bf16"),
    [pytest.param(AVX512_BF16, "bf16", marks=pytest.mark.slow), (AVX2, "bf16 (emulated)")],
    ids=["with bf16 units", "without"],
)
def test_bench_prints_a_table_and_writes_every_figure(halfstep, tmp_path, row, bf16, on_processor):
    on_processor(row)
    path = tmp_path / "result.json"
    code, out, err = halfstep("bench", "regression", "--steps", 2, "--seeds", 2, *SMALL, "--json", path)
    assert code == 0, err
    where = rf"cpu {re.escape(row.name)} \(.*, \d threads?\)"
    assert re.match(rf"{where}, .* units: regression at O0, .*, for 2 steps\n", err)
    assert {"O0", f"O1 {bf16}", "O1 fp16 (emulated)", f"O2 {bf16}", f"O3 {bf16}", "torch.amp bf16"} <= {
        line[1:19].strip() for line in out.splitlines()
    }
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["command"].startswith("halfstep bench regression --steps 2")
    assert result["seeds"] == [0, 1]
    assert result["settings"]["d_in"] == "8"
    assert result["machine"]["torch"]
    assert [run["name"] for run in result["runs"] if run["error"] is not None] == ["torch.amp fp16"]


def test_the_demo_is_small_enough_for_a_minute(halfstep, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    script, settings = (
        (root / "dev").read_text(encoding="utf-8"),
        run_path(str(root / "benchmarks/demo.py"))["settings"],
    )
    (options,) = re.findall(r"^demo_options=\((.*)\)$", script, re.MULTILINE)
    asked = []

    def seen(job, rows, *, steps, seconds, **settings):
        asked.append((job.batch, [row.name.replace(" (emulated)", "") for row in rows], steps, seconds))
        raise DataError("enough")

    monkeypatch.setattr("halfstep.cli.bench.run_bench", seen)
    assert halfstep("bench", "char_lm", *shlex.split(options), *settings([]))[2] == "halfstep: enough\n"
    assert asked == [(8, ["O0", "O1 bf16", "O2 bf16", "torch.amp bf16"], None, 60)]
    assert 'python benchmarks/demo.py "${demo_options[@]}" "$@"' in script


def test_bench_runs_the_levels_and_formats_that_were_named(halfstep):
    _, out, _ = halfstep("bench", "regression", "--levels", "O0, O2", "--low", "bf16", "--steps", 1, *SMALL)
    names = [line[1:15].strip() for line in out.splitlines()[3:6]]
    assert names == ["O0", "O2 bf16", "torch.amp bf16"]


def test_bench_runs_a_users_workload(halfstep, tmp_path):
    (tmp_path / "own.py").write_text(
        "from halfstep.lab.workloads.load import Regression\n"
        "def mine(batch='2'): return Regression(batch=int(batch), d_in=4, d_out=4)\n",
        encoding="utf-8",
    )
    code, out, _ = halfstep("bench", f"{tmp_path / 'own.py'}:mine", "--levels", "O0", "--steps", 1, "--set", "batch=3")
    assert code == 0
    assert "regression: 40 parameters" in out


def test_bench_shows_a_row_that_failed_and_ends_well_for_the_others(halfstep, tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from halfstep.lab.workloads.load import Regression\n"
        "class Refusing(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.weight.dtype != torch.float32: raise TypeError('fp32 alone')\n"
        "        return super().forward(x)\n"
        "class Own(Regression):\n"
        "    def build(self, seed): return Refusing(4, 4)\n"
        "def mine(): return Own(batch=2, d_in=4, d_out=4)\n",
        encoding="utf-8",
    )
    bench = ["bench", f"{tmp_path / 'own.py'}:mine", "--low", "bf16", "--steps", 2, "--json", tmp_path / "x.json"]
    code, out, _ = halfstep(*bench, "--levels", "O0,O2")
    assert code == 0
    assert "O2 bf16: left out; counting memory: TypeError: fp32 alone (own.py, line 5)" in out
    result = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    errors = {run["name"]: run["error"] for run in result["runs"]}
    assert errors.pop("O2 bf16").startswith("counting memory: TypeError: fp32 alone")
    assert errors == {"O0": None, "torch.amp bf16": None}


@pytest.mark.parametrize("place", ["folder", "missing", "long", "forbidden"])
def test_json_that_cannot_be_written_is_refused_before_training(halfstep, tmp_path, monkeypatch, place):
    monkeypatch.setattr("halfstep.cli.bench.run_bench", lambda *args, **settings: pytest.fail("it trained"))
    folder = tmp_path / "folder"
    folder.mkdir()
    path = {"missing": folder / "no" / "x.json", "long": folder / ("x" * 300), "folder": folder}.get(place)
    if place == "forbidden":
        path = folder / "x.json"
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
    code, out, err = halfstep("bench", "regression", "--steps", 1, "--json", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"halfstep: --json {path}")
    assert list(folder.iterdir()) == []


def test_a_json_file_that_was_there_stays_until_there_is_a_result(halfstep, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("before", encoding="utf-8")

    def seen(*args, **settings):
        raise DataError(path.read_text(encoding="utf-8"))

    monkeypatch.setattr("halfstep.cli.bench.run_bench", seen)
    assert halfstep("bench", "regression", "--json", path)[2] == "halfstep: before\n"


def test_a_full_disk_is_one_message_and_leaves_the_json_file_that_was_there(halfstep, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("before", encoding="utf-8")

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    bench = ["bench", "regression", "--steps", 1, "--levels", "O0", "--no-peer", *SMALL]
    code, out, err = halfstep(*bench, "--json", path)
    assert code == 2
    why = "No space left on device; it is unchanged; free some space and run again"
    assert err.endswith(f"\nhalfstep: --json {path} could not be written: {why}\n")
    assert "O0" in out  # what was measured is on the screen
    assert [(each.name, each.read_text(encoding="utf-8")) for each in tmp_path.iterdir()] == [("x.json", "before")]


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ("def build(self, seed): raise KeyError('none')", "building the model"),
        ("def batches(self, seed): raise KeyError('none')", "the first batch"),
        ("def loss(self, outputs, targets): raise KeyError('none')", "the forward pass"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "inspect"])
def test_a_workload_that_fails_is_one_message_that_says_where(halfstep, tmp_path, command, broken, what):
    (tmp_path / "own.py").write_text(
        "from halfstep.lab.workloads.load import Regression\n"
        "class Own(Regression):\n"
        f"    {broken}\n"
        "def mine(): return Own(batch=2, d_in=4, d_out=4)\n",
        encoding="utf-8",
    )
    if (command, what) == ("bench", "the forward pass"):
        pytest.skip("a row of its own, as another level may get through")
    code, out, err = halfstep(command, f"{tmp_path / 'own.py'}:mine")
    assert (code, out) == (2, "")
    assert err == f"halfstep: Own: {what} failed: KeyError: 'none' (own.py, line 3)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "regresion"], "halfstep: unknown workload 'regresion'; did you mean 'regression'?"),
        (["bench", "regression", "--set", "depth=3"], "halfstep: regression has no setting depth; it has batch"),
        (["bench", "regression", "--set", "depth"], "halfstep: setting 'depth' is not key=value"),
        (["bench", "regression", "--levels", "01"], "halfstep: unknown level '01'"),
        (["bench", "regression", "--levels", ","], "halfstep: a benchmark needs at least one level"),
        (["bench", "regression", "--low", "fp17"], "halfstep: unknown format 'fp17'"),
        (["bench", "regression", "--moments", "full,4bit"], "halfstep: plan moments is '4bit'; expected one of 'full'"),
        (["bench", "regression", "--moments", ","], "halfstep: a benchmark needs at least one level, format and kind"),
        (["inspect", "regression", "--moments", "4bit"], "halfstep: plan moments is '4bit'; expected one of 'full'"),
        (
            ["bench", "regression", "--device", "tpu"],
            "halfstep: --device 'tpu' is unknown; choose one of auto, cpu, cuda",
        ),
        (["bench", "regression", "--json", "nowhere/x.json"], "halfstep: --json nowhere/x.json: the folder"),
        (["bench", ""], "halfstep: unknown workload ''"),
        (["bench", "imdb_lstm"], "halfstep: imdb_lstm: no data given; pass the folder aclImdb"),
        (["ops", "nothing_of_this_name"], "halfstep: op 'nothing_of_this_name' is not a torch op"),
        (["ops", "--plan", "O7"], "halfstep: unknown level 'O7'"),
        (["check", "regression", "--plan", "O7"], "halfstep: unknown level 'O7'"),
        (["check", "regression", "--low", "e4m3"], "halfstep: level O1 cannot train in e4m3"),
        (["check", "regression", "--json", "nowhere/x.json"], "halfstep: --json nowhere/x.json: the folder"),
        (["inspect", "regression", "--level", "O9"], "halfstep: unknown level 'O9'"),
        (["inspect", "regression", "--json", "nowhere/x.json"], "halfstep: --json nowhere/x.json: the folder"),
        (["whatif", "regression", "--formats", "fp17"], "halfstep: unknown format 'fp17'"),
        (["whatif", "regression", "--formats", ","], "halfstep: formats must name one or more formats other than fp32"),
        (["whatif", "regression", "--plan", "O7"], "halfstep: unknown level 'O7'"),
        (["whatif", "regression", "--loss-scale", "-1"], "halfstep: loss_scale is -1; expected a number from"),
        (["whatif", "regression", "--json", "nowhere/x.json"], "halfstep: --json nowhere/x.json: the folder"),
    ],
)
def test_a_bad_request_is_one_message_and_exit_code_2(halfstep, arguments, message):
    code, out, err = halfstep(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("halfstep: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["bench", "--steps", "0"], ["bench", "--seeds", "none"], ["unknown"], ["levels", "x"]]
)
def test_a_request_that_is_no_command_is_a_usage_error(halfstep, arguments):
    code, _, err = halfstep(*arguments)
    assert code == 2
    assert "Usage" in err


def test_ctrl_c_prints_what_was_measured_and_exits_130(halfstep, tmp_path):
    (tmp_path / "own.py").write_text(
        "from halfstep.lab.workloads.load import Regression\n"
        "class Endless(Regression):\n"
        "    def batches(self, seed):\n"
        "        for i, batch in enumerate(super().batches(seed)):\n"
        "            if i == 20: raise KeyboardInterrupt\n"
        "            yield batch\n"
        "def mine(): return Endless(batch=2, d_in=4, d_out=4)\n",
        encoding="utf-8",
    )
    options = ["--levels", "O0,O1", "--low", "bf16", "--no-peer", "--steps", 1000000, "--json", tmp_path / "out.json"]
    code, out, _ = halfstep("bench", f"{tmp_path / 'own.py'}:mine", *options)
    assert code == 130
    assert "Interrupted: the table shows what was measured so far" in out
    assert "O1 bf16" in out
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["complete"] is False
    assert len(result["runs"][0]["times_ms"]) >= 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "x.json"], "--against is gone: keep the results that --json writes"),
        (["--processes", "8"], "--processes is gone"),
        (["matmul"], "`halfstep bench matmul` is gone: `halfstep doctor` prints products and memory by format"),
        (["memory"], "`halfstep bench memory` is gone"),
        (["char_lm", "--low", "fp8"], "in 8 bits keep --low bf16 and pass --products fp8"),
    ],
)
def test_what_is_gone_or_elsewhere_says_what_to_do(halfstep, arguments, said):
    code, _, err = halfstep("bench", *arguments)
    assert code == 2
    assert said in err


GOOD, BAD = (BenchRun("r", "O1", "bf16", False, False, error=error) for error in (None, "KeyError: 'x'"))


@pytest.mark.parametrize(
    ("runs", "complete", "code"),
    [
        ([], False, INTERRUPTED),  # before the first
        ([BAD], False, INTERRUPTED),
        ([BAD, BAD], True, FAILED),
        ([GOOD, BAD], True, 0),
    ],
)
def test_a_benchmark_ends_with_the_code_of_the_gravest(runs, complete, code):
    with pytest.raises(typer.Exit, check=lambda error: error.exit_code == code) if code else nullcontext():
        end(runs, complete=complete)


LISTENS = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it


@pytest.mark.parametrize("loading", ["torch", "typer"])
@pytest.mark.slow
def test_ctrl_c_while_torch_or_commands_are_loaded_is_one_line(tmp_path, loading):
    lost = "import os, signal, time\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: time.sleep(60)"
    (tmp_path / f"{loading}.py").write_text(lost)
    start = f"{LISTENS}; sys.path[:0] = [{str(tmp_path)!r}, {os.getcwd()!r}]; from halfstep_command import main; main()"
    ended = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "halfstep: interrupted\n")


@pytest.mark.parametrize(("arguments", "said"), [(["check"], "   0 s  loading torch\n"), (["check", "--quiet"], "")])
def test_a_command_that_loads_for_long_says_so(tmp_path, arguments, said):
    (tmp_path / "torch.py").write_text("import sys, time\ntime.sleep(0.5)\nsys.exit(3)")
    start = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {os.getcwd()!r}]; sys.argv[1:] = {arguments!r}"
    start += "; import halfstep_command as c; c.PATIENCE = 0; c.main()"
    ended = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", said)


def test_ctrl_c_inside_a_command_is_one_line(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr("halfstep.cli.plans.level_table", interrupted)
    monkeypatch.setattr("sys.argv", ["halfstep", "levels"])
    monkeypatch.setattr("halfstep_command._end_at_interrupt", lambda: None)
    monkeypatch.setattr("halfstep_command._end", lambda: ended.append("ended"))
    with pytest.raises(SystemExit):
        to_the_end(main)
    assert ended == ["ended"]


@pytest.mark.parametrize(
    "start",
    ["import halfstep_command as c; c.main()", "import runpy; runpy.run_module('halfstep', run_name='__main__')"],
)
@pytest.mark.slow_but("runpy")
def test_ctrl_c_as_a_command_ends_is_one_line_after_what_it_printed(start):
    late = f"{LISTENS}; import atexit, os; atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in '12'])"
    code = f"{late}; sys.argv = ['halfstep', 'ops', 'mm']; {start}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr, " mm " in ended.stdout) == (130, "halfstep: interrupted\n", True)
