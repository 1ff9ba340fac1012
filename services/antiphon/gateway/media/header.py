"""Type and size of an image by its header, without a decoder.

A size is that of the image upright: a camera's orientation (EXIF) may swap the edges. Bytes that
are not what their header says are found out by the encoder, whose decoder must come to this size.
It is read in the event loop, so no more than `PIECES_MAX` pieces before the pixels are read.
"""

from __future__ import annotations

import re
import struct
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS: Final = ("JPEG", "PNG", "WebP", "GIF", "BMP")
PIECES_MAX: Final = 1000
"""Chunks, segments, or EXIF entries. Files have a few dozen; a hostile one could have millions."""
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})
"""Values of the EXIF orientation that swap the edges."""
_ORIENTATION: Final = 0x0112
_SHORT: Final = 3
_EXIF: Final = b"Exif\0\0"
_FILLING: Final = re.compile(rb"\xff*")
_BITMAP_CORE: Final = 12
"""Length of the oldest header of a bitmap, whose sizes have 16 bits."""


class ImageHeader(NamedTuple):
    format: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader | None:
    """Read the header of an image; None if it is none of `FORMATS`, or has no size."""
    try:
        header = _read(data)
    except (struct.error, IndexError):  # it ends too soon
        return None
    return header if header is not None and header.width > 0 and header.height > 0 else None


def _read(data: bytes) -> ImageHeader | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", data, 6)
        return ImageHeader("GIF", width, height)
    if data.startswith(b"BM"):
        return _bmp(data)
    return None


def _png(data: bytes) -> ImageHeader | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    at, exif = 8, b""
    for _ in repeat(None, PIECES_MAX):
        if at + 8 > len(data):
            return _upright("PNG", width, height, exif)
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            return _upright("PNG", width, height, exif)
        if kind == b"eXIf":
            exif = data[at + 8 : at + 8 + length]
        at += 12 + length
    return None


def _jpeg(data: bytes) -> ImageHeader | None:
    exif = b""
    for marker, segment in _segments(data):
        if marker == 0xE1 and segment.startswith(_EXIF) and not exif:
            exif = segment[len(_EXIF) :]
        # All frames but those that are no frames: DHT, JPG, DAC.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", segment, 1)
            return _upright("JPEG", width, height, exif)
    return None


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Markers up to the first scan, each with its content."""
    at = 2
    for _ in repeat(None, PIECES_MAX):
        at = data.find(b"\xff", at)  # decoders look for the next marker, too
        if at < 0:
            return
        filled = _FILLING.match(data, at)
        assert filled is not None, "it matches nothing, too"
        at = filled.end()
        marker = data[at]
        at += 1
        if marker in (0xD9, 0xDA):
            return
        if marker <= 0x01 or 0xD0 <= marker <= 0xD8:
            continue  # without content
        (length,) = struct.unpack_from(">H", data, at)
        yield marker, data[at + 2 : at + length]
        at += max(2, length)


def _webp(data: bytes) -> ImageHeader | None:
    at, size, exif = 12, None, b""
    for _ in repeat(None, PIECES_MAX):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        content = at + 8
        if kind == b"VP8X":
            width = 1 + int.from_bytes(data[content + 4 : content + 7], "little")
            size = width, 1 + int.from_bytes(data[content + 7 : content + 10], "little")
        elif kind == b"VP8 " and size is None:
            width, height = struct.unpack_from("<HH", data, content + 6)
            size = width & 0x3FFF, height & 0x3FFF
        elif kind == b"VP8L" and size is None:
            (bits,) = struct.unpack_from("<I", data, content + 1)
            size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif kind == b"EXIF":
            exif = data[content : content + length].removeprefix(_EXIF)
        at = content + length + length % 2
    return None if size is None else _upright("WebP", *size, exif)


def _bmp(data: bytes) -> ImageHeader | None:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == _BITMAP_CORE:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return ImageHeader("BMP", width, abs(height))  # a negative one: its rows begin at the top


def _upright(kind: str, width: int, height: int, exif: bytes) -> ImageHeader:
    try:
        sideways = _orientation(exif) in _SIDEWAYS
    except struct.error:
        sideways = False
    return ImageHeader(kind, height, width) if sideways else ImageHeader(kind, width, height)


def _orientation(exif: bytes) -> int:
    """The orientation in a TIFF structure; 1 if it has none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    (start,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, start)
    for index in range(min(count, PIECES_MAX)):
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * index)
        if tag == _ORIENTATION and kind == _SHORT:
            return value
    return 1
