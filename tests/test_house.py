"""What holds for the package as a whole: its imports, its public names, and what no module of it may do."""

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "halfstep"
MODULES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = [path for path in MODULES if path.name == "__init__.py"]
TALKERS = ("cli", "report", "__main__.py")  # what a person sees is printed here and nowhere else
ENVIRONMENT_READERS = ("adapters",)
ALLOWED_IMPORTS = {"halfstep", "torch", "numpy", "msgspec", "tomli", "tomli_w"}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(path):
    return path.relative_to(PACKAGE).parts[0]


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def imported_names(tree):
    aliases = [alias for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name for alias in aliases}


def calls(tree):
    """Yields the dotted name and the line of each call, and of each attribute of `os` that is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.Attribute):
            yield ast.unparse(node.func if isinstance(node, ast.Call) else node), node.lineno


@each(PACKAGES)
def test_all_names_what_the_package_imports_and_nothing_else(path):
    names = getattr(importlib.import_module(name_of(path)), "__all__", [])
    assert len(set(names)) == len(names)
    assert set(names) == imported_names(tree_of(path)) - {"annotations"}


@each(PACKAGES)
def test_an_init_holds_imports_and_all_only(path):
    docstring, *rest = tree_of(path).body
    assert isinstance(docstring, ast.Expr)
    others = [ast.unparse(node) for node in rest if not isinstance(node, ast.Import | ast.ImportFrom)]
    assert [text.partition(" = ")[0] for text in others] == (["__all__"] if rest else [])


@each(MODULES)
def test_module_has_a_docstring(path):
    assert ast.get_docstring(tree_of(path))


@each(MODULES)
def test_imports_come_from_the_defining_module(path):
    packages = {name_of(other) for other in PACKAGES}
    passed_on = [
        f"{path.name}:{node.lineno} from {node.module} import {alias.name}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module in packages
        for alias in node.names
        if f"{node.module}.{alias.name}" not in {name_of(other) for other in MODULES}
    ]
    assert not passed_on


@each([path for path in MODULES if floor_of(path) not in TALKERS])
def test_only_what_a_person_calls_prints(path):
    loud = [f"{path.name}:{line} {name}" for name, line in calls(tree_of(path)) if name in ("print", "warnings.warn")]
    assert not loud


@each([path for path in MODULES if floor_of(path) not in ENVIRONMENT_READERS])
def test_no_module_reads_the_environment(path):
    read = [f"{path.name}:{line}" for name, line in calls(tree_of(path)) if name in ("os.environ", "os.getenv")]
    assert not read


def test_import_brings_nothing_outside_the_allow_list():
    program = (
        "import json, sys, torch; before = set(sys.modules); import halfstep; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    brought = {name.partition(".")[0] for name in json.loads(out)}
    assert "halfstep" in brought
    assert brought - ALLOWED_IMPORTS - sys.stdlib_module_names == set()


def test_import_prints_nothing_and_warns_of_nothing():
    run = subprocess.run([sys.executable, "-W", "error", "-c", "import torch, halfstep"], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_versions_agree():
    top = re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert top is not None
    assert halfstep.__version__ == top.group(1)
    assert importlib.metadata.version("halfstep") == halfstep.__version__


def test_the_licence_is_shipped_in_full():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert (PACKAGE / "py.typed").exists()
