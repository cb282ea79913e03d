"""Opens the pages of the built site in a headless Chromium: none may log, ask another host or be cut off.

    python docs/look.py [FOLDER]        # with a folder, pictures at 1280 and 400 pixels are written there

`./dev docs` runs it after it has built the site, where a Chromium is installed.
"""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.browser import Browser, find_browser

SITE = Path(__file__).resolve().parents[1] / "site"
SHOWN = ("index", "quickstart", "which-level", "tutorial")
WIDTHS = (1280, 400)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def look(address: str, pictures: Path | None) -> list[str]:
    """Returns what is wrong with the pages."""
    wrong = [] if any(SITE.glob("*.html")) else [f"there is no page in {SITE}: run ./dev docs"]
    with Browser() as browser:
        for page in sorted(SITE.glob("*.html")):
            browser.open(f"{address}/{page.name}")
            foreign = [each for each in browser.requests if not each.startswith((address, "data:", "blob:"))]
            wrong += [f"{page.name} logs {each}" for each in browser.errors]
            wrong += [f"{page.name} asks for {each}" for each in foreign]
            for width in WIDTHS:
                browser.resize(width)
                if browser.run("document.documentElement.scrollWidth > innerWidth"):
                    wrong.append(f"{page.name} is wider than a window of {width} pixels")
                if pictures is not None and page.stem in SHOWN:
                    browser.picture(pictures / f"{page.stem}-{width}.png", width=width)
    return wrong


def main() -> None:
    """Serves the site, looks, and exits with 1 if anything is wrong."""
    if find_browser() is None:
        print("docs/look.py: no Chromium found, the pages were not looked at")
        return
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    serve = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wrong = look(f"http://127.0.0.1:{server.server_port}", pictures)
        server.shutdown()
    print(
        "\n".join(wrong)
        or f"looked at {len(list(SITE.glob('*.html')))} pages: nothing logged, nothing asked of another host"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
