"""Changes the house in small ways, one at a time, and asks whether a test notices: proof for deleted tests.

    python tests/mutants.py halfstep/train/optim --tests tests/optim tests/contracts/test_skip.py --save optim.json
    python tests/mutants.py --again optim.json    after tests were deleted: which mutants live now; exit code 1

A mutant is one condition negated, one comparison or operator swapped, one call left out, one `return None`, inside a
function. The tests run once with coverage contexts; each mutant then meets the tests that run its line, the quick ones
first, in a fork of the process that has collected them, until the first fails or the seconds are over. The changed code
takes the place of the function's own, so that what a test runs in another process is not changed there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import coverage
import pytest
import torch

HOUSE = Path(__file__).resolve().parents[1]
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
Mutant = dict[str, object]  # file, function, at (its place among the mutants of the function), line, what, killed_by


def changes(function: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yields each change of a function: its line, what it is, and what makes it in place."""
    for node in ast.walk(function):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test.lineno, "condition negated", lambda n=node: setattr(n, "test", _not(n.test))
        if isinstance(node, ast.comprehension) and node.ifs:
            yield node.ifs[0].lineno, "condition negated", lambda n=node: n.ifs.__setitem__(0, _not(n.ifs[0]))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield line, "comparison swapped", lambda n=node: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
        if isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield line, "operator swapped", lambda n=node: setattr(n, "op", SWAPS[type(n.op)]())
        if isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)):
            yield line, "return None", lambda n=node: setattr(n, "value", ast.Constant(None))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield line, "call left out", lambda n=node: setattr(n, "value", ast.Constant(None))


def _not(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and the methods of its classes, with their names."""
    inside: list[tuple[str, ast.stmt]] = [("", each) for each in tree.body]
    while inside:
        prefix, node = inside.pop(0)
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            inside += [(f"{prefix}{node.name}.", each) for each in node.body]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
        for at, (line, what, _) in enumerate(changes(function)):
            yield {"file": str(path.relative_to(HOUSE)), "function": name, "at": at, "line": line, "what": what}


def apply(mutant: Mutant) -> bool:
    """Puts the changed code into every function that lives; returns whether there is one."""
    path = HOUSE / str(mutant["file"])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = dict(functions(tree)).get(str(mutant["function"]))
    every = list(changes(function)) if function else []
    if int(str(mutant["at"])) >= len(every) or every[int(str(mutant["at"]))][1] != mutant["what"]:
        return False  # the source is another since the file was written
    every[int(str(mutant["at"]))][2]()
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    fits = [
        code
        for code in _codes(compile(ast.fix_missing_locations(tree), str(path), "exec"))
        if code.co_name == function.name and code.co_firstlineno == first
    ]
    lives = [
        each
        for each in _living()
        if each.__code__.co_filename == str(path)
        and (each.__code__.co_name, each.__code__.co_firstlineno) == (function.name, first)
    ]
    for each in lives:
        each.__code__ = fits[0]
    return bool(lives)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _living() -> Iterator[types.FunctionType]:
    gc.unfreeze()  # what conftest.py froze is not listed
    return (each for each in gc.get_objects() if type(each) is types.FunctionType)


class Mutants:
    """A plugin of pytest that, in place of running the tests, maps them and lets them meet mutants."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.failed, self.lost = options, "", 0
        self.unfit: set[str] = set()  # tests that fail without a mutant

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
            self.unfit.add(report.nodeid)

    def pytest_collection(self) -> None:
        torch.set_num_threads(1)  # conftest.py may have set more, and a fork of a process with threads hangs

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in self._files():
            with contextlib.suppress(ImportError):  # its package is not installed, so no test runs a line of it
                importlib.import_module(".".join(path.relative_to(HOUSE).with_suffix("").parts))
        if self.options.again:
            self._again(session)
        else:
            self._first(session)
        return True

    def _files(self) -> list[Path]:
        if self.options.again:
            return sorted({HOUSE / str(each["file"]) for each in self._known()["mutants"]})
        paths = [Path(each).resolve() for each in self.options.sources]
        return sorted({each for path in paths for each in (path.rglob("*.py") if path.is_dir() else [path])})

    def _known(self) -> dict:
        return json.loads(Path(self.options.again).read_text(encoding="utf-8"))

    def _first(self, session: pytest.Session) -> None:
        lines, seconds = self._map([each for each in session.items if "pool" not in each.fixturenames])
        runs = [each for path in self._files() for each in mutants_of(path) if lines[each["file"], each["line"]]]
        chosen = random.Random(self.options.seed).sample(runs, min(self.options.count, len(runs)))
        items = {each.nodeid: each for each in session.items}
        for number, mutant in enumerate(chosen, 1):
            tests = sorted(lines[mutant["file"], mutant["line"]], key=lambda name: seconds[name])
            mutant["killed_by"] = self._meet(mutant, [items[each] for each in tests])
            _say(f"{number}/{len(chosen)}", mutant)
        survivors = [each for each in chosen if not each["killed_by"]]
        by_line = {f"{file}:{line}": sorted(tests) for (file, line), tests in lines.items() if tests}
        need = {f"{each['file']}:{each['line']}" for each in chosen}
        found = {
            "tests": self.options.tests,
            "mutants": chosen,
            "lines": {k: v for k, v in by_line.items() if k in need},
        }
        found["seconds"] = {name: round(each, 2) for name, each in seconds.items()}
        if self.options.save:
            Path(self.options.save).write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants killed; survivors:", file=sys.stderr)
        for each in survivors:
            _say("  ", each)

    def _again(self, session: pytest.Session) -> None:
        known = self._known()
        items = {each.nodeid: each for each in session.items}
        killed = [each for each in known["mutants"] if each["killed_by"]]
        orphans = [each for each in killed if each["killed_by"] not in ("time", "crash", *items)]
        print(f"{len(orphans)} of {len(killed)} mutants lost the test that killed them", file=sys.stderr)
        for each in orphans:
            tests = [name for name in known["lines"][f"{each['file']}:{each['line']}"] if name in items]
            tests.sort(key=lambda name: known["seconds"][name])
            each["killed_by"] = self._meet(each, [items[name] for name in tests])
            self.lost += not each["killed_by"]
            _say("again", each)
        Path(self.options.again).write_text(json.dumps(known, indent=1), encoding="utf-8")
        print(f"{self.lost} mutants that were killed survive now", file=sys.stderr)

    def _map(self, items: list[pytest.Item]) -> tuple[dict[tuple[object, object], set[str]], dict[str, float]]:
        """Returns the tests that run each line, and the seconds of each test; from a fork."""
        folder = Path(tempfile.mkdtemp())

        def run(_: Callable[[str], None]) -> None:
            cover = coverage.Coverage(
                data_file=str(folder / "data"), source=[str(HOUSE / "halfstep")], config_file=False
            )
            cover.start()
            seconds = {}
            for at, item in enumerate(items):
                cover.switch_context(item.nodeid)
                begin = time.perf_counter()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=(items[at + 1 :] or [None])[0])
                seconds[item.nodeid] = time.perf_counter() - begin
            cover.stop()
            cover.save()
            (folder / "seconds").write_text(json.dumps({"seconds": seconds, "unfit": sorted(self.unfit)}))

        _forked(run, 3 * 3600)
        took = json.loads((folder / "seconds").read_text())
        for name in took["unfit"]:
            print(f"left out, as it fails without a mutant: {name}", file=sys.stderr)
        data = coverage.CoverageData(str(folder / "data"))
        data.read()
        lines: dict[tuple[object, object], set[str]] = defaultdict(set)
        for file in data.measured_files():
            name = str(Path(file).relative_to(HOUSE))
            for line, contexts in data.contexts_by_lineno(file).items():
                lines[name, line] |= {each for each in contexts if each and each not in took["unfit"]}
        return lines, took["seconds"]

    def _meet(self, mutant: Mutant, items: list[pytest.Item]) -> str:
        """Returns the first test that fails under a mutant, "time" or "crash" if it ends so, "" if none noticed."""

        def run(answer: Callable[[str], None]) -> None:
            if not apply(mutant):
                return answer("!there is no such function now")
            end = time.monotonic() + self.options.seconds
            for at, item in enumerate(items):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=(items[at + 1 :] or [None])[0])
                if self.failed or time.monotonic() > end:
                    return answer(self.failed)
            return None

        return _forked(run, 4 * self.options.seconds)


def _forked(run: Callable[[Callable[[str], None]], None], limit: float) -> str:
    """Runs in a fork and returns what it answered; "time" where it had to be killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            if "MUTANTS_LOUD" not in os.environ:
                os.dup2(silent, 2)
            run(lambda word: os.write(write, word.encode()) and None)
            os.write(write, b"\n")
        except BaseException as error:
            os.write(write, f"!{type(error).__name__}: {error}"[:200].encode())
        finally:
            os._exit(0)
    os.close(write)
    answer = b"time"
    if select.select([read], [], [], limit)[0]:
        answer = os.read(read, 4096) or b"crash"  # a process that ends well says so
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    if answer.startswith(b"!"):
        print(answer.decode()[1:], file=sys.stderr)
        return ""
    return answer.decode().strip()


def _say(head: str, mutant: Mutant) -> None:
    place = f"{mutant['file']}:{mutant['line']} {mutant['function']}: {mutant['what']}"
    print(f"{head} {place}: {mutant['killed_by'] or 'SURVIVES'}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Returns 1 if mutants that were killed survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="files or folders of halfstep/ to change")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what may notice (default: all fast tests)")
    parser.add_argument(
        "--count", type=int, default=60, help="mutants, chosen at random among the lines that tests run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="of tests for a mutant")
    parser.add_argument("--save", help="writes the mutants and what killed them")
    parser.add_argument("--again", help="a file of --save: lets those meet what is left whose killer is gone")
    options = parser.parse_args(arguments)
    if bool(options.sources) == bool(options.again):
        parser.error("name sources to change, or a file with --again")
    plugin = Mutants(options)
    if options.again:
        options.tests = [each for each in plugin._known()["tests"] if Path(each.partition("::")[0]).exists()]
    with tempfile.TemporaryDirectory() as base:
        flags = ["-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", base + "/t"]
        code = pytest.main([*flags, *options.tests], plugins=[plugin])
    return int(code) or bool(plugin.lost)


if __name__ == "__main__":
    os.chdir(HOUSE)
    sys.path[0] = str(HOUSE)  # in place of tests/, where `keras` are tests
    sys.exit(main(sys.argv[1:]))
