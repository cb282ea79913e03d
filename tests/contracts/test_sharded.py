"""What cannot be trained sharded, or not so: refused with the name and the line to write."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import halfstep
from halfstep import FULL, Rule, SessionError, SetupError

LINE = r"fully_shard\(module, mp_policy=halfstep.fsdp_policy\(\"O2\", low=\"bf16\"\)\) for all of the model"
ORDER = r"fully_shard\(.*mp_policy=halfstep.fsdp_policy\(plan, low=...\)\)`, then make the optimizer"
LOW = torch.bfloat16

pytestmark = pytest.mark.usefixtures("process_group")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def opened(policy=None, plan="O2", *, low="bf16", optimizer=torch.optim.AdamW, **changes):
    model = fully_shard(network(), mp_policy=halfstep.fsdp_policy("O2", low="bf16") if policy is None else policy)
    return model, halfstep.initialize(model, optimizer(model.parameters(), lr=0.1), plan, low=low, **changes)


def forward(model):
    return model(torch.ones(2, 4)).sum()


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (MixedPrecisionPolicy(), r"'0.weight' is torch.float32 in the forward pass, but O2 reads it as torch.bf"),
        (MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False), "'0.weight' is torch.float16"),
        (MixedPrecisionPolicy(LOW), "cast_forward_inputs=True casts inputs to torch.bf"),
        (
            MixedPrecisionPolicy(torch.float32),
            "cast_forward_inputs=True casts inputs to torch.fl",
        ),
        (
            MixedPrecisionPolicy(LOW, output_dtype=LOW, cast_forward_inputs=False),
            "its output_dtype casts outputs to",
        ),
    ],
)
def test_a_policy_that_contradicts_the_plan(policy, says):
    with pytest.raises(SetupError, match=f"{says}.*{LINE}"):
        forward(opened(policy)[0])


@pytest.mark.parametrize(
    ("policy", "plan"),
    [
        (MixedPrecisionPolicy(LOW, output_dtype=torch.float32, cast_forward_inputs=False), "O2"),
        (MixedPrecisionPolicy(torch.float32, output_dtype=torch.float32), "O0"),
    ],
)
def test_a_policy_that_casts_to_the_fp32_that_is_there_anyway(policy, plan):
    model, session = opened(policy, plan)
    session.backward(forward(model))
    assert not bool(session.step().skipped)


@pytest.mark.parametrize(("rounding", "told"), [("stochastic", 1), ("nearest", 0)])
def test_at_o3_shards_are_masters_so_that_stochastic_rounding_has_nothing_to_round(rounding, told, caplog):
    opened(plan="O3", rounding=rounding)
    said = "the fp32 shards of 6 weights are masters at O3 too, so rounding='stochastic' changes nothing there"
    assert caplog.messages.count(said) == told


def test_only_the_model_itself_may_return_fp32_by_its_policy():
    model = network()
    wide = MixedPrecisionPolicy(LOW, output_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model[1], mp_policy=wide)
    fully_shard(model, mp_policy=wide)
    with pytest.raises(SetupError, match=f"its output_dtype casts outputs to torch.float32.*{LINE}"):
        halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")


def test_after_the_error_the_weights_are_those_that_were_sharded():
    model, session = opened(MixedPrecisionPolicy())
    with pytest.raises(SetupError, match="in the forward pass, but"):
        forward(model)
    session.close()
    forward(model).backward()  # after which FSDP2 has put back what the forward that raised has left whole
    assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in model.parameters())


def test_what_the_plan_reads_in_fp32_may_be_gathered_so():
    model = network()
    fully_shard(model[1], mp_policy=halfstep.fsdp_policy("O0"))
    fully_shard(model[2], mp_policy=halfstep.fsdp_policy("O0"))
    fully_shard(model, mp_policy=halfstep.fsdp_policy("O2", low="bf16"))
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.initialize(model, optimizer, "O2", low="bf16", rules=[Rule("2", FULL)]) as session:
        session.backward(forward(model))
        assert not bool(session.step().skipped)


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_a_model_that_is_sharded_in_a_session(name):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, name, low="bf16")
    if name == "O0":
        fully_shard(model)
        session.backward(forward(model))
        with pytest.raises(SessionError, match=f"no longer in the model.*{ORDER}"):
            session.step()
    else:
        with pytest.raises((SessionError, AssertionError), match=ORDER):
            fully_shard(model)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("name", "how"), [("O0", "parallel"), ("O1", "parallel"), ("O2", "parallel"), ("O0", "sharded")]
)
def test_a_layer_that_is_replaced_in_a_session(name, how, steps):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.initialize(model, optimizer, name, low="bf16") as session:
        for _ in range(steps):
            optimizer.zero_grad()
            session.backward(forward(model))
            session.step()
        if how == "parallel":
            parallelize_module(model, init_device_mesh("cpu", (1,)), {"2": ColwiseParallel()})
        else:
            fully_shard(model[2])
        optimizer.zero_grad()
        session.backward(forward(model))
        with pytest.raises(SessionError, match=rf"no longer in the model \(2.weight, 2.bias\).*{ORDER}"):
            session.step()


@pytest.mark.parametrize("name", ["O0", "O2"])
def test_what_has_no_gradient_is_not_taken_for_replaced_and_is_looked_at_once(name, monkeypatch):
    looked = []
    monkeypatch.setattr("halfstep.train.session.parts.reshard", lambda roots: looked.append(roots))
    model = network()
    optimizer = torch.optim.AdamW(model[0].parameters())  # the others are trainable, and are no one's
    with halfstep.initialize(model, optimizer, name, low="bf16") as session:
        for _ in range(3):
            optimizer.zero_grad()
            session.backward(model[2](model[1](torch.ones(2, 8))).float().mean())
            session.step()
        session.backward(forward(model))
        session.step()
        assert session.status().steps == 4
    assert len(looked) == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def test_exact_weights_of_a_class_of_its_own_need_the_rule_that_the_error_names():
    def start(**settings):
        model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4))
        fully_shard([model[1]], mp_policy=halfstep.fsdp_policy("O0"))
        fully_shard(model, mp_policy=halfstep.fsdp_policy("O2", low="bf16"))
        with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16", **settings) as session:
            session.backward(model(torch.randn(2, 4)).sum())
            assert not session.step().skipped

    with pytest.raises(SetupError, match=r'to keep it exact .*, pass rules=\[halfstep.Rule\("type:Scaled", halfstep'):
        start()
    start(rules=[halfstep.Rule("type:Scaled", halfstep.FULL)])


def test_an_optimizer_that_was_made_before_the_shards():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    with pytest.raises(SetupError, match=r"do not belong to the model.*after any .to\(device\) or fully_shard"):
        halfstep.initialize(model, optimizer, "O2", low="bf16")


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1():
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(SetupError, match=f"FSDP1.*the model.*{ORDER}"):
        halfstep.initialize(model, optimizer, "O1", low="bf16")


def test_shards_that_are_offloaded_on_whatever_mesh():
    model = network()
    policy = halfstep.fsdp_policy("O2", low="bf16")
    fully_shard(model[2], mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(SetupError, match=r"to the CPU \(2\), .* leave offload_policy out, as in fully_shard\("):
        halfstep.initialize(model, optimizer, "O2", low="bf16")
    halfstep.initialize(model, optimizer, "O0").close()


def test_shards_that_are_low():
    model = fully_shard(network().bfloat16())
    with pytest.raises(SetupError, match=r"already in low precision: 0.weight, .*before any fully_shard"):
        halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="bf16")


def test_an_optimizer_that_needs_whole_weights():
    with pytest.raises(SetupError, match="Lamb needs the norms of whole weights"):
        opened(optimizer=halfstep.Lamb)


def test_shards_in_a_wrapper():
    model, _ = opened()
    with pytest.raises(SetupError, match=r"wrapped in DistributedDataParallel as well.*mesh=init_device_mesh"):
        nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize(
    ("weight", "grad", "said"),
    [
        (Replicate(), Partial(), r".*Partial.*p.grad.redistribute\(p.device_mesh"),
        (Shard(0), Shard(1), ".*redistribute"),
    ],
)
def test_a_gradient_that_is_placed_otherwise(weight, grad, said):
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [weight]))
    with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16") as session:
        session.backward(model.weight.sum() + model.bias.sum())
        model.weight.grad = DTensor.from_local(torch.ones(2, 4), mesh, [grad])
        with pytest.raises(SessionError, match=f"'weight' is placed {said}"):
            session.step()


def test_a_gradient_that_is_redistributed_as_the_error_says_counts_as_unchanged(caplog):
    mesh = init_device_mesh("cpu", (1,))
    model = distribute_module(nn.Linear(4, 2), mesh)
    x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="fp16") as session:
        for _ in range(4):
            model.zero_grad()
            session.backward(model(x).float().square().mean())
            assert model.weight.grad.placements != model.weight.placements
            for p in model.parameters():
                p.grad = p.grad.redistribute(p.device_mesh, p.placements)
            assert not session.step().skipped
    assert "was changed between" not in caplog.text


def test_a_model_that_is_sharded_too_late_leaves_its_class_to_no_other():
    class Own(nn.Sequential):
        pass

    late = Own(nn.Linear(4, 4))
    with halfstep.initialize(late, torch.optim.AdamW(late.parameters()), "O1", low="bf16"):
        with pytest.raises(SessionError, match="Make a new model and shard it first"):
            fully_shard(late)
        assert type(fully_shard(Own(nn.Linear(4, 4)))).__mro__[2] is Own


def test_gradients_of_gradients_need_weights_that_stay_gathered():
    model, session = opened()
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(SessionError, match=r"create_graph=True needs gathered weights .*set_reshard_after_backward"):
        session.grad(model(x).sum(), [x], create_graph=True)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    (g,) = session.grad(model(x).sum(), [x], create_graph=True)
    session.backward(model(x).float().square().mean() + g.square().sum())
    assert not session.step().skipped


def test_a_process_group_that_is_gone(monkeypatch):
    model, session = opened()
    session.backward(forward(model))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(SessionError, match="process group was destroyed; save and close the session before"):
        session.step()


def test_gradients_that_wait_under_another_loss_scale():
    model, session = opened(halfstep.fsdp_policy("O2", low="fp16"), low="fp16")
    model.set_requires_gradient_sync(False)
    session.backward(forward(model) * 0.01)
    model.set_requires_gradient_sync(True)
    with pytest.raises(
        SessionError,
        match=r"an earlier one whose gradients are still unreduced.*set_requires_gradient_sync\(True\)",
    ):
        session.backward(forward(model) * 0.01, loss_id=1)
    session.backward(forward(model) * 0.01)  # under the same
    session.backward(forward(model) * 0.01, loss_id=1)
    assert not bool(session.step().skipped)


def test_slices_of_a_sharded_sequence_are_plain_ones():
    model, _ = opened()
    assert type(model[:2]) is nn.Sequential


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_layers_are_compared_with_fp32_by_the_weights_that_were_gathered(plan):
    policy = halfstep.fsdp_policy(plan, low="bf16")
    model, session = opened(policy, plan)
    x = torch.randn(64, 4)
    with session.observe(every=1, tensors=(), precision=True) as observed:
        for _ in range(3):
            session.backward(model(x).sum())
            session.step()
    errors = {each.module: float(each.stats.rms) for each in observed.flush()}
    assert sorted(errors) == ["0", "1", "2"]
    assert max(errors.values()) < 2**-6, errors
