"""Compiles recorded launches for GPUs that need not be here, and reads what they use.

`python -m tests.kernels.ahead_of_time` compiles those of all models for all compute capabilities,
and writes compiled.tsv: the page about kernels is made from it. It takes minutes.
"""

# pyright: basic

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from tests.kernels.dry_run import ALIGNED, ALIGNMENT, Launch, every_launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from antiphon.kernels.triton.backend import SMS

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLE = Path(__file__).with_name("compiled.tsv")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that a block of each compute capability may have."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Usage(NamedTuple):
    """What the binary of a launch uses of a multiprocessor."""

    registers: int  # a thread
    stack: int  # bytes a thread, of memory
    local: int  # likewise: registers that are spilled
    shared: int  # bytes a block

    def refusal(self, sm: int) -> str | None:
        """Why it must not run there; None if it may."""
        if self.shared > SHARED_KIB[sm] * 1024:
            return f"{self.shared} bytes of shared memory, of {SHARED_KIB[sm]} KiB"
        if self.stack or self.local:
            return f"{self.stack} bytes of stack and {self.local} of spilled registers"
        return None


def compile_for(launch: Launch, sm: int) -> Usage:
    """Compile a launch for a compute capability, with what that GPU need not be here for."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    constants = dict(launch.constants)
    plain = [name for name in kernel.arg_names if name not in constants]
    kinds = dict(zip(plain, launch.arguments, strict=True))
    signature = {
        name: kinds[name].removesuffix(ALIGNED) if name in kinds else "constexpr"
        for name in kernel.arg_names
    }
    attributes = {
        (place,): [["tt.divisibility", ALIGNMENT]]
        for place, name in enumerate(kernel.arg_names)
        if kinds.get(name, "").endswith(ALIGNED)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made: Any = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, stack, local = _resources(made.asm["cubin"])
    return Usage(registers, stack, local, made.metadata.shared)


def _resources(binary: bytes) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        dumped = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = _USAGE.findall(dumped)
    assert len(found) == 1, dumped
    registers, stack, _, local = map(int, found[0])
    return registers, stack, local


class Row(NamedTuple):
    """The launches of a kernel on a compute capability, with the most that one of them uses."""

    kernel: str
    sm: int
    launches: int
    usage: Usage


def name_of(launch: Launch) -> str:
    """The name of its kernel in the table."""
    return f"{launch.module.rpartition('.')[2]}.{launch.kernel.removesuffix('_kernel')}"


def compiled(every: Iterable[Launch], sms: Iterable[int]) -> list[Row]:
    """Compile all.

    Raises:
        RuntimeError: One does not fit there, or keeps registers in memory.
    """
    found: dict[tuple[str, int], list[Usage]] = {}
    for sm in sms:
        for launch in every:
            usage = compile_for(launch, sm)
            if (reason := usage.refusal(sm)) is not None:
                raise RuntimeError(f"sm_{sm}: {reason}: {launch}")
            found.setdefault((name_of(launch), sm), []).append(usage)
    return [
        Row(name, sm, len(usages), Usage(*map(max, zip(*usages, strict=True))))
        for (name, sm), usages in sorted(found.items())
    ]


def read_table() -> list[Row]:
    """The rows of compiled.tsv."""
    rows: list[Row] = []
    for line in TABLE.read_text().splitlines()[1:]:
        name, *numbers = line.split("\t")
        sm, count, *usage = map(int, numbers)
        rows.append(Row(name, sm, count, Usage(*usage)))
    return rows


def main() -> int:
    rows = compiled(every_launch(), SMS)
    lines = ["kernel\tsm\tlaunches\tregisters\tstack\tlocal\tshared"]
    lines += ["\t".join(map(str, (*row[:3], *row.usage))) for row in rows]
    TABLE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
