"""Probabilities leave the model in fp32, computed from what the operation was given; inside it they stay low."""

import copy
import dataclasses
import os
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.train.cast.probabilities import SMALL

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own, inside the compiler
]

MAKE = {
    "module": (nn.Sigmoid(), torch.sigmoid),
    "function": (torch.sigmoid, torch.sigmoid),
    "method": (lambda z: z.sigmoid(), torch.sigmoid),
    "in place": (lambda z: (z * 1).sigmoid_(), torch.sigmoid),
    "F.sigmoid": (F.sigmoid, torch.sigmoid),
    "expit": (torch.special.expit, torch.sigmoid),
    "softmax": (lambda z: F.softmax(z, -1), lambda z: z.softmax(-1)),
    "softmax module": (nn.Softmax(dim=1), lambda z: z.softmax(1)),
    "special softmax": (lambda z: torch.special.softmax(z, 0), lambda z: z.softmax(0)),
    "log_softmax": (lambda z: F.log_softmax(z, dim=-1), lambda z: z.log_softmax(-1)),
}


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    name: str = "n"


INDEX = torch.tensor([2, 0])
ODD = torch.tensor([True, False, False, True])


LEAVE = {
    "itself": lambda p: p,
    "tree": lambda p: {"a": [p, (p,)], "b": Output(p)},
    "column": lambda p: p[:, 1],
    "squeeze": lambda p: p[:, :1].squeeze(-1),
    "transposed": lambda p: p.t(),
    "flat": lambda p: p.view(-1),
    "unbind": lambda p: p.unbind(1),
    "expanded": lambda p: p[None].expand(2, -1, -1),
    "contiguous": lambda p: p.t().contiguous(),
    "reshaped": lambda p: p.t().reshape(-1),
    "rows": lambda p: p[INDEX],
    "mask": lambda p: p[torch.tensor([True, False, True])],
    "index_select": lambda p: p.index_select(1, INDEX),
    "gather": lambda p: p.gather(1, INDEX[:, None]),
    "masked_select": lambda p: p.masked_select(torch.tensor([True, False, True, True])),
    "cat": lambda p: torch.cat([p[:1], p[1:]], 0),
    "stack": lambda p: torch.stack([p[:, 0], p[:, 1]]),
    "flip": lambda p: p.flip(0),
    "roll": lambda p: p.roll(1, 0),
    "repeat": lambda p: p.repeat(1, 2),
    "rot90": lambda p: p.rot90(1, (0, 1)),
    "tile": lambda p: p.tile(2, 1),
    "pad": lambda p: F.pad(p, (1, 0)),
    "where": lambda p: torch.where(ODD, p, 0.0),
    "where not": lambda p: torch.where(ODD, torch.zeros_like(p), p),
    "masked_fill": lambda p: p.masked_fill(ODD, 0.5),
    "take_along_dim": lambda p: p.take_along_dim(INDEX[:, None], 0),
    "scatter": lambda p: torch.zeros_like(p).scatter(1, torch.arange(4).expand(3, 4), p),
    "cat of what was copied": lambda p: torch.cat([p.t().contiguous().view(-1), p[INDEX].view(-1)]),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Model(nn.Module):
    """A layer, a probability and a way out; `z` is what the probability was computed from."""

    def __init__(self, make, leave=LEAVE["itself"], scale=20.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), scale
        self.make, self.leave = make, leave

    def forward(self, x):
        self.z = self.layer(x) * self.scale
        return self.leave(self.make(self.z))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, dict) else [out.scores] if isinstance(out, Output) else out
    return [t for value in values for t in tensors(value)]


def opened(model, level="O2", low="bf16", **options):
    return halfstep.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), level, low=low, emulate=False, **options
    )


def check(model, exact, leave, mode):
    with MODES[mode]():
        out = tensors(model(X))
        expected = tensors(leave(exact(model.z.detach().float())))
    assert [t.dtype for t in out] == [torch.float32] * len(expected)
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want)
    return out


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.slow_but("module-O1", "O2")
def test_every_probability_leaves_in_fp32(make, level):
    function, exact = MAKE[make]
    with opened(model := Model(function), level):
        for mode in MODES:
            check(model, exact, LEAVE["itself"], mode)


@pytest.mark.parametrize("leave", LEAVE)
def test_it_leaves_in_fp32_by_every_way(leave):
    with opened(model := Model(torch.sigmoid, LEAVE[leave])):
        for mode in ("no_grad", "inference", "grad"):
            out = check(model, torch.sigmoid, LEAVE[leave], mode)
    sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in out).backward()
    got = model.layer.weight.grad.float()
    z = model.z.detach().float().requires_grad_()
    exact = tensors(LEAVE[leave](torch.sigmoid(z)))
    sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in exact).backward()
    torch.testing.assert_close(got, (z.grad.T * model.scale) @ X, rtol=0.02, atol=0.2)


PICKED = {
    "sort": lambda p: p.sort(1),
    "stable": lambda p: p.sort(dim=1, stable=True, descending=True),
    "topk": lambda p: p.topk(2),
    "max": lambda p: p.max(-1, True),
    "min": lambda p: torch.min(p, dim=1, keepdim=True),
}


@pytest.mark.parametrize("pick", PICKED)
def test_picked_ones_leave_in_fp32_as_their_indices_say(pick):
    model = Model(torch.sigmoid, PICKED[pick])
    with opened(model):
        values, indices = model(X)
        z = model.z.detach().float().requires_grad_()
        exact = z.sigmoid().gather(1, indices)
        assert torch.equal(values, exact)
        values.sum().backward()
        exact.sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, (z.grad.T * model.scale) @ X, rtol=0.02, atol=0.02)


def test_the_gradient_of_a_saturated_one_is_that_of_fp32():
    model = Model(torch.sigmoid, scale=1.0)
    nn.init.zeros_(model.layer.weight)
    nn.init.constant_(model.layer.bias, 9.0)  # bf16's sigmoid is 1 there
    with opened(model):
        F.binary_cross_entropy(model(X), torch.zeros(3, 4)).backward()
    expected = torch.full((4,), 9.0).sigmoid() * 3 / 12
    torch.testing.assert_close(model.layer.bias.grad, expected, rtol=0.01, atol=0)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p.view_as(p)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("between", ["hook", "function"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_is_that_of_fp32_behind_a_hook_or_a_function_too(between, level):
    found = []
    for low in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        nn.init.constant_(model[0].bias, 9.0)
        seen = []
        if between == "hook":
            model[1].register_full_backward_hook(lambda module, before, after, seen=seen: seen.append(after[0]))
        else:
            model.append(Passes())
        session = opened(model, level) if low else None
        F.binary_cross_entropy(model(X), torch.zeros(3, 4)).backward()
        found.append(model[0].bias.grad.float())
        assert len(seen) == (between == "hook")
        if session:
            session.close()
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0)


@pytest.mark.parametrize("when", ["in the forward", "before the backward pass"])
def test_the_gradient_behind_a_function_is_not_computed_from_an_input_that_was_written_since(when):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            nn.init.constant_(self.layer.bias, 2.0)

        def forward(self, x):
            self.z = self.layer(x).clone()  # of whose values a sigmoid keeps none for its gradient
            p = Same.apply(self.z.sigmoid())
            if when == "in the forward":
                self.write()
            return p

        def write(self):
            with torch.no_grad():
                self.z.zero_()

    model = Writes()
    with opened(model):
        out = model(X)
        if when == "before the backward pass":
            model.write()
        out.sum().backward()
        p = out.detach().float()
    expected = (p * (1 - p)).sum(0)
    torch.testing.assert_close(model.layer.bias.grad.float(), expected, rtol=0.03, atol=0)


class Passes(nn.Module):
    def forward(self, p):
        return Same.apply(p)


def saturating(seed, level, skips=()):
    """Trains from logits of some 50, where fp32's sigmoid is 1 too, and leaves out steps; returns losses and skips."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1), nn.Sigmoid())
    optimizer, losses, skipped = torch.optim.AdamW(model.parameters(), 1e-3), [], []
    with halfstep.initialize(model, optimizer, level, low="fp16" if level != "O0" else None) as session:
        for step in range(60):
            x = torch.rand(32, 64) * 255
            optimizer.zero_grad()
            session.backward(loss := F.binary_cross_entropy(model(x), (x[:, :1] > 127).float()))
            if step not in skips and session.step().skipped:
                skipped.append(step)
            losses.append(loss.item())
    return sum(losses[-20:]) / 20, skipped


@pytest.mark.parametrize("seed", [0, 1, 11])
def test_a_run_gets_stuck_where_one_in_fp32_does_that_leaves_out_the_same_steps(seed):
    low, skips = saturating(seed, "O2")
    assert len(skips) > 3  # until the loss scale fits
    full, _ = saturating(seed, "O0", skips)
    assert (low > 20) == (full > 20) == (seed != 1)
    assert low == pytest.approx(full, abs=1.0)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_denied_binary_cross_entropy_inside_is_computed_from_the_logits(level, low):
    model = Model(lambda z: F.binary_cross_entropy(torch.sigmoid(z), torch.zeros(3, 4)), scale=1.0)
    nn.init.zeros_(model.layer.weight)
    nn.init.constant_(model.layer.bias, 9.0)  # a low sigmoid is 1 there, and the loss 100
    with opened(model, level, low, ops={"deny": ["binary_cross_entropy"]}):
        loss = model(X)
        loss.backward()
    assert loss.item() == pytest.approx(9.0, abs=1e-3)
    assert model.layer.bias.grad.sum().item() == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_is_computed_inside_stays_as_the_table_says(level):
    seen = {}

    class Gated(Model):
        def forward(self, x):
            h = self.layer(x)
            gate = torch.sigmoid(h)
            seen.update(gate=gate.dtype, gated=(h * gate).dtype, one_less=(1 - gate).dtype)
            return h * gate, gate

    with opened(model := Gated(None), level):
        product, gate = model(X)
    assert set(seen.values()) == {torch.bfloat16}
    assert torch.equal(product, product.bfloat16().float())
    assert not torch.equal(gate, gate.bfloat16().float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["result", "input"])
def test_what_was_written_since_is_in_the_output(which, mode):
    def leave(p):
        (p if which == "result" else model.z).detach()[0].fill_(0.25)
        return p

    with opened(model := Model(torch.sigmoid, leave)), MODES[mode]():
        out = model(X)
    if which == "result":
        assert torch.equal(out[0], torch.full((4,), 0.25))
        assert torch.equal(out[1:], model.z[1:].float().sigmoid()) or mode == "inference"
    else:
        assert not torch.equal(out[0], torch.full((4,), 0.25).sigmoid())


def test_a_gradient_that_a_function_changes_on_the_way_stays_changed():
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p.view_as(p)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    found = []
    for leave in (LEAVE["itself"], Reversed.apply):
        with opened(model := Model(torch.sigmoid, leave, scale=1.0)):
            out = check(model, torch.sigmoid, LEAVE["itself"], "grad")[0]
            out.sum().backward()
            found.append(model.layer.bias.grad)
    torch.testing.assert_close(found[0], -found[1], rtol=0.02, atol=0)


def test_a_detached_one_stays_detached():
    with opened(model := Model(torch.sigmoid, lambda p: p.detach())):
        out = model(X)
        assert not out.requires_grad
        assert torch.equal(out, model.z.float().sigmoid())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_one(reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    with opened(model := Checkpointed(torch.sigmoid, scale=1.0)):
        x = X.clone().requires_grad_()
        out = model(x)
        assert torch.equal(out, model.z.float().sigmoid())
        model_bias = out.detach()
        out.sum().backward()
    expected = (model_bias * (1 - model_bias)).sum(0)
    torch.testing.assert_close(model.layer.bias.grad, expected, rtol=0.02, atol=0)


def test_a_checkpoint_around_the_model():
    with opened(model := Model(torch.sigmoid, scale=1.0)) as session:
        for _ in range(3):
            out = checkpoint(model, X, use_reentrant=False)
            assert torch.equal(out, model.z.float().sigmoid())
            session.backward(out.sum())
            session.step()


@pytest.mark.parametrize("leave", ["itself", "tree", "column", "contiguous", "rows", "cat of what was copied"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow_but("O2-itself")
def test_a_compiled_one(level, leave):
    torch._dynamo.reset()
    with opened(model := Model(torch.sigmoid, LEAVE[leave]), level):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for mode in MODES:
            eager = check(model, torch.sigmoid, LEAVE[leave], mode)
            with MODES[mode]():
                out = tensors(compiled(X))
            for got, want in zip(out, eager, strict=True):
                assert got.dtype is torch.float32
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 if mode != "inference" else 0.01)
            if mode == "grad":
                sum(t.sum() for t in out).backward()
                compiled_grad, model.layer.weight.grad = model.layer.weight.grad, None
                sum(t.sum() for t in eager).backward()
                torch.testing.assert_close(compiled_grad, model.layer.weight.grad)
    torch._dynamo.reset()


def test_under_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with opened(model := Model(torch.sigmoid, LEAVE["tree"])) as session:
            wrapped = DistributedDataParallel(model)
            for _ in range(2):
                out = tensors(wrapped(X))
                assert all(torch.equal(t, model.z.float().sigmoid()) for t in out)
                session.backward(sum(t.sum() for t in out))
                session.step()
    finally:
        torch.distributed.destroy_process_group()


def test_an_attention_map_that_is_used_and_returned():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            q = self.layer(x)
            self.scores = q @ q.T
            weights = self.scores.softmax(-1)
            self.used = weights.dtype
            return weights @ q, weights

    with opened(model := Attention()):
        _, weights = model(X)
        assert model.used is torch.bfloat16
        assert torch.equal(weights, model.scores.float().softmax(-1))


def test_a_model_whose_outputs_the_plan_keeps_returns_them_as_stored():
    plan = dataclasses.replace(halfstep.level("O2", "bf16"), output="keep")
    model = Model(torch.sigmoid)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), plan, emulate=False):
        assert model(X).dtype is torch.bfloat16


class Gate(nn.Module):
    """A large gate, and a smaller result; `dropped` tells whether the gate's input was freed when it was used."""

    def __init__(self, returned=False):
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 4), returned

    def forward(self, x):
        h = self.layer(x)
        z = self.layer(h)
        storage = weakref.ref(z.untyped_storage())
        gate = torch.sigmoid(z)
        del z
        self.dropped = storage() is None
        self.storage = storage
        out = h * gate
        return (out, gate) if self.returned else out


LARGE = torch.randn(SMALL // 4 + 1, 4)


def test_the_input_of_a_large_gate_is_kept_once():
    model = Gate()
    with opened(model):
        model(LARGE)
        assert not model.dropped
        assert model.storage() is None  # gone with the end of the forward
        for _ in range(2):
            model(LARGE)
            assert model.dropped
        with torch.no_grad():  # a place of its own
            model(LARGE)
            assert not model.dropped
            model(LARGE)
            assert model.dropped


def test_a_place_whose_results_come_to_leave_is_learned():
    model = Gate()
    with opened(model):
        model(LARGE)
        model.returned = True
        for known in (False, True, True):
            rounded = model(LARGE)[1]
            assert torch.equal(rounded, rounded.bfloat16().float()) is not known


def test_without_gradients_an_input_goes_with_its_result():
    with opened(model := Gate()), torch.no_grad():
        model.layer.register_forward_hook(lambda *_: None)
        first = model(LARGE)
        assert model.storage() is None
        del first


def test_nothing_is_kept_after_an_error():
    class Fails(Model):
        def forward(self, x):
            z = self.layer(x)
            self.storage = weakref.ref(z.untyped_storage())
            torch.sigmoid(z)
            raise ValueError("planted")

    with opened(model := Fails(None)):
        with pytest.raises(ValueError, match="planted"):
            model(X)
        assert model.storage() is None


def test_a_copy_of_an_output_can_be_made_and_saved(tmp_path):
    with opened(model := Model(torch.sigmoid)):
        out = model(X)
        with torch.no_grad():
            assert torch.equal(copy.deepcopy(model(X)), out)
        torch.save(out, tmp_path / "out.pt")
        assert torch.equal(torch.load(tmp_path / "out.pt"), out)
        assert os.path.getsize(tmp_path / "out.pt") < 10_000


@pytest.mark.parametrize(
    ("bias", "loss", "told"),
    [
        (20.0, lambda p: F.binary_cross_entropy(p, torch.zeros_like(p)), 1),  # its gradient is 0 in fp32 too
        (20.0, lambda p: F.binary_cross_entropy(p, torch.ones_like(p)), 0),
        (20.0, lambda p: (1 - 2 * p.sum() / (p.sum() + 1)) * 2**16, 0),  # Dice
        (9.0, lambda p: F.binary_cross_entropy(p, torch.zeros_like(p), reduction="sum"), 0),
    ],
    ids=["wrong and saturated", "right", "no logarithm", "steep"],
)
def test_a_sigmoid_that_a_logarithm_pushes_in_vain_is_told_once(caplog, bias, loss, told):
    model = Model(torch.sigmoid, scale=1.0)
    nn.init.zeros_(model.layer.weight)
    nn.init.constant_(model.layer.bias, bias)
    with opened(model):
        for _ in range(4):
            loss(model(X)).backward()
    assert [r.levelname for r in caplog.records if "binary_cross_entropy_with_logits" in r.message] == [
        "WARNING"
    ] * told
