"""Writes the page of a sweep that was saved with `halfstep bench --json FILE`, on whatever machine it was made.

    python benchmarks/sweep_page.py benchmarks/results/sweep-resnet-2026-11-23-epyc-2-cores.json [PAGE.html] [--static]

The page has the library that draws its charts inside (0.6 MB). With `--static` it has the charts as that library drew
them in Chromium and no script, and is small enough to be kept beside the results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.browser import Browser, find_browser
from halfstep.cli.options import check_page, write_page
from halfstep.explain.report.sweep import sweep_sheet
from halfstep.lab.bench.sweep import read_sweep

# Each chart becomes one SVG, which takes the width that there is; what drew it goes, and the styles that it brought.
DRAW = """
(async () => {
  const [width, height] = [1200, 420];
  for (const chart of document.querySelectorAll(".chart")) {
    const url = await Plotly.toImage(chart, {format: "svg", width, height});
    const drawn = decodeURIComponent(url.slice(url.indexOf(",") + 1)).replace(/ xmlns(:\\w+)?="[^"]*"/g, "");
    Plotly.purge(chart);
    chart.innerHTML = drawn;
    chart.className = "chart";
    const svg = chart.firstElementChild;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", "100%");
    svg.removeAttribute("height");
  }
  const [ours, ...others] = document.querySelectorAll("style");
  for (const each of [...others, ...document.querySelectorAll("script, #js-plotly-tester")]) each.remove();
  document.querySelector("meta[http-equiv]").content = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
  return document.documentElement.outerHTML;
})()
"""


def static(page: Path) -> str:
    """Returns a page with its charts drawn and without scripts."""
    with Browser() as browser:
        browser.open(page)
        return f"<!DOCTYPE html>\n{browser.run(DRAW)}\n"


def main() -> None:
    """Reads, writes, and says where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?", help="RESULTS.html in the current folder if not given")
    parser.add_argument("--static", action="store_true", help="charts as pictures, without scripts; needs Chromium")
    options = parser.parse_args()
    page = options.page or Path(options.results.with_suffix(".html").name)
    found = read_sweep(options.results)
    if found is None:
        parser.error(f"there is no {options.results}")
    if options.static and find_browser() is None:
        parser.error("--static draws the charts in Chromium, which is not installed here")
    check_page(page, options.results)
    write_page(page, sweep_sheet(found))
    if options.static:
        page.write_text(static(page), encoding="utf-8")
    print(page.resolve().as_uri())


if __name__ == "__main__":
    main()
