"""Which frames of a video a model sees, and what stands for it in a prompt."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.model_card.vision.base import (
    LIMITS,
    AbstractMeta,
    Pieces,  # msgspec reads the fields of structs
    Size,
    single,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.claim import PixelLimits, VideoHeader

SKIPPED_S = 1.0
"""What SmolVLM does not see at each end of a long video."""
PAIR = 2
"""Frames of a patch: its depth in all of these models."""


class SeenVideo(msgspec.Struct, frozen=True):
    """What stands in a prompt for a video: a grid of so many times, or one for each pair of frames.

    Attributes:
        columns: Of tokens of each grid; 0: they are no grids.
        times: Depth of each grid.
        step: From one time to the next, in positions.
    """

    pieces: Pieces
    columns: int
    times: int = 1
    step: float = 1.0


class _Sampling(msgspec.Struct, metaclass=AbstractMeta, frozen=True, kw_only=True):
    """Which frames of a video are seen.

    Attributes:
        fps: Frames a second that are seen.
        most: Of any video.
    """

    fps: float
    most: Size

    def within(self, limits: PixelLimits) -> Self:
        """This sampling within the limits of a request.

        Raises:
            InvalidRequest: They exceed the model's, or leave no patch.
        """
        most = limits.frames or self.most
        if not PAIR <= most <= self.most:
            raise InvalidRequest.at(
                LIMITS, f"max_frames = {most}: must be from {PAIR} to {self.most}, the model's"
            )
        return msgspec.structs.replace(self, fps=limits.fps or self.fps, most=most)

    def indices(self, video: VideoHeader) -> list[int]:
        """The frames that are seen, rising.

        Raises:
            InvalidRequest: The client has chosen more than the model sees.
        """
        if not video.chosen:
            return self.spread(video)
        if video.frames > self.most:
            raise InvalidRequest(f"the video has {video.frames} frames; the limit is {self.most}")
        return [*range(video.frames)]

    @abstractmethod
    def spread(self, video: VideoHeader) -> list[int]:
        """Those of a video of which the client has chosen none."""

    def counted(self, indices: Sequence[int]) -> int:
        """By how many frames the sizes of a video go whose frames are these: whole patches."""
        return max(PAIR, len(indices))


class FrameSampling(_Sampling, frozen=True, kw_only=True, tag=True):
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
        limited = super().within(limits)
        return msgspec.structs.replace(limited, least=min(self.least, limited.most))

    def spread(self, video: VideoHeader) -> list[int]:
        total = video.frames
        wanted = min(max(total / video.fps * self.fps, self.least), self.most, total)
        count = int(wanted) if self.ends else max(1, int(wanted) // PAIR * PAIR)
        if count == 1:
            return [0]
        if self.ends:
            between = (total - 1) / (count - 1)
            return [round(index * between) for index in range(count)]
        between = total / count
        return [_truncated(index * between) for index in range(count)]


class SecondSampling(_Sampling, frozen=True, kw_only=True, tag=True):
    """How the preprocessor of GLM-4V chooses frames: the next one at each part of a second.

    Attributes:
        fps: Frames a second that are seen.
        seconds: Of a longer video as many as of one of this length, with equal times between.
        most: Of any.
    """

    fps: float = 2.0
    seconds: Size = 300
    most: Size = 600

    def spread(self, video: VideoHeader) -> list[int]:
        total = video.frames
        seconds = total / video.fps
        count = max(1, math.floor(seconds * self.fps))
        if seconds <= self.seconds and count <= self.most:
            places = [index * video.fps / self.fps for index in range(count)]
        else:
            count = max(1, min(int(self.seconds * self.fps), self.most))
            if count >= total:
                return [*range(total)]
            between = seconds / max(1, count - 1)
            times = [index * between for index in range(count)]
            if count > 1:
                times[-1] = seconds  # which the product may miss
            places = [each * video.fps for each in times]
        return [*dict.fromkeys(min(total - 1, math.ceil(place)) for place in places)]

    def counted(self, indices: Sequence[int]) -> int:
        """By how many frames the sizes of a video go whose frames are these: whole pairs."""
        return max(PAIR, len(indices) + len(indices) % PAIR)


class EvenSampling(_Sampling, frozen=True, kw_only=True, tag=True):
    """How InternVL and LLaVA-OneVision choose frames: a number of them, each of an equal part.

    Attributes:
        frames: How many, unless a request sets frames a second.
        middle: Whether a frame is the middle one of its part; else the first.
        fps: Frames a second; 0: so many as `frames` says.
        most: Of any.
    """

    frames: Size = 8
    middle: bool = True
    fps: float = 0.0
    most: Size = 128

    def spread(self, video: VideoHeader) -> list[int]:
        total = video.frames
        wanted = int(total / video.fps * self.fps) if self.fps else self.frames
        count = max(1, min(wanted, self.most, total))
        part = total / count
        first = part / 2 if self.middle else 0.0
        return [_truncated(first + index * part) for index in range(count)]


class SkippingSampling(_Sampling, frozen=True, kw_only=True, tag=True):
    """How SmolVLM chooses frames: so many a second, from the first to the last.

    Of a long video without what is at its ends: a second of each.

    Attributes:
        fps: Frames a second that are seen.
        most: Of any.
    """

    fps: float = 1.0
    most: Size = 64

    def spread(self, video: VideoHeader) -> list[int]:
        total, seconds = video.frames, video.frames / video.fps
        count = max(1, min(round(self.fps * seconds), self.most))
        first, last = 0, total - 1
        if seconds - 2 * SKIPPED_S > self.most * self.fps:
            skipped = int(SKIPPED_S * video.fps), int(total - SKIPPED_S * video.fps)
            if skipped[0] < min(skipped[1], last):
                first, last = skipped[0], min(skipped[1], last)
        if count == 1:
            return [first]
        between = (last - first) / (count - 1)
        places = [math.floor(index * between + first) for index in range(count - 1)]
        return sorted({*places, last})


Sampling = FrameSampling | SecondSampling | EvenSampling | SkippingSampling


def _truncated(place: float) -> int:
    """The whole part of a number, as of one in float32: 2.9999999999 is 3."""
    return math.floor(single(place))
