"""Builds halfstep's compiled loops, and fetches plotly.js: for a wheel, for an editable install, or as a script.

python hatch_build.py
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # as a script

    class BuildHookInterface:  # type: ignore[no-redef]
        """Stands for hatchling's."""

    MetadataHookInterface = BuildHookInterface  # type: ignore[misc, assignment]


KERNELS = Path(__file__).resolve().parent / "halfstep" / "train" / "kernels"
X86 = {name: [f"-march={name}"] for name in ("x86-64-v3", "x86-64-v4")}
CLASSES = {"x86_64": X86, "amd64": X86, "aarch64": {"aarch64": []}, "arm64": {"aarch64": []}}
# Without the two that drop errno and traps, square roots are not vectorised; without contraction the loops give the
# bits of separately rounded operations.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC"]

REPORT = Path(__file__).resolve().parent / "halfstep" / "explain" / "report"
PLOTLY, RELEASE = "plotly.js-cartesian-dist-min", "4.1.1"
SHA256 = "c5f9a84666b97e571a04de689e09319869e60900e265c89eac2f71d0b5a0de88"


def build() -> str:
    """Builds what is missing or stale; returns "", or why there is no library, which costs speed alone."""
    why = [_build(name, options) for name, options in CLASSES.get(platform.machine().lower(), {}).items()]
    return "" if "" in why else (why or [f"no loops are written for {platform.machine()}"])[0]


def _build(name: str, options: list[str]) -> str:
    stamp = runpy.run_path(str(KERNELS / "library.py"))["stamp"]
    kept = list(KERNELS.glob(f"loops-{name}-*.so"))
    if any(path.stem.endswith(stamp(path.read_bytes())) for path in kept):
        return ""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "c++"))), None)
    if compiler is None:
        return "no C++ compiler found (g++, clang++, c++)"
    with tempfile.TemporaryDirectory(dir=KERNELS) as room:
        made = Path(room) / "loops.so"
        command = [compiler, *FLAGS, *options, *map(str, sorted(KERNELS.glob("*.cpp"))), "-o", str(made)]
        for threads in (["-fopenmp"], []):  # Apple's clang has no OpenMP: one thread then
            done = subprocess.run([*command, *threads], capture_output=True, text=True, errors="replace")
            if done.returncode == 0:
                made.replace(KERNELS / f"loops-{name}-{stamp(made.read_bytes())}.so")
                for path in kept:
                    path.unlink(missing_ok=True)
                return ""
    return f"{compiler}: {done.stderr.strip()[-1000:]}"


def fetch() -> str:
    """Fetches plotly.js by `npm pack` if it is missing; returns "", or why it is, which costs 1.2 MB a page."""
    target = REPORT / f"plotly-{RELEASE}.min.js.gz"
    if target.exists():
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return "there is no npm"
    with tempfile.TemporaryDirectory(dir=REPORT) as room:
        command = [npm, "pack", "--silent", f"--pack-destination={room}", f"{PLOTLY}@{RELEASE}"]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL)
            archive = next(Path(room).glob("*.tgz"))
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            return f"{error}"
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            return f"what npm has as {PLOTLY} {RELEASE} is not what halfstep was tried with"
        with tarfile.open(archive) as packed:
            text, terms = (packed.extractfile(f"package/{name}") for name in ("plotly-cartesian.min.js", "LICENSE"))
            assert text is not None
            assert terms is not None
            (REPORT / "plotly-LICENSE").write_bytes(terms.read())
            made = Path(room) / "plotly"
            made.write_bytes(gzip.compress(text.read(), mtime=0))
        for stale in REPORT.glob("plotly-*.gz"):
            stale.unlink()
        made.replace(target)
    return ""


def address() -> str:
    """Returns the web page of the repository that this clone came from; "" without one, as for a copy of a folder."""
    here, asked = KERNELS.parents[2], ["git", "config", "--get", "remote.origin.url"]
    if not (here / ".git").exists():  # the repository around it, if there is one, is another project's
        return ""
    try:
        origin = subprocess.run(asked, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        return ""
    found = re.fullmatch(r"(?:https://|ssh://|)(?:[^@/]+@)?([\w-]+(?:\.[\w-]+)+)[:/]([\w./-]+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else ""


class CustomMetadataHook(MetadataHookInterface):  # type: ignore[misc]
    """Names the pages of the repository that the wheel is built from."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Is called by hatchling for what it writes into a wheel."""
        page = address()
        pages = {"Repository": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
        pages |= {"Changelog": "/blob/main/CHANGELOG.md"}
        metadata["urls"] = {name: page + path for name, path in pages.items()} if page else {}


class CustomBuildHook(BuildHookInterface):
    """Makes what is missing before hatchling collects the files, and tags the wheel for the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called by hatchling for a wheel and for an editable install."""
        if version == "standard":  # the pages that errors and --help name
            pages = (Path(__file__).resolve().parent / "docs").glob("*.md")
            included = build_data.setdefault("force_include", {})
            included |= {str(page): f"halfstep/docs/{page.name}" for page in pages}
        absent = fetch()
        if absent:
            self.app.display_warning(f"pages take plotly.js from pip's plotly, 1.2 MB more: {absent}")
        failed = build()
        if failed:
            self.app.display_warning(f"halfstep's compiled loops were not built: {failed}")
        elif version == "standard":
            platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform_tag}"}


if __name__ == "__main__":
    print(fetch() or f"plotly.js {RELEASE}")
    print(build() or "\n".join(path.name for path in sorted(KERNELS.glob("loops-*.so"))))
