"""Videos whose frames are seen as images are, one by one, each scaled to a square."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.model_card.images import Size, check_unscaled
from antiphon.model_card.videos import (
    EvenSampling,  # msgspec reads the fields of structs
    SeenVideo,
    SkippingSampling,
)

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits, VideoHeader


WORDS_MAX = 99
"""The largest number that is written in words."""
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number from 0 to `WORDS_MAX` in English."""
    if number < len(_ONES):
        return _ONES[number]
    ten, one = divmod(number, 10)
    return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")


class FrameVideos(msgspec.Struct, frozen=True, kw_only=True):
    """A frame is a tile of its own: InternVL, behind its number, LLaVA-OneVision, and SmolVLM.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        in_templates: Whether they know videos. Those of SmolVLM do not, as published, and
            transformers replaces them: the marker is a text to them, as which it comes to the same.
        frame_tokens: Rows of a frame.
        end_tokens: Rows behind the last frame.
        intro: Text before all of them, with places for their number in words, and the duration.
        before: Text before a frame, with places for its number, from 1 on, and its time; empty:
            none.
        after: Text behind it.
        between: Text between two frames.
        end: Text behind all of them.
        processing: Digest of what decides the embedding beside sampling and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    in_templates: bool = True
    sampling: EvenSampling | SkippingSampling
    frame_tokens: Size
    end_tokens: int = 0
    intro: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    processing: bytes

    def within(self, limits: PixelLimits) -> Self:
        """The card of videos whose frames are limited by their request.

        Raises:
            InvalidRequest: No video has so many, or they are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, sampling=self.sampling.within(limits))

    def seen(self, width: int, height: int, video: VideoHeader) -> SeenVideo:
        """What stands for a video, whose frames may have any size.

        Raises:
            InvalidRequest: It has too many frames.
        """
        del width, height
        indices, pieces = self.sampling.indices(video), list[str | int]()
        if not self.before:
            return SeenVideo((self.rows(len(indices)),), columns=0)
        if self.intro:
            seconds = int(video.frames / video.fps)
            length = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            pieces.append(self.intro.format(in_words(len(indices)), length))
        for number, index in enumerate(indices, start=1):
            seconds = int(index / video.fps)
            before = self.before.format(number, f"{seconds // 60:02d}:{seconds % 60:02d}")
            before = before if number == 1 else self.between + before
            pieces += [before, self.frame_tokens, self.after]
        if self.end:
            pieces.append(self.end)
        return SeenVideo(tuple(pieces), columns=0)

    def rows(self, frames: int) -> int:
        """Rows of the embedding of so many frames."""
        return frames * self.frame_tokens + self.end_tokens

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding beside its bytes."""
        settings = msgspec.json.encode([self.sampling, video])
        return hashlib.sha256(b"frames\0" + self.processing + settings).digest()
