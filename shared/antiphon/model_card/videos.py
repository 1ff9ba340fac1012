"""Which frames of a video a model sees."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_card.images import LIMITS, Size
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits, VideoHeader

PAIR = 2
"""Frames of a patch: its depth in all of these models."""


class FrameSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the preprocessors of Qwen-VL choose frames: so many a second, within limits.

    Attributes:
        fps: Frames a second that are seen.
        least: Of a video that has as many.
        most: Of any.
        ends: Whether the first and the last frame are among them, as in Qwen3-VL; else each stands
            for as many, from its own on, and their number is even.
    """

    fps: float = 2.0
    least: Size = 4
    most: Size = 768
    ends: bool = False

    def within(self, limits: PixelLimits) -> FrameSampling:
        """This sampling within the limits of a request.

        Raises:
            InvalidRequest: They exceed the model's, or leave no patch.
        """
        most = limits.frames or self.most
        if not PAIR <= most <= self.most:
            raise InvalidRequest.at(
                LIMITS, f"max_frames = {most}: must be from {PAIR} to {self.most}, the model's"
            )
        fps = limits.fps or self.fps
        return msgspec.structs.replace(self, fps=fps, most=most, least=min(self.least, most))

    def indices(self, video: VideoHeader) -> list[int]:
        """The frames that are seen, rising.

        Raises:
            InvalidRequest: The client has chosen more than the model sees.
        """
        total = video.frames
        if video.chosen:
            if total > self.most:
                raise InvalidRequest(f"the video has {total} frames; the limit is {self.most}")
            return [*range(total)]
        wanted = min(max(total / video.fps * self.fps, self.least), self.most, total)
        count = int(wanted) if self.ends else max(1, int(wanted) // PAIR * PAIR)
        if count == 1:
            return [0]
        if self.ends:
            between = (total - 1) / (count - 1)
            return [round(index * between) for index in range(count)]
        between = total / count
        return [_truncated(index * between) for index in range(count)]


def _truncated(place: float) -> int:
    """The whole part of a number, as of one in float32: 2.9999999999 is 3."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", place))
    return math.floor(rounded)
