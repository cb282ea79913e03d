"""What `./dev demo` runs: a small GPT at O0, O1 and O2 and under torch.amp, on any processor in about a minute.

torch takes seconds to load. So that nobody waits before a silent screen, this script first says what processor this is,
from what the system knows of it, and what will run; then it loads halfstep and is `halfstep bench char_lm`.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

PAUSE = 4.0  # seconds between two lines
SETTINGS = {"batch": "8", "eval_windows": "64"}
UNITS = {  # of the flags that Linux and macOS name, the best first
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "svebf16": "SVE-BF16",
    "bf16": "Arm BF16",
    "FEAT_BF16": "Arm BF16",
}
VECTORS = {"avx512f": "AVX512", "avx2": "AVX2", "sve": "SVE", "asimd": "Neon"}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """Returns the name of the processor and its flags, as far as the system tells them."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    if cpuinfo.is_file():
        rows = [line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines()]
        known = {key.strip().lower(): value.strip() for key, _, value in reversed(rows)}
        name = known.get("model name", name)
        flags = set((known.get("flags") or known.get("features") or "").split())
    elif sys.platform == "darwin":
        asked = ["sysctl", "machdep.cpu.brand_string", "hw.optional"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        rows = [line.partition(": ") for line in told.splitlines()]
        name = next((value for key, _, value in rows if key == "machdep.cpu.brand_string"), name)
        flags = {key.rpartition(".")[2] for key, _, value in rows if value == "1"}
    return name, flags


def first_line(name: str, flags: set[str]) -> str:
    """Returns what processor this is, which units it has, what runs, and about how long.

    >>> first_line("AMD EPYC", {"avx2"})
    'AMD EPYC: AVX2, no bf16 units; a small GPT trains at O0, O1 and O2 and under torch.amp for about a minute'
    """
    vectors = next((text for flag, text in VECTORS.items() if flag in flags), platform.machine())
    units = next((text for flag, text in UNITS.items() if flag in flags), None)
    units = f"bf16 units ({units})" if units else "no bf16 units" if flags else "units unknown"
    return f"{name}: {vectors}, {units}; a small GPT trains at O0, O1 and O2 and under torch.amp for about a minute"


def settings(options: list[str]) -> list[str]:
    """Returns `SETTINGS` as options, without those that the given `options` set.

    >>> settings(["--set", "batch=4"])
    ['--set', 'eval_windows=64']
    """
    asked = " ".join(options)
    own = [f"{key}={value}" for key, value in SETTINGS.items() if not re.search(rf"--set[ =]{key}=", asked)]
    return [word for pair in own for word in ("--set", pair)]


def main() -> None:
    """Says what will run, then runs `halfstep bench char_lm` with the options that were given."""
    loaded = threading.Event()
    if "--quiet" in sys.argv:
        loaded.set()
    else:
        line = first_line(*processor())
        if sys.stderr.isatty():
            line = textwrap.fill(line, shutil.get_terminal_size().columns)
        print(line, file=sys.stderr, flush=True)

    def tell() -> None:
        while not loaded.wait(PAUSE):
            print("loading torch", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        from halfstep.__main__ import main as halfstep
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as shells have it
    finally:
        loaded.set()
    sys.argv = ["halfstep", "bench", "char_lm", *sys.argv[1:], *settings(sys.argv[1:])]
    halfstep()


if __name__ == "__main__":
    main()
