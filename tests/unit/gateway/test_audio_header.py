"""Headers of audio files: format and duration, whatever a stranger has written into them."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
from tests.support.whisper import RATE, encoded, tones, uncounted, wav

from antiphon.gateway.media import audio_header
from antiphon.gateway.media.audio_header import read_audio_header
from antiphon.gateway.media.flac import crc8
from antiphon.wire.errors import InvalidRequest

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "500000"}
SOUND, SOUND_48 = tones(2.5), tones(2.5, rate=48_000)
MP3 = encoded(SOUND, "mp3", "libmp3lame")
FILES = {
    "wav": wav(SOUND),
    "flac": encoded(SOUND, "flac", "flac"),
    "mp3": MP3,
    "ogg": encoded(SOUND, "ogg", "vorbis"),
    "ogg with flac": encoded(SOUND, "ogg", "flac"),
    "webm": encoded(SOUND_48, "webm", "libopus", 48_000),
    "webm of a browser": encoded(SOUND_48, "webm", "libopus", 48_000, container={"live": "1"}),
    "mp4": encoded(SOUND, "mp4", "aac"),
    "mp4 of a browser": encoded(SOUND, "mp4", "aac", container=FRAGMENTED),
}
HOUR_S = 3600.0


def seconds_of(data: bytes | bytearray) -> float:
    return read_audio_header(data, HOUR_S).seconds


@pytest.mark.parametrize("kind", FILES)
def test_a_file_has_the_duration_of_its_samples(kind: str) -> None:
    header = read_audio_header(FILES[kind], HOUR_S)
    assert header.format == kind.partition(" ")[0]
    # Some have whole frames, and the delay of an encoder.
    framed = kind[:3] in ("mp3", "mp4", "web")
    assert header.seconds == pytest.approx(2.5, abs=0.2 if framed else 1e-3)


def test_opus_counts_at_its_own_rate() -> None:
    data = encoded(tones(2.5, rate=48_000), "ogg", "libopus", 48_000)
    assert seconds_of(data) == pytest.approx(2.5, abs=0.05)


def test_a_flac_without_a_count_is_counted_by_its_last_frame() -> None:
    whole = FILES["flac"]
    data = uncounted(whole)
    assert seconds_of(data) == seconds_of(whole)
    for behind in (b"TAG" + bytes(125), b"\xff\xf8" * 2000, b"\xff\xf9\xc9\x08\x00"):
        assert seconds_of(data + behind) == seconds_of(whole)
    last = data.rfind(b"\xff\xf8")
    assert seconds_of(data[: last + 3]) < seconds_of(whole), "what is not there has no duration"
    broken = bytearray(data)
    broken[last + 4] ^= 1
    assert seconds_of(broken) < seconds_of(whole), "its checksum is wrong"
    endless = data + b"\xff\xf8" * 2**21
    with pytest.raises(InvalidRequest, match="says its duration"):
        seconds_of(endless)


def remainder(data: bytes) -> int:
    """That of the division by x^8 + x^2 + x + 1."""
    number = int.from_bytes(data, "big") << 8
    while (shift := number.bit_length() - 9) >= 0:
        number ^= 0x107 << shift
    return number


@pytest.mark.parametrize(
    ("sync", "codes", "number", "fields", "samples"),
    [
        ("fff8", "1508", "05", "", 5 * 4096 + 192),
        ("fff8", "5508", "dfbf", "", 2047 * 4096 + 4608),
        ("fff8", "7d08", "efbfbf", "00ff ac44", 65535 * 4096 + 256),
        ("fff9", "6c08", "fe b7bfbfbfbfbf", "0f 10", (0x37 << 30 | 2**30 - 1) + 16),
        ("fff9", "f508", "f0 908080", "", (0x10 << 12) + 32768),
    ],
)
def test_a_frame_of_a_flac_has_its_place_in_any_form(
    sync: str, codes: str, number: str, fields: str, samples: int
) -> None:
    """RFC 9639, section 9.1."""
    rate = 2**20 - 1
    info = struct.pack(">HH6xQ", 4096, 4096, rate << 44) + bytes(16)
    header = bytes.fromhex(sync + codes + number + fields)
    header += bytes([remainder(header)])
    assert crc8(header) == 0
    data = b"fLaC" + b"\x80\0\0\x22" + info + header
    if samples / rate > HOUR_S:
        with pytest.raises(InvalidRequest, match=f"takes at least {samples / rate:g} s"):
            seconds_of(data)
    else:
        assert seconds_of(data) == samples / rate


def test_an_mp3_without_a_table_is_counted_by_frames() -> None:
    table = max(MP3.find(b"Xing"), MP3.find(b"Info"))
    assert table > 0, "the encoder writes one"
    bare = MP3[:table] + b"none" + MP3[table + 4 :]
    assert seconds_of(bare) == pytest.approx(seconds_of(MP3), abs=1152 * 2 / RATE)
    head = bytes([0, 0, 1, 5]) + bytes(133)
    for tag in (
        b"ID3\x04\x00\x00" + head,
        b"ID3\x04\x00\x10" + head + b"3DI\x04\x00\x10" + head[:4],
    ):
        assert seconds_of(tag + MP3) == seconds_of(MP3)


def test_a_recording_of_a_browser_is_counted_by_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = FILES["webm of a browser"]
    assert b"\x44\x89\x88" not in recorded, "it has no duration"
    with pytest.raises(InvalidRequest, match=r"takes at least 1\.\d* s; the limit is 1 s"):
        read_audio_header(recorded, 1.0)
    cluster = recorded.find(b"\x1f\x43\xb6\x75")
    padded = recorded[:cluster] + b"\xec\x80" * 500 + recorded[cluster:]
    assert seconds_of(padded) == seconds_of(recorded)
    monkeypatch.setattr(audio_header, "ELEMENTS_MAX", 400)
    assert seconds_of(recorded) > 2
    with pytest.raises(InvalidRequest, match="says its duration"):
        seconds_of(padded)


@pytest.mark.parametrize("size", [8, 4000])
def test_a_scale_of_any_size_is_no_error(size: int) -> None:
    head = FILES["webm"].find(b"\x2a\xd7\xb1\x83")
    scale = b"\x2a\xd7\xb1" + (1 << 14 | size).to_bytes(2, "big") + b"\xff" * size
    changed = FILES["webm"][:head] + scale + FILES["webm"][head + 7 :]
    with pytest.raises(InvalidRequest):
        seconds_of(changed)


def test_frames_beyond_the_limit_are_not_counted() -> None:
    frame = b"\xff\xf3\x14\xc0".ljust(24, b"\0")  # MPEG-2, 8 kbit/s at 24 kHz: 24 ms
    with pytest.raises(InvalidRequest, match=r"takes at least 1\.\d* s; the limit is 1 s"):
        read_audio_header(frame * 2**17, 1.0)


def test_pages_without_a_position_are_passed_over_at_once() -> None:
    """A file of nothing but beginnings of pages: each is looked at once."""
    vorbis = FILES["ogg"]
    pages = b"OggS" + bytes(2) + b"\xff" * 8
    assert seconds_of(vorbis + pages) == seconds_of(vorbis)
    with pytest.raises(InvalidRequest, match="says its duration"):
        seconds_of(vorbis[:60] + pages * 10_000)


def test_a_stream_whose_size_was_not_known_ends_with_the_file() -> None:
    data = FILES["wav"]
    at = data.find(b"data") + 4
    streamed = data[:at] + struct.pack("<I", 0xFFFFFFFF) + data[at + 4 :]
    assert seconds_of(streamed) == seconds_of(data)
    cut = seconds_of(data[: len(data) // 2])
    assert cut == pytest.approx(1.25, abs=0.01), "what is not there has no duration"


def test_a_header_of_ten_hours_is_refused_with_both_numbers() -> None:
    """By what it says, whatever is behind it; absurd rates are none of a second of a file."""
    flac = bytearray(FILES["flac"])
    (packed,) = struct.unpack_from(">Q", flac, 18)
    flac[18:26] = struct.pack(">Q", packed >> 36 << 36 | 36_000 * RATE)
    with pytest.raises(InvalidRequest, match="takes at least 36000 s; the limit is 3600 s"):
        seconds_of(flac)
    slow = bytearray(FILES["wav"])
    slow[24:28] = struct.pack("<I", 1)
    with pytest.raises(InvalidRequest, match="takes at least 40000 s"):
        seconds_of(slow)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF",
        b"RIFF\x00\x00\x00\x00WAVE",
        b"OggS" + bytes(40),
        b"fLaC" + bytes(40),
        b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f",
        b"\xff\xfb",
        b"\x1a\x45\xdf\xa3",
        b"\x1a\x45\xdf\xa3\x00" + bytes(40),
        b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08moov",
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.7" * 100,
    ],
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not audio of a known format"):
        seconds_of(data)


def test_random_changes_are_refused_or_read() -> None:
    chance = random.Random(5)
    for data in (*FILES.values(), uncounted(FILES["flac"])):
        for _ in range(100):
            changed = bytearray(data[: chance.randrange(4, 4000)])
            for _ in range(chance.randrange(8)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            with suppress(InvalidRequest):
                assert seconds_of(changed) > 0
