"""Headers of audio files: format and duration, whatever a stranger has written into them."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
from tests.support.whisper import RATE, encoded, tones, wav

from antiphon.gateway.media.audio_header import read_audio_header
from antiphon.wire.errors import InvalidRequest

SOUND = tones(2.5)
MP3 = encoded(SOUND, "mp3", "libmp3lame")
FILES = {
    "wav": wav(SOUND),
    "flac": encoded(SOUND, "flac", "flac"),
    "mp3": MP3,
    "ogg": encoded(SOUND, "ogg", "vorbis"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_has_the_duration_of_its_samples(kind: str) -> None:
    header = read_audio_header(FILES[kind])
    assert header.format == kind
    # An MP3 has whole frames, and the delay of its encoder.
    assert header.seconds == pytest.approx(2.5, abs=0.2 if kind == "mp3" else 1e-3)


def test_opus_counts_at_its_own_rate() -> None:
    data = encoded(tones(2.5, rate=48_000), "ogg", "libopus", 48_000)
    assert read_audio_header(data).seconds == pytest.approx(2.5, abs=0.05)


def test_an_mp3_without_a_table_is_counted_by_frames() -> None:
    table = max(MP3.find(b"Xing"), MP3.find(b"Info"))
    assert table > 0, "the encoder writes one"
    bare = MP3[:table] + b"none" + MP3[table + 4 :]
    assert read_audio_header(bare).seconds == pytest.approx(
        read_audio_header(MP3).seconds, abs=1152 * 2 / RATE
    )
    tagged = b"ID3\x04\x00\x00" + bytes([0, 0, 1, 5]) + bytes(133) + MP3
    assert read_audio_header(tagged) == read_audio_header(MP3)


def test_a_stream_whose_size_was_not_known_ends_with_the_file() -> None:
    data = FILES["wav"]
    at = data.find(b"data") + 4
    streamed = data[:at] + struct.pack("<I", 0xFFFFFFFF) + data[at + 4 :]
    assert read_audio_header(streamed) == read_audio_header(data)
    cut = read_audio_header(data[: len(data) // 2])
    assert cut.seconds == pytest.approx(1.25, abs=0.01), "what is not there has no duration"


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
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.7" * 100,
    ],
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not audio of a known format"):
        read_audio_header(data)


def test_random_changes_are_refused_or_read() -> None:
    chance = random.Random(5)
    for data in FILES.values():
        for _ in range(100):
            changed = bytearray(data[: chance.randrange(4, 4000)])
            for _ in range(chance.randrange(8)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            with suppress(InvalidRequest):
                assert read_audio_header(changed).seconds > 0
