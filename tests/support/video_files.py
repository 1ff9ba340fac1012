"""Files of videos, written by FFmpeg."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest

av: Any = pytest.importorskip("av")
WIDTH, HEIGHT, FRAMES, FPS = 64, 48, 30, 10


def written(codec: str = "mpeg4", form: str = "mp4") -> bytes:
    """A video that becomes lighter, and has a red bar at its left that becomes wider."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(FRAMES):
            pixels = np.full((HEIGHT, WIDTH, 3), 8 * number, np.uint8)
            pixels[:, : 2 * number] = (255, 0, 0)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def padded(data: bytes, size_bytes: int) -> bytes:
    """The same video in a file of so many bytes, whose index is at its end, as cameras write it."""
    at = data.rindex(b"moov") - 4
    assert at > data.index(b"mdat"), "what moves has no offsets"
    free = struct.pack(">I4s", size_bytes - len(data), b"free")
    return data[:at] + free + bytes(size_bytes - len(data) - len(free)) + data[at:]
