"""What every test stands on: fixed seeds, a fixed number of threads, and where data and a GPU are looked for."""

import functools
import gc
import os
import random
import sys
import tempfile
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from halfstep import machine
from halfstep.lab.bench import bench
from halfstep.lab.bench.lane import Deal, Local
from halfstep.train.session import decide
from halfstep.train.session import open as opening
from halfstep.train.session.session import Session

# The examples of a property are the same in every run, and a busy machine fails none of them.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

DATA = Path(os.environ.get("HALFSTEP_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")

HOW_TO_GET_DATA = (
    "set HALFSTEP_DATA to a folder with cifar10/ (torchvision.datasets.CIFAR10(folder, download=True)), "
    "fashion_mnist/ (torchvision.datasets.FashionMNIST) and imdb/ (datasets.load_dataset('imdb') of Hugging Face)"
)


def pytest_addoption(parser):
    parser.addoption(
        "--processor",
        metavar="CLASS",
        help='run as on another class of CPU, a name of halfstep.machine, "x86 AVX2" say',
    )


def pytest_configure(config):
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CONFIG_HOME"] = folder.name  # what `halfstep doctor --save` measured here is not for tests
    wanted = config.getoption("processor")
    if wanted is not None:  # all but what tests start as processes of their own
        known = {row.name: row for row in machine.PROCESSORS}
        if wanted not in known:
            raise pytest.UsageError(f"--processor {wanted!r} is unknown; choose one of {', '.join(known)}")
        machine.table_row = lambda: known[wanted]
        machine._measured = lambda row: row  # on this processor, which is another
    # Workers share the cores: one thread each; alone, two, so that parallel kernels are tested as well.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_finish():
    freeze()  # thousands of tests and torch's modules


def freeze():
    """Has the collections of later tests not go through all that is here now."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def mark_slow_rows(items, *, whole):
    """Marks rows of tests over many settings as slow: those that `slow_but` does not choose, or else of products of
    grids those that bring no new value. Each word of `slow_but` has to choose some of `whole` tests.
    """
    asked, chosen, grids = set(), set(), {}
    for item in items:
        marks = list(item.iter_markers("slow_but"))
        for mark in marks:
            test = item.nodeid.partition("[")[0]
            fits = {(test, word) for word in mark.args if word in item.name}
            asked |= {(test, word) for word in mark.args}
            chosen |= fits
            if not fits:
                item.add_marker(pytest.mark.slow)
        if not marks and item.get_closest_marker("slow") is None and hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append((item, values_of(item)))
    for rows in grids.values():
        for item in more_than_each_value(rows):
            item.add_marker(pytest.mark.slow)
    if whole and asked != chosen:
        raise pytest.UsageError(f"slow_but: no row has what is asked for: {sorted(asked - chosen)}")


def values_of(item):
    """The values that a row takes from the grids of its test (`parametrize`s and fixtures), told apart by their ids."""
    left = {name: id(value) for name, value in item.callspec.params.items()}
    grids = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        grids.append(tuple(left.pop(name.strip(), 0) for name in names))
    return set(enumerate([*grids, *left.values()]))


def more_than_each_value(rows):
    """The rows of one test that are not needed to run each value of each grid once; those with most new ones stay."""
    missing, left = set().union(*(values for _, values in rows)), list(rows)
    while missing:
        best = max(left, key=lambda row: len(row[1] & missing))
        missing -= best[1]
        left.remove(best)
    return [item for item, _ in left]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    mark_slow_rows(items, whole=not any("::" in argument for argument in config.args))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is false here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def imports_frozen():
    """Freezes what the files before this one imported, such as torch's compiler."""
    if len(gc.get_objects()) > 50_000:
        freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    random.seed(0)
    numpy.random.seed(0)
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)  # the first looks at all devices


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fails a test that leaves a global of torch changed, and puts it back for the next test."""
    yield
    left = []
    if torch.get_default_dtype() != torch.float32:
        left.append(f"default dtype {torch.get_default_dtype()}")
        torch.set_default_dtype(torch.float32)
    if not torch.is_grad_enabled():
        left.append("gradients off")
        torch.set_grad_enabled(True)
    for device in ("cpu", "cuda", "ipu", "hpu", "xla", "maia", "mtia"):
        if torch.is_autocast_enabled(device):
            left.append(f"autocast on for {device}")
            torch.set_autocast_enabled(device, False)
    while modes := _get_current_dispatch_mode_stack():
        left.append(f"the dispatch mode {modes[-1]}")
        _pop_mode()
    stance = torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else "default"
    if stance != "default":
        left.append(f"the stance {stance} of torch.compile")
        torch.compiler.set_stance("default")
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def sessions_closed(nothing_left_behind, monkeypatch):
    """Closes the sessions that a test leaves open, the last first."""
    opened, open_session = [], Session.__init__

    @functools.wraps(open_session)
    def note(session, *args, **options):
        open_session(session, *args, **options)
        opened.append(weakref.ref(session))

    def close():
        for session in [reference() for reference in reversed(opened)]:
            if session is not None:
                session.close()

    monkeypatch.setattr(Session, "__init__", note)
    yield close
    close()


@pytest.fixture(autouse=True)
def said_before():
    """Has halfstep not say how products run, which it says once a process; `.undo()` lets a test see it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "say_how_products_run", lambda decision, told: None)
        yield patch
    decide._say.cache_clear()


@pytest.fixture
def on_processor(monkeypatch):
    """Lets a test run as on another class of CPU: torch computes as ever, halfstep decides by that row of its table."""
    return lambda row: monkeypatch.setattr(machine, "read_processor", lambda: row)


@pytest.fixture(params=machine.PROCESSORS, ids=lambda row: row.name)
def each_processor(request, on_processor):
    """Runs a test once as on each class of CPU."""
    on_processor(request.param)
    return request.param


@pytest.fixture
def peers_here(monkeypatch):
    """Has a benchmark's rows of torch.amp train in this process: their own takes seconds to start."""

    def lane(task):
        local = Local(task.entry, Deal(task.origin.load(), torch.device(task.device)))
        local.ready = lambda: None
        return local

    monkeypatch.setattr(bench, "Remote", lane)


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data; a test that asks for it is skipped where there is none."""
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}; {HOW_TO_GET_DATA}")
    return DATA


@pytest.fixture(scope="session")
def pool_folder(tmp_path_factory):
    """Where `pool` runs and leaves its files: one folder for all workers."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "pool"


@pytest.fixture(scope="session")
def pool(request, pool_folder):
    """What two processes found, by test module: one pair of processes for all tests that are asked for."""
    from tests import replicas

    slow = {}  # by module, whether slow tests of it are asked for
    for item in request.session.items:
        if hasattr(module := getattr(item, "module", None), "pooled"):  # doctests have no module
            slow[module] = slow.get(module, False) or "slow" in item.keywords
    return replicas.run_once(pool_folder, slow)


@pytest.fixture(scope="module")
def found(pool, request):
    """What each of the two processes found for this module."""
    return pool[request.module.__name__]


@pytest.fixture
def process_group(tmp_path, sessions_closed):
    """A process group of this process alone, for as long as the test runs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    sessions_closed()
    # What was wrapped goes first. torch's DDP, where it is the last to hold the group, waits with Python's lock for a
    # thread of the group that may be waiting for this lock, and neither goes on.
    gc.collect()
    torch.distributed.destroy_process_group()


def on_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    """For tensors so small that a second thread would only spin on a busy machine."""
    yield from on_threads(1)


@pytest.fixture
def two_threads():
    yield from on_threads(2)
