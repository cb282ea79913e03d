"""The library beside the package: found by processor, trusted by its name, and done without where there is none."""

import gzip
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import hatch_build
from halfstep.lab.doctor.doctor import read_tools
from halfstep.train.kernels import library, native
from halfstep.train.optim.implementations import IMPLEMENTATIONS

ROOT = Path(hatch_build.__file__).parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the package's kernels, without a library, that is searched in place of it."""
    here = tmp_path / "halfstep" / "train" / "kernels"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "halfstep" / "train" / "kernels", here, ignore=ignored)
    shutil.copy(ROOT / "halfstep" / "version.py", here.parents[1])
    monkeypatch.setattr(library, "_HERE", here)
    monkeypatch.setattr(hatch_build, "KERNELS", here)
    for cached in (library.find, library.load):
        cached.cache_clear()
    yield here
    for cached in (library.find, library.load):
        cached.cache_clear()


def put(folder, name, content):
    path = folder / f"loops-{name}-{library.stamp(content)}.so"
    path.write_bytes(content)
    return path


def as_processor(monkeypatch, machine, capability="DEFAULT"):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    library.find.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "found"),
    [
        ("x86_64", "AVX512", "x86-64-v4"),
        ("AMD64", "AVX2", "x86-64-v3"),
        ("x86_64", "DEFAULT", None),
        ("aarch64", "DEFAULT", "aarch64"),
        ("arm64", "SVE256", "aarch64"),
    ],
)
def test_the_best_for_the_processor_is_found(folder, monkeypatch, machine, capability, found):
    made = {name: put(folder, name, name.encode()) for name in ("x86-64-v3", "x86-64-v4", "aarch64")}
    as_processor(monkeypatch, machine, capability)
    assert library.find() == made.get(found)
    made["x86-64-v4"].unlink()
    as_processor(monkeypatch, machine, capability)
    assert library.find() == made.get("x86-64-v3" if found == "x86-64-v4" else found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:5]),  # as a full disk leaves it
        lambda path: path.write_bytes(b"another's"),
        lambda path: (path.parent / "step.cpp").write_text("// changed since"),
        lambda path: (path.parents[2] / "version.py").write_text("__version__ = '9'"),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "foreign", "other sources", "another version", "none"],
)
def test_what_was_not_built_from_these_sources_is_not_loaded_and_said_once(folder, monkeypatch, caplog, spoil):
    as_processor(monkeypatch, "x86_64", "AVX2")
    path = put(folder, "x86-64-v3", b"a library of these sources")
    assert library.find() == path
    spoil(path)
    library.find.cache_clear()
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert library.load() is None
        assert library.load() is None
    (said,) = caplog.messages
    assert "no compiled loops here: the optimizer steps with torch's kernels" in said
    assert "python hatch_build.py" in said
    assert read_tools(torch.device("cpu"))["compiled loops"].startswith("none: ")


def test_what_does_not_load_is_done_without(folder, monkeypatch, caplog):
    as_processor(monkeypatch, "x86_64", "AVX2")
    put(folder, "x86-64-v3", b"no library")
    assert library.load() is None
    assert "Reason: " in caplog.text


def test_without_a_library_the_step_takes_another_implementation(folder, monkeypatch):
    monkeypatch.setattr(native, "loops", library.load)
    assert not native.can_read([torch.ones(3)])
    assert next(iter(IMPLEMENTATIONS)) == "native"  # the first, where it fits


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_this_checkout_has_its_loops():
    """Or every test that asks for them would be skipped without a word."""
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert library.find() is not None, library.MEND


@pytest.mark.skipif(library.find() is None or platform.libc_ver()[0] != "glibc", reason="no loops, or not for glibc")
def test_wheels_for_manylinux_may_have_its_loops():
    needed = re.findall(rb"GLIBC_2\.(\d+)", library.find().read_bytes())
    assert 0 < max(map(int, needed)) <= 28


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_it_is_built_once_replaces_what_is_stale_and_says_why_it_is_not(folder, monkeypatch):
    for source in folder.glob("*.cpp"):
        source.write_text("")  # test_native.py builds them as they are
    monkeypatch.setattr(hatch_build, "CLASSES", {"x86_64": {"x86-64-v3": []}})
    as_processor(monkeypatch, "x86_64", "AVX2")
    stale = folder / "loops-x86-64-v3-0123456789abcdef.so"
    stale.write_bytes(b"stale")
    assert hatch_build.build() == ""
    (made,) = folder.glob("*.so")
    library.find.cache_clear()
    assert library.find() == made
    before = made.stat().st_mtime_ns
    assert hatch_build.build() == ""
    assert made.stat().st_mtime_ns == before
    library.find.cache_clear()
    (folder / "step.cpp").write_text("no C++")
    assert "error" in hatch_build.build()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler found" in hatch_build.build()
    monkeypatch.setattr(hatch_build, "CLASSES", {})
    assert "no loops are written for" in hatch_build.build()


def test_the_hook_tags_the_wheel_for_the_platform_where_loops_were_built(monkeypatch):
    said = []
    hook = object.__new__(hatch_build.CustomBuildHook)
    monkeypatch.setattr(type(hook), "app", type("App", (), {"display_warning": said.append})(), raising=False)
    monkeypatch.setattr(hatch_build, "fetch", lambda: "")  # there may be no npm
    for failed, version, expected in (
        ("", "standard", True),
        ("", "editable", False),
        ("no compiler", "standard", False),
    ):
        monkeypatch.setattr(hatch_build, "build", lambda failed=failed: failed)
        data = {}
        hook.initialize(version, data)
        assert (data.get("pure_python") is False and data["tag"].startswith("py3-none-")) is expected
    assert said == ["halfstep's compiled loops were not built: no compiler"]


@pytest.mark.parametrize(
    ("origin", "page"),
    [
        ("https://example.org/own/halfstep.git", "https://example.org/own/halfstep"),
        ("https://somebody:secret@example.org/own/halfstep", "https://example.org/own/halfstep"),
        ("git@example.org:own/halfstep.git", "https://example.org/own/halfstep"),
        ("ssh://git@example.org/own/halfstep/", "https://example.org/own/halfstep"),
        ("/home/own/halfstep", ""),
        ("../halfstep.git", ""),
        ("", ""),
    ],
)
def test_the_wheel_names_the_pages_of_the_clones_origin(monkeypatch, tmp_path, origin, page):
    monkeypatch.setattr(hatch_build, "KERNELS", tmp_path / "halfstep" / "train" / "kernels")
    assert hatch_build.address() == ""  # a copy, whatever is around it
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(hatch_build.subprocess, "run", lambda *args, **options: Mock(stdout=f"{origin}\n"))
    metadata = {}
    object.__new__(hatch_build.CustomMetadataHook).update(metadata)
    assert metadata["urls"].get("Repository", "") == page
    assert metadata["urls"].get("Issues") == (f"{page}/issues" if page else None)
    monkeypatch.setattr(hatch_build.subprocess, "run", Mock(side_effect=FileNotFoundError))
    assert hatch_build.address() == ""


def test_it_runs_as_a_script_without_torch():
    if platform.machine().lower() not in hatch_build.CLASSES or shutil.which("g++") is None:
        pytest.skip("nothing is built here")
    done = subprocess.run([sys.executable, "-I", ROOT / "hatch_build.py"], capture_output=True, text=True, check=True)
    assert "loops-" in done.stdout


def test_what_npm_has_is_taken_if_it_is_what_was_tried(tmp_path, monkeypatch):
    names, report, packed = ("plotly-cartesian.min.js", "LICENSE"), tmp_path / "report", tmp_path / "plotly.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in names:
            (tmp_path / name).write_text(name)
            archive.add(tmp_path / name, f"package/{name}")
    report.mkdir()
    (report / "plotly-0.min.js.gz").touch()  # of an earlier release
    monkeypatch.setattr(hatch_build, "REPORT", report)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert hatch_build.fetch() == "there is no npm"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: shutil.copy(packed, command[3].partition("=")[2]))
    assert hatch_build.fetch().endswith("is not what halfstep was tried with")
    assert [path.name for path in report.iterdir()] == ["plotly-0.min.js.gz"]
    monkeypatch.setattr(hatch_build, "SHA256", hashlib.sha256(packed.read_bytes()).hexdigest())
    assert hatch_build.fetch() == ""
    script, terms = report / f"plotly-{hatch_build.RELEASE}.min.js.gz", report / "plotly-LICENSE"
    assert sorted(report.iterdir()) == [script, terms]
    assert (gzip.decompress(script.read_bytes()), terms.read_bytes()) == (names[0].encode(), names[1].encode())
