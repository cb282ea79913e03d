"""`install` and `uninstall`: a stand-in where apex is not installed, additions beside one that is, undone exactly."""

import importlib
import importlib.util
import pickle
import sys
import types

import pytest
import torch

from halfstep.adapters.apex import install, sessions, uninstall
from halfstep.adapters.apex.install import MODULES
from halfstep.errors import HalfstepError
from tests.adapters.apex.cases import as_hardware, loss_of, sgd, small, step, values, vectors

AMP = {
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "scale_loss",
    "disable_casts",
    "initialize",
    "state_dict",
    "load_state_dict",
    "master_params",
    "_amp_state",
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    uninstall()


def test_every_export_of_apex_amp_is_there(amp):
    assert set(vars(amp)) >= AMP
    state = importlib.import_module("apex.amp._amp_state")
    assert state._amp_state is amp._amp_state
    assert callable(state.maybe_print)
    assert state.master_params is amp.master_params
    assert importlib.import_module("apex").amp is amp


def test_the_usual_imports_work():
    namespace = {}
    exec(
        "import apex\nimport apex.amp as first\nfrom apex import amp\nfrom apex.amp import _amp_state, scale_loss\n"
        "from apex.amp._amp_state import _amp_state as second\nfrom apex.amp.handle import disable_casts\n",
        namespace,
    )
    assert namespace["first"] is namespace["amp"] is namespace["apex"].amp
    assert namespace["second"] is namespace["_amp_state"]
    assert importlib.util.find_spec("apex") is not None
    with pytest.raises(ModuleNotFoundError, match=r"apex\.contrib"):
        importlib.import_module("apex.contrib")


def attributes(*modules):
    """Returns each attribute of modules, and of the classes they define, as (owner, its id, name): value."""
    found = {id(module): module for module in modules}
    for module in modules:
        kinds = [value for value in list(vars(module).values()) if issubclass(type(value), type)]
        top = module.__name__.partition(".")[0]
        found |= {id(kind): kind for kind in kinds if kind.__module__.partition(".")[0] == top}
    return {
        (owner.__name__, key, name): value
        for key, owner in found.items()
        for name, value in dict(vars(owner)).items()
        if name not in ("__warningregistry__", "next_id")  # of Python, and torch's count of hooks
    }


def torchs():
    """Returns each attribute of every module and class of torch's that is imported, but for dynamo's.

    Those are counters and caches that it makes anew as it likes; the one of them that halfstep sets, torch.compile's
    stance, is looked at after every test.
    """
    imported = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
    return attributes(*(module for name, module in imported if not name.startswith("torch._dynamo")))


def of_instances(model, optimizer):
    """Returns each attribute of a model's modules and its optimizer, and what their dicts of hooks and weights hold."""
    owners = (*model.modules(), optimizer)
    held = {(place, name): value for place, each in enumerate(owners) for name, value in vars(each).items()}
    inside = {(*place, name): value for place, d in held.items() if isinstance(d, dict) for name, value in d.items()}
    return held | inside


def changed(before, after):
    """Returns where another object stands."""
    return [place for place, value in before.items() if place not in after or after[place] is not value]


@pytest.fixture
def theirs():
    """A module of the user's."""
    module = types.ModuleType("theirs_for_apex")
    text = "class Ops:\n    def run(self, x):\n        return x\ndef double(x):\n    return 2 * x"
    exec(text, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.slow_but("fp16-O2")
def test_uninstall_leaves_every_object_as_it_was(low, level, theirs):
    """Of all of torch, of the user's module, of the model and of the optimizer; compared one by one."""
    uninstall()
    model = small()
    optimizer = sgd(model)
    for _ in range(2):  # torch itself replaces some of its functions at their first use
        with as_hardware(low):
            loss_of(model, vectors()).backward()
        optimizer.step()
        optimizer.zero_grad()
    modules, cache = dict(sys.modules), torch.is_autocast_cache_enabled()
    classes = [type(module) for module in model.modules()]
    before, instances = torchs() | attributes(theirs), of_instances(model, optimizer)
    assert len(before) > 10_000
    install(low=low)
    amp = importlib.import_module("apex.amp")
    amp.register_half_function(torch.nn.functional, "normalize")
    amp.register_float_function(theirs, "double")
    amp.register_promote_function(theirs.Ops, "run")
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    step(amp, model, optimizer, vectors())
    weights = values(model)
    assert bool(changed(before, torchs() | attributes(theirs))) is (level != "O0")
    uninstall()
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert not [name for name in sys.modules if name.split(".")[0] == "apex"]
    assert changed(before, torchs() | attributes(theirs)) == []
    after = of_instances(model, optimizer)
    assert [place for place in changed(instances, after) if place[1] != "state"] == []
    added = {place[1] for place in after.keys() - instances.keys()}
    assert added <= {"state", "_opt_called"}  # what a step of torch's under a scheduler leaves too
    assert [type(module) for module in model.modules()] == classes
    assert torch.is_autocast_cache_enabled() is cache
    assert not torch.is_autocast_enabled("cpu")
    assert all(p.dtype is torch.float32 and torch.equal(p, weights[name]) for name, p in model.named_parameters())
    loss_of(model, vectors()).backward()
    optimizer.step()


def test_settings_do_not_outlive_uninstall(low):
    amp = importlib.import_module("apex.amp")
    amp._amp_state.hard_override = True
    amp.register_half_function(torch, "sigmoid")
    amp.initialize(small(), verbosity=0)
    install(low=low)
    state = importlib.import_module("apex.amp")._amp_state
    assert not state.hard_override
    assert not hasattr(state, "opt_properties")
    assert state._registered == []


def test_install_again_changes_the_format_for_who_has_imported_amp_too():
    install(low="bf16")
    amp = importlib.import_module("apex.amp")
    install(low=torch.float16)
    for each in (amp, importlib.import_module("apex.amp")):
        model = each.initialize(small(), opt_level="O2", verbosity=0)
        assert model[0].weight.dtype is torch.float16
    for wrong in ("fp8", "e4m3", 16):
        with pytest.raises(HalfstepError):
            install(low=wrong)


def test_none_stands_for_apexs_fp16_and_open_sessions_tell_how_a_script_trained(low):
    install(None)
    amp = importlib.import_module("apex.amp")
    model = small()
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    (session,) = sessions()
    assert (session.plan.name, str(session.plan.low)) == ("O2", "fp16")
    install(low)
    assert sessions() == []
    assert session.closed


@pytest.mark.parametrize(
    "line",
    [
        "from apex.fp16_utils import FP16_Optimizer",
        "from apex.fp16_utils.loss_scaler import DynamicLossScaler",
        "from apex import fp16_utils",
        "import apex; apex.fp16_utils.network_to_half(None)",
        "from apex.parallel import LARC",
        "from apex.parallel.LARC import LARC",
        "from apex.amp import init",
        "from apex import amp; amp.init()",
        "from apex.multi_tensor_apply import multi_tensor_applier; multi_tensor_applier(None, None, [])",
    ],
)
def test_what_came_before_initialize_names_what_replaces_it(amp, line):
    with pytest.raises(
        ImportError, match=r"not in halfstep's stand-in for apex.*halfstep\.initialize\(model, optimizer"
    ):
        exec(line, {})


def test_what_is_gone_hides_nothing_from_a_search_through_all_modules(amp):
    for name in ("apex", "apex.amp", "apex.fp16_utils", "apex.multi_tensor_apply"):
        assert not hasattr(sys.modules[name], "flatten")
    assert pickle.loads(pickle.dumps(torch.flatten)) is torch.flatten
    with pytest.raises(ModuleNotFoundError, match="amp_C"):
        importlib.import_module("amp_C")


@pytest.fixture
def real(tmp_path, monkeypatch):
    """An apex of somebody else's, without amp, whose optimizers cannot be imported."""
    uninstall()
    folder = tmp_path / "apex"
    (folder / "parallel").mkdir(parents=True)
    (folder / "__init__.py").write_text("mark = 'real'\n")
    (folder / "parallel" / "__init__.py").write_text("class LARC:\n    own = True\n")
    (folder / "optimizers.py").write_text("raise ImportError('amp_C is not built')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def test_beside_a_real_apex_only_what_it_lacks_is_added(real):
    apex, parallel = importlib.import_module("apex"), importlib.import_module("apex.parallel")
    before = dict(vars(apex)), dict(vars(parallel))
    larc = parallel.LARC
    install()
    assert sys.modules["apex"] is apex
    assert apex.mark == "real"
    assert apex.amp is importlib.import_module("apex.amp")
    assert sys.modules["apex.parallel"] is parallel
    assert parallel.LARC is larc
    model = apex.amp.initialize(small(), opt_level="O2", verbosity=0)
    assert model[0].weight.dtype is torch.float16
    uninstall()
    assert (vars(apex), vars(parallel)) == before
    assert "apex.amp" not in sys.modules


def test_a_real_apex_that_has_amp_keeps_it(real):
    (real / "amp.py").write_text("initialize = 'its own'\n")
    install()
    amp = importlib.import_module("apex.amp")
    assert amp.initialize == "its own"
    assert callable(amp.scale_loss)
    uninstall()
    assert not hasattr(amp, "scale_loss")


def test_the_table_names_parents_first():
    seen = set()
    for name in MODULES:
        parent = name.rpartition(".")[0]
        assert not parent or parent in seen
        seen.add(name)
