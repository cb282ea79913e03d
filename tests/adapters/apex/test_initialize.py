"""`amp.initialize`: shapes in and out, the options of each level, what is refused, what is printed."""

import warnings

import pytest
import torch
from torch import nn

from halfstep.adapters.apex import sessions
from halfstep.errors import SetupError
from tests.adapters.apex.cases import LEVELS, batch, loss_of, network, same, sgd, small, values, vectors

TABLE = {  # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": ("low", False, True, True, "dynamic"),
    "O3": ("low", False, False, False, 1.0),
}
NAMES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_the_options_of_apexs_table(amp, low, level):
    model = small()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    options = amp._amp_state.opt_properties.options
    assert tuple(options[name] for name in NAMES) == tuple(low if v == "low" else v for v in TABLE[level])
    assert (options["enabled"], options["opt_level"]) == (True, level)
    assert amp._amp_state.opt_properties.opt_level == level


def test_returns_have_the_shape_of_what_was_given(amp):
    def pair(seed):
        model = small(seed)
        return model, sgd(model)

    (a, p), (b, q) = pair(0), pair(1)
    assert amp.initialize(a, p, verbosity=0) == (a, p)
    a, p = pair(0)
    assert amp.initialize([a], [p], verbosity=0) == ([a], [p])
    (a, p), (b, q) = pair(0), pair(1)
    assert amp.initialize([a, b], [p, q], verbosity=0) == ([a, b], [p, q])
    assert amp.initialize(small(), verbosity=0).__class__ is not tuple
    (model,) = amp.initialize([small()], opt_level="O2", verbosity=0)
    assert isinstance(model, nn.Module)
    a, _ = pair(0)
    assert amp.initialize(a, [], verbosity=0) == (a, [])


@pytest.mark.parametrize("level", LEVELS)
def test_stored_formats(amp, low, level):
    model = network()
    model, _ = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert sessions()[0].plan.name == level
    stored = torch.float32 if level in ("O0", "O1") else low
    assert {model.conv.weight.dtype, model.last.bias.dtype, model.norm.weight.dtype} == {stored}
    norm = low if level == "O3" else torch.float32
    assert {model.bn.weight.dtype, model.bn.running_var.dtype} == {norm}
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float32}
    assert model(batch()[0]).dtype is torch.float32


def test_a_batch_norm_that_is_kept_takes_fp32_values_as_they_come(amp):
    seen = []

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)
            self.bn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))

        def forward(self, x):
            out = self.bn(self.fc(x).float() + 2.0**-20)
            seen.append(out.dtype)
            return out

    amp.initialize(Wide(), opt_level="O2", verbosity=0)(vectors()[0])
    assert seen == [torch.float32, torch.float32]


KINDS = {
    "affine": lambda: nn.BatchNorm1d(4),
    "synchronized": lambda: nn.SyncBatchNorm(4),
    "without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_every_affine_batch_norm_is_kept_or_cast(amp, low, level, kind, keep):
    model = nn.Sequential(nn.Linear(8, 4), KINDS[kind](), nn.Linear(4, 4))
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, keep_batchnorm_fp32=keep, verbosity=0)
    expected = torch.float32 if keep else low
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].bias.dtype) == (low, expected, expected)
    if kind != "without statistics":
        assert model[1].running_var.dtype is expected
    if kind != "synchronized":  # which wants processes on GPUs
        with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
            scaled.backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("given", [True, False, "True", "False"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_keep_batchnorm_fp32_is_taken_also_as_text(amp, low, level, given):
    model = network()
    model, _ = amp.initialize(model, sgd(model), opt_level=level, keep_batchnorm_fp32=given, verbosity=0)
    assert model.bn.weight.dtype is (torch.float32 if given in (True, "True") else low)
    assert torch.isfinite(model(batch()[0])).all()


@pytest.mark.parametrize("level", LEVELS)
def test_model_sees_inputs_and_returns_outputs_in_the_levels_format(amp, low, level):
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    model = Looking(8, 4)
    model = amp.initialize(model, opt_level=level, verbosity=0)
    assert model(torch.ones(1, 8)).dtype is torch.float32
    assert seen == [torch.float32 if level in ("O0", "O1") else low]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("full", [True, False])
def test_cast_model_outputs(amp, low, level, full):
    wanted = torch.float32 if full else low
    model = amp.initialize(small(), opt_level=level, cast_model_outputs=wanted, verbosity=0)
    assert model(vectors()[0]).dtype is wanted


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_master_weights(amp, level, master):
    model = small()
    optimizer = sgd(model, lr=2.0**-14, momentum=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, master_weights=master, verbosity=0)
    before = values(model)
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    moved = torch.cat([(values(model)[name] != before[name]).flatten() for name in before])
    assert bool(moved.float().mean() > 0.5) is master  # a low weight's last place is far above these updates


@pytest.mark.parametrize("explicit", [torch.float16, torch.bfloat16])
def test_a_type_that_the_script_names_is_taken(amp, explicit):
    model = small()
    model, _ = amp.initialize(model, sgd(model), opt_level="O2", cast_model_type=explicit, verbosity=0)
    assert model[0].weight.dtype is explicit


def test_casting_to_fp32_leaves_the_model_as_written_under_a_scale(amp):
    model, plain = small(), small()
    optimizer = sgd(model)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", cast_model_type=torch.float32, loss_scale=128, verbosity=0
    )
    loss = loss_of(model, vectors())
    with amp.scale_loss(loss, optimizer) as scaled:
        assert torch.equal(scaled, loss * 128)
        scaled.backward()
    loss_of(plain, vectors()).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("level", "override", "error", "words"),
    [
        ("O1", {"cast_model_type": torch.float16}, RuntimeError, "should remain FP32"),
        ("O1", {"cast_model_type": torch.bfloat16}, RuntimeError, "should remain FP32"),
        ("O2", {"patch_torch_functions": True}, RuntimeError, "selecting opt_level='O1'"),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32 should be None"),
        ("O1", {"master_weights": True}, RuntimeError, "doesn't make sense"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, ValueError, "keep_batchnorm_fp32 is 'yes'; pass True or"),
        ("O3", {"master_weights": "no"}, ValueError, "master_weights is 'no'; pass True or False"),
        ("O2", {"cast_model_type": torch.float64}, ValueError, "pass torch.float16"),
        ("O1", {"loss_scale": "big"}, ValueError, "loss_scale is 'big'; pass a number, such as 128.0 or '128.0'"),
        ("O2", {"loss_scale": 0}, ValueError, "loss_scale is 0; expected a number from"),
        ("O1", {"min_loss_scale": "1"}, ValueError, "min_loss_scale is '1' of type str; expected a number"),
        ("O1", {"max_loss_scale": None}, ValueError, "max_loss_scale is None of type NoneType; expected a number"),
        ("O1", {"verbosity": "1"}, ValueError, "verbosity is '1'; pass 0"),
        ("O1", {"cast_model_outputs": torch.float64}, ValueError, "cast_model_outputs"),
        ("O1", {"num_losses": 0}, ValueError, "num_losses"),
        ("O1", {"enabled": "no"}, ValueError, "enabled is 'no'; pass True or False"),
        ("O1", {"min_loss_scale": 2.0**20, "max_loss_scale": 2.0**10}, ValueError, "above max"),
        ("02", {}, RuntimeError, "letter O, not the number zero"),
    ],
)
def test_what_contradicts_a_level_is_refused_and_nothing_is_changed(amp, level, override, error, words):
    model = small()
    optimizer = sgd(model)
    with pytest.raises(error, match=words):
        amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **override})
    assert type(model) is nn.Sequential
    assert "step" not in vars(optimizer)
    assert amp.initialize(model, optimizer, verbosity=0) == (model, optimizer)


@pytest.mark.parametrize("value", [None, False, torch.float32])
def test_o1_takes_a_model_type_that_casts_nothing(amp, value):
    model = small()
    amp.initialize(model, sgd(model), opt_level="O1", cast_model_type=value, verbosity=0)
    assert model[0].weight.dtype is torch.float32


def test_hard_override_prints_in_place_of_raising(amp, capsys):
    model = small()
    amp._amp_state.hard_override = True
    amp.initialize(model, sgd(model), opt_level="O1", keep_batchnorm_fp32=True, verbosity=0)
    assert capsys.readouterr().out.startswith("Warning:  With opt_level O1, batchnorm")


def test_a_model_has_no_master_params(amp):
    with pytest.raises(TypeError, match="master_params got Sequential; pass the optimizer"):
        list(amp.master_params(small()))


def test_tuples_strings_and_none_are_no_models(amp):
    model = small()
    for models, optimizers in [((model,), sgd(model)), (None, None), ("model", None), (model, (sgd(model),))]:
        with pytest.raises(TypeError, match="or a list of them"):
            amp.initialize(models, optimizers, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_wrapped_models_are_refused(amp, level):
    with pytest.raises(RuntimeError, match="Parallel wrappers should only be applied"):
        amp.initialize(nn.DataParallel(small()), opt_level=level, verbosity=0)

    class DistributedDataParallel(nn.Sequential):
        """A wrapper of some library's."""

    with pytest.raises(RuntimeError, match="AFTER"):
        amp.initialize(DistributedDataParallel(small()), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_half_model_is_refused_unless_it_is_said_to_be_meant(amp, low, level):
    model = small().to(low)
    with pytest.raises(RuntimeError, match=r"Found param 0\.weight with type"):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    before = values(model)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert same({k: v.float() for k, v in before.items()}, values(model))
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_frozen_stays_as_it_came_but_at_o0_and_all_of_it_after_an_error(amp, low, level, scale):
    model = small().to(low)
    model[0].requires_grad_(False)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    with pytest.raises(SetupError, match="do not belong to the model"):
        amp.initialize(model, sgd(small()), opt_level=level, loss_scale=scale, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {low}
    model, optimizer = amp.initialize(model, sgd(model[2]), opt_level=level, loss_scale=scale, verbosity=0)
    assert model[0].weight.dtype is (torch.float32 if level == "O0" else low)
    assert model[2].weight.dtype is (torch.float32 if level in ("O0", "O1") else low)
    before = values(model)["2.weight"]
    with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert before.dtype is torch.float32
    assert not torch.equal(before, values(model)["2.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_a_half_buffer_is_refused_too_and_hard_override_prints_in_place_of_raising(amp, low, level, capsys):
    model = small()
    model.register_buffer("mean", torch.ones(2, dtype=low))
    with pytest.raises(RuntimeError, match="Found buffer mean with type"):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    amp._amp_state.hard_override = True
    with pytest.raises(ValueError, match="num_losses"):
        amp.initialize(model, sgd(model), opt_level=level, num_losses=0, verbosity=0)
    assert model.mean.dtype is low  # nothing is changed
    capsys.readouterr()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert capsys.readouterr().out.startswith("Warning:  Found buffer mean")


def test_options_are_read_and_set_by_arguments_alone(amp):
    model = small()
    amp.initialize(model, sgd(model), verbosity=0)
    with pytest.raises(AttributeError, match=r"loss_scale is read-only; set it with .* amp\.initialize"):
        amp._amp_state.opt_properties.loss_scale = 128.0
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"


def test_optimizers_that_scale_themselves_are_refused(amp):
    model = small()

    class Other(torch.optim.SGD):
        """One of another library."""

    Other.__name__ = "FP16_Optimizer"
    optimizer = Other(model.parameters(), lr=0.1)
    for given in (optimizer, [optimizer]):
        with pytest.raises(RuntimeError, match="instance of FP16_Optimizer"):
            amp.initialize(model, given, verbosity=0)


def test_an_optimizer_is_initialized_once_but_other_models_may_follow(amp):
    model = small()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, verbosity=0)
    with pytest.raises(RuntimeError, match="already"):
        amp.initialize(model, optimizer, verbosity=0)
    other = small(1)
    other, other_optimizer = amp.initialize(other, sgd(other), opt_level="O2", verbosity=0)
    for model_, optimizer_ in ((model, optimizer), (other, other_optimizer)):
        with amp.scale_loss(loss_of(model_, vectors()), optimizer_) as scaled:
            scaled.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_printed(amp, low, level, capsys):
    model = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # apex warned that amp was deprecated
        amp.initialize(model, sgd(model), opt_level=level, loss_scale="128.0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Selected optimization level {level}:  ")
    assert "Defaults for this optimization level are:" in lines
    assert "Processing user overrides (additional kwargs that are not None)..." in lines
    after = lines[lines.index("After processing overrides, optimization options are:") :]
    assert after[1:] == [
        "enabled                : True",
        f"opt_level              : {level}",
        *(f"{name:22} : {low if v == 'low' else v}" for name, v in zip(NAMES[:-1], TABLE[level][:-1], strict=True)),
        "loss_scale             : 128.0",
    ]


def test_a_floor_above_the_first_scale_raises_that(amp):
    model = small()
    amp.initialize(model, sgd(model), min_loss_scale=2.0**20, verbosity=0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**20


@pytest.mark.parametrize("least", [None, 4.0])
def test_bounds_of_the_scale(amp, least):
    model = small()
    amp.initialize(model, sgd(model), min_loss_scale=least, max_loss_scale=2.0**10, verbosity=0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**10
    scaling = next(iter(amp._amp_state.sessions())).session.plan.scale
    assert (scaling.min, scaling.max) == (2.0**-126 if least is None else 4.0, 2.0**10)
    assert (scaling.growth, scaling.backoff, scaling.growth_interval) == (2.0, 0.5, 2000)


@pytest.mark.parametrize("level", LEVELS)
def test_not_enabled_is_as_if_amp_were_not_there(amp, level):
    model, plain = small(), small()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    assert amp.initialize(model, optimizer, enabled=False, opt_level=level) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = loss_of(model, vectors())
    with amp.scale_loss(loss, optimizer) as scaled, amp.disable_casts():
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    loss_of(plain, vectors()).backward()
    plain_optimizer.step()
    assert same(values(model), values(plain))
    assert amp.state_dict() == {}
    amp.load_state_dict({})
