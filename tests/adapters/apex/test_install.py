"""`install` and `uninstall`: a stand-in where apex is not installed, additions beside one that is, undone exactly."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch

from halfstep.adapters.apex import install, uninstall
from halfstep.adapters.apex.install import MODULES
from halfstep.errors import HalfstepError
from tests.adapters.apex.cases import loss_of, sgd, small, step, values, vectors

AMP = {
    "init",
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


def torchs():
    """Returns every attribute of what apex used to patch."""
    places = (torch, torch.nn.functional, torch.Tensor, torch.nn, torch.optim, torch.nn.Module, torch.optim.Optimizer)
    return {(place.__name__, name): value for place in places for name, value in vars(place).items()}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_uninstall_leaves_every_object_as_it_was(low, level):
    uninstall()
    model = small()
    optimizer = sgd(model)
    loss_of(model, vectors()).backward()
    optimizer.step()  # torch itself replaces some of its functions at their first use
    modules, before, cache = dict(sys.modules), torchs(), torch.is_autocast_cache_enabled()
    install(low=low)
    amp = importlib.import_module("apex.amp")
    classes = [type(module) for module in model.modules()]
    amp.register_half_function(torch.nn.functional, "normalize")
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.init()
    step(amp, model, optimizer, vectors())
    weights = values(model)
    uninstall()
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert not [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]
    after = torchs()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert [type(module) for module in model.modules()] == classes
    assert "step" not in vars(optimizer)
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


def test_install_again_changes_the_format():
    install(low="bf16")
    install(low=torch.float16)
    amp = importlib.import_module("apex.amp")
    model = amp.initialize(small(), opt_level="O2", verbosity=0)
    assert model[0].weight.dtype is torch.float16
    for wrong in ("fp8", "e4m3", 16):
        with pytest.raises(HalfstepError):
            install(low=wrong)


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


def test_halfstep_alone_imports_none_of_it():
    code = "import sys, halfstep; print([m for m in sys.modules if m.startswith(('apex', 'halfstep.adapters'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
