"""Compiles recorded launches for GPUs that need not be here, and reads what they use.

`python -m tests.kernels.ahead_of_time` compiles those of all models for all compute capabilities,
and writes compiled.tsv: the page about kernels is made from it. It takes minutes. Names of kernels
behind the command compile these alone; the other rows stay as they are. After a model was added,
`--model NAME` compiles what only it launches, and joins that to the rows. A command that was
interrupted finds in Triton's cache what it compiled.
"""

# pyright: basic

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from tests.kernels.dry_run import ALIGNED, ALIGNMENT, Launch, every_launch, name_of
from tests.kernels.published import MODELS
from tests.kernels.sass import Code, code_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from antiphon.kernels.triton.backend import SMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TABLE = Path(__file__).with_name("compiled.tsv")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that a block of each compute capability may have."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MATRIX_ROWS_MIN = 64
"""Of a tile that the matrix units of sm_90 and sm_100 take whole; smaller ones have sm_80's."""
MATRIX_OF = {90: "HGMMA", 100: "UTCHMMA", 103: "UTCHMMA"}
"""Where it is not HMMA."""
MATRIX_OF_FP8 = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 103: "UTCQMMA", 120: "QMMA"}
"""Of 8 bits. Smaller tiles are widened by ptxas on sm_90 to sm_103, which have nothing else."""
WEIGHTS_FIRST = frozenset(
    {"experts_grouped.gate_up", "experts_grouped.down", "linear_grouped.multiply"}
)
"""Kernels whose tiles have outputs as rows: weights are the left side of their products."""
MULTIPLYING = WEIGHTS_FIRST | {
    *("attention.paged_attention", "experts.gate_up", "experts.down", "latent.latent"),
    *("linear_fp8.multiply", "linear_int8.multiply", "whole.whole"),
    *("linear_tiled.linear", "linear_tiled.linear_heads"),
}
"""Kernels whose innermost loop multiplies matrices, and loads the next ones meanwhile."""
WIDE, NARROW, WHOLE = "*fp32", "*fp8", "*i8"
"""What matrix units do not multiply as it is, and what others than those of 16 bits do."""
FEW_ELEMENTS = frozenset(
    {
        *("decode_rows.decode_rows", "expert_tiles.sort", "futures.record", "futures.resolve"),
        *("logits.bias", "logits.mask", "logits.penalize", "routing.route"),
        # A number or two of each block of 256 logits, of which there may be an odd number.
        *("sampling.bound", "sampling.invert", "sampling.log_mass"),
    }
)
"""Kernels that read some numbers a row, or one by one at random: they need not load 128 bits."""
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


def lacks(code: Code, launch: Launch, sm: int) -> str | None:
    """What the machine code of a launch must have there, and has not; None: nothing."""
    if code.load_bits < 128 and name_of(launch) not in FEW_ELEMENTS:
        return f"its widest load is of {code.load_bits} bits"
    if name_of(launch) not in MULTIPLYING or launch.arguments[0].startswith(WIDE):
        return None
    rows = "BLOCK_N" if name_of(launch) in WEIGHTS_FIRST else "BLOCK_M"
    large = int(dict(launch.constants)[rows] or 0) >= MATRIX_ROWS_MIN
    if launch.arguments[0].startswith(NARROW):
        expected = MATRIX_OF_FP8[sm] if large or sm not in MATRIX_OF else "HMMA"
    elif launch.arguments[0].startswith(WHOLE):
        expected = "IGMMA" if large and sm in MATRIX_OF else "IMMA"
    else:
        expected = MATRIX_OF.get(sm, "HMMA") if large else "HMMA"
    if code.matrix != expected:
        return f"it multiplies by {code.matrix or 'no matrix instruction'}, not by {expected}"
    return None if code.asynchronous else "it loads nothing ahead"


def compile_for(launch: Launch, sm: int) -> tuple[Usage, Code]:
    """Compile a launch for a compute capability, with what that GPU need not be here for."""
    made: Any = triton.compile(
        source_of(launch), target=GPUTarget("cuda", sm, 32), options=options_of(launch)
    )
    dumped = _dump(made.asm["cubin"])
    found = _USAGE.findall(dumped)
    assert len(found) == 1, dumped
    registers, stack, _, local = map(int, found[0])
    return Usage(registers, stack, local, made.metadata.shared), code_of(dumped)


def source_of(launch: Launch) -> ASTSource:
    """What of a launch is compiled, for any target."""
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
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def options_of(launch: Launch) -> dict[str, int]:
    """How a launch is compiled, for any target."""
    return {"num_warps": launch.warps, "num_stages": launch.stages}


def _dump(binary: bytes) -> str:
    """Resources and machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout


RowKey = tuple[str, int]
"""A kernel, and the compute capability that it is compiled for."""


class Row(NamedTuple):
    """The launches of a kernel on a compute capability.

    Attributes:
        launches: Their number.
        digest: Of these: another one is of other launches.
        usage: The most that one of them uses.
        matrix: Instructions that multiply matrices in their innermost loops; empty: none.
        load_bits: Of the widest load in this loop, or anywhere without one: the least of them.
    """

    kernel: str
    sm: int
    launches: int
    digest: str
    usage: Usage
    matrix: str
    load_bits: int

    def joined(self, more: Row) -> Row:
        """With more launches of the same kernel, but for the digest."""
        return self._replace(
            launches=self.launches + more.launches,
            usage=Usage(*map(max, self.usage, more.usage)),
            matrix=_listed({*self.matrix.split("/"), *more.matrix.split("/")}),
            load_bits=min(self.load_bits, more.load_bits),
        )


def by_kernel(every: Iterable[Launch], sms: Iterable[int]) -> dict[RowKey, list[Launch]]:
    """All that a row of the selection table lets run on each of these, by kernel."""
    found: dict[RowKey, list[Launch]] = {}
    for sm in sms:
        for launch in every:
            if launch.runs_on(sm):
                found.setdefault((name_of(launch), sm), []).append(launch)
    return dict(sorted(found.items()))


def digest_of(launches: Iterable[Launch]) -> str:
    """A digest of launches in any order."""
    return hashlib.sha256("\n".join(sorted(map(repr, launches))).encode()).hexdigest()[:8]


def compiled(every: Iterable[Launch], sms: Iterable[int]) -> list[Row]:
    """Compile all that a row of the selection table lets run there.

    Raises:
        RuntimeError: One does not fit there, keeps registers in memory, or lacks an instruction.
    """
    return [_row(*each) for each in by_kernel(every, sms).items()]


def compiled_at_once(every: Iterable[Launch]) -> list[Row]:
    """As `compiled`, for all compute capabilities, on all processors."""
    return _rows(by_kernel(every, SMS))


def missing(
    table: Iterable[Row], others: Iterable[Launch], every: Iterable[Launch]
) -> tuple[dict[RowKey, Row], dict[RowKey, list[Launch]]]:
    """Which rows of a table have launches that are still there, and which launches it lacks.

    A row has them if it is one of `every` launch of its kernel, or of those of the `others`, which
    the models had before another was added. By its digest a row of any other launches is not there.
    """
    rows, known = {(row.kernel, row.sm): row for row in table}, by_kernel(others, SMS)
    kept: dict[RowKey, Row] = {}
    lacking: dict[RowKey, list[Launch]] = {}
    for key, launches in by_kernel(every, SMS).items():
        compiled_before: list[Launch] = []
        for each in (known.get(key, []), launches):
            if key in rows and rows[key].digest == digest_of(each):
                kept[key], compiled_before = rows[key], each
        if rest := [launch for launch in launches if launch not in compiled_before]:
            lacking[key] = rest
    return kept, lacking


def with_model(model: str) -> list[Row]:
    """The table with the launches that only this model has, which alone are compiled."""
    every = every_launch()
    others = every_launch(tuple(name for name in MODELS if name != model))
    kept, lacking = missing(read_table(), others, every)
    launched = by_kernel(every, SMS)
    for row in _rows(lacking):
        key = row.kernel, row.sm
        whole = kept[key].joined(row) if key in kept else row
        kept[key] = whole._replace(digest=digest_of(launched[key]))
    return sorted(kept.values())


def _rows(launches: Mapping[RowKey, list[Launch]]) -> list[Row]:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return sorted(pool.map(_row, launches.keys(), launches.values()))


def _row(key: RowKey, launches: list[Launch]) -> Row:
    name, sm = key
    usages: list[Usage] = []
    codes: list[Code] = []
    for launch in launches:
        try:
            usage, code = compile_for(launch, sm)
        except ValueError as error:
            raise RuntimeError(f"sm_{sm}: {error}: {launch}") from error
        if (reason := usage.refusal(sm) or lacks(code, launch, sm)) is not None:
            raise RuntimeError(f"sm_{sm}: {reason}: {launch}")
        usages.append(usage)
        codes.append(code)
    most = Usage(*map(max, zip(*usages, strict=True)))
    matrix = _listed({code.matrix for code in codes})
    bits = min(code.load_bits for code in codes)
    return Row(name, sm, len(launches), digest_of(launches), most, matrix, bits)


def _listed(names: set[str]) -> str:
    return "/".join(sorted(names - {""}))


def read_table() -> list[Row]:
    """The rows of compiled.tsv."""
    rows: list[Row] = []
    for line in TABLE.read_text().splitlines()[1:]:
        name, sm, count, digest, *usage, matrix, bits = line.split("\t")
        most = Usage(*map(int, usage))
        rows.append(Row(name, int(sm), int(count), digest, most, matrix, int(bits)))
    return rows


def main() -> int:
    parser = ArgumentParser(description="Compile recorded launches, and write compiled.tsv.")
    parser.add_argument("kernels", nargs="*", help="Kernels to compile alone; none: all.")
    parser.add_argument("--model", choices=MODELS, help="A new one, whose launches are added.")
    arguments = parser.parse_args()
    named = set(arguments.kernels)
    if arguments.model is not None:
        rows = with_model(arguments.model)
    elif named:
        chosen = [launch for launch in every_launch() if name_of(launch) in named]
        kept = [row for row in read_table() if row.kernel not in named]
        rows = sorted(compiled_at_once(chosen) + kept)
    else:
        rows = compiled_at_once(every_launch())
    lines = ["kernel\tsm\tlaunches\tdigest\tregisters\tstack\tlocal\tshared\tmatrix\tload_bits"]
    lines += ["\t".join(map(str, (*row[:4], *row.usage, *row[5:]))) for row in rows]
    TABLE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
