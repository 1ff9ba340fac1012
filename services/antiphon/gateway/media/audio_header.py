"""Format and duration of an audio file by its headers, without a decoder.

Of WAV, FLAC (RFC 9639), MP3 (ISO/IEC 11172-3 and 13818-3, with Xing's or VBRI's table, or else
frame by frame), Ogg with Vorbis, Opus or FLAC (RFC 3533, 7845, 9639), WebM (RFC 9559),
and MP4 (ISO/IEC 14496-12), in fragments or not.
"""

from __future__ import annotations

import struct
import sys
from array import array
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from antiphon.gateway.media.boxes import boxes, find, movie
from antiphon.gateway.media.flac import flac_seconds
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.claim import AudioFormat

FORMATS: Final = ("WAV", "FLAC", "MP3", "Ogg", "WebM", "MP4")
CHUNKS_MAX: Final = 4096
"""Maximum number of chunks of a WAV file before its samples."""
TAGS_MAX: Final = 8
"""Maximum number of tags before the first frame of an MP3."""
_SECONDS_MAX: Final = 1e9
_STREAMED: Final = 0xFFFFFFFF
"""Size of a chunk that was written before it was known."""
_OPUS_RATE: Final = 48_000
_FOOTER: Final = 0x10
"""Flag of a tag that ends with its header again."""
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
_EBML: Final = b"\x1a\x45\xdf\xa3"
ELEMENTS_MAX: Final = 2**19
"""Maximum number of elements that are read: an hour has 180,000 blocks of 20 ms."""
_SEGMENT, _INFO, _CLUSTER, _GROUP = 0x18538067, 0x1549A966, 0x1F43B675, 0xA0
_OPENED: Final = frozenset({_SEGMENT, _INFO, _CLUSTER, _GROUP})
"""What has elements that are looked at; they follow its header, whatever its size."""
_SCALE, _DURATION, _TICKS = 0x2AD7B1, 0x4489, 0xE7
_BLOCKS: Final = frozenset({0xA3, 0xA1})
_INTEGER_BYTES: Final = 8
_UNSCALED: Final = 1_000_000
"""Nanoseconds of a tick, if the file does not say."""
BOXES_MAX: Final = 2**14
"""Maximum number of boxes of a file: a browser writes two for each second, or more."""
_FIELD_BYTES: Final = 4
"""Of each field of a run, and of its samples."""
_RUN_FIELDS: Final = 0x005
"""Flags of a run: which fields it has behind the number of its samples."""
_SAMPLE_FIELDS: Final = 0xF00
"""Likewise, of each sample; the first of them is its duration."""
_DURATIONS: Final = 0x100


class AudioFileHeader(NamedTuple):
    format: AudioFormat
    seconds: float


def read_audio_header(data: bytes | bytearray, seconds_max: float) -> AudioFileHeader:
    """Read the header of an audio file; of an MP3 without a table, those of all frames.

    Raises:
        InvalidRequest: It is not of these formats, does not say how long it is, or takes more than
            `seconds_max`.
    """
    try:
        header = _header(memoryview(data), seconds_max)
    except (struct.error, IndexError, ZeroDivisionError):  # it ends too soon
        header = None
    if header is None or not 0 < header.seconds < _SECONDS_MAX:
        names = ", ".join(FORMATS)
        raise InvalidRequest(f"not audio of a known format ({names}) that says its duration")
    if header.seconds > seconds_max:
        text = f"the audio takes at least {header.seconds:g} s; the limit is {seconds_max:g} s"
        raise InvalidRequest(text)
    return header


def _header(data: memoryview, seconds_max: float) -> AudioFileHeader | None:
    start = bytes(data[:12])
    if start[:4] == b"RIFF" and start[8:] == b"WAVE":
        return AudioFileHeader("wav", _wav_seconds(data))
    if start[:4] == b"fLaC":
        return AudioFileHeader("flac", flac_seconds(data))
    if start[:4] == b"OggS":
        return AudioFileHeader("ogg", _ogg_seconds(data))
    if start[:4] == _EBML:
        return AudioFileHeader("webm", _webm_seconds(data, seconds_max))
    if (index := movie(data)) is not None:
        return AudioFileHeader("mp4", _mp4_seconds(data, index))
    first = _after_tags(data)
    if (frame := _mp3_frame(data, first)) is not None:
        return AudioFileHeader("mp3", _mp3_seconds(data, first, frame, seconds_max))
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


def _ogg_seconds(data: memoryview) -> float:
    """By the position of the last page, in samples of the first stream."""
    packet = bytes(data[27 + data[26] :][:64])
    skipped = 0
    if packet.startswith(b"\x01vorbis"):
        (rate,) = struct.unpack_from("<I", packet, 12)
    elif packet.startswith(b"OpusHead"):
        rate, (skipped,) = _OPUS_RATE, struct.unpack_from("<H", packet, 10)
    elif packet.startswith(b"\x7fFLAC"):
        rate = struct.unpack_from(">Q", packet, 27)[0] >> 44  # of STREAMINFO
    else:
        return 0.0
    tail = bytes(data[-2 * _PAGE_BYTES :])
    last = tail.rfind(b"OggS")
    while last >= 0:
        (position,) = struct.unpack_from("<q", tail, last + 6)
        if position >= 0:  # -1: no packet ends on the page
            return (position - skipped) / rate
        last = tail.rfind(b"OggS", 0, last)
    return 0.0


def _webm_seconds(data: memoryview, seconds_max: float) -> float:
    """Duration by the header, or else by the times of blocks, up to `seconds_max`.

    A browser that records writes no duration, and no sizes of what it has not ended: so the file is
    read from element to element.
    """
    at, scale, cluster = 0, _UNSCALED, 0
    first, last = None, 0
    for _ in repeat(None, ELEMENTS_MAX):
        if at >= len(data) or (last - (first or 0)) * scale > seconds_max * 1e9:
            break
        kind, at = _number(data, at, kept=True)
        size, at = _number(data, at)
        if kind in _OPENED:
            continue
        content = data[at : at + size]
        at += size
        if kind in _BLOCKS:
            _, begin = _number(content, 0)  # its track
            last = cluster + struct.unpack_from(">h", content, begin)[0]
            first = last if first is None else first
        elif kind == _TICKS:
            cluster = int.from_bytes(content[:_INTEGER_BYTES], "big")
        elif kind == _SCALE:
            scale = int.from_bytes(content[:_INTEGER_BYTES], "big")
        elif kind == _DURATION:
            (ticks,) = struct.unpack(">f" if size == 4 else ">d", content)
            return ticks * scale / 1e9
    return (last - (first or 0)) * scale / 1e9


def _number(data: memoryview, at: int, *, kept: bool = False) -> tuple[int, int]:
    """A number of variable length, and where it ends; `kept`: with the mark of its length.

    Source: RFC 8794, section 4.
    """
    head = data[at]
    length = 9 - head.bit_length()
    number = int.from_bytes(data[at : at + length], "big")
    return number if kept else number & (1 << 7 * length) - 1, at + length


class _Track(NamedTuple):
    number: int
    scale: int  # ticks a second
    ticks: int


def _mp4_seconds(data: memoryview, index: memoryview) -> float:
    """That of the first track of sound, by the index, and the fragments that it says there are."""
    track = next((found for each in boxes(index) if (found := _sound(*each))), None)
    if track is None:
        return 0.0
    ticks = track.ticks
    if (extends := find(index, b"mvex")) is not None:
        usual = _usual_ticks(extends, track.number)
        ticks += sum(
            _fragment_ticks(part, track.number, usual)
            for kind, fragment in boxes(data, BOXES_MAX)
            if kind == b"moof"
            for name, part in boxes(fragment)
            if name == b"traf"
        )
    return ticks / track.scale


def _sound(name: bytes, track: memoryview) -> _Track | None:
    """A track, if it is one of sound."""
    head, media = find(track, b"tkhd"), find(track, b"mdia")
    if name != b"trak" or head is None or media is None:
        return None
    handler, times = find(media, b"hdlr"), find(media, b"mdhd")
    if handler is None or times is None or bytes(handler[8:12]) != b"soun":
        return None
    (number,) = struct.unpack_from(">I", head, 20 if head[0] == 1 else 12)
    at, layout = (20, ">IQ") if times[0] == 1 else (12, ">II")
    return _Track(number, *struct.unpack_from(layout, times, at))


def _usual_ticks(extends: memoryview, number: int) -> int:
    """Duration of a sample of a track, where a fragment does not say it."""
    for name, content in boxes(extends):
        if name == b"trex" and struct.unpack_from(">I", content, 4)[0] == number:
            ticks: int = struct.unpack_from(">I", content, 12)[0]
            return ticks
    return 0


def _fragment_ticks(part: memoryview, number: int, usual: int) -> int:
    """Duration of what a fragment has of a track."""
    head = find(part, b"tfhd")
    if head is None or struct.unpack_from(">I", head, 4)[0] != number:
        return 0
    flags, at = int.from_bytes(head[1:4], "big"), 8
    if flags & 8:
        at += 8 * (flags & 1) + 4 * (flags >> 1 & 1)
        (usual,) = struct.unpack_from(">I", head, at)
    return sum(_run_ticks(run, usual) for name, run in boxes(part) if name == b"trun")


def _run_ticks(run: memoryview, usual: int) -> int:
    """Duration of the samples of a run."""
    flags, (count,) = int.from_bytes(run[1:4], "big"), struct.unpack_from(">I", run, 4)
    if not flags & _DURATIONS:
        return count * usual
    begin, fields = 8 + _FIELD_BYTES * (flags & _RUN_FIELDS).bit_count(), flags & _SAMPLE_FIELDS
    each = fields.bit_count()
    whole = (len(run) - begin) // (_FIELD_BYTES * each)
    items = array("I", run[begin : begin + min(count, whole) * _FIELD_BYTES * each].tobytes())
    if sys.byteorder == "little":
        items.byteswap()
    return sum(items[::each])


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
        footer = 10 if data[at + 5] & _FOOTER else 0
        at += 10 + size + footer
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


def _mp3_seconds(data: memoryview, at: int, frame: _Mp3Frame, seconds_max: float) -> float:
    """Duration by a table, or else by all frames; beyond `seconds_max` these are not counted."""
    table = bytes(data[at + frame.table :][:12])
    if table[:4] in (b"Xing", b"Info"):
        flags, frames = struct.unpack_from(">II", table, 4)
        if flags & 1:
            return frames * frame.samples / frame.rate
    if bytes(data[at + 36 : at + 40]) == b"VBRI":
        (frames,) = struct.unpack_from(">I", data, at + 36 + 14)
        return frames * frame.samples / frame.rate
    seconds, found = 0.0, frame
    while found is not None and seconds <= seconds_max:
        seconds += found.samples / found.rate
        at += found.size
        found = _mp3_frame(data, at)
    return seconds
