"""The scripts of benchmarks/ at small sizes: what they write has what it should, and none of it says how fast."""

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from docs.browser import find_browser
from halfstep.explain.report.sweep import sweep_sheet
from halfstep.formats import BF16, FP16
from halfstep.lab.bench.sweep import read_sweep
from halfstep.machine import AVX512_BF16, DeviceFacts, cpu_flags

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # several wait for each other on a busy machine
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=FOLDER.parent, env=environment
    )


@pytest.fixture
def main(monkeypatch, peers_here):
    """Runs a script in this process, and returns its exit code."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return load(name).main()

    return run


@pytest.mark.slow
def test_the_cost_of_an_open_session_is_measured_beside_processes_without_one(tmp_path):
    path = tmp_path / "found.json"
    done = run(FOLDER / "open_session.py", "--only", "softmax", "--rounds", 1, "--json", path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["name"] == "softmax"
    assert row["time_x_alone"].keys() == {"O1", "O2"}


@pytest.mark.slow  # starts processes as the one above
def test_the_host_cost_has_a_row_for_each_network_and_level_in_processes_of_their_own(tmp_path):
    path = tmp_path / "found.json"
    done = run(
        FOLDER / "host_cost.py", "--network", "MLP, 64 wide", "--rounds", 1, "--steps", 1, "--json", path
    )  # whose processes import the script by its name
    assert done.returncode == 0, done.stderr
    assert "MLP, 64" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [(row["network"], row["level"]) for row in rows] == [("MLP, 64 wide", "O1"), ("MLP, 64 wide", "O2")]
    for row in rows:
        assert row["time_x_peer"] == pytest.approx(row["us"] / row["peer_us"])


@pytest.mark.slow  # so does this one, seven
def test_the_cost_of_emulation_has_a_row_for_each_loop(tmp_path):
    path = tmp_path / "found.json"
    script = FOLDER / "emulation.py"
    done = run(script, "--network", "MLP, 64 wide", "--rounds", 1, "--no-amp", "--native", "--json", path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    sessions = ["O1 bf16", "O2 bf16", "O1 fp16", "O2 fp16", "O1 bf16 native", "O2 bf16 native"]
    assert [row["loop"] for row in rows] == ["fp32", *sessions]
    assert all(row["x_fp32"] == pytest.approx(row["seconds"] / rows[0]["seconds"]) for row in rows)
    assert all(row["x_amp"] is None for row in rows)


def test_the_sweep_of_operations_has_each_direction_and_what_has_no_kernel(tmp_path, main, capsys, one_thread):
    path = tmp_path / "sweep.json"
    assert main("op_sweep", "--only", "pool", "--json", path) == 0
    rows = {(row["op"], row["direction"]): row for row in json.loads(path.read_text())["rows"]}
    assert {("max_pool2d", "forward"), ("max_pool2d", "backward"), ("interpolate, area", "forward")} <= set(rows)
    assert rows["max_pool2d", "forward"]["bf16"] > 0
    lacking = rows["avg_pool3d", "forward"]
    assert lacking["bf16"] is lacking["fp16"] is None
    assert set(lacking["errors"]) == {"bf16", "fp16"}
    assert "avg_pool3d" in capsys.readouterr().out


@pytest.mark.slow
def test_every_operation_of_the_sweep_runs_in_fp32():
    sweep = load("op_sweep")
    for cases in sweep.KINDS.values():
        for _, (call, operands) in cases():
            sweep.forward(call, operands)()
            backward = sweep.backward(call, operands)
            assert backward is None or backward()


@pytest.mark.slow
def test_the_optimizer_step_measures_every_implementation_and_peer(tmp_path, main, capsys):
    path = tmp_path / "made" / "here.json"
    assert main("optimizer_step", "--device", "cpu", "--numel", 60000, "--rounds", 1, "--json", path) == 0
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    for peer in ("parts", "foreach", "GradScaler"):
        assert {peer, f"{peer} + clip"} <= rows.keys()
    for kind, held in (("split", 14), ("copy", 16), ("full", 16)):
        for name in (f"halfstep {kind} {way}{clip}" for way in ("fused", "eager") for clip in ("", " + clip")):
            assert rows[name]["bytes_held"] == pytest.approx(held, abs=0.1)
            assert rows[name]["vs_peer"] > 0
            assert rows[name]["floor_ms"] > 0
            assert name in printed
    assert found["machine"]["device"] == "cpu"
    assert found["gb_s"].keys() == {"copy", "in place"}


def test_one_implementation_at_a_time_is_measured():
    step = load("optimizer_step")
    before = dict(step.IMPLEMENTATIONS), dict(step.READERS)
    with step.only("eager"):
        assert list(step.IMPLEMENTATIONS) == ["eager"]
        assert list(step.READERS) == ["torch"]
    assert before == (step.IMPLEMENTATIONS, step.READERS)
    assert list(step.IMPLEMENTATIONS) == list(before[0])


def test_the_models_have_the_sizes_that_they_are_known_by():
    step, train = load("optimizer_step"), load("train_step")
    with torch.device("meta"):
        gpt2 = train.GPT2(50257, d=768, layers=12, heads=12, context=1024)
        resnet = train.ResNet50(pixels=224)._build()
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032
    for numel in (step.SMALL, step.BILLION):
        made = sum(p.numel() for p in step.Transformer(numel, torch.device("meta")).parameters())
        assert made == pytest.approx(numel, rel=0.02)


def test_a_gpu_has_rows_with_and_without_tf32_and_a_compiled_peer():
    train = load("train_step")
    rows = train.rows([BF16, FP16], DeviceFacts("cuda", (9, 0)), compiled=[BF16])
    names = [row.name for row in rows]
    assert names[:2] == ["O0", "O0 TF32"]
    assert [row.plan.name for row in rows[:2]] == ["O0", "O0"]
    assert {"O1 bf16", "O2 fp16", "O3 bf16", "torch.amp fp16", "torch.amp bf16 compiled"} <= set(names)
    assert "torch.amp fp16 compiled" not in names
    assert len([row for row in train.rows([BF16], DeviceFacts("cpu"), compiled=[])]) == 5


@pytest.mark.slow
def test_the_training_step_measures_every_level(tmp_path, main, on_processor):
    on_processor(AVX512_BF16)
    path = tmp_path / "step.json"
    sizes = ["--workload", "gpt2", "--layers", 1, "--context", 8, "--vocabulary", 50, "--batch", 1, "--steps", 2]
    assert main("train_step", "--device", "cpu", *sizes, "--compiled", "none", "--json", path) == 0
    (result,) = json.loads(path.read_text())["results"]
    names = [run["name"].removesuffix(" (emulated)") for run in result["runs"]]
    assert names == ["O0", "O1 bf16", "O2 bf16", "O3 bf16", "torch.amp bf16"]
    assert all(run["error"] is None and run["peak_bytes"] > 0 for run in result["runs"])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 bmi2", "AMD EPYC: AVX2, no bf16 units; a small GPT trains"),
        ("model name\t: Xeon\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16", "Xeon: AVX512, bf16 units (AMX); a"),
        ("CPU part\t: 0xd40\nFeatures\t: asimd sve bf16", "SVE, bf16 units (Arm BF16); a"),
        ("processor\t: 0", "units unknown; a"),
    ],
)
def test_the_demo_says_what_processor_it_is_before_torch_is_loaded(tmp_path, rows, said):
    (tmp_path / "cpuinfo").write_text(f"{rows}\n\n{rows}\n")
    demo = load("demo")
    assert said in demo.first_line(*demo.processor(tmp_path / "cpuinfo"))


def test_the_demo_reads_the_units_that_torch_finds():
    demo = load("demo")
    _, flags = demo.processor()
    if not flags:
        pytest.skip("the system does not name the flags of its processor")
    known = cpu_flags(torch.cpu.get_capabilities())
    assert bool({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"} & known) == bool(demo.UNITS.keys() & flags)


def test_the_demo_speaks_before_it_loads_anything_that_takes_long(tmp_path):
    """A package `halfstep` that fails stands in for the one that loads torch."""
    (tmp_path / "halfstep").mkdir()
    (tmp_path / "halfstep" / "__init__.py").write_text("raise SystemExit(3)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, FOLDER / "demo.py"], capture_output=True, text=True, env=environment)
    assert ran.returncode == 3
    assert ran.stderr.endswith("a small GPT trains at O0, O1 and O2 and under torch.amp for about a minute\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_demo_is_the_benchmark_with_its_options(main, monkeypatch, capsys, terminal):
    asked = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("halfstep.__main__.main", lambda: asked.append(sys.argv))
    main("demo", "--set", "batch=4")  # in place of the demo's
    assert asked == [["halfstep", "bench", "char_lm", "--set", "batch=4", "--set", "eval_windows=64"]]
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= 60 for line in lines) if terminal else len(lines) == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("code", "how"), [(130, "interrupted at"), (2, "failed at")])
def test_dev_says_whether_a_step_failed_or_was_interrupted(code, how):
    script = f'eval "$(sed -n "/^step() {{/,/^}}/p" dev)"; step demo sh -c "exit {code}"'
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=FOLDER.parent)
    assert (ran.returncode, ran.stderr) == (code, f'\n./dev: {how} "demo" (exit code {code}): sh -c exit {code}\n')


class TestGpuScript:
    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
    def test_what_an_earlier_run_has_left_does_not_count(self, tmp_path):
        """All parts fail, as the python that they run with runs the summary alone."""
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\ncase "$1" in *gpu_summary.py) exec {sys.executable} "$@";; esac\nexit 3\n')
        python.chmod(0o755)
        results = tmp_path / "results"
        (results / "accuracy").mkdir(parents=True)
        row = {"name": "halfstep split triton", "vs_peer": 9.0}
        (results / "optimizer_step.json").write_text(json.dumps({"rows": [row]}))
        runs = [{"name": name, "validation": {"loss": [1.0]}} for name in ("O0", "O1 bf16")]
        for kept in ("char_lm-seed0", "char_lm-seed1"):
            (results / "accuracy" / f"{kept}.json").write_text(json.dumps({"runs": runs}))
        (results / "summary.json").write_text("{}")
        (tmp_path / "data" / "cifar10").mkdir(parents=True)
        options = ["--results", str(results), "--data", str(tmp_path / "data")]
        command = ["bash", str(FOLDER / "gpu.sh"), *options]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(python)})
        assert ran.returncode == 1
        found = json.loads((results / "summary.json").read_text())
        assert len(found["figures"]) == 5 + 4 + 8 + 2
        assert {(figure["verdict"], figure["why"]) for figure in found["figures"]} == {("open", "failed (3)")}
        assert ran.stdout.count("open (failed (3))") == len(found["figures"])
        left = sorted(path.relative_to(results).as_posix() for path in results.rglob("*.json"))
        assert left == ["accuracy/char_lm-seed1.json", "summary.json"]  # what is not a run of this script's stays

    @pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
    def test_what_is_missing_comes_from_packed_wheels(self, tmp_path):
        folder = tmp_path / "benchmarks"
        (folder / "bare" / "wheels").mkdir(parents=True)
        shutil.copy(FOLDER / "gpu.sh", folder)
        (folder / "gpu_summary.py").write_text("import absent, sys; sys.exit(absent.CODE)")
        with zipfile.ZipFile(folder / "bare" / "wheels" / "absent-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("absent.py", "CODE = 23")
        command = ["bash", str(folder / "gpu.sh"), "--part", "none", "--results", str(tmp_path / "results")]
        environment = {**os.environ, "PYTHON": sys.executable}
        assert subprocess.run(command, capture_output=True, env=environment).returncode == 23

    @pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
    def test_it_packs_what_the_project_asks_for(self, tmp_path):
        """Torch, Triton and numpy are on the machine, and what makes pages and checks code is not needed there."""
        (tmp_path / "benchmarks").mkdir()
        shutil.copy(FOLDER / "gpu.sh", tmp_path / "benchmarks")
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/arguments\n")
        python.chmod(0o755)
        command = ["bash", str(tmp_path / "benchmarks" / "gpu.sh"), "pack", "3.13"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHON": str(python)})
        asked = (tmp_path / "arguments").read_text().split()
        assert asked[asked.index("--python-version") + 1] == "3.13"
        project = (FOLDER.parent / "pyproject.toml").read_text()
        wanted = {"msgspec", "tomli-w", "typer", "rich", "pytest", "pytest-xdist", "hypothesis"}
        assert {word for word in asked if ">=" in word} == {
            word for word in re.findall(r'"([^"]+>=[^"]+)"', project) if word.split(">=")[0] in wanted
        }

    @pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
    @pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--nonsense"], 1)])
    def test_it_says_how_it_is_used(self, arguments, code):
        ran = subprocess.run(["bash", str(FOLDER / "gpu.sh"), *arguments], capture_output=True, text=True)
        assert ran.returncode == code
        assert "--results DIR" in ran.stdout


@pytest.fixture
def summary(tmp_path, capsys, monkeypatch):
    def summarize(parts, left_out=(), **files):
        (tmp_path / "results").mkdir(exist_ok=True)
        for name, lines in (("parts", parts), ("left_out", left_out)):
            (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
        for name, content in files.items():
            place = tmp_path / "results" if name.endswith("_json") else tmp_path
            path = place / name.replace("__", "/").replace("_json", ".json").replace("_xml", ".xml")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        arguments = ["--device", "cpu", "--results", str(tmp_path / "results"), "--room", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["gpu_summary.py", *arguments])
        code = load("gpu_summary").main()
        return code, capsys.readouterr().out, json.loads((tmp_path / "results" / "summary.json").read_text())

    return summarize


def verdicts(found):
    return {figure["what"]: figure["verdict"] for figure in found["figures"]}


def test_the_summary_judges_each_figure_on_both_sides_of_its_goal(summary):
    def row(name, **figures):
        return {"name": name, **figures}

    step = [
        row("halfstep split triton", vs_peer=1.5, of_copy_bandwidth=0.8499, bytes_held=14.1),
        row("halfstep split triton + clip", vs_peer=1.999),
        row("halfstep copy triton", bytes_held=16.11),
    ]
    runs = [row("O2 bf16", times_ms=[1.0, 1.0, 1.0], vs_amp=1.05), row("O3 bf16", times_ms=[0.97, 0.98, 0.99])]
    code, out, found = summary(
        ["optimizer_step 0 60 85", "gpt2 0 60 120"],
        optimizer_step_json={"rows": step},
        gpt2_json={"results": [{"runs": runs}]},
    )
    assert code == 0
    assert "not on a GPU" in out
    assert verdicts(found) == {
        "optimizer step, split: times parts": "holds",
        "optimizer step, split, clipping: times parts": "MISSED",
        "optimizer step, split: share of copy bandwidth": "MISSED",
        "bytes per parameter, O2 split AdamW": "holds",
        "bytes per parameter, O2 copy AdamW": "MISSED",
        "gpt2 bf16: O2, times O3": "holds",
        "gpt2 bf16: O1, times torch.amp": "open",
        "gpt2 bf16: O2, times torch.amp": "holds",
    }


def test_the_summary_says_how_each_part_ended(summary):
    xml = (
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/>'
        '</testcase><testcase classname="a" name="left"><skipped/></testcase></testsuite></testsuites>'
    )
    code, out, found = summary(["tests 1 30 125", "graph 124 45 45", "optimizer_step 1 2 85"], tests_xml=xml)
    assert code == 1
    assert re.search(r"tests +failed \(1\) +30 s +1 passed, 1 failed, 1 skipped", out)
    assert re.search(r"graph +out of time", out)
    assert found["tests"]["tests"]["failures"] == ["a::bad"]
    assert set(verdicts(found).values()) == {"open"}


def test_the_summary_compares_losses_with_those_of_fp32(summary):
    runs = [
        {"name": name, "validation": {"loss": [loss]}}
        for name, loss in (("O0", 100.0), ("O1 bf16", 102.0), ("O2 bf16", 102.1), ("O1 fp16 (emulated)", 99.0))
    ]
    _, out, found = summary(
        ["accuracy 0 9 60"],
        left_out=["cifar_resnet no cifar10 folder was found"],
        **{"accuracy__char_lm-seed0_json": {"runs": runs}},
    )
    assert list(verdicts(found).values()) == ["holds", "MISSED", "holds", "open"] + 4 * ["open"]
    assert [figure["why"] for figure in found["figures"]] == [
        *[""] * 3,
        "not measured",
        *["no cifar10 folder was found"] * 4,
    ]
    assert out.count("open (no cifar10 folder was found)") == 4


def test_the_summary_has_a_row_for_each_accuracy_run_that_time_did_not_reach(summary):
    _, out, found = summary(["accuracy 124 70 70"])
    assert {(figure["verdict"], figure["why"]) for figure in found["figures"]} == {("open", "out of time")}
    assert len(found["figures"]) == 8
    assert "cifar_resnet O2 fp16: validation loss above fp32's" in out


@pytest.mark.slow
def test_the_recommended_scale_trains_a_job_that_scale_1_does_not(tmp_path, data_dir):
    path = tmp_path / "found.json"
    script = FOLDER / "recommended_scale.py"
    ran = run(script, "--data", data_dir, "--steps", 60, "--seeds", 1, "--json", path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text())
    by_name = {(row["plan"], row["recommended"]): row for row in found["rows"]}
    assert by_name.keys() == {(plan, recommended) for plan in ("O1", "O2") for recommended in (False, True)}
    assert all(each["lost"]["decoder.2"] == 1.0 for each in found["predicted"])
    assert all(each["smallest"] > 1 for each in found["predicted"])
    assert all(row["skipped"] == 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("recommended", "error", "entropy", "holds"),
    [
        (True, 1.02, 1.02, True),
        (True, 1.03, 1.0, False),
        (True, 1.0, 1.03, False),
        (False, 1.5, 1.0, True),
        (False, 1.4, 1.0, False),
    ],
)
def test_a_scale_is_judged_by_reconstruction_and_cross_entropy(recommended, error, entropy, holds):
    module = load("recommended_scale")
    row = module.Row("O2", 1.0, recommended, 0.1, error, entropy, accuracy=0.7, skipped=0)
    assert row.holds == holds


def test_the_recommended_scale_says_where_its_data_come_from(tmp_path, main):
    with pytest.raises(SystemExit, match=r"torchvision\.datasets\.FashionMNIST"):
        main("recommended_scale", "--data", tmp_path)


def test_the_sum_takes_a_message_up_and_down_each_floor_of_a_tree(monkeypatch):
    script = load("sum_cost")
    monkeypatch.setattr(script, "SIGMA", 0.0)  # no jitter: all messages take as long
    for size in (8, 4096):
        row = script.row(size, trials=1)
        assert row["median_us"] == row["late_us"] == row["tree_us"]
        assert row["bytes"] == 8 * (1 + -(-(291 + 64) // {8: 13, 4096: 4}[size]) + size)
    assert row["tree_us"] == pytest.approx(24 * (15 + 33496 / 25e3) + 30 * 4, abs=0.1)  # 2 x 12 floors


@pytest.mark.slow
def test_each_level_is_compared_with_torch_under_each_engine(tmp_path):
    path = tmp_path / "cost.json"
    sizes = [word for each in ("d=8", "layers=1", "heads=2", "length=8") for word in ("--set", each)]
    ran = run(FOLDER / "processes_cost.py", "--rounds", 2, *sizes, "--json", path)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == [f"{engine} {way}" for engine in ("DDP", "FSDP2") for way in ("torch", "O1", "O2")]
    for name, row in rows.items():
        assert row["ms"]["count"] == 2
        assert (row["time_x_torch"] == 1) == name.endswith("torch")
        assert row["time_x_torch"] > 0


(SWEEP,) = (FOLDER / "results").glob("sweep-resnet-*.json")


def test_the_page_of_a_sweep_is_made_of_its_results(tmp_path, main, capsys):
    main("sweep_page", SWEEP, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "resnet101" in text
    assert capsys.readouterr().out.strip() == (tmp_path / "page.html").as_uri()


def check_static(text):
    """Checks that a page has the charts and figures of the sweep, and nothing that runs or is fetched."""
    sheet = sweep_sheet(read_sweep(SWEEP))
    assert not re.search(
        r"<script|<link(?! rel=\"icon\" href=\"data:,\")|<img|<iframe|//|\bon\w+=|plotly|@import", text
    )
    assert f"<h1>{sheet.headline}</h1>" in text
    figures = text[text.index("<tbody>") : text.index("</tbody>")]
    cells = [[html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)] for row in figures.split("<tr>")[1:]]
    assert cells == sheet.rows
    drawn = text.split('class="chart"')[1:]
    charts = sheet.charts
    assert [chart.title in before for chart, before in zip(charts, text.split('class="chart"'), strict=False)]
    assert len(drawn) == len(charts)
    for chart, picture in zip(charts, drawn, strict=True):
        assert picture.count("<svg") >= 1
        marks = sum(value is not None for trace in chart.traces for value in trace["y"])
        assert picture.count('class="point"') == marks
        assert all(html.escape(trace["name"]) in picture for trace in chart.traces)


def test_the_kept_page_has_the_figures_of_its_results_and_no_script():
    page = SWEEP.with_suffix(".html")
    assert page.stat().st_size < 1.5e6
    check_static(page.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here")
def test_a_static_page_has_its_charts_drawn(tmp_path, main):
    main("sweep_page", SWEEP, tmp_path / "page.html", "--static")
    check_static((tmp_path / "page.html").read_text(encoding="utf-8"))
