"""Runs examples/tutorial.py cell by cell, and writes its text, code and what it prints to docs/tutorial.md.

Writes its cells to examples/tutorial.ipynb too, the same tutorial as a notebook.

    python docs/render.py        # some seconds on a CPU

Cells begin with `# %%`, those of text with `# %% [markdown]`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
TUTORIAL = HERE.parent / "examples" / "tutorial.py"


def cells(path: Path) -> list[tuple[bool, int, str]]:
    """Returns the cells of a script or a notebook: whether it is text, its first line's number, and what it holds."""
    source, found = path.read_text(encoding="utf-8"), []
    if path.suffix == ".ipynb":
        return [(each["cell_type"] == "markdown", 1, "".join(each["source"])) for each in json.loads(source)["cells"]]
    for match in re.finditer(r"^# %%(.*)\n((?:(?!# %%).*(?:\n|\Z))*)", source, re.MULTILINE):
        text, body = match[1].strip() == "[markdown]", match[2]
        first = source[: match.start(2)].count("\n") + 1
        found.append((text, first, re.sub(r"^# ?", "", body, flags=re.MULTILINE) if text else body))
    return found


def render(path: Path) -> str:
    """Returns the page: each cell, and below each cell of code what it printed."""
    names: dict[str, object] = {"__name__": "__main__"}
    parts = []
    for text, first, body in cells(path):
        if text:
            parts.append(body.strip())
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (first - 1) + body, str(path), "exec"), names)  # its lines have their numbers
        parts.append(f"```python\n{body.strip()}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def notebook(path: Path) -> str:
    """Returns the cells as a Jupyter notebook that has not run."""
    made = [
        {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": body.strip().splitlines(True)}
        if text
        else {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "source": body.strip().splitlines(True),
            "execution_count": None,
            "outputs": [],
        }
        for number, (text, _, body) in enumerate(cells(path))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes the page and the notebook."""
    TUTORIAL.with_suffix(".ipynb").write_text(notebook(TUTORIAL), encoding="utf-8")
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        page = render(TUTORIAL)
        os.chdir(here)
    (HERE / "tutorial.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
