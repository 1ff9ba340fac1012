"""Videos whose frames are seen as images are, one by one, each scaled to a square."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.model_card.images import Size, check_unscaled
from antiphon.model_card.videos import (
    EvenSampling,  # msgspec reads the fields of structs
    SeenVideo,
)

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits, VideoHeader


class FrameVideos(msgspec.Struct, frozen=True, kw_only=True):
    """A frame is a tile of its own: InternVL, behind its number, and LLaVA-OneVision.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        frame_tokens: Rows of a frame.
        end_tokens: Rows behind the last frame.
        before: Text before a frame, with a place for its number, from 1 on; empty: none.
        after: Text behind it.
        between: Text between two frames.
        processing: Digest of what decides the embedding beside sampling and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    sampling: EvenSampling
    frame_tokens: Size
    end_tokens: int = 0
    before: str = ""
    after: str = ""
    between: str = ""
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
        count, pieces = len(self.sampling.indices(video)), list[str | int]()
        if not self.before:
            return SeenVideo((self.rows(count),), columns=0)
        for number in range(1, count + 1):
            before = self.before.format(number)
            pieces += [self.between + before if pieces else before, self.frame_tokens, self.after]
        return SeenVideo(tuple(pieces), columns=0)

    def rows(self, frames: int) -> int:
        """Rows of the embedding of so many frames."""
        return frames * self.frame_tokens + self.end_tokens

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding beside its bytes."""
        settings = msgspec.json.encode([self.sampling, video])
        return hashlib.sha256(b"frames\0" + self.processing + settings).digest()
