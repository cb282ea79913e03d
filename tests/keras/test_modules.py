"""A Keras model on torch in a loop by hand: sessions, blame, check and whatif know its layers by Keras's names."""

import copy

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

import halfstep
from halfstep.adapters.keras import as_modules
from halfstep.adapters.keras.modules import seen_as_modules
from halfstep.adapters.keras.policies import children_of, layers_of
from halfstep.edits import FULL, Rule
from halfstep.errors import SetupError
from halfstep.kinds import Kind
from tests.keras.common import BACKEND, keras, numbers, on
from tests.keras.test_find import FAULTS, SOME, batch, images, nested, words
from tests.keras.zoo import layers

pytestmark = pytest.mark.filterwarnings("ignore")
BUILDS = (images, nested, words)


class Stack(keras.Model):
    """A model of one's own that holds its layers as an attribute and in a list."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(4, name="wide")
        self.rest = [layers.Dense(4, name=f"part_{i}") for i in range(2)]

    def call(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


def stack():
    model = Stack()
    model(np.ones((2, 4), "float32"))
    return model


def registered(model):
    """Has Keras register variables, which it does when a layer is built or at the first look."""
    assert [layer.torch_params for _, layer in layers_of(model)]
    return model


def seen(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, layers.Layer)}


@on("torch")
@pytest.mark.parametrize("build", [*BUILDS, stack])
def test_layers_are_modules_under_their_own_names_and_nothing_else_changes(build, tmp_path):
    import torch

    model = registered(build())
    x = batch(model)[0] if build is not stack else np.ones((2, 4), "float32")
    keys, values = list(model.state_dict()), model.get_weights()
    out = numbers(model(x))
    model.save_weights(tmp_path / "before.weights.h5")
    assert as_modules(as_modules(model)) is model
    assert seen(model) == dict(layers_of(model))
    parameters = dict(model.named_parameters())
    for path, layer in layers_of(model):
        for v in layer.trainable_weights:
            if not any(v is each for below in children_of(layer) for each in below.weights):
                assert parameters.pop(f"{path}.{v.name}") is v.value
    assert parameters == {}
    assert {name.rpartition(".")[2] for name, _ in model.named_buffers()} <= {"moving_mean", "moving_variance"}
    assert sorted(model.state_dict()) == sorted(keys)
    assert np.array_equal(numbers(model(x)), out)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), values, strict=True))
    model.save_weights(tmp_path / "after.weights.h5")
    other = build()
    other.load_weights(tmp_path / "after.weights.h5")
    model.load_weights(tmp_path / "before.weights.h5")
    assert np.array_equal(numbers(other(x)), out)
    twin = copy.deepcopy(model)
    assert list(seen(twin)) == list(seen(model))
    assert np.array_equal(numbers(twin(x)), out)
    twin.set_weights([v + 1 for v in values])
    assert np.array_equal(numbers(model(x)), out)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not any(value.any() for value in model.get_weights())


@on("torch")
@pytest.mark.parametrize("build", [*BUILDS, stack])
def test_what_was_seen_as_modules_for_a_while_is_as_before(build):
    from torch import nn

    model = registered(build())

    def state():
        held = [(each, list(each.items())) for each in nn.Module.modules(model) if isinstance(each, nn.ParameterDict)]
        return [*model.named_modules(remove_duplicate=False)], [*model.named_parameters()], held, list(vars(model))

    before = state()
    with seen_as_modules(model):
        assert seen(model) == dict(layers_of(model))
    after = state()
    assert [name for name, _ in after[0]] == [name for name, _ in before[0]]
    assert [(name, id(p)) for name, p in after[1]] == [(name, id(p)) for name, p in before[1]]
    assert [(id(d), [(k, id(p)) for k, p in own]) for d, own in after[2]] == [
        (id(d), [(k, id(p)) for k, p in own]) for d, own in before[2]
    ]
    assert after[3] == before[3]
    as_modules(model)
    with seen_as_modules(model):
        pass
    assert seen(model) == dict(layers_of(model))


def closure_of(model, x, y):
    import torch

    x, y = torch.from_numpy(x), torch.from_numpy(y)
    return lambda: torch.nn.functional.mse_loss(model(x, training=True).float(), y)


def session_of(model, low="fp16", **settings):
    import torch

    return halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), "O1", low=low, **settings)


# Where autocast is halfstep's, biases are added and squares made in fp32: what they take beyond fp16 overflows in the
# next product.
LATER = {
    "overflow in a block": "block.narrow",
    "overflow in a nested model": "head",
    "overflow in a block's own code": "b",
    "overflow in a block's own code at O3": "b",
}


@on("torch")
@pytest.mark.slow_but(*(word for word in SOME if word != "add_loss"))
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "overflow in add_loss"])  # of losses in `fit`
def test_blame_names_the_layer_of_a_planted_fault(name):
    (build, plan), plant, scale, layer, kind = FAULTS[name]
    layer = LATER.get(name, layer)
    model = as_modules(build())
    x, y = plant(model, *batch(model))
    with session_of(model, loss_scale=scale, rules=plan.rules) as session:
        verdict = halfstep.blame(session, closure_of(model, x, y))
    assert (verdict.module, verdict.kind) == (layer, kind), verdict


@on("torch")
def test_a_session_of_a_keras_model_takes_rules_and_keeps_statistics_of_a_skipped_step():
    """An infinite pixel, whose infinity reaches the statistics."""
    model = as_modules(images())
    x, y = batch(model)
    x[0, 0, 0, 0] = np.inf
    before = [value.copy() for value in model.get_weights()]
    with session_of(model, rules=[Rule("head", FULL)], loss_scale=64.0, on_failure="warn") as session:
        assert session.assignment.of("head").reason == "rule 'head'"
        session.backward(closure_of(model, x, y)())
        assert np.isinf(model.get_layer("norm").moving_mean.value.detach().numpy()).any()
        assert bool(session.step().skipped)
        assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
        model.zero_grad()
        x[0, 0, 0, 0] = 1.0
        session.backward(closure_of(model, x, y)())
        assert not bool(session.step().skipped)
    assert all((a != b).any() for a, b in zip(model.get_weights(), before, strict=True) if a.ndim)
    assert all(np.isfinite(value).all() for value in model.get_weights())


@on("torch")
def test_a_session_that_stores_low_gives_fp32_to_what_saves_in_full_weights():
    import torch

    model = as_modules(images())
    closure = closure_of(model, *batch(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with halfstep.initialize(model, optimizer, "O2", low="bf16") as session:
        for _ in range(3):
            optimizer.zero_grad()
            session.backward(closure())
            session.step()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in model.buffers()} == {torch.float32}
        with session.full_weights():
            held, saved = {k: v.clone() for k, v in model.state_dict().items()}, model.get_weights()
    assert {value.dtype for value in held.values()} == {torch.float32}
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert all(np.array_equal(a, b) for a, b in zip(saved, model.get_weights(), strict=True))


@on("torch")
def test_a_cure_is_tried_on_a_copy_and_weights_check_and_whatif_name_layers():
    model = as_modules(images())
    x, y = FAULTS["overflow of a convolution"][1](model, *batch(model))
    with session_of(model, loss_scale=64.0) as session:
        verdict = halfstep.blame(session, closure_of(model, x, y))
        assert verdict.module == "conv"
        assert verdict.cure, verdict
        assert "tried: " in verdict.advice
        kernel = model.get_layer("conv").kernel
        kernel.assign(np.full(kernel.shape, 1e5))
        places = [finding.place for finding in halfstep.check(session, closure_of(model, x, y))]
        assert any(place.startswith("conv") for place in places), places
        kernel.assign(np.full(kernel.shape, np.nan))
        verdict = halfstep.blame(session, closure_of(model, x, y))
        assert (verdict.module, verdict.kind) == ("conv", Kind.WEIGHTS)
        assert "conv.kernel" in verdict.evidence
    model = as_modules(nested())
    x, y = batch(model)
    rows = {row.module for row in halfstep.whatif(closure_of(model, x, y), model).rows}
    assert {"a", "encoder.deep", "head"} <= rows, rows


@on("tensorflow", "jax")
def test_other_backends_have_no_modules():
    with pytest.raises(SetupError, match=rf"but the backend is {BACKEND}"):
        as_modules(nested())


@on("torch")
def test_what_has_no_layers_yet_is_refused():
    with pytest.raises(
        SetupError, match=r"layer 'one' of .* is not built; call the model on a batch first: model\(x\)"
    ):
        as_modules(keras.Sequential([layers.Dense(1, name="one")]))
    with pytest.raises(SetupError, match=r"pass a keras\.Model"):
        as_modules(layers.Dense(1))
