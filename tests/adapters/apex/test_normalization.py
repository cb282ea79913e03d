"""apex's norms against torch's, in every pairing of dtypes, and under sessions."""

import pytest
import torch
from torch.nn import functional

import halfstep
from halfstep.adapters.apex import normalization as apex
from halfstep.plan.matching import norm_kind

LOW = [torch.float16, torch.bfloat16]
DTYPES = [*LOW, torch.float32]


def values(dtype=torch.float32, seed=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(name, input, weight, bias, eps):
    """The norm in float64."""
    x = input.double()
    if name == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return x if bias is None else x + bias.double()


@pytest.mark.parametrize("memory_efficient", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_norms_are_torchs_bit_for_bit(dtype, memory_efficient):
    x = values(dtype)
    for ours, theirs in (
        (apex.FusedLayerNorm(6, memory_efficient=memory_efficient), torch.nn.LayerNorm(6)),
        (apex.FusedLayerNorm((6,), 1e-3, False, memory_efficient), torch.nn.LayerNorm(6, 1e-3, False)),
        (apex.FusedRMSNorm(6, memory_efficient=memory_efficient), torch.nn.RMSNorm(6, eps=1e-5)),
        (apex.FusedRMSNorm([6], 1e-3, False, memory_efficient), torch.nn.RMSNorm(6, 1e-3, False)),
    ):
        assert torch.equal(ours.to(dtype)(x), theirs.to(dtype)(x))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert norm_kind(ours) == "torch"


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("inputs", DTYPES)
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_each_pairing_of_dtypes_is_computed_wide_and_rounded_once(name, inputs, weights):
    x, weight, bias = values(inputs), values(weights, 1)[0], values(weights, 2)[0] if name == "layer" else None
    given = (x, weight) if bias is None else (x, weight, bias)
    fused = {"layer": apex.fused_layer_norm_affine, "rms": apex.fused_rms_norm_affine}[name]
    mixed = {"layer": apex.mixed_dtype_fused_layer_norm_affine, "rms": apex.mixed_dtype_fused_rms_norm_affine}[name]
    for function, dtype in ((fused, inputs), (mixed, weights)):
        out = function(*given, 6, 1e-5)
        assert out.dtype is dtype
        place = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact(name, *given[:2], bias, 1e-5), rtol=2 * place, atol=2 * place)


@pytest.mark.parametrize("low", LOW)
def test_mixed_modules_answer_in_the_dtype_of_their_weights(low):
    for module in (apex.MixedFusedLayerNorm(6), apex.MixedFusedRMSNorm(6, eps=1e-3)):
        assert module(values(low)).dtype is torch.float32
        assert module.to(low)(values()).dtype is low
        out = module.float()(values().requires_grad_())
        out.sum().backward()
        assert module.weight.grad is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_without_weights(dtype):
    x = values(dtype)
    assert torch.equal(apex.fused_layer_norm(x, 6), functional.layer_norm(x, [6], eps=1e-6))
    assert torch.equal(apex.fused_rms_norm(x, (6,)), functional.rms_norm(x, [6], eps=1e-6))
    assert torch.equal(apex.manual_rms_norm(x, 6, None, 1e-3), functional.rms_norm(x, [6], eps=1e-3))
    weight = values(dtype, 1)[0]
    assert torch.equal(apex.manual_rms_norm(x, 6, weight, 1e-3), functional.rms_norm(x, [6], weight, 1e-3))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("norm", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_models_with_them_train(norm, name, low):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), getattr(apex, norm)(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    with halfstep.initialize(model, optimizer, name, low=low, loss_scale=16.0) as session:
        session.backward(model(values()).square().sum())
        assert not session.step().skipped
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("cls", [apex.MixedFusedLayerNorm, apex.MixedFusedRMSNorm])
def test_mixed_ones_need_weights(cls):
    with pytest.raises(RuntimeError, match=r"does not support elementwise_affine=False.*; use Fused(Layer|RMS)Norm"):
        cls(6, elementwise_affine=False)
