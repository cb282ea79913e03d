"""The site's pages are all reachable, its commands exist, and what it renders is what the code says."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import typer.main

from halfstep import pages
from halfstep.__main__ import app

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def commands(page):
    """The commands that a page shows, in a line or in a block."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL))
    return re.findall(r"`halfstep (?=[a-z])([^`\n]*)`", text) + re.findall(r"^halfstep (.*)", blocks, re.MULTILINE)


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]


def page_names():
    return {name: page for name, page in vars(pages).items() if name.isupper()}


@pytest.mark.parametrize("page", page_names().values())
def test_pages_that_errors_and_commands_name_exist(page):
    assert (ROOT / page).is_file()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_page_is_in_the_navigation():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    listed = [page for part in nav for pages in part.values() for entry in pages for page in entry.values()]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_links_to_nothing_outside_of_the_site(page):
    assert re.findall(r"\]\(\.\./[^)]*\)", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS])
def test_commands_that_pages_show_are_taken(page, command):
    name, *arguments = shlex.split(command.replace("\\|", "|").partition("#")[0])
    group = typer.main.get_command(app)
    with click.Context(group) as context:
        found = group.get_command(context, name)
        assert found is not None, f"{page} shows {command!r}; there is no command {name}"
        found.make_context(name, arguments, parent=context, resilient_parsing=True)


def test_every_command_names_its_page():
    group = typer.main.get_command(app)
    assert {command.epilog.partition(": ")[2] for command in group.commands.values()} <= set(page_names().values())
    assert pages.FRONT in group.epilog


def test_the_api_page_has_every_public_name():
    import halfstep

    told = set(re.findall(r"^::: halfstep\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    values = {"BF16", "E4M3", "E5M2", "FP16", "FP32", "FULL", "LOW", "TF32", "Edit", "__version__"}
    assert told == set(halfstep.__all__) - values


def test_the_tutorial_breaks_is_explained_and_trains(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT))
    from docs.render import TUTORIAL, render

    monkeypatch.chdir(tmp_path)
    page = render(TUTORIAL)
    kept = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    code = re.compile(r"```python\n.*?```", re.DOTALL)
    assert code.findall(page) == code.findall(kept), "run python docs/render.py"
    printed = re.sub(code, "", page)
    assert "overflow: pow in blocks.1, tutorial.py:" in printed
    losses = [float(loss) for loss in re.findall(r"mean loss of 20 other batches: (.*)", printed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05), "with the edit it ends where fp32 did"
