"""Compiles the Triton kernels for NVIDIA's devices without one, and says what their machine code must not be.

    python -m tests.cudasim.aot [SM ...]        80 86 89 90 100 120

No stack and no local memory, no fused or approximate operation, wide loads, and few enough registers. Exit code 1 where
a variant fails.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from halfstep.train.cast.recipes import RECIPES
from halfstep.train.kernels import casts as cast_kernels
from halfstep.train.kernels import triton as kernels
from halfstep.train.kernels.batch import Scratch, Wanted
from tests.kernels import triton_cases as cases

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FAST = ("adamw", "adam-l2-amsgrad", "sgd-momentum", "lamb", "novograd")
INEXACT = ("fma.", ".ftz", ".approx", "div.full")
CASTS = "casts to 8 bits"
OTHERS = [str(n) for n in (80, 86, 89, 90, 100, 120)]


class Target:
    """A driver that knows a device by its number alone."""

    sm = 90

    def get_current_target(self):
        return GPUTarget("cuda", Target.sm, 32)

    def get_current_device(self):
        return Target.sm  # so that each has a cache of its own

    def get_current_stream(self, device):
        return 0


def variants(storage, name, compiled):
    """Has all kernels of one step compiled."""
    compiled.clear()
    options = cases.OPTIONS[name]
    batch = cases.batch_of(storage, options, "cpu")
    batch.grads[:] = [torch.zeros(weight.shape, dtype=cases.STORAGES[storage][2][0]) for weight in batch.weights]
    row, found = cases.row_of(options), torch.zeros((), dtype=torch.bool)
    kernels.update(row.triton, batch, row.options(options), torch.ones(()), found, Scratch())
    kernels.read(batch.grads, Scratch(), Wanted(torch.ones(()), found, 1.0))
    return dict(compiled)


def casts(recipe, compiled):
    """Has all kernels of the casts of one recipe compiled, of matrices that lie in rows and in columns."""
    compiled.clear()
    cast = RECIPES[recipe].casts["grad_input", "a"]
    whole = cast.block == (None, None)
    for x in (torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16).t()):
        for matrices in (1, 2):
            counts = list(torch.zeros(matrices, 3, dtype=torch.int64))
            cast_kernels.cast(x, cast.elements, cast.block[1], counts, whole=whole, multiple=32)
    return dict(compiled)


def usage(made):
    """Returns registers and bytes of stack of a compiled kernel, and its count of local loads and stores."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([DISASSEMBLER, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())
    return registers, stack, len(re.findall(r"\b(?:LDL|STL)", code))


def faults(kernel, made, storage):
    """Yields what is wrong with a variant."""
    registers, stack, local = usage(made)
    most = {
        "_read_kernel": 64,
        "_amax_kernel": 64,
        "_cast_kernel": 128,
        "_corrections_kernel": 255,
        "_rates_kernel": 255,
        "_judge_kernel": 128,  # one program
    }
    most["_whole_kernel"] = 64  # the squares of its norms are of float64
    most = most.get(kernel, 80 if storage in cases.KEPT else 48)
    ptx = made.asm["ptx"]
    if (stack or local) and kernel != "_rates_kernel":  # a program a tensor, with two roots of float64
        yield f"{stack} bytes of stack, {local} local accesses"
    if kernel not in ("_corrections_kernel", "_rates_kernel"):  # whose powers and roots are of float64
        yield from (f"has {word}" for word in INEXACT if word in ptx)
        if "ld.global.v" not in ptx and kernel != "_judge_kernel":
            yield "no wide loads"
    if registers > most:
        yield f"{registers} registers, {most} allowed"


def main():
    compiled, run = {}, JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        made = run(self, *args, grid=grid, warmup=True, **options)
        aligned = options.get("ALIGNED", True)
        if aligned:  # others load element by element
            compiled[made.hash] = (self.fn.__name__, made)
        return made

    JITFunction.run = only_compile
    driver.set_active(Target())
    bad = total = 0
    for sm in sys.argv[1:] or OTHERS:
        Target.sm, seen = int(sm), set()
        rows = [(each, name) for each in cases.STORAGES for name in FAST[: None if each in ("split", "full") else 1]]
        if Target.sm >= 89:
            rows += [(CASTS, each) for each in ("fp8", "fp8-row", "fp8-mx")]
        for storage, name in rows:
            made_now = casts(name, compiled) if storage == CASTS else variants(storage, name, compiled)
            for key, (kernel, made) in made_now.items():
                if key in seen:
                    continue
                seen.add(key)
                found = list(faults(kernel, made, storage))
                bad += bool(found)
                for fault in found:
                    print(f"sm_{sm} {kernel} {storage} {name}: {fault}", flush=True)
        total += len(seen)
    print(f"{total} variants, {bad} with faults (triton {triton.__version__})")
    return bool(bad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="halfstep-aot-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        sys.exit(main())
