"""The plan is entered by whichever module of a model is called first: submodules and methods outside of its forward."""

from __future__ import annotations

import copy
import pickle
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import FULL, LOW, Rule
from halfstep.train.cast.enter import put_in_place
from halfstep.train.optim.masters import MasterStore
from tests.contracts.cases import mixed_plans

F = nn.functional


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        self.inner = self.a(self.norm(x))
        return x + self.b(self.inner.relu())


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec = nn.Sequential(nn.Linear(8, 8), Block(8)), nn.Sequential(Block(8), nn.Linear(8, 8))
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def encode(self, x):
        return self.enc(x)

    def decode(self, z):
        return self.dec(z)

    def project(self, z):
        return F.linear(z, self.w)

    def forward(self, x):
        return self.project(self.decode(self.encode(x)))


def started(name, low, **keywords):
    model = VAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, halfstep.initialize(model, optimizer, name, low=low, **keywords)


def autocast_bits():
    kinds = ("cpu", "ipu", "hpu", "xla", "mtia", "maia")
    return [torch.is_autocast_enabled(kind) for kind in kinds]


@mixed_plans
def test_a_submodule_or_method_outside_of_forward_runs_under_the_plan(name, low):
    model, session = started(name, low)
    x, dtype = torch.randn(4, 8), halfstep.formats.as_format(low).dtype
    for call in (model.encode, model.enc, model.enc[0], model.enc[1], model.dec[:1], model.dec[0].a):
        out = call(x)
        assert out.dtype is torch.float32
    computed = model.enc[0](x)
    assert torch.equal(computed, computed.to(dtype).float())  # low, and returned in fp32
    model.enc(x)
    assert model.enc[1].inner.dtype is dtype
    with session.autocast():
        assert model.enc[0](x).dtype is dtype
    before = model.enc[0].weight.detach().clone()
    session.backward(model.decode(model.encode(x)).square().mean() / 8)
    assert not bool(session.step().skipped)
    assert not torch.equal(before, model.enc[0].weight)
    assert autocast_bits() == [False] * 6
    session.close()


@mixed_plans
def test_inside_the_models_forward_nothing_is_entered_twice(name, low):
    model, session = started(name, low)
    seen = []
    model.enc[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    x = torch.randn(4, 8)
    dtype = halfstep.formats.as_format(low).dtype
    assert model(x).dtype is torch.float32
    assert seen == [dtype]  # fp32 would be what a module that is called first returns
    session.close()


@pytest.mark.slow_but("O1-fp16-False", "O2-bf16-True")
@pytest.mark.parametrize("reentrant", [True, False])
@mixed_plans
def test_a_checkpoint_of_a_module_called_first_computes_again_what_it_did(name, low, reentrant):
    """In session.backward the marker is on while the device's autocast is off: both bits are asked."""
    model, session = started(name, low)
    x, seen = torch.randn(4, 8, requires_grad=True), []
    model.dec[0].a.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    out = checkpoint(model.dec[0], x, use_reentrant=reentrant)
    session.backward(out.sum() / 64)
    gradient = model.dec[0].a.weight.grad.clone()
    session.step()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert out.dtype is torch.float32
    assert autocast_bits() == [False] * 6
    session.close()
    model, session = started(name, low)
    session.backward(model.dec[0](x).sum() / 64)
    assert torch.equal(model.dec[0].a.weight.grad, gradient)
    session.close()


@mixed_plans
def test_a_checkpoint_inside_the_model_returns_what_it_returned_outside_of_session_backward(name, low):
    """There autocast of the device is on and the marker is off."""

    class Checkpointed(VAE):
        def forward(self, x):
            return checkpoint(self.dec[0], self.enc[0](x), use_reentrant=True).float()

    model, seen = Checkpointed(), []
    session = halfstep.initialize(model, None, name, low=low)
    model.dec[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(torch.randn(4, 8)).sum().backward()
    assert len(seen) == 2
    assert seen[0] is seen[1]
    session.close()


def test_classes_stay_instances_and_come_back():
    model, session = started("O2", "bf16")
    assert all(isinstance(module, (nn.Linear, nn.LayerNorm, nn.Sequential, Block, VAE)) for module in model.modules())
    assert type(model.enc[0]) is not nn.Linear
    assert type(model.enc[0]) is type(model.dec[1])  # one subclass a class
    assert type(model.enc[1].norm) is not nn.LayerNorm  # nothing to enter, but hooks that no file is to hold
    session.close()
    assert {type(module) for module in model.modules()} == {VAE, nn.Sequential, nn.Linear, Block, nn.LayerNorm}
    assert model.enc[0](torch.randn(1, 8)).dtype is torch.float32


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_copies_are_made_once_whatever_the_depth(name, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))
    for _ in range(6):
        model = nn.Sequential(model)
    session = halfstep.initialize(model, None, name, low="bf16")
    copied = []
    clone, full = torch.Tensor.clone, MasterStore.full
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *a, **k: copied.append(1) or clone(self, *a, **k))
    monkeypatch.setattr(MasterStore, "full", lambda self, p: copied.append(1) or full(self, p))
    copy.deepcopy(model)
    assert len(copied) == 2  # weight and bias
    session.close()


def test_a_copy_or_pickle_of_a_part_is_fp32():
    model, session = started("O2", "bf16")
    part = copy.deepcopy(model.enc)
    assert {p.dtype for p in part.parameters()} == {torch.float32}
    assert part(torch.randn(1, 8)).dtype is torch.float32
    again = pickle.loads(pickle.dumps(model.enc[0]))
    assert type(again) is nn.Linear
    assert again.weight.dtype is torch.float32
    session.close()


def test_what_copies_itself_its_own_way_still_does():
    class Own(nn.Linear):
        def __deepcopy__(self, memo):
            twin = Own(8, 8)
            twin.weight, twin.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
            twin.by_hand = True
            return twin

    model = nn.Sequential(Own(8, 8))
    session = halfstep.initialize(model, None, "O2", low="bf16")
    twin = copy.deepcopy(model)
    assert twin[0].by_hand
    assert twin[0].weight.dtype is torch.float32
    session.close()


def test_wrapped_modules_are_left_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.DataParallel(nn.Linear(8, 8)))
    session = halfstep.initialize(model, None, "O1", low="bf16")
    assert type(model[1]) is nn.DataParallel
    assert type(model[1].module) is not nn.Linear  # entered below
    assert model[1](torch.randn(2, 8)).dtype is torch.float32
    session.close()


@mixed_plans
def test_modules_kept_full_are_full_inside_and_outermost(name, low):
    model, session = started(name, low, rules=[Rule("dec", FULL), *([Rule("dec.0.a", LOW)] if name != "O1" else [])])
    x = torch.randn(4, 8)
    full = F.linear(x, *(p.float() for p in model.dec[1].parameters()))
    assert torch.equal(model.dec[1](x), full)
    out = model.dec(x)
    assert out.dtype is torch.float32
    assert model.dec[0].inner.dtype is torch.float32
    assert model.dec(x.to(halfstep.formats.as_format(low).dtype)).dtype is torch.float32  # as the model's own outputs
    session.backward(model(x).sum() / 64)
    session.close()


def test_running_statistics_of_a_module_called_first_come_back_after_a_skip():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
    whole = nn.Sequential(model["a"], nn.Linear(4, 1))
    session = halfstep.initialize(whole, torch.optim.SGD(whole.parameters(), lr=0.1), "O2", low="bf16")
    norm = whole[0][1]
    before = norm.running_mean.clone()
    session.backward(whole[0](torch.full((4, 4), torch.inf)).sum())
    assert bool(session.step().skipped)
    assert torch.equal(norm.running_mean, before)
    session.close()


def test_an_interrupt_in_a_module_called_first_leaves_nothing_on():
    model, session = started("O2", "bf16")
    handle = model.enc[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.enc(torch.randn(1, 8))
    handle.remove()
    assert autocast_bits() == [False] * 6
    assert torch.is_autocast_cache_enabled()
    session.close()


def test_a_compiled_module_is_one_graph_inside_and_one_outermost():
    model, session = started("O2", "bf16", emulate=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.enc[0] = torch.compile(model.enc[0], backend=backend, fullgraph=True)
    x = torch.randn(4, 8)
    model(x)
    assert len(graphs) == 1
    assert model.enc[0](x).dtype is torch.float32
    assert len(graphs) == 2
    model(x)
    model.enc[0](x)
    assert len(graphs) == 2
    session.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_method_that_uses_a_low_parameter_itself_names_autocast(low):
    model, session = started("O2", low)
    z = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"VAE\.project: .*with session\.autocast\(\):"):
        model.project(z)
    with session.autocast():
        assert model.project(z).dtype is halfstep.formats.as_format(low).dtype
    assert model(z).dtype is torch.float32
    with pytest.raises(RuntimeError) as caught:
        model.decode(torch.randn(2, 3))
    assert "autocast" not in str(caught.value)  # another fault
    session.close()
    assert model.project(z).dtype is torch.float32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(8, 8), nn.Linear(8, 8)

    def logits(self, h):
        return F.linear(h, self.embed.weight)

    def weigh(self, h, operation):
        return operation(h, self.embed.weight)

    def forward(self, ids):
        return self.logits(self.body(self.embed(ids)))


def test_a_method_that_uses_a_low_parameter_of_a_submodule_names_autocast():
    """Tied logits: the model that multiplies with the embedding's weight has no parameter of its own."""
    model = Tied()
    session = halfstep.initialize(model, None, "O2", low="bf16")
    hidden = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"Tied\.logits: .*with session\.autocast\(\):"):
        model.logits(hidden)
    with session.autocast():
        model.logits(hidden)
    session.close()


@pytest.mark.parametrize(
    "operation",
    [
        lambda h, w: F.layer_norm(h, (8,), w[0]),
        lambda h, w: h.index_add(0, torch.tensor([0]), w[:1]),
        lambda h, w: h.scatter(0, torch.zeros(1, 8, dtype=torch.long), w[:1]),
        lambda h, w: torch.lerp(h, w[:2], 0.5),
        lambda h, w: F.prelu(h, w[0]),
        lambda h, w: F.embedding_bag(torch.tensor([[0]]), w, per_sample_weights=h[:1, :1], mode="sum"),
        lambda h, w: F.batch_norm(h, None, None, w[0], w[0], True),
    ],
)
def test_what_torch_says_of_mixed_formats_is_known(operation):
    model = Tied()
    session = halfstep.initialize(model, None, "O2", low="bf16")
    with pytest.raises(RuntimeError, match=r"Tied\.weigh: .*with session\.autocast\(\):"):
        model.weigh(torch.randn(2, 8), operation)
    session.close()


class Double(nn.Module):
    def forward(self, w):
        return 2 * w


def test_a_class_that_others_put_on_top_of_ours_is_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    session = halfstep.initialize(model, None, "O2", low="bf16")
    nn.utils.parametrize.register_parametrization(model[0], "weight", Double())
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    session.close()
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_blame_and_check_see_a_module_called_first():
    model, session = started("O2", "fp16")
    x = torch.full((2, 8), 3e4)
    found = halfstep.check(session, lambda: model.decode(model.encode(torch.randn(2, 8))).square().mean())
    assert [finding for finding in found if finding.severity == "error"] == []
    verdict = halfstep.blame(session, lambda: model.dec[0].a(model.enc[0](x) * 10).square().mean())
    assert verdict is not None
    session.close()


def test_a_stand_in_is_called_inside_the_plan_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with halfstep.initialize(model, None, "O2", low="bf16") as session:
        undo = put_in_place([(model[0], lambda x: x * 0 + 7)])
        with session.autocast():
            assert set(model[0](torch.ones(2, 4)).flatten().tolist()) == {7.0}
        undo()


class Unusual(nn.Module):
    """Modules that something else than the forward of their class computes in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.normed, self.scaled = nn.utils.spectral_norm(nn.Linear(8, 8)), nn.utils.weight_norm(nn.Linear(8, 8))
        self.bound, self.bare = nn.Linear(8, 8), nn.Module()
        self.bound.forward = lambda x: F.linear(x, self.bound.weight, self.bound.bias)
        self.bare.inner = nn.Linear(8, 8)
        self.bare.forward = lambda x: self.bare.inner(x) * 2

    def forward(self, x):
        x = self.bare(self.bound(self.scaled(self.normed(x))))
        self.computed = x
        return x


@mixed_plans
@pytest.mark.parametrize("amp", [False, True], ids=["", "in autocast"])
@pytest.mark.parametrize("part", ["", "normed", "scaled", "bound", "bare"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
def test_unusual_modules_called_first_run_under_the_plan(name, low, part, amp):
    model, dtype = Unusual().eval(), halfstep.formats.as_format(low).dtype
    session = halfstep.initialize(model, None, name, low=low)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = model.get_submodule(part)(torch.randn(4, 8))
    assert out.dtype is torch.float32
    assert torch.equal(out, out.to(dtype).float())
    model(torch.randn(4, 8))
    assert model.computed.dtype is dtype  # inside the model nothing returns fp32
    session.close()
    assert type(model.bound) is nn.Linear
    assert "__call__" not in vars(type(model.normed))


@mixed_plans
def test_weights_that_autocast_of_the_caller_has_cast_are_not_taken(name, low):
    """torch keeps one cast of a weight, whatever its format."""
    model, session = started(name, low)
    with torch.autocast("cpu", torch.bfloat16):
        before = F.linear(torch.ones(1, 8), model.enc[0].weight)
        assert model.enc[0](torch.ones(1, 8)).dtype is torch.float32
        assert torch.equal(F.linear(torch.ones(1, 8), model.enc[0].weight), before)
    session.close()


@pytest.mark.parametrize("reentrant", [True, False])
@mixed_plans
def test_a_checkpoint_of_a_module_called_first_in_autocast_of_the_caller_has_the_same_gradients(name, low, reentrant):
    gradients = []
    for compute in (lambda block, x: block(x), lambda block, x: checkpoint(block, x, use_reentrant=reentrant)):
        model, session = started(name, low)
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = compute(model.dec[0], x)
        assert out.dtype is torch.float32
        session.backward(out.sum() / 64)
        gradients.append(model.dec[0].a.weight.grad.clone())
        session.close()
    assert torch.equal(*gradients)


class Counting(nn.Linear):
    calls = 0
    largest: float

    def forward(self, x):
        type(self).calls += 1
        self.__class__.largest = 2.0
        return super().forward(x)


@mixed_plans
def test_what_a_module_writes_to_its_class_reaches_the_users_class_at_once(name, low):
    class Own(Counting, metaclass=type("Meta", (type,), {})):
        pass

    model = nn.Sequential(Own(4, 4), Own(4, 4))
    session = halfstep.initialize(model, None, name, low=low)
    model(torch.randn(1, 4))
    assert (Own.calls, Own.largest) == (2, 2.0)
    del type(model[0]).largest
    assert not hasattr(Own, "largest")
    assert isinstance(type(type(model[0])), type(type(Own)))
    kept = type(model[0]).forward
    type(model[0]).forward = kept  # what is put back is no one else's
    session.close()
    assert "calls" in vars(Own)
    assert "forward" not in vars(Own)
    model(torch.randn(1, 4))
    assert Own.calls == 4


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_the_class_of_a_module_is_pickled_as_the_users(name):
    model = nn.Sequential(Block(8))
    session = halfstep.initialize(model, None, name, low="bf16")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        written = pickle.dumps([type(model[0]), type(model[0].a)], protocol)
        assert b"halfstep" not in written
        assert pickle.loads(written) == [Block, nn.Linear]
    session.close()


class Island(nn.Module):
    """A part that the model's own code computes as written, as routers of mixtures of experts are."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.first, self.router = nn.Linear(32, 32), nn.Linear(32, 4)
        self.checkpointed = checkpointed
        self.given = self.routed = None

    def route(self, h):
        with torch.autocast("cpu", enabled=False):
            self.given = h.detach().float()
            out = self.router(h.float())
        self.routed = out.detach()
        return out

    def forward(self, x):
        h = self.first(x)
        if self.checkpointed is None:
            return self.route(h).sum()
        return checkpoint(self.route, h, use_reentrant=self.checkpointed).sum()


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize(("level", "rules"), [("O1", ()), ("O2", (halfstep.Rule("router", halfstep.FULL),))])
def test_a_child_where_the_model_switches_autocast_off_computes_as_written(level, rules, checkpointed, low):
    torch.manual_seed(0)
    model = Island(checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = halfstep.initialize(model, optimizer, level, low=low, rules=rules)
    loss = model(torch.randn(8, 32))
    expected = torch.nn.functional.linear(model.given, model.router.weight, model.router.bias)
    assert torch.equal(model.routed, expected)
    session.backward(loss)
    assert torch.equal(model.routed, expected)  # a checkpoint has computed it again
    with torch.autocast("cpu", enabled=False):  # of a caller outside: the plan is entered
        outside = model.router(model.given)
    assert torch.equal(outside, expected) == (level == "O2")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_low_weights_where_the_model_switches_autocast_off_are_an_error_that_names_the_rule(level):
    model = Island()
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), level, low="bf16")
    with pytest.raises(RuntimeError, match=r"Linear: the model's own code has switched autocast off.*Rule\(name, FULL"):
        model(torch.randn(8, 32))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_so_does_a_child_whose_forward_is_its_own(low):
    torch.manual_seed(0)
    model = Island()
    router = model.router
    router.forward = lambda x: torch.nn.functional.linear(x, router.weight, router.bias)
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O1", low=low)
    model(torch.randn(8, 32))
    assert torch.equal(model.routed, torch.nn.functional.linear(model.given, router.weight, router.bias))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.shift = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(self.layer(x)) + self.shift


def doubled(self, x):
    return Head.forward(self, x) * 2


class Doubled(Head):
    forward = doubled


@pytest.mark.slow_but("method-O3-bf16", "closure-O1-fp16")
@mixed_plans
@pytest.mark.parametrize("kind", ["method", "closure"])
def test_a_forward_that_is_set_on_the_instance_runs_under_the_plan_as_that_of_a_class(name, low, kind):
    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = vars(model).get("forward")
        with halfstep.initialize(model, optimizer, name, low=low) as session:
            for _ in range(3):
                session.backward(model(x).square().mean())
                session.step()
            direct = model.forward(x)
            verdict = halfstep.blame(session, lambda: model(x * torch.inf).sum())
            copied = copy.deepcopy(model)
        assert vars(model).get("forward") == own
        return [direct, copied(x), model(x), *model.parameters()], verdict.kind

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = Head()
    model.forward = types.MethodType(doubled, model) if kind == "method" else lambda x: doubled(model, x)
    (values, found), (expected, wanted) = trained(model), trained(Doubled())
    assert all(map(torch.equal, values, expected))
    assert found == wanted


class Other(nn.Module):
    """Runs a block in autocast of its own format, in a checkpoint or not."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.dtype, self.reentrant = Block(8), nn.Linear(8, 4), dtype, None

    def run(self, x):
        return self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)

    def forward(self, x):
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            y = self.run(x)
        return self.head(y.float())


def around(model, x):
    """Also the block alone, from outside of the model: in a checkpoint, with the same input."""
    model.block(x)
    return model(x).sum() + model.run(x).float().sum() + model(x).sum()


@pytest.mark.parametrize("marked", [True, False], ids=["session.backward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [lambda model, x: model(x).sum(), around], ids=["inside", "also from outside"])
@pytest.mark.parametrize(
    ("level", "low", "dtype"),
    [
        ("O1", "bf16", None),
        ("O1", "bf16", torch.float16),
        ("O1", "fp16", torch.bfloat16),
        ("O2", "bf16", torch.float16),
    ],
)
def test_a_checkpoint_repeats_each_call_as_it_was_made(level, low, dtype, run, reentrant, marked):
    """In the caller's autocast of another format inside the model, under the plan from outside."""
    model = Other(dtype)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), level, low=low)
    gradients = []
    for how in (None, reentrant):
        model.reentrant = how
        loss = run(model, torch.ones(4, 8, requires_grad=True)) / 64
        if marked:
            session.backward(loss)
            session.unscale_()
        else:
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        for p in model.parameters():
            p.grad = None
        session.step() if marked else None
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert autocast_bits() == [False] * 6
    session.close()


def by_layer_norm(norm, x):
    return torch.layer_norm(x, (4,), norm.weight, norm.bias, norm.eps)


def by_batch_norm(norm, x):
    own = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return torch.batch_norm(x, *own, norm.training, norm.momentum, norm.eps, False)


def normed(level, *, norm, module=nn.LayerNorm, **plan):
    """Returns what a norm between two layers gives, its input's gradient and its own, by module or function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), module(4), nn.Linear(4, 4))
    nn.init.normal_(model[1].weight)
    if norm is not None:
        model[1].forward = partial(norm, model[1])
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), level, low="bf16", **plan) as session:
        session.backward(model(torch.linspace(-3, 3, 12).view(3, 4)).square().sum())
        return [*seen, *(p.grad.clone() for p in model.parameters())]


class LowStatistics(nn.BatchNorm1d):
    """The plan's kernel casts the weights to the format of its statistics."""

    def __init__(self, width):
        super().__init__(width)
        self.running_mean, self.running_var = self.running_mean.bfloat16(), self.running_var.bfloat16()


LOW_NORM = {"rules": [Rule("1", LOW, buffers="low")]}


@pytest.mark.parametrize(
    ("level", "module", "norm", "plan"),
    [
        ("O1", nn.LayerNorm, by_layer_norm, {}),
        ("O2", nn.LayerNorm, by_layer_norm, {}),
        ("O2", nn.BatchNorm1d, by_batch_norm, {}),
        ("O2", nn.BatchNorm1d, by_batch_norm, LOW_NORM),
        ("O2", LowStatistics, by_batch_norm, {}),
    ],
)
def test_a_norm_that_a_module_runs_has_the_bits_of_the_operation(level, module, norm, plan):
    by_module, by_function = (normed(level, norm=each, module=module, **plan) for each in (None, norm))
    assert [t.dtype for t in by_module] == [t.dtype for t in by_function]
    assert all(map(torch.equal, by_module, by_function))


def test_a_layer_norm_that_a_plan_or_other_code_names_runs_as_they_say(monkeypatch):
    (out, *_) = normed("O1", norm=None)
    (low, *_) = normed("O1", norm=None, ops={"allow": ["torch.nn.functional:layer_norm"]})
    assert (out.dtype, low.dtype) == (torch.float32, torch.bfloat16)
    called = []
    written = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda *args: (called.append(args[0].dtype), written(*args))[1])
    assert torch.equal(normed("O1", norm=None)[0], out)
    assert called == [torch.bfloat16]
    monkeypatch.undo()

    class Sees(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    with Sees():
        normed("O1", norm=None)
    assert written in called
