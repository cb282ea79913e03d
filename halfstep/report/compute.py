"""Tables, sentences and charts of the speed of matrix products and of memory use, by format."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.measurements import Footprint, Rate
from halfstep.report.charts import Chart, bars, curves
from halfstep.report.tables import ABSENT, MIB

Rows = tuple[list[str], list[list[str]]]


def products_rows(rates: Sequence[Rate]) -> Rows:
    """Returns the header and the cells of a table of speeds, with a row for each matrix size and format."""
    rows = [
        [rate.work, rate.format, ABSENT if rate.rate is None else f"{rate.rate:,.1f}",
         "1.00" if rate.vs_fp32 is None else f"{rate.vs_fp32:.2f}"]
        for rate in rates
    ]  # fmt: skip
    return ["size", "format", "GFLOP/s", "x fp32"], rows


def products_headline(rates: Sequence[Rate]) -> str:
    """Returns one sentence that names the fastest format for products of the largest matrices."""
    largest = [rate for rate in rates if rate.work == rates[-1].work]
    best = max(largest, key=lambda rate: rate.rate or 0.0)
    size = f"{best.work} x {best.work}"
    if best.format == "fp32":
        return f"fp32 is the fastest format for products of {size} matrices here: {best.rate:,.0f} GFLOP/s."
    return f"{best.format} multiplies {size} matrices {best.vs_fp32:.2f} times as fast as fp32."


def products_charts(rates: Sequence[Rate]) -> list[Chart]:
    """Returns two charts over the matrix size: the speed of each format, and its ratio to the speed of fp32."""
    sizes = [int(each) for each in dict.fromkeys(rate.work for rate in rates)]
    names = list(dict.fromkeys(rate.format for rate in rates))
    by = {(rate.format, int(rate.work)): rate for rate in rates}
    speed: dict[str, list[float | None]] = {name: [by[name, size].rate for size in sizes] for name in names}
    ratio: dict[str, list[float | None]] = {
        name: [by[name, size].vs_fp32 for size in sizes] for name in names if name != "fp32"
    }
    return [
        curves("products", "Products of square matrices", sizes, speed, ("size", "GFLOP/s")),
        curves("ratios", "The same, times fp32", sizes, ratio, ("size", "x fp32")),
    ]


def memory_rows(found: Sequence[Footprint]) -> Rows:
    """Returns the header and the cells of a table of memory, with a row for each format."""
    full = next(each for each in found if each.format == "fp32")
    rows = [
        [each.format, *(f"{value / MIB:,.2f}" for value in _parts(each)), f"{each.forward / full.forward:.2f}"]
        for each in found
    ]
    return [
        "format",
        "matrix 1000 x 1000\nMiB",
        "ResNet-18 weights\nMiB",
        "its forward pass\nMiB",
        "forward\nx fp32",
    ], rows


def memory_headline(found: Sequence[Footprint]) -> str:
    """Returns one sentence on how much less, or more, memory bf16 takes than fp32."""
    by = {each.format: each for each in found}
    share = 1 - by["bf16"].forward / by["fp32"].forward
    more_or_less = f"{share:.0%} less" if share >= 0 else f"{-share:.0%} more"
    return f"A forward pass of ResNet-18 takes {more_or_less} memory in bf16 than in fp32."


def memory_charts(found: Sequence[Footprint]) -> list[Chart]:
    """Returns a chart of memory by format: of a matrix, of weights and of a forward pass."""
    things = ["matrix", "weights", "forward pass"]
    rows: dict[str, list[float | None]] = {each.format: [value / MIB for value in _parts(each)] for each in found}
    return [bars("footprint", "Memory by format", [things], rows, axis="MiB")]


def _parts(each: Footprint) -> tuple[int, int, int]:
    return each.matrix, each.weights, each.forward
