"""Compiling and keeping: what is loaded and from where, compilers that fail or hang, several processes at once."""

import ctypes
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from halfstep.errors import HalfstepError
from halfstep.kernels import build, native, stats

pytestmark = [
    pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(sys.platform == "win32", reason="owners, modes and process groups are those of POSIX"),
]

REAL = build.find_compiler()
ROOT = Path(__file__).parents[2]
# Loads a library and prints what its function returns, in a process that does not take the time to import torch.
LOAD = f"""
import logging, sys, types
from pathlib import Path
logging.basicConfig(format="%(message)s")
package = sys.modules["halfstep"] = types.ModuleType("halfstep")
package.__path__ = [{str(ROOT / "halfstep")!r}]
from halfstep.kernels import build
source = Path(sys.argv[1])
loaded = build.library(source)
print(getattr(loaded, source.stem)() if loaded else loaded)
"""


class Machine:
    """A home, a temporary folder and tools of a test's own."""

    def __init__(self, room, patch):
        self.room, self.patch = room, patch
        self.home, self.temporary, self.tools = (room / name for name in ("home", "temporary", "tools"))
        for folder in (self.home, self.temporary, self.tools):
            folder.mkdir()
            folder.chmod(0o755)
        self.cache = self.home / ".cache" / "halfstep"
        patch.setenv("HOME", str(self.home))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setenv("TMPDIR", str(self.temporary))
        patch.setattr(tempfile, "tempdir", str(self.temporary))
        patch.setattr(build, "_GIVEN_UP", set(), raising=False)
        self.runs = room / "runs"

    def source(self, name, number):
        path = self.room / f"{name}.cpp"
        path.write_text(f'extern "C" int {name}() {{ return {number}; }}')
        return path

    def load(self, source, **options):
        """Loads a library as a new process would."""
        build.library.cache_clear()
        return build.library(source, **options)

    def compiler(self, *lines):
        """Puts a compiler before the real one: a shell script, which counts its runs but for `--version`."""
        path = self.tools / "g++"
        count = f'[ "$1" = --version ] || echo run >> {self.runs}'
        path.write_text("\n".join(["#!/bin/sh", count, *lines, f'exec {REAL} "$@"']))
        path.chmod(0o755)
        self.patch.setenv("PATH", str(self.tools), prepend=os.pathsep)

    def compilations(self):
        return len(self.runs.read_text().split()) if self.runs.exists() else 0

    def start(self, source, **options):
        return subprocess.Popen(
            [sys.executable, "-c", LOAD, str(source)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            **options,
        )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    yield Machine(tmp_path, monkeypatch)
    build.library.cache_clear()


@pytest.fixture
def open_machine(monkeypatch):
    """The same in a folder that other users can read, as pytest's are not."""
    system = Path(tempfile.gettempdir())
    if not system.stat().st_mode & 0o007:
        pytest.skip("the temporary folder is closed to others")
    with tempfile.TemporaryDirectory() as room:
        os.chmod(room, 0o755)
        yield Machine(Path(room), monkeypatch)
    build.library.cache_clear()


def kept(folder):
    return [path for path in folder.iterdir() if path.suffix == ".so"]


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def ends(pid):
    """Returns whether a process has ended, or ends soon."""
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
    return True


@pytest.fixture
def planted(machine):
    """A source that returns 1, and a library that returns 666 under its name in the cache folder."""
    source = machine.source("one", 1)
    assert machine.load(source).one() == 1
    (path,) = kept(machine.cache)
    harmful = machine.room / "harmful.so"
    other = machine.source("harmful", 0)
    other.write_text('extern "C" int one() { return 666; }')
    subprocess.run([REAL, "-shared", "-fPIC", str(other), "-o", str(harmful)], check=True)
    digest = hashlib.sha256(harmful.read_bytes()).hexdigest()[:16]
    path.unlink()
    return source, harmful, machine.cache / f"{path.stem.rpartition('-')[0]}-{digest}.so"


class TestPlanted:
    """A library that another user can have put under the right name, with the right digest, is not loaded."""

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
    def test_in_a_folder_that_others_can_write_to(self, machine, planted, mode, caplog):
        source, harmful, place = planted
        shutil.copy(harmful, place)
        machine.cache.chmod(mode)
        assert machine.load(source).one() == 1
        assert machine.load(machine.source("two", 2)).two() == 2
        assert len(caplog.records) == 1
        assert f"chmod go-w {machine.cache}" in caplog.text

    def test_in_a_folder_that_belongs_to_another(self, machine, planted, monkeypatch, caplog):
        source, harmful, place = planted
        shutil.copy(harmful, place)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        loaded = machine.load(source)
        assert loaded is None or loaded.one() == 1  # nothing here belongs to that user, so that all may be refused
        assert "belongs to the user with id" in caplog.text

    @pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
    def test_as_a_file_that_others_can_write_to(self, machine, planted, mode):
        source, harmful, place = planted
        shutil.copy(harmful, place)
        place.chmod(mode)
        assert machine.load(source).one() == 1
        assert not place.exists()

    def test_as_a_link(self, machine, planted):
        source, harmful, place = planted
        place.symlink_to(harmful)
        assert machine.load(source).one() == 1
        assert not place.is_symlink()

    def test_in_a_folder_that_lies_in_one_open_to_others(self, open_machine, caplog):
        machine = open_machine
        source = machine.source("three", 3)
        assert machine.load(source).three() == 3
        (machine.home / ".cache").chmod(0o777)
        (path,) = kept(machine.cache)
        path.touch()
        opened = machine.load(source)
        assert Path(opened._name).is_relative_to(machine.temporary)
        assert f"chmod go-w {machine.home / '.cache'}" in caplog.text

    def test_what_lies_in_a_closed_folder_is_safe(self, machine, caplog):
        source = machine.source("four", 4)
        machine.cache.parent.mkdir()
        machine.cache.parent.chmod(0o777)
        machine.home.chmod(0o700)
        assert Path(machine.load(source)._name).is_relative_to(machine.cache)
        assert not caplog.records

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away")
    def test_nothing_is_made_in_the_home_of_another(self, open_machine, caplog):
        machine = open_machine
        os.chown(machine.home, 12345, 12345)
        assert machine.load(machine.source("five", 5)).five() == 5
        assert list(machine.home.iterdir()) == []
        assert f"{machine.home} belongs to the user with id 12345" in caplog.text
        assert "chown" not in caplog.text  # root should not take it

    def test_a_cache_folder_that_is_a_link_to_ones_own_is_followed(self, machine):
        elsewhere = machine.room / "elsewhere"
        elsewhere.mkdir()
        machine.cache.parent.symlink_to(elsewhere)
        assert Path(machine.load(machine.source("six", 6))._name).is_relative_to(elsewhere)


class TestKept:
    @pytest.mark.parametrize("kind", ["fifo", "folder", "dangling link"])
    def test_what_is_no_file_is_not_waited_for(self, machine, planted, kind):
        source, _, place = planted
        {
            "fifo": os.mkfifo,
            "folder": lambda path: (path / "inside").mkdir(parents=True),
            "dangling link": lambda path: path.symlink_to(machine.room / "nothing"),
        }[kind](place)
        process = machine.start(source)
        try:
            assert process.communicate(timeout=60)[0].strip() == "1"
        finally:
            process.kill()
            process.communicate()

    def test_a_folder_in_the_place_of_the_library_is_no_reason_to_compile_again(self, machine):
        source = machine.source("one", 1)
        machine.load(source)
        (path,) = kept(machine.cache)
        path.unlink()
        (path / "inside").mkdir(parents=True)
        machine.compiler()
        machine.load(source)  # this compiler's file has another name
        (other,) = [place for place in kept(machine.cache) if place.is_file()]
        other.unlink()
        (other / "inside").mkdir(parents=True)
        for _ in range(2):
            assert machine.load(source).one() == 1
        assert machine.compilations() == 2

    def test_halves_of_a_killed_process_go(self, machine):
        source = machine.source("two", 2)
        machine.load(source)
        (path,) = kept(machine.cache)
        path.unlink()
        half = machine.cache / f"{path.stem.rpartition('-')[0]}-half.part"
        half.touch()
        assert machine.load(source).two() == 2
        assert not half.exists()

    @pytest.mark.parametrize("value", ["relative/cache", ""])
    def test_a_relative_cache_folder_is_as_none(self, machine, value, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert Path(machine.load(machine.source("three", 3))._name).parent == machine.cache

    def test_an_absolute_cache_folder_is_used(self, machine, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(machine.room / "cache"))
        assert Path(machine.load(machine.source("four", 4))._name).parent == machine.room / "cache" / "halfstep"

    def test_without_a_home_it_is_compiled_once(self, machine, monkeypatch, caplog):
        def fail():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", fail)
        machine.compiler()
        for _ in range(2):
            assert machine.load(machine.source("five", 5)).five() == 5
        assert machine.compilations() == 1
        assert len(caplog.records) == 1

    def test_a_home_that_cannot_be_written_to_compiles_once(self, machine):
        machine.home.rmdir()
        machine.home.touch()  # nobody, not even root, can make a folder in a file
        machine.compiler()
        for _ in range(2):
            assert machine.load(machine.source("six", 6)).six() == 6
        assert machine.compilations() == 1

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    def test_a_full_drive_compiles_once(self, machine, monkeypatch, caplog, code):
        def replace(old, new, move=os.replace):
            if Path(new).is_relative_to(machine.home):
                raise OSError(code, os.strerror(code), str(new))
            move(old, new)

        monkeypatch.setattr(os, "replace", replace)
        machine.compiler()
        for _ in range(2):
            assert machine.load(machine.source("seven", 7)).seven() == 7
        assert machine.compilations() == 1
        assert len(caplog.records) == 1
        assert os.strerror(code) in caplog.text
        assert not list(machine.cache.glob("*.part"))

    def test_a_home_that_is_noexec_compiles_once_and_says_so_once(self, machine, monkeypatch, caplog):
        def load(path, opened=ctypes.CDLL):
            if Path(path).is_relative_to(machine.home):
                raise OSError(f"{path}: failed to map segment from shared object")
            return opened(path)

        monkeypatch.setattr(ctypes, "CDLL", load)
        machine.compiler()
        for _ in range(2):
            assert machine.load(machine.source("eight", 8)).eight() == 8
        assert machine.load(machine.source("nine", 9)).nine() == 9
        assert machine.compilations() == 2
        assert len(caplog.records) == 1
        assert f"{machine.cache} cannot be loaded (failed to map segment from shared object)" in caplog.text
        (folder,) = (path for path in machine.temporary.iterdir() if kept(path))
        assert folder.stat().st_mode & 0o777 == 0o700


HANGS = {
    "at once": "sleep 1000",
    "without listening": "trap '' TERM INT HUP; while true; do sleep 1; done",
    "in a child": "sleep 1000 & echo $! >> {pids}; wait",
}


class TestTime:
    """A compiler that does not end is stopped, said once, and left alone."""

    @pytest.mark.parametrize("hang", HANGS)
    @pytest.mark.parametrize("version", ["", '[ "$1" = --version ] && echo fake && exit'])
    def test_a_compiler_that_hangs(self, machine, caplog, hang, version):
        pids = machine.room / "pids"
        machine.compiler(version, f"echo $$ > {pids}", HANGS[hang].format(pids=pids))
        assert machine.load(machine.source("one", 1), limit=0.5) is None
        assert machine.load(machine.source("two", 2), limit=0.5) is None
        assert len(caplog.records) == 1
        assert "did not finish in time" in caplog.text
        assert all(ends(pid) for pid in pids.read_text().split())
        assert machine.compilations() == (1 if version else 0)
        assert not list(machine.temporary.glob("halfstep-*/*.so"))

    def test_a_compiler_that_asks_gets_no_answer(self, machine):
        machine.compiler("read answer")
        process = machine.start(machine.source("three", 3), stdin=subprocess.PIPE)
        try:
            process.wait(60)
            assert process.stdout.read().strip() == "3"
        finally:
            process.kill()
            process.communicate()

    def test_of_much_the_end_is_kept(self, machine):
        printed = build._run(["sh", "-c", "yes | head -c 20000000; echo end"], time.monotonic() + 60, str(machine.room))
        assert len(printed) <= 2**18
        assert printed.endswith("y\nend\n")

    def test_a_server_that_holds_the_pipe_is_not_waited_for(self, machine):
        pids = machine.room / "pids"
        machine.compiler(f'[ "$1" = --version ] || {{ sleep 1000 & echo $! > {pids}; }}')
        try:
            assert machine.load(machine.source("four", 4), limit=30).four() == 4
        finally:
            os.kill(int(pids.read_text()), signal.SIGKILL)


class TestProcesses:
    def test_of_eight_processes_one_compiles(self, machine):
        machine.compiler('[ "$1" = --version ] || sleep 1')  # until all of them look for the library
        source = machine.source("one", 1)
        processes = [machine.start(source) for _ in range(8)]
        assert [process.communicate(timeout=120) for process in processes] == [("1\n", "")] * 8
        assert machine.compilations() == 1
        assert len(kept(machine.cache)) == 1

    def test_one_that_was_killed_while_compiling_is_not_waited_for(self, machine):
        first = machine.room / "first"
        machine.compiler(f'[ "$1" = --version ] || [ -e {first} ] || {{ echo $$ > {first}; exec sleep 1000; }}')
        source = machine.source("two", 2)
        process = machine.start(source)
        wait_for(lambda: first.exists() and first.read_text().strip())
        process.kill()
        process.communicate()
        try:
            assert machine.load(source).two() == 2
        finally:
            os.kill(int(first.read_text()), signal.SIGKILL)
        assert machine.compilations() == 2

    def test_one_that_does_not_end_is_not_waited_for_for_ever(self, machine, caplog):
        import fcntl

        source = machine.source("three", 3)
        machine.load(source)
        kept(machine.cache)[0].unlink()
        (lock,) = machine.cache.glob("*.lock")
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert machine.load(source, limit=0.2) is None
        assert "another process" in caplog.text
        assert machine.load(source).three() == 3

    @pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_a_drive_without_locks(self, machine, monkeypatch, code, caplog):
        import fcntl

        def flock(file, how):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", flock)
        assert Path(machine.load(machine.source("four", 4))._name).parent == machine.cache
        assert not caplog.records


class TestLayout:
    """What Python repeats of the C++ code by hand is compared when it is loaded."""

    def test_a_field_in_the_place_of_another_is_an_error(self, monkeypatch):
        fields = [
            (field[0].replace("first", "x").replace("second", "first").replace("x", "second"), field[1])
            for field in native._Tensors._fields_
        ]
        swapped = type("_Tensors", (ctypes.Structure,), {"_fields_": fields})
        loops = native._loops()
        monkeypatch.setattr(native, "_Tensors", swapped)
        with pytest.raises(HalfstepError, match=r"disagree about the layout of memory; restart"):
            native.check_structures(loops)

    def test_a_structure_of_another_size_is_an_error(self, monkeypatch):
        fields = [*native._Common._fields_, ("more", ctypes.c_int64)]
        loops = native._loops()
        monkeypatch.setattr(native, "_Common", type("_Common", (ctypes.Structure,), {"_fields_": fields}))
        monkeypatch.setattr(native, "_loops", native._loops.__wrapped__)
        with pytest.raises(HalfstepError, match="Common"):
            native.check_structures(loops)
        with pytest.raises(HalfstepError, match="Common"):
            native._loops()

    def test_columns_in_another_order_are_an_error(self, monkeypatch):
        monkeypatch.setattr(stats, "COUNTS", ("zeros", "count", *stats.COUNTS[2:]))
        with pytest.raises(HalfstepError, match=r"zeros:256\+1 count:257\+1"):
            stats._loops.__wrapped__()


@pytest.mark.usefixtures("machine")
class TestBuild:
    def test_source_that_does_not_compile_is_a_notice(self, tmp_path, caplog, monkeypatch):
        source = tmp_path / "broken.cpp"
        source.write_text("int main( {")
        assert build.library(source) is None
        assert build.library(source) is None
        assert len(caplog.records) == 1
        assert "could not compile broken.cpp" in caplog.text
        assert "error" in caplog.text

    def test_the_result_is_kept_and_made_again_of_another_source(self, machine):
        assert machine.load(machine.source("one", 1)).one() == 1
        assert len(kept(machine.cache)) == 1
        assert machine.load(machine.source("one", 2)).one() == 2

    def test_a_header_that_changed_is_compiled_in(self, tmp_path, monkeypatch):
        source = tmp_path / "five.cpp"
        source.write_text('#include "number.h"\nextern "C" int five() { return kNumber; }')
        (tmp_path / "number.h").write_text("constexpr int kNumber = 5;")
        assert build.library(source).five() == 5
        (tmp_path / "number.h").write_text("constexpr int kNumber = 6;")
        build.library.cache_clear()
        assert build.library(source).five() == 6

    @pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
    def test_a_kept_file_that_is_not_as_it_was_made_is_made_again(self, machine, share):
        source = machine.source("four", 4)
        command = [sys.executable, "-c", LOAD, str(source)]  # a bad file could end the process
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        (path,) = kept(machine.cache)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))] if share < 1 else whole[:-1] + bytes([whole[-1] ^ 1]))
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        (again,) = kept(machine.cache)
        assert again.stem.endswith(hashlib.sha256(again.read_bytes()).hexdigest()[:16])

    def test_a_library_without_its_functions_is_a_notice(self, machine, caplog):
        source = machine.source("six", 6)
        assert build.library(source, "six").six() == 6
        assert build.library(source, "six", "seven") is None
        assert "has no seven" in caplog.text

    def test_a_compiler_may_speak_in_any_encoding(self, machine, caplog):
        machine.compiler("printf '\\351\\n'; printf '\\351\\n' >&2")
        broken = machine.room / "bad.cpp"
        broken.write_text("int main( {")
        assert machine.load(machine.source("eight", 8)).eight() == 8
        assert build.library(broken) is None
        assert "could not compile bad.cpp" in caplog.text

    def test_another_processor_has_a_file_of_its_own(self, machine, monkeypatch):
        source = machine.source("nine", 9)
        for processor in ("one", "another", "one"):
            monkeypatch.setattr(build, "_processor", lambda processor=processor: processor)
            assert machine.load(source).nine() == 9
        assert len(kept(machine.cache)) == 2

    def test_without_a_compiler_training_goes_on_and_says_so_once(self, tmp_path):
        code = (
            "import logging, torch, halfstep; logging.basicConfig(format='%(message)s')\n"
            "model = torch.nn.Linear(4, 4); optimizer = torch.optim.AdamW(model.parameters())\n"
            "session = halfstep.initialize(model, optimizer, 'O2', low='bf16')\n"
            "before = model.weight.detach().clone()\n"
            "for _ in range(3):\n"
            "    optimizer.zero_grad(); session.backward(model(torch.ones(2, 4)).sum()); session.step(max_norm=1.0)\n"
            "assert not torch.equal(model.weight, before)\n"
        )
        environment = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("no C++ compiler found") == 1
