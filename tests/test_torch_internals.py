"""One file alone names private names of torch's, and what it names is there and does as it did."""

import ast
import functools
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfstep import torch_internals
from halfstep.explain.tape.schemas import PUBLIC
from halfstep.torch_internals import missing
from tests import forks
from tests.test_house import tree_of
from tests.torch_behaviours import otherwise

PACKAGE = Path(torch_internals.__file__).parent
BOUNDARY = PACKAGE / "torch_internals.py"
FILES = sorted(set(PACKAGE.rglob("*.py")) - {BOUNDARY})
TAKERS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")

# private attributes of torch's objects, which halfstep has used or was about to, and which classes of its own may have
OF_OBJECTS = {
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_register_load_state_dict_pre_hook", "_register_state_dict_hook", "_metadata", "_orig_mod"),
    "_checkpoint_wrapped_module",
    *("_version", "_values", "_indices", "_is_zerotensor", "_cdata", "_base", "_grad", "_local_tensor"),
    *("_schema", "_op", "_op_dk", "_overloadpacket", "_sequence_nr", "_raw_saved_self"),
    *("_opt_called", "_wrapped_by_lr_sched", "_step_supports_amp_scaling"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    *("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    *("_join_config", "_destroy", "_config", "_enabled", "_growth_tracker", "_growth_factor", "_per_optimizer_states"),
    *("_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker"),
}
HOLDERS = (
    *(torch, torch._C, torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.optim.Optimizer, torch.autocast),
    *(torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler, torch.optim.swa_utils.AveragedModel),
    *(torch.nn.parallel.DistributedDataParallel, torch.library.Library, torch.ops.aten.mm.default),
)
STATE_KEYS = {"_growth_tracker"}  # also a key in the states that torch's GradScaler documents
STANDARD = {"_make", "_replace", "_fields", "_asdict", "_getframe"}  # of Python's tuples and its stack
LIBRARY = {"_name", "_fields_"}  # of ctypes
UNDOCUMENTED = {"torch.multiprocessing.reductions"}


def is_private(name):
    return name.startswith("_") and not name.startswith("_halfstep_") and not name.endswith("__")


ATTRIBUTES = OF_OBJECTS | {name for each in HOLDERS for name in dir(each) if is_private(name)} - LIBRARY
METHODS = {name for name in dir(torch.amp.GradScaler) if is_private(name)}  # not to be overridden elsewhere


def is_own(node):
    return ast.unparse(node) in ("self", "cls", "super()")


def own_names(tree):
    """Returns the names that a file defines: of functions, classes and variables, and attributes it sets."""
    nodes = list(ast.walk(tree))
    set_here = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return {
        *(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)),
        *(node.id for node in set_here if isinstance(node, ast.Name)),
        *(node.attr for node in set_here if isinstance(node, ast.Attribute) and is_own(node.value)),
    }


def in_import(node, known):
    paths = [alias.name for alias in node.names]
    module = getattr(node, "module", None) or paths[0]
    parts = ".".join((module, *paths)).split(".")
    found = [part for part in parts if is_private(part)] if module.partition(".")[0] == "torch" else []
    return [*found, *({module, *paths} & UNDOCUMENTED)]


def in_attribute(node, known):
    name = node.attr
    if not is_private(name):
        return []
    own = is_own(node.value)
    of_torch = ast.unparse(node).startswith(("torch.", "aten."))
    of_object = name in ATTRIBUTES and not (own and name in known.here)
    known_here = name in (known.anywhere if own else known.near) | STANDARD | LIBRARY
    return [name] if of_torch or of_object or not known_here else []


def in_constant(node, known):
    text = node.value if isinstance(node.value, str) else ""
    of_torch = text.startswith("torch.") and any(map(is_private, text.split(".")))
    return [text] if text in OF_OBJECTS - STATE_KEYS or of_torch else []


def in_call(node, known):
    given = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    found = strange([name for each in given for name in each.split(".")], known)
    return found if found and ast.unparse(node.func).rpartition(".")[2] in TAKERS else []


def in_subscript(node, known):
    name = getattr(node.slice, "value", None)
    return strange([name], known) if isinstance(name, str) else []


def in_pattern(node, known):
    return strange(node.kwd_attrs, known)


def strange(names, known):
    return [name for name in names if is_private(name) and name not in known.anywhere | STANDARD]


def in_function(node, known):
    return [node.name] if node.name in METHODS else []


IN = {
    ast.Import: in_import,
    ast.ImportFrom: in_import,
    ast.Attribute: in_attribute,
    ast.Constant: in_constant,
    ast.Call: in_call,
    ast.Subscript: in_subscript,
    ast.MatchClass: in_pattern,
    ast.FunctionDef: in_function,
}


class Known(NamedTuple):
    """The names that halfstep defines: anywhere, in the folder of a file, and in the file."""

    anywhere: set
    near: set
    here: set


def foreign_names(tree, anywhere, folder=frozenset()):
    """Returns each private name in a file that is none of halfstep's, with its line.

    A name that halfstep defines `anywhere` may be inherited, as `self._name`; on other objects it has to be defined in
    the file or its `folder`.
    """
    here = own_names(tree)
    known = Known(anywhere, here | folder, here)
    nodes = [node for node in ast.walk(tree) if type(node) in IN]
    return [f"{node.lineno} {name}" for node in nodes for name in IN[type(node)](node, known)]


@functools.cache
def private(path):
    return {name for name in own_names(tree_of(path)) if is_private(name)}


@pytest.fixture(scope="module")
def own():
    return set().union(*map(private, FILES))


# Keras's own, which has no public name for them; the adapter's tests run on the releases that its extra allows.
KERAS = {
    *("_dtype_policy", "_variable_dtype", "_flatten_layers", "_trainable_variables", "_variables", "_functional"),
    "_overwrite_variable_with_gradient",
}


ENUM = {"_value_"}  # Python's, and documented
CALLED = " _lazy_init_scale_growth_tracker"  # by Accelerate, of each scaler that it has


def test_no_other_file_names_a_private_name_of_torch(own):
    found = []
    for path in FILES:
        keras = KERAS if PACKAGE / "adapters" / "keras" in path.parents else set()
        folder = (keras | ENUM).union(*(private(each) for each in FILES if each.parent == path.parent))
        found += [f"{path.relative_to(PACKAGE)}:{each}" for each in foreign_names(tree_of(path), own | keras, folder)]
    assert [each for each in found if not each.endswith(CALLED)] == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._current_graph_task_id()",
        "x = torch._foreach_norm",
        "from torch._ops import OpOverload",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils import _pytree",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._dynamo",
        "tensor._version",
        "module._parameters.items()",
        "part.module._buffers[name]",
        "self._parameters",
        "optimizer._opt_called = True",
        "getattr(param, '_backward_hooks', None)",
        "getattr(found, '_something_new', None)",
        "operator.attrgetter('_something_new')",
        "node._something_new()",
        "aten._trilinear.default",
        "'_orig_mod' in names",
        "'torch._dynamo' in sys.modules",
        "def _lazy_init_scale_growth_tracker(self, dev): ...",
        "import_module('torch.utils._pytree')",
        "vars(module)['_forward_hooks_with_kwargs']",
        "operator.attrgetter('mm._schema')",
        "match module:\n    case nn.Module(_forward_hooks=hooks): ...",
        "module._apply(torch.Tensor.cpu)",
        "optimizer._stack",
        "loader._collate",
        "from torch.multiprocessing.reductions import StorageWeakRef",
    ],
)
def test_a_private_name_is_found(code, own):
    assert foreign_names(ast.parse(code), own)


@pytest.mark.parametrize(
    "code", ["self._buffers = []; self._buffers", "place._replace(a=1)", "x.__dict__", "_run = 1; x._run"]
)
def test_a_name_of_halfsteps_own_is_none_of_torchs(code, own):
    assert foreign_names(ast.parse(code), own) == []


def test_this_torch_has_all_of_it():
    assert missing() == []


def test_this_torch_does_as_the_others_did():
    assert otherwise() == []


@pytest.mark.parametrize(
    ("owner", "name", "path"),
    [
        (torch._C, "_current_graph_task_id", "torch._C._current_graph_task_id"),
        (torch, "_foreach_norm", "torch._foreach_norm"),
        (torch.library.Library, "_destroy", "torch.library.Library._destroy"),
        (
            sys.modules["torch.optim.optimizer"],
            "_global_optimizer_pre_hooks",
            "torch.optim.optimizer._global_optimizer_pre_hooks",
        ),
        (torch.amp.GradScaler, "_maybe_opt_step", "torch.amp.GradScaler._maybe_opt_step"),
    ],
)
def test_a_name_that_a_release_takes_away_is_missing(monkeypatch, owner, name, path):
    monkeypatch.delattr(owner, name)
    assert missing() == [path]


@pytest.mark.parametrize("name", ["_parameters", "_buffers", "_modules", "_state_dict_hooks"])
def test_an_attribute_that_modules_no_longer_have_is_missing(monkeypatch, name):
    monkeypatch.delitem(torch.nn.Module.__annotations__, name)
    assert missing() == [f"torch.nn.Module.{name}"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GLOBAL_STEP_PRE_HOOKS", {}, "step hooks of all optimizers"),
        ("GLOBAL_STEP_POST_HOOKS", {}, "step hooks of all optimizers"),
        ("_STEPPED", "_was_called", "LR schedulers"),
        ("SCHEDULED", "_wrapped", "LR schedulers"),
        ("_FUSED", "_takes_found_inf", "fused optimizers"),
        ("hooks_of", lambda tensor: None, "hooks of a tensor"),
        ("post_accumulate_hooks_of", lambda tensor: {}, "hooks of a tensor"),
        ("BEYOND", "out of range", "the error for a constant"),
        ("COMPILED", "_inner", "torch.compile keeps"),
        ("end_stance", lambda stance: None, "what torch.compiler.set_stance returned"),
        ("set_cache_tag", lambda tag: None, "the tag of torch.compile's caches"),
        ("sequence_number", lambda node: 0, "autograd nodes"),
        ("NO_BACKWARD", 0, "autograd nodes"),
        ("ENGINE", "_run_engine", "files and functions"),
        ("CHECKPOINT_FILE", os.path.join(torch_internals.FOLDER, "utils", "checkpoints.py"), "files and functions"),
        ("DISPATCH_FILES", (os.path.join(torch_internals.FOLDER, "_operators.py"),), "files and functions"),
        ("_JOIN", "_joined", "DistributedDataParallel"),
        ("_SYNCS", "sync", "DistributedDataParallel"),
        ("_HOOKS", "_hooks_of_communication", "DistributedDataParallel"),
        ("OpenAutocast", torch.autocast, "torch.autocast has"),
        ("is_users_function", lambda node: False, "autograd nodes of Functions"),
        ("_CLASS_INDEX", "_cls_index", "fully_shard"),
        ("_SHARDING", "Sharded", "fully_shard"),
        ("_FAKE", "Fake", "fully_shard"),
        ("_POLICY", "policy", "fully_shard"),
        ("_WAITING", "waiting", "fully_shard"),
        ("jagged_values", lambda tensor: tensor.offsets(), "nested tensors"),
        ("metadata_of", lambda state: {}, "state dicts"),
    ],
)
def test_what_a_release_does_otherwise_is_told(monkeypatch, name, value, told):
    monkeypatch.setattr(torch_internals, name, value)
    (found,) = otherwise()
    assert found.startswith(told)


@pytest.mark.parametrize(
    "paths",
    [
        ["torch._C._current_graph_task_id", "torch._foreach_norm"],
        pytest.param(["torch.amp.grad_scaler.OptState"], marks=pytest.mark.slow),
        pytest.param(["torch.multiprocessing.reductions.StorageWeakRef"], marks=pytest.mark.slow),
    ],
)
def test_an_import_without_a_name_is_one_error_that_says_which_and_what_works(paths):
    removed = f"import sys, torch, torch.multiprocessing.reductions; del {', '.join(paths)}\n"
    anew = "for name in [each for each in sys.modules if each.partition('.')[0] == 'halfstep']: del sys.modules[name]\n"
    code, said = forks.run(removed + anew + "import halfstep")
    assert code == 1
    said = said.splitlines()[-1]
    assert all(path in said for path in paths)
    assert re.fullmatch(
        rf"ImportError: torch {re.escape(torch.__version__)} lacks [^ ]+(, [^ ]+)*, which this halfstep uses; "
        rf"install torch {torch_internals.WORKS_WITH}, or a newer halfstep",
        said,
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_operations_that_are_called_otherwise_in_public_are_torchs(name):
    assert hasattr(torch.ops.aten, name)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.size = x * 3
        ctx.save_for_backward(x + 1)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_is_a_users_unless_torch_defines_it_and_tells_what_it_keeps():
    x = torch.ones(2, requires_grad=True)
    own, torchs = _Own.apply(x), checkpoint(torch.sin, x, use_reentrant=True)
    made = (own, torchs, x.sin())
    assert [torch_internals.is_users_function(each.grad_fn) for each in made] == [True, False, False]
    assert sorted(float(each[0]) for each in torch_internals.saved_by(own.grad_fn)) == [2.0, 3.0]
    assert [float(each[0]) for each in torch_internals.saved_by((x * torch.full((2,), 5.0)).grad_fn)] == [5.0]


def test_what_hooks_keep_is_left_to_the_node_which_may_unpack_it_only_once():
    x = torch.ones(2, requires_grad=True)
    for function in (torch.exp, _Own.apply):
        result = checkpoint(function, x, use_reentrant=False)
        assert torch_internals.saved_by(result.grad_fn) is None
        result.sum().backward()
