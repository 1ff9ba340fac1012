"""Duration of a FLAC file: by its header, or else by its last frame.

An encoder that writes to a pipe does not know the number of samples when it writes the header. Each
frame has its place in a header of its own, with a checksum.

Source: RFC 9639, sections 8.2 and 9.1.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Final

BLOCKS_MAX: Final = 4096
"""Maximum number of blocks of metadata."""
HEADERS_MAX: Final = 4096
"""Maximum number of places that are looked at, from the end, for the header of a frame."""
_STREAMINFO: Final = 8
"""Where the first block begins, behind its header; its fields are counted from here."""
_TAIL_BYTES: Final = 4 * 1024**2
"""Twice the size of the largest frame: a file may have tags behind the last one."""
_HEADER_BYTES: Final = 16
_SYNCS: Final = (b"\xff\xf8", b"\xff\xf9")
"""How frames begin, of streams with blocks of a fixed size, and of others."""
_CHANNELS_MAX: Final = 10
"""The last code of channels that is not reserved."""


def flac_seconds(data: memoryview) -> float:
    """Duration of a file; 0 if neither its header nor a frame says it."""
    (packed,) = struct.unpack_from(">Q", data, _STREAMINFO + 10)
    rate, samples = packed >> 44, packed & (1 << 36) - 1
    return (samples or _counted(data)) / rate


def _counted(data: memoryview) -> int:
    """The number of samples up to the end of the last frame."""
    (block,) = struct.unpack_from(">H", data, _STREAMINFO + 2)
    begin = _first_frame(data)
    first = bytes(data[begin : begin + _HEADER_BYTES])
    sync = first[:2]
    if sync not in _SYNCS or _samples_until(first, block, first) is None:
        return 0
    tail = bytes(data[max(begin, len(data) - _TAIL_BYTES) :])
    at = len(tail)
    for _ in repeat(None, HEADERS_MAX):
        if (at := tail.rfind(sync, 0, at + 1)) < 0:
            break
        found = _samples_until(tail[at : at + _HEADER_BYTES], block, first)
        if found is not None:
            return found
    return 0


def _first_frame(data: memoryview) -> int:
    """Where the first frame begins, behind all blocks of metadata."""
    at = 4
    for _ in repeat(None, BLOCKS_MAX):
        last = data[at] >> 7
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "big")
        if last:
            return at
    return len(data)


def _samples_until(header: bytes, block: int, first: bytes) -> int | None:
    """The number of samples up to the end of a frame; None if it has no such header.

    `block` is the size of fixed blocks. Rate and depth are coded as in the `first` frame.
    """
    try:
        number, at = _coded_number(header)
        size, at = _block_size(header, at)
        at += (1, 2, 2)[code - 12] if 12 <= (code := header[2] & 15) <= 14 else 0
        valid = header[at] == crc8(header[:at]) and code < 15
    except (IndexError, ValueError):
        return None
    alike = (header[2] & 15, header[3] & 14) == (first[2] & 15, first[3] & 14)
    if not valid or not alike or header[3] >> 4 > _CHANNELS_MAX or header[3] & 1:
        return None
    return (number if header[1] & 1 else number * block) + size


def _coded_number(header: bytes) -> tuple[int, int]:
    """The number of a frame, or of its first sample, coded as in UTF-8, and where it ends.

    Raises:
        ValueError: It is none.
    """
    lead = header[4]
    ones = 8 - (lead ^ 0xFF).bit_length()
    if ones in (1, 8):
        raise ValueError
    number, end = lead & 0x7F >> ones, 4 + max(1, ones)
    for byte in header[5:end]:
        if byte >> 6 != 2:
            raise ValueError
        number = number << 6 | byte & 0x3F
    return number, end


def _block_size(header: bytes, at: int) -> tuple[int, int]:
    """The number of samples of a frame, and where the next field begins.

    Raises:
        ValueError: The code is reserved.
    """
    code = header[2] >> 4
    if code == 0:
        raise ValueError
    if code == 1:
        return 192, at
    if code < 6:
        return 144 << code, at
    if code < 8:
        end = at + code - 5
        return int.from_bytes(header[at:end], "big") + 1, end
    return 1 << code, at


def crc8(data: bytes) -> int:
    """The checksum of a frame's header: of the polynomial x^8 + x^2 + x + 1, from 0."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc << 1 & 0xFF ^ (0x07 if crc & 0x80 else 0)
    return crc
