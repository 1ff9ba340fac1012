"""A video as the list of its frames, which a client has chosen: encoded images in one medium."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.errors import InvalidRequest

FRAMES_MAX = 65_536
"""Maximum frames of a list."""
_MAGIC = b"antiphon frames\0"
_decoder = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[bytes, Meta(min_length=1)]], Meta(min_length=1, max_length=FRAMES_MAX)]
)


def pack_frames(frames: list[bytes]) -> bytes:
    """The content of a medium whose frames are these images."""
    return _MAGIC + msgspec.msgpack.encode(frames)


def is_frame_list(data: bytes | bytearray) -> bool:
    """Whether the content of a medium is such a list."""
    return data.startswith(_MAGIC)


def unpack_frames(data: bytes | bytearray) -> list[bytes]:
    """The images of such a medium.

    Raises:
        InvalidRequest: It is no list of frames, or they are too many.
    """
    try:
        return _decoder.decode(memoryview(data)[len(_MAGIC) :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a list of frames: {error}") from error
