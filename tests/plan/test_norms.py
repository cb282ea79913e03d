import pytest
from torch import nn
from torch.nn.utils import parametrizations

from halfstep.plan.matching import has_running_stats, norm_kind
from tests.plan.test_resolve import OwnNorm

TORCH = [
    nn.BatchNorm1d(2),
    nn.BatchNorm2d(2),
    nn.BatchNorm3d(2),
    nn.SyncBatchNorm(2),
    nn.LazyBatchNorm2d(),
    nn.GroupNorm(1, 2),
    nn.InstanceNorm1d(2, affine=True),
    nn.InstanceNorm2d(2),
    nn.LazyInstanceNorm1d(),
    nn.LayerNorm(2),
    nn.RMSNorm(2),
]


class PlainLayerNorm(nn.LayerNorm):
    """Derives from torch's, keeps its forward."""


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class T5LayerNorm(OwnNorm):
    pass


class LlamaRMSNorm(T5LayerNorm):
    pass


class FrozenBatchNorm2d(T5LayerNorm):
    pass


class GroupNorm32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class DualNorm(nn.Module):
    """A norm of norms."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.LayerNorm(2), nn.BatchNorm1d(2), nn.Dropout()

    def forward(self, x):
        return self.a(x) + self.b(x)


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x):
        return self.fn(self.norm(x))


class AdaNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(2)
        self.projection = nn.Linear(2, 2)

    def forward(self, x, condition):
        return super().forward(x) * self.projection(condition)


class Normalize(nn.Module):
    pass


class NormedLinear(nn.Linear):
    pass


@pytest.mark.parametrize("module", [*TORCH, PlainLayerNorm(2)], ids=lambda module: type(module).__name__)
def test_torchs_classes_normalise_by_torchs_kernels(module):
    assert norm_kind(module) == "torch"


@pytest.mark.parametrize(
    "module",
    [
        LayerNorm2d(2),
        T5LayerNorm(),
        LlamaRMSNorm(),
        FrozenBatchNorm2d(),
        GroupNorm32(1, 2),
        DualNorm(),
        nn.LocalResponseNorm(2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_models_own_norm_is_known_by_name_or_by_its_forward(module):
    assert norm_kind(module) == "own"


@pytest.mark.parametrize(
    "module",
    [PreNorm(), Normalize(), NormedLinear(2, 2), nn.Linear(2, 2), nn.Identity(), nn.Sequential(nn.LayerNorm(2))],
    ids=lambda module: type(module).__name__,
)
def test_what_holds_other_layers_or_is_not_named_a_norm_is_none(module):
    assert norm_kind(module) is None


def test_torchs_class_with_other_layers_inside_keeps_its_own_weights_only():
    assert norm_kind(AdaNorm()) == "torch"


def test_a_weight_norm_is_computed_as_a_norm():
    linear = parametrizations.weight_norm(nn.Linear(2, 2))
    assert norm_kind(linear.parametrizations.weight[0]) == "own"
    assert norm_kind(linear) is None


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm1d(2, affine=False), False),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (nn.InstanceNorm1d(2, affine=True), False),
        (nn.InstanceNorm1d(2, affine=True, track_running_stats=True), True),
        (nn.LayerNorm(2), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_running_statistics_beside_weights(module, expected):
    assert has_running_stats(module) is expected
