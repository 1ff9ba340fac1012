"""Size, number of frames and duration of a video by its header, without a decoder.

Of MP4 and QuickTime files, whose first track of pictures is looked for. A file whose index is in
fragments has no number of frames in its header.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from antiphon.gateway.media.boxes import boxes, find, movie
from antiphon.gateway.media.header import read_header
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.frames import is_frame_list, unpack_frames

FORMATS: Final = ("MP4", "QuickTime")


class VideoFileHeader(NamedTuple):
    """Width and height are upright; `seconds` is 0 in a list of frames, which have no times."""

    width: int
    height: int
    frames: int
    seconds: float


def read_video_header(data: bytes | bytearray, frames_max: int) -> VideoFileHeader:
    """Read the header of a video.

    Raises:
        InvalidRequest: It is no video of these formats, or has more than `frames_max` frames.
    """
    if is_frame_list(data):
        return _of_list(unpack_frames(data), frames_max)
    try:
        header = _of_file(memoryview(data), frames_max)
    except (struct.error, IndexError):  # it ends too soon
        header = None
    if header is None or header.width <= 0 or header.height <= 0 or header.seconds <= 0:
        names = ", ".join(FORMATS)
        raise InvalidRequest(f"not a video of a known format ({names}) that says its frames")
    _check_frames(header.frames, frames_max)
    return header


def _check_frames(frames: int, frames_max: int) -> None:
    if frames > frames_max:
        raise InvalidRequest(f"the video has {frames} frames; the limit is {frames_max}")


def _of_list(frames: list[bytes], frames_max: int) -> VideoFileHeader:
    _check_frames(len(frames), frames_max)
    sizes: set[tuple[int, int]] = set()
    for frame in frames:
        if (header := read_header(frame)) is None:
            raise InvalidRequest("a frame of the video is not an image of a known format")
        sizes.add((header.width, header.height))
    if len(sizes) != 1:
        raise InvalidRequest("the frames of the video have several sizes")
    return VideoFileHeader(*sizes.pop(), frames=len(frames), seconds=0.0)


def _of_file(data: memoryview, frames_max: int) -> VideoFileHeader | None:
    index = movie(data)
    if index is None or find(index, b"mvex") is not None:  # in fragments
        return None
    for name, track in boxes(index):
        if name == b"trak" and (header := _of_track(track, frames_max)) is not None:
            return header
    return None


def _of_track(track: memoryview, frames_max: int) -> VideoFileHeader | None:
    """The header of a track; None if it has no pictures."""
    shown, media = find(track, b"tkhd"), find(track, b"mdia")
    if shown is None or media is None:
        return None
    handler, times = find(media, b"hdlr"), find(media, b"mdhd")
    table = find(media, b"minf", b"stbl")
    if handler is None or times is None or table is None or bytes(handler[8:12]) != b"vide":
        return None
    sizes, counts = find(table, b"stsd"), find(table, b"stts")
    if sizes is None or counts is None:
        return None
    width, height = struct.unpack_from(">HH", sizes, 8 + 8 + 24)  # of the first entry
    (scale,) = struct.unpack_from(">I", times, 20 if times[0] == 1 else 12)
    (entries,) = struct.unpack_from(">I", counts, 4)
    _check_frames(entries, frames_max)  # each has one at least
    rows = struct.unpack_from(f">{2 * entries}I", counts, 8)
    frames = sum(rows[::2])
    ticks = sum(map(int.__mul__, rows[::2], rows[1::2]))
    if not frames or not scale:
        return None
    a, b = struct.unpack_from(">ii", shown, 52 if shown[0] == 1 else 40)
    if a == 0 and b != 0:  # it is shown turned by a quarter
        width, height = height, width
    return VideoFileHeader(width, height, frames, ticks / scale)
