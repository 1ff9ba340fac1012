"""Format and duration of an audio file by its headers, without a decoder.

Of WAV, FLAC (RFC 9639), MP3 (ISO/IEC 11172-3 and 13818-3, with Xing's or VBRI's table, or else
frame by frame) and Ogg with Vorbis or Opus (RFC 3533, 7845).
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.claim import AudioFormat

FORMATS: Final = ("WAV", "FLAC", "MP3", "Ogg")
CHUNKS_MAX: Final = 4096
"""Maximum number of chunks of a WAV file before its samples."""
TAGS_MAX: Final = 8
"""Maximum number of tags before the first frame of an MP3."""
_SECONDS_MAX: Final = 1e9
_STREAMED: Final = 0xFFFFFFFF
"""Size of a chunk that was written before it was known."""
_OPUS_RATE: Final = 48_000
_PAGE_BYTES: Final = 65_307
"""Maximum size of a page of Ogg."""
_KBITS: Final = {
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Of layer III, by version and the number in a frame's header."""
_RATES: Final = {
    3: (44_100, 48_000, 32_000),
    2: (22_050, 24_000, 16_000),
    0: (11_025, 12_000, 8_000),
}
"""In Hz, by the version's number in a frame's header."""


class AudioFileHeader(NamedTuple):
    format: AudioFormat
    seconds: float


def read_audio_header(data: bytes | bytearray) -> AudioFileHeader:
    """Read the header of an audio file; of an MP3 without a table, those of all frames.

    Raises:
        InvalidRequest: It is not of these formats, or does not say how long it is.
    """
    try:
        header = _header(memoryview(data))
    except (struct.error, IndexError, ZeroDivisionError):  # it ends too soon
        header = None
    if header is None or not 0 < header.seconds < _SECONDS_MAX:
        names = ", ".join(FORMATS)
        raise InvalidRequest(f"not audio of a known format ({names}) that says its duration")
    return header


def _header(data: memoryview) -> AudioFileHeader | None:
    start = bytes(data[:12])
    if start[:4] == b"RIFF" and start[8:] == b"WAVE":
        return AudioFileHeader("wav", _wav_seconds(data))
    if start[:4] == b"fLaC":
        return AudioFileHeader("flac", _flac_seconds(data))
    if start[:4] == b"OggS":
        return AudioFileHeader("ogg", _ogg_seconds(data))
    first = _after_tags(data)
    if (frame := _mp3_frame(data, first)) is not None:
        return AudioFileHeader("mp3", _mp3_seconds(data, first, frame))
    return None


def _wav_seconds(data: memoryview) -> float:
    at, frame_bytes, rate = 12, 0, 0
    for _ in repeat(None, CHUNKS_MAX):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"fmt ":
            rate, _, frame_bytes = struct.unpack_from("<IIH", data, at + 12)
        if kind == b"data":
            there = len(data) - at - 8
            size = there if size in (0, _STREAMED) else min(size, there)
            return size / frame_bytes / rate
        at += 8 + size + size % 2
    return 0.0


def _flac_seconds(data: memoryview) -> float:
    (packed,) = struct.unpack_from(">Q", data, 18)  # of STREAMINFO, which is the first block
    return (packed & (1 << 36) - 1) / (packed >> 44)


def _ogg_seconds(data: memoryview) -> float:
    """By the position of the last page, in samples of the first stream."""
    packet = bytes(data[27 + data[26] :][:32])
    skipped = 0
    if packet.startswith(b"\x01vorbis"):
        (rate,) = struct.unpack_from("<I", packet, 12)
    elif packet.startswith(b"OpusHead"):
        rate, (skipped,) = _OPUS_RATE, struct.unpack_from("<H", packet, 10)
    else:
        return 0.0
    tail = bytes(data[-2 * _PAGE_BYTES :])
    while (last := tail.rfind(b"OggS")) >= 0:
        (position,) = struct.unpack_from("<q", tail, last + 6)
        if position >= 0:  # -1: no packet ends on the page
            return (position - skipped) / rate
        tail = tail[:last]
    return 0.0


class _Mp3Frame(NamedTuple):
    size: int  # bytes
    samples: int
    rate: int
    table: int  # where Xing's table would begin, from the frame's beginning


def _after_tags(data: memoryview) -> int:
    """Where the first frame may begin, after tags in front of it (ID3v2)."""
    at = 0
    for _ in range(TAGS_MAX):
        if bytes(data[at : at + 3]) != b"ID3":
            break
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size
    return at


def _mp3_frame(data: memoryview, at: int) -> _Mp3Frame | None:
    """The header of a frame of layer III; None if there is none."""
    if at + 4 > len(data):
        return None
    (bits,) = struct.unpack_from(">I", data, at)
    version, layer = bits >> 19 & 3, bits >> 17 & 3
    number, rate_number = bits >> 12 & 15, bits >> 10 & 3
    if bits >> 21 != 0x7FF or version == 1 or layer != 1 or number in (0, 15) or rate_number == 3:
        return None
    first = version == 3  # MPEG-1
    rate, kbits = _RATES[version][rate_number], _KBITS[1 if first else 2][number]
    samples = 1152 if first else 576
    mono = bits >> 6 & 3 == 3
    table = 4 + ((17 if mono else 32) if first else (9 if mono else 17))
    return _Mp3Frame(samples // 8 * kbits * 1000 // rate + (bits >> 9 & 1), samples, rate, table)


def _mp3_seconds(data: memoryview, at: int, frame: _Mp3Frame) -> float:
    table = bytes(data[at + frame.table :][:12])
    if table[:4] in (b"Xing", b"Info"):
        flags, frames = struct.unpack_from(">II", table, 4)
        if flags & 1:
            return frames * frame.samples / frame.rate
    if bytes(data[at + 36 : at + 40]) == b"VBRI":
        (frames,) = struct.unpack_from(">I", data, at + 36 + 14)
        return frames * frame.samples / frame.rate
    seconds, found = 0.0, frame
    while found is not None:
        seconds += found.samples / found.rate
        at += found.size
        found = _mp3_frame(data, at)
    return seconds
