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
    """A frame is a tile of its own, behind its number: InternVL.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        frame_tokens: Rows of a frame.
        before: Text before a frame, with a place for its number, from 1 on.
        after: Text behind it.
        between: Text between two frames.
        processing: Digest of what decides the embedding beside sampling and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    sampling: EvenSampling
    frame_tokens: Size
    before: str
    after: str
    between: str
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
        pieces: list[str | int] = []
        for number, _ in enumerate(self.sampling.indices(video), start=1):
            before = self.before.format(number)
            pieces += [self.between + before if pieces else before, self.frame_tokens, self.after]
        return SeenVideo(tuple(pieces), columns=0)

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding beside its bytes."""
        settings = msgspec.json.encode([self.sampling, video])
        return hashlib.sha256(b"frames\0" + self.processing + settings).digest()
