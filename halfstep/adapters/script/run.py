"""Runs a script as `python` does, but under a plan; errors and exits of the script come through unchanged."""

from __future__ import annotations

import builtins
import importlib.util
import logging
import runpy
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from halfstep.adapters.script.conversion import Conversion
from halfstep.adapters.script.patches import HALFSTEP, install
from halfstep.errors import HalfstepError, ScriptError
from halfstep.formats import Format
from halfstep.plan.plan import Plan
from halfstep.records import Status
from halfstep.train.session.session import Sink

_LOG = logging.getLogger("halfstep")


@dataclass(frozen=True)
class Ran:
    """How a script ran."""

    trained: Status | None  # the status of its session, if one was opened
    peak: int  # the most bytes allocated on a GPU
    brings: str | None  # the mixed precision that the script itself uses
    seconds: float  # of the whole script
    error: BaseException | None  # that ended the script, SystemExit included
    rank: int  # of this process
    outside: tuple[str, ...] = ()  # types of models that an optimizer not of torch trained, in fp32


IN_A_SCRIPT = (
    "under halfstep run the script needs no call of halfstep: --level O1 --low bf16 keeps weights in fp32 and scales "
    "no loss, so that it takes all optimizers; --level O0 runs the script as it is"
)


def run(  # noqa: PLR0913  # what the command has
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    plan: Plan | str | None = None,
    low: Format | str | None = None,
    moments: Any = None,
    products: Any = None,
    sinks: Callable[[int], Sequence[Sink]] = lambda rank: (),
    observe: bool = False,
    ended: Callable[[Ran], None] = lambda ran: None,
) -> None:
    """Runs a script, or with `module` a module as `python -m` does, and trains its models under a plan.

    A `plan` of None means O1; `moments` and `products` replace the plan's. If the script itself uses mixed precision,
    `plan` has no effect, and `low` only sets the format of the drop-in for apex. When the session opens, `sinks` is
    called with the rank of the process, and returns the sinks of the session. With `observe` the session observes
    tensors at every 50th step. `ended` is called with the Ran at the end, also after an error; by then the session is
    closed and the patches of torch are removed.
    """
    _check(script, module=module)
    conversion = Conversion(plan, low, sinks, observe=observe, changes={"moments": moments, "products": products})
    error: BaseException | None = None
    start = time.perf_counter()
    undo = install(conversion, low or "fp16")
    conversion.watch.start()
    try:
        with _as_main(script, arguments, module=module):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                _run_file(Path(script).absolute())
    except BaseException as raised:
        error = raised
    seconds = time.perf_counter() - start
    peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())), default=0)
    conversion.watch.stop()
    try:
        conversion.end()
    except Exception as failed:  # of a device that the script has broken
        if error is None:
            raise
        _LOG.warning("the session could not be closed: %s", failed)
    finally:
        undo()
    outside = tuple(conversion.outsiders.names)
    ended(Ran(conversion.trained, peak, conversion.brings, seconds, error, conversion.rank, outside))
    if error is not None:
        refused = isinstance(error, HalfstepError) and conversion.brings is None
        if refused and any(call in str(error) for call in ("initialize", "session.")):
            error.args = (f"{error.args[0]} ({IN_A_SCRIPT})", *error.args[1:])
        raise own(error)


def _run_file(path: Path) -> None:
    if path.is_dir() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        runpy.run_path(str(path), run_name="__main__")
        return
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    loader = SourceFileLoader("__main__", str(path))
    vars(main).update(__file__=str(path), __loader__=loader, __cached__=None, __builtins__=builtins)
    if sys.version_info < (3, 14):  # from then on they are computed when somebody asks
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
    finally:
        sys.modules["__main__"] = before


def _check(script: str, *, module: bool) -> None:
    if not module and not Path(script).exists():
        missing = ScriptError(f"there is no script {script}; pass the path of a script, or -m and the name of a module")
        missing.exit_code = 2
        raise missing
    if not module and Path(script).is_dir() and not any(Path(script).glob("__main__.py*")):
        raise ScriptError(f"{script} is a folder without a __main__.py; pass the path of a script in it")
    if module:
        with _first_in_path(str(Path.cwd())):
            try:
                found = importlib.util.find_spec(script)
            except (ImportError, ValueError):
                found = None
        if found is None:
            raise ScriptError(f"there is no module {script}; pass a name that `python -m` accepts")
        folders = [Path(each) for each in found.submodule_search_locations or ()]  # looked at, not imported
        if folders and all(each.is_dir() and not any(each.glob("__main__.py*")) for each in folders):
            raise ScriptError(f"{script} is a package without a __main__; pass the name of a module in it")


@contextmanager
def _first_in_path(folder: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _as_main(script: str, arguments: Sequence[str], *, module: bool) -> Iterator[None]:
    """Within the context, sets `sys.argv` and the first entry of `sys.path` for the script, as `python` does."""
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        with _first_in_path(str(Path.cwd() if module else Path(script).resolve().parent)):
            yield
    finally:
        sys.argv = before


def own(error: BaseException) -> BaseException:
    """Removes the frames of halfstep and runpy from the tracebacks of `error` and its causes; returns `error`."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
            each.__traceback__ = _without_ours(each.__traceback__)
    return error


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((HALFSTEP, "<frozen runpy>")) and name != runpy.__file__:
            frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace
