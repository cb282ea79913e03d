"""The site's pages are all reachable, its commands exist, and what it renders is what the code says."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer.main

from docs import look
from docs.browser import find_browser
from halfstep import errors, pages
from halfstep.__main__ import app

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def page_names():
    return {name: page for name, page in vars(pages).items() if name.isupper() and isinstance(page, str)}


def test_each_page_is_named_by_an_error_or_a_command():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "halfstep").rglob("*.py"))
    assert [name for name in page_names() if not re.search(rf"\b(more\({name}\)|page = {name}\b)", code)] == []


def test_errors_that_have_more_to_say_name_their_page():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    silent = {"HalfstepError", "FormatError", "DataError", "ScriptError"}  # they say all there is
    assert {kind.__name__ for kind in kinds if kind.page is None} == silent
    for kind in kinds:
        assert getattr(kind("what came"), "__notes__", []) == ([f"more: {kind.page}"] if kind.page else [])
        assert not hasattr(kind("what came; more: docs/nan.md"), "__notes__")


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


SHOWN = {
    "good": "<p>text",
    "logs": "<script>console.error('no')</script>",
    "asks": "<img src='https://elsewhere.invalid/x.png'>",
    "cut off": "<div style='width: 500px'>text</div>",
}


def test_a_site_without_pages_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(look, "find_browser", lambda: "one that opens nothing")
    monkeypatch.setattr(look, "Browser", nullcontext)
    monkeypatch.setattr(look, "SITE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["look.py"])
    with pytest.raises(SystemExit) as ended:
        look.main()
    assert ended.value.code == 1
    assert "there is no page" in capsys.readouterr().out


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here")
@pytest.mark.slow
def test_a_page_that_logs_asks_another_host_or_is_cut_off_is_told(tmp_path, monkeypatch, capsys):
    for name, body in SHOWN.items():
        (tmp_path / f"{name}.html").write_text(f"<!DOCTYPE html><link rel='icon' href='data:,'>{body}")
    monkeypatch.setattr(look, "SITE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["look.py"])
    with pytest.raises(SystemExit) as ended:
        look.main()
    told = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert "logs.html logs no" in told
    assert "asks.html asks for https://elsewhere.invalid/x.png" in told
    assert "cut off.html is wider than a window of 400 pixels" in told
    assert not [line for line in told if line.startswith("good") or "1280" in line]


def test_every_command_names_its_page():
    group = typer.main.get_command(app)
    assert {command.epilog.partition(": ")[2] for command in group.commands.values()} <= set(page_names().values())
    assert pages.FRONT in group.epilog


def test_the_api_page_has_every_public_name():
    import halfstep

    told = set(
        re.findall(
            r"^::: halfstep(?:\.initialize)?\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    values = {"BF16", "E4M3", "E5M2", "FP16", "FP32", "FULL", "LOW", "TF32", "Edit", "__version__"}
    assert told == set(halfstep.__all__) - values


def test_the_tutorial_breaks_is_explained_and_trains_as_a_notebook(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT))
    from docs.render import TUTORIAL, notebook, render

    written = TUTORIAL.with_suffix(".ipynb")
    assert written.read_text(encoding="utf-8") == notebook(TUTORIAL), "run python docs/render.py"
    monkeypatch.chdir(tmp_path)
    page = render(written)  # which runs its cells
    kept = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    code = re.compile(r"```python\n.*?```", re.DOTALL)
    assert code.findall(page) == code.findall(kept), "run python docs/render.py"
    printed = re.sub(code, "", page)
    assert "overflow: pow in blocks.1, tutorial.ipynb:" in printed
    losses = [float(loss) for loss in re.findall(r"mean loss of 20 other batches: (.*)", printed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05), "with the edit it ends where fp32 did"
