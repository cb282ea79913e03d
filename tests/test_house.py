"""What holds for the package as a whole: its imports, its public names, and what no module of it may do."""

import ast
import functools
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
TALKERS = (
    "cli",
    "explain/report",
    "__main__.py",
    "adapters",
)  # what a person sees is printed here, and what apex printed
TRAINING = tuple(
    f"train/{each}" for each in ("kernels", "cast", "scale", "optim", "probe", "session")
)  # torch's defaults are the user's to set
ALLOWED_IMPORTS = {"halfstep", "torch", "numpy", "msgspec", "tomli", "tomli_w"}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules_except(floors):
    return [path for path in MODULES if not path.relative_to(PACKAGE).as_posix().startswith(floors)]


def places_where(paths, condition):
    """Returns file, line and source of each syntax node of these modules for which the condition holds."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node).splitlines()[0]}"
        for path in paths
        for node in ast.walk(tree_of(path))
        if condition(node)
    ]


def imported_names(path):
    """Names that a module imports at its top level, or for type checkers alone, as what is loaded when asked for."""
    body = tree_of(path).body
    late = [node for each in body if isinstance(each, ast.If) for node in each.body]
    imports = [node for node in (*body, *late) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names} - {"annotations", "TYPE_CHECKING"}


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_all_names_what_the_package_imports_and_nothing_else(path):
    if "keras" in path.parts:
        pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")
    names = getattr(importlib.import_module(name_of(path)), "__all__", [])
    assert len(set(names)) == len(names)
    assert set(names) == imported_names(path)


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_an_init_holds_imports_and_all_only(path):
    docstring, *rest = tree_of(path).body
    assert isinstance(docstring, ast.Expr)
    others = [ast.unparse(node).splitlines()[0] for node in rest if not isinstance(node, ast.Import | ast.ImportFrom)]
    expected = ["if TYPE_CHECKING:", "__all__"] if path == PACKAGE / "__init__.py" else ["__all__"]
    assert [text.partition(" = ")[0] for text in others] == (expected if rest else [])


def test_every_module_has_a_docstring():
    assert [path for path in MODULES if not ast.get_docstring(tree_of(path))] == []


def test_an_adapter_in_one_file_has_at_most_300_lines():
    adapters = (PACKAGE / "adapters").glob("*.py")
    assert {path.name for path in adapters if len(path.read_text(encoding="utf-8").splitlines()) > 300} == set()


def test_imports_come_from_the_defining_module():
    packages, known = {name_of(path) for path in PACKAGES}, {name_of(path) for path in MODULES}

    def passed_on(node):
        return (
            isinstance(node, ast.ImportFrom)
            and node.module in packages
            and any(f"{node.module}.{alias.name}" not in known for alias in node.names)
        )

    assert places_where(MODULES, passed_on) == []


def test_only_what_a_person_calls_prints():
    def loud(node):
        return isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "warnings.warn")

    assert places_where(modules_except(TALKERS), loud) == []


def test_no_module_is_named_by_a_string():
    files, folders = {path.name for path in MODULES}, {path.parent.name for path in PACKAGES} - {"halfstep"}

    def named(node):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "os.path.join":
            return False
        return any(isinstance(each, ast.Constant) and each.value in folders for each in node.args)

    def file_name(node):
        return isinstance(node, ast.Constant) and node.value in files - {"__init__.py", "library.py"}  # also torch's

    assert places_where(MODULES, named) == []
    assert places_where(MODULES, file_name) == []


def test_no_module_reads_the_environment_but_for_its_folder_and_the_allocator():
    def read(node):
        return isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")

    readers = {"halfstep/saved.py", "halfstep/machine.py"}  # the latter whether the user chose options of the allocator
    assert {place.partition(":")[0] for place in places_where(MODULES, read)} == readers


def test_what_training_makes_says_its_dtype_and_device():
    names = ("empty", "ones", "zeros", "full", "tensor", "as_tensor", "asarray", "scalar_tensor")
    makers = {f"torch.{name}" for name in names}
    placed = makers | {"torch.arange", "torch.linspace", "torch.eye", "torch.sparse_coo_tensor"}

    def left_to_defaults(node):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in placed:
            return False
        given = {keyword.arg for keyword in node.keywords}
        return "device" not in given or (ast.unparse(node.func) in makers and "dtype" not in given)

    training = [path for path in MODULES if path.relative_to(PACKAGE).as_posix().startswith(TRAINING)]
    assert places_where(training, left_to_defaults) == []


@pytest.fixture(scope="module")
def imported():
    """The modules that an import of halfstep brings after torch's, which prints nothing and warns of nothing."""
    program = (
        "import json, sys, torch; before = set(sys.modules); import halfstep; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def test_import_brings_nothing_outside_the_allow_list(imported):
    brought = {name.partition(".")[0] for name in imported}
    assert "halfstep" in brought
    assert brought - ALLOWED_IMPORTS - sys.stdlib_module_names == set()


def test_import_loads_neither_the_compiler_nor_the_stand_in_of_apex_nor_what_only_measures(imported):
    rooms = ("adapters.apex", "bench", "doctor", "inspection", "workloads", "timing")
    late = ("torch._dynamo", *(f"halfstep.{room}" for room in rooms))
    assert [name for name in imported if name.startswith(late)] == []


def test_what_is_loaded_when_asked_for_is_there():
    assert halfstep.inspect is importlib.import_module("halfstep.lab.inspection.inspect").inspect
    assert set(halfstep.__all__) <= set(dir(halfstep))
    with pytest.raises(AttributeError, match="module 'halfstep' has no attribute 'inspekt'"):
        halfstep.inspekt  # noqa: B018


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


def imports_of(path):
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes} | {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def walks():
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## Six walks")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line]


@pytest.mark.parametrize(("name", "files", "counts"), walks(), ids=[name for name, *_ in walks()])
def test_a_walk_of_the_design_page_follows_the_imports(name, files, counts):
    walked = [PACKAGE / each for each in re.findall(r"`([\w/]+\.py)`", files)]
    given = {PACKAGE / each for each in re.findall(r"\*`([\w/]+\.py)`\*", files)}
    assert f"{len(walked)} / {len({path.parent for path in walked})}" == counts
    for at, path in enumerate(walked[1:], 1):
        near = [name_of(path) in imports_of(each) or name_of(each) in imports_of(path) for each in walked[:at]]
        assert path in given or any(near), f"{path} is reached from no file before it"
