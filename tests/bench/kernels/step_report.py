"""What steps took, as JSON. It needs no torch, so that the page can be written without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.bench.figures import Figure, Machine

if TYPE_CHECKING:
    from pathlib import Path

DETERMINISTIC, DEFAULT = "deterministic", "default"
"""Two of the ways: what determinism costs is the one against the other."""


class Case(msgspec.Struct, frozen=True):
    """A step: so many rows, each of so many new tokens, up to so many in all."""

    rows: int
    new: int
    kv: int


class Result(msgspec.Struct, frozen=True):
    """One case, one way; times in ms.

    Attributes:
        layers: All layers, from the embedding to the final norm.
        beside: All but layers and head: Python, plan, checks, sampling.
    """

    case: Case
    way: str
    step: Figure
    layers: Figure
    beside: Figure
    limit: float


class Report(msgspec.Struct, frozen=True):
    """One run."""

    machine: Machine
    isa: str
    threads: int
    shape: str
    results: list[Result]

    def of(self, case: Case, way: str) -> Result:
        """Return what one case took, one way."""
        return next(each for each in self.results if (each.case, each.way) == (case, way))

    def cases(self) -> list[Case]:
        """What was measured, in order."""
        return [each.case for each in self.results if each.way == DEFAULT]


def write(report: Report, file: Path) -> None:
    """Write it, readable."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def read(file: Path) -> Report:
    """Read it again."""
    return msgspec.json.decode(file.read_bytes(), type=Report)
