"""Writes the page of a sweep that was saved with `halfstep bench --json`, on whatever machine it was made.

    python benchmarks/sweep_page.py benchmarks/results/sweep-resnet-2026-11-22-xeon-2-cores.json [PAGE.html]

The page has the library that draws its charts inside (4.8 MB), so that it is not kept beside the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.bench.results import read_sweep
from halfstep.cli.options import check_page
from halfstep.cli.sweep import write_sweep_page


def main() -> None:
    """Reads, writes, and says where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?", help="RESULTS.html in the current folder if not given")
    options = parser.parse_args()
    page = options.page or Path(options.results.with_suffix(".html").name)
    found = read_sweep(options.results)
    if found is None:
        parser.error(f"there is no {options.results}")
    check_page()
    write_sweep_page(page, found)
    print(page.resolve().as_uri())


if __name__ == "__main__":
    main()
