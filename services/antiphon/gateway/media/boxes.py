"""Boxes of MP4 and QuickTime files (ISO/IEC 14496-12): a length, a type and content, nested."""

from __future__ import annotations

import struct
from itertools import repeat
from typing import TYPE_CHECKING, Final

from antiphon.gateway.media.header import PIECES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONG: Final = 16
"""Length of the header of a box whose size has 64 bits."""


def find(data: memoryview, *path: bytes) -> memoryview | None:
    """The content of the first box at a path."""
    for name in path:
        data = next((content for kind, content in boxes(data) if kind == name), memoryview(b""))
    return data or None


def boxes(data: memoryview, most: int = PIECES_MAX) -> Iterator[tuple[bytes, memoryview]]:
    """Type and content of boxes, at most so many, which lie behind each other."""
    at = 0
    for _ in repeat(None, most):
        if at + 8 > len(data):
            return
        size, kind = struct.unpack_from(">I4s", data, at)
        begin = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
            begin = _LONG
        elif size == 0:  # it goes on to the end
            size = len(data) - at
        if size < begin:
            return
        yield kind, data[at + begin : at + size]
        at += size


def movie(data: memoryview) -> memoryview | None:
    """The index of a file; None: it is no such file."""
    if bytes(data[4:8]) not in (b"ftyp", b"moov", b"wide", b"mdat", b"free"):
        return None
    return find(data, b"moov")
