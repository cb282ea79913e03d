"""The classes of processors and what was measured on them, the facts of a device, and the commit."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep
from halfstep import machine, saved
from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, TF32
from halfstep.machine import (
    AMX,
    AMX_FP16,
    ARM,
    ARM_BF16,
    AVX2,
    AVX512,
    AVX512_BF16,
    AVX512_FP16,
    OTHER,
    PROCESSORS,
    X86,
    DeviceFacts,
    commit_of,
    cpu_flags,
    processor_of,
    read_facts,
    read_machine,
    read_processor,
    units,
    weighed,
)
from halfstep.train.processes import collectives
from halfstep.train.processes.collectives import agreed
from halfstep.version import __version__

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")
MPS = DeviceFacts("mps")
SAPPHIRE_RAPIDS = frozenset({"avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"})
ZEN_4 = frozenset({"avx2", "avx512_f", "avx512_bf16"})
ICE_LAKE = frozenset({"avx2", "avx512_f", "avx512_vnni"})


def cuda(major, minor):
    return DeviceFacts("cuda", capability=(major, minor))


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, AMX_FP16),
        ("x86_64", SAPPHIRE_RAPIDS | {"amx_fp16"}, AMX_FP16),
        ("x86_64", SAPPHIRE_RAPIDS - {"avx512_fp16"}, AMX),
        ("x86_64", SAPPHIRE_RAPIDS - {"amx_tile"}, AVX512_FP16),
        ("x86_64", SAPPHIRE_RAPIDS - {"amx_bf16"}, AVX512_FP16),
        ("AMD64", ZEN_4, AVX512_BF16),
        ("x86_64", ICE_LAKE, AVX512),
        ("x86_64", frozenset({"avx2", "f16c"}), AVX2),
        ("x86_64", frozenset(), X86),
        ("aarch64", frozenset({"bf16", "fp16_arith"}), ARM_BF16),
        ("aarch64", frozenset({"sve_bf16"}), ARM_BF16),
        ("arm64", frozenset({"fp16_arith"}), ARM),
        ("riscv64", frozenset({"avx512_bf16"}), OTHER),
    ],
)
def test_flags_make_a_class(architecture, flags, expected):
    assert processor_of(architecture, flags, vectors="AVX512") is expected


@pytest.mark.parametrize("flags", [SAPPHIRE_RAPIDS, ZEN_4, ICE_LAKE])
def test_what_torch_is_held_to_is_the_class(flags):
    assert processor_of("x86_64", flags, vectors="AVX2") is AVX2  # ATEN_CPU_CAPABILITY=avx2
    assert processor_of("x86_64", flags, vectors="DEFAULT") is X86
    assert processor_of("x86_64", flags, vectors="AVX512", low_products=False) is AVX512  # ONEDNN_MAX_CPU_ISA=AVX2
    assert processor_of("x86_64", flags, vectors="AVX2", low_products=False) is AVX2


@pytest.mark.slow
def test_a_variable_of_the_environment_that_holds_torch_back_makes_another_class():
    code = "from halfstep.machine import read_processor; print(read_processor().name)"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this CPU has nothing that could be held back")
    environment = {"ATEN_CPU_CAPABILITY": "default", "PATH": "", "PYTHONPATH": str(Path(halfstep.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "x86"


def test_this_processor_has_a_class_and_torch_names_the_flags():
    known = torch.cpu.get_capabilities()
    names = {"x86_64": ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_tile"), "aarch64": ("bf16", "sve_bf16")}
    assert read_processor().name in {row.name for row in PROCESSORS}
    if known["architecture"] not in names:
        pytest.skip(f"no flags are known for {known['architecture']}")
    assert all(isinstance(known[name], bool) for name in names[known["architecture"]])


def test_each_row_has_a_name_of_its_own_and_says_where_it_was_measured():
    assert len({row.name for row in PROCESSORS}) == len(PROCESSORS)
    assert all(row.source for row in PROCESSORS)


@pytest.mark.parametrize("row", PROCESSORS, ids=lambda row: row.name)
def test_limits_ascend_in_width_and_come_down_in_length(row):
    widths, lengths = zip(*row.wide_backward, strict=True)
    assert list(widths) == sorted(set(widths))
    assert list(lengths) == sorted(lengths, reverse=True)


def test_a_row_has_figures_where_its_source_says_that_it_was_measured():
    known = {row: (row.bf16 is not None, row.fp16 is not None) for row in PROCESSORS}
    measured = [AMX_FP16, AVX512_BF16, AVX512, AVX2]
    assert [known.pop(row) for row in measured] == 4 * [(True, True)]
    assert set(known.values()) == {(False, False)}
    assert all(row.source.startswith(("not measured", "taken from")) for row in known)


def test_a_product_and_a_convolution_are_weighed_by_their_time():
    assert weighed(3.0, 1.5) == 2.0  # 1/3 and 2/3 of a second, after one of each
    assert weighed(20.0, 0.2) < 0.4
    assert weighed(20.0, 0.0) == weighed(0.0, 20.0) == 0.0  # no kernel


@pytest.mark.parametrize(
    ("row", "lacking"),
    [(X86, ["bf16", "fp16"]), (AMX, ["bf16", "fp16"]), (AMX_FP16, []), (AVX2, []), (AVX512_BF16, [])],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_row_lacks_is_measured_once_and_says_so(row, lacking, monkeypatch, asked_here):
    measured = []
    monkeypatch.setattr(machine, "table_row", lambda: row)
    monkeypatch.setattr(machine, "measure_gains", lambda dtypes: measured.append(dtypes) or [3.0 for _ in dtypes])
    found = [read_processor() for _ in range(2)]
    assert found[0] == found[1]
    assert measured == (
        [[getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name]) for name in lacking]] if lacking else []
    )
    assert {name for name in ("bf16", "fp16") if getattr(found[0], name) == 3.0} == set(lacking)
    assert found[0].wide_backward == row.wide_backward
    assert ("measured on this machine" in found[0].source) is bool(lacking)
    assert found[0].source.endswith(row.source)


@pytest.fixture
def asked_here():
    """Has what this processor lacks in the table measured anew."""
    measure = machine._measured
    if hasattr(measure, "cache_clear"):
        measure.cache_clear()
        yield
        measure.cache_clear()
    else:
        pytest.skip("--processor measures nothing")


def test_saved_measurements_go_before_what_would_be_measured(monkeypatch, asked_here):
    row = machine.table_row()
    kept = saved.Saved(X86.name, machine.model_name(), str(torch.__version__), 2.5, 0.5, (), "2026-01-01")
    monkeypatch.setattr(machine, "table_row", lambda: X86)
    monkeypatch.setattr(machine, "measure_gains", lambda dtypes: pytest.fail("it measured"))
    monkeypatch.setattr(machine, "read_saved", lambda *_: kept)
    assert (read_processor().bf16, read_processor().fp16) == (2.5, 0.5)
    assert row is not X86


class Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        pytest.fail(f"{func} reached the caller's mode")


def test_what_is_measured_is_out_of_reach_of_the_caller_and_leaves_nothing(monkeypatch):
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.get_num_threads()
    with Kernels(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
        found = machine.measure_gains([torch.bfloat16, torch.float16])
        assert torch.get_num_threads() == before[1]
    assert len(found) == 2
    assert all(gain >= 0.0 for gain in found)
    assert torch.equal(torch.get_rng_state(), before[0])


def clock(monkeypatch, costs):
    """Has each call take the milliseconds that `costs` gives it, by whether it is large and whether it is native."""
    now, calls = [0.0], []

    def call(first, second):
        native = first.dtype is not torch.float32
        calls.append((len(first) > 96, native))
        cost = costs[calls[-1]]
        if cost is None:
            raise RuntimeError("no kernel")
        now[0] += cost
        return first

    monkeypatch.setattr(machine, "_CLOCK", lambda: now[0])
    return call, now, calls


@pytest.mark.parametrize(
    ("costs", "gain", "most"),
    [
        ({(False, False): 1, (False, True): 70}, 1 / 70, 2 * 71),  # one call that is not timed, one that is
        ({(False, False): 1, (False, True): 1, (True, False): 6, (True, True): 2}, 3.0, 4 * 10),
        ({(False, False): 1, (False, True): 1, (True, False): 6, (True, True): 60}, 0.1, 4 * 2 + 2 * 66),
        ({(False, False): 1, (False, True): None}, 0.0, 0),
    ],
    ids=["clearly slow", "fast", "slow at size", "no kernel"],
)
def test_the_least_of_a_few_calls_counts_and_what_is_clearly_slow_is_called_twice(costs, gain, most, monkeypatch):
    call, now, calls = clock(monkeypatch, costs)
    found = machine._gain(call, machine._matrices, torch.bfloat16)
    assert found == pytest.approx(gain)
    assert now[0] <= most
    assert max(calls.count(each) for each in set(calls)) <= 4


def test_the_units_are_named():
    assert units(BF16, DeviceFacts("cpu", processor=AVX512_BF16)) == "x86 AVX512-BF16"
    assert units(BF16, DeviceFacts("cpu", processor=AVX512)) is None
    assert units(FP16, DeviceFacts("cpu", processor=AMX_FP16)) is None
    assert units(BF16, cuda(9, 0)) == "sm90"


@pytest.mark.parametrize(
    ("fmt", "last_without", "first_with"),
    [
        (FP16, (6, 2), (7, 0)),
        (BF16, (7, 5), (8, 0)),
        (TF32, (7, 5), (8, 0)),
        (E4M3, (8, 6), (8, 9)),
        (E5M2, (8, 6), (8, 9)),
    ],
)
def test_a_gpu_has_units_from_its_first_capability_on(fmt, last_without, first_with):
    assert units(fmt, cuda(*last_without)) is None
    assert units(fmt, cuda(*first_with)) is not None
    assert units(fmt, cuda(10, 0)) is not None


@pytest.mark.parametrize("facts", [DeviceFacts("cpu"), cuda(5, 2), MPS, DeviceFacts("xpu")])
def test_fp32_is_computed_everywhere(facts):
    assert units(FP32, facts) is not None


def test_apple_silicon_has_both_16_bit_formats_and_no_8_bit_ones():
    assert [units(fmt, MPS) is not None for fmt in (BF16, FP16, E4M3, TF32)] == [True, True, False, False]


def test_nothing_is_claimed_of_an_unknown_device_whatever_the_cpu_beside_it():
    assert units(BF16, DeviceFacts("xpu", processor=AMX_FP16)) is None


def test_sizes_and_absent_sets_are_no_flags():
    found = cpu_flags(
        {"avx2": True, "amx_bf16": False, "l1d_cache_size": 1, "architecture": "x86_64", "cpu_name": "AMD"}
    )
    assert found == {"avx2"}


def test_the_facts_of_a_device_hold_the_class_of_the_cpu(each_processor):
    assert read_facts(torch.device("cpu")) == DeviceFacts("cpu", processor=each_processor)
    assert read_facts(torch.device("meta")) == DeviceFacts("meta", processor=each_processor)
    fast = ("fp32", "bf16") if each_processor in (AMX_FP16, AVX512_BF16) else ("fp32",)
    assert read_machine(torch.device("cpu")).fast == fast


@pytest.mark.gpu
def test_the_capability_of_a_gpu_is_read():
    facts = read_facts(torch.device("cuda"))
    assert facts.kind == "cuda"
    assert facts.capability == torch.cuda.get_device_capability()


def test_it_names_the_processor_and_the_versions():
    found = read_machine(torch.device("cpu"))
    assert found.device == "cpu"
    assert found.processor
    assert found.cores >= 1
    assert found.halfstep == __version__


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A repository with a committed package in it."""
    file = tmp_path / "package" / "machine.py"
    file.parent.mkdir()
    file.write_text("one", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return file


@needs_git
def test_the_commit_says_whether_files_of_the_package_differ_from_it(repository):
    clean = commit_of(repository)
    assert clean is not None
    assert len(clean) == 12
    (repository.parents[1] / "notes").write_text("of the user's", encoding="utf-8")
    (repository.parent / "left.log").write_text("beside the package's files", encoding="utf-8")
    assert commit_of(repository) == clean
    repository.write_text("two", encoding="utf-8")
    assert commit_of(repository) == f"{clean}-dirty"
    git(repository.parent, "add", ".")
    assert commit_of(repository) == f"{clean}-dirty"


@needs_git
def test_one_process_tells_the_commit(repository, monkeypatch):
    commands = []
    start = subprocess.run
    monkeypatch.setattr(
        machine.subprocess, "run", lambda *args, **kwargs: commands.append(args) or start(*args, **kwargs)
    )
    assert commit_of(repository) is not None
    assert len(commands) == 1


@needs_git
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("depth", ["venv/lib/site-packages/halfstep", "halfstep"])
def test_a_package_in_somebody_elses_repository_has_no_commit(repository, ignored, depth):
    installed = repository.parents[1] / depth / "machine.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("one", encoding="utf-8")
    if ignored:
        (repository.parents[1] / ".gitignore").write_text(depth.partition("/")[0], encoding="utf-8")
    assert commit_of(installed) is None
    assert commit_of(repository) is not None


@needs_git
def test_a_file_that_is_not_tracked_in_a_folder_that_is_has_no_commit(repository):
    file = repository.with_name("other.py")
    file.write_text("two", encoding="utf-8")
    assert commit_of(file) is None


@needs_git
def test_a_repository_without_a_commit_has_none(tmp_path):
    git(tmp_path, "init", "--quiet")
    file = tmp_path / "machine.py"
    file.write_text("one", encoding="utf-8")
    git(tmp_path, "add", ".")
    assert commit_of(file) is None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    assert commit_of(tmp_path / "machine.py") is None
    assert commit_of(tmp_path / "nowhere" / "machine.py") is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path / "machine.py") is None


@needs_git
@pytest.mark.slow
def test_the_run_log_of_an_installed_halfstep_has_not_the_commit_of_the_project_around_it(repository):
    site = repository.parents[1] / ".venv" / "lib"
    shutil.copytree(Path(halfstep.__file__).parent, site / "halfstep", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import torch, halfstep\n"
        "halfstep.initialize(torch.nn.Linear(1, 1), None, 'O0', sinks=[halfstep.RunLog('run.jsonl')]).close()\n"
        "print(halfstep.__file__, halfstep.read_log('run.jsonl').machine.commit)"
    )
    environment = {"PATH": str(Path(shutil.which("git")).parent), "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(site / "halfstep" / "__init__.py"), "None"]


# ---- agreed by all processes


def test_without_other_processes_the_facts_are_this_machine_s():
    facts = DeviceFacts("cpu", processor=AVX2)
    assert agreed(facts) is facts


def test_what_the_first_process_found_is_what_all_decide_by(process_group):
    first, later = (DeviceFacts("cpu", processor=row) for row in (AVX2, AMX_FP16))
    gpu = DeviceFacts("cuda", (9, 0), AMX_FP16)
    assert agreed(first) is first
    assert agreed(gpu) is gpu
    found = agreed(later).processor
    assert (found.name, found.bf16, found.fp16) == (AMX_FP16.name, AVX2.bf16, AVX2.fp16)
    assert found.wide_backward == AVX2.wide_backward
    assert found.source.startswith("measured in another process of this run")
    assert agreed(first) is first


def test_a_store_that_is_gone_leaves_each_process_its_own(process_group, monkeypatch):
    def gone():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(collectives, "default_store", gone)
    facts = DeviceFacts("cpu", processor=AVX2)
    assert agreed(facts) is facts


def test_a_session_decides_by_what_is_agreed(process_group, on_processor):
    emulated = []
    for row in (AVX2, AVX512_BF16):
        on_processor(row)
        session = halfstep.initialize(torch.nn.Linear(2, 2), None, "O1", low="bf16")
        emulated.append(session.state_dict()["emulate"])
        session.close()
    assert emulated == [True, True]


FAULTS = """
import resource, torch
from torch import nn
import halfstep

model = nn.Linear(8, 8)
halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16", emulate={emulate})
for turn in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(4 * 2**20) for _ in range(4)]
    del made
asked = halfstep.machine.keep_freed_memory.cache_info().currsize
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, asked and int(halfstep.machine.keep_freed_memory()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("emulate", "variables", "kept"), [(True, {}, True), (False, {}, False), (True, {"MALLOC_ARENA_MAX": "8"}, False)]
)
def test_freed_memory_is_kept_where_products_are_emulated_unless_a_variable_decides(emulate, variables, kept):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS.format(emulate=emulate)]
    ran = subprocess.run(command, env=own | variables, capture_output=True, text=True, check=True)
    faults, does = map(int, ran.stdout.split())
    assert does == kept
    assert faults < 1000 or not kept  # of the 16,384 pages of 64 MiB
