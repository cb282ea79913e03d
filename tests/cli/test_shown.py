"""Each command that a page or a docstring shows is run in a small form, or a table says why not and what is instead."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import typer.main

import halfstep as library
from docs import pictures
from docs.browser import find_browser
from halfstep.__main__ import app
from halfstep.lab.doctor.doctor import recommend
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.load import Regression
from tests.doctor.test_doctor import rated
from tests.report.logs import START, step, write
from tests.test_benchmarks import load
from tests.test_readme import BLOCKS, PAGES, ROOT, fences

if sys.version_info >= (3, 11):
    import tomllib

CODE = [path for folder in ("halfstep", "benchmarks", "examples", "docs") for path in ROOT.glob(f"{folder}/**/*.py")]
WORD = r"\./dev [a-z]|halfstep [a-z]|python (?:-m )?[a-z]|torchrun -|pytest -|pip [a-z]|benchmarks/gpu\.sh"
PROGRAM = rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{WORD})"
TINY = {"d": 8, "layers": 1, "heads": 2, "length": 8, "batch": 2, "eval_windows": 2}
REGRESSION = "regression --set d_in=8 --set d_out=8 --set batch=4"
CHAR_LM = "char_lm " + " ".join(f"--set {name}={value}" for name, value in TINY.items())

# `halfstep ...` as it is shown, and what is run of it: the same, or less.
AS_SHOWN = """
    levels
    ops
    ops gelu
    check own.py:mine --plan plan.toml
    report run.jsonl
    report run-0.jsonl run-1.jsonl
    run train.py
    run --level O2 train.py
    run --level O2 --low bf16 --report log train.py --epochs 3
    run --plan plan.toml train.py
"""
SMALL = {each.strip(): each.strip() for each in AS_SHOWN.strip().splitlines()} | {
    "bench": f"bench {REGRESSION} --steps 2 --json x.json",
    "bench --seconds N": f"bench {REGRESSION} --levels O0 --no-peer --seconds 1",
    "bench char_lm": f"bench {CHAR_LM} --levels O0,O1 --low bf16 --steps 2",
    "bench char_lm --levels O0,O1,O2 --low bf16 --seconds 60": f"bench {REGRESSION} --levels O0 --no-peer --seconds 1",
    "bench NAME": f"bench {REGRESSION} --steps 2 --json x.json",
    "bench --json FILE": f"bench {REGRESSION} --steps 2 --json x.json",
    "bench char_lm --levels O0,O1,O2 --low bf16 --steps 40": f"bench {CHAR_LM} --levels O0,O1,O2 --low bf16 --steps 2",
    "bench own.py:mine": "bench own.py:mine --levels O0,O1,O2 --low bf16 --steps 2",
    "bench own.py:mine --levels O0,O1,O2": "bench own.py:mine --levels O0,O1,O2 --low bf16 --steps 2",
    "bench own.py:mine --levels O0,O1,O2 --low bf16": "bench own.py:mine --levels O0,O1,O2 --low bf16 --steps 2",
    "check": f"check {REGRESSION}",
    "check WORKLOAD": "check own.py:mine",
    "inspect": f"inspect {REGRESSION}",
    "inspect WORKLOAD": "inspect own.py:mine",
    "report": "report run.jsonl",
    "report LOG...": "report run.jsonl",
    "report PATH": "report run.jsonl",
    "run": "run train.py",
    "run SCRIPT": "run train.py",
    "whatif": f"whatif {REGRESSION}",
    "whatif WORKLOAD": "whatif own.py:mine",
}

# The scripts of benchmarks/: what they are given, and which of their names are replaced by smaller things.
SCRIPTS = {
    "accuracy": (
        "--workload char_lm --seed 0 --steps 2 --results .",
        {"load_workload": lambda *_, **__: CharLM(**TINY)},
    ),
    "check_cost": ("--times 1 --only 'mlp, 3 x 64'", {}),
    "fp8": ("--seeds 1 --set d=32 --set layers=1 --set heads=2", {}),
    "inspect_gains": ("", {"WIDTH": 32, "SECONDS": 0.0}),
    "loaded_low": ("--before 1 --steps 1 --width 12 --rows fp32 'halfstep O2'", {}),
    "moments": (
        "--steps 1 --processes 0 --json x.json",
        {"SETTINGS": {"d": "64", "layers": "1", "heads": "2", "batch": "2"}, "STALL": 502},
    ),
    "probe_cost": ("--steps 1", {"CharLM": partial(CharLM, **TINY)}),
    "report_page": ("--modules 2 --steps 20 --every 10 --openings 1", {}),
    "small_step": ("--steps 1", {}),
    "sum_cost": ("--trials 1 --json x.json", {}),
    "whatif": (
        "--workload regression --steps 1 --out .",
        {"load_workload": lambda *_, **__: Regression(d_in=8, d_out=8, batch=4)},
    ),
}

# What is not run here, as a pattern; why; and the test, or how its name begins, that runs the nearest thing.
TRAINS = "trains ResNets for minutes, each in a process of its own"
INSTEAD = [
    (r"(\w+=\S+ )?\./dev \w+.*", "CI is made of these", "dev"),
    (r"pip install .*|\.venv/bin/python -m pip .*", "installs packages, as CI does", "dev"),
    (r"python benchmarks/blocks\.py .*", "needs Triton", "tests/cudasim/test_gpu_script.py::test_its_parts_run"),
    (r"python hatch_build\.py", "builds beside the package", "tests/kernels/test_library.py::test_it_runs_as"),
    (r"python docs/look\.py", "needs the site; ./dev docs runs it", "dev"),
    (r"python benchmarks/fp8_torchao\.py.*", "needs torchao", "tests/cast/test_narrow.py::test_the_three_products"),
    (r"benchmarks/gpu\.sh.*", "needs a GPU, or hours", "tests/test_benchmarks.py::TestGpuScript"),
    (r"torchrun --nproc-per-node 2 -m .*", "two processes", "tests/cli/test_run.py::test_processes_of_torchrun"),
    (r"torchrun --max-restarts", "kills processes", "tests/test_elastic.py::test_a_run_whose_process_was_killed"),
    (r"pytest -m slow .*", "allocates gigabytes", "tests/bench/test_memory.py"),
    (r"halfstep doctor", "half a minute", "tests/cli/test_inspect.py::test_doctor_prints_what_to_train_in"),
    (r"halfstep doctor --save", "half a minute", "tests/doctor/test_doctor.py::test_what_is_saved"),
    (r"halfstep bench --model .* --largest-batch .*", TRAINS, "tests/bench/test_largest.py::test_the_command"),
    (r"halfstep bench --model .*", TRAINS, "tests/cli/test_sweep.py::test_a_sweep_prints_its_table"),
    (r"halfstep check own\.py:mine --plan O2 --low fp16", "below", "tests/cli/test_shown.py::test_the_findings"),
    (r"halfstep whatif char_lm", "below, smaller", "tests/cli/test_shown.py::test_a_prediction"),
    (r"python docs/pictures\.py.*", "below, with less to do", "tests/cli/test_shown.py::test_the_script_makes"),
    (r"python (examples/tutorial|docs/render)\.py", "elsewhere", "tests/test_site.py::test_the_tutorial_breaks"),
    (r"python benchmarks/optimizer_step\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_optimizer_step"),
    (r"python benchmarks/open_session\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_cost_of_an_open"),
    (r"python benchmarks/host_cost\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_host_cost"),
    (r"python benchmarks/op_sweep\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_sweep_of_operations"),
    (r"python benchmarks/emulation\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_cost_of_emulation"),
    (r"python benchmarks/train_step\.py.*", "elsewhere", "tests/test_benchmarks.py::test_the_training_step"),
    (r"python benchmarks/processes_cost\.py", "elsewhere", "tests/test_benchmarks.py::test_each_level_is_compared"),
    (r"python benchmarks/sweep_page\.py .*", "elsewhere", "tests/test_benchmarks.py::test_the_page_of_a_sweep"),
    (r"python benchmarks/recommended_scale\.py .*", "needs data", "tests/test_benchmarks.py::test_a_scale_is_judged"),
    (r"python benchmarks/trainers_cost\.py", "./dev adapters", "tests/trainers/test_cost.py::test_every_row"),
    (r".*python benchmarks/keras_accuracy\.py.*", "needs Keras and minutes", "tests/keras/test_page.py::test_fit"),
    (r"python benchmarks/false_alarms\.py", "needs libraries", "tests/diagnose/test_no_alarm.py::test_common_models"),
    (r"python benchmarks/run_cost\.py.*", "two processes", "tests/adapters/test_script.py::test_a_script_equals"),
    (r"python benchmarks/against\.py .*", "needs another checkout", "tests/test_benchmarks.py::test_the_training_step"),
    (r"python benchmarks/inputs\.py", "a minute", "tests/contracts/test_models.py::test_model_code_sees_inputs"),
    (r"python benchmarks/doctor\.py", "minutes", "tests/doctor/test_doctor.py::test_an_examination"),
]


def commands_in(text, blocks):
    """Commands in backticks, and the lines of blocks that are commands; without comments and optional parts."""
    found = re.findall(rf"`({PROGRAM}[^`]*|benchmarks/gpu\.sh)`", text)
    found += [line.strip() for block in blocks for line in block.splitlines() if re.match(rf" *{PROGRAM}", line)]
    return {" ".join(re.sub(r" # .*| \[.*?\](?= |$)", "", " ".join(each.split())).split()) for each in found}


def docstrings(path):
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    code = path.read_text(encoding="utf-8")
    nodes = (
        ast.walk(ast.parse(code)) if re.search(rf"(`|    ){PROGRAM}", code) else ()
    )  # parsing all takes each worker seconds
    return [text for node in nodes if isinstance(node, holders) and (text := ast.get_docstring(node))]


def shown():
    """Each command with the files that show it."""
    found = {}
    for page in PAGES:
        blocks = [content for language, content in fences(page) if language in ("sh", "")]
        for command in commands_in(page.read_text(encoding="utf-8"), blocks):
            found.setdefault(command, []).append(page.name)
    for path in CODE:
        for text in docstrings(path):
            indented = [line for line in text.splitlines() if line.startswith("    ")]
            for command in commands_in(text, indented):
                found.setdefault(command, []).append(path.name)
    return dict(sorted(found.items()))  # the same order in each process that runs tests


SHOWN = shown()


def script_of(command):
    match = re.match(r"python benchmarks/(\w+)\.py", command)
    return match and match[1]


def instead(command):
    return [row for row in INSTEAD if re.fullmatch(row[0], command)]


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_is_shown_is_run(command):
    run = command.removeprefix("halfstep ") in SMALL or script_of(command) in SCRIPTS
    assert run or instead(command), f"{SHOWN[command]} show it: put it into SMALL, SCRIPTS or INSTEAD"


def test_no_table_has_what_is_not_shown():
    assert SMALL.keys() <= {command.removeprefix("halfstep ") for command in SHOWN}
    assert SCRIPTS.keys() <= {script_of(command) for command in SHOWN}
    assert [row[0] for row in INSTEAD if not any(re.fullmatch(row[0], command) for command in SHOWN)] == []


@pytest.mark.parametrize("test", sorted({row[2] for row in INSTEAD}))
def test_what_is_run_instead_exists(test):
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^(class|def) {name}", text, re.MULTILINE) if name else text


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("halfstep ")])
def test_a_command_of_halfstep_is_taken_as_it_is_shown(command):
    _, name, *arguments = shlex.split(command)
    group = typer.main.get_command(app)
    with group.make_context("halfstep", [], resilient_parsing=True) as context:
        found = group.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        found.make_context(name, arguments, parent=context, resilient_parsing=True)


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("./dev ")])
def test_dev_knows_the_command(command):
    told = subprocess.run(["bash", ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^\./dev {command.split()[1]}\b", told, re.MULTILINE)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_extras_that_are_shown_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = {name for command in SHOWN for name in re.findall(r"halfstep\[(.*?)\]", command)}
    assert asked
    assert asked <= extras.keys()


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("python ")])
def test_a_script_takes_the_options_that_are_shown(command):
    _, script, *arguments = shlex.split(command)
    text = (ROOT / script).read_text(encoding="utf-8")
    assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in text] == []


TRAIN = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
print("trained", *sys.argv[1:])
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder that has what the commands of the pages take as given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(BLOCKS["own workload"], encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    library.save_plan(library.level("O2", "bf16"), "plan.toml")
    write(tmp_path / "run.jsonl", [START, step(1, loss=1.0)])
    logs = [library.RunLog(tmp_path / f"run-{process}.jsonl") for process in range(2)]  # at the same time
    for process, log in enumerate(logs):
        log.record(replace(START, process=process))
        log(step(1, loss=1.0))
        log.close()
    return tmp_path


@pytest.mark.slow_but("no", "check own.py:mine ", "[levels", "ops gelu", "1.jsonl", "epochs 3", "run train.py")
@pytest.mark.parametrize("command", sorted(set(SMALL.values())))
def test_a_command_of_halfstep_ends_well(command, room, halfstep):
    code, out, err = halfstep(*shlex.split(command))
    assert code == 0, err
    assert out


@pytest.mark.slow_but("accuracy", "sum_cost")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_well(name, room, monkeypatch, capsys):
    if name == "report_page" and find_browser() is None:
        pytest.skip("no Chromium is installed here")
    given, smaller = SCRIPTS[name]
    script = load(name)
    for each, value in smaller.items():
        monkeypatch.setattr(script, each, value)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(given)])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here")
@pytest.mark.slow
def test_the_script_makes_every_picture(tmp_path, monkeypatch):
    for name, value in {"HERE": tmp_path / "docs", "STEPS": 4, "EVERY": 2, "SETTINGS": dict(TINY)}.items():
        monkeypatch.setattr(pictures, name, value)
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for kind in ("loaded_low", "char_lm-bf16"):
        for result in (ROOT / "benchmarks/results").glob(f"{kind}-*.json"):
            shutil.copy(result, tmp_path / "benchmarks/results")
    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    threads = torch.get_num_threads()
    pictures.main()
    torch.set_num_threads(threads)
    made = {path.name for path in (tmp_path / "docs").glob("*.png")}
    assert made == {path.name for path in (ROOT / "docs").glob("*.png")}
    linked = {name for page in PAGES for name in re.findall(r"\]\(([\w-]+\.png)[)#]", page.read_text(encoding="utf-8"))}
    assert made == linked


OWN = """\
import torch
from halfstep.lab.workloads.load import Regression


class Attention(torch.nn.Linear):
    def forward(self, x):
        scores = super().forward(x) + 1e-8
        return scores.masked_fill(x > 0, -1e9).softmax(-1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), Attention(4, 4))

    def forward(self, x):
        return self.blocks(x)


class Own(Regression):
    def build(self, seed):
        return Net()


def mine():
    return Own(batch=2, d_in=4, d_out=4)
"""


def test_the_findings_of_the_page_are_those_of_such_a_model(room, halfstep):
    (room / "own.py").write_text(OWN, encoding="utf-8")
    code, out, _ = halfstep("check", "own.py:mine", "--plan", "O2", "--low", "fp16")
    assert (code, out) == (1, BLOCKS["findings"])


def titles(text):
    """The lines of tables without their figures: titles of columns, and first words of rows."""
    return [
        re.split(r"\s{2,}", line.strip()) if "tensors" in line or "loss" in line else line.split()[:1]
        for line in text.splitlines()
    ]


def test_a_prediction_has_the_form_of_the_page(room, halfstep):
    code, out, err = halfstep("whatif", *CHAR_LM.split())
    assert code == 0, err
    assert titles(out)[: len(titles(BLOCKS["prediction"]))] == titles(BLOCKS["prediction"])


RECOMMENDED = {
    BLOCKS["recommendation"]: dict(
        product_bf16=0.23, convolution_bf16=0.52, product_fp16=0.011, convolution_fp16=0.031
    ),
    BLOCKS["with units"]: dict(product_bf16=2.3, convolution_bf16=1.8, product_fp16=0.013, convolution_fp16=0.032),
}


@pytest.mark.parametrize("block", RECOMMENDED)
def test_the_recommendation_of_the_page_is_what_the_doctor_says(block):
    level, low, reason = recommend(rated(**RECOMMENDED[block]))
    assert block == f"Train at {level}{'' if level == 'O0' else f' in {low}'}: {reason}.\n"
