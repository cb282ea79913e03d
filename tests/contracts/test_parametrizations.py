"""Parametrizations compute full at low weights, from stored originals that are low; quantized layers are given fp32."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import halfstep
from halfstep import LOW, Rule
from halfstep.formats import as_format

LOWS = pytest.mark.parametrize("low", ["bf16", "fp16"])
LEVELS = pytest.mark.parametrize("name", ["O2", "O3"])
KINDS = {
    "matrix_exp": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "householder": lambda layer: parametrizations.orthogonal(
        layer, orthogonal_map="householder", use_trivialization=False
    ),
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
}


class Symmetric(nn.Module):
    """A user's own, with a parameter and a product."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(8, 8) / 8)

    def forward(self, x):
        self.seen = x.dtype
        return (x + x.mT) @ self.by


def train(net, name, low, steps=20):
    torch.manual_seed(1)
    session = halfstep.initialize(net, torch.optim.SGD(net.parameters(), lr=0.05), name, low=low)
    skipped = 0
    for _ in range(steps):
        session.backward(net(torch.randn(8, 8)).square().mean() / 64)
        skipped += bool(session.step().skipped)
        for p in net.parameters():
            p.grad = None
    return session, skipped


@pytest.mark.slow_but("cayley-fp16-O3", "weight_norm-bf16-O2")
@LEVELS
@LOWS
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_fp32s_of_the_stored_original_rounded_once(kind, name, low):
    net = nn.Sequential(KINDS[kind](nn.Linear(8, 8)), nn.Linear(8, 4))
    names = list(net.state_dict())
    session, skipped = train(net, name, low)
    assert skipped == 0
    dtype = as_format(low).dtype
    stored = net[0].parametrizations.weight
    assert {p.dtype for p in stored.parameters(recurse=False)} == {dtype}
    net.eval()  # spectral_norm moves its vectors in training
    originals = [p.detach().float() for p in stored.parameters(recurse=False)]
    with session.autocast():
        weight = net[0].weight.detach()
    assert weight.dtype is dtype
    assert {value.dtype for value in net.state_dict().values()} == {torch.float32}
    session.close()
    assert list(net.state_dict()) == names
    plain = copy.deepcopy(net[0].parametrizations.weight)
    for own, value in zip(plain.parameters(recurse=False), originals, strict=True):
        own.data.copy_(value)
    assert torch.equal(weight, plain().detach().to(dtype))


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", ["matrix_exp", "own"])
def test_a_weight_that_is_read_outside_of_the_model_is_computed_in_fp32(name, kind):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "own":
        parametrize.register_parametrization(net[1], "weight", Symmetric())
    else:
        KINDS[kind](net[1])
    session, _ = train(net, name, "bf16", steps=3)
    inside = []
    net[1].register_forward_pre_hook(lambda layer, _: inside.append(layer.weight.detach()))
    net(torch.randn(2, 8))
    read = net[1].weight
    assert read.dtype is torch.float32
    assert read.requires_grad
    twin = copy.deepcopy(net[1].parametrizations.weight)  # which is fp32
    twin.original.data.copy_(net[1].parametrizations.weight.original.detach())  # as stored
    assert torch.equal(read, twin.forward())
    assert inside[0].dtype is torch.bfloat16
    if name == "O1":  # at others it is refused, as below
        parametrize.remove_parametrizations(net[1], "weight")
        assert torch.equal(net[1].weight, read)
    session.close()


@LEVELS
@LOWS
def test_a_users_own_sees_fp32_and_keeps_its_parameters_full(name, low):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    own = Symmetric()
    parametrize.register_parametrization(net[0], "weight", own)
    session, skipped = train(net, name, low)
    assert skipped == 0
    assert own.seen is torch.float32
    assert own.by.dtype is torch.float32
    with parametrize.cached():
        assert net(torch.randn(2, 8)).dtype is torch.float32
        net(torch.randn(2, 8)).sum().backward()
    assert net[0].weight.dtype is torch.float32  # read outside of every forward: as what a model returns
    session.close()
    with halfstep.initialize(net, None, name, low=low, rules=[Rule("0.parametrizations.weight.0", LOW)]):
        net(torch.randn(2, 8))
        assert own.seen is as_format(low).dtype


@LEVELS
@LOWS
@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "spectral_norm", "weight_norm"])
def test_one_that_is_registered_in_a_session_trains_or_names_the_weight(kind, name, low):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    session, _ = train(net, name, low, steps=1)
    KINDS[kind](net[0])
    for _ in range(2):
        session.backward(net(torch.randn(8, 8)).square().mean())
        if kind == "weight_norm":
            with pytest.raises(halfstep.SessionError, match=r"no longer in the model \(0\.weight\).*or weight_norm"):
                session.step()
            return
        session.step()
    assert kind == "spectral_norm" or net[0].parametrizations.weight[0].base.dtype is torch.float32
    with session.autocast():
        weight = net[0].weight.detach().float()
    assert kind == "spectral_norm" or (weight @ weight.T - torch.eye(8)).abs().max() < 0.03


OLDER = pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.weight_norm])


def hooked(wrap, inside):
    torch.manual_seed(0)
    layer = wrap(nn.Linear(8, 8))
    return nn.Sequential(layer) if inside else layer


@pytest.mark.slow_but("O3-False-bf16-spectral_norm")
@OLDER
@LOWS
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
def test_the_older_hooks_of_a_model_compute_under_the_plan_as_those_of_its_layers_do(name, low, compiled, wrap):
    outs = []
    for inside in (True, False):
        net = hooked(wrap, inside)
        session = halfstep.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), name, low=low)
        call = torch.compile(net, backend="eager") if compiled and not inside else net
        torch.manual_seed(1)
        for _ in range(3):
            session.backward(call(torch.randn(4, 8)).square().mean())
            assert not bool(session.step().skipped)
            net.zero_grad()
        outs.append(net(torch.ones(2, 8)))
        session.close()
        assert net(torch.ones(2, 8)).dtype is torch.float32
    assert torch.equal(*outs)


@LOWS
@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
def test_the_older_weight_norm_trains_where_its_lengths_are_frozen(name, low):  # as in DINO's head: they stay fp32
    plain, net = hooked(nn.utils.weight_norm, inside=True), hooked(nn.utils.weight_norm, inside=True)
    net[0].weight_g.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    with halfstep.initialize(net, optimizer, name, low=low) as session:
        out = net(torch.ones(2, 8))
        session.backward(out.float().square().mean())
        session.unscale_()
        assert torch.allclose(out.float(), plain(torch.ones(2, 8)), rtol=0, atol=2**-6)
        plain(torch.ones(2, 8)).square().mean().backward()
        assert torch.allclose(net[0].weight_v.grad.float(), plain[0].weight_v.grad, rtol=0, atol=2**-6)
        assert not bool(session.step(optimizer).skipped)


@OLDER
@pytest.mark.parametrize("called", ["model", "layer"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
def test_the_older_hooks_of_a_layer_with_a_rule_compute_by_the_rule(called, wrap):
    plain = hooked(wrap, inside=True)
    expected = [plain(torch.ones(2, 8)) for _ in range(3)]
    net = hooked(wrap, inside=True)
    with halfstep.initialize(net, None, "O2", low="bf16", rules=[Rule("0", halfstep.FULL)]):
        for value in expected:
            assert torch.equal((net if called == "model" else net[0])(torch.ones(2, 8)), value)


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_dynamically_quantized_layer_is_given_fp32(name):
    if not {"fbgemm", "x86", "qnnpack"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this torch has no quantized kernels")
    last = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear})
    net, x = nn.Sequential(nn.Linear(8, 8), last), torch.randn(2, 8)
    with halfstep.initialize(net, None, name, low="bf16"):
        assert net(x).dtype is torch.float32
        assert net[1](x).dtype is torch.float32


def trained_on(net, session, optimizer):
    for p in net.parameters():
        p.grad = None
    before = {key: value.clone() for key, value in net.state_dict().items()}
    session.backward(net(torch.randn(4, 8)).square().mean() / 64)
    assert not bool(session.step().skipped)
    after = net.state_dict()
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert [key for key in before if torch.equal(before[key], after[key])] == []
    net.load_state_dict(before)
    assert [key for key, value in net.state_dict().items() if not torch.equal(value, before[key])] == []


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_parametrizations_begin_and_end_inside_a_session(name, bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias))
    parametrize.register_parametrization(net[0], "weight", nn.Identity())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    session = halfstep.initialize(net, optimizer, name, low="bf16")
    parametrize.remove_parametrizations(net[0], "weight", leave_parametrized=False)
    parametrize.register_parametrization(net[1], "weight", nn.Identity())
    trained_on(net, session, optimizer)
    assert net[0](torch.randn(1, 8)).dtype is torch.float32  # still a door
    session.close()
    assert type(net[0]) is nn.Linear
    trained = copy.deepcopy(net.state_dict())
    assert set(trained) == {"0.weight", "1.parametrizations.weight.original", *(["0.bias", "1.bias"] if bias else [])}
    net(torch.randn(1, 8))


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_a_second_parametrization_of_a_module_outlives_the_session(name):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parametrize.register_parametrization(net[0], "weight", nn.Identity())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    session = halfstep.initialize(net, optimizer, name, low="bf16")
    parametrize.register_parametrization(net[0], "bias", nn.Identity())
    trained_on(net, session, optimizer)
    session.close()
    net(torch.randn(1, 8))


@pytest.mark.parametrize("kind", ["own", "weight_norm", "matrix_exp"])
@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_a_baked_weight_is_computed_from_the_exact_values_and_trains_on(name, low, kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "own":
        parametrize.register_parametrization(net[0], "weight", Symmetric())
    else:
        KINDS[kind](net[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session, x = halfstep.initialize(net, optimizer, name, low=low), torch.randn(4, 8)
    for _ in range(2):
        optimizer.zero_grad()
        session.backward(net(x).square().mean())
        session.step()
    expected = copy.deepcopy(net)[0].weight.detach()
    parametrize.remove_parametrizations(net[0], "weight")
    for _ in range(2):
        assert torch.equal(net.state_dict()["0.weight"], expected)
        out = net(x)
    if kind != "weight_norm":  # which leaves a new parameter, that no optimizer has
        optimizer.zero_grad()
        session.backward(out.square().mean())
        assert not bool(session.step().skipped)
        assert net[0].weight.dtype is (torch.float32 if name == "O1" else as_format(low).dtype)
        expected = net.state_dict()["0.weight"]
    session.close()
    assert torch.equal(net[0].weight, expected)
    assert type(net[0]) is nn.Linear
