"""Machine code of NVIDIA GPUs, as cuobjdump lists it: how a kernel loads, multiplies and stores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z]\w+)(?P<kind>[\w.]*)"
    r"(?P<operands>[^;]*);",
    re.MULTILINE,
)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_BITS = re.compile(r"\.(64|128)\b")
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "QMMA", "QGMMA", "UTCQMMA", "IMMA", "IGMMA")
"""Multiply matrices: of sm_80, sm_90 and sm_100, of 16 bits and of 8, and integers."""
SPILLS = frozenset({"LDL", "STL"})


class Instruction(NamedTuple):
    """One line."""

    address: int
    name: str
    bits: int  # of a load or store, a thread; else 32
    target: int | None  # of a branch


class Code(NamedTuple):
    """What a kernel does in its innermost loop that multiplies matrices, or else anywhere."""

    matrix: str  # the instruction; empty: none
    load_bits: int  # of the widest load from global memory, a thread; 0: none
    store_bits: int  # to global memory, anywhere
    asynchronous: bool  # whether it copies to shared memory meanwhile


def read(listing: str) -> list[Instruction]:
    """The instructions of a listing, in order."""
    found: list[Instruction] = []
    for line in _LINE.finditer(listing):
        name, bits = line["name"], _BITS.search(line["kind"])
        target = _TARGET.search(line["operands"]) if name == "BRA" else None
        found.append(
            Instruction(
                int(line["address"], 16),
                name,
                32 if bits is None else int(bits[1]),
                None if target is None else int(target[1], 16),
            )
        )
    return found


def code_of(listing: str) -> Code:
    """What a listing does.

    Raises:
        ValueError: It keeps registers in memory, or multiplies matrices beside its loops.
    """
    every = read(listing)
    if spilled := SPILLS & {each.name for each in every}:
        raise ValueError(f"registers are kept in memory: {', '.join(sorted(spilled))}")
    inner, matrix = every, [each for each in every if each.name in MATRIX]
    if matrix:
        inner = _innermost(every, matrix)
    names = sorted({each.name for each in inner if each.name in MATRIX})
    return Code(
        "/".join(names),
        max((each.bits for each in inner if each.name in ("LDG", "LDGSTS")), default=0),
        max((each.bits for each in every if each.name == "STG"), default=0),
        any(each.name in ("LDGSTS", "UBLKCP") for each in inner),
    )


def _innermost(every: list[Instruction], matrix: Iterable[Instruction]) -> list[Instruction]:
    """The shortest loop with one of these; a loop ends by a branch to an address before it.

    One of few iterations is unrolled: without any loop it is the whole kernel.
    """
    places = [each.address for each in matrix]
    loops = [
        (each.target, each.address)
        for each in every
        if each.target is not None and each.target < each.address
    ]
    if not loops:
        return every
    around = [loop for loop in loops if any(loop[0] <= place <= loop[1] for place in places)]
    if not around:
        raise ValueError("no loop multiplies matrices")
    first, last = min(around, key=lambda loop: loop[1] - loop[0])
    return [each for each in every if first <= each.address <= last]
