"""Split the rows of a message that is too large into several messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


def split_rows(
    rows: Iterable[T], size_bytes: Callable[[T], int], bytes_max: int
) -> Iterator[list[T]]:
    """Yield the rows in order, in parts of at most `bytes_max`. A row is never split."""
    part: list[T] = []
    used = 0
    for row in rows:
        size = size_bytes(row)
        if part and used + size > bytes_max:
            yield part
            part, used = [], 0
        part.append(row)
        used += size
    if part:
        yield part
