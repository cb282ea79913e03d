"""A headless Chromium, driven over a pipe in its DevTools protocol: what a page logs, asks of the network and draws."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--remote-debugging-pipe", "--window-size=1280,900",
)  # fmt: skip

# Chromium reads from file 3 and writes to file 4.
BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """Returns the path of a Chromium, None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """Opens one page at a time; `errors` and `requests` are what the page logged as errors and asked for so far."""

    def __init__(self, *, patience: float = 60.0) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._patience = patience
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        program = find_browser()
        assert program is not None
        ends = [str(to_read), str(to_write)]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                BECOME,
                *ends,
                program,
                *FLAGS,
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._sent, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path | str) -> float:
        """Opens a file or an address and returns the milliseconds from then until it was loaded and painted."""
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired")
        painted = """new Promise(done => {
            const isDrawn = () => !document.getElementById("plotly") || document.body.dataset.drawn;
            const end = () => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
            const look = () => isDrawn() ? end() : setTimeout(look, 5);
            look();
        })"""
        return float(self.run(painted))

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page, waiting for a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the window another size, and the page time to follow."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)  # charts follow the width

    def picture(self, path: Path, *, selector: str | None = None, width: int = 1240, height: int = 900) -> None:
        """Writes a PNG of the page, or of the element that a selector names."""
        self.resize(width, height)
        clip = {}
        if selector is not None:
            box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
            top = self.run("scrollY")
            area = {name: box[name] for name in ("x", "width", "height")}
            clip = {"clip": {**area, "y": box["y"] + top, "scale": 1}, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))

    def prefer(self, scheme: str) -> None:
        """Lets pages see a reader who prefers a color scheme, "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and returns its result."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        sent = self._sent
        answer = self._until(lambda found: found.get("id") == sent)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + self._patience
        while True:
            message = self._next(end)
            self._note(message)
            if wanted(message):
                return message

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {self._patience} s"
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.errors.append(given["entry"]["text"])

    def close(self) -> None:
        """Ends the browser and removes its profile."""
        try:
            self._session = None
            self.call("Browser.close")
        except (AssertionError, OSError):
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
