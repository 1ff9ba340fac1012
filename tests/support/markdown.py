"""Tables for generated pages, and where these are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(head: Sequence[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    yield _line(head)
    yield _line("---" for _ in head)
    yield from map(_line, body)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
