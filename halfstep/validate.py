"""Checks what a user passes (words, numbers, text, paths; `what` names the value in the error) and has installed."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import PlanError, SetupError, StateError
from halfstep.pages import SUPPORT, more

_SHOWN = 80
_APEX = ", which is apex's: session = halfstep.initialize(model, optimizer, {!r})"
# What to write instead of apex's, torch's, Keras's and others' words; of the words for one thing ours stands first.
_ELSEWHERE = {
    "halfstep.initialize({}=...)": "plan level optim_level patch_torch_functions / low dtype precision format "
    "cast_model_type / norms keep_batchnorm_fp32 / master master_weights / optimizer optimizers opt optim / "
    "process_group group / sinks callbacks / on_failure on_error",
    "loss_scale=halfstep.Scaling('dynamic', {}={})": "init init_scale initial_scale / min min_scale min_loss_scale / "
    "max max_scale max_loss_scale / growth growth_factor scale_factor / backoff backoff_factor / "
    "growth_interval scale_window / hysteresis",
    "session.step({}=...)": "max_norm clip clipnorm gradient_clip_val",
    "session.backward({}=...)": "loss_id num_losses",
    "halfstep.Policy({}=...)": "param weight weights / compute",
    "halfstep.Plan({}=...)": "output cast_model_outputs",
    "halfstep.whatif({}=...)": "formats format low dtype precision",
    "products='fp8'": "fp8",
    "moments='8bit'": "optim_bits",
    "rounding='stochastic'": "stochastic_rounding",
    "plan='O0' (mixed precision off)": "enabled use_amp",
    "logging.getLogger('halfstep').setLevel(...)": "verbosity",
    "torch.compile(model)": "compile",
    "": "policy format dtype precision / closure loss / path file filename / every interval / tensors kind kinds / "
    "modules pattern module name names / ops op",
}

Made = TypeVar("Made", bound=Callable[..., Any])

# What is passed by mistake as a model or an optimizer, and what to do instead.
_INSTEAD: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda item: isinstance(item, type), "pass an instance, which calling the class makes"),
    (lambda item: isinstance(item, (nn.Module, Optimizer)), "pass the model first, then the optimizer"),
    (lambda item: isinstance(item, Iterator), "pass them in a list; parameters go to an optimizer, and that is passed"),
    (lambda item: True, "as in halfstep.initialize(model, torch.optim.AdamW(model.parameters()))"),
)


def near_miss(value: object, allowed: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the allowed word nearest to `value`, or "" if none is near."""
    if not isinstance(value, str):
        return ""
    by_lower = {word.lower(): word for word in allowed}
    found = difflib.get_close_matches(value.lower(), list(by_lower), n=1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def check_keywords(name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises a TypeError if one of the keywords `given` is not `known`; it names the nearest that is."""
    for word, value in given.items():
        if word not in known:
            instead = _APEX.format(value) if word == "opt_level" else _meant(word, value, known)
            raise TypeError(f"{name} has no keyword {word!r}{instead}; it has {', '.join(known) or 'none'}")


def _meant(word: str, value: object, known: Collection[str]) -> str:
    """Returns the advice for an unknown keyword: what it is called here, what to write instead, or the nearest."""
    rows = [(row.split(), instead) for instead, words in _ELSEWHERE.items() for row in words.split("/")]
    words = {*known, *(each for row, _ in rows for each in row)}
    near = (difflib.get_close_matches(word, words, n=1, cutoff=0.75) or [word])[0]
    found = [] if near in known else [(row, instead) for row, instead in rows if near in row]
    if here := [each for row, _ in found for each in row if each in known]:
        return f"; did you mean {here[0]!r}?"
    said = next((instead.format(row[0], short(value)) for row, instead in found if instead), "")
    return f"; did you mean {said}?" if said and known else near_miss(word, known)


def with_near_misses(made: Made) -> Made:
    """Returns a function or class whose error for an unknown keyword, or a value without it, names the right one."""
    cls: Any = made if isinstance(made, type) else None
    run = made if cls is None else cls.__init__
    parameters = inspect.signature(run).parameters.values()
    known = {each.name: None for each in parameters if each.name != "self"}
    order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    most = math.inf if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(order)

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known.keys():
            check_keywords(f"{made.__name__}()", kwargs, known)
        if len(args) > most:
            inside, named_only = ([name for name in known if (name in order) is asked] for asked in (True, False))
            only = f"; pass the others by name: {', '.join(named_only)}" if named_only else ""
            nothing = "no optimizer" if made.__name__ == "unscale_" else "nothing"  # as that of torch's scaler does
            takes = ", ".join(inside) or nothing
            raise TypeError(f"{made.__name__}() takes {takes} by position, and got more values{only}")
        return run(*args, **kwargs)

    if cls is None:
        return checked  # type: ignore[return-value]
    cls.__init__ = checked
    return made


def short(value: object) -> str:
    """Returns the `repr` of a value on one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def check_entries(what: str, state: Any, needed: Iterable[str], *, also: Collection[str] | None, instead: str) -> None:
    """Raises a StateError that names the entries that a loaded state lacks, or has beside those `also` known."""
    if not isinstance(state, Mapping):
        raise StateError(f"{what} is {short(state)} of type {type(state).__name__}; expected a dict: {instead}")
    strange = [] if also is None else [each for each in state if each not in {*needed, *also}]
    apart = {"no": [each for each in needed if each not in state], "the unknown": strange}
    differ = [f"{word} {', '.join(map(repr, each))}" for word, each in apart.items() if each]
    if differ:
        raise StateError(f"{what} has {' and '.join(differ)}; {instead}")


def one_of(what: str, value: object, allowed: tuple[str, ...], *, hint: str = "") -> None:
    """Raises a PlanError unless `value` is one of the allowed words; without a `hint` it names the nearest."""
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(repr(word) for word in allowed)
        raise PlanError(f"{what} is {value!r}; expected one of {listed}{hint or near_miss(value, allowed)}")


def text(what: str, value: object, *, empty: bool = False) -> str:
    """Returns `value` if it is printable text, which a plan file can hold; raises a PlanError otherwise."""
    if not isinstance(value, str):
        raise PlanError(f"{what} is {value!r} of type {type(value).__name__}; expected a string")
    if not value.isprintable() or (not empty and not value.strip()):
        raise PlanError(f"{what} is {value!r}; expected {'' if empty else 'non-empty '}printable text")
    return value


def real(what: str, value: object, *, low: float, high: float) -> float:
    """Returns `value` as a float if it is in [low, high]; raises a PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(
            f"{what} is {value!r} of type {type(value).__name__}; expected a number from {low:g} to {high:g}"
        )
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        raise PlanError(f"{what} is {number:g}; expected a number from {low:g} to {high:g}")
    return number


def count(what: str, value: object) -> int:
    """Returns `value` as an int if it is from 1 to 2**31 - 1; raises a PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
        raise PlanError(f"{what} is {value!r}; expected a whole number from 1 to {2**31 - 1}")
    return int(value)


def instance(what: str, value: object, kind: type, example: str) -> None:
    """Raises a PlanError unless `value` is an instance of `kind`; the message has `example`, code of a valid value."""
    if not isinstance(value, kind):
        raise PlanError(
            f"{what} is {short(value)} of type {type(value).__name__}; expected a {kind.__name__}, such as {example}"
        )


def as_tuple(what: str, value: object, *, of: str) -> tuple[Any, ...]:
    """Returns the items of any iterable except a string; raises a PlanError for everything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PlanError(f"{what} is {value!r} of type {type(value).__name__}; expected a tuple of {of}")
    return tuple(value)


def file_path(what: str, value: object) -> Path:
    """Returns a caller's path as a `Path`; raises a PlanError unless it is a str or a PathLike."""
    if not isinstance(value, (str, os.PathLike)):
        came = f"{short(value)} of type {type(value).__name__}"
        raise PlanError(f"{what} is {came}; expected a path, as a str or a Path")
    return Path(value)


def check_device_type(what: str, value: object) -> None:
    """Raises a PlanError unless `value` is a string that torch reads as a device."""
    try:
        known = isinstance(value, str) and torch.device(value)
    except RuntimeError:
        known = False
    if not known:
        raise PlanError(f"{what} is {short(value)}; expected the name of a device type, such as 'cuda' or 'cpu'")


def as_list(value: Any, kind: type, what: str, *, empty: bool = False) -> list[Any]:
    """Returns one object, or a list or tuple of them, as a list; `empty` allows a list without items."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            instead = next(do for looks, do in _INSTEAD if looks(item))
            came = "the class " + item.__name__ if isinstance(item, type) else "of type " + type(item).__name__
            raise SetupError(f"{what} is {came}; expected a torch {kind.__name__}, or a list of them; {instead}")
    if not (items or empty) or len({id(item) for item in items}) != len(items):
        raise SetupError(f"{what} is an empty list, or has one object twice; pass each {kind.__name__} once")
    return items


def named(names: Iterable[str], shown: int = 5) -> str:
    """Returns the first few names as text, with the number of further names."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


@contextmanager
def extra(package: str, *, first: str, below: str) -> Iterator[None]:
    """For the imports of an adapter: within the context an ImportError says which extra to install."""
    try:
        check_version(package, import_module(package).__version__, first=first, below=below)
        yield
    except ImportError as error:
        raise ImportError(
            f"halfstep.adapters.{package} needs {error.name or package}; run: pip install 'halfstep[{package}]'"
        ) from error


def check_version(package: str, version: str, *, first: str, below: str) -> None:
    """Raises a SetupError unless `version` is at least `first` and less than `below`, all as "major.minor"."""
    if not _numbers(first) <= _numbers(version) < _numbers(below):
        raise SetupError(
            f"{package} {version} is installed, but halfstep's adapter needs at least {first} and less than {below}; "
            f"run: pip install '{package}>={first},<{below}'; {more(SUPPORT)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
