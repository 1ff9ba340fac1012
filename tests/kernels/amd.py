"""Compiles a launch of each Triton kernel for AMD's GPUs, on which nothing is served.

`python -m tests.kernels.amd` writes amd.tsv, of which the page about kernels has a table. Names of
kernels behind the command compile these alone; the other rows stay as they are. A refusal of the
compiler is a row like any other, with its reason.
"""

# pyright: basic

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import triton
from tests.kernels.ahead_of_time import digest_of, options_of, source_of
from tests.kernels.dry_run import Launch, every_launch, name_of
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

REPORT = Path(__file__).with_name("amd.tsv")
LDS_KIB = {"gfx942": 64, "gfx950": 160}
"""Local memory (LDS) that a block may have on GPUs of the MI300 and of the MI350 series."""
LANES = 64
"""Of a wavefront, which takes the place of a warp."""
E4M3, E4M3_FNUZ = "fp8e4nv", "fp8e4b8"
FP8_FORMS = {"gfx942": (E4M3, E4M3_FNUZ), "gfx950": (E4M3,)}
"""Types that stand for e4m3: matrix units multiply the last one. The first of two is emulated."""
LIMIT_S = 300
BLANK = "-"
HEADER = (
    *("kernel", "target", "fp8", "digest", "reason"),
    *("vgprs", "vgpr_spills", "sgpr_spills", "scratch", "lds", "matrix"),
)
_COUNT = re.compile(r"^[ \t]+(?:- )?\.(\w+):[ \t]+(\d+)$", re.MULTILINE)
_MATRIX = re.compile(r"^[ \t]+v_mfma_(\w+)", re.MULTILINE)
_ERROR = re.compile(r"(?:error|LLVM ERROR): (.+)|Assertion [`'](.+)' failed")


class Resources(NamedTuple):
    """What the code of a launch uses of a compute unit."""

    vgprs: int  # a lane, with those of the matrix units (AGPRs)
    vgpr_spills: int  # of a lane
    sgpr_spills: int  # of a wavefront
    scratch: int  # bytes a lane, of memory: spilled registers, and arrays
    lds: int  # bytes a block
    matrix: str  # instructions that multiply matrices, behind v_mfma_; empty: none


RowKey = tuple[str, str, str]
"""A kernel, the GPU that it is compiled for, and the type of its operands of e4m3, or nothing."""


class Row(NamedTuple):
    """What came of compiling the launch that stands for those of a kernel."""

    kernel: str
    target: str
    fp8: str
    digest: str  # of the launch
    reason: str  # why the compiler refuses it; empty: it does not
    resources: Resources | None  # None: it is refused

    @property
    def fits(self) -> bool:
        """Whether a block of the GPU has as much local memory as the code uses."""
        return self.resources is not None and self.resources.lds <= LDS_KIB[self.target] * 1024

    @property
    def spills(self) -> bool:
        """Whether registers are kept in memory. Scalar ones go to vector registers before."""
        return self.resources is not None and self.resources.scratch > 0


def report(every: Iterable[Launch]) -> list[Row]:
    """Compile the launches that stand for all others, on all processors."""
    launches = representatives(every)
    context = get_context("spawn")
    # The key of Triton's cache digests its library, which each process would do again.
    with ProcessPoolExecutor(mp_context=context, initializer=triton_key) as pool:
        return sorted(pool.map(_row, launches.keys(), launches.values()))


def representatives(every: Iterable[Launch]) -> dict[RowKey, Launch]:
    """The launches that stand for those of each kernel.

    Of those of a kernel, and of those that have operands of e4m3, the one with the largest tile:
    the product of its constants BLOCK and BLOCK_*. Of several, that of most stages, then of most
    warps, and then the last one as a text.
    """
    largest: dict[tuple[str, bool], Launch] = {}
    for launch in every:
        key = name_of(launch), any(E4M3 in argument for argument in launch.arguments)
        if key not in largest or _size(launch) > _size(largest[key]):
            largest[key] = launch
    return {
        (kernel, target, form): _with_form(launch, form)
        for (kernel, has_fp8), launch in sorted(largest.items(), key=lambda each: each[0])
        for target, forms in FP8_FORMS.items()
        for form in (forms if has_fp8 else ("",))
    }


def _size(launch: Launch) -> tuple[int, int, int, str]:
    tile = 1
    for name, value in launch.constants:
        if name == "BLOCK" or name.startswith("BLOCK_"):
            tile *= int(value or 1)
    return tile, launch.stages, launch.warps, repr(launch)


def _with_form(launch: Launch, form: str) -> Launch:
    arguments = tuple(argument.replace(E4M3, form) for argument in launch.arguments)
    return msgspec.structs.replace(launch, arguments=arguments) if form else launch


def _row(key: RowKey, launch: Launch) -> Row:
    found = outcome_of(lambda: compile_for(launch, key[1]))
    reason, resources = (found, None) if isinstance(found, str) else ("", found)
    return Row(*key, digest_of([launch]), reason, resources)


def compile_for(launch: Launch, target: str) -> Resources:
    """Compile a launch for a GPU that need not be here; ROCm is not needed either."""
    made: Any = triton.compile(
        source_of(launch), target=GPUTarget("hip", target, LANES), options=options_of(launch)
    )
    return resources_of(made.asm["amdgcn"], made.metadata.shared)


def resources_of(assembly: str, lds: int) -> Resources:
    """What the metadata of an assembly says. Local memory is given to a launch, not to its code."""
    counts = {name: int(count) for name, count in _COUNT.findall(assembly)}
    return Resources(
        counts["vgpr_count"],
        counts["vgpr_spill_count"],
        counts["sgpr_spill_count"],
        counts["private_segment_fixed_size"],
        lds,
        "/".join(sorted(set(_MATRIX.findall(assembly)))),
    )


def outcome_of(work: Callable[[], Resources]) -> Resources | str:
    """What the compiler makes, or why it makes nothing.

    In a process of its own, a copy of this one: an assertion of LLVM ends the process that runs
    into it, and both LLVM and MLIR write their reasons to its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        made, written = Path(folder, "made.json"), Path(folder, "stderr")
        process = get_context("fork").Process(target=_work, args=(work, made, written))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return f"it is not compiled within {LIMIT_S} s"
        if made.exists():
            return msgspec.json.decode(made.read_bytes(), type=Resources)
        return reason_of(written.read_text(errors="replace"), process.exitcode)


def _work(work: Callable[[], Resources], made: Path, written: Path) -> None:
    with written.open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    try:
        found = work()
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises is its reason
        os.write(2, f"error: {_cause(error)}\n".encode())
    else:
        made.write_bytes(msgspec.json.encode(found))


def _cause(error: BaseException) -> str:
    """The first error of a chain, without the source that Triton quotes."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"


def reason_of(written: str, exit_status: int) -> str:
    """The first error that the compiler has written, or how its process has ended."""
    found = _ERROR.search(written)
    if found is None:
        ended = signal.Signals(-exit_status).name if exit_status < 0 else f"status {exit_status}"
        return f"the compiler's process has ended by {ended}"
    return " ".join((found[1] or f"Assertion {found[2]}").split())


def read_report() -> list[Row]:
    """The rows of amd.tsv."""
    rows: list[Row] = []
    for line in REPORT.read_text().splitlines()[1:]:
        cells = ["" if cell == BLANK else cell for cell in line.split("\t")]
        kernel, target, fp8, digest, reason, *counts, matrix = cells
        used = None if reason else Resources._make([*map(int, counts), matrix])
        rows.append(Row(kernel, target, fp8, digest, reason, used))
    return rows


def formatted(rows: Iterable[Row]) -> str:
    """Rows as amd.tsv has them."""
    lines = ["\t".join(HEADER)]
    for row in rows:
        used = row.resources or [""] * len(Resources._fields)
        lines.append("\t".join(str(cell) if cell != "" else BLANK for cell in (*row[:5], *used)))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = ArgumentParser(description="Compile a launch of each kernel for AMD's GPUs.")
    parser.add_argument("kernels", nargs="*", help="Kernels to compile alone; none: all.")
    named = set(parser.parse_args().kernels)
    launches = [launch for launch in every_launch() if not named or name_of(launch) in named]
    kept = [row for row in read_report() if row.kernel not in named] if named else []
    REPORT.write_text(formatted(sorted([*kept, *report(launches)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
