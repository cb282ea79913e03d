"""The casts of products in 8 and 4 bits, against slow formulas, torch's own casts and torch's scaled products."""

import math
from fractions import Fraction

import pytest
import torch

from halfstep.formats import E2M1, E4M3
from halfstep.train.cast.recipes import RECIPES, Coded, _in_tiles, code_operand, multiply, multiply_coded, round_operand
from tests.cast.laws import product_of

PRODUCTS = ("output", "grad_input", "grad_weight")
CASTS = {}
for _name, _recipe in RECIPES.items():
    for _place, _cast in _recipe.casts.items():
        if _cast not in CASTS.values():
            CASTS[" ".join([_name, *_place])] = _cast
POWERS = {name: cast for name, cast in CASTS.items() if not cast.in_two_levels}
POWERED = [name for name in RECIPES if name != "nvfp4"]
FOUR = RECIPES["nvfp4"].casts["output", "a"]
SEED = torch.tensor(7)
SCALED = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled products on a CPU",
)
NEITHER = (math.inf, -math.inf, math.nan)


def every_value(fmt):
    if fmt is E2M1:
        size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.cat([size, -size])
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    return values[values.isfinite()]


def spread(*shape, octaves=24):
    """Returns values of very different sizes, some of them 0."""
    sizes = torch.randint(-octaves // 2, octaves // 2, shape).float().exp2()
    return torch.randn(shape) * sizes * (torch.rand(shape) > 0.05)


def slow(x, cast):
    """Returns the values of a cast with powers of two as scales, and how many became 0; block by block, in float64."""
    out, flushed = torch.empty(x.shape, dtype=torch.float64), 0
    rows, columns = (given or size for given, size in zip(cast.block, x.shape, strict=True))
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].double()
            power, amax = 0, Fraction(block.abs().max().item())
            while amax and amax * Fraction(2) ** power > cast.elements.max:
                power -= 1
            while amax and amax * Fraction(2) ** (power + 1) <= cast.elements.max and power < 126:
                power += 1
            numbers = (block * 2.0**power).float().to(cast.elements.dtype).double()
            out[i : i + rows, j : j + columns] = numbers * 2.0**-power
            flushed += int(((numbers == 0) & (block != 0)).sum())
    return out, flushed


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_values_of_the_format_stay(cast):
    if cast.rotated:
        return
    values = every_value(cast.elements)
    x = torch.cat([torch.stack([values, values.flip(0)]), torch.full((2, 1), cast.elements.max)], 1)
    for scale in (1.0, 2.0**-100, 2.0**90):
        block = (cast.block[0], None if not cast.in_two_levels else cast.block[1])
        whole = round_operand((x * scale).repeat(1, 1), type(cast)(cast.elements, block), seed=SEED)
        assert torch.equal(whole.values, x * scale)


@pytest.mark.parametrize("shape", [(1, 16), (5, 7), (33, 200), (130, 257)], ids=str)
@pytest.mark.parametrize("cast", POWERS.values(), ids=POWERS)
def test_casts_are_those_of_a_slow_formula(cast, shape):
    counts = torch.zeros(3, dtype=torch.int64)
    for x in (spread(*shape), spread(*shape).bfloat16(), spread(*reversed(shape)).t()):
        expected, flushed = slow(x, cast)
        found = round_operand(x, cast, counts=counts.zero_())
        assert torch.equal(found.values.double(), expected)
        assert counts.tolist() == [0, flushed, 0]
        tiles = [-(-size // step) if step else 1 for size, step in zip(x.shape, cast.block, strict=True)]
        assert found.decode.shape == tuple(tiles)
        assert torch.equal(found.elements.float(), found.numbers.float())


@SCALED
@pytest.mark.parametrize(
    "shape", [(64, 128, 96), (5, 7, 3), (33, 48, 16), (1, 16, 16), (17, 300, 129), (0, 16, 4)], ids=str
)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
def test_products_are_those_of_scaled_mm(name, product, shape):
    m, k, n = shape
    recipe, bias = RECIPES[name], torch.randn(n).bfloat16()
    a, b = torch.randn(m, k) * 3, torch.randn(n, k).bfloat16()
    left, right = (round_operand(x, recipe.casts[product, at]) for at, x in (("a", a), ("b", b)))
    for given in (None, bias):
        coded = (Coded(each.elements.contiguous(), each.decode) for each in (left, right))
        expected = multiply_coded(*coded, bias=given)  # torch.nn.functional.scaled_mm
        assert torch.equal(multiply(left, right, units="fp32", bias=given), expected)
        units = multiply(left, right, units="bf16", bias=given)
        assert torch.allclose(units.float(), expected.float(), rtol=2.0**-7, atol=0)
        assert (units != expected).sum() <= 1 + expected.numel() / 2000
    assert torch.equal(product_of(recipe, product, a, b, units="fp32"), multiply(left, right, units="fp32"))


def test_scales_of_8_bits_lie_in_tiles_as_cublas_reads_them():
    rows, columns = 200, 6
    powers = torch.randint(-100, 100, (rows, columns))
    decode = powers.float().exp2()
    decode[7, 5] = math.nan
    flat = _in_tiles(decode).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * 2 + column // 4  # of 128 x 4, in rows of tiles
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert flat[at] == (255 if (row, column) == (7, 5) else powers[row, column] + 127)


@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
def test_operands_for_a_devices_own_units_are_those_of_the_law_filled_up(name):
    cast, x = RECIPES[name].casts["grad_weight", "a"], spread(21, 40)
    counts = torch.zeros(2, 3, dtype=torch.int64)
    coded = code_operand(x, cast, multiple=16, counts=list(counts))
    assert [tuple(each.elements.shape) for each in coded] == [(21, 48), (40, 32)]
    for each, law in zip(coded, (round_operand(x, cast), round_operand(x.t(), cast)), strict=True):
        filled = torch.zeros(each.elements.shape)
        filled[:, : law.elements.shape[1]] = law.elements.float()
        assert torch.equal(each.elements.float(), filled)
        assert torch.equal(each.decode, law.decode)
    assert counts[0, 1] == counts[1, 1] or name != "fp8"


def test_zeros_in_a_block_that_is_not_finite_are_not_counted_as_flushed():
    x = torch.tensor([[math.inf, 0, 0, 1e-30], [1.0, 0, 1e-30, 2.0]])
    counts = torch.zeros(3, dtype=torch.int64)
    round_operand(x, RECIPES["fp8-row"].casts["output", "a"], counts=counts)
    assert counts.tolist() == [0, 1, 1]


@pytest.mark.parametrize("size", [0.0, 1e-38, 3e38])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_sizes_at_the_ends_of_fp32(cast, size):
    x = torch.full((32, 32), size / 4 if cast.rotated else size)  # whose sums of 16 are up to 4 times as large
    x[1::2] *= -1
    counts = torch.zeros(3, dtype=torch.int64)
    found = round_operand(x, cast, counts=counts, seed=SEED)
    if not cast.rotated:
        assert torch.allclose(found.values, x, rtol=0.17, atol=0)
    assert counts.tolist()[1:] == [0, 0]


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("units", ["fp32", "bf16"])
@pytest.mark.parametrize("name", POWERED)
def test_a_bias_beside_the_smallest_products_stays(name, units, size):
    """Over the factor of both scales it is beyond bf16."""
    casts, bias = RECIPES[name].casts, torch.tensor([0.5, 0.0, -3.0, 1e-30] * 4).bfloat16()
    for other in (0.1, size):
        a, b = torch.full((3, 32), size), torch.full((16, 32), other)
        left, right = (round_operand(x, casts["output", at]) for at, x in (("a", a), ("b", b)))
        expected = (left.values.double() @ right.values.double().t() + bias).bfloat16()
        assert torch.allclose(multiply(left, right, units=units, bias=bias), expected, rtol=2.0**-7, atol=1e-37)


@pytest.mark.parametrize("size", [1e-37, 1e-39])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_zeros_beside_the_smallest_values_stay_zeros(cast, size):
    x = torch.zeros(32, 32)
    x[::4, ::4] = size
    found = round_operand(x, cast, seed=SEED).values
    assert torch.isfinite(found).all()
    assert cast.rotated or not found[x == 0].any()


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 40)], ids=str)
def test_a_transposed_operand_is_rounded_as_its_copy(cast, shape):
    x = spread(*shape).t()
    found, copied = (round_operand(each, cast, seed=SEED).values for each in (x, x.contiguous()))
    assert torch.equal(found, copied)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_what_is_too_small_for_any_scale_is_counted_as_flushed(cast):
    counts = torch.zeros(3, dtype=torch.int64)
    found = round_operand(torch.full((32, 32), 1e-44), cast, counts=counts, seed=SEED)
    assert not found.values.any()
    assert cast.rotated or counts.tolist()[1] == 1024


@pytest.mark.parametrize("bad", NEITHER)
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_shows_in_the_product(name, bad):
    recipe, counts = RECIPES[name], torch.zeros(2, 3, dtype=torch.int64)
    a, b = torch.randn(64, 256), torch.randn(48, 256)
    a[3, 200] = bad
    for product in PRODUCTS:
        out = product_of(recipe, product, a, b, units="bf16", counts=counts.zero_(), seed=SEED)
        rows = 64 if name in ("fp8", "nvfp4") else 1
        assert out[3].isnan().all()
        assert out.isnan().sum() == rows * 48
        assert counts[:, 2].tolist() == [16 if recipe.casts[product, "a"].rotated else 1, 0]


def test_a_product_of_huge_and_tiny_operands_does_not_overflow_in_between():
    a, b = torch.full((16, 32), 3e38), torch.full((16, 32), 1e-30)
    for name in RECIPES:
        out = product_of(RECIPES[name], "output", a, b, units="fp32")
        assert torch.allclose(out.float(), torch.tensor(3e8 * 32), rtol=0.2)


def test_four_bits_in_two_levels_are_those_of_the_paper():
    x = spread(6, 40, octaves=6)
    found, outer = round_operand(x, FOUR), x.abs().max().item() / (6 * 448)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for i in range(6):
        for j in range(0, 40, 16):
            block = x[i, j : j + 16].double()
            inner = torch.tensor(block.abs().max().item() / 6 / outer).to(E4M3.dtype).double()
            scaled = block / (inner * outer)
            distance = (scaled.abs()[:, None] - grid).abs()
            mine = found.numbers[i, j : j + 16].double()
            assert torch.allclose((scaled - mine).abs().clamp(max=2), distance.amin(1).clamp(max=2), atol=1e-5)
            assert found.decode[i, j // 16].item() == pytest.approx(inner.item() * outer, rel=1e-6)


def test_a_block_whose_e4m3_scale_was_rounded_down_counts_what_saturates():
    x = torch.full((1, 32), 1.0)
    x[0, 16:] = 34 / 448  # the scale of the second block, 34, lies between 32 and 36 and goes down, to even
    x[0, 0] = 1.0
    counts = torch.zeros(3, dtype=torch.int64)
    found = round_operand(x, FOUR, counts=counts)
    assert counts.tolist() == [16, 0, 0]
    assert found.values[0, 31].item() == pytest.approx(32 / 448)


def test_random_bits_differ_between_the_batches_of_an_accumulation():
    """By their largest values: a multiple of the same values has the same elements but for these bits."""
    cast, x, seed = RECIPES["nvfp4"].casts["grad_input", "a"], torch.randn(64, 64), torch.tensor(5)
    first, same, other = (round_operand(each, cast, seed=seed).numbers for each in (x, x.clone(), x * 1.5))
    assert torch.equal(first, same)
    assert 0.05 < (first != other).float().mean() < 0.9


def test_stochastic_casts_are_unbiased_and_repeat_by_their_seed():
    cast = RECIPES["nvfp4"].casts["grad_input", "a"]
    x = spread(8, 64, octaves=4)
    draws = torch.stack([round_operand(x, cast, seed=torch.tensor(i)).values for i in range(400)])
    again = round_operand(x, cast, seed=torch.tensor(3)).values
    assert torch.equal(draws[3], again)
    decode = round_operand(x, cast, seed=SEED).decode.repeat_interleave(16, 1)
    error = (draws.mean(0) / decode - (x / decode).clamp(-6, 6)).abs()
    assert error.max() < 5 / math.sqrt(400)  # 5 standard deviations, which are half of a step of 2 at most
    assert draws.std(0).max() > 0


def test_a_rotation_leaves_sums_as_they_are_and_spreads_outliers():
    recipe = RECIPES["nvfp4"]
    a, b = torch.randn(20, 40), torch.randn(24, 40)
    a[:, 3] *= 30
    plain, rotated = (
        product_of(recipe, product, a, b, units="fp32", seed=SEED).float() for product in ("output", "grad_weight")
    )
    exact = a @ b.t()
    assert (rotated - exact).norm() < 0.3 * exact.norm()
    assert (rotated - exact).norm() < 1.5 * (plain - exact).norm()


def test_a_column_of_outliers_costs_one_scale_of_a_tensor_its_small_values():
    x = torch.randn(64, 256) * torch.logspace(-4, 0, 64)[:, None]
    x[:, 5] = torch.randn(64) * torch.logspace(-4, 0, 64) * 1000
    lost = {}
    for name in ("fp8", "fp8-row", "fp8-mx"):
        counts = torch.zeros(3, dtype=torch.int64)
        found = round_operand(x, RECIPES[name].casts["output", "a"], counts=counts).values
        others = torch.arange(256) != 5
        error = ((found - x)[:, others].norm(dim=1) / x[:, others].norm(dim=1)).max().item()
        lost[name] = (counts[1].item() / x.numel(), error)
    assert lost["fp8"][0] > 0.4
    assert lost["fp8"][1] == 1
    assert max(lost["fp8-row"][0], lost["fp8-mx"][0]) < 0.03
    assert max(lost["fp8-row"][1], lost["fp8-mx"][1]) < 0.07
