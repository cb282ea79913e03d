import pytest
import torch
from torch.nn import Parameter

from halfstep.errors import SessionError
from halfstep.train.optim.masters import MasterStore, round_half_away
from tests.optim.cases import assert_same_bits

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [("none", BF16), ("none", FP16), ("copy", BF16), ("copy", FP16), ("split", BF16)]
EACH_KIND = pytest.mark.parametrize(("kind", "low"), KINDS)
WITH_MASTER = pytest.mark.parametrize(("kind", "low"), KINDS[2:])
TIE = 1 + 2.0**-8  # half a place above an even bf16 value


def tracked(kind, low, values):
    p = Parameter(torch.as_tensor(values))
    store = MasterStore(kind, low)
    store.track(p)
    return store, p


@EACH_KIND
def test_a_tracked_parameter_is_stored_low_and_rounded_half_away(kind, low):
    value = torch.cat([torch.randn(100), torch.tensor([TIE, -TIE, 0.0, -0.0])])
    store, p = tracked(kind, low, value.clone())
    assert p in store
    assert list(store) == [p]
    assert_same_bits([p], [round_half_away(value, low)])


@pytest.mark.parametrize("low", [BF16, FP16])
def test_without_a_master_the_full_value_is_the_weight(low):
    store, p = tracked("none", low, torch.randn(5))
    assert_same_bits([store.full(p)], [p.float()])


@EACH_KIND
def test_bytes_are_what_masters_take(kind, low):
    store, _ = tracked(kind, low, torch.randn(10))
    assert store.bytes() == {"none": 0, "copy": 40, "split": 20}[kind]


def test_tracking_twice_changes_nothing():
    store, p = tracked("copy", BF16, [1.0, TIE])
    weight = p.data_ptr()
    store.track(p)
    assert p.data_ptr() == weight
    assert store.full(p).tolist() == [1.0, TIE]


def test_a_parameter_that_is_low_already_gets_its_own_value_as_master():
    store, p = tracked("copy", BF16, torch.tensor([1.5], dtype=FP16))
    assert p.dtype is BF16
    assert store.full(p).tolist() == [1.5]


def test_a_gradient_that_a_parameter_holds_goes_low_with_it_and_back():
    p = Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, 2.0])
    store = MasterStore("copy", BF16)
    store.track(p)
    assert p.grad.dtype is BF16
    store.restore(p)
    assert p.grad.dtype is torch.float32
    assert p.grad.tolist() == [1.0, 2.0]


def test_tracking_copies_and_keeps_the_memory_format():
    value = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    store, p = tracked("copy", BF16, value)
    assert p.stride() == store.extra(p).stride() == value.stride()
    value.zero_()
    assert store.full(p).any()


@EACH_KIND
def test_write_sets_weight_and_master(kind, low):
    store, p = tracked(kind, low, torch.zeros(50))
    weight = p.data_ptr()
    value = torch.randn(50)
    store.write(p, value)
    assert p.data_ptr() == weight
    assert_same_bits([p], [round_half_away(value, low)])
    assert_same_bits([store.full(p)], [p.float() if kind == "none" else value])


def test_an_untracked_parameter_is_its_own_master():
    store, p = MasterStore("copy", BF16), Parameter(torch.ones(2))
    assert store.layout(p) == "full"
    assert store.full(p).data_ptr() == p.data_ptr()
    store.write(p, torch.tensor([3.0, 4.0]))
    store.adopt(p)
    store.restore(p)
    assert p.tolist() == [3.0, 4.0]


def test_layout_says_how_the_value_is_kept():
    for kind, layout in [("none", "low"), ("copy", "copy"), ("split", "split")]:
        store, p = tracked(kind, BF16, torch.ones(2))
        assert store.layout(p) == layout
    store = MasterStore("copy", BF16)
    layouts = [store.layout(Parameter(torch.ones(1, dtype=t))) for t in (torch.float64, BF16, FP16, torch.complex64)]
    assert layouts == ["full", "low", "low", "full"]


def test_a_parameter_that_something_cast_is_named():
    store, p = tracked("copy", BF16, torch.ones(2, 3))
    p.data = p.data.double()
    with pytest.raises(SessionError, match=r"shape \(2, 3\).*cast to torch.float64.*session.close\(\), which gives"):
        store.layout(p)


@pytest.mark.parametrize(("kind", "low"), [("copy", BF16), ("copy", FP16), ("split", BF16)])
def test_fp32_values_that_are_put_in_place_of_a_weight_are_its_values(kind, low):
    store, p = tracked(kind, low, torch.linspace(-1, 1, 64))
    value = torch.linspace(-1, 1, 64).cos() * (torch.arange(64) % 3 > 0)
    p.grad = torch.ones_like(p)
    p.data = value.clone()
    assert_same_bits([store.full(p)], [value])
    store.layout(p)
    assert p.dtype is low
    assert_same_bits([store.full(p)], [value])


@pytest.mark.parametrize("kind", ["copy", "split"])
def test_adopted_weights_are_the_value_and_the_others_keep_their_master(kind):
    store, p = tracked(kind, BF16, [TIE, 0.3, -0.7, 5.0])
    p.data[1] = 2.0
    p.data[2] = 0.0
    p.data[3] = float("inf")
    store.adopt(p)
    full = store.full(p)
    assert full[0] == TIE
    assert full[1] == 2.0 if kind == "copy" else abs(full[1] - 2.0) <= 2.0**-8
    assert full[2:].tolist() == [0.0, float("inf")]
    assert_same_bits([round_half_away(full, BF16)], [p])


@pytest.mark.parametrize("kind", ["copy", "split"])
def test_adopt_changed_sees_in_place_writes_and_nothing_else(kind):
    store, p = tracked(kind, BF16, [TIE, -0.3])
    before = store.full(p).clone()
    store.adopt_changed([p])
    assert_same_bits([store.full(p)], [before])
    with torch.no_grad():
        p.zero_()
    store.adopt_changed([p])
    assert store.full(p).tolist() == [0.0, 0.0]


@WITH_MASTER
def test_an_fp32_checkpoint_is_the_truth(kind, low):
    store, p = tracked(kind, low, torch.randn(50))
    value = torch.randn(50)
    weight = store.load(p, value)
    assert_same_bits([store.full(p)], [value])
    assert_same_bits([weight], [p])


@WITH_MASTER
def test_a_low_checkpoint_keeps_the_masters_that_round_to_it(kind, low):
    value = torch.randn(50)
    store, p = tracked(kind, low, value.clone())
    store.load(p, p.detach().clone())
    assert_same_bits([store.full(p)], [value])
    entry = p.detach().clone()
    entry[7] = 2.0
    store.load(p, entry)
    assert store.full(p)[7] == 2.0
    value[7] = 2.0
    assert_same_bits([store.full(p)], [value])


def test_modules_own_copy_of_the_loaded_weight_changes_nothing():
    store, p = tracked("copy", BF16, torch.zeros(3))
    value = torch.tensor([TIE, 0.3, -TIE])
    weight = store.load(p, value).clone()
    with torch.no_grad():
        p.copy_(weight)  # as nn.Module.load_state_dict does
    store.adopt_changed([p])
    assert_same_bits([store.full(p)], [value])


@WITH_MASTER
def test_restore_gives_back_the_trained_fp32_value(kind, low):
    store, p = tracked(kind, low, torch.zeros(20))
    value = torch.randn(20)
    store.write(p, value)
    store.restore(p)
    assert p not in store
    assert list(store) == []
    assert_same_bits([p], [value])
    assert store.layout(p) == "full"


def cast(p, *dtypes):
    """Casts a parameter as `model.float()` and its like do."""
    module = torch.nn.Module()
    module.p = p
    for dtype in dtypes:
        module.to(dtype)
    assert module.p is p


# Values with bits that bf16 lacks: common ones, below fp16's least, at zero, that bf16 rounds to infinity, not finite.
AWKWARD = [0.1, -TIE, 3e-9, 2.0**-149, -(2.0**-140), 0.0, -0.0, 3.4e38, 3.4028234663852886e38, -1e30]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@WITH_MASTER
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64], [torch.float64, torch.float32]])
@pytest.mark.parametrize("grad", [False, True])
def test_a_cast_loses_no_bit_of_the_full_value(kind, low, dtypes, grad):
    value = torch.cat([torch.randn(200), torch.tensor(AWKWARD + NOT_FINITE)])
    store, p = tracked(kind, low, value.clone())
    if grad:
        p.grad = torch.ones_like(p)
    cast(p, *dtypes)
    assert_same_bits([store.full(p)], [value])
    store.restore(p)
    assert_same_bits([p], [value])
    assert p.dtype is torch.float32
    assert p not in store
    assert p.grad is None or p.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_master_a_cast_weight_is_restored_as_it_is(dtype):
    store, p = tracked("none", BF16, torch.randn(9))
    before = p.detach().float()
    cast(p, dtype)
    store.restore(p)
    assert_same_bits([p], [before])


@pytest.mark.parametrize("kind", ["copy", "split"])
@pytest.mark.parametrize("dtypes", [[FP16], [FP16, torch.float32]])
def test_a_cast_to_another_low_format_loses_no_bit_but_by_a_second_cast(kind, dtypes):
    value = torch.tensor([0.1, -TIE, 3e-9, -1e-10, 1e5, 0.0])
    store, p = tracked(kind, BF16, value.clone())
    cast(p, *dtypes)
    store.restore(p)
    beyond = [0.0, -0.0, float("inf"), 0.0]  # of fp16
    assert_same_bits([p], [value if dtypes == [FP16] else torch.tensor([*value[:2].tolist(), *beyond])])


@WITH_MASTER
def test_what_was_written_to_a_cast_weight_is_its_value(kind, low):
    store, p = tracked(kind, low, [TIE, 0.3, 0.7])
    cast(p, torch.float32)
    with torch.no_grad():
        p[1], p[2] = 0.1, 0.0
    store.restore(p)
    assert_same_bits([p], [torch.tensor([TIE, 0.1, 0.0])])


@WITH_MASTER
def test_a_cast_weight_takes_a_checkpoint(kind, low):
    store, p = tracked(kind, low, torch.zeros(9))
    cast(p, torch.float32)
    value = torch.randn(9)
    weight = store.load(p, value).clone()
    with torch.no_grad():
        p.copy_(weight)  # as nn.Module.load_state_dict does
    store.restore(p)
    assert_same_bits([p], [value])


@EACH_KIND
def test_a_weight_of_another_shape_is_restored_as_it_is(kind, low):
    store, p = tracked(kind, low, torch.ones(4))
    p.data = torch.full((2,), 3.0, dtype=low)
    store.restore(p)
    assert_same_bits([p], [torch.tensor([3.0, 3.0])])


@WITH_MASTER
def test_what_was_written_after_the_last_step_is_the_full_value(kind, low):
    store, p = tracked(kind, low, [TIE, 0.3])
    with torch.no_grad():
        p[1] = 0.0
    assert_same_bits([store.full(p)], [torch.tensor([TIE, 0.0])])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["copy", "split"])
def test_a_master_follows_its_parameter_to_another_device(kind):
    store, p = tracked(kind, BF16, torch.randn(10))
    before = store.full(p).clone()
    p.data = p.data.cuda()
    assert store.full(p).is_cuda
    assert_same_bits([store.full(p).cpu()], [before])
