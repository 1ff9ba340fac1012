"""Sizes, frames and durations of videos by their index, and what is refused by it."""

from __future__ import annotations

import base64
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.llava import picture

from antiphon.config.gateway import MediaConfig
from antiphon.config.settings import EncoderConfig
from antiphon.gateway.media.intake import MediaIntake
from antiphon.gateway.media.video_header import read_video_header
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.service.clock import SystemClock
from antiphon.transfer.blobs import BlobStore
from antiphon.wire.claim import PixelLimits, VideoHeader
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.frames import pack_frames

if TYPE_CHECKING:
    from collections.abc import Callable

UPRIGHT, TURNED = (1 << 16, 0, 0, 0, 1 << 16, 0), (0, 1 << 16, 0, -1 << 16, 0, 0)


def box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I4s", 8 + len(data), kind) + data


def track(
    handler: bytes = b"vide",
    size: tuple[int, int] = (640, 480),
    times: tuple[tuple[int, int], ...] = ((90, 1000),),
    matrix: tuple[int, ...] = UPRIGHT,
    scale: int = 30_000,
    *,
    wide: bool = False,
) -> bytes:
    """A track of pictures: runs of frames that take so many ticks each; `wide` times."""
    version, words = (b"\1\0\0\0", ">QQIQ") if wide else (bytes(4), ">IIII")
    entry = bytes(8) + bytes(16) + struct.pack(">HH", *size) + bytes(50)
    rows = b"".join(struct.pack(">II", *each) for each in times)
    table = box(
        b"stbl",
        box(
            b"stsd",
            bytes(4),
            struct.pack(">I", 1),
            struct.pack(">I4s", 8 + len(entry), b"avc1"),
            entry,
        ),
        box(b"stts", bytes(4), struct.pack(">I", len(times)), rows),
    )
    shown = bytes(32 if wide else 20) + bytes(16) + struct.pack(">6i", *matrix) + bytes(20)
    return box(
        b"trak",
        box(b"tkhd", version, shown),
        box(
            b"mdia",
            box(b"mdhd", version, struct.pack(words, 0, 0, scale, 0), bytes(4)),
            box(b"hdlr", bytes(8), handler, bytes(13)),
            box(b"minf", table),
        ),
    )


def movie(*tracks: bytes) -> bytes:
    return box(b"ftyp", b"isom" + bytes(4)) + box(b"mdat", bytes(99)) + box(b"moov", *tracks)


@pytest.mark.parametrize("wide", [False, True])
def test_size_frames_and_duration_are_read(wide: bool) -> None:  # pytest's
    sound = track(b"soun", (0, 0))
    header = read_video_header(movie(sound, track(times=((60, 1000), (30, 2000)), wide=wide)), 90)
    assert header == (640, 480, 90, 4.0)
    assert read_video_header(movie(track(matrix=TURNED, wide=wide)), 90)[:2] == (480, 640)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG",
        movie(),
        movie(track(b"soun")),
        movie(track(times=())),  # fragmented
        movie(track(), box(b"mvex", box(b"trex", bytes(24)))),  # but for its first frames
        movie(track(scale=0)),
        movie(track(size=(0, 480))),
        movie(track(times=((5, 0),))),
        movie(track())[:200],
        box(b"ftyp") + struct.pack(">I4s", 4, b"moov"),
        box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"moov", 2**63),
    ],
)
def test_what_is_no_video_with_an_index_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a video of a known format"):
        read_video_header(data, 10**6)


def test_an_index_that_lies_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidRequest, match="has 4294967295 frames; the limit is 1000"):
        read_video_header(movie(track(times=((2**32 - 1, 1),))), 1000)
    entries = movie(track())
    at = entries.index(b"stts") + 8
    many = entries[:at] + struct.pack(">I", 2**31) + entries[at + 4 :]
    with pytest.raises(InvalidRequest, match="has 2147483648 frames"):
        read_video_header(many, 1000)


def test_no_malformed_index_raises_anything_else() -> None:
    drawn, right = random.Random(7), movie(track(b"soun"), track(matrix=TURNED))
    refused = 0
    for _ in range(500):
        data = bytearray(right)
        for _ in range(drawn.randint(1, 6)):
            data[drawn.randrange(len(data))] = drawn.choice([0, 1, 127, 255, drawn.randrange(256)])
        try:
            read_video_header(bytes(data[: drawn.randint(8, len(data))]), 10**6)
        except InvalidRequest:
            refused += 1
    assert refused > 250


def listed(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)


def opening(
    source: str | bytes, limits: PixelLimits | None = None, **encoder: Any
) -> Callable[[], Any]:
    async def open_() -> Any:
        store = BlobStore("a:1", 10**9, SystemClock())
        config = MediaConfig(video_bytes_max=10**6)
        intake = MediaIntake(config, store, EncoderConfig(**encoder))
        try:
            held = await intake.open([MediumSource(source, "part", video=True)], 9.0, limits)
        except InvalidRequest:
            assert not store.bytes_held
            raise
        finally:
            await intake.close()
        (header,) = held.headers
        held.discard()
        assert not store.bytes_held
        return header

    return open_


async def test_a_list_of_frames_has_the_rate_of_its_request() -> None:
    source = listed(picture(1), picture(2))
    header = await opening(source)()
    assert header.video == VideoHeader(frames=2, fps=2.0, chosen=True)
    limits = PixelLimits(fps=0.5)
    header = await opening(source, limits)()
    assert (header.video, header.limits) == (VideoHeader(frames=2, fps=0.5, chosen=True), limits)
    assert (header.width, header.height) == (40, 33)
    header = await opening(movie(track()))()
    assert header.video == VideoHeader(frames=90, fps=30.0)


@pytest.mark.parametrize("fps", [1e-4, 1e-310])
async def test_a_list_of_frames_takes_no_longer_than_a_file_may(fps: float) -> None:
    """Its seconds are written in prompts; of a rate that is almost 0 they are infinite."""
    source = listed(picture(1), picture(2))
    with pytest.raises(InvalidRequest, match=r"takes \S+ s; the limit is 3600 s"):
        await opening(source, PixelLimits(fps=fps))()


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        (movie(track()), {"pixels_max": 10**5}, "has 307200 pixels; the limit is 100000"),
        (movie(track()), {"video_pixels_max": 10**7}, "has 27648000 pixels; the limit is 10000000"),
        (movie(track()), {"video_seconds_max": 2.5}, "takes 3 s; the limit is 2.5 s"),
        (movie(track()), {"video_frames_max": 89}, "has 90 frames; the limit is 89"),
        (listed(picture(1), picture(1, 41, 33)), {}, "have several sizes"),
        (listed(picture(1), b"GIF"), {}, "is not an image of a known format"),
        (listed(picture(1), b""), {}, "not a list of frames"),
        (listed(*[picture(1)] * 3), {"video_frames_max": 2}, "has 3 frames; the limit is 2"),
        (pack_frames([]), {}, "not a list of frames"),
        (bytes(10**6 + 1), {}, "the video has 1000001 bytes; the limit is 1000000 bytes"),
        (picture(1), {}, "not a video of a known format"),
    ],
)
async def test_limits_are_checked_by_the_index(
    source: str | bytes, limits: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await opening(source, **limits)()
    assert caught.value.param == "part"
