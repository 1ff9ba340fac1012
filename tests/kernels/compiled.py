"""Compiles launches ahead of time, for GPUs that need not be here: LAUNCHES, a file, then SMs.

`python -m tests.kernels.compiled FILE 80 90` prints a line for each that fails.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from antiphon.kernels.triton.launch import ALIGNED, ALIGNMENT, Launch

SHARED_BYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that a block of each compute capability may have."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_for(launch: Launch, sm: int) -> Any:
    module, _, name = launch.kernel.partition(":")
    kernel = getattr(importlib.import_module(f"antiphon.kernels.triton.{module}"), name)
    constants = dict(launch.constants)
    plain = [argument for argument in kernel.arg_names if argument not in constants]
    types = [argument.partition(":")[0] for argument in launch.arguments]
    signature = dict(zip(plain, types, strict=True))
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {argument: signature[argument] for argument in kernel.arg_names}
    aligned = {n for n, t in zip(plain, launch.arguments, strict=True) if t.endswith(ALIGNED)}
    attributes = {
        (place,): [["tt.divisibility", ALIGNMENT]]
        for place, name in enumerate(kernel.arg_names)
        if name in aligned
    }
    source = ASTSource(kernel, ordered, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def spilled(binary: bytes) -> str | None:
    """What a kernel keeps in memory of its own; None if that is nothing."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    found = re.findall(r"(STACK|LOCAL):(\d+)", usage)
    assert found, usage
    used = [f"{name} {size}" for name, size in found if int(size)]
    return ", ".join(used) or None


def both_halves(launches: list[Launch]) -> list[Launch]:
    """With those of bfloat16, which the interpreter does not run."""
    made = dict.fromkeys(launches)
    for launch in launches:
        arguments = tuple(part.replace("fp16", "bf16") for part in launch.arguments)
        made[replace(launch, arguments=arguments)] = None
    return list(made)


def main(file: str, *sms: str) -> int:
    launches = both_halves(msgspec.json.decode(Path(file).read_bytes(), type=list[Launch]))
    failures = 0
    for sm in map(int, sms):
        for launch in launches:
            made = compile_for(launch, sm)
            shared = made.metadata.shared
            spills = spilled(made.asm["cubin"])
            if shared > SHARED_BYTES[sm] * 1024 or spills:
                failures += 1
                print(f"sm_{sm}: {shared} bytes of shared memory, {spills}: {launch}")
    print(f"{len(launches)} launches compiled for {len(sms)} compute capabilities")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
