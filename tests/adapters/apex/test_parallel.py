"""apex's wrappers over torch.distributed: one process here, two in the last tests."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

import halfstep
from halfstep.adapters.apex import parallel as apex
from halfstep.errors import SetupError


def test_a_wrapped_model_trains_as_torchs_does(process_group):
    ours, theirs = (nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    wrapped = apex.DistributedDataParallel(ours, message_size=2**20, delay_allreduce=True)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert wrapped.module is ours
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert wrapped.find_unused_parameters
    assert wrapped.bucket_bytes_cap == 4 * 2**20
    x = torch.ones(4, 3)
    wrapped(x).sum().backward()
    nn.parallel.DistributedDataParallel(theirs)(x).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_reduction_is_turned_off_and_on(process_group):
    wrapped = apex.DistributedDataParallel(nn.Linear(3, 2))
    wrapped.disable_allreduce()
    assert not wrapped.require_backward_grad_sync
    wrapped.enable_allreduce()
    assert wrapped.require_backward_grad_sync


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"shared_param": True}, ValueError, "shared_param=True, .* pass delay_allreduce=True"),
        ({"gradient_average": False}, SetupError, "gradient_average=False.* multiply the loss by"),
        ({"allreduce_always_fp32": True}, SetupError, "allreduce_always_fp32=True.* opt_level O1"),
        ({"message_size": 0}, SetupError, "message_size is 0; pass the number of elements"),
        ({"message_size": "1e7"}, SetupError, "message_size is '1e7'"),
    ],
)
def test_what_torch_does_not_do_is_refused_in_words(options, error, said):
    with pytest.raises(error, match=said):
        apex.DistributedDataParallel(nn.Linear(3, 2), **options)


def test_what_changes_no_number_is_taken(process_group):
    apex.DistributedDataParallel(
        nn.Linear(3, 2), 10_000_000, False, None, None, True, False, 2, None, True, 2.0, None, False
    )


def test_batch_norms_become_torchs_synchronized_ones():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4)))
    model[1].weight.data.fill_(3.0)
    converted = apex.convert_syncbn_model(model, channel_last=True)
    assert isinstance(converted[1], apex.SyncBatchNorm)
    assert isinstance(converted[3][0], nn.SyncBatchNorm)
    assert converted[1].weight.tolist() == [3.0] * 4
    assert list(converted.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_reducer_averages_gradients(process_group, dtype):
    module = nn.Linear(2, 1).to(dtype)
    reducer = apex.Reducer(module)
    module.weight.grad = torch.tensor([[2.0, 4.0]], dtype=dtype)
    reducer.reduce()
    assert module.weight.grad.tolist() == [[2.0, 4.0]]
    assert module.bias.grad is None
    with pytest.raises(TypeError, match="Reducer got int; pass a module or a list of gradients"):
        apex.Reducer(3)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_tensors_are_sent_joined_by_dtype(process_group, low):
    tensors = [torch.ones(2, 2), torch.full((3,), 2.0, dtype=low), torch.zeros(1)]
    sent = []

    def double(joined, factor):
        sent.append((joined.dtype, joined.numel()))
        joined.mul_(factor)

    apex.flat_dist_call(tensors, double, (2,))
    assert sent == [(torch.float32, 5), (low, 3)]
    assert [t.tolist() for t in tensors] == [[[2.0, 2.0], [2.0, 2.0]], [4.0] * 3, [0.0]]
    apex.flat_dist_call(tensors, dist.all_reduce)
    assert tensors[1].tolist() == [4.0] * 3


def test_groups_of_processes_have_to_part_them_evenly(process_group):
    assert apex.create_syncbn_process_group(0) is None
    assert apex.create_syncbn_process_group(1) is not None
    with pytest.raises(ValueError, match="must not exceed the world size"):
        apex.create_syncbn_process_group(2)


def averaged(rank, low):
    """What one of two processes finds."""
    torch.manual_seed(rank)
    module = nn.Linear(2, 1, bias=False)
    reducer = apex.Reducer(module)
    sent = module.weight.tolist()
    grads = [torch.tensor([float(rank)]), torch.full((2,), 4.0 * rank)]
    module.weight.grad = torch.full((1, 2), 2.0 + 2 * rank)
    reducer.reduce()
    apex.Reducer(grads).reduce()
    shared = [torch.tensor([2.0 * rank])]
    apex.flat_dist_call(shared, dist.all_reduce)
    grads += shared
    group = apex.create_syncbn_process_group(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with halfstep.initialize(module, optimizer, "O2", low=low, loss_scale=128, stepping="optimizer") as session:
        wrapped = apex.DistributedDataParallel(module)
        optimizer.zero_grad()
        session.backward(wrapped(torch.full((1, 2), 1.0 + rank)).sum())
        reduced = module.weight.grad.tolist()
        optimizer.step()
        after = module.state_dict()["weight"].tolist()
    return sent, [grad.tolist() for grad in grads], reduced, after, dist.get_world_size(group)


def pooled(folder, slow):
    return {f"averaged {low}": (averaged, (low,)) for low in ("bf16", "fp16")}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_two_processes_average(found, low):
    (sent, grads, reduced, after, size), other = (each[f"averaged {low}"] for each in found)
    assert grads == [[0.5], [2.0, 2.0], [1.0]]
    assert reduced == [[1.5, 1.5]]  # inputs of 1 and 2
    assert after == [[pytest.approx(weight - 0.75) for weight in sent[0]]]
    assert size == 1
    assert other == [sent, grads, reduced, after, size]
